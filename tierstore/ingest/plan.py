"""How a load is cut into work, from the sizes in the manifest alone: how large runs are, how they are merged, how many files.

    shards --> runs that fit in memory --> (joined into fewer runs, where there are many) --> files of a key range each

Memory is given, the table is not: so what grows with it is the number of runs. A merge reads a little of each of its runs
at a time; with more than `MAX_FAN_IN` of them that would be too little for a drive, and too many files open. Then about
the square root of them are joined at a time first, which writes and reads the rows once more.

Pure: nothing is read, and nothing is remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierstore.formats.manifest import TableEntry
from tierstore.types import BaseKind

KEY_CODE_BYTES = 8
MAX_FAN_IN = 400  # runs that one merge reads side by side
MAX_FILES = 2000  # of a table
SAMPLES = 1024  # keys of a run by which ranges are chosen
MIN_RANGE_BYTES = 4 << 20  # below it another file costs more than a second helper gains
_FILE_BYTES = 256 << 20  # unless that gives too many files
_LEAST_SHARE = 8 << 20
_MAX_BATCH_BYTES = 16 << 20
_OVERHEAD = 16  # bytes a row that lengths, indexes and checksums take, generously
_UNUSED = 7  # of rows' bytes, at most one in so many is what they leave free in a block


@dataclass(frozen=True, slots=True)
class TablePlan:
    """How one table is loaded. `groups` are the shards that one helper reads in one go, by number."""

    table: str
    rows: int
    row_bytes: int
    run_bytes: int  # of a run, at most
    batch_bytes: int  # of vectors that are encoded at once
    step_bytes: int  # of rows that are merged at once; as much again while they are put in order
    files: int  # at most
    groups: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """Of keys and rows."""
        return self.rows * (self.row_bytes + KEY_CODE_BYTES)

    @property
    def runs(self) -> int:
        """Runs that reading leaves, at most: each group's last one may be short."""
        return min(self.rows, self.bytes // max(1, self.run_bytes) + len(self.groups))

    def join(self, runs: int) -> int:
        """How many runs are joined into one before they are merged; 1 where they are few enough."""
        return 1 if runs <= MAX_FAN_IN else math.ceil(math.sqrt(runs))

    @property
    def fan_in(self) -> int:
        """Runs that one merge reads side by side, at most."""
        return max(self.join(self.runs), -(-self.runs // self.join(self.runs)))

    @property
    def pieces(self) -> int:
        """Parts of runs that are opened and searched for a task, all tasks together."""
        joined = 0 if self.join(self.runs) == 1 else self.runs
        return joined + self.files * -(-self.runs // self.join(self.runs))

    @property
    def read_bytes(self) -> int:
        """What a merge reads of a run at a time."""
        return self.step_bytes // max(1, self.fan_in)

    @property
    def tasks(self) -> int:
        joins = 0 if self.join(self.runs) == 1 else -(-self.runs // self.join(self.runs))
        return len(self.groups) + joins + 2 * self.files

    @property
    def file_bytes(self) -> int:
        """Of the finished files, about."""
        return self.bytes + self.rows * (_OVERHEAD + self.row_bytes // _UNUSED)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a snapshot is loaded by `workers` helpers, of which each may hold `share_bytes`."""

    tables: tuple[TablePlan, ...]
    workers: int
    share_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """What runs take on disk, beside the finished files: that of the rows, and of runs that are just being joined."""
        joining = max(
            (plan.join(plan.runs) * plan.run_bytes for plan in self.tables if plan.join(plan.runs) > 1), default=0
        )
        return sum(plan.bytes for plan in self.tables) + self.workers * joining

    @property
    def disk_bytes(self) -> int:
        """What the load needs on disk while it runs."""
        return self.scratch_bytes + sum(plan.file_bytes for plan in self.tables)

    @property
    def helpers(self) -> int:
        """As many as have something to do that is worth the start of a process; one makes a disk tier of no rows, too."""
        work = max(sum(len(plan.groups) for plan in self.tables), sum(plan.files for plan in self.tables))
        return max(1, min(self.workers, work, 1 + sum(plan.bytes for plan in self.tables) // MIN_RANGE_BYTES))


def plan_load(tables: tuple[TableEntry, ...], *, base: BaseKind, memory_bytes: int, workers: int) -> LoadPlan:
    """The plan for tables as the manifest gives them, within `memory_bytes` of all helpers together."""
    workers = max(1, workers)
    share = max(_LEAST_SHARE, memory_bytes // workers)
    return LoadPlan(tuple(_plan_table(table, base, share, workers) for table in tables), workers, share)


def _plan_table(table: TableEntry, base: BaseKind, share: int, workers: int) -> TablePlan:
    row_bytes = table.spec().row_bytes
    size = table.rows * (row_bytes + KEY_CODE_BYTES)
    run_bytes, step_bytes = share // 2, max(1 << 20, share // 4)
    # RocksDB's files are written out of memory as a whole, ours step by step
    file_bytes = max(_FILE_BYTES, -(-size // MAX_FILES)) if base == "sealed" else min(_FILE_BYTES, step_bytes)
    return TablePlan(
        table.name,
        table.rows,
        row_bytes,
        run_bytes,
        min(_MAX_BATCH_BYTES, share // 8),
        step_bytes,
        max(-(-size // file_bytes), min(workers, -(-size // MIN_RANGE_BYTES))),
        _groups(table, run_bytes, workers),
    )


def _groups(table: TableEntry, run_bytes: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Small shards are read in one task, as many as fill a run, but so that each helper has some."""
    record = table.spec().row_bytes + KEY_CODE_BYTES
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
