"""`tierstore token`: who may use a service. Works on the file of tokens alone, whether or not a service runs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.access.roles import Rates, Role
from tierstore.cli.options import AsJson, Data, option
from tierstore.cli.target import local_user, say
from tierstore.errors import NotFound

if TYPE_CHECKING:
    from tierstore.access.tokens import Token, TokenFile

token = typer.Typer(
    help="Tokens: who may use a service. As soon as there is one, every request but health needs a token.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}

File = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        help="The file of tokens (default: the setting `tokens`, or tokens.json in the data directory).",
        show_default=False,
    ),
]


def _file(data: Path | None, tokens: Path | None) -> TokenFile:
    from tierstore.access.tokens import TokenFile

    if tokens is not None:
        return TokenFile(tokens)
    from tierstore.config import load_settings
    from tierstore.formats.names import DataDirectory

    settings = load_settings(data=data)
    return TokenFile(settings.tokens or DataDirectory(settings.data).tokens)


def _end(text: str | None) -> datetime | None:
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", text)
    if match is None:
        raise typer.BadParameter(f"expected a time such as 12h, 30d or 8w, got {text!r}")
    return datetime.now(UTC).replace(microsecond=0) + timedelta(**{_UNITS[match[2]]: int(match[1])})


def _document(entry: Token) -> dict[str, Any]:
    document = entry.document()
    document.pop("sha256", None)
    return document


def _note(file: TokenFile, change: str, entry: Token) -> None:
    """Add a line to the audit that lies next to the file of tokens."""
    from tierstore.access.audit import Audit

    audit = Audit(file.path.parent)
    audit.change(change, local_user(), "done", token=_document(entry))
    audit.close()


@token.command()
def create(
    role: Annotated[
        Role,
        typer.Option(
            help="metrics: read metrics; reader: look rows up, predict, read status; front: be a node in front of "
            "this one as well; writer: send deltas as well; admin: everything.",
            show_default=False,
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Limit it to a model; may be given again.", show_default=False),
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(metavar="TIME", help="End it after so long: 12h, 30d, 8w.", show_default=False)
    ] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="What it is for.", show_default=False)] = "",
    certificate: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Make no secret: callers with a client certificate of this URI or DNS name (or, without such names, "
            "common name) have the role.",
            show_default=False,
        ),
    ] = None,
    requests_per_second: Annotated[float | None, option("N", "The most requests of its holder in a second.")] = None,
    keys_per_second: Annotated[float | None, option("N", "The most keys in a second.")] = None,
    bytes_per_second: Annotated[float | None, option("N", "The most bytes of request bodies in a second.")] = None,
    data: Data = None,
    tokens: File = None,
    json: AsJson = False,
) -> None:
    """Make a token, and print it. It is shown this once: the file keeps only a digest."""
    file, end = _file(data, tokens), _end(expires_in)
    rates = Rates(requests_per_second, keys_per_second, bytes_per_second)
    if certificate is not None:
        entry = file.admit(certificate, role, model or None, expires_at=end, note=note, rates=rates)
        _note(file, "token create", entry)
        text = f"callers with a certificate of {certificate} are {entry.role}; the entry's id is {entry.id}"
        say(json, _document(entry), text)
        return
    entry, secret = file.create(role, model or None, expires_at=end, note=note, rates=rates)
    _note(file, "token create", entry)
    if not json:
        typer.echo(f"token {entry.id} ({entry.role}) is kept; this is its secret, shown once:", err=True)
    say(json, {**_document(entry), "token": secret}, secret)


@token.command("list")
def list_(data: Data = None, tokens: File = None, json: AsJson = False) -> None:
    """Show the tokens that there are."""
    from rich.table import Table

    from tierstore.cli import show

    try:
        entries = _file(data, tokens).tokens()
    except NotFound:
        entries = []
    if json:
        show.as_json([_document(entry) for entry in entries])
        return
    if not entries:
        typer.echo("no tokens")
        return
    names = ("id", "role", "models", "created", "ends", "certificate", "a second", "note")
    table = Table(*names, box=None, header_style="bold")
    for entry in entries:
        models = "all" if entry.models is None else ", ".join(sorted(entry.models))
        end = "never" if entry.expires_at is None else entry.expires_at.date().isoformat()
        created, rates = entry.created_at.date().isoformat(), _shown(entry.rates)
        table.add_row(entry.id, entry.role, models, created, end, entry.certificate or "", rates, entry.note)
    show.console().print(table)


def _shown(rates: Rates) -> str:
    words = ((rates.requests, "requests"), (rates.keys, "keys"), (rates.nbytes, "bytes"))
    return ", ".join(f"{rate:g} {unit}" for rate, unit in words if rate is not None) or "no limit"


@token.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The token's id.", show_default=False)],
    data: Data = None,
    tokens: File = None,
    json: AsJson = False,
) -> None:
    """Forget a token. A running service refuses it within a second."""
    file = _file(data, tokens)
    entry = file.revoke(token_id)
    _note(file, "token revoke", entry)
    say(json, _document(entry), f"token {entry.id} ({entry.role}) is revoked")
