"""The tasks that a load needs, by its plan (`load_plan.py`) and its journal. For the thread of the load.

Every name of a run and of a finished file is chosen here, so that a load that goes on finds what another one has made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tierstore.formats.row_times import TIME_BYTES, times_of
from tierstore.formats.snapshot.built import BuiltSnapshot
from tierstore.ingest.journal import Journal
from tierstore.ingest.load_plan import FileSpec, LoadPlan, TablePlan
from tierstore.ingest.results import Written
from tierstore.ingest.runs import Run, quantiles
from tierstore.ingest.tasks import CopyFile, JoinRuns, MergeRuns, ReadBack, ReadFile, SortShards
from tierstore.tiers.disk.sealed import BASE
from tierstore.tiers.disk.sst import times_id

RUNS = "runs"  # the folder of runs, in the load's directory
_READERS_A_HELPER = 4  # parts of a base of RocksDB's that are read back


class LoadTasks:
    """The tasks of one load into `out_dir`. `built` is the snapshot where it is built already, and only copied.

    `oldest_s`: of the tables with a ttl, when a row must have been written to be loaded.
    """

    def __init__(
        self,
        plan: LoadPlan,
        out_dir: Path,
        journal: Journal,
        spec: FileSpec,
        oldest_s: Mapping[str, int],
        built: BuiltSnapshot | None = None,
    ) -> None:
        self._plan, self._out_dir, self._journal, self._built, self._oldest_s = plan, out_dir, journal, built, oldest_s
        self._spec = spec
        self._own_text = None if spec.own is None else str(spec.own)

    def reads(self, plan: TablePlan) -> list[SortShards]:
        """Tasks that make sorted runs of a table's shards."""
        prefix = str(self._out_dir / RUNS / plan.table)
        return [
            SortShards(
                plan.table,
                list(shards),
                f"{prefix}-{number}",
                plan.run_bytes,
                plan.batch_bytes,
                self._spec.partitions,
                self._own_text,
                self._oldest_s.get(plan.table, 0),
            )
            for number, shards in enumerate(plan.groups)
        ]

    def joins(self, plan: TablePlan, runs: list[Run]) -> list[JoinRuns]:
        """Tasks that make fewer runs of these; none where they are few enough to be merged at once."""
        at_once = plan.join(len(runs))
        return [
            JoinRuns(
                plan.table,
                runs[begin : begin + at_once],
                str(self._out_dir / RUNS / f"{plan.table}.joined-{begin}"),
                plan.step_bytes,
                self._spec.partitions,
            )
            for begin in range(0, len(runs) if at_once > 1 else 0, at_once)
        ]

    def merges(self, plan: TablePlan, runs: list[Run]) -> list[Any]:
        """Tasks that make a table's finished files of these runs. Their key ranges are put into the journal."""
        if not runs:
            return []
        if _ranges(plan) not in self._journal.done:
            files, parts = -(-plan.files // self._spec.partitions), range(self._spec.partitions)
            cuts = [quantiles(runs, plan.row_bytes, files, (part, self._spec.partitions)) for part in parts]
            self._journal.note(_ranges(plan), {"cuts": cuts})
        self._list_of_runs(plan).write_text(json.dumps(runs))
        return self.files(plan)

    def files(self, plan: TablePlan) -> list[Any]:
        """Tasks that make a table's finished files, if its key ranges are in the journal, or if it is built already."""
        names = self._names(plan)
        if self._built is not None:
            return [task for name in names for task in self._copies(self._built, name)]
        table_id = 1 + [other.table for other in self._plan.tables].index(plan.table)
        ids = (table_id, times_id(table_id))
        return [task for name, number in zip(names, ids, strict=False) for task in self._merges(plan, name, number)]

    def _names(self, plan: TablePlan) -> list[str]:
        """The names of what a table's files hold: its rows, and their times where these are kept."""
        has_times = self._spec.keep_times and plan.table in self._oldest_s
        return [plan.table, times_of(plan.table)] if has_times else [plan.table]

    def _merges(self, plan: TablePlan, name: str, table_id: int) -> list[MergeRuns]:
        out, suffix = self._out_dir / f"base-{name}", "sealed" if self._spec.base == "sealed" else "sst"
        runs = str(self._list_of_runs(plan))
        return [
            MergeRuns(
                name,
                table_id,
                runs,
                low,
                high,
                f"{out}-{f'{part:04}-' if self._spec.partitions > 1 else ''}{number:04}.{suffix}",
                self._spec.base,
                plan.step_bytes,
                part,
                self._spec.partitions,
                1 if self._spec.own is None else self._spec.own.count,
                self._oldest_s.get(plan.table, 0),
            )
            for part, cuts in enumerate(self._journal.done.get(_ranges(plan), {"cuts": []})["cuts"])
            for number, (low, high) in enumerate(pairwise([None, *cuts, None]))
        ]

    def _copies(self, built: BuiltSnapshot, table: str) -> list[CopyFile]:
        return [
            CopyFile(
                table,
                file.name,
                str(self._out_dir / Path(file.name).name),
                file.rows,
                int(file.digest, 16),
                file.xxh3,
                file.bytes,
                own=self._own_text,
            )
            for file in built.built.files
            if file.table == table
        ]

    def _list_of_runs(self, plan: TablePlan) -> Path:
        """A file that lists a table's runs: each of its merges needs all of them."""
        return self._out_dir / RUNS / f"{plan.table}.json"

    def read_back(self, db: Path, written: list[Written]) -> list[tuple[ReadFile | ReadBack, list[Written]]]:
        """Tasks that together read all of the disk tier `db`, and what each of them should find."""
        if self._spec.base == "sealed":
            return [
                (ReadFile(str(db / BASE / Path(task.out).name), str(made.xxh3), made.bytes), [(task, made)])
                for task, made in written
                if made.xxh3 is not None
            ]
        parts: list[tuple[ReadFile | ReadBack, list[Written]]] = []
        for plan, name in [(of, name) for of in self._plan.tables for name in self._names(of)]:
            mine = [(task, made) for task, made in written if task.table == name]
            time_bytes = TIME_BYTES if plan.table in self._oldest_s else 0  # in runs after each row
            row_bytes = plan.row_bytes - time_bytes if name == plan.table else TIME_BYTES
            # each task opens all of RocksDB, so they are few
            at_once = -(-len(mine) // (_READERS_A_HELPER * self._plan.workers))
            for begin in range(0, len(mine), max(1, at_once)):
                part = mine[begin : begin + at_once]
                first, last = part[0][0], part[-1][0]
                parts.append((ReadBack(str(db), first.table_id, row_bytes, first.low, last.high), part))
        return parts


def _ranges(plan: TablePlan) -> str:
    """The key in the journal of the key ranges of a table's files."""
    return f"{plan.table}.ranges"
