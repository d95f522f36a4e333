"""The event time of the newest delta that a model shows: how fresh its answers are.

An applied delta brings its event time. After a start, and after a rollback to a delta, it is read from the log. A
producer's clock may be ahead, so an event time never counts as later than the receipt of the delta. Any thread.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.serving.undone import Undone


class Event(NamedTuple):
    """The event time of a delta, as it says, when it was received, and from whom (None: before this start)."""

    time: datetime
    received: datetime
    sender: str | None = None

    @property
    def since(self) -> datetime:
        """The moment from which the delta's age counts."""
        return min(self.time, self.received)


class NewestEvent:
    """The event of the newest delta that a model shows."""

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._cached: tuple[int, Undone, Event | None] | None = None  # as of a seq; replaced as a whole

    def applied(self, seq: int, event_time: datetime, sender: str) -> None:
        """Note that delta `seq`, which came just now, is visible. One thread at a time."""
        self._cached = seq, self._log.undone, Event(event_time, datetime.now(UTC), sender)

    def at(self, seq: int) -> Event | None:
        """The event of the newest delta up to `seq` that is not undone; None if the log does not have it."""
        cached, undone = self._cached, self._log.undone
        if cached is None or cached[0] != seq or cached[1] is not undone:
            cached = self._cached = seq, undone, self._read(seq, undone)
        return cached[2]

    def _read(self, seq: int, undone: Undone) -> Event | None:
        while (gap := undone.range_of(seq)) is not None:
            seq = gap[0] - 1
        time, received_s = self._log.event_time(seq), self._log.received_s(seq)
        return None if time is None or received_s is None else Event(time, datetime.fromtimestamp(received_s, UTC))
