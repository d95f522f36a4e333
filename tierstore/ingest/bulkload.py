"""Bulk load: from a snapshot to the files of a new version's disk tier, and the proof that they arrived there.

Phases, each over all tables. "read": shards are checked, encoded and written as sorted runs. "join", for very large tables:
runs are merged into fewer. "write": each table is cut into key ranges, and each range is merged from all runs into one
file. "ingest": the disk tier is made of the files. "verify": the files are read back from the drive and their digests
compared. Helper processes (`helpers.py`) do all of it, as `load_plan.py` and `load_tasks.py` say; this module adds up their
results.

Any thread may load; several loads may run at once, into different directories. The interpreter lock is hardly held.

A load that was broken off, by a crash or because it was cancelled, leaves its directory with runs, finished files and a
journal of them. A load of the same snapshot, into the same directory and with the same plan, goes on from there. Its phase
"check" reads these files; those with another length or digest are made again (`resume.py`).
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tierstore import kernels
from tierstore.errors import Corruption, DiskFull, LoadCancelled, SnapshotError, StorageError
from tierstore.formats.colliding import hash_arrow
from tierstore.formats.files import drop_from_cache, make_dir, remove_file, remove_leftover, remove_tree, tree_bytes
from tierstore.formats.keys import are_own, partition_of
from tierstore.formats.names import BUILT_MANIFEST, JOURNAL
from tierstore.formats.snapshot.built import BuiltManifest, BuiltSnapshot, BuiltTable, OtherFile
from tierstore.formats.snapshot.manifest import TableEntry
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.helpers import Helpers
from tierstore.ingest.journal import Journal, about
from tierstore.ingest.load_plan import FileSpec, LoadPlan, LoadWork, plan_load
from tierstore.ingest.load_tasks import RUNS, LoadTasks
from tierstore.ingest.progress import ProgressReporter
from tierstore.ingest.results import BaseBuild, TableBuild, Written, sum_up
from tierstore.ingest.resume import Finished, find_finished
from tierstore.ingest.runs import Run
from tierstore.ingest.tasks import (
    RESULTS,
    CheckFile,
    CheckRun,
    CopyStrings,
    Ingest,
    JoinRuns,
    Making,
    Sorted,
    SortedStrings,
    SortShards,
    SortStrings,
)
from tierstore.kernels import ahead
from tierstore.tiers.disk.sealed import BASE
from tierstore.tiers.disk.sealed_file import FORMAT as SEALED_FORMAT
from tierstore.tiers.disk.sealed_file import SealedFile
from tierstore.tiers.disk.sst import MAX_TABLES_WITH_STRINGS, SstFile
from tierstore.tiers.disk.strings_file import KeptStrings, MissingStrings, StringsFile
from tierstore.types import BaseKind, KeyType, Partitions

log = logging.getLogger(__name__)

_HELPERS = "helpers"
_INGEST = "ingest"
_JOURNAL_FORMAT = 1  # another one where runs, files or what tasks report mean something else
_LEFT_OUT = {
    MissingStrings.SIZE: "they would take more than string_keys_size allows",
    MissingStrings.ROOM: "the disk has no room for them",
    MissingStrings.BUILT: "what was built has none",
}
_SPARE_BYTES = 8 << 20  # for each helper that writes strings: another one may take the room that it has found


def disk_needed(snapshot: Snapshot, own: Partitions | None, *, memory_bytes: int, workers: int) -> int:
    """Bytes that a load of a snapshot, or of some partitions of its rows, into sealed files needs on disk, about."""
    part = 1.0 if own is None else own.part
    plan = plan_load(snapshot.manifest.tables, base="sealed", memory_bytes=memory_bytes, workers=workers, part=part)
    return _disk_bytes(plan, snapshot, own)


def _disk_bytes(plan: LoadPlan, snapshot: Snapshot, own: Partitions | None) -> int:
    if not isinstance(snapshot, BuiltSnapshot):
        return plan.disk_bytes
    sizes = [file.bytes for file in snapshot.built.files] or [0]
    return sum(sizes) if own is None else int(sum(sizes) * own.part) + plan.workers * max(sizes)


def can_go_on(error: BaseException) -> bool:
    """Whether another load can go on after this error: it was stopped, and what it made is good and leaves room."""
    return isinstance(error, LoadCancelled) or not isinstance(error, (SnapshotError, Corruption, DiskFull))


class BulkLoad:
    """One load into the directory `out_dir`, which is made, or emptied of all that is not of the same load. A context manager.

    Needs room on disk for the rows twice. All steps raise StorageError when the disk or a helper fails, and LoadCancelled when
    it is cancelled. If the block raises, `out_dir` is removed, unless another load `can_go_on` and may. Otherwise the caller
    removes it, once the load is over.
    """

    def __init__(self, snapshot: Snapshot, out_dir: Path, spec: FileSpec, work: LoadWork) -> None:
        self._snapshot, self._work = snapshot, work
        self._tables = snapshot.manifest.tables
        self._out_dir = Path(out_dir).absolute()
        self._built = snapshot if isinstance(snapshot, BuiltSnapshot) else None
        self._held, self._parts = spec.own, 1
        if self._built is not None:
            _check_suits(self._built, spec.base, spec.own)
            if self._built.held is not None:  # it has been chosen already
                self._held, self._parts, spec = self._built.held, self._built.held.count, replace(spec, own=None)
        self._spec = spec
        part = 1.0 if spec.own is None else spec.own.part
        self.plan = plan_load(
            self._tables, base=spec.base, memory_bytes=work.memory_bytes, workers=work.workers, part=part
        )
        self._progress = ProgressReporter(work.progress, work.cancelled)
        self._helpers: Helpers | None = None
        self._journal: Journal | None = None
        self._finished = Finished()  # by an earlier load
        self._kept_rows: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self.written: list[Written] = []

    def __enter__(self) -> BulkLoad:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._helpers is not None:
            self._helpers.end()
        if self._journal is not None:
            self._journal.close()
        kept = error is None or (
            self._work.keep and can_go_on(error) and self._journal is not None and self._journal.done
        )
        remove_tree(self._out_dir / _HELPERS if kept else self._out_dir)

    def build(self) -> BaseBuild:
        """Build the sorted files. Raises SnapshotError (file, row, reason) for a snapshot that may not be loaded."""
        make_dir(self._out_dir)
        identity = self._identity()
        self._journal = journal = Journal(self._out_dir / JOURNAL, identity)
        began_s = identity.get("began_s", 0)
        oldest_s = {of.name: max(0, began_s - of.ttl_s) for of in self._tables if of.ttl_s is not None}
        self._tasks = tasks = LoadTasks(self.plan, self._out_dir, journal, self._spec, oldest_s, self._built)
        if not journal.done:
            self._remove_all_but(frozenset())
        make_dir(self._out_dir / RUNS)
        make_dir(self._out_dir / _HELPERS)
        self._check_room()
        self._await_kernels()
        began = time.monotonic()
        self._helpers = helpers = Helpers(
            self._snapshot,
            self.plan.helpers
            or int(not isinstance(self._snapshot.root, Path)),  # to cancel need not wait for a storage
            self._out_dir / _HELPERS,
            aside=self._work.aside,
            share=self._work.share,
            waits=self._progress.wait_for,
        )
        if journal.done:
            self._finished = find_finished(self.plan, tasks, journal.done, self._check)
            self._remove_all_but(self._finished.paths)
        tables = self._sort() if self._built is None else self._copy(self._built.built)
        self._progress.end_phase()
        remove_tree(self._out_dir / RUNS)
        self._seconds["write"] = time.monotonic() - began - self._seconds.get("read", 0.0)
        kind = SealedFile if self._spec.base == "sealed" else SstFile
        files = [kind(Path(task.out), of.xxh3, of.bytes, of.entries) for task, of in self.written if of.xxh3]
        peak, kept = helpers.peak_bytes, self._kept_rows
        return BaseBuild(files, tables, self._spec.base, self._seconds, peak, kept, self._held, self._parts)

    def _await_kernels(self) -> None:
        """Else each helper would compile its own."""
        if not kernels.is_complete(kernels.SOON):
            self._progress.begin_phase("compile kernels", 0)
            ahead.prepare(until=kernels.SOON, report=lambda *_: self._progress.add(0))

    def _sort(self) -> dict[str, TableBuild]:
        """Make the files from the snapshot's shards."""
        began = time.monotonic()
        total = sum(table.rows for table in self._tables)
        reads = [task for plan in self.plan.tables for task in self._tasks.reads(plan)]
        sorted_ = self._gather(reads, self._make("read", reads, total))
        runs = self._join({name: result.runs for name, result in sorted_.items()})
        self._seconds["read"] = time.monotonic() - began
        merges = [task for plan in self.plan.tables for task in self._tasks.merges(plan, runs[plan.table])]
        total = sum(result.rows for result in sorted_.values())
        total += sum(sorted_[of.name].rows for of in self._tables if of.ttl_s is not None and self._spec.keep_times)
        self.written = list(zip(merges, self._make("write", merges, total), strict=True))
        for name, result in sorted_.items():
            if result.expired:
                log.info(
                    "%s: table %s: %d rows are older than its ttl, and not loaded", self._out_dir, name, result.expired
                )
        return {table.name: sum_up(table, sorted_[table.name], self.written, self._out_dir) for table in self._tables}

    def _copy(self, built: BuiltManifest) -> dict[str, TableBuild]:
        """Copy the files of a built version."""
        copies = [task for plan in self.plan.tables for task in self._tasks.files(plan)]
        self.written = list(zip(copies, self._make("copy", copies, sum(of.rows for of in copies)), strict=True))
        return {of.name: self._copied(of) for of in built.tables}

    def _copied(self, table: BuiltTable) -> TableBuild:
        mine, own = [made for task, made in self.written if task.table == table.name], self._spec.own
        rows, digest = sum(made.rows for made in mine), sum(made.digest for made in mine) % 2**64
        colliding = [entry for entry in table.colliding if own is None or are_own(np.array([entry[1]]), own)[0]]
        return TableBuild(rows, np.array(table.mean, np.float32), digest, colliding, table.expired)

    def ingest(self, build: BaseBuild, db: Path, records: Mapping[str, bytes]) -> None:
        """Make the disk tier in `db` of what was built, and of the store's own `records`. Raises StorageError."""
        assert self._helpers is not None
        files = [(str(file.path), file.xxh3, file.bytes, file.entries) for file in build.files]
        self._progress.begin_phase("ingest", 0)
        texts = {name: value.decode() for name, value in records.items()}
        scratch = str(self._out_dir / _INGEST)
        self._helpers.run([Ingest(str(db), self._spec.base, files, texts, scratch, self._parts)], self._progress.add)

    def keep_strings(self, build: BaseBuild, folder: Path, most_bytes: int, keep_free: int) -> BaseBuild:
        """Keep the strings of string keys in a new folder, unless they take more than `most_bytes`; 0: keep none.

        Those of a table that would leave less than `keep_free` bytes on the disk, and room for side files, are left out:
        rows are loaded without them. Returns what was built, with what is kept. Raises SnapshotError, StorageError.
        """
        remove_tree(folder)  # of a load that was broken off
        tables = [table for table in self._tables if table.key is KeyType.STRING]
        if len(self._tables) > MAX_TABLES_WITH_STRINGS or not most_bytes:
            return _with_strings(build, {table.name: KeptStrings(missing=MissingStrings.OFF) for table in tables})
        kept: dict[str, KeptStrings] = {}
        if tables:
            make_dir(folder)
            self._progress.begin_phase("strings", sum(table.rows for table in tables))
            keep_free += self._spec.partitions * self._snapshot.side_bytes() + max(1, self.plan.helpers) * _SPARE_BYTES
            kept = {of.name: self._kept_strings(of, build, folder, most_bytes, keep_free) for of in tables}
            self._progress.end_phase()
        too_many = sum(file.bytes for of in kept.values() for file in of.files) > most_bytes
        if too_many or any(of.missing is MissingStrings.SIZE for of in kept.values()):
            too_large = KeptStrings(missing=MissingStrings.SIZE)
            others = MissingStrings.BUILT, MissingStrings.ROOM  # a larger setting would not help them
            kept = {name: of if of.missing in others else too_large for name, of in kept.items()}
        for name, of in kept.items():
            if of.missing is not None:
                log.warning("%s: table %s: its string keys are not kept: %s", folder, name, _LEFT_OUT[of.missing])
        if kept and all(of.missing is not None for of in kept.values()):
            remove_tree(folder)
        return _with_strings(build, kept)

    def _kept_strings(
        self, table: TableEntry, build: BaseBuild, folder: Path, most_bytes: int, keep_free: int
    ) -> KeptStrings:
        """The strings of a table in files, or why there are none."""
        tasks: Sequence[SortStrings | CopyStrings]
        if self._built is None:
            tasks = self._sort_strings(table, folder, most_bytes, keep_free)
        else:
            tasks = self._copy_strings(self._built.strings(table.name), table, folder, keep_free)
            needed = sum(size for task in tasks for _, size, _ in task.sources)
            if self._spec.own is None and needed > most_bytes:
                return KeptStrings(missing=MissingStrings.SIZE)
            if needed and shutil.disk_usage(folder).free - needed < keep_free:  # they are copied at once
                return KeptStrings(missing=MissingStrings.ROOM)
        assert self._helpers is not None
        found: list[SortedStrings] = self._helpers.run(tasks, self._progress.add)
        made = tuple(StringsFile(*file) for of in found for file in of.files)
        missing = next((of.missing for of in found if of.missing is not None), None)
        built, count = build.tables[table.name], sum(file.strings for file in made)
        if missing is None and self._built is not None and count + len(built.colliding) < built.rows:
            missing = MissingStrings.BUILT
        if missing is None:
            return KeptStrings(made)
        for file in made:
            remove_file(folder / file.name, durable=False)
        return KeptStrings(missing=MissingStrings(missing))

    def _sort_strings(self, table: TableEntry, folder: Path, most_bytes: int, keep_free: int) -> list[SortStrings]:
        """Tasks for the shards of a table, as many as there are helpers, of about as many rows each."""
        count = max(1, self.plan.helpers)
        groups: list[list[int]] = [[] for _ in range(count)]
        before = 0
        for number, shard in enumerate(table.shards):
            groups[min(count - 1, before * count // max(1, table.rows))].append(number)
            before += shard.rows
        own = None if self._spec.own is None else str(self._spec.own)
        run_bytes = self.plan.share_bytes // 3  # they are held twice as they are sorted
        return [
            SortStrings(
                table.name, number, shards, str(folder), run_bytes, most_bytes, keep_free, own, self._spec.partitions
            )
            for number, shards in enumerate(filter(None, groups))
        ]

    def _copy_strings(
        self, files: Sequence[OtherFile], table: TableEntry, folder: Path, keep_free: int
    ) -> list[CopyStrings]:
        """Tasks for a table's files of a built version, as many as there are helpers."""
        count = max(1, self.plan.helpers)
        own = None if self._spec.own is None else str(self._spec.own)
        sources = [(of.name, of.bytes, of.xxh3) for of in files]
        groups = [sources[number::count] for number in range(count)]
        return [
            CopyStrings(table.name, number, group, str(folder), keep_free, own)
            for number, group in enumerate(filter(None, groups))
        ]

    def read_back(self, db: Path) -> None:
        """Compare what the disk tier in `db` holds, as the drive gives it, with what was built. Raises Corruption."""
        assert self._helpers is not None
        if self._built is not None:
            return  # each file was read back when it was copied
        self._progress.begin_phase("verify", sum(of.rows for _, of in self.written))
        for path in [*db.glob("*.sst"), *(db / BASE).glob("*")]:
            drop_from_cache(path)
            self._progress.add(0)
        parts = self._tasks.read_back(db, self.written)
        found = self._helpers.run([task for task, _ in parts], self._progress.add)
        self._progress.end_phase()
        for (_, written), content in zip(parts, found, strict=True):
            rows = sum(built.rows for _, built in written)
            digest = sum(built.digest for _, built in written) % 2**64
            if (content.rows, content.deleted, content.digest) != (rows, 0, digest):
                merge = written[0][0]
                raise Corruption(
                    f"table {merge.table!r}, {Path(merge.out).name}: {content.rows} rows with digest {content.digest:016x} were read "
                    f"back, {rows} with {digest:016x} were built: the disk under {db} is not to be trusted"
                )

    def _check_room(self) -> None:
        """Raise StorageError now rather than after an hour."""
        needed = _disk_bytes(self.plan, self._snapshot, self._spec.own)
        needed = max(0, needed - tree_bytes(self._out_dir))  # files of an earlier load are used
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

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a load to go on from another one. `began_s`, of tables with a ttl, is that of the one before it."""
        identity: dict[str, Any] = {
            "format": _JOURNAL_FORMAT,
            "snapshot": self._snapshot.identity(),
            "directory": str(self._out_dir),
            "base": self._spec.base,
            "plan": asdict(self.plan),
            "partitions": self._spec.partitions,
            "own": None if self._spec.own is None else str(self._spec.own),
        }
        if self._built is None and any(table.ttl_s is not None for table in self._tables):
            before = about(self._out_dir / JOURNAL)
            began_s = self._spec.began_s
            identity["began_s"] = int(time.time()) if began_s is None else began_s
            if (
                began_s is None
                and isinstance(before, dict)
                and before == json.loads(json.dumps({**identity, "began_s": before.get("began_s")}))
            ):
                return before
        return identity

    def _make(self, phase: str, tasks: Sequence[Making], total: int) -> list[Any]:
        """Results of the tasks: from the journal where an earlier load has done them, else done now."""
        assert self._helpers is not None
        kept = [self._result(task).rows for task in tasks if task.key in self._finished.tasks]
        self._kept_rows[phase] = sum(kept)
        self._progress.begin_phase(phase, total, sum(kept))
        remaining = [task for task in tasks if task.key not in self._finished.tasks]
        self._helpers.run(remaining, self._progress.add, self._note)
        return list(map(self._result, tasks))

    def _result(self, task: Making) -> Any:
        """What the journal says that a task has made."""
        assert self._journal is not None
        return RESULTS[type(task).__name__](**self._journal.done[task.key])

    def _note(self, task: Making, result: Any) -> None:
        assert self._journal is not None
        self._journal.note(task.key, asdict(result))
        if isinstance(task, JoinRuns):
            _remove_runs(task.runs)

    def _check(self, tasks: Sequence[CheckFile | CheckRun]) -> set[str]:
        """Paths of those that are whole."""
        assert self._helpers is not None
        self._progress.begin_phase("check", sum(task.rows for task in tasks))
        found = self._helpers.run(tasks, self._progress.add)
        return {task.path for task, result in zip(tasks, found, strict=True) if result.whole}

    def _remove_all_but(self, keep: Set[str]) -> None:
        for path in [*self._out_dir.glob("*"), *(self._out_dir / RUNS).glob("*")]:
            if path.name not in (JOURNAL, RUNS) and str(path) not in keep:
                remove_leftover(path)

    def _join(self, runs: dict[str, list[Run]]) -> dict[str, list[Run]]:
        """Fewer runs, of the tables that have too many of them to merge at once."""
        plans = [plan for plan in self.plan.tables if plan.table not in self._finished.tables]
        tasks = [task for plan in plans for task in self._tasks.joins(plan, runs[plan.table])]
        if not tasks:
            return runs
        for task in tasks:
            if task.key in self._finished.tasks:
                _remove_runs(task.runs)  # some may have been made again with others
        joined = self._make("join", tasks, sum(rows for task in tasks for _, rows in task.runs))
        tables = {task.table for task in tasks}
        runs = {table: [] if table in tables else of for table, of in runs.items()}
        for task, result in zip(tasks, joined, strict=True):
            runs[task.table].append(tuple(result.run))
        return runs

    def _gather(self, tasks: list[SortShards], results: list[Any]) -> dict[str, Sorted]:
        gathered = {table.name: Sorted([], [], []) for table in self._tables}
        for task, result in zip(tasks, results, strict=True):
            gathered[task.table].runs.extend((path, rows) for path, rows in result.runs)
            gathered[task.table].sums.extend(result.sums)
            gathered[task.table] = replace(gathered[task.table], expired=gathered[task.table].expired + result.expired)
        return gathered


def _with_strings(build: BaseBuild, kept: Mapping[str, KeptStrings]) -> BaseBuild:
    tables = {name: replace(table, strings=kept.get(name)) for name, table in build.tables.items()}
    return replace(build, tables=tables)


def _check_suits(snapshot: BuiltSnapshot, base: BaseKind, own: Partitions | None) -> None:
    if base != "sealed":
        raise SnapshotError(
            f"it was built for the base 'sealed', and the setting base is {base!r}: change that, or load the snapshot itself",
            file=BUILT_MANIFEST,
        )
    if snapshot.built.sealed_format != SEALED_FORMAT:
        raise SnapshotError(
            f"expected sealed files of format {SEALED_FORMAT}, got {snapshot.built.sealed_format}: build it again with this release",
            file=BUILT_MANIFEST,
        )
    entries = [entry for table in snapshot.built.tables for entry in table.colliding]
    if own is None or snapshot.held is not None or not entries:
        return
    hashes = hash_arrow(pa.array([text for text, _ in entries], pa.large_string()))
    if (partition_of(hashes, own.count) != partition_of(np.array([code for _, code in entries]), own.count)).any():
        raise SnapshotError(
            f"it has keys that share a hash, and was built without partitions: build it with --partitions {own.count}, or load the "
            "snapshot itself",
            file=BUILT_MANIFEST,
        )


def _remove_runs(runs: Iterable[Run]) -> None:
    for path, _ in runs:
        Path(path).unlink(missing_ok=True)
