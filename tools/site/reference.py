"""Pages of the documentation site that are made of the code, as Markdown: commands, requests and the Python API."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import typer.main

import tierstore
from tierstore.cli.app import application
from tierstore.service.admin.pages import operations
from tools.make_metrics_page import a_service

CONTEXT = typer.Context(typer.main.get_command(application()))


def commands() -> str:
    """Every command with its arguments and options, as `--help` has them."""
    parts = ["# Commands\n\nWhat `--help` says. [The command line](../docs/cli.md) explains each with examples."]
    for name, command in typer.main.get_command(application()).commands.items():
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
    with a_service() as server, urlopen(f"{server.url}/openapi.json") as answer:
        document = json.load(answer)
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


def python() -> str:
    """Every public name; mkdocstrings puts its docstring there."""
    public = {name: getattr(tierstore, name) for name in sorted(tierstore.__all__)}
    errors = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Exception)}
    functions = {name for name, value in public.items() if not isinstance(value, type)}
    parts = [
        "# Python\n\n`import tierstore` has these names; `tierstore.onnx` and `tierstore.torch` are modules of it."
    ]
    for title, names in (("Functions", functions), ("Classes", public.keys() - functions - errors), ("Errors", errors)):
        parts.append(f"## {title}")
        parts += [
            _described(f"{public[name].__module__}.{public[name].__qualname__}", f"tierstore.{name}")
            for name in sorted(names)
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
