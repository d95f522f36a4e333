"""Where a command works: on a data directory that it opens itself, or through a running service.

`Store` and `Client` have the same verbs, so a command is written once. Called from the main thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tierstore.errors import InvalidInput, Locked, NotFound

if TYPE_CHECKING:
    from tierstore.client import Client
    from tierstore.engine.store import Store
    from tierstore.types import KeyType

TOKEN_VARIABLE = "TIERSTORE_TOKEN"  # not a flag: other users of the machine can read those
URL_VARIABLE = "TIERSTORE_URL"  # stands for --url where neither --url nor --data is given


@contextmanager
def place(data: Path | None, url: str | None, *, create: bool = False) -> Iterator[Store | Client]:
    """Open the data directory, or connect to the service; closed at the end.

    With `create`, a directory that is not there is made. Raises NotFound where there is none, Locked where
    another process holds it.
    """
    if data is not None and url is not None:
        raise typer.BadParameter("give --data or --url, not both")
    url = service_url(data, url)
    if url is not None:
        from tierstore.client import Client

        with Client(url, token=os.environ.get(TOKEN_VARIABLE) or None) as client:
            yield client
        return
    with local(data, create=create) as store:
        yield store


def service_url(data: Path | None, url: str | None) -> str | None:
    """The service that a command talks to; None where it works on a data directory."""
    return (os.environ.get(URL_VARIABLE) or None) if url is None and data is None else url


@contextmanager
def local(data: Path | None, *, create: bool = False) -> Iterator[Store]:
    """Open the data directory `data`, by default the one that the settings name."""
    from tierstore.config import load_settings

    settings = load_settings(data=data)
    if not create and not settings.data.is_dir():
        raise NotFound(f"no data directory at {settings.data}; name one with --data, or a running service with --url")
    ready_kernels(settings.data, lambda line: typer.echo(f"tierstore: {line}", err=True))
    from tierstore.engine.store import Store

    try:
        store = Store(settings)
    except Locked as error:
        hint = "" if "--url" in str(error) else "; talk to the service that holds it with --url"
        raise Locked(f"{error}{hint}") from error
    with store:
        yield store


def ready_kernels(data: Path, say: Callable[[str], None]) -> None:
    """Have the kernels compiled before the store is imported, which would compile them one after the other."""
    from tierstore import kernels
    from tierstore.kernels import ahead

    kernels.use_data(data)
    ahead.prepare(say)


def warn_of_dense(held: Store | Client, snapshot: str | Path, version: int) -> None:
    """Say so where the rows of the version that was loaded from `snapshot` are served and its dense part is not."""
    from tierstore.client.sources import snapshot_model

    try:
        model = snapshot_model(snapshot)
    except InvalidInput:  # it cannot be read here, only where the service is
        return
    versions = held.status(model)["models"][model]["versions"]
    dense = next((str(one.get("dense") or "") for one in versions if one["version"] == version), "")
    if "not served" in dense:
        typer.echo(f"tierstore: {model} version {version}: the dense part is {dense}", err=True)


def key_type(document: dict[str, Any], model: str, feature: str) -> KeyType:
    """What the keys of a feature are, read from a status document. NotFound for an unknown feature."""
    from tierstore.types import KeyType

    status = document["models"][model]
    if status["active_version"] is None:
        problem = status.get("problem")
        raise NotFound(
            f"model {model!r} has no active version" + (f": {problem}" if problem else "; load or activate one")
        )
    features = status["features"]
    if feature not in features:
        raise NotFound(f"no feature {feature!r}; model {model!r} has {', '.join(sorted(features))}")
    return KeyType(status["tables"][features[feature]["table"]]["key"])


def parse_keys(words: list[str], kind: KeyType) -> list[int] | list[str]:
    """Keys as they are typed: numbers for an integer table, and the words themselves for a string table."""
    if kind == "string":
        return words
    try:
        return [int(word, 0) for word in words]
    except ValueError:
        wrong = next(word for word in words if not _is_int(word))
        raise typer.BadParameter(f"the table's keys are {kind}: expected numbers, came {wrong!r}") from None


def parse_share(text: str) -> float:
    """A share as it is typed: `5%`, `0.05`."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise typer.BadParameter(f"a share is from 0% to 100%, or from 0 to 1; came {text!r}")
    return share


def _is_int(word: str) -> bool:
    try:
        int(word, 0)
    except ValueError:
        return False
    return True
