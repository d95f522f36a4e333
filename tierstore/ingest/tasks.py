"""The work of a bulk load's helper: shards to sorted runs, runs to one file a key range, and reading it back.

    shards --sort_shards--> runs --(join_runs)--> fewer runs
           --merge_runs--> base-<table>-<nnnn>.<kind> --ingest--> disk tier --read_file, read_back--> digest

A run is a scratch file of rows that fit in memory, sorted (`runs.py`). A merge takes the same key range out of every
run, so that its output is one file that overlaps no other. Memory is bounded by `run_bytes` and by `step_bytes`, not by
the table, its files, or the number of runs (but for files of RocksDB's kind, which are held as a whole).

Runs in a helper process, one task at a time, on its main thread. Whatever a crash leaves lies in the load's own
directory; `journal.py` says what of it is finished, and the tasks `Check…` whether it still is what it was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tierstore.errors import Corruption, SnapshotError
from tierstore.formats.files import drop_from_cache, make_dir, publish
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.colliding import Repeated, distinct, duplicate, repeated, set_apart, without
from tierstore.ingest.plan import KEY_CODE_BYTES
from tierstore.ingest.runs import Run, RunWriter, in_order, merged, order_of, read_digest
from tierstore.kernels.codec import BadRow, encode
from tierstore.kernels.digest import digest_rows
from tierstore.kernels.sealed import HEADER_BYTES
from tierstore.tiers.disk import DiskTier, ReaderPool, SstFile, TableContent, file_xxh3, write_sst
from tierstore.tiers.sealed import BASES, base_record
from tierstore.tiers.sealed_file import SealedFile, open_sealed, read_blocks, write_sealed_parts
from tierstore.types import BaseKind, Keys, KeyType, Rows

_BLOCK_ROWS = 1 << 16
_MIN_BATCH_ROWS = 256
_BLOCK_CACHE_BYTES = 8 << 20
_READ_BYTES = 4 << 20
_COPY_BYTES = 8 << 20

Tell = Callable[[int], None]  # how many more rows are done


@dataclass(frozen=True, slots=True)
class SortShards:
    """Read these shards of a table and leave sorted runs `<prefix>.<n>`."""

    table: str
    shards: list[int]
    prefix: str
    run_bytes: int
    batch_bytes: int
    partitions: int = 1

    @property
    def key(self) -> str:
        """By which the journal knows the task, as all that make files have one."""
        return Path(self.prefix).name


@dataclass(frozen=True, slots=True)
class JoinRuns:
    """Make one run `out` of these, which may go then."""

    table: str
    runs: list[Run]
    out: str
    step_bytes: int
    partitions: int = 1

    @property
    def key(self) -> str:
        return Path(self.out).name


@dataclass(frozen=True, slots=True)
class MergeRuns:
    """Take a partition's keys in [low, high) (None: no limit) out of every run into the file `out`."""

    table: str
    table_id: int
    runs: str  # a file that lists them, as JSON
    low: int | None
    high: int | None
    out: str
    base: BaseKind
    step_bytes: int
    partition: int = 0
    partitions: int = 1

    @property
    def key(self) -> str:
        return Path(self.out).name


@dataclass(frozen=True, slots=True)
class CopyFile:
    """Copy a finished file of a built version to `out`; see `Merged`."""

    table: str
    source: str
    out: str
    rows: int
    digest: int
    xxh3: str
    bytes: int
    base: BaseKind = "sealed"

    @property
    def key(self) -> str:
        return Path(self.out).name


@dataclass(frozen=True, slots=True)
class Ingest:
    """Make the disk tier `db` of these finished files (path, xxh3, bytes, entries) and of the store's own records."""

    db: str
    base: BaseKind
    files: list[tuple[str, str, int, int]]
    records: dict[str, str]
    scratch: str  # a directory of that name comes and goes


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Sum up a sealed file."""

    path: str
    xxh3: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Sum up the keys in [low, high) of a table in the disk tier `db`, all of RocksDB, which nobody writes."""

    db: str
    table_id: int
    row_bytes: int
    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True)
class CheckRun:
    """Read a run that a load has left which was broken off."""

    path: str
    rows: int
    row_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class CheckFile:
    """Read a finished file that a load has left which was broken off; see `Merged`."""

    path: str
    base: BaseKind
    rows: int
    digest: int
    xxh3: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Checked:
    """Whether it is what it was when it was finished."""

    whole: bool


@dataclass(frozen=True, slots=True)
class Sorted:
    """What SortShards made. `sums` are the sums of the vectors, one list a shard."""

    runs: list[Run]
    sums: list[list[float]]
    digests: list[str]  # of the runs

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.runs)


@dataclass(frozen=True, slots=True)
class Joined:
    """What JoinRuns made."""

    run: Run
    digest: str

    @property
    def rows(self) -> int:
        return self.run[1]


@dataclass(frozen=True, slots=True)
class Merged:
    """What MergeRuns made; `xxh3` is None if no key fell into the range and there is no file.

    `colliding`: (string, code) of the keys that are not under their hash.
    """

    rows: int
    digest: int
    xxh3: str | None
    bytes: int
    entries: int
    colliding: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ingested:
    """What Ingest made."""

    files: int


Making = SortShards | JoinRuns | MergeRuns | CopyFile  # make what may be used again
Task = Making | CheckRun | CheckFile | Ingest | ReadFile | ReadBack
Result = Sorted | Joined | Merged | Checked | Ingested | TableContent
TASKS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (SortShards, JoinRuns, MergeRuns, CopyFile, CheckRun, CheckFile, Ingest, ReadFile, ReadBack)
}
RESULTS: dict[str, Any] = {
    "SortShards": Sorted,
    "JoinRuns": Joined,
    "MergeRuns": Merged,
    "CopyFile": Merged,
    "CheckRun": Checked,
    "CheckFile": Checked,
    "Ingest": Ingested,
    "ReadFile": TableContent,
    "ReadBack": TableContent,
}


def run_task(snapshot: Snapshot, task: Task, tell: Tell) -> Result:
    """Do a task. Raises SnapshotError for a snapshot that may not be loaded, StorageError and OSError for the disk."""
    match task:
        case SortShards():
            return sort_shards(snapshot, task, tell)
        case JoinRuns():
            return join_runs(snapshot, task, tell)
        case MergeRuns():
            return merge_runs(snapshot, task, tell)
        case CopyFile():
            return copy_file(task, tell)
        case CheckRun():
            return Checked(read_digest(task.path, task.rows, task.row_bytes, tell) == task.digest)
        case CheckFile():
            return check_file(task, tell)
        case Ingest():
            return ingest(task)
        case ReadFile():
            return read_file(task, tell)
        case ReadBack():
            return read_back(task, tell)


def sort_shards(snapshot: Snapshot, task: SortShards, tell: Tell) -> Sorted:
    """Check, read and encode the shards; write their rows as sorted runs."""
    entry = snapshot.manifest.table(task.table)
    spec = entry.spec()
    row_bytes = spec.row_bytes
    rows_left = sum(entry.shards[number].rows for number in task.shards)
    capacity = min(rows_left, max(1, task.run_bytes // (row_bytes + KEY_CODE_BYTES)))
    batch_rows = max(_MIN_BATCH_ROWS, task.batch_bytes // (4 * spec.dim))
    buffer = _Buffer(task.prefix, capacity, row_bytes, task.partitions)
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
    return Sorted(buffer.runs, sums, buffer.digests)


class _Buffer:
    """Rows gathered in memory until there are enough for a run."""

    def __init__(self, prefix: str, capacity: int, row_bytes: int, partitions: int) -> None:
        self.runs: list[Run] = []
        self.digests: list[str] = []
        self._prefix, self._partitions = prefix, partitions
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
        order = order_of(keys, self._partitions)
        path = f"{self._prefix}.{len(self.runs)}"
        with RunWriter(path, self._filled, self._rows.shape[1]) as run:
            for start in range(0, len(order), _BLOCK_ROWS):
                part = order[start : start + _BLOCK_ROWS]
                run.add(keys[part], in_order(self._rows, part))
        self.runs.append((path, self._filled))
        self.digests.append(run.digest)
        self._filled = 0


def join_runs(snapshot: Snapshot, task: JoinRuns, tell: Tell) -> Joined:
    """Merge whole runs into one."""
    row_bytes = snapshot.manifest.table(task.table).spec().row_bytes
    total = sum(rows for _, rows in task.runs)
    with RunWriter(task.out, total, row_bytes) as run:
        for number in range(task.partitions):
            part = number, task.partitions
            for keys, rows in merged(task.runs, row_bytes, None, None, task.step_bytes, part):
                run.add(keys, rows)
                tell(len(keys))
                del keys, rows
    return Joined((task.out, total), run.digest)


def merge_runs(snapshot: Snapshot, task: MergeRuns, tell: Tell) -> Merged:
    """Merge one key range of all runs and write it as one file, of the kind that the base is made of."""
    spec = snapshot.manifest.table(task.table).spec()
    runs = [(path, rows) for path, rows in json.loads(Path(task.runs).read_bytes())]
    part = task.partition, task.partitions

    def steps(runs: list[Run]) -> Iterator[tuple[Keys, Rows]]:
        return merged(runs, spec.row_bytes, task.low, task.high, task.step_bytes, part)

    told = 0

    def tell_once(rows: int) -> None:
        nonlocal told
        told += rows
        tell(rows)

    try:
        return _write_merged(task, spec.row_bytes, distinct(steps(runs)), tell_once)
    except Repeated as error:
        if spec.key is not KeyType.STRING:
            raise duplicate(snapshot, spec, error.code) from None
    tell(-told)  # all of it again, without the keys that collide and with a run of them
    codes = repeated(steps(runs))
    run, colliding = set_apart(snapshot, spec, codes, runs, part, task.low, task.high, f"{task.out}.colliding")
    try:
        others = without(steps([*runs, run]), codes)
        return replace(_write_merged(task, spec.row_bytes, distinct(others), tell), colliding=colliding)
    finally:
        os.unlink(run[0])


def _write_merged(task: MergeRuns, row_bytes: int, steps: Iterator[tuple[Keys, Rows]], tell: Tell) -> Merged:
    count = digest = 0

    def counted() -> Iterator[tuple[Keys, Rows]]:
        nonlocal count, digest
        for keys, rows in steps:
            count, digest = count + len(keys), (digest + digest_rows(keys, rows)) % 2**64
            yield keys, rows
            tell(len(keys))
            del keys, rows

    parts = counted()
    head = list(islice(parts, 1))
    if not head:
        return Merged(0, 0, None, 0, 0)
    out = Path(task.out)
    built: SealedFile | SstFile
    if task.base == "sealed":
        built = write_sealed_parts(out, task.table_id, row_bytes, _then(head, parts))
    else:
        keys, rows = (np.concatenate(column) for column in zip(*_then(head, parts), strict=True))
        built = write_sst(out, tables=[(task.table_id, keys, rows, None)], delta=False)
    return Merged(count, digest, built.xxh3, built.bytes, built.entries)


def _then(head: list[tuple[Keys, Rows]], parts: Iterator[tuple[Keys, Rows]]) -> Iterator[tuple[Keys, Rows]]:
    """What is in `head`, which lets go of it, and then the others."""
    while head:
        yield head.pop()
    yield from parts


def ingest(task: Ingest) -> Ingested:
    """Make the disk tier and have it take in all files in one step. RocksDB would hold up a process that serves."""
    kind = SealedFile if task.base == "sealed" else SstFile
    scratch = make_dir(task.scratch)
    files = [kind(_linked(Path(path), scratch), xxh3, size, entries) for path, xxh3, size, entries in task.files]
    records = {name: value.encode() for name, value in task.records.items()}
    if task.base == "sealed":
        records |= base_record(files)
    last = write_sst(scratch / "records", records=records, delta=True)
    reader = ReaderPool(1)
    disk = BASES[task.base].create(Path(task.db), block_cache_bytes=_BLOCK_CACHE_BYTES, reader=reader)
    try:
        disk.ingest([*files, last])
    finally:
        disk.close()
        reader.close()
    scratch.rmdir()
    return Ingested(len(files))


def _linked(path: Path, folder: Path) -> Path:
    """A second name of a file, for the disk tier to take: until the load is over, the first one stays to be found.

    Where the file system has no links it is moved, and a load that is broken off from here on begins again.
    """
    with contextlib.suppress(OSError):
        os.link(path, folder / path.name)
        return folder / path.name
    return path


def copy_file(task: CopyFile, tell: Tell) -> Merged:
    """Copy a file, durably, by the system's own means, which may share its blocks; then read it back from the drive."""
    with open(task.source, "rb", buffering=0) as source, publish(task.out) as out:
        _copy(source, out, task)
    check = CheckFile(task.out, task.base, task.rows, task.digest, task.xxh3, task.bytes)
    if check_file(check, tell).whole:
        return Merged(task.rows, task.digest, task.xxh3, task.bytes, task.rows)
    if not check_file(replace(check, path=task.source), lambda _: None).whole:
        raise SnapshotError("is damaged; copy or build it again", file=Path(task.source).name)
    raise Corruption(f"{task.out}: what was read back is not what was copied: the disk is not to be trusted")


def _copy(source: BinaryIO, out: BinaryIO, task: CopyFile) -> None:
    left = task.bytes
    copy: Callable[[int, int, int], int] = os.copy_file_range
    while left:
        try:
            got = copy(source.fileno(), out.fileno(), min(_COPY_BYTES, left))
        except OSError as error:
            if copy is _send or error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            copy = _send  # between file systems of two kinds
            continue
        if not got:
            raise SnapshotError("is damaged: it ends too early; copy or build it again", file=Path(task.source).name)
        left -= got


def _send(source: int, out: int, size: int) -> int:
    return os.sendfile(out, source, None, size)


def check_file(task: CheckFile, tell: Tell) -> Checked:
    """Read a whole finished file from the drive, and compare it with what was said of it when it was made."""
    path = Path(task.path)
    try:
        if path.stat().st_size != task.bytes:
            return Checked(False)
        drop_from_cache(path)
        if task.base == "sealed":
            content = read_file(ReadFile(task.path, task.xxh3, task.bytes), tell)
            return Checked((content.rows, content.digest) == (task.rows, task.digest))
        whole = file_xxh3(path) == task.xxh3
    except (Corruption, FileNotFoundError):
        return Checked(False)
    tell(task.rows)
    return Checked(whole)


def read_file(task: ReadFile, tell: Tell) -> TableContent:
    """Read one file of what was ingested, every block against its checksum."""
    file = open_sealed(Path(task.path), xxh3=task.xxh3, size=task.bytes)
    try:
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        at_once = max(1, _READ_BYTES // file.block_bytes)
        count, digest, floor = 0, 0, None
        for block in range(0, len(file.fences), at_once):
            ahead = HEADER_BYTES + (block + at_once) * file.block_bytes  # the drive reads on while this is looked at
            os.posix_fadvise(file.fd, ahead, _READ_BYTES, os.POSIX_FADV_WILLNEED)
            keys, rows = read_blocks(file, block, min(block + at_once, len(file.fences)), floor)
            count, digest, floor = count + len(keys), (digest + digest_rows(keys, rows)) % 2**64, int(keys[-1])
            tell(len(keys))
        return TableContent(count, 0, digest)
    finally:
        os.close(file.fd)


def read_back(task: ReadBack, tell: Tell) -> TableContent:
    """Read a range of what was ingested, every block against its checksum."""
    reader = ReaderPool(1)
    disk = DiskTier.open(Path(task.db), block_cache_bytes=_BLOCK_CACHE_BYTES, reader=reader, read_only=True)
    try:
        return disk.sum_up(task.table_id, task.row_bytes, task.low, task.high, tell=tell)
    finally:
        disk.close()
        reader.close()
