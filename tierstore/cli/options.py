"""Options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class KeysCommand(TyperCommand):
    """A command whose arguments are keys: a negative number is one, and no option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = any(re.fullmatch(r"-\d+", word) for word in args)
        return list(super().parse_args(ctx, args))


def option(metavar: str, text: str, **settings: Any) -> Any:
    """An option whose help text says the default itself."""
    return typer.Option(metavar=metavar, help=text, show_default=False, **settings)


def argument(metavar: str, text: str, **settings: Any) -> Any:
    """A positional argument."""
    return typer.Argument(metavar=metavar, help=text, show_default=False, **settings)


Data = Annotated[Path | None, option("DIR", "The data directory (default: ./data).")]
Url = Annotated[
    str | None,
    option("URL", "A running service to do it through, such as http://127.0.0.1:8000 or unix:/run/tierstore.sock."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelName = Annotated[str, argument("MODEL", "Name of the model.")]
VersionNumber = Annotated[int, argument("VERSION", "Number of the version.")]
Force = Annotated[
    bool, typer.Option("--force", help="Accept a version that lacks deltas which the log no longer holds.")
]
