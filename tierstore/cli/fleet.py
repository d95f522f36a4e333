"""Commands about several nodes: `rollout`, and the comparison behind `status` with more than one `--url`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tierstore.cli.options import AsJson, argument, option
from tierstore.cli.target import say

if TYPE_CHECKING:
    from tierstore.client.replicas import Comparison

NOT_RESTORED = 3  # exit code
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
