"""Building a version without a store: from a snapshot to a directory of finished files, which any number of stores can copy.

Runs on the caller's thread and in helper processes, like a bulk load. One build at a time works in a directory. A build that
was broken off goes on when it is started again; `built.json` appears at its end.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierstore.config import load_settings
from tierstore.errors import Conflict, InvalidInput, Locked, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.names import BUILD, BUILT_MANIFEST, REQUEST_SUFFIX, STRINGS, VersionDirectory, built_strings
from tierstore.formats.objects import is_url
from tierstore.formats.snapshot.built import (
    BuiltFile,
    BuiltManifest,
    BuiltSnapshot,
    BuiltTable,
    OtherFile,
    open_source,
    other_file,
    write_built,
    write_partitions,
)
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import Snapshot, local_path
from tierstore.formats.uploads import check_nothing_at, scratch_directory, upload_tree
from tierstore.ingest.bulkload import BulkLoad
from tierstore.ingest.load_plan import FileSpec, LoadWork
from tierstore.ingest.results import BaseBuild
from tierstore.ingest.side_files import copy_side_files
from tierstore.ingest.tasks import Merged
from tierstore.tiers.disk.sealed_file import FORMAT as SEALED_FORMAT
from tierstore.types import MAX_PARTITIONS, ProgressFn


def build_snapshot(
    source: str | Path,
    out: str | Path,
    *,
    partitions: int = 1,
    scratch: str | Path | None = None,
    progress: ProgressFn | None = None,
    cancelled: threading.Event | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> int:
    """Make the finished files of the snapshot `source` in the directory `out`, and return its version.

    `Store.load_snapshot` and `tierstore load` accept `out` like a snapshot, and only copy it. With `partitions` it has a
    folder for each partition, with the keys that `partition_of` assigns to it, each a built version of its own; a store loads all of
    them, or those that its setting `partition` names.
    `load_memory`, `load_workers` and `string_keys_size` are settings as for a store. `out` must not exist, or be empty, or be left by a build of
    the same snapshot that was broken off: then the build goes on. It may be a URL: then it is built in `scratch`, by default where
    temporary files are, and uploaded, with `built.json` last. Raises SnapshotError, InvalidInput, Conflict for an `out` with a built
    version, Locked, StorageError, and LoadCancelled when `cancelled` is set.
    """
    chosen, snapshot = load_settings(config, **settings), open_source(source)
    work = LoadWork(chosen.load_memory, chosen.load_workers, progress=progress, cancelled=cancelled)
    if not (isinstance(out, str) and is_url(out)):
        return build_version(snapshot, local_path(out).absolute(), partitions, work, chosen.string_keys_size)
    check_nothing_at(out)
    with scratch_directory(scratch, "tierstore-build-") as made:
        version = build_version(snapshot, made, partitions, work, chosen.string_keys_size)
        upload_tree(made, out, BUILT_MANIFEST)
    return version


def build_version(snapshot: Snapshot, out: Path, partitions: int, work: LoadWork, strings_size: int) -> int:
    """Build a version from a snapshot that is open, into a directory, with at most so many bytes of string keys."""
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidInput(f"partitions: expected 1 to {MAX_PARTITIONS}, got {partitions}")
    if isinstance(snapshot, BuiltSnapshot):
        raise SnapshotError("it is built already: load it as it is", file=BUILT_MANIFEST)
    identity = snapshot.identity()
    with _own(out):
        build = out / BUILD
        if build.exists():
            _gather(out, build)
        with BulkLoad(snapshot, build, FileSpec(partitions=partitions), work) as bulk:
            made = bulk.keep_strings(bulk.build(), build / STRINGS, strings_size, 0)
        snapshot.check_unchanged(identity)
        roots = [out] if partitions == 1 else [files.make_dir(out / f"partition-{i:04}") for i in range(partitions)]
        for partition, root in enumerate(roots):
            _finish(root, snapshot, bulk, made, (partition, partitions), build / STRINGS)
        if partitions > 1:
            write_partitions(out, [root.name for root in roots], snapshot.manifest)
        files.remove_tree(build)
    return snapshot.manifest.version


@contextmanager
def _own(out: Path) -> Iterator[None]:
    """Lock the directory for this process, made where there is none. Refuses one that holds something else."""
    with files.new_dirs(out):
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
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
        except BlockingIOError:
            raise Locked(f"another process builds in {out}") from None
        finally:
            os.close(descriptor)


def _gather(out: Path, build: Path) -> None:
    """Move finished files back to the load's directory, where a build was broken off after it had moved them out."""
    moved = [*out.glob("base-*"), *out.glob("partition-*/base-*")]
    files.rename_all([(path, build / path.name) for path in moved])
    for strings in [*out.glob(STRINGS), *out.glob(f"partition-*/{STRINGS}")]:  # they are made again
        files.remove_tree(strings)


def _finish(
    root: Path, snapshot: Snapshot, bulk: BulkLoad, made: BaseBuild, part: tuple[int, int], strings: Path
) -> None:
    """Move a partition's files into its directory, copy the side files there, and publish `built.json`."""
    written = [(task, of) for task, of in bulk.written if task.partition == part[0] and of.xxh3 is not None]
    files.rename_all([(Path(task.out), root / Path(task.out).name) for task, _ in written])
    kept = _move_strings(root, made, strings, f"{part[0]:04}" if part[1] > 1 else "")
    tables = []
    for name, table in made.tables.items():
        mine = [of for task, of in written if task.table == name]
        rows, digest = sum(of.rows for of in mine), sum(of.digest for of in mine) % 2**64
        colliding = tuple((text, code) for of in mine for text, code in of.colliding)
        tables.append(
            BuiltTable(
                name=name,
                rows=rows,
                mean=tuple(table.mean.tolist()),
                digest=f"{digest:016x}",
                colliding=colliding,
                expired=table.expired,
            )
        )
    built = [built_file(task.table, Path(task.out).name, of) for task, of in written]
    finish_folder(root, snapshot, snapshot.manifest, tables, built, part, kept)


def _move_strings(root: Path, made: BaseBuild, folder: Path, partition: str) -> list[OtherFile]:
    """Move the strings of a partition's keys into its directory. Returns their entries."""
    moves = []
    for name, table in made.tables.items():
        for file in () if table.strings is None else table.strings.files:
            path = folder / file.name
            if path.parent == folder / partition:
                moves.append((path, root / built_strings(name, path.name)))
    for _, target in moves:
        files.make_dir(target.parent)
    files.rename_all(moves)
    return [other_file(root, target) for _, target in moves]


def built_file(table: str, name: str, of: Merged) -> BuiltFile:
    """The entry of a finished file."""
    return BuiltFile(
        name=name, table=table, rows=of.rows, bytes=of.bytes, xxh3=str(of.xxh3), digest=f"{of.digest:016x}"
    )


def finish_folder(
    root: Path,
    snapshot: Snapshot,
    manifest: Manifest,
    tables: Sequence[BuiltTable],
    built: Sequence[BuiltFile],
    part: tuple[int, int],
    strings: Sequence[OtherFile],
) -> None:
    """Copy the snapshot's side files to a folder that has these files, of which partition of how many, and publish its `built.json`.

    strings: those of its keys, which are there too.
    """
    others = copy_side_files(snapshot, VersionDirectory(root))
    document = BuiltManifest(
        sealed_format=SEALED_FORMAT,
        partition=part[0],
        partitions=part[1],
        tables=tuple(tables),
        files=tuple(built),
        others=(*(other_file(root, path) for path in others), *strings),
    )
    write_built(root, document, _as_here(manifest, VersionDirectory(root)))


def _as_here(manifest: Manifest, where: VersionDirectory) -> Manifest:
    """The snapshot's manifest, with the side files' names in this directory."""
    paths = {path: where.dense(head) for head, path in manifest.graphs.items()}
    paths |= {path: where.warmup(table) for table, path in manifest.warmup.items()}
    for head, requests in manifest.recorded.items():
        paths |= {path: where.requests(head) / f"{i:05d}{REQUEST_SUFFIX}" for i, path in enumerate(requests)}
    return manifest.with_side_files(lambda name: paths[name].relative_to(where.root).as_posix())
