"""The form of a model's directory before there was one document: six small files, from which the document is made.

Of a data directory of format 1, of a backup of such a one, and of a copy from a peer of an earlier release. One step,
which can be cut off anywhere: the document is published, and then the files are removed; once it is there they mean
nothing. Before anything else reads the model, on the thread that opens, restores or copies it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore.arguments import check_share
from tierstore.engine.serving.document import SavedRoutes, StateDocument, check_label
from tierstore.engine.serving.order import ServingOrder
from tierstore.engine.serving.undone import Undone
from tierstore.errors import Corruption, NotFound, StorageError
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory, parse_version
from tierstore.formats.release import of_another_release

log = logging.getLogger(__name__)

CURRENT = "CURRENT"  # the active version
ROUTES = "routes.json"  # the canary, its share, and the labels; void where CURRENT names another version
UNDONE = "undone.json"
LOG_BASE = "log/base.json"  # where the log begins
LOADING = "LOADING"  # in a version: the snapshot that is being loaded
ACCEPTED = "ASKED"  # in a version: the newest delta whose dense part it accepted while it served
_OF_MODEL = (CURRENT, ROUTES, UNDONE, LOG_BASE)
_OF_VERSION = (LOADING, ACCEPTED)


def is_there(where: ModelDirectory) -> bool:
    """Whether a model's directory has this form: it has one of its files, and no document. StorageError."""
    return not files.exists(where.state) and any(files.exists(where.root / name) for name in _OF_MODEL)


def convert(where: ModelDirectory, model: str) -> None:
    """Make the document of a model's directory that has none, and remove the files that it replaces.

    Corruption if one of them is damaged: then nothing has changed. StorageError.
    """
    if not files.exists(where.state):
        files.publish_record(where.state, _document(where).to_json(model))
        log.info("model %s: its directory has the form of this release now", model)
    versions = [where.version(*each).root for each in where.versions_on_disk()]
    old = [where.root / name for name in _OF_MODEL] + [root / name for root in versions for name in _OF_VERSION]
    for path in old:
        with contextlib.suppress(StorageError):  # nothing reads it any more
            if files.exists(path):
                files.remove_file(path)


def _document(where: ModelDirectory) -> StateDocument:
    active, undone, start = _active(where), _undone(where), _log_start(where)
    there = [number for number, line in where.versions_on_disk() if line == undone.line(number)]
    of = {number: where.version(number, undone.line(number)) for number in there}
    complete = [number for number in there if files.exists(of[number].record)]
    loads = {number: files.read_bytes(of[number].root / LOADING) for number in there}
    return StateDocument(
        versions=tuple(complete),
        routes=_routes(where, active, undone),
        order=ServingOrder.by_number(complete, active),
        undone=undone,
        log_start=start,
        loads={number: mark.decode(errors="replace") for number, mark in loads.items() if mark is not None},
        accepted={number: seq for number in there if (seq := _accepted(of[number].root / ACCEPTED))},
    )


def _active(where: ModelDirectory) -> int | None:
    path = where.root / CURRENT
    text = files.read_number(path)
    if text is None:
        return None
    number = parse_version(text)
    if number is None:
        raise Corruption(
            f"{path}: expected a version number, got {text[:40]!r}; write the version there that was served, which the "
            "audit names"
        )
    return number


def _routes(where: ModelDirectory, active: int | None, undone: Undone) -> SavedRoutes:
    """What served; an active canary was promoted, and a crash came before the record said so: it keeps its labels."""
    path = where.root / ROUTES
    try:
        document = files.read_json(path)
        _check_format(path, document)
        canary = document["canary"] or {}
        number, share = canary.get("version"), check_share(canary.get("share", 0.0))
        if number is not None and (document["active"] != active or int(number) in undone.outdated):
            number = None
        labels = {check_label(name): int(of) for name, of in document["labels"].items()}
    except NotFound:
        return SavedRoutes(active)
    except (Corruption, KeyError, TypeError, ValueError, AttributeError) as error:
        log.error("%s: canary and labels are not taken over: %s", path, error)
        return SavedRoutes(active)
    kept = {name: of for name, of in labels.items() if active is not None and of in (active, number)}
    return SavedRoutes(active, number, share if number is not None else 0.0, kept)


def _undone(where: ModelDirectory) -> Undone:
    path = where.root / UNDONE
    try:
        document = files.read_json(path)
        _check_format(path, document)
        # a release that kept no history left only rollbacks that still count
        rollbacks = document.get("rollbacks", [[int(first) - 1, last] for first, last in document["ranges"]])
        return Undone.parse({**document, "rollbacks": rollbacks})
    except NotFound:
        return Undone()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corruption(f"{path} is invalid ({error}); restore it, and start again") from error


def _check_format(path: Path, document: Mapping[str, Any]) -> None:
    if document["format"] != 1:
        raise of_another_release(path, document["format"], "1", document)


def _log_start(where: ModelDirectory) -> int | None:
    path = where.root / LOG_BASE
    try:
        start = files.read_json(path).get("start")
    except NotFound:
        if where.log_on_disk() or files.exists(where.log_end):
            raise Corruption(
                f"{path} is missing, which says where the entries in {where.log} begin; restore it, and start again"
            ) from None
        return None
    if type(start) is not int or start < 0:
        raise Corruption(f'{path}: expected {{"start": <the seq before the first entry>}}, got start {start!r}')
    return start


def _accepted(path: Path) -> int:
    """The seq in a file, or 0: then dense parts are checked once more, so a bad file is no reason not to serve."""
    try:
        text = files.read_number(path)
    except Corruption as error:
        log.warning("%s is passed over: %s", path, error)
        return 0
    return int(text) if text is not None and text.isdigit() else 0
