"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which newer releases of typer contain
# commands without --url → why
_WITHOUT_URL = {
    "audit": "it reads the files of the audit, also beside a service: --data or --directory, on its machine",
    "bench": "it measures this machine; --where names a directory on the drive",
    "build": "it reads and writes files on this machine, and needs no service",
    "compile": "it compiles for this machine, and needs no service",
    "plan": "it reckons; --from URL takes a service's sizes and traffic",
    "restore": "it writes a data directory that no service has open: --data",
    "serve": "it is the service; --host and --port say where it listens",
}


class _AsGiven:
    """Reads the values of a parameter that are right as they are: texts, and what was not given.

    typer has pydantic read every value, and importing it takes a fourth of the time of a command that asks a service.
    """

    def __init__(self, read_by_typer: Callable[[], Any], parameter: Any) -> None:
        self._read_by_typer, self._kind = read_by_typer, parameter.type_descriptor.annotation

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """What typer's own of this name does."""
        is_list = param.multiple or param.nargs == -1
        if value is None:
            return () if is_list else None
        if is_list and self._kind == list[str] and isinstance(value, (list, tuple)):
            return list(value)
        if not is_list and self._kind is str and isinstance(value, str):
            return value
        return self._read_by_typer().coerce(value, param=param, ctx=ctx)


class _ReadsAsGiven:
    """A command of typer's whose parameters are read without pydantic, where that makes no difference."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            reader = getattr(parameter, "get_runtime_param", None)  # older releases of typer do without pydantic
            if reader is not None and not isinstance(reader, partial):
                parameter.get_runtime_param = partial(_AsGiven, reader, parameter)
        return parameters


class Group(_ReadsAsGiven, TyperGroup):
    """All commands."""


class Command(_ReadsAsGiven, TyperCommand):
    """A command that says of a flag which it lacks why, or what to use."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return list(super().parse_args(ctx, args))
        except _UsageError as error:
            if type(error).__name__ == "NoSuchOption" and (hint := self.hint(error.option_name)):
                error.message += f" ({hint})"
            raise

    def hint(self, flag: str) -> str:
        """Why the command lacks `flag`; empty where there is nothing to say."""
        return _WITHOUT_URL.get(self.name or "", "") if flag == "--url" else ""


class KeysCommand(Command):
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
ServedVersion = Annotated[
    str | None, option("V", "Number or label of a version that is served (default: the active one).")
]
Force = Annotated[
    bool, typer.Option("--force", help="Accept a version that lacks deltas which the log no longer holds.")
]


def number_or_label(version: str | None) -> int | str | None:
    """A `ServedVersion` as the store takes it."""
    return int(version) if version is not None and version.isdigit() else version
