"""Merges one key range of all runs into one finished file: the second half of a bulk load. See `tasks.py`.

A merge reads the same key range of every run, so its file overlaps no other file. In a helper process, one task at a
time, on its main thread. Memory is bounded by `step_bytes`, however many runs there are; a file of RocksDB's kind is held
in memory as a whole. After a crash `journal.py` says which files are finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from tierstore.formats.row_times import TIME_BYTES, table_of
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.colliding import Limits, Repeated, distinct, duplicate, repeated, set_apart, without
from tierstore.ingest.load_plan import run_row_bytes
from tierstore.ingest.runs import ReportRows, Run, merged
from tierstore.ingest.tasks import Merged, MergeRuns
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.disk.sealed_file import SealedFile, write_sealed_parts
from tierstore.tiers.disk.sst import SstFile, write_sst
from tierstore.types import Keys, KeyType, Rows


def merge_runs(snapshot: Snapshot, task: MergeRuns, report: ReportRows) -> Merged:
    """Merge one key range of all runs and write it as one file, of the kind that the base is made of."""
    table, are_times = table_of(task.table)
    spec = snapshot.manifest.table(table).spec()
    row_bytes = TIME_BYTES if are_times else spec.row_bytes
    runs = [(path, rows) for path, rows in json.loads(Path(task.runs).read_bytes())]
    part = task.partition, task.partitions

    def steps(runs: list[Run]) -> Iterator[tuple[Keys, Rows]]:
        return merged(runs, run_row_bytes(spec), task.low, task.high, task.step_bytes, part)

    def wanted(steps: Iterator[tuple[Keys, Rows]]) -> Iterator[tuple[Keys, Rows]]:
        for keys, rows in steps:
            yield keys, rows[:, spec.row_bytes :] if are_times else rows[:, : spec.row_bytes]
            del keys, rows

    reported = 0

    def report_and_count(rows: int) -> None:
        nonlocal reported
        reported += rows
        report(rows)

    try:
        return _write_merged(task, row_bytes, wanted(distinct(steps(runs))), report_and_count)
    except Repeated as error:
        if spec.key is not KeyType.STRING:
            raise duplicate(snapshot, spec, error.code, task.oldest_s) from None
    report(-reported)  # do it again, without the keys that collide and with a run of them
    codes = repeated(steps(runs))
    within = max(task.partitions, task.hash_partitions)
    limits = Limits(part, task.low, task.high, task.oldest_s)
    run, colliding = set_apart(snapshot, spec, codes, runs, limits, f"{task.out}.colliding", within)
    try:
        others = without(steps([*runs, run]), codes)
        return replace(_write_merged(task, row_bytes, wanted(distinct(others)), report), colliding=colliding)
    finally:
        os.unlink(run[0])


def _write_merged(task: MergeRuns, row_bytes: int, steps: Iterator[tuple[Keys, Rows]], report: ReportRows) -> Merged:
    count = digest = 0

    def counted() -> Iterator[tuple[Keys, Rows]]:
        nonlocal count, digest
        for keys, rows in steps:
            count, digest = count + len(keys), (digest + digest_rows(keys, rows)) % 2**64
            yield keys, rows
            report(len(keys))
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
    """The item of `head`, which is removed from it, and then `parts`."""
    while head:
        yield head.pop()
    yield from parts
