"""The work of a bulk load's helper: shards to sorted runs, runs to one file a key range, and reading it back.

    shards --sort_shards--> runs --merge_runs--> base-<table>-<nnnn>.<kind> --ingest--> disk tier --read_back--> digest

A run is a scratch file of rows that fit in memory, sorted: n key codes (int64), then n rows in the
storage dtype. A merge takes the same key range out of every run, so that its output is one file that
overlaps no other. Memory is bounded by `run_bytes` in the first step and by the size of the key range
in the second, not by the table.

Runs in a helper process, one task at a time, on its main thread. Whatever a crash leaves lies in the
load's own directory, which is removed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import SnapshotError, StorageError
from tierstore.formats.snapshot import Snapshot
from tierstore.kernels.codec import BadRow, encode
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.disk import ReaderPool, SstFile, TableContent, write_sst
from tierstore.tiers.sealed import BASES, base_record
from tierstore.tiers.sealed_file import SealedFile, write_sealed
from tierstore.types import BaseKind, Keys, KeyType, Rows, TableSpec

KEY_CODE_BYTES = 8
_BLOCK_ROWS = 1 << 16
_MIN_BATCH_ROWS = 256
_BLOCK_CACHE_BYTES = 8 << 20

Tell = Callable[[int], None]  # how many more rows are done


@dataclass(frozen=True, slots=True)
class SortShards:
    """Read these shards of a table and leave sorted runs `<prefix>.<n>`."""

    table: str
    shards: list[int]
    prefix: str
    run_bytes: int
    batch_bytes: int


@dataclass(frozen=True, slots=True)
class MergeRuns:
    """Take the keys in [low, high) (None: no limit) out of every run into the file `out`."""

    table: str
    table_id: int
    runs: list[tuple[str, int]]  # path, rows
    low: int | None
    high: int | None
    out: str
    base: BaseKind


@dataclass(frozen=True, slots=True)
class Ingest:
    """Make the disk tier `db` of these finished files (path, xxh3, bytes, entries) and of the store's own records."""

    db: str
    base: BaseKind
    files: list[tuple[str, str, int, int]]
    records: dict[str, str]
    scratch: str  # a file of that name comes and goes


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Sum up the keys in [low, high) of a table in the disk tier `db`, which nobody writes."""

    db: str
    table_id: int
    row_bytes: int
    low: int | None
    high: int | None
    base: BaseKind


@dataclass(frozen=True, slots=True)
class Sorted:
    """What SortShards made. `sums` are the sums of the vectors, one list a shard."""

    runs: list[tuple[str, int]]
    sums: list[list[float]]


@dataclass(frozen=True, slots=True)
class Merged:
    """What MergeRuns made; `xxh3` is None if no key fell into the range and there is no file."""

    rows: int
    digest: int
    xxh3: str | None
    bytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class Ingested:
    """What Ingest made."""

    files: int


Task = SortShards | MergeRuns | Ingest | ReadBack
TASKS: dict[str, Any] = {"SortShards": SortShards, "MergeRuns": MergeRuns, "Ingest": Ingest, "ReadBack": ReadBack}
RESULTS: dict[str, Any] = {"SortShards": Sorted, "MergeRuns": Merged, "Ingest": Ingested, "ReadBack": TableContent}


def run_task(snapshot: Snapshot, task: Task, tell: Tell) -> Sorted | Merged | Ingested | TableContent:
    """Do a task. Raises SnapshotError for a snapshot that may not be loaded, StorageError and OSError for the disk."""
    if isinstance(task, SortShards):
        return sort_shards(snapshot, task, tell)
    if isinstance(task, MergeRuns):
        return merge_runs(snapshot, task, tell)
    if isinstance(task, Ingest):
        return ingest(task)
    return read_back(task, tell)


def sort_shards(snapshot: Snapshot, task: SortShards, tell: Tell) -> Sorted:
    """Check, read and encode the shards; write their rows as sorted runs."""
    entry = snapshot.manifest.table(task.table)
    spec = entry.spec()
    row_bytes = spec.row_bytes
    rows_left = sum(entry.shards[number].rows for number in task.shards)
    capacity = min(rows_left, max(1, task.run_bytes // (row_bytes + KEY_CODE_BYTES)))
    batch_rows = max(_MIN_BATCH_ROWS, task.batch_bytes // (4 * spec.dim))
    buffer = _Buffer(task.prefix, capacity, row_bytes)
    sums = []
    for number in task.shards:
        path = entry.shards[number].path
        snapshot.check_checksum(task.table, number)
        total = np.zeros(spec.dim, np.float64)
        for batch in snapshot.batches(task.table, number, batch_rows):
            try:
                rows = encode(batch.vectors, spec.dtype)
            except BadRow as error:
                raise SnapshotError(
                    f"column {error.column}: {error.reason}", file=path, row=batch.first_row + error.row
                ) from error
            total += batch.vectors.sum(axis=0, dtype=np.float64)
            buffer.add(batch.keys, rows)
            tell(len(batch.keys))
        sums.append(total.tolist())
    buffer.flush()
    return Sorted(buffer.runs, sums)


class _Buffer:
    """Rows gathered in memory until there are enough for a run."""

    def __init__(self, prefix: str, capacity: int, row_bytes: int) -> None:
        self.runs: list[tuple[str, int]] = []
        self._prefix = prefix
        self._keys = np.empty(capacity, np.int64)
        self._rows = np.empty((capacity, row_bytes), np.uint8)
        self._filled = 0

    def add(self, keys: Keys, rows: Rows) -> None:
        done = 0
        while done < len(keys):
            part = min(len(keys) - done, len(self._keys) - self._filled)
            self._keys[self._filled : self._filled + part] = keys[done : done + part]
            self._rows[self._filled : self._filled + part] = rows[done : done + part]
            self._filled += part
            done += part
            if self._filled == len(self._keys):
                self.flush()

    def flush(self) -> None:
        if not self._filled:
            return
        keys = self._keys[: self._filled]
        order = np.argsort(keys, kind="stable")
        path = f"{self._prefix}.{len(self.runs)}"
        with open(path, "xb", buffering=0) as file:
            _write(file, keys[order])
            for start in range(0, len(order), _BLOCK_ROWS):
                _write(file, _take(self._rows, order[start : start + _BLOCK_ROWS]))
        self.runs.append((path, self._filled))
        self._filled = 0


def merge_runs(snapshot: Snapshot, task: MergeRuns, tell: Tell) -> Merged:
    """Merge one key range of all runs and write it as one file, of the kind that the base is made of."""
    spec = snapshot.manifest.table(task.table).spec()
    keys, rows, pieces = _read_range(task, spec.row_bytes)
    if not len(keys):
        return Merged(0, 0, None, 0, 0)
    if pieces > 1:
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        rows = _take(rows, order)
    same = np.flatnonzero(keys[1:] == keys[:-1])
    if len(same):
        raise duplicate(snapshot, spec, int(keys[same[0]]))
    built: SealedFile | SstFile
    if task.base == "sealed":
        built = write_sealed(Path(task.out), task.table_id, keys, rows)
    else:
        built = write_sst(Path(task.out), tables=[(task.table_id, keys, rows, None)], delta=False)
    tell(len(keys))
    return Merged(len(keys), digest_rows(keys, rows), built.xxh3, built.bytes, built.entries)


def ingest(task: Ingest) -> Ingested:
    """Make the disk tier and have it take in all files in one step. RocksDB would hold up a process that serves."""
    kind = SealedFile if task.base == "sealed" else SstFile
    files = [kind(Path(path), xxh3, size, entries) for path, xxh3, size, entries in task.files]
    records = {name: value.encode() for name, value in task.records.items()}
    if task.base == "sealed":
        records |= base_record(files)
    last = write_sst(Path(task.scratch), records=records, delta=True)
    reader = ReaderPool(1)
    disk = BASES[task.base].create(Path(task.db), block_cache_bytes=_BLOCK_CACHE_BYTES, reader=reader)
    try:
        disk.ingest([*files, last])
    finally:
        disk.close()
        reader.close()
    return Ingested(len(files))


def read_back(task: ReadBack, tell: Tell) -> TableContent:
    """Read what was ingested, every block against its checksum."""
    reader = ReaderPool(1)
    disk = BASES[task.base].open(Path(task.db), block_cache_bytes=_BLOCK_CACHE_BYTES, reader=reader, read_only=True)
    try:
        return disk.sum_up(task.table_id, task.row_bytes, task.low, task.high, tell=tell)
    finally:
        disk.close()
        reader.close()


def run_keys(path: str, count: int) -> Keys:
    """The sorted key codes of a run, mapped from its file."""
    return np.memmap(path, np.int64, "r", shape=(count,)) if count else np.empty(0, np.int64)


def _read_range(task: MergeRuns, row_bytes: int) -> tuple[Keys, Rows, int]:
    pieces: list[tuple[str, int, int, int]] = []
    for path, count in task.runs:
        run = run_keys(path, count)
        first = 0 if task.low is None else int(np.searchsorted(run, task.low))
        last = count if task.high is None else int(np.searchsorted(run, task.high))
        if last > first:
            pieces.append((path, count, first, last))
    total = sum(last - first for _, _, first, last in pieces)
    keys = np.empty(total, np.int64)
    rows = np.empty((total, row_bytes), np.uint8)
    at = 0
    for path, count, first, last in pieces:
        end = at + last - first
        with open(path, "rb", buffering=0) as file:
            _read(file, first * KEY_CODE_BYTES, keys[at:end])
            _read(file, count * KEY_CODE_BYTES + first * row_bytes, rows[at:end])
        at = end
    return keys, rows, len(pieces)


def duplicate(snapshot: Snapshot, spec: TableSpec, code: int) -> SnapshotError:
    """The error for a code that occurs twice: a key given twice, or two strings of one hash. Reads the shards again."""
    first: tuple[str, int, str] | None = None
    for file, row, key in _occurrences(snapshot, spec, code):
        if first is None:
            first = file, row, key
        elif key == first[2]:
            return SnapshotError(f"duplicate key {key}: it is also in {first[0]}, row {first[1]}", file=file, row=row)
        else:
            return SnapshotError(
                f"keys {key} and {first[2]} ({first[0]}, row {first[1]}) have the same 64-bit hash: rename one of them",
                file=file,
                row=row,
            )
    return SnapshotError(f"table {spec.name}: the shards changed while they were read", file=first and first[0])


def _occurrences(snapshot: Snapshot, spec: TableSpec, code: int) -> Iterator[tuple[str, int, str]]:
    """(file, row, key as text) of every row with this code."""
    for number, shard in enumerate(snapshot.manifest.table(spec.name).shards):
        if spec.key is KeyType.STRING:
            for batch in snapshot.batches(spec.name, number):
                assert batch.strings is not None
                for at in np.flatnonzero(batch.keys == code).tolist():
                    yield shard.path, batch.first_row + at, repr(batch.strings[at].as_py())
            continue
        shown = str(code if spec.key is KeyType.INT64 else code % 2**64)
        first_row = 0
        for keys in snapshot.shard_keys(spec.name, number):
            for at in np.flatnonzero(keys == code).tolist():
                yield shard.path, first_row + at, shown
            first_row += len(keys)


def _take(rows: Rows, order: npt.NDArray[np.int64]) -> Rows:
    whole = rows.view(f"V{rows.shape[1]}").ravel()  # one item a row, so that each is copied at once
    return whole[order].view(np.uint8).reshape(len(order), rows.shape[1])


def _write(file: Any, array: npt.NDArray[Any]) -> None:
    left = np.ascontiguousarray(array).data.cast("B")
    while left:
        left = left[file.write(left) :]


def _read(file: Any, offset: int, into: npt.NDArray[Any]) -> None:
    file.seek(offset)
    left = into.data.cast("B")
    while left:
        got = file.readinto(left)
        if not got:
            raise StorageError(f"{file.name} is shorter than it was written")
        left = left[got:]
