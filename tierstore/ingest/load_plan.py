"""The plan of a load, from the sizes in the manifest: how large runs are, how they are merged, how many files.

    shards --> runs that fit in memory --> (joined into fewer runs, where there are many) --> files of a key range each

Memory is fixed and tables are not, so a larger table has more runs. A merge reads a little of each of its runs
at a time; with more than `MAX_FAN_IN` of them that would be too little for a drive, and too many files open. Then about
the square root of them are joined at a time first, which writes and reads the rows once more.

Pure functions and immutable values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tierstore.formats.row_times import TIME_BYTES
from tierstore.formats.snapshot.manifest import TableEntry
from tierstore.types import BaseKind, Partitions, ProgressFn, TableSpec

KEY_CODE_BYTES = 8
MAX_FAN_IN = 400  # runs that one merge reads at the same time
MAX_FILES = 2000  # of a table
SAMPLES = 1024  # keys of a run from which ranges are chosen
MIN_RANGE_BYTES = 4 << 20  # below it, another file costs more than a second helper gains
SMALL_BYTES = 8 << 20  # a load of so many takes a fraction of the second that a process needs to start
_FILE_BYTES = 256 << 20  # unless that gives too many files
_LEAST_SHARE = 8 << 20
_MAX_BATCH_BYTES = 16 << 20
_OVERHEAD = 16  # bytes a row for lengths, indexes and checksums, rounded up
_MARGIN = 6.0
_UNUSED = 7  # at most one byte in so many is unused in a block


@dataclass(frozen=True, slots=True)
class FileSpec:
    """Which files a load makes, of which rows. `partitions` are made, of which each file has one; else, with `own`, only
    rows of these are loaded.

    Rows that are older than the ttl of their table when the load begins, or at `began_s`, are not loaded. The times of the
    others are kept, unless `keep_times` is False.
    """

    base: BaseKind = "sealed"
    partitions: int = 1
    own: Partitions | None = None
    keep_times: bool = True
    began_s: int | None = None


@dataclass(frozen=True, slots=True)
class LoadWork:
    """How a load works. `memory_bytes` bounds what its helpers (`workers`) hold together, beyond about 150 MB that each takes
    to run at all.

    With `aside` helpers use half of the processors, because requests are served meanwhile. `share` says for which share of
    the time they may work. `progress` is called from the load's thread, 5 to 20 times a second; what it raises ends the
    load. `cancelled` ends it once it is set. With `keep` another load may go on from what this one leaves.
    """

    memory_bytes: int
    workers: int
    aside: bool = False
    share: Callable[[], float] = lambda: 1.0
    keep: bool = True
    progress: ProgressFn | None = None
    cancelled: threading.Event | None = None


@dataclass(frozen=True, slots=True)
class TablePlan:
    """How one table is loaded. `groups`: the shards that one task reads, by number."""

    table: str
    rows: int
    row_bytes: int  # in runs
    run_bytes: int  # of a run, at most
    batch_bytes: int  # of vectors that are encoded at once
    step_bytes: int  # of rows that are merged at once; as much again while they are put in order
    files: int  # at most
    groups: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """The bytes of keys and rows."""
        return self.rows * (self.row_bytes + KEY_CODE_BYTES)

    @property
    def runs(self) -> int:
        """Most runs that reading makes: the last one of each group may be short."""
        return min(self.rows, self.bytes // max(1, self.run_bytes) + len(self.groups))

    def join(self, runs: int) -> int:
        """How many runs are joined into one before they are merged; 1 where they are few enough."""
        return 1 if runs <= MAX_FAN_IN else math.ceil(math.sqrt(runs))

    @property
    def fan_in(self) -> int:
        """Most runs that one merge reads at the same time."""
        return max(self.join(self.runs), -(-self.runs // self.join(self.runs)))

    @property
    def pieces(self) -> int:
        """Parts of runs that are opened and searched, all tasks together."""
        joined = 0 if self.join(self.runs) == 1 else self.runs
        return joined + self.files * -(-self.runs // self.join(self.runs))

    @property
    def read_bytes(self) -> int:
        """Bytes that a merge reads of a run at a time."""
        return self.step_bytes // max(1, self.fan_in)

    @property
    def tasks(self) -> int:
        joins = 0 if self.join(self.runs) == 1 else -(-self.runs // self.join(self.runs))
        return len(self.groups) + joins + 2 * self.files

    @property
    def file_bytes(self) -> int:
        """Bytes of the finished files, about."""
        return self.bytes + self.rows * (_OVERHEAD + self.row_bytes // _UNUSED)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a snapshot is loaded by `workers` helpers, of which each may hold `share_bytes`."""

    tables: tuple[TablePlan, ...]
    workers: int
    share_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """Bytes of runs on disk, in addition to the finished files: all rows, and those of runs that are being joined."""
        joining = max(
            (plan.join(plan.runs) * plan.run_bytes for plan in self.tables if plan.join(plan.runs) > 1), default=0
        )
        return sum(plan.bytes for plan in self.tables) + self.workers * joining

    @property
    def disk_bytes(self) -> int:
        """Bytes that the load needs on disk while it runs."""
        return self.scratch_bytes + sum(plan.file_bytes for plan in self.tables)

    @property
    def helpers(self) -> int:
        """Helpers with enough work to be worth the start of a process; none for a small load, which its caller does."""
        size = sum(plan.bytes for plan in self.tables)
        if size <= SMALL_BYTES:
            return 0
        work = max(sum(len(plan.groups) for plan in self.tables), sum(plan.files for plan in self.tables))
        return max(1, min(self.workers, work, 1 + size // MIN_RANGE_BYTES))


def run_row_bytes(spec: TableSpec) -> int:
    """Bytes of a row in runs: where the table has a ttl its time follows it."""
    return spec.row_bytes + (0 if spec.ttl_s is None else TIME_BYTES)


def plan_load(
    tables: tuple[TableEntry, ...], *, base: BaseKind, memory_bytes: int, workers: int, part: float = 1.0
) -> LoadPlan:
    """The plan for tables as the manifest gives them, within `memory_bytes` of all helpers together.

    part: of the rows, how many are loaded, about: those of some partitions of the keys.
    """
    workers = max(1, workers)
    share = max(_LEAST_SHARE, memory_bytes // workers)
    return LoadPlan(tuple(_plan_table(table, base, share, workers, part) for table in tables), workers, share)


def _plan_table(table: TableEntry, base: BaseKind, share: int, workers: int, part: float) -> TablePlan:
    row_bytes = run_row_bytes(table.spec())
    # so many standard deviations that a hash never exceeds it
    rows = min(table.rows, math.ceil(table.rows * part + _MARGIN * math.sqrt(table.rows * part)))
    size = rows * (row_bytes + KEY_CODE_BYTES)
    run_bytes, step_bytes = share // 2, max(1 << 20, share // 4)
    # a file of RocksDB's is held in memory as a whole, ours are written step by step
    file_bytes = max(_FILE_BYTES, -(-size // MAX_FILES)) if base == "sealed" else min(_FILE_BYTES, step_bytes)
    return TablePlan(
        table.name,
        rows,
        row_bytes,
        run_bytes,
        min(_MAX_BATCH_BYTES, share // 8),
        step_bytes,
        max(-(-size // file_bytes), min(workers, -(-size // MIN_RANGE_BYTES))),
        _groups(table, run_bytes, workers, part),
    )


def _groups(table: TableEntry, run_bytes: int, workers: int, part: float) -> tuple[tuple[int, ...], ...]:
    """Small shards are read by one task, as many as fill a run, but each helper gets some."""
    record = math.ceil((run_row_bytes(table.spec()) + KEY_CODE_BYTES) * part)
    even = max(MIN_RANGE_BYTES, table.rows * record // workers)
    groups: list[list[int]] = []
    room = 0
    for number, shard in enumerate(table.shards):
        wanted = shard.rows * record
        if not groups or wanted > room:
            groups.append([])
            room = min(run_bytes, even)
        groups[-1].append(number)
        room -= wanted
    return tuple(map(tuple, groups))
