"""Building a version without a store: from a snapshot to a directory of finished files, for any number of stores to copy.

The caller's thread and helper processes, as a bulk load. One build at a time works in a directory. One that is broken off goes on
when it is begun again; until it is over there is no `built.json`.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierstore.config import load_settings
from tierstore.errors import Conflict, InvalidInput, Locked, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.built import (
    BuiltFile,
    BuiltManifest,
    BuiltSnapshot,
    BuiltTable,
    open_source,
    other_file,
    write_built,
    write_partitions,
)
from tierstore.formats.manifest import Manifest
from tierstore.formats.names import BUILD, BUILT_MANIFEST, REQUEST_SUFFIX, VersionDirectory
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.beside import keep_beside
from tierstore.ingest.bulkload import BaseBuild, BulkLoad
from tierstore.tiers.sealed_file import FORMAT as SEALED_FORMAT
from tierstore.types import ProgressFn

MAX_PARTITIONS = 1024


def build_snapshot(
    source: str | Path,
    out: str | Path,
    *,
    partitions: int = 1,
    progress: ProgressFn | None = None,
    cancelled: threading.Event | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> int:
    """Make the finished files of the snapshot `source` in the directory `out`, and return its version.

    `Store.load_snapshot` and `tierstore load` take `out` as they take a snapshot, and only copy it. With `partitions` there is
    a folder for each in it, with the keys that `partition_of` gives it; each is a built version of its own. `load_memory` and
    `load_workers` are settings as those of a store. `out` must not exist, be empty, or be what a build of the same snapshot
    has left that was broken off: then it goes on. Raises SnapshotError, InvalidInput, Conflict for an `out` with a built
    version, Locked, StorageError, and LoadCancelled when `cancelled` is set.
    """
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidInput(f"partitions: expected 1 to {MAX_PARTITIONS}, came {partitions}")
    chosen = load_settings(config, **settings)
    snapshot, out = open_source(source), Path(out).absolute()
    if isinstance(snapshot, BuiltSnapshot):
        raise SnapshotError("it is built already: load it as it is", file=BUILT_MANIFEST)
    with _own(out):
        build = out / BUILD
        if build.exists():
            _gather(out, build)
        with BulkLoad(
            snapshot,
            build,
            memory_bytes=chosen.load_memory,
            workers=chosen.load_workers,
            base="sealed",
            partitions=partitions,
            progress=progress,
            cancelled=cancelled,
        ) as bulk:
            made = bulk.build()
        roots = [out] if partitions == 1 else [files.make_dir(out / f"partition-{i:04}") for i in range(partitions)]
        for partition, root in enumerate(roots):
            _finish(root, snapshot, bulk, made, partition, partitions)
        if partitions > 1:
            write_partitions(out, [root.name for root in roots])
        files.remove_tree(build)
    return snapshot.manifest.version


@contextmanager
def _own(out: Path) -> Iterator[None]:
    """Have the directory to oneself. One that holds something else is refused."""
    files.make_dir(out)
    if files.exists(out / BUILT_MANIFEST):
        raise Conflict(f"{out} holds a built version already; give another directory, or remove it first")
    if not files.exists(out / BUILD) and any(out.iterdir()):
        raise InvalidInput(f"{out} is not empty; give a directory that is, or one that does not exist")
    try:
        descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"cannot use {out}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Locked(f"another process builds in {out}") from None
    finally:
        os.close(descriptor)


def _gather(out: Path, build: Path) -> None:
    """Put finished files back that a build which was broken off at its end had in their places already."""
    moved = [*out.glob("base-*"), *out.glob("partition-*/base-*")]
    files.rename_all([(path, build / path.name) for path in moved])


def _finish(root: Path, snapshot: Snapshot, bulk: BulkLoad, made: BaseBuild, partition: int, partitions: int) -> None:
    """Move a partition's files into its directory, put what lies beside the rows there, and publish `built.json`."""
    written = [(task, of) for task, of in bulk.written if task.partition == partition and of.xxh3 is not None]
    files.rename_all([(Path(task.out), root / Path(task.out).name) for task, _ in written])
    others = keep_beside(snapshot, VersionDirectory(root))
    tables = []
    for name, table in made.tables.items():
        mine = [of for task, of in written if task.table == name]
        rows, digest = sum(of.rows for of in mine), sum(of.digest for of in mine) % 2**64
        colliding = tuple((text, code) for of in mine for text, code in of.colliding)
        tables.append(
            BuiltTable(
                name=name, rows=rows, mean=tuple(table.mean.tolist()), digest=f"{digest:016x}", colliding=colliding
            )
        )
    built = BuiltManifest(
        sealed_format=SEALED_FORMAT,
        partition=partition,
        partitions=partitions,
        tables=tuple(tables),
        files=tuple(
            BuiltFile(
                name=Path(task.out).name,
                table=task.table,
                rows=of.rows,
                bytes=of.bytes,
                xxh3=str(of.xxh3),
                digest=f"{of.digest:016x}",
            )
            for task, of in written
        ),
        others=tuple(other_file(root, path) for path in others),
    )
    write_built(root, built, _as_here(snapshot.manifest, VersionDirectory(root)))


def _as_here(manifest: Manifest, where: VersionDirectory) -> Manifest:
    """The snapshot's manifest, with what lies beside the rows named as it is here."""
    document = manifest.to_document()

    def name(path: Path) -> str:
        return path.relative_to(where.root).as_posix()

    if manifest.dense is not None:
        document["dense"] = {"path": name(where.dense)}
    document["warmup"] = {table: name(where.warmup(table)) for table in manifest.warmup}
    if manifest.requests:
        count = range(len(manifest.requests))
        document["requests"] = [name(where.requests / f"{i:05d}{REQUEST_SUFFIX}") for i in count]
    return Manifest.parse(json.dumps(document))
