"""`tierstore parked`: messages of a source that could not be applied, for a person to decide about."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore.cli.options import AsJson, Data, Url, argument, option
from tierstore.cli.target import open_target, say

parked = typer.Typer(help="Messages that could not be applied: list, show, retry, skip.", no_args_is_help=True)
ParkedId = Annotated[str, argument("ID", "As `tierstore parked list` shows it.")]


@parked.command("list")
def list_(
    data: Data = None,
    url: Url = None,
    all_states: Annotated[bool, typer.Option("--all", help="Also those that were retried or skipped.")] = False,
    json: AsJson = False,
) -> None:
    """List them, in the order of their positions in the topic."""
    with open_target(data, url) as target:
        found = target.parked(all_states)
    say(json, found, _show_all if found else "nothing is parked")


def _show_all(found: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from tierstore.cli import show

    table = Table("id", "model", "seq", "bytes", "state", "reason", box=None, header_style="bold")
    for record in found:
        columns = ("id", "model", "seq", "nbytes", "state", "reason")
        table.add_row(*(show.printable(record[name]) for name in columns))
    show.console().print(table)


@parked.command("show")
def show_(
    name: ParkedId,
    data: Data = None,
    url: Url = None,
    out: Annotated[Path | None, option("FILE", "Write the payload to a file.")] = None,
    json: AsJson = False,
) -> None:
    """Show one, with its position and the reason."""
    with open_target(data, url) as target:
        record = target.parked_message(name)
        if out is not None:
            out.write_bytes(target.parked_payload(name))
    say(json, record, _show_one)


def _show_one(record: dict[str, Any]) -> None:
    from tierstore.cli.show import printable

    for field, value in record.items():
        text = value
        if field == "timestamp_ms" and value:
            text = datetime.fromtimestamp(value / 1000, UTC).isoformat(timespec="milliseconds")
        typer.echo(f"{field:13} {printable(text)}")


@parked.command()
def retry(name: ParkedId, data: Data = None, url: Url = None, json: AsJson = False) -> None:
    """Apply one now. What fails stays parked."""
    with open_target(data, url) as target:
        record = target.retry_parked(name)
    say(json, record, f"{name} is {'applied' if record['applied'] else 'held already'}")


@parked.command()
def skip(name: ParkedId, data: Data = None, url: Url = None, json: AsJson = False) -> None:
    """Do without one: a delta without rows gets its seq, and the model goes on."""
    with open_target(data, url) as target:
        record = target.skip_parked(name)
    seq = f"; delta {record['seq']} of {record['model']} is empty" if record["applied"] else ""
    say(json, record, f"{name} is skipped{seq}")
