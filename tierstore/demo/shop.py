"""The trainer's side of the demo: the log, the model that learns it, and what is sent to the service.

Threads: `learn_day` and `next_delta` belong to one thread; `write_snapshot` may run beside them in
another and writes one consistent state, that after the last delta. Snapshots are published whole or
not at all by the writer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.demo import export
from tierstore.demo.clicklog import ClickLog, Events, WorldSize
from tierstore.demo.trainer import Trainer


@dataclass(frozen=True, slots=True)
class MinuteDelta:
    """One minute's increment: its Arrow bytes, and how many rows it upserts and deletes."""

    seq: int
    event_time: datetime
    payload: bytes
    rows: int


class Shop:
    """A click log and the trainer that follows it.

    `item_exists` bool[items] and `seq` tell the state after the last delta.
    """

    def __init__(self, size: WorldSize, seed: int) -> None:
        self.size, self.seed = size, seed
        self.log = ClickLog(size, seed)
        self._lock = threading.Lock()  # held while the trainer's state changes and while it is copied
        self.trainer = Trainer(size.users, size.all_items, seed)
        self.item_exists: npt.NDArray[np.bool_] = np.arange(size.all_items) < size.items
        self.seq = 0
        self._minutes: list[Events] = []
        self.newest: Events

    def learn_day(self) -> int:
        """Train on the day's log. Returns its events. Then draws the minutes and the newest events, which nothing has seen yet."""
        events = 0
        for _ in range(self.size.day_slots):
            slot = self.log.next_slot()
            self.trainer.train(slot)
            events += len(slot)
        self.trainer.take_touched()
        self._minutes = [self.log.next_slot() for _ in range(self.size.minutes)]
        self.newest = self.log.next_slot()
        return events

    def write_snapshot(self, path: Path, version: int) -> tuple[int, int]:
        """The state after delta `seq`, as a snapshot directory. Returns its rows, and that seq."""
        with self._lock:
            exists = np.flatnonzero(self.item_exists)
            users, item_vectors = self.trainer.user.astype(np.float16), self.trainer.item[exists].astype(np.float16)
            seq, dense = self.seq, self.trainer.dense
        export.write_snapshot(
            path, version=version, delta_seq=seq, users=users, items=exists, item_vectors=item_vectors, dense=dense
        )
        return len(users) + len(exists), seq

    def next_delta(self) -> MinuteDelta:
        """The next minute arrives: its newest event is of now. Learn it, and write what changed as the next delta."""
        event_time = datetime.now(UTC)
        slot = self.size.day_slots + self.seq
        events = self._minutes[self.seq]
        gone = self.log.taken_down(slot)
        with self._lock:
            self.trainer.take_down(gone)
            self.trainer.train(events)
            users, items = self.trainer.take_touched()
            self.item_exists[items] = True
            self.item_exists[gone] = False
            self.seq += 1
        payload = export.delta(
            seq=self.seq,
            event_time=event_time,
            users=users,
            user_vectors=self.trainer.user[users],
            items=items,
            item_vectors=self.trainer.item[items],
            gone=gone,
            dense=self.trainer.dense,
        )
        return MinuteDelta(self.seq, event_time, payload, len(users) + len(items) + len(gone))
