"""Data directories that were copied (`cp -a`, rsync) while a process had them open: their files are of different
moments.

Such a directory opens like any other, as everything in it is checked. A torn model has a problem that says how to make
the copy whole.

Before the models start, on the thread that opens the store.
"""

from __future__ import annotations

import logging

from tierstore.engine.lifecycle.directory_lock import is_copy
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


def what_to_do(where: ModelDirectory) -> str:
    """What a person can do about a model that does not open, as a part of its problem."""
    return (
        "this directory was copied while a process had the original open, so its files are of different moments. "
        "Deltas that its log lacks can be copied from the original: cp -n "
        f"ORIGINAL/models/{where.root.name}/log/*.arrow {where.log}/. To go on without those that are missing at its "
        f"end: rm {where.log_end}. Otherwise make the copy again: with `tierstore backup` and `tierstore restore`, "
        "which may be done while it serves, or while nothing has it open"
    )
