"""Detects data directories that were copied (`cp -a`, rsync) while a process had them open: their files are of
different moments.

Such a directory opens like any other, as everything in it is checked. A torn model has a problem that says how to make
the copy whole.

Before the models start, on the thread that opens the store.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from tierstore.engine.lifecycle.directory_lock import is_copy
from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Corruption
from tierstore.formats import files
from tierstore.formats.names import DataDirectory, ModelDirectory
from tierstore.tiers.disk import changed_keys_file

log = logging.getLogger(__name__)


def prepare(root: DataDirectory, lock_file: int) -> bool:
    """Whether the data directory is such a copy. If so, filters of changed keys, which might not fit their RocksDB, are
    removed, to be made again.

    `lock_file` is the descriptor of its LOCK. StorageError.
    """
    if not is_copy(root.lock, lock_file):
        return False
    log.warning("%s is a copy of a data directory that was open while it was copied", root.root)
    for model in root.models_on_disk():
        for number, line in root.model(model).versions_on_disk():
            path = root.model(model).version(number, line).db / changed_keys_file.NAME
            if files.exists(path):
                files.remove_file(path)
    return True


def mark_outdated(state: ModelState, active: int | None) -> None:
    """Have versions built again before they serve whose rows are those of another moment: they are without other undone
    deltas than those of the document, or hold deltas that neither the log nor the active version has, under seqs that
    the copy will have others for.

    In memory: the document stays as it was copied until something serves. Once the records of the versions are read.
    """
    deltas, infos = state.log, state.catalogue.infos()
    undone, last = deltas.undone, max([deltas.last or 0, *(info.watermark for info in infos if info.number == active)])
    others = {
        info.number
        for info in infos
        if not undone.made(info.left_out) or info.watermark > max(last, info.manifest.delta_seq)
    }
    if not others <= undone.outdated:
        document = state.file.document
        state.file.amend(replace(document, undone=replace(undone, outdated=undone.outdated | others)))


def check_version(state: ModelState, info: VersionInfo) -> None:
    """Corruption where the document has a version serve that cannot have served with such rows."""
    what, catalogue = f"version {info.number} of {state.name!r}", state.catalogue
    if catalogue.is_outdated(info.number):
        raise Corruption(f"{what} served at another moment than that of its rows: other deltas are undone in them")
    if catalogue.is_stale(info):
        raise Corruption(
            f"{what} served at another moment than that of its rows: they hold deltas up to {info.watermark}, and the "
            f"log begins after {state.log.start}"
        )


def what_to_do(where: ModelDirectory) -> str:
    """What a person can do about a model that does not open, as a part of its problem."""
    return (
        "this directory was copied while a process had the original open, so its files are of different moments. "
        "Deltas that its log lacks can be copied from the original: cp -n "
        f"ORIGINAL/models/{where.root.name}/log/*.arrow {where.log}/. To go on without those that are missing at its "
        f"end: rm {where.log_end}. Otherwise make the copy again: with `tierstore backup` and `tierstore restore`, "
        "which may be done while it serves, or while nothing has it open"
    )
