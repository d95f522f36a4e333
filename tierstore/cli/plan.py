"""`tierstore plan`: how much memory, disk and network a table needs, and which designs can serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tierstore.cli.options import AsJson, option
from tierstore.cli.target import parse_share
from tierstore.errors import InvalidInput, NotFound, NotReady

if TYPE_CHECKING:
    from tierstore.sizing.plan import Design, Plan
    from tierstore.sizing.reuse import Measured, Reuse

_NODE = "Of a node: "
ReuseFile = Annotated[
    Path | None, option("FILE", "Or as in this file of lines `rows,look-ups` (default: as measured of ads models).")
]
Changed = Annotated[
    str, typer.Option("--changed", metavar="SHARE", help="Of the rows, that deltas change between snapshots.")
]
Nodes = Annotated[int | None, option("N", "How many nodes there are (default: as many as are needed).", min=1)]
MemoryPrice = Annotated[
    float, typer.Option("--memory-price", metavar="P", help="Of a GiB of memory and a month, in any currency.")
]


def plan(
    rows: Annotated[str | None, option("N", "Rows of the table, such as 10e9.")] = None,
    dim: Annotated[int | None, option("N", "Numbers of a row.", min=1)] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8"] | None,
        option("TYPE", "As rows are stored (default: float16)."),
    ] = None,
    qps: Annotated[str, typer.Option("--qps", metavar="N", help="Requests a second, on all nodes together.")] = "0",
    keys: Annotated[int, typer.Option("--keys", metavar="N", min=1, help="Keys of a request.")] = 1000,
    answers: Annotated[Literal["float32", "float16"], typer.Option(help="Numbers of the answers.")] = "float32",
    zipf: Annotated[float | None, option("S", "Look-ups follow Zipf's law with this exponent.")] = None,
    reuse: ReuseFile = None,
    measured: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="Or as a running service has it, for --table.")
    ] = None,
    table: Annotated[
        str | None, option("MODEL/TABLE", "The table of --from; its rows are as many, and as wide.")
    ] = None,
    changed: Changed = "5%",
    expires: Annotated[bool, typer.Option("--expires", help="Rows have a ttl: their times take disk too.")] = False,
    nodes: Nodes = None,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help=_NODE + "memory.")] = "64GiB",
    disk: Annotated[str, typer.Option("--disk", metavar="SIZE", help=_NODE + "SSD.")] = "2TiB",
    reads: Annotated[str, typer.Option("--reads", metavar="N", help=_NODE + "random 4 KiB reads a second.")] = "200e3",
    network: Annotated[float, typer.Option("--network", metavar="GBIT", help=_NODE + "Gbit a second.")] = 25.0,
    cores: Annotated[int, typer.Option("--cores", metavar="N", min=1, help=_NODE + "cores.")] = 16,
    memory_price: MemoryPrice = 3.0,
    disk_price: Annotated[float, typer.Option("--disk-price", metavar="P", help="Of a GiB of SSD and a month.")] = 0.1,
    json: AsJson = False,
) -> None:
    """Show what a table needs, and which designs can serve it.

    Memory, disk, network and hit rate.

    Nothing is opened or measured: the figures come from the formats and from published measurements. With --from the hit
    rate is that of the table as it is looked up now: its cache says what it would answer with less and more memory.
    """
    from tierstore.sizing.plan import Load, Machine
    from tierstore.sizing.plan import plan as make_plan
    from tierstore.types import StorageDtype

    served, lookups = ({}, _reuse(zipf, reuse)) if measured is None else _served(measured, table, zipf, reuse)
    if not served and (rows is None or dim is None):
        raise typer.BadParameter("expected --rows and --dim, or --from and --table")
    load = Load(
        _number("--rows", rows) if rows else served["rows"], dim or served["dim"],
        StorageDtype(dtype or served.get("dtype", "float16")), lookups, _number("--qps", qps), keys,
        2 if answers == "float16" else 4, parse_share(changed), expires=expires,
    )  # fmt: skip
    machine = Machine(
        _size("--memory", memory), _size("--disk", disk), _number("--reads", reads), network * 1e9 / 8, cores,
        memory_price, disk_price,
    )  # fmt: skip
    made = make_plan(load, machine, nodes)
    (_show_json if json else _show)(made)
    if made.chosen is None:
        raise typer.Exit(1)


def _show_json(made: Plan) -> None:
    from tierstore.cli import show

    document = asdict(made)
    document["load"] |= {"reuse": made.load.reuse.name, "dtype": made.load.dtype.value}
    show.as_json(document)


def _show(made: Plan) -> None:
    from rich.table import Table

    from tierstore.cli import show

    load, table, size = made.load, made.table, show.size
    say = typer.echo
    say(
        f"{load.rows:,.0f} rows of {load.dim} {load.dtype.value}: {load.row_bytes} bytes each, {size(load.rows * load.row_bytes)} in all"
    )
    say(
        f"on disk      {size(table.version)} a version; {size(table.disk)} with the version kept for a rollback and what deltas changed"
    )
    say(f"             {size(table.disk_peak)} while the next snapshot is loaded")
    say(
        f"in memory    {size(table.all_in_memory)} for every row; {size(table.index)} for the index of a version that is open"
    )
    say(f"look-ups     {load.qps:,.0f} requests a second of {load.keys:,} keys, {load.reuse.name}")
    shown = Table(
        "design", "nodes", "host_budget", "rows in memory", "hit rate", "disk", "network out", "reads/s", "cores", "a month",
        title="each node", box=None, header_style="bold",
    )  # fmt: skip
    for design in made.designs:
        shown.add_row(*_columns(design, load.rows))
    show.console().print(shown)
    for design in made.designs:
        if design.behind:
            say(f"{design.name}: behind the nodes {design.behind}")
        for limit in design.limits:
            say(f"{design.name}: not possible, {limit}")
        for note in design.notes:
            say(f"{design.name}: {note}")
    say(
        f"chosen: {made.chosen}"
        if made.chosen
        else "no design can serve this with such nodes: give --memory, --disk or --nodes more"
    )


def _columns(design: Design, rows: float) -> list[str]:
    from tierstore.cli.show import size

    node = design.node
    return [
        design.name,
        str(design.nodes),
        size(node.host_budget),
        f"{node.cached_rows:,.0f} ({100 * node.cached_rows / rows:.2f}%)",
        f"{100 * node.hit_rate:.1f}%",
        size(node.disk) if node.disk else "–",
        f"{size(node.network)}/s",
        f"{node.reads:,.0f}",
        f"{node.cores:.1f}",
        f"{design.monthly:,.0f}" + (" (!)" if design.limits else ""),
    ]


def _served(url: str, name: str | None, zipf: float | None, file: Path | None) -> tuple[Mapping[str, Any], Measured]:
    """(a table's entry in the status of a running service, its hit rates by size)."""
    from tierstore.cli.target import make_client
    from tierstore.sizing.reuse import Measured

    if zipf is not None or file is not None:
        raise typer.BadParameter("expected --zipf, --reuse or --from, got two")
    model, _, table = (name or "").partition("/")
    if not table:
        raise typer.BadParameter(f"--table: expected MODEL/TABLE, got {name!r}")
    with make_client(url) as client:
        tables = client.status(model)["models"][model]["tables"]
    if table not in tables:
        raise NotFound(f"no table {table!r}; model {model!r} has {', '.join(sorted(tables))}")
    entry = tables[table]
    width = max(1, entry["rows"])
    points = [
        (point["rows"] / width, rate) for point in entry["cache"]["curve"] if (rate := point["hit_rate"]) is not None
    ]
    if not points:
        raise NotReady(f"{url} does not know yet what the cache of {name} would do at other sizes: it takes look-ups")
    return entry, Measured(f"as {name} is looked up now", points)


def _reuse(zipf: float | None, file: Path | None) -> Reuse:
    from tierstore.sizing.reuse import ADS, Zipf, read_classes

    if zipf is not None and file is not None:
        raise typer.BadParameter("expected --zipf or --reuse, got both")
    if file is not None:
        return read_classes(file)
    return ADS if zipf is None else Zipf(zipf)


def _number(name: str, text: str) -> float:
    try:
        return float(text.replace("_", ""))
    except ValueError:
        raise typer.BadParameter(f"{name}: expected a number such as 10e9, got {text!r}") from None


def _size(name: str, text: str) -> float:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return float(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InvalidInput(f"{name}: expected a size such as 64GiB, got {text!r}") from None
