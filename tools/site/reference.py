"""Pages of the documentation site that are made of the code, as Markdown: commands, requests, metrics and the Python API."""

from __future__ import annotations

import ast
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer.main
from prometheus_client.core import Metric

import tierstore
from tierstore.cli.app import app
from tierstore.service.admin import metrics as service_metrics
from tierstore.service.admin.pages import operations
from tierstore.service.admin.routes import make_app
from tierstore.service.context import Service
from tierstore.service.server import ServerThread
from tierstore.service.sources import kafka_rows_status, kafka_status

CONTEXT = typer.Context(typer.main.get_command(app))
ANY = defaultdict(int, present=True, problem=None)  # of a status


def commands() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    parts = ["# Commands\n\nWhat `--help` says. [The command line](../docs/cli.md) explains each with examples."]
    for name, command in typer.main.get_command(app).commands.items():
        parts.append(f"## `tierstore {name}`\n\n{command.help}")
        for sub, one in getattr(command, "commands", {"": command}).items():
            if sub:
                parts.append(f"### `tierstore {name} {sub}`\n\n{one.help}")
            parts.append(_table(("", ""), map(_parameter, one.params)))
    parts.append("`serve` and what opens a data directory go by [settings](../docs/settings.md) too.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _parameter(parameter: Any) -> tuple[str, str]:
    name, text = parameter.get_help_record(CONTEXT)
    return f"`{name}`", text


def http() -> str:
    """The requests of the admin interface, of its OpenAPI document."""
    with _service() as service:
        document = make_app(service).openapi()
    parts = [
        "# HTTP requests\n\nThe admin interface, as its OpenAPI document (`/openapi.json`) has it; a service shows the same at `/docs`. "
        "[The HTTP API](../docs/http-api.md) explains it, and the requests for rows and scores."
    ]
    tag = ""
    for operation in operations(document):
        if operation.tag != tag:
            tag = operation.tag
            parts.append(f"## {tag.capitalize()}")
        parts.append(f"### `{operation.name}`\n\n{operation.text}")
        parts.append(_table(("", "type", ""), ((f"`{name}`", kind, text) for name, kind, text in operation.rows)))
        parts.append(f"```sh\n{operation.example}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def metrics() -> str:
    """Every metric that a service may have."""
    found = sorted(metric_families().values(), key=lambda family: family.name)
    rows = (
        (f"`{shown_name(family)}`", family.type, ", ".join(f"`{name}`" for name in _labels(family)), family.documentation)
        for family in found
    )
    return (
        "# Metrics\n\nWhat `GET /metrics` may have. [Its table in the HTTP API](../docs/http-api.md#metrics-get-metrics) "
        f"explains them.\n\n{_table(('metric', 'type', 'labels', ''), rows)}\n"
    )


def metric_families() -> dict[str, Metric]:
    """By name, the metrics of the service and of all parts that it can have."""
    with _service() as service:
        found = list(service_metrics.Everything(service).collect())
    found += service_metrics.device_families(ANY)
    found += service_metrics.ssd_cache_families(ANY, {})
    found += kafka_status.families(kafka_status.KafkaStats("").status(parked=0))
    rows = kafka_rows_status.RowStats("")
    found += kafka_rows_status.families([(rows, rows.status(parked=0))])
    return {family.name: family for family in found}


def shown_name(family: Metric) -> str:
    return family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")


def _labels(family: Metric) -> list[str]:
    return sorted({*getattr(family, "_labelnames", ()), *(name for sample in family.samples for name in sample.labels)} - {"le"})


@contextmanager
def _service() -> Iterator[Service]:
    """A service of an empty store that watches a directory and a location."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("deltas", "snapshots"):
            (root / folder).mkdir()
        settings = {"watch": root / "deltas", "watch_snapshots": [root / "snapshots"], "source_root": [root]}
        with tierstore.open(root / "data", port=0, host_budget="16MiB", **settings) as store, ServerThread(store) as server:
            yield server.service


def python() -> str:
    """Every public name; mkdocstrings puts its docstring there."""
    public = {name: getattr(tierstore, name) for name in sorted(tierstore.__all__)}
    errors = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Exception)}
    functions = {name for name, value in public.items() if not isinstance(value, type)}
    parts = ["# Python\n\n`import tierstore` has these names; `tierstore.onnx` and `tierstore.torch` are modules of it."]
    for title, names in (("Functions", functions), ("Classes", public.keys() - functions - errors), ("Errors", errors)):
        parts.append(f"## {title}")
        parts += [
            _described(f"{public[name].__module__}.{public[name].__qualname__}", f"tierstore.{name}") for name in sorted(names)
        ]
    for module in ("tierstore.onnx", "tierstore.torch"):
        parts.append(f"## `{module}`")
        parts += [_described(f"{module}.{name}", f"{module}.{name}") for name in _exported(module)]
    return "\n\n".join(parts) + "\n"


def _described(name: str, heading: str) -> str:
    return f"::: {name}\n    options:\n      heading: {heading}\n      toc_label: {heading.rpartition('.')[2]}"


def _exported(module: str) -> list[str]:
    """`__all__` of a module, which is not imported: it may need PyTorch."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    for one in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and one.targets[0].id == "__all__":
            return list(ast.literal_eval(one.value))
    raise ValueError(f"{module} has no __all__")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines]) if lines else ""


def _cell(text: str) -> str:
    return (text if text.startswith("`") else text.replace("<", "&lt;")).replace("|", "\\|").replace("\n", " ")
