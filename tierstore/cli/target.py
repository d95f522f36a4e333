"""The target of a command: a data directory that it opens itself, or a running service.

`Store` and `Client` have the same verbs, so a command is written once. Called from the main thread.
"""

from __future__ import annotations

import getpass
import importlib
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
    from tierstore.status import StoreStatus
    from tierstore.types import KeyType

URL_VARIABLE = "TIERSTORE_URL"  # the default of --url where there is no --data


@contextmanager
def open_target(
    data: Path | None, url: str | None, *, create: bool = False, timeout_s: float | None = None
) -> Iterator[Store | Client]:
    """Open the data directory, or connect to the service; closed at the end.

    create: make a data directory that does not exist; else it is NotFound. Locked where another process holds it.
    """
    if data is not None and url is not None:
        raise typer.BadParameter("expected --data or --url, got both")
    url = service_url(data, url)
    if url is not None:
        with make_client(url, timeout_s) as client:
            yield client
        return
    with open_data(data, create=create) as store:
        yield store


def make_client(url: str, timeout_s: float | None = None) -> Client:
    """A client of the service, with the token and the certificates that the environment names.

    `timeout_s`: of one request, where the usual one is too short.
    """
    from tierstore.client import Client
    from tierstore.client.environment import client_options

    options = client_options([url])
    return Client(url, **options if timeout_s is None else options | {"timeout_s": timeout_s})


def fate(data: Path | None, url: str | None, own: str) -> str:
    """What becomes of the work of a command where Ctrl-C ends it; `own` where it is done here."""
    if service_url(data, url) is None:
        return own
    return "the service goes on: `tierstore jobs` shows it, and stops it with --cancel"


def service_url(data: Path | None, url: str | None) -> str | None:
    """The URL of the service that a command works through; None where it works on a data directory."""
    return (os.environ.get(URL_VARIABLE) or None) if url is None and data is None else url


def written_to(data: Path | None, url: str | None, directory: str) -> str:
    """Where an export or a backup is, for a person: a relative path of a service begins in a place of its own."""
    if service_url(data, url) is None or "://" in directory or Path(directory).is_absolute():
        return directory
    return f"{directory}, below the service's export_root (by default exports in its data directory)"


@contextmanager
def open_data(data: Path | None, *, create: bool = False) -> Iterator[Store]:
    """Open the data directory, by default the one of the settings."""
    from tierstore.config import load_settings

    settings = load_settings(data=data)
    if not create and not settings.data.is_dir():
        raise NotFound(f"no data directory at {settings.data}; name one with --data, or a running service with --url")
    with _nothing_left(settings.data):
        ready_kernels(settings.data)
        from tierstore import kernels

        kernels.at_import = False  # a command calls few of them
        from tierstore.engine.events.changes import REQUESTER
        from tierstore.engine.store import Store

        try:
            store = Store(settings)
        except Locked as error:
            hint = "" if "--url" in str(error) else "; use the service that holds it with --url"
            raise Locked(f"{error}{hint}") from error
        before = REQUESTER.set(local_user())
        try:
            with store:
                yield store
        finally:
            REQUESTER.reset(before)


@contextmanager
def _nothing_left(data: Path) -> Iterator[None]:
    """If the block fails, a data directory that it has made goes again, unless it has something of a model."""
    from tierstore.formats import files
    from tierstore.formats.names import AUDIT, STATE, DataDirectory

    root, is_new = DataDirectory(data.absolute()), not data.exists()
    with files.new_dirs(root.root.parent):
        try:
            yield
        except BaseException:
            own = {AUDIT, *(path.name for path in (root.models, root.lock, root.format))}
            there = {path.name for path in data.iterdir()} if is_new and data.is_dir() else {""}
            if there <= own and all(path.is_dir() or path.name == STATE for path in root.models.rglob("*")):
                files.remove_tree(data)
            raise


def local_user() -> str:
    """Who runs this command, for the audit."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # no name for this number, as in a container
        name = str(os.getuid())
    return f"user {name} (command line)"


def ready_kernels(data: Path | None = None) -> None:
    """Have the kernels of a store compiled, all of them: what is done in it does not compete with the compiler.

    Shown meanwhile.
    """
    from tierstore import kernels
    from tierstore.kernels import ahead

    if data is not None:
        kernels.use_data(data)
    if not kernels.is_complete(kernels.SOON):
        ahead.start(say_aside, kernels.SOON)
        importlib.import_module("tierstore.engine.store")  # meanwhile
        with shown_kernels() as report:
            ahead.prepare(say_aside, kernels.SOON, report)


@contextmanager
def shown_kernels() -> Iterator[Callable[[int, int], None]]:
    """Yields the function that is told how many kernels are compiled, of how many; shown as progress."""
    from tierstore.cli.progress import shown_progress
    from tierstore.types import Progress

    kept = "those that are compiled are kept, and the next command goes on with the others"
    with shown_progress("compile kernels", kept) as progress:
        yield lambda done, total: progress(Progress("compile kernels", done, total)) if total else None


def say_aside(line: str) -> None:
    """Print a line beside the results of a command."""
    typer.echo(f"tierstore: {line}", err=True)


def say_what_goes(target: Store | Client, model: str | None, snapshot: str | Path = "") -> None:
    """Print which versions of a model, by default that of a snapshot, are dropped once another one serves."""
    from tierstore.client.identify import snapshot_model

    try:
        model = model or snapshot_model(snapshot)
        status = target.status(model)["models"][model]  # not of all models, for which its token may not ask
    except (InvalidInput, NotFound):  # it can be read only where the service is; it is the model's first load
        return
    left = {one["version"]: one.get("left") for one in status["versions"]}
    if going := [f"{n} ({left[n] or 'never active'})" for n in status.get("to_drop", ()) if n in left]:
        say_aside(f"once it serves, {model} drops version{'s' * (len(going) > 1)} {', '.join(going)}")


def warn_of_dense(target: Store | Client, snapshot: str | Path, version: int) -> None:
    """Print what a user may not expect of the dense parts of the version loaded from `snapshot`."""
    from tierstore.client.identify import snapshot_model
    from tierstore.status import dense_notes

    try:
        model = snapshot_model(snapshot)
    except InvalidInput:  # it can be read only where the service is
        return
    versions = target.status(model)["models"][model]["versions"]
    for one in versions:
        if one["version"] == version:
            for note in dense_notes(one):
                typer.echo(f"tierstore: {model} version {version}: {note}", err=True)


def check_directory(snapshot: str) -> None:
    """NotFound for a snapshot's path that does not exist. For a command that reads it itself."""
    if "://" not in snapshot and not Path(snapshot).is_dir():
        raise NotFound(f"no such directory: {snapshot}")


def key_type(document: StoreStatus, model: str, feature: str) -> KeyType:
    """The key type of a feature, read from a status document. NotFound for an unknown feature."""
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
    of = features[feature]
    return KeyType((of["hash"] if "hash" in of else status["tables"][of["table"]])["key"])


def parse_keys(words: list[str], kind: KeyType) -> list[int] | list[str]:
    """Keys from the command line: numbers for an integer table, the words themselves for a string table."""
    if kind == "string":
        return words
    try:
        return [int(word, 0) for word in words]
    except ValueError:
        wrong = next(word for word in words if not _is_int(word))
        raise typer.BadParameter(f"the table's keys are {kind}: expected numbers, got {wrong!r}") from None


def parse_share(text: str) -> float:
    """A share from the command line: `5%`, `0.05`."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise typer.BadParameter(f"expected a share from 0% to 100%, or from 0 to 1; got {text!r}")
    return share


def parse_number(name: str, text: str) -> float:
    """A number from the command line: `10e9`, `1_000`."""
    try:
        return float(text.replace("_", ""))
    except ValueError:
        raise typer.BadParameter(f"{name}: expected a number such as 10e9, got {text!r}") from None


def _is_int(word: str) -> bool:
    try:
        int(word, 0)
    except ValueError:
        return False
    return True


def say(json: bool, document: Any, text: str | Callable[[Any], None]) -> None:
    """Print a document as JSON or, for a person, the text, or what a function of the document prints."""
    if json:
        from tierstore.cli import show

        show.as_json(document)
    elif callable(text):
        text(document)
    else:
        typer.echo(text)
