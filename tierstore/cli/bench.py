"""`tierstore bench`: what this machine gives, and how much of that the store gets out of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli.options import AsJson

if TYPE_CHECKING:
    from tierstore.bench import Figure, Report


def bench(
    where: Annotated[
        Path,
        typer.Option(
            "--where", metavar="DIR", help="A directory on the drive to measure; a temporary one is made in it."
        ),
    ] = Path(),
    rows: Annotated[str, typer.Option(metavar="N", help="Rows of the table, such as 20e6.")] = "2_000_000",
    dim: Annotated[int, typer.Option(metavar="N", min=1, max=4096, help="Numbers of a row.")] = 32,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="As rows are stored.")] = "float32",
    json: AsJson = False,
) -> None:
    """Measure this machine against its own limits.

    Loads, deltas, and look-ups from memory, from the drive and over HTTP, each beside what memory, the drive and a
    socket give here. Takes half a minute, once kernels are compiled.
    """
    from tierstore import bench as measured
    from tierstore.cli.target import parse_number, say, say_aside
    from tierstore.types import StorageDtype

    try:
        stored = StorageDtype(dtype)
    except ValueError:
        raise typer.BadParameter(f"--dtype: expected {', '.join(StorageDtype)}, got {dtype}") from None
    report = measured.run(where, int(parse_number("--rows", rows)), dim, stored, note=say_aside)
    say(json, report.document(), lambda _: _show(report))


def _show(report: Report) -> None:
    from rich.table import Table

    from tierstore.cli import show

    out = show.console()
    out.print(f"{report.rows:,} rows × {report.dim} {report.dtype}; {report.machine}", highlight=False)
    table = Table("", "here", "limit", "share", "the limit is to", box=None, header_style="bold")
    for figure in report.figures:
        here, limit = shown(figure.value, figure), shown(figure.limit, figure)
        table.add_row(figure.name, here, limit, f"{figure.share:.2f}", figure.limit_is)
    out.print(table)
    for note in report.notes:
        out.print(f"[yellow]note:[/] {note}", highlight=False)


def shown(value: float, figure: Figure) -> str:
    """A rate or a time for a person: `12.3 M rows/s`, `84 µs`."""
    if figure.unit.endswith("/s"):
        size, scale = ("M ", 1e6) if value >= 1e6 else ("", 1.0)
        return f"{value / scale:,.1f} {size}{figure.unit}" if scale > 1 else f"{value:,.0f} {figure.unit}"
    return f"{value * 1e3:,.2f} ms" if value >= 1e-3 else f"{value * 1e6:,.0f} µs"
