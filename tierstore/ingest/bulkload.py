"""Bulk load: a snapshot to the files of a new version's disk tier, and the proof that they arrived there.

Four phases over all tables. "read": shards are checked, encoded and left as sorted runs. "write": every
table is cut into key ranges that fit in memory, and each range is merged from all runs into one file.
"ingest": the disk tier is made of the files. "verify": every range is read back and its digest compared.
All are done by helper processes (`helpers.py`); this module plans, and adds up what they report.

Any thread may load, several at once into different directories; the interpreter lock is hardly held.
A crash leaves a directory that nothing refers to.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import Corruption, LoadCancelled, StorageError
from tierstore.formats.files import make_dir, remove_tree
from tierstore.formats.manifest import TableEntry
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.helpers import Helpers
from tierstore.ingest.tasks import KEY_CODE_BYTES, Ingest, Merged, MergeRuns, ReadBack, Sorted, SortShards, run_keys
from tierstore.tiers.sealed_file import SealedFile
from tierstore.tiers.sst import SstFile
from tierstore.types import BaseKind, Keys, Progress, ProgressFn

_RUNS = "runs"
_HELPERS = "helpers"
_RECORDS = "records.sst"
_MIN_RANGE_BYTES = 4 << 20  # below it another file costs more than a second helper gains
_MAX_RANGE_BYTES = 256 << 20
_MAX_BATCH_BYTES = 16 << 20
_SAMPLES_A_RANGE = 16
_REPORT_EVERY_S = 0.06
_OVERHEAD = 16  # bytes a row that lengths, indexes and checksums take, generously
_UNUSED = 7  # of rows' bytes, at most one in so many is what they leave free in a block


@dataclass(frozen=True, slots=True)
class TableBuild:
    """A built table. `mean` float32 [dim] of its vectors (zeros if it is empty); `digest` see `kernels/digest.py`."""

    rows: int
    mean: npt.NDArray[np.float32]
    digest: int


@dataclass(frozen=True, slots=True)
class BaseBuild:
    """Files of the kind `base` that overlap in no key, ready to ingest; table ids count from 1 in the order of the manifest.

    `seconds` by phase and `helper_peak_bytes` (the most memory of one helper) are for benchmarks.
    """

    files: list[SstFile | SealedFile]
    tables: dict[str, TableBuild]
    base: BaseKind
    seconds: dict[str, float] = field(default_factory=dict)
    helper_peak_bytes: int = 0


class BulkLoad:
    """One load, into the directory `out_dir`, which is made, and emptied first. A context manager that ends its helpers.

    `memory_bytes` bounds what all helpers hold together, beyond about 150 MB that each takes to run at
    all. Needs room on disk for the rows twice. `progress` is called from this thread, 5 to 20 times a
    second; what it raises ends the load.

    With `aside` helpers keep to half of the processors: something else serves meanwhile.

    All steps raise StorageError when the disk or a helper fails, and LoadCancelled when `cancelled` is
    set. Once the block has raised, `out_dir` is gone.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        out_dir: Path,
        *,
        memory_bytes: int,
        workers: int,
        base: BaseKind,
        aside: bool = False,
        progress: ProgressFn | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._snapshot, self._aside = snapshot, aside
        self._tables = snapshot.manifest.tables
        self._out_dir = Path(out_dir).absolute()
        self._workers = max(1, workers)
        self._base: BaseKind = base
        self._share = max(8 << 20, memory_bytes // self._workers)  # of one helper
        self._report = _Reporter(progress, cancelled)
        self._helpers: Helpers | None = None
        self._written: list[tuple[MergeRuns, Merged]] = []

    def __enter__(self) -> BulkLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._helpers is not None:
            self._helpers.end()
        remove_tree(self._out_dir if error is not None else self._out_dir / _HELPERS)

    def build(self) -> BaseBuild:
        """Build the sorted files. Raises SnapshotError (file, row, reason) for a snapshot that may not be loaded."""
        remove_tree(self._out_dir)
        make_dir(self._out_dir / _RUNS)
        make_dir(self._out_dir / _HELPERS)
        self._check_room()
        total = sum(table.rows for table in self._tables)
        began = time.monotonic()
        reads = [task for table in self._tables for task in self._plan_reads(table)]
        self._helpers = helpers = Helpers(
            self._snapshot, self._helper_count(reads), self._out_dir / _HELPERS, aside=self._aside
        )
        self._report.phase("read", total)
        sorted_ = self._gather(reads, helpers.run(reads, self._report.tick))
        between = time.monotonic()
        merges = [task for table in self._tables for task in self._plan_merges(table, sorted_[table.name].runs)]
        self._report.phase("write", total)
        merged = helpers.run(merges, self._report.tick)
        self._report.finish()
        remove_tree(self._out_dir / _RUNS)
        self._written = list(zip(merges, merged, strict=True))
        seconds = {"read": between - began, "write": time.monotonic() - between}
        kind = SealedFile if self._base == "sealed" else SstFile
        files = [kind(Path(m.out), r.xxh3, r.bytes, r.entries) for m, r in self._written if r.xxh3]
        tables = {table.name: self._sum_up(table, sorted_[table.name]) for table in self._tables}
        return BaseBuild(files, tables, self._base, seconds, helpers.peak_bytes)

    def ingest(self, build: BaseBuild, db: Path, records: Mapping[str, bytes]) -> None:
        """Make the disk tier in `db` of what was built, and of the store's own `records`. Raises StorageError."""
        assert self._helpers is not None
        files = [(str(file.path), file.xxh3, file.bytes, file.entries) for file in build.files]
        self._report.phase("ingest", 0)
        texts = {name: value.decode() for name, value in records.items()}
        scratch = str(self._out_dir / _RECORDS)
        self._helpers.run([Ingest(str(db), self._base, files, texts, scratch)], self._report.tick)

    def read_back(self, db: Path) -> None:
        """Compare what the disk tier in `db` holds with what was built. Raises Corruption."""
        assert self._helpers is not None
        lengths = {table.name: table.spec().row_bytes for table in self._tables}
        tasks = [ReadBack(str(db), m.table_id, lengths[m.table], m.low, m.high, m.base) for m, _ in self._written]
        self._report.phase("verify", sum(table.rows for table in self._tables))
        found = self._helpers.run(tasks, self._report.tick)
        self._report.finish()
        for (merge, built), content in zip(self._written, found, strict=True):
            if (content.rows, content.deleted, content.digest) != (built.rows, 0, built.digest):
                raise Corruption(
                    f"table {merge.table!r}, {Path(merge.out).name}: {content.rows} rows with digest {content.digest:016x} were read "
                    f"back, {built.rows} with {built.digest:016x} were built: the disk under {db} is not to be trusted"
                )

    def _check_room(self) -> None:
        """Raise StorageError now rather than after an hour."""
        rows = sum(table.rows * (2 * _record_bytes(table) + _overhead(table)) for table in self._tables)
        free = shutil.disk_usage(self._out_dir).free
        if free < rows:
            raise StorageError(
                f"the disk under {self._out_dir} has {free >> 20} MiB free, this load needs about {rows >> 20} MiB: free some space and try again"
            )

    def _helper_count(self, reads: list[SortShards]) -> int:
        """As many as have something to do that is worth the start of a process."""
        ranges = sum(self._range_count(table) for table in self._tables)
        size = sum(table.rows * _record_bytes(table) for table in self._tables)
        return min(self._workers, max(len(reads), ranges), 1 + size // _MIN_RANGE_BYTES)

    def _plan_reads(self, table: TableEntry) -> list[SortShards]:
        """Small shards are read in one task, as many as fill a run."""
        run_bytes = self._share // 2
        groups: list[list[int]] = []
        room = 0
        for number, shard in enumerate(table.shards):
            wanted = shard.rows * _record_bytes(table)
            if not groups or wanted > room:
                groups.append([])
                room = min(run_bytes, self._even_share(table))
            groups[-1].append(number)
            room -= wanted
        batch_bytes = min(_MAX_BATCH_BYTES, self._share // 8)
        prefix = str(self._out_dir / _RUNS / table.name)
        return [
            SortShards(table.name, shards, f"{prefix}-{number}", run_bytes, batch_bytes)
            for number, shards in enumerate(groups)
        ]

    def _even_share(self, table: TableEntry) -> int:
        return max(_MIN_RANGE_BYTES, table.rows * _record_bytes(table) // self._workers)

    def _range_count(self, table: TableEntry) -> int:
        size = table.rows * _record_bytes(table)
        fits = max(1 << 20, min(_MAX_RANGE_BYTES, self._share // 4))  # twice that is held while it is merged
        return max(-(-size // fits), min(self._workers, -(-size // _MIN_RANGE_BYTES)))

    def _plan_merges(self, table: TableEntry, runs: list[tuple[str, int]]) -> list[MergeRuns]:
        if not runs:
            return []
        limits = [None, *_quantiles(runs, self._range_count(table)), None]
        out, suffix = self._out_dir / f"base-{table.name}", "sealed" if self._base == "sealed" else "sst"
        table_id = 1 + [other.name for other in self._tables].index(table.name)
        return [
            MergeRuns(table.name, table_id, runs, low, high, f"{out}-{number:04}.{suffix}", self._base)
            for number, (low, high) in enumerate(pairwise(limits))
        ]

    def _gather(self, tasks: list[SortShards], results: list[Any]) -> dict[str, Sorted]:
        gathered = {table.name: Sorted([], []) for table in self._tables}
        for task, result in zip(tasks, results, strict=True):
            gathered[task.table].runs.extend((path, rows) for path, rows in result.runs)
            gathered[task.table].sums.extend(result.sums)
        return gathered

    def _sum_up(self, table: TableEntry, sorted_: Sorted) -> TableBuild:
        mine = [merged for task, merged in self._written if task.table == table.name]
        rows = sum(part.rows for part in mine)
        if rows != table.rows:
            raise StorageError(
                f"table {table.name}: {table.rows} rows were read but {rows} written: the disk under {self._out_dir} is not to be trusted"
            )
        mean = np.zeros(table.dim, np.float64)
        for shard in sorted_.sums:  # in the order of the manifest, so that a load gives the same mean each time
            mean += np.asarray(shard, np.float64)
        return TableBuild(rows, (mean / max(1, rows)).astype(np.float32), sum(part.digest for part in mine) % 2**64)


def _record_bytes(table: TableEntry) -> int:
    return table.spec().row_bytes + KEY_CODE_BYTES


def _overhead(table: TableEntry) -> int:
    return _OVERHEAD + table.spec().row_bytes // _UNUSED


def _quantiles(runs: list[tuple[str, int]], ranges: int) -> list[int]:
    """Ascending keys that cut the rows of all runs into about equal ranges, at most `ranges` of them."""
    if ranges <= 1:
        return []
    samples: list[Keys] = []
    weights: list[npt.NDArray[np.float64]] = []
    for path, count in runs:
        step = max(1, count // (_SAMPLES_A_RANGE * ranges))
        sample = np.array(run_keys(path, count)[step // 2 :: step])
        samples.append(sample)
        weights.append(np.full(len(sample), count / len(sample)))
    keys = np.concatenate(samples)
    order = np.argsort(keys, kind="stable")
    reached = np.cumsum(np.concatenate(weights)[order])
    cuts = np.searchsorted(reached, reached[-1] * np.arange(1, ranges) / ranges)
    return np.unique(keys[order][cuts]).tolist()  # type: ignore[no-any-return]


class _Reporter:
    """Turns ticks into calls of `progress`, and `cancelled` into an error."""

    def __init__(self, progress: ProgressFn | None, cancelled: threading.Event | None) -> None:
        self._progress: Callable[[Progress], None] = progress or (lambda _: None)
        self._cancelled = cancelled
        self._phase = ""
        self._done = self._total = 0
        self._next = 0.0

    def phase(self, name: str, total: int) -> None:
        self.finish()
        self._phase, self._done, self._total = name, 0, total
        self._say()

    def tick(self, rows: int) -> None:
        if self._cancelled is not None and self._cancelled.is_set():
            raise LoadCancelled("the load was cancelled")
        self._done += rows
        if time.monotonic() >= self._next:
            self._say()

    def finish(self) -> None:
        if self._phase:
            self._say()

    def _say(self) -> None:
        self._next = time.monotonic() + _REPORT_EVERY_S
        self._progress(Progress(self._phase, self._done, self._total))
