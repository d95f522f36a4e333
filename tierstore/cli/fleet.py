"""Commands about several nodes: `rollout`, and the comparison behind `status` with more than one `--url`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tierstore.cli.options import AsJson, argument, option
from tierstore.cli.target import make_client, open_target, say, service_url
from tierstore.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tierstore.client import whole
    from tierstore.client.replicas import Comparison

NOT_RESTORED = 3  # exit code
_SHOWN_KEYS = 20
_LASTS_S = 3600.0  # that a node may take to read every row


Nodes = Annotated[
    list[str],
    typer.Option(
        "--nodes",
        "--url",
        metavar="URL,URL…",
        help="The nodes, each reached directly and not through a load balancer; may be repeated.",
    ),
]


def rollout(
    snapshot: Annotated[
        str, argument("SNAPSHOT", "The directory of a snapshot, or of a built version, as the nodes see it.")
    ],
    nodes: Nodes,
    policy: Annotated[
        Literal["one-by-one", "all-at-once"],
        typer.Option("--policy", help="Switch and check one node after the other, or all at the same time."),
    ] = "one-by-one",
    model: Annotated[str | None, option("MODEL", "The model; by default read from the snapshot.")] = None,
    version: Annotated[int | None, option("N", "The version; by default read from the snapshot.", min=1)] = None,
    max_wait: Annotated[
        str, typer.Option("--max-wait", metavar="TIME", help="For the load, and again for the warm-up: 90s, 30m, 2h.")
    ] = "1h",
    check: Annotated[
        str, typer.Option("--check", metavar="TIME", help="How long errors are counted after a switch.")
    ] = "10s",
    canary: Annotated[
        str | None,
        option("SHARE", "Give the version so much of all requests first, such as 5%, and wait for the verdict."),
    ] = None,
    trial: Annotated[
        str, typer.Option("--for", metavar="TIME", help="With --canary: how long it must do as well as what serves.")
    ] = "10m",
    json: AsJson = False,
) -> None:
    """Load a snapshot on several nodes, then switch them.

    Goes back on every node if one fails. Started again, it continues. Exit code 1: failed, and every node serves what
    it served before; 3: some node does not.
    """
    from tierstore.cli import show
    from tierstore.cli.target import parse_share
    from tierstore.client.environment import client_options
    from tierstore.client.rollout import rollout as roll_out
    from tierstore.errors import RolloutFailed, explained

    urls = [url.strip() for group in nodes for url in group.split(",")]
    try:
        report = roll_out(
            snapshot,
            urls,
            model=model,
            version=version,
            policy=policy,
            max_wait_s=parse_seconds(max_wait),
            check_s=parse_seconds(check),
            canary=None if canary is None else parse_share(canary),
            canary_s=parse_seconds(trial),
            say=lambda line: typer.echo(line, err=True),
            **client_options(urls),
        )
    except RolloutFailed as error:
        typer.echo(f"tierstore: {explained(error)}", err=True)
        if json:
            show.as_json({"restored": error.restored, "error": explained(error)})
        raise typer.Exit(1 if error.restored else NOT_RESTORED) from None
    switched = f"{len(report.switched)} of {len(urls)} nodes were switched" if report.switched else "they did already"
    text = f"{report.model} version {report.version} serves on {len(urls)} nodes; {switched} ({report.seconds:.1f} s)"
    say(json, asdict(report), text)


def compare_nodes(urls: list[str], model: str | None, json: bool) -> None:
    """Print whether nodes serve the same; exit code 1 where they do not."""
    from contextlib import ExitStack

    from tierstore.cli import show
    from tierstore.client import Client
    from tierstore.client.base import parse_addresses
    from tierstore.client.environment import client_options
    from tierstore.client.replicas import compare_replicas

    options = client_options(urls)
    with ExitStack() as stack:
        addresses = [address.url for address in parse_addresses(urls)]
        clients = {url: stack.enter_context(Client(url, **options)) for url in addresses}
        errors, models = compare_replicas(clients, model)
    equal = not errors and not any(one.problems for one in models)
    if json:
        documents = {one.model: asdict(one) for one in models}
        show.as_json({"equal": equal, "nodes": addresses, "unreachable": errors, "models": documents})
    else:
        for one in models:
            _show(one)
        for url, error in errors.items():
            typer.echo(f"problem: {url}: {error}")
        typer.echo(f"{len(addresses)} nodes serve the same" if equal else "the nodes differ")
    if not equal:
        raise typer.Exit(1)


def _show(one: Comparison) -> None:
    from rich.markup import escape
    from rich.table import Table

    from tierstore.cli import show

    table = Table("node", "version", "watermark", "canary", title=escape(one.model), box=None, header_style="bold")
    for url, state in one.nodes.items():
        canary = "–" if state["canary"] is None else str(state["canary"]["version"])
        table.add_row(escape(url), str(state["active_version"] or "–"), str(state["watermark"]), canary)
    show.console().print(table)
    for problem in one.problems:
        typer.echo(f"problem: {problem}")
    if one.rows is not None and one.rows.seq is not None:
        typer.echo(f"{one.rows.keys:,} sampled rows were compared at seq {one.rows.seq}")


def parse_seconds(text: str) -> float:
    """A time from the command line: `90s`, `30m`, `2h`, or seconds."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise typer.BadParameter(f"expected a time such as 90s, 30m or 2h, got {text!r}")
    return seconds


def compare_whole(data: Path | None, url: str | None, against: str, json: bool) -> None:
    """Compare every row that a data directory or a service serves with another node. Ends with 1 where they differ."""
    from tierstore.client import whole

    name = service_url(data, url) or "the data directory"
    if name == against:
        raise typer.BadParameter(f"--against: expected another node than {name}")
    with open_target(data, url, timeout_s=_LASTS_S) as target, make_client(against, timeout_s=_LASTS_S) as other:
        status, there = target.status(), other.status()["models"]
        nodes: dict[str, whole.ComparedNode] = {name: target, against: other}
        here, found = set(status["models"]), []
        problems = [f"{against} has no model {model!r}" for model in sorted(here - there.keys())]
        problems += [f"only {against} has model {model!r}" for model in sorted(there.keys() - here)]
        for model in sorted(here & there.keys()):
            if status["models"][model]["active_version"] is None and there[model]["active_version"] is None:
                continue  # nothing is served of it, which is the same
            try:
                compared = whole.compare_whole(nodes, model)
            except Conflict as error:  # other models may well be compared
                problems.append(str(error))
                continue
            found.append(_whole_document(compared, status["models"][model]["tables"]))
            problems += [f"{model}: {problem}" for problem in compared.problems]
    if not (found or problems):
        problems = [f"nothing was compared: neither {name} nor {against} serves a model"]
    document = {"ok": not problems, "models": found, "problems": problems}
    say(json, document, "\n".join(_whole_lines(document)))
    if problems:
        raise typer.Exit(1)


def _whole_document(compared: whole.WholeComparison, tables: Mapping[str, Any]) -> dict[str, Any]:
    """A comparison with keys as a person knows them; of strings the hash, as they are not kept."""
    document = asdict(compared)
    for name, table in document["tables"].items():
        kind = tables[name]["key"]
        for entry in table["differing"]:
            unsigned = entry["key"] & (1 << 64) - 1
            entry["key"] = {"uint64": unsigned, "string": f"{unsigned:016x}"}.get(kind, entry["key"])
    return document


def _whole_lines(document: dict[str, Any]) -> Iterator[str]:
    for model in document["models"]:
        rows = sum(max(table["rows"].values()) for table in model["tables"].values())
        yield f"{model['model']} version {model['version']} at seq {model['seq']}: {rows:,} rows of each node compared"
        for name, table in model["tables"].items():
            if not (differing := table["differing"]):
                continue
            held = ", ".join(f"{count:,} on {node}" for node, count in table["rows"].items())
            least = "at least " if table["more"] else ""
            yield f"table {name} ({held}): {least}{len(differing):,} keys differ"
            for entry in differing[:_SHOWN_KEYS]:
                both = len(entry["on"]) == len(table["rows"])
                yield f"  {entry['key']}: " + ("another row" if both else f"only on {', '.join(entry['on'])}")
            if len(differing) > _SHOWN_KEYS:
                yield f"  and {len(differing) - _SHOWN_KEYS:,} more; --json has them"
    yield from (f"problem: {problem}" for problem in document["problems"])
    yield f"{len(document['problems'])} problems" if document["problems"] else "all is equal"
