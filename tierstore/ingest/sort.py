"""Shards to sorted runs, and many runs to fewer: the first half of a bulk load. See `tasks.py`.

In a helper process, one task at a time, on its main thread. Memory is bounded by `run_bytes` and by `step_bytes`, not by
the table or its files. After a crash `journal.py` says which runs are finished.
"""

from __future__ import annotations

import numpy as np

from tierstore.errors import SnapshotError
from tierstore.formats.keys import are_own
from tierstore.formats.row_times import as_rows
from tierstore.formats.snapshot.reader import Snapshot
from tierstore.ingest.load_plan import KEY_CODE_BYTES, run_row_bytes
from tierstore.ingest.runs import ReportRows, Run, RunWriter, in_order, merged, order_of
from tierstore.ingest.tasks import Joined, JoinRuns, Sorted, SortShards
from tierstore.kernels.codec import BadRow, encode
from tierstore.types import Keys, Partitions, Rows

_BLOCK_ROWS = 1 << 16
_MIN_BATCH_ROWS = 256


def sort_shards(snapshot: Snapshot, task: SortShards, report: ReportRows) -> Sorted:
    """Check, read and encode the shards; write their rows, or those of its own partitions, as sorted runs."""
    entry = snapshot.manifest.table(task.table)
    spec = entry.spec()
    row_bytes = run_row_bytes(spec)
    total_rows = sum(entry.shards[number].rows for number in task.shards)
    capacity = min(total_rows, max(1, task.run_bytes // (row_bytes + KEY_CODE_BYTES)))
    batch_rows = max(_MIN_BATCH_ROWS, task.batch_bytes // (4 * spec.dim))
    own = None if task.own is None else Partitions.parse(task.own)
    buffer = _Buffer(task.prefix, capacity, row_bytes, task.partitions)
    sums, expired = [], 0
    for number in task.shards:
        path = entry.shards[number].path
        total = np.zeros(spec.dim, np.float64)
        with snapshot.checking(task.table, number):
            for batch in snapshot.batches(task.table, number, batch_rows):
                try:
                    rows = encode(batch.vectors, spec.dtype)
                except BadRow as error:
                    raise SnapshotError(
                        f"column {error.column}: {error.reason}", file=path, row=batch.first_row + error.row
                    ) from error
                keys, vectors = batch.keys, batch.vectors
                if batch.times is not None:
                    rows = np.concatenate([rows, as_rows(batch.times)], axis=1)
                    live = batch.times >= task.oldest_s
                    if not live.all():  # after the checks: a bad row is refused, however old it is
                        keys, rows, vectors = keys[live], rows[live], vectors[live]
                        expired += int(np.count_nonzero(~live))
                total += vectors.sum(axis=0, dtype=np.float64)
                if own is not None:
                    mine = are_own(keys, own)
                    keys, rows = keys[mine], rows[mine]
                buffer.add(keys, rows)
                report(len(batch.keys))
        sums.append(total.tolist())
    buffer.flush()
    return Sorted(buffer.runs, sums, buffer.digests, expired)


class _Buffer:
    """Collects rows in memory until there are enough for a run."""

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


def join_runs(snapshot: Snapshot, task: JoinRuns, report: ReportRows) -> Joined:
    """Merge whole runs into one."""
    row_bytes = run_row_bytes(snapshot.manifest.table(task.table).spec())
    total = sum(rows for _, rows in task.runs)
    with RunWriter(task.out, total, row_bytes) as run:
        for number in range(task.partitions):
            part = number, task.partitions
            for keys, rows in merged(task.runs, row_bytes, None, None, task.step_bytes, part):
                run.add(keys, rows)
                report(len(keys))
                del keys, rows
    return Joined((task.out, total), run.digest)
