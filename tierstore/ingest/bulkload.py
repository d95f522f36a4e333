"""Bulk load: a snapshot to the files of a new version's disk tier, and the proof that they arrived there.

Phases over all tables. "read": shards are checked, encoded and left as sorted runs. "join", of very large tables:
runs are merged into fewer. "write": every table is cut into key ranges, and each range is merged from all runs into one
file. "ingest": the disk tier is made of the files. "verify": they are read back, from the drive, and their digests
compared. All are done by helper processes (`helpers.py`), as `plan.py` says how; this module adds up what they report.

Any thread may load, several at once into different directories; the interpreter lock is hardly held.
A crash leaves a directory that nothing refers to.
"""

from __future__ import annotations

import json
import logging
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
from tierstore.formats.files import drop_from_cache, make_dir, remove_tree
from tierstore.formats.manifest import TableEntry
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.helpers import Helpers
from tierstore.ingest.plan import TablePlan, plan_load
from tierstore.ingest.runs import Run, quantiles
from tierstore.ingest.tasks import Ingest, JoinRuns, Merged, MergeRuns, ReadBack, ReadFile, Sorted, SortShards
from tierstore.tiers.sealed import BASE
from tierstore.tiers.sealed_file import SealedFile
from tierstore.tiers.sst import SstFile
from tierstore.types import BaseKind, Progress, ProgressFn

log = logging.getLogger(__name__)

_RUNS = "runs"
_HELPERS = "helpers"
_RECORDS = "records.sst"
_REPORT_EVERY_S = 0.06
_READERS_A_HELPER = 4  # parts of a base of RocksDB's that are read back


_Written = tuple[MergeRuns, Merged]


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

    With `aside` helpers keep to half of the processors: something else serves meanwhile. `share` says how much of the
    time they may be at work.

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
        share: Callable[[], float] = lambda: 1.0,
        progress: ProgressFn | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._snapshot, self._aside, self._share = snapshot, aside, share
        self._tables = snapshot.manifest.tables
        self._out_dir = Path(out_dir).absolute()
        self._base: BaseKind = base
        self.plan = plan_load(self._tables, base=base, memory_bytes=memory_bytes, workers=workers)
        self._report = _Reporter(progress, cancelled)
        self._helpers: Helpers | None = None
        self._written: list[_Written] = []

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
        reads = [task for plan in self.plan.tables for task in self._plan_reads(plan)]
        self._helpers = helpers = Helpers(
            self._snapshot, self.plan.helpers, self._out_dir / _HELPERS, aside=self._aside, share=self._share
        )
        self._report.phase("read", total)
        sorted_ = self._gather(reads, helpers.run(reads, self._report.tick))
        runs = self._join(helpers, {name: result.runs for name, result in sorted_.items()})
        between = time.monotonic()
        merges = [task for plan in self.plan.tables for task in self._plan_merges(plan, runs[plan.table])]
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
        """Compare what the disk tier in `db` holds, as the drive gives it, with what was built. Raises Corruption."""
        assert self._helpers is not None
        self._report.phase("verify", sum(table.rows for table in self._tables))
        for path in [*db.glob("*.sst"), *(db / BASE).glob("*")]:
            drop_from_cache(path)
            self._report.tick(0)
        parts = self._parts_to_read(db)
        found = self._helpers.run([task for task, _ in parts], self._report.tick)
        self._report.finish()
        for (_, written), content in zip(parts, found, strict=True):
            rows = sum(built.rows for _, built in written)
            digest = sum(built.digest for _, built in written) % 2**64
            if (content.rows, content.deleted, content.digest) != (rows, 0, digest):
                merge = written[0][0]
                raise Corruption(
                    f"table {merge.table!r}, {Path(merge.out).name}: {content.rows} rows with digest {content.digest:016x} were read "
                    f"back, {rows} with {digest:016x} were built: the disk under {db} is not to be trusted"
                )

    def _parts_to_read(self, db: Path) -> list[tuple[ReadFile | ReadBack, list[_Written]]]:
        """Tasks that together read everything, and what each of them should find."""
        written = [(merge, built) for merge, built in self._written if built.xxh3 is not None]
        if self._base == "sealed":
            return [
                (ReadFile(str(db / BASE / Path(merge.out).name), str(built.xxh3), built.bytes), [(merge, built)])
                for merge, built in written
            ]
        parts: list[tuple[ReadFile | ReadBack, list[_Written]]] = []
        for plan in self.plan.tables:  # each task opens all of RocksDB, so they are few
            mine = [(merge, built) for merge, built in self._written if merge.table == plan.table]
            at_once = -(-len(mine) // (_READERS_A_HELPER * self.plan.workers))
            for begin in range(0, len(mine), max(1, at_once)):
                part = mine[begin : begin + at_once]
                first, last = part[0][0], part[-1][0]
                parts.append((ReadBack(str(db), first.table_id, plan.row_bytes, first.low, last.high), part))
        return parts

    def _check_room(self) -> None:
        """Raise StorageError now rather than after an hour."""
        needed, free = self.plan.disk_bytes, shutil.disk_usage(self._out_dir).free
        log.info(
            "%s: a load that needs about %d MiB on disk, %d of them for its own time; %d are free",
            self._out_dir, needed >> 20, self.plan.scratch_bytes >> 20, free >> 20,
        )  # fmt: skip
        if free < needed:
            raise StorageError(
                f"the disk under {self._out_dir} has {free >> 20} MiB free, this load needs about {needed >> 20} MiB: free some space and try again"
            )

    def _plan_reads(self, plan: TablePlan) -> list[SortShards]:
        prefix = str(self._out_dir / _RUNS / plan.table)
        return [
            SortShards(plan.table, list(shards), f"{prefix}-{number}", plan.run_bytes, plan.batch_bytes)
            for number, shards in enumerate(plan.groups)
        ]

    def _join(self, helpers: Helpers, runs: dict[str, list[Run]]) -> dict[str, list[Run]]:
        """Fewer runs, of the tables that have too many of them to merge at once."""
        tasks: list[JoinRuns] = []
        for plan in self.plan.tables:
            of = runs[plan.table]
            at_once = plan.join(len(of))
            for begin in range(0, len(of) if at_once > 1 else 0, at_once):
                out = str(self._out_dir / _RUNS / f"{plan.table}.joined-{begin}")
                tasks.append(JoinRuns(plan.table, of[begin : begin + at_once], out, plan.step_bytes))
        if not tasks:
            return runs
        self._report.phase("join", sum(rows for task in tasks for _, rows in task.runs))
        joined = helpers.run(tasks, self._report.tick)
        tables = {task.table for task in tasks}
        runs = {table: [] if table in tables else of for table, of in runs.items()}
        for task, result in zip(tasks, joined, strict=True):
            runs[task.table].append(tuple(result.run))
        return runs

    def _plan_merges(self, plan: TablePlan, runs: list[Run]) -> list[MergeRuns]:
        if not runs:
            return []
        listed = self._out_dir / _RUNS / f"{plan.table}.json"
        listed.write_text(json.dumps(runs))
        limits = [None, *quantiles(runs, plan.row_bytes, plan.files), None]
        out, suffix = self._out_dir / f"base-{plan.table}", "sealed" if self._base == "sealed" else "sst"
        table_id = 1 + [other.name for other in self._tables].index(plan.table)
        return [
            MergeRuns(
                plan.table, table_id, str(listed), low, high, f"{out}-{number:04}.{suffix}", self._base, plan.step_bytes
            )
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
