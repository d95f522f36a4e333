"""The trainer's side of the demo: it follows the log, and writes snapshots and deltas as any trainer would.

Both tables also hold two marker rows, which the load generator looks up in every request. One carries the snapshot's
version and is written by the snapshot alone. The other carries the seq of the last delta, and every delta writes it in
both tables. A request whose four markers do not agree on one version and one seq was answered from two states at once.

`learn_day` and `next_delta` belong to one thread; `write_snapshot` may run at the same time in another, and writes the
state after the last delta.
"""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.demo.clicklog import ClickLog, Events, WorldSize, item_keys, user_keys
from tierstore.demo.graph import CLICKED, ITEM, USER, can_predict, graph
from tierstore.demo.trainer import DIM, Dense, Trainer
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.types import StorageDtype

MODEL = "ctr"
ROW_BYTES = StorageDtype.FLOAT16.row_bytes(DIM)
MARKER_ROWS = np.array([-1, -2])  # row numbers of the version's and the seq's marker: no user or item has them
_CHUNK = 65_536
_BASE = 1000  # float16 holds every integer up to 2048


def marker(number: int) -> npt.NDArray[np.float32]:
    """`number` (0 to 10**12 - 1) as a row [DIM] that float16 stores exactly: four digits
    to the base 1000, then zeros.
    """
    row = np.zeros(DIM, np.float32)
    row[:4] = number // _BASE ** np.arange(4) % _BASE
    return row


def read_markers(rows: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """The numbers in marker rows [n, DIM]: int64[n]."""
    return rows[:, :4].astype(np.int64) @ _BASE ** np.arange(4)


@dataclass(frozen=True, slots=True)
class MinuteDelta:
    """One minute's delta: its Arrow bytes, and how many rows it upserts and deletes."""

    seq: int
    event_time: datetime
    payload: bytes
    rows: int


class Shop:
    """A click log and the trainer that follows it.

    `item_exists` bool[items] and `seq`: the state after the last delta.
    """

    def __init__(self, size: WorldSize, seed: int) -> None:
        self.size, self.log = size, ClickLog(size, seed)
        self._lock = threading.Lock()  # held while the trainer's state changes and while it is copied
        self.trainer = Trainer(size.users, size.all_items, seed)
        self.item_exists: npt.NDArray[np.bool_] = np.arange(size.all_items) < size.items
        self.seq = 0
        self._minutes: list[Events] = []
        self.newest: Events  # events after all others: never trained on

    def learn_day(self) -> int:
        """Train on the day's log, then draw the minutes and the newest events. Returns the number of events learned."""
        events = 0
        for _ in range(self.size.day_slots):
            slot = self.log.next_slot()
            self.trainer.train(slot)
            events += len(slot)
        self.trainer.pop_touched()
        self._minutes = [self.log.next_slot() for _ in range(self.size.minutes)]
        self.newest = self.log.next_slot()
        return events

    def write_snapshot(self, path: Path, version: int) -> tuple[int, int]:
        """Write the state after delta `seq` as a snapshot. Returns its rows, and that seq."""
        with self._lock:
            items = np.flatnonzero(self.item_exists)
            users, item_vectors = self.trainer.user.astype(np.float16), self.trainer.item[items].astype(np.float16)
            seq, dense = self.seq, self.trainer.dense
        tables = {"user": (user_keys, np.arange(len(users)), users), "item": (item_keys, items, item_vectors)}
        with SnapshotWriter(path, model=MODEL, version=version, delta_seq=seq) as snapshot:
            for name, (keys_of, rows, vectors) in tables.items():
                table = snapshot.table(name, dim=DIM, dtype=StorageDtype.FLOAT16.value)
                table.write(keys_of(MARKER_ROWS), np.stack([marker(version), marker(seq)]))
                for i in range(0, len(rows), _CHUNK):
                    table.write(keys_of(rows[i : i + _CHUNK]), vectors[i : i + _CHUNK])
            snapshot.feature(USER, table="user")
            snapshot.feature(ITEM, table="item")
            snapshot.feature(CLICKED, table="item", combiner="mean")
            _write_dense(snapshot, dense)
        return len(users) + len(items), seq

    def next_delta(self) -> MinuteDelta:
        """The next minute, whose newest event is of now: learn it, and write the rows that changed as a delta."""
        event_time = datetime.now(UTC)
        gone = self.log.removed(self.size.day_slots + self.seq)
        with self._lock:
            self.trainer.remove(gone)
            self.trainer.train(self._minutes[self.seq])
            users, items = self.trainer.pop_touched()
            self.item_exists[items], self.item_exists[gone] = True, False
            self.seq += 1
        stream = io.BytesIO()
        with DeltaWriter(stream, model=MODEL, seq=self.seq, event_time=event_time) as delta:
            for table, keys_of, rows, vectors in (
                ("user", user_keys, users, self.trainer.user),
                ("item", item_keys, items, self.trainer.item),
            ):
                delta.upsert(table, keys_of(rows), vectors[rows].astype(np.float16))
                delta.upsert(table, keys_of(MARKER_ROWS[1:]), marker(self.seq)[None].astype(np.float16))
            delta.delete("item", item_keys(gone))
            _write_dense(delta, self.trainer.dense)
        return MinuteDelta(self.seq, event_time, stream.getvalue(), len(users) + len(items) + len(gone))


def _write_dense(writer: SnapshotWriter | DeltaWriter, dense: Dense) -> None:
    if can_predict():  # else nothing here could serve it
        writer.dense(graph(dense))
