"""Resumes a load that was broken off: what it has left, and what of that the next load of the same snapshot can use.

For the thread of the load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierstore.ingest.load_plan import LoadPlan, TablePlan
from tierstore.ingest.load_tasks import LoadTasks
from tierstore.ingest.tasks import CheckFile, CheckRun, Joined, JoinRuns, Merged, Sorted

Check = Callable[[Sequence[CheckFile | CheckRun]], set[str]]  # the paths of those that are whole


@dataclass(slots=True)
class Finished:
    """What is there and whole: keys of tasks, tables of which all files are there, and the paths of runs and files."""

    tasks: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Runs:
    """What the journal says of one table's runs: results of its reads by the task's key, and its joins."""

    reads: dict[str, Sorted]
    joins: list[JoinRuns]


def find_finished(plan: LoadPlan, tasks: LoadTasks, results: Mapping[str, Any], check: Check) -> Finished:
    """What can be used, of what the journal's `results` (by the task's key) name.

    Runs are checked only of tables whose files are not all there. Runs that were joined may be gone.
    """
    finished = Finished()
    _find_files(plan, tasks, results, check, finished)
    unfinished: list[_Runs] = []
    checks: list[CheckRun] = []
    for table in plan.tables:
        reads = {task.key: Sorted(**results[task.key]) for task in tasks.reads(table) if task.key in results}
        if table.table in finished.tables:
            finished.tasks |= set(reads)
            continue
        joins: list[JoinRuns] = []
        if len(reads) == len(table.groups):
            joins = tasks.joins(table, [(path, rows) for made in reads.values() for path, rows in made.runs])
        joins = [task for task in joins if task.key in results]
        unfinished.append(_Runs(reads, joins))
        checks += _run_checks(table, [*reads.values()], [Joined(**results[task.key]) for task in joins])
    whole = check(checks)
    for runs in unfinished:
        joined = {task.key: task for task in runs.joins if task.out in whole}
        needless = {path for task in joined.values() for path, _ in task.runs}
        there = whole | needless
        sorted_ = {key: made for key, made in runs.reads.items() if all(path in there for path, _ in made.runs)}
        finished.tasks |= {*joined, *sorted_}
        finished.paths |= {task.out for task in joined.values()}
        finished.paths |= {path for made in sorted_.values() for path, _ in made.runs} - needless
    return finished


def _find_files(plan: LoadPlan, tasks: LoadTasks, results: Mapping[str, Any], check: Check, finished: Finished) -> None:
    """Add the finished files that are whole."""
    of_table = {table.table: tasks.files(table) for table in plan.tables}
    files = {task: Merged(**results[task.key]) for made in of_table.values() for task in made if task.key in results}
    whole = check(
        [
            CheckFile(task.out, task.base, made.rows, made.digest, made.xxh3, made.bytes)
            for task, made in files.items()
            if made.xxh3 is not None
        ]
    )
    finished.tasks |= {task.key for task, made in files.items() if task.out in whole or made.xxh3 is None}
    finished.paths |= whole & {task.out for task in files}
    finished.tables |= {
        name for name, made in of_table.items() if made and all(task.key in finished.tasks for task in made)
    }


def _run_checks(table: TablePlan, reads: list[Sorted], joins: list[Joined]) -> list[CheckRun]:
    made = [*reads, *(Sorted([join.run], [], [join.digest]) for join in joins)]
    return [
        CheckRun(path, rows, table.row_bytes, digest)
        for result in made
        for (path, rows), digest in zip(result.runs, result.digests, strict=True)
    ]
