"""Bulk load: a snapshot to the files of a new version's disk tier, and the proof that they arrived there.

Phases over all tables. "read": shards are checked, encoded and left as sorted runs. "join", of very large tables:
runs are merged into fewer. "write": every table is cut into key ranges, and each range is merged from all runs into one
file. "ingest": the disk tier is made of the files. "verify": they are read back, from the drive, and their digests
compared. All are done by helper processes (`helpers.py`), as `plan.py` says how; this module adds up what they report.

Any thread may load, several at once into different directories; the interpreter lock is hardly held.

A load that was broken off, by a crash or because it was cancelled, leaves its directory: runs, finished files, and a
journal that says which they are. One of the same snapshot, in the same directory and with the same plan, goes on from there: phase
"check" reads what is to be used, and what is not as long as it was, or has another digest, is made again.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import Corruption, DiskFull, LoadCancelled, SnapshotError, StorageError
from tierstore.formats.built import BuiltManifest, BuiltSnapshot
from tierstore.formats.files import drop_from_cache, make_dir, remove_leftover, remove_tree, tree_bytes
from tierstore.formats.manifest import TableEntry
from tierstore.formats.names import BUILT_MANIFEST, JOURNAL
from tierstore.formats.snapshot import Snapshot
from tierstore.ingest.helpers import Helpers
from tierstore.ingest.journal import Journal
from tierstore.ingest.plan import TablePlan, plan_load
from tierstore.ingest.runs import Run, quantiles
from tierstore.ingest.tasks import (
    RESULTS,
    CheckFile,
    CheckRun,
    CopyFile,
    Ingest,
    Joined,
    JoinRuns,
    Making,
    Merged,
    MergeRuns,
    ReadBack,
    ReadFile,
    Sorted,
    SortShards,
)
from tierstore.tiers.sealed import BASE
from tierstore.tiers.sealed_file import FORMAT as SEALED_FORMAT
from tierstore.tiers.sealed_file import SealedFile
from tierstore.tiers.sst import SstFile
from tierstore.types import BaseKind, Progress, ProgressFn

log = logging.getLogger(__name__)

_RUNS = "runs"
_HELPERS = "helpers"
_INGEST = "ingest"
_JOURNAL_FORMAT = 1  # another one where runs, files or what tasks report mean something else
_REPORT_EVERY_S = 0.06
_READERS_A_HELPER = 4  # parts of a base of RocksDB's that are read back


_Written = tuple[Any, Merged]  # what MergeRuns or CopyFile made


def can_go_on(error: BaseException) -> bool:
    """Whether a load that ended so may be taken up again: it was stopped, and what it made is neither bad nor in the way."""
    return isinstance(error, LoadCancelled) or not isinstance(error, (SnapshotError, Corruption, DiskFull))


@dataclass(frozen=True, slots=True)
class TableBuild:
    """A built table. `mean` float32 [dim] of its vectors (zeros if it is empty); `digest` see `kernels/digest.py`.

    `colliding`: (string, code) of the keys that are not under their hash.
    """

    rows: int
    mean: npt.NDArray[np.float32]
    digest: int
    colliding: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BaseBuild:
    """Files of the kind `base` that overlap in no key, ready to ingest; table ids count from 1 in the order of the manifest.

    `seconds` by phase and `helper_peak_bytes` (the most memory of one helper) are for benchmarks. `kept_rows` by phase were
    not done again: an earlier load had done them.
    """

    files: list[SstFile | SealedFile]
    tables: dict[str, TableBuild]
    base: BaseKind
    seconds: dict[str, float] = field(default_factory=dict)
    helper_peak_bytes: int = 0
    kept_rows: dict[str, int] = field(default_factory=dict)


class BulkLoad:
    """One load, into the directory `out_dir`, which is made, and emptied of all that is not of the same load. A context manager that ends its helpers.

    `memory_bytes` bounds what all helpers hold together, beyond about 150 MB that each takes to run at
    all. Needs room on disk for the rows twice. `progress` is called from this thread, 5 to 20 times a
    second; what it raises ends the load.

    With `aside` helpers keep to half of the processors: something else serves meanwhile. `share` says how much of the
    time they may be at work.

    All steps raise StorageError when the disk or a helper fails, and LoadCancelled when `cancelled` is
    set. Once the block has raised, `out_dir` is gone, unless it `can_go_on` and there is something to `keep`. Otherwise
    it is the caller's to remove, once the load is over.
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
        keep: bool = True,
        share: Callable[[], float] = lambda: 1.0,
        partitions: int = 1,
        progress: ProgressFn | None = None,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._snapshot, self._aside, self._share, self._keep = snapshot, aside, share, keep
        self._tables = snapshot.manifest.tables
        self._out_dir = Path(out_dir).absolute()
        self._base: BaseKind = base
        self._partitions = partitions
        self._built = snapshot if isinstance(snapshot, BuiltSnapshot) else None
        if self._built is not None:
            _check_suits(self._built, base)
        self.plan = plan_load(self._tables, base=base, memory_bytes=memory_bytes, workers=workers)
        self._report = _Reporter(progress, cancelled)
        self._helpers: Helpers | None = None
        self._journal: Journal | None = None
        self._whole: set[str] = set()  # keys of tasks that an earlier load has done
        self._merged: set[str] = set()  # tables of which it has made all files
        self._kept_rows: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self.written: list[_Written] = []

    def __enter__(self) -> BulkLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._helpers is not None:
            self._helpers.end()
        if self._journal is not None:
            self._journal.close()
        kept = error is None or (self._keep and can_go_on(error) and self._journal is not None and self._journal.done)
        remove_tree(self._out_dir / _HELPERS if kept else self._out_dir)

    def build(self) -> BaseBuild:
        """Build the sorted files. Raises SnapshotError (file, row, reason) for a snapshot that may not be loaded."""
        make_dir(self._out_dir)
        self._journal = journal = Journal(self._out_dir / JOURNAL, self._about())
        if not journal.done:
            self._remove_all_but(frozenset())
        make_dir(self._out_dir / _RUNS)
        make_dir(self._out_dir / _HELPERS)
        self._check_room()
        began = time.monotonic()
        self._helpers = helpers = Helpers(
            self._snapshot, self.plan.helpers, self._out_dir / _HELPERS, aside=self._aside, share=self._share
        )
        if journal.done:
            self._check_leftovers()
        tables = self._sort() if self._built is None else self._copy(self._built.built)
        self._report.finish()
        remove_tree(self._out_dir / _RUNS)
        self._seconds["write"] = time.monotonic() - began - self._seconds.get("read", 0.0)
        kind = SealedFile if self._base == "sealed" else SstFile
        files = [kind(Path(task.out), of.xxh3, of.bytes, of.entries) for task, of in self.written if of.xxh3]
        return BaseBuild(files, tables, self._base, self._seconds, helpers.peak_bytes, self._kept_rows)

    def _sort(self) -> dict[str, TableBuild]:
        """Make files of the snapshot's shards."""
        began = time.monotonic()
        total = sum(table.rows for table in self._tables)
        reads = [task for plan in self.plan.tables for task in self._plan_reads(plan)]
        sorted_ = self._gather(reads, self._make("read", reads, total))
        runs = self._join({name: result.runs for name, result in sorted_.items()})
        self._seconds["read"] = time.monotonic() - began
        merges = [task for plan in self.plan.tables for task in self._plan_merges(plan, runs[plan.table])]
        self.written = list(zip(merges, self._make("write", merges, total), strict=True))
        return {table.name: self._sum_up(table, sorted_[table.name]) for table in self._tables}

    def _copy(self, built: BuiltManifest) -> dict[str, TableBuild]:
        """Take files that are made already."""
        copies = [task for plan in self.plan.tables for task in self._known_merges(plan)]
        self.written = list(zip(copies, self._make("copy", copies, sum(of.rows for of in built.tables)), strict=True))
        return {
            of.name: TableBuild(of.rows, np.array(of.mean, np.float32), int(of.digest, 16), list(of.colliding))
            for of in built.tables
        }

    def ingest(self, build: BaseBuild, db: Path, records: Mapping[str, bytes]) -> None:
        """Make the disk tier in `db` of what was built, and of the store's own `records`. Raises StorageError."""
        assert self._helpers is not None
        files = [(str(file.path), file.xxh3, file.bytes, file.entries) for file in build.files]
        self._report.phase("ingest", 0)
        texts = {name: value.decode() for name, value in records.items()}
        scratch = str(self._out_dir / _INGEST)
        self._helpers.run([Ingest(str(db), self._base, files, texts, scratch)], self._report.tick)

    def read_back(self, db: Path) -> None:
        """Compare what the disk tier in `db` holds, as the drive gives it, with what was built. Raises Corruption."""
        assert self._helpers is not None
        if self._built is not None:
            return  # each file was read back when it was copied
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
        written = [(merge, built) for merge, built in self.written if built.xxh3 is not None]
        if self._base == "sealed":
            return [
                (ReadFile(str(db / BASE / Path(merge.out).name), str(built.xxh3), built.bytes), [(merge, built)])
                for merge, built in written
            ]
        parts: list[tuple[ReadFile | ReadBack, list[_Written]]] = []
        for plan in self.plan.tables:  # each task opens all of RocksDB, so they are few
            mine = [(merge, built) for merge, built in self.written if merge.table == plan.table]
            at_once = -(-len(mine) // (_READERS_A_HELPER * self.plan.workers))
            for begin in range(0, len(mine), max(1, at_once)):
                part = mine[begin : begin + at_once]
                first, last = part[0][0], part[-1][0]
                parts.append((ReadBack(str(db), first.table_id, plan.row_bytes, first.low, last.high), part))
        return parts

    def _check_room(self) -> None:
        """Raise StorageError now rather than after an hour."""
        built = () if self._built is None else self._built.built.files
        needed = self.plan.disk_bytes if self._built is None else sum(file.bytes for file in built)
        needed = max(0, needed - tree_bytes(self._out_dir))  # what is there of an earlier load is used
        free = shutil.disk_usage(self._out_dir).free
        scratch = self.plan.scratch_bytes if self._built is None else 0
        log.info(
            "%s: a load that needs about %d MiB on disk, %d of them for its own time; %d are free",
            self._out_dir, needed >> 20, scratch >> 20, free >> 20,
        )  # fmt: skip
        if free < needed:
            raise StorageError(
                f"the disk under {self._out_dir} has {free >> 20} MiB free, this load needs about {needed >> 20} MiB: free some space and try again"
            )

    def _plan_reads(self, plan: TablePlan) -> list[SortShards]:
        prefix = str(self._out_dir / _RUNS / plan.table)
        return [
            SortShards(
                plan.table, list(shards), f"{prefix}-{number}", plan.run_bytes, plan.batch_bytes, self._partitions
            )
            for number, shards in enumerate(plan.groups)
        ]

    def _about(self) -> dict[str, Any]:
        """What must be the same for a load to go on from what another has left."""
        return {
            "format": _JOURNAL_FORMAT,
            "snapshot": self._snapshot.identity(),
            "directory": str(self._out_dir),
            "base": self._base,
            "plan": asdict(self.plan),
            "partitions": self._partitions,
        }

    def _make(self, phase: str, tasks: Sequence[Making], total: int) -> list[Any]:
        """What the tasks make: what is there and whole, and else what they make now."""
        assert self._helpers is not None
        kept = [self._result(task).rows for task in tasks if task.key in self._whole]
        self._kept_rows[phase] = sum(kept)
        self._report.phase(phase, total, sum(kept))
        left = [task for task in tasks if task.key not in self._whole]
        self._helpers.run(left, self._report.tick, self._note)
        return list(map(self._result, tasks))

    def _result(self, task: Making) -> Any:
        return RESULTS[type(task).__name__](**self._known[task.key])

    @property
    def _known(self) -> dict[str, Any]:
        """What the journal says: results by the key of their task."""
        assert self._journal is not None
        return self._journal.done

    def _note(self, task: Making, result: Any) -> None:
        assert self._journal is not None
        self._journal.note(task.key, asdict(result))
        if isinstance(task, JoinRuns):
            _remove_runs(task.runs)

    def _check_leftovers(self) -> None:
        """Find out what of an earlier load can be used, and remove the rest.

        Runs are looked at only of tables whose files are not all there, and those that were joined may be gone.
        """
        done = self._known
        merges = {plan.table: self._known_merges(plan) for plan in self.plan.tables}
        files = {task: Merged(**done[task.key]) for of in merges.values() for task in of if task.key in done}
        good = self._check(
            [
                CheckFile(task.out, task.base, of.rows, of.digest, of.xxh3, of.bytes)
                for task, of in files.items()
                if of.xxh3 is not None
            ]
        )
        self._whole = {task.key for task, of in files.items() if task.out in good or of.xxh3 is None}
        keep = good & {task.out for task in files}
        self._merged = {name for name, of in merges.items() if of and all(task.key in self._whole for task in of)}
        begun: list[tuple[dict[str, Sorted], list[JoinRuns]]] = []
        checks = []
        for plan in self.plan.tables:
            reads = {task.key: Sorted(**done[task.key]) for task in self._plan_reads(plan) if task.key in done}
            if plan.table in self._merged:
                self._whole |= set(reads)
                continue
            joins = []
            if len(reads) == len(plan.groups):
                joins = self._plan_joins(plan, [(path, rows) for of in reads.values() for path, rows in of.runs])
            joins = [task for task in joins if task.key in done]
            begun.append((reads, joins))
            made = [
                *reads.values(),
                *(Sorted([of.run], [], [of.digest]) for of in (Joined(**done[task.key]) for task in joins)),
            ]
            checks += [
                CheckRun(path, rows, plan.row_bytes, digest)
                for of in made
                for (path, rows), digest in zip(of.runs, of.digests, strict=True)
            ]
        good = self._check(checks)
        for reads, joins in begun:
            joined = {task.key: task for task in joins if task.out in good}
            needless = {path for task in joined.values() for path, _ in task.runs}
            there = good | needless
            sorted_ = {key: of for key, of in reads.items() if all(path in there for path, _ in of.runs)}
            self._whole |= {*joined, *sorted_}
            keep |= {task.out for task in joined.values()}
            keep |= {path for of in sorted_.values() for path, _ in of.runs} - needless
        self._remove_all_but(keep)

    def _check(self, tasks: Sequence[CheckFile | CheckRun]) -> set[str]:
        """Paths of those that are whole."""
        assert self._helpers is not None
        self._report.phase("check", sum(task.rows for task in tasks))
        found = self._helpers.run(tasks, self._report.tick)
        return {task.path for task, result in zip(tasks, found, strict=True) if result.whole}

    def _remove_all_but(self, keep: Set[str]) -> None:
        for path in [*self._out_dir.glob("*"), *(self._out_dir / _RUNS).glob("*")]:
            if path.name not in (JOURNAL, _RUNS) and str(path) not in keep:
                remove_leftover(path)

    def _join(self, runs: dict[str, list[Run]]) -> dict[str, list[Run]]:
        """Fewer runs, of the tables that have too many of them to merge at once."""
        plans = [plan for plan in self.plan.tables if plan.table not in self._merged]
        tasks = [task for plan in plans for task in self._plan_joins(plan, runs[plan.table])]
        if not tasks:
            return runs
        for task in tasks:
            if task.key in self._whole:
                _remove_runs(task.runs)  # some may have been made again with others
        joined = self._make("join", tasks, sum(rows for task in tasks for _, rows in task.runs))
        tables = {task.table for task in tasks}
        runs = {table: [] if table in tables else of for table, of in runs.items()}
        for task, result in zip(tasks, joined, strict=True):
            runs[task.table].append(tuple(result.run))
        return runs

    def _plan_joins(self, plan: TablePlan, runs: list[Run]) -> list[JoinRuns]:
        at_once = plan.join(len(runs))
        return [
            JoinRuns(
                plan.table,
                runs[begin : begin + at_once],
                str(self._out_dir / _RUNS / f"{plan.table}.joined-{begin}"),
                plan.step_bytes,
                self._partitions,
            )
            for begin in range(0, len(runs) if at_once > 1 else 0, at_once)
        ]

    def _plan_merges(self, plan: TablePlan, runs: list[Run]) -> list[MergeRuns]:
        if not runs:
            return []
        if self._known.get(_ranges(plan)) is None:
            assert self._journal is not None
            files, parts = -(-plan.files // self._partitions), range(self._partitions)
            cuts = [quantiles(runs, plan.row_bytes, files, (part, self._partitions)) for part in parts]
            self._journal.note(_ranges(plan), {"cuts": cuts})
        self._listed(plan).write_text(json.dumps(runs))
        return self._known_merges(plan)

    def _known_merges(self, plan: TablePlan) -> list[Any]:
        """Tasks that make the files of a table whose ranges are known, or which is built already."""
        if self._built is not None:
            return self._plan_copies(self._built, plan.table)
        out, suffix = self._out_dir / f"base-{plan.table}", "sealed" if self._base == "sealed" else "sst"
        table_id = 1 + [other.name for other in self._tables].index(plan.table)
        listed = str(self._listed(plan))
        return [
            MergeRuns(
                plan.table,
                table_id,
                listed,
                low,
                high,
                f"{out}-{f'{part:04}-' if self._partitions > 1 else ''}{number:04}.{suffix}",
                self._base,
                plan.step_bytes,
                part,
                self._partitions,
            )
            for part, cuts in enumerate(self._known.get(_ranges(plan), {"cuts": []})["cuts"])
            for number, (low, high) in enumerate(pairwise([None, *cuts, None]))
        ]

    def _plan_copies(self, built: BuiltSnapshot, table: str) -> list[CopyFile]:
        return [
            CopyFile(
                table,
                str(built.path(file.name)),
                str(self._out_dir / Path(file.name).name),
                file.rows,
                int(file.digest, 16),
                file.xxh3,
                file.bytes,
            )
            for file in built.built.files
            if file.table == table
        ]

    def _listed(self, plan: TablePlan) -> Path:
        """A file that lists a table's runs: each of its merges needs them all."""
        return self._out_dir / _RUNS / f"{plan.table}.json"

    def _gather(self, tasks: list[SortShards], results: list[Any]) -> dict[str, Sorted]:
        gathered = {table.name: Sorted([], [], []) for table in self._tables}
        for task, result in zip(tasks, results, strict=True):
            gathered[task.table].runs.extend((path, rows) for path, rows in result.runs)
            gathered[task.table].sums.extend(result.sums)
        return gathered

    def _sum_up(self, table: TableEntry, sorted_: Sorted) -> TableBuild:
        mine = [merged for task, merged in self.written if task.table == table.name]
        rows = sum(part.rows for part in mine)
        if rows != table.rows:
            raise StorageError(
                f"table {table.name}: {table.rows} rows were read but {rows} written: the disk under {self._out_dir} is not to be trusted"
            )
        mean = np.zeros(table.dim, np.float64)
        for shard in sorted_.sums:  # in the order of the manifest, so that a load gives the same mean each time
            mean += np.asarray(shard, np.float64)
        return TableBuild(
            rows,
            (mean / max(1, rows)).astype(np.float32),
            sum(part.digest for part in mine) % 2**64,
            [(text, code) for part in mine for text, code in part.colliding],
        )


def _check_suits(snapshot: BuiltSnapshot, base: BaseKind) -> None:
    if base != "sealed":
        raise SnapshotError(
            f"it was built for the base 'sealed', and the setting base is {base!r}: change that, or load the snapshot itself",
            file=BUILT_MANIFEST,
        )
    if snapshot.built.sealed_format != SEALED_FORMAT:
        raise SnapshotError(
            f"expected sealed files of format {SEALED_FORMAT}, came {snapshot.built.sealed_format}: build it again with this release",
            file=BUILT_MANIFEST,
        )


def _ranges(plan: TablePlan) -> str:
    """The key by which the journal knows the ranges of a table's files."""
    return f"{plan.table}.ranges"


def _remove_runs(runs: Iterable[Run]) -> None:
    for path, _ in runs:
        Path(path).unlink(missing_ok=True)


class _Reporter:
    """Turns ticks into calls of `progress`, and `cancelled` into an error."""

    def __init__(self, progress: ProgressFn | None, cancelled: threading.Event | None) -> None:
        self._progress: Callable[[Progress], None] = progress or (lambda _: None)
        self._cancelled = cancelled
        self._phase = ""
        self._done = self._total = 0
        self._next = 0.0

    def phase(self, name: str, total: int, done: int = 0) -> None:
        self.finish()
        self._phase, self._done, self._total = name, done, total
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
