"""`tierstore plan`: how much memory, disk, network and processor a table needs, which designs
can serve it, and for how long.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from tierstore.cli.options import AsJson, option
from tierstore.cli.target import parse_number, parse_share
from tierstore.errors import InvalidInput, NotFound, NotReady
from tierstore.sizes import size_text

if TYPE_CHECKING:
    from tierstore.sizing.outlook import Growth, Swing
    from tierstore.sizing.plan import Design, Load, Machine, SizingPlan
    from tierstore.sizing.prices import Prices
    from tierstore.sizing.reuse import Measured, Reuse
    from tierstore.sizing.served import Compared, ServedTraffic

_NODE = "Of a node: "
ReuseFile = Annotated[
    Path | None, option("FILE", "Or as in this file of lines `rows,look-ups` (default: as measured of ads models).")
]
Changed = Annotated[
    str, typer.Option("--changed", metavar="SHARE", help="Of the rows, that deltas change between snapshots.")
]
Nodes = Annotated[int | None, option("N", "How many nodes there are (default: as many as are needed).", min=1)]
PricesFile = Annotated[
    Path | None,
    typer.Option(
        "--prices", metavar="FILE", help="Prices of memory, disk and cores, or of kinds of nodes (TOML or JSON)."
    ),
]
Grows = Annotated[
    str | None, typer.Option("--growth", metavar="SHARE", help="Rows and requests grow by that a month: 5%.")
]
PageFile = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page with plots, too.")]
From = Annotated[str | None, typer.Option("--from", metavar="URL", help="Or as a running service has it, for --table.")]
SAMPLE_S = 5.0  # that a running service is watched
_FIRST_AFTER = 16  # looked-up keys for each row of a cache, at most, after which its first estimate is there


def plan(
    rows: Annotated[str | None, option("N", "Rows of the table, such as 10e9.")] = None,
    dim: Annotated[int | None, option("N", "Numbers of a row.", min=1)] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "int8", "int4"] | None,
        option("TYPE", "As rows are stored (default: float16)."),
    ] = None,
    qps: Annotated[str, typer.Option("--qps", metavar="N", help="Requests a second, on all nodes together.")] = "0",
    keys: Annotated[int | None, option("N", "Keys of a request (default: 1000).", min=1)] = None,
    answers: Annotated[Literal["float32", "float16"], typer.Option(help="Numbers of the answers.")] = "float32",
    zipf: Annotated[float | None, option("S", "Look-ups follow Zipf's law with this exponent.")] = None,
    reuse: ReuseFile = None,
    measured: From = None,
    table: Annotated[str | None, option("MODEL/TABLE", "That of --from; its rows are as many, and as wide.")] = None,
    changed: Changed = "5%",
    expires: Annotated[bool, typer.Option("--expires", help="Rows have a ttl: their times take disk too.")] = False,
    nodes: Nodes = None,
    memory: Annotated[str | None, option("SIZE", _NODE + "memory (default: 64GiB).")] = None,
    disk: Annotated[str | None, option("SIZE", _NODE + "SSD (default: 2TiB).")] = None,
    reads: Annotated[str | None, option("N", _NODE + "random 4 KiB reads a second (default: 200e3).")] = None,
    network: Annotated[float | None, option("GBIT", _NODE + "Gbit a second (default: 25).")] = None,
    cores: Annotated[int | None, option("N", _NODE + "cores (default: 16).", min=1)] = None,
    prices: PricesFile = None,
    grows: Grows = None,
    page: PageFile = None,
    json: AsJson = False,
) -> None:
    """Show what a table needs, and which designs can serve it.

    Memory, disk, network, processors and hit rate, while all nodes are there and while one is
    away; and what moves the price.

    Nothing is opened or measured: the figures come from the formats and from published measurements. With --from the
    hit rate is that of the table as it is looked up now: its cache says what it would answer with less and more memory;
    and what is planned for it stands beside what the service measures.
    """
    from tierstore.sizing.plan import Load
    from tierstore.sizing.prices import ASSUMED, read_prices
    from tierstore.types import StorageDtype

    of_service = None if measured is None else _Served.read(measured, table, zipf, reuse)
    served: Mapping[str, Any] = {} if of_service is None else of_service.entry
    lookups = _reuse(zipf, reuse) if of_service is None else of_service.reuse
    if not served and (rows is None or dim is None):
        raise typer.BadParameter("expected --rows and --dim, or --from and --table")
    load = Load(
        parse_number("--rows", rows) if rows else served["rows"], dim or served["dim"],
        StorageDtype(dtype or served.get("dtype", "float16")), lookups, parse_number("--qps", qps), keys or 1000,
        2 if answers == "float16" else 4, parse_share(changed), expires=expires,
    )  # fmt: skip
    given = ASSUMED if prices is None else read_prices(prices)
    machine = _machine(memory, disk, reads, network, cores)
    if given.nodes and machine != type(machine)():
        raise typer.BadParameter(f"expected --memory, --disk and the like, or kinds of nodes in {prices}; got both")
    outlook = _Outlook.make(load, machine, nodes, given, grows, of_service, _assumed(load, keys, prices))
    if page is not None:
        _write_page(page, outlook, table)
    (_show_json if json else _show)(outlook)
    if outlook.plan.chosen is None:
        raise typer.Exit(1)


def _assumed(load: Load, keys: int | None, prices: Path | None) -> list[str]:
    """What nobody has given."""
    from tierstore.sizing.reuse import ADS

    found = {
        "no requests (--qps)": not load.qps,
        "1,000 keys a request (--keys)": keys is None,
        "keys as uneven as of ads models (--zipf, --reuse, --from)": load.reuse is ADS,
        "prices (--prices)": prices is None,
    }
    return [what for what, is_so in found.items() if is_so]


@dataclass(frozen=True)
class _Outlook:
    """All that is shown."""

    plan: SizingPlan
    swings: list[Swing]
    growth: Growth | None
    compared: list[Compared]
    assumed: list[str]  # what nobody has given

    @classmethod
    def make(
        cls, load: Load, machine: Machine, nodes: int | None, prices: Prices, grows: str | None,
        of_service: _Served | None, assumed: list[str]
    ) -> _Outlook:  # fmt: skip
        from tierstore.sizing.outlook import growth, sensitivity
        from tierstore.sizing.plan import plan as make_plan

        made = make_plan(load, machine, nodes, prices)
        return cls(
            made,
            sensitivity(made, machine, nodes),
            None if grows is None else growth(made, machine, parse_share(grows)),
            [] if of_service is None else of_service.compared(),
            assumed,
        )


def _machine(
    memory: str | None, disk: str | None, reads: str | None, network: float | None, cores: int | None
) -> Machine:
    from tierstore.sizing.plan import Machine

    given = {
        "memory": None if memory is None else _size("--memory", memory),
        "disk": None if disk is None else _size("--disk", disk),
        "reads": None if reads is None else parse_number("--reads", reads),
        "network": None if network is None else network * 1e9 / 8,
        "cores": cores,
    }
    return Machine(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _write_page(path: Path, outlook: _Outlook, table: str | None) -> None:
    from tierstore.sizing.page import page

    title = "Sizing of a table" if table is None else f"Sizing of {table}"
    text = page(outlook.plan, outlook.swings, outlook.growth, outlook.compared, title)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"--html: cannot write {path}: {error.strerror or error}") from error


def _show_json(outlook: _Outlook) -> None:
    from tierstore.cli import show

    made = outlook.plan
    document = {name: value for name, value in asdict(made).items() if name != "prices"}
    document["prices"] = made.prices.model_dump()
    document["load"] |= {"reuse": made.load.reuse.name, "dtype": made.load.dtype.value}
    document["chosen"] = None if made.chosen is None else made.chosen.name
    document["sensitivity"] = [asdict(swing) for swing in outlook.swings]
    document["growth"] = None if outlook.growth is None else asdict(outlook.growth)
    document["compared"] = [asdict(one) for one in outlook.compared]
    document["assumed"] = outlook.assumed
    show.as_json(document)


_COLUMNS = (
    "host_budget: memory for rows. rows in memory: of the table, in one node. disk: at its peak, while a snapshot is "
    "loaded. reads/s: of rows that memory lacks. cores: that are busy, and with one node away in those that remain. "
    "(!): not possible"
)


def _show(outlook: _Outlook) -> None:
    from rich.table import Table

    from tierstore.cli import show

    made = outlook.plan
    load, table, size = made.load, made.table, size_text
    say = typer.echo
    say(
        f"{load.rows:,.0f} rows of {load.dim} {load.dtype.value}: {load.row_bytes} bytes each, "
        f"{size(load.rows * load.row_bytes)} in all"
    )
    say(
        f"on disk      {size(table.version)} a version; {size(table.disk)} with the version kept for a rollback and "
        "what deltas changed"
    )
    say(f"             {size(table.disk_peak)} while the next snapshot is loaded")
    say(
        f"in memory    {size(table.all_in_memory)} for every row; {size(table.index)} for the index of a version that "
        "is open"
    )
    say(f"look-ups     {load.qps:,.0f} requests a second of {load.keys:,.0f} keys, {load.reuse.name}")
    if outlook.assumed:
        say(f"assumed      {', '.join(outlook.assumed)}")
    shown = Table(
        "design", "nodes", "host_budget", "rows in memory", "hit rate", "disk", "network out", "reads/s", "cores",
        "one away", f"{made.prices.currency} a month".strip(),
        title="each node", box=None, header_style="bold",
    )  # fmt: skip
    for design in made.designs:
        shown.add_row(*_columns(design, load.rows))
    show.console().print(shown)
    say(_COLUMNS)
    for design in made.designs:
        if design.behind:
            say(f"{design.name}: behind the nodes {design.behind}")
        for limit in design.limits:
            say(f"{design.name}: not possible, {limit}")
        for note in design.notes:
            say(f"{design.name}: {note}")
    if (chosen := made.chosen) is None:
        say("no design can serve this with such nodes: give --memory, --disk or --nodes more")
    else:
        say(f"chosen: {_of(chosen.name, chosen.nodes)} {chosen.machine.kind or ''}".rstrip())
        _show_swings(outlook.swings, chosen.monthly)
    if outlook.growth is not None:
        _show_growth(outlook.growth, f"{made.prices.currency} a month".strip())
    if outlook.compared:
        beside = Table("", "planned", "measured", title="as it is served now", box=None, header_style="bold")
        for one in outlook.compared:
            beside.add_row(one.what, one.shown(one.planned), one.shown(one.measured))
        show.console().print(beside)


def _of(name: str, nodes: int | None) -> str:
    return name if nodes == 1 else f"{name} of {nodes}"


def _show_swings(swings: list[Swing], now: float) -> None:
    from tierstore.sizing.outlook import SWING

    def change(price: float | None) -> str:
        return "not possible" if price is None else f"{100 * (price / now - 1):+.0f}%"

    texts = [f"{of.what} {change(of.less)} / {change(of.more)}" for of in swings if of.size(now) >= 0.005]
    if texts:
        typer.echo(f"the price, if one input is {100 * SWING:.0f}% less / more: {', '.join(texts)}")


def _show_growth(growth: Growth, currency: str) -> None:
    for of in growth.ends:
        when = (
            "lasts longer than is looked ahead"
            if of.month is None
            else "is not enough now"
            if not of.month
            else f"runs out in month {of.month}"
        )
        typer.echo(
            f"growing {100 * growth.share:g}% a month, {_of(of.design, of.nodes)}: {when}"
            + (f", {of.why}" if of.why else "")
        )
    for month in growth.months[12::12]:
        if month.design is not None:
            typer.echo(
                f"month {month.month}: {month.rows:,.0f} rows, {month.qps:,.0f} requests a second: "
                f"{_of(month.design, month.nodes)}, {month.monthly:,.0f} {currency}"
            )


def _columns(design: Design, rows: float) -> list[str]:
    node = design.node
    return [
        design.name,
        str(design.nodes),
        size_text(node.host_budget),
        f"{node.cached_rows:,.0f} ({100 * node.cached_rows / rows:.2f}%)",
        f"{100 * node.hit_rate:.1f}%",
        size_text(node.disk) if node.disk else "–",
        f"{size_text(node.network)}/s",
        f"{node.reads:,.0f}",
        f"{node.cores:.1f}",
        "–" if design.away is None else f"{design.away.cores:.1f}",
        f"{design.monthly:,.0f}" + (" (!)" if design.limits else ""),
    ]


@dataclass(frozen=True)
class _Served:
    """A table of a running service, and what the service did for some seconds."""

    entry: Mapping[str, Any]  # what the status says of it
    reuse: Measured
    traffic: ServedTraffic

    @classmethod
    def read(cls, url: str, name: str | None, zipf: float | None, file: Path | None) -> _Served:
        from tierstore.cli.target import make_client
        from tierstore.sizing.reuse import Measured
        from tierstore.sizing.served import ServedTraffic

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
            rows = max(1, entry["rows"])
            curve = [
                (of["rows"] / rows, rate) for of in entry["cache"]["curve"] if (rate := of["hit_rate"]) is not None
            ]
            if not curve:
                needed = _FIRST_AFTER * entry["cache"]["rows"]
                asked = sum(cast(Mapping[str, int], entry["lookup_keys"]).values())
                raise NotReady(
                    f"{url} does not know yet what the cache of {name} would do at other sizes: that takes at most "
                    f"{needed:,} looked-up keys ({_FIRST_AFTER} for each row that the cache has room for), and "
                    f"{asked:,} were looked up so far"
                )
            before, began_s = client.metrics(), time.monotonic()
            time.sleep(SAMPLE_S)
            traffic = ServedTraffic.between(before, client.metrics(), time.monotonic() - began_s)
        return cls(entry, Measured(f"as {name} is looked up now", curve), traffic)

    def compared(self) -> list[Compared]:
        from tierstore.sizing.plan import Load
        from tierstore.sizing.reuse import ADS
        from tierstore.sizing.served import compare
        from tierstore.types import StorageDtype

        entry = self.entry
        load = Load(
            max(1, entry["rows"]),
            entry["dim"],
            StorageDtype(entry["dtype"]),
            self.reuse,
            expires=bool(entry["ttl"]),
            changed=0.0,
        )
        return compare(load, entry, self.traffic, ADS)


def _reuse(zipf: float | None, file: Path | None) -> Reuse:
    from tierstore.sizing.reuse import ADS, Zipf, read_classes

    if zipf is not None and file is not None:
        raise typer.BadParameter("expected --zipf or --reuse, got both")
    if file is not None:
        return read_classes(file)
    return ADS if zipf is None else Zipf(zipf)


def _size(name: str, text: str) -> float:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return float(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InvalidInput(f"{name}: expected a size such as 64GiB, got {text!r}") from None
