"""The strings of a snapshot's keys, sorted into files: what a version keeps of string keys beside its rows. See `tasks.py`.

Runs of rows hold hashes only, so the keys of the shards are read once more. Each file has as many strings as fit in memory,
sorted; what reads them merges the files, which are few. Strings of rows that are expired at the load are there too. A built
version has such files already, which are copied.

Strings are a comfort, and rows are not: where they do not fit, the task says so, and is no error.

In a helper process, one task at a time, on its main thread. After a crash the files are made again.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from tierstore.errors import Corruption, DiskFull, SnapshotError
from tierstore.formats import files
from tierstore.formats.keys import are_own, partition_of
from tierstore.formats.names import strings_file
from tierstore.formats.snapshot.checksum import checksum
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.finished_files import copy_whole
from tierstore.ingest.runs import ReportRows
from tierstore.ingest.tasks import CopyStrings, SortedStrings, SortStrings
from tierstore.tiers.disk.strings_file import (
    MissingStrings,
    Strings,
    StringsFile,
    finished,
    merged_strings,
    opened,
    sorted_strings,
    write_ascending,
)
from tierstore.types import Keys, Partitions

_BESIDE_BYTES = 32  # of a string: its place, its hash, and its place in the order, with room to sort
_BATCH_ROWS = 1 << 17
_MOST_FILES = 4  # of a task: whoever looks for a string reads a block of each


class _DoNotFit(Exception):
    def __init__(self, why: MissingStrings) -> None:
        self.why = why


def sort_strings(snapshot: Snapshot, task: SortStrings, report: ReportRows) -> SortedStrings:
    """Write the strings of some shards as sorted files; says so where they do not fit."""
    own = None if task.own is None else Partitions.parse(task.own)
    made: list[list[StringsFile]] = [[] for _ in range(task.partitions)]
    folders = [Path(task.folder) / (f"{i:04}" if task.partitions > 1 else "") for i in range(task.partitions)]
    held: list[tuple[Keys, pa.Array]] = []
    held_bytes = 0

    def flush() -> None:
        nonlocal held_bytes
        hashes = np.concatenate([of for of, _ in held])
        strings = pa.concat_arrays([of for _, of in held])
        held.clear()
        held_bytes = 0
        for partition, places in _places_of(hashes, task.partitions):
            path = files.make_dir(folders[partition]) / strings_file(task.table, task.number, len(made[partition]))
            some = (hashes, strings) if places is None else (hashes[places], strings.take(pa.array(places)))
            made[partition].append(write_ascending(path, _fitting(sorted_strings(*some), path, task.keep_free)))
        if files.tree_bytes(task.folder) > task.most_bytes:  # those of all tasks
            raise _DoNotFit(MissingStrings.SIZE)

    with _saying_why() as missing:
        for shard in task.shards:
            for hashes, strings in snapshot.shard_strings(task.table, shard, _BATCH_ROWS):
                read = len(hashes)
                if own is not None:
                    hashes, strings = _own(hashes, strings, own)
                if len(hashes):
                    held.append((hashes, strings))
                    held_bytes += strings.nbytes + _BESIDE_BYTES * len(hashes)
                if held_bytes >= task.run_bytes:
                    flush()
                report(read)
        if held:
            flush()
        for folder, of in zip(folders, made, strict=True):
            if len(of) > _MOST_FILES:
                of[:] = [_merged(folder, of, strings_file(task.table, task.number, len(of)), task.keep_free)]
    if missing:
        for folder, of in zip(folders, made, strict=True):
            _remove(folder, of)
        return SortedStrings([], missing[0])
    below = [(folder.relative_to(task.folder), file) for folder, of in zip(folders, made, strict=True) for file in of]
    return SortedStrings([_entry((where / file.name).as_posix(), file) for where, file in below])


def copy_strings(snapshot: Snapshot, task: CopyStrings, report: ReportRows) -> SortedStrings:
    """Copy the strings of a built version, or those of some partitions of it; says so where they do not fit.

    SnapshotError for a file that is not what it was when it was built.
    """
    own = None if task.own is None else Partitions.parse(task.own)
    folder, made = Path(task.folder), list[StringsFile]()
    with _saying_why() as missing:
        for name, size, xxh3 in task.sources:
            path = folder / strings_file(task.table, task.number, len(made))
            _check_room(path, size, task.keep_free)
            copy_whole(snapshot, name, size, path, partial(_is_whole, xxh3=xxh3))
            try:
                made.append(finished(path))
            except Corruption as error:
                raise SnapshotError("is no file of strings; build it again", file=name) from error
            report(made[-1].strings)
        if own is not None or len(made) > _MOST_FILES:
            made = [_merged(folder, made, strings_file(task.table, task.number, len(made)), task.keep_free, own)]
        if not made[0].strings:  # all are of other partitions
            _remove(folder, made)
            made = []
    if missing:
        _remove(folder, made)
        return SortedStrings([], missing[0])
    return SortedStrings([_entry(of.name, of) for of in made])


@contextlib.contextmanager
def _saying_why() -> Iterator[list[str]]:
    """Ends the block where strings do not fit, with the reason in what it gives."""
    missing: list[str] = []
    try:
        yield missing
    except _DoNotFit as error:
        missing.append(error.why)
    except DiskFull:
        missing.append(MissingStrings.ROOM)


def _places_of(hashes: Keys, partitions: int) -> Iterator[tuple[int, np.ndarray | None]]:
    """Which strings are in which partition, of those that have any; None: all."""
    if partitions == 1:
        yield 0, None
        return
    of = partition_of(hashes, partitions)
    order = np.argsort(of, kind="stable")
    for partition, (begin, end) in enumerate(pairwise(np.searchsorted(of[order], np.arange(partitions + 1)).tolist())):
        if begin < end:
            yield partition, order[begin:end]


def _own(hashes: Keys, strings: pa.Array, own: Partitions) -> tuple[Keys, pa.Array]:
    mine = are_own(hashes, own)
    return hashes[mine], strings.filter(pa.array(mine))


def _check_room(path: Path, nbytes: int, keep_free: int) -> None:
    if shutil.disk_usage(path.parent).free - nbytes < keep_free:
        raise _DoNotFit(MissingStrings.ROOM)


def _fitting(parts: Strings, path: Path, keep_free: int) -> Strings:
    """The same, as long as each finds room before it is written."""
    for hashes, strings in parts:
        _check_room(path, strings.nbytes, keep_free)
        yield hashes, strings


def _merged(
    folder: Path, made: Sequence[StringsFile], name: str, keep_free: int, own: Partitions | None = None
) -> StringsFile:
    """One file in place of several, of all that is in them or of what partitions have of that."""
    with opened(folder, made) as parts:
        merged: Strings = merged_strings([part.all() for part in parts])
        if own is not None:
            merged = (_own(*some, own) for some in merged)
        one = write_ascending(folder / name, _fitting(merged, folder / name, keep_free))
    _remove(folder, made)
    return one


def _remove(folder: Path, made: Iterable[StringsFile]) -> None:
    for of in made:
        files.remove_file(folder / of.name, durable=False)


def _is_whole(path: Path, xxh3: str) -> bool:
    files.drop_from_cache(path)
    return checksum(path) == xxh3


def _entry(name: str, of: StringsFile) -> tuple[str, str, int, int]:
    return name, of.xxh3, of.bytes, of.strings
