"""What a snapshot has beside its rows: copied to where a version keeps it. Any thread; each file appears whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from tierstore.errors import SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.names import REQUEST_SUFFIX, VersionDirectory
from tierstore.formats.snapshot import Snapshot
from tierstore.tiers.background import hand_over


def keep_beside(snapshot: Snapshot, where: VersionDirectory) -> list[Path]:
    """Copy the dense part, warm-up keys and recorded requests. Returns the files, in this order.

    Raises SnapshotError for what cannot be read, StorageError for what cannot be written.
    """
    kept: list[Path] = []
    dense = snapshot.dense_model()
    if dense is not None:
        hand_over()
        files.publish_bytes(where.dense, dense)
        kept.append(where.dense)
    for name in snapshot.manifest.warmup:
        keys = snapshot.warmup_keys(name)
        if keys is not None:
            hand_over()
            files.make_dir(where.warmup(name).parent)
            with files.publish(where.warmup(name)) as file:
                np.save(file, keys, allow_pickle=False)
            kept.append(where.warmup(name))
    for i, (_, path) in enumerate(snapshot.request_paths()):
        files.make_dir(where.requests)
        kept.append(where.requests / f"{i:05d}{REQUEST_SUFFIX}")
        _copy(path, kept[-1])
    return kept


def _copy(source: Path, target: Path) -> None:
    hand_over()
    try:
        with open(source, "rb") as read, files.publish(target) as write:
            shutil.copyfileobj(read, write)
    except StorageError:
        raise
    except OSError as error:
        raise SnapshotError(f"cannot be read: {error.strerror or error}", file=source.name) from error
