"""Side files of a snapshot (dense part, warm-up keys, recorded requests, golden examples), copied to a version. Any thread."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tierstore.errors import SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.keys import are_own
from tierstore.formats.names import GOLDEN_INDEX, REQUEST_SUFFIX, VersionDirectory
from tierstore.formats.objects import Location
from tierstore.formats.regular import open_regular
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.tiers.background import yield_to_requests
from tierstore.types import Partitions


def copy_side_files(snapshot: Snapshot, where: VersionDirectory, own: Partitions | None = None) -> list[Path]:
    """Copy the dense part, warm-up keys, recorded requests and golden examples. Returns the files, in this order. Each file appears whole.

    With `own`, warm-up keys of other partitions are left out. Raises SnapshotError for what cannot be read, StorageError for what cannot be written.
    """
    kept: list[Path] = []
    for head in snapshot.manifest.graphs:
        yield_to_requests()
        files.publish_bytes(where.dense(head), snapshot.dense_model(head) or b"")
        kept.append(where.dense(head))
    for name in snapshot.manifest.warmup:
        keys = snapshot.warmup_keys(name)
        if keys is not None:
            yield_to_requests()
            keys = keys if own is None else keys[are_own(keys, own)]
            files.make_dir(where.warmup(name).parent)
            with files.publish(where.warmup(name)) as file:
                np.save(file, keys, allow_pickle=False)
            kept.append(where.warmup(name))
    for head in snapshot.manifest.recorded:
        sources = [path for _, path in snapshot.request_paths(head)]
        names = [f"{i:05d}{REQUEST_SUFFIX}" for i in range(len(sources))]
        kept += _copy(sources, where.requests(head), names)
    if (index := snapshot.golden_index()) is not None:
        entries = list(snapshot.golden_paths())
        kept += _copy([path for _, path in entries], where.golden, [entry.path for entry, _ in entries])
        kept.append(where.root / GOLDEN_INDEX)
        index.write(kept[-1])
    return kept


def _copy(sources: Sequence[Location], directory: Path, names: Sequence[str]) -> list[Path]:
    """Copy `sources` into `directory` under `names`. Names are made durable once, when all are there."""
    if not sources:
        return []
    targets = [files.make_dir(directory) / name for name in names]
    for source, target in zip(sources, targets, strict=True):
        yield_to_requests()
        try:
            with open_regular(source) as read, files.publish(target, durable=False) as write:
                shutil.copyfileobj(read, write)
                files.sync(write, target)
        except StorageError:
            raise
        except OSError as error:
            raise SnapshotError(f"cannot be read: {error.strerror or error}", file=source.name) from error
    files.fsync_dir(directory)
    return targets
