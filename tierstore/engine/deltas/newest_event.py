"""The event time of the newest delta that a model shows: how fresh its answers are.

A delta that is applied says so itself. After a start, and after a rollback to a delta, the log is read. Any thread;
nothing here survives a crash.
"""

from __future__ import annotations

from datetime import datetime

from tierstore.engine.deltas.log import DeltaLog
from tierstore.engine.serving.undone_record import Undone


class NewestEvent:
    """The event time of the newest delta that a model shows."""

    def __init__(self, log: DeltaLog) -> None:
        self._log = log
        self._cached: tuple[int, Undone, datetime | None] | None = None  # as of a seq; replaced whole

    def applied(self, seq: int, event_time: datetime) -> None:
        """Delta `seq` is visible. One thread at a time."""
        self._cached = seq, self._log.undone, event_time

    def at(self, seq: int) -> datetime | None:
        """The event time of the newest delta up to `seq` that is not undone; None where the log does not have it."""
        cached, undone = self._cached, self._log.undone
        if cached is None or cached[0] != seq or cached[1] is not undone:
            cached = self._cached = seq, undone, self._read(seq, undone)
        return cached[2]

    def _read(self, seq: int, undone: Undone) -> datetime | None:
        while (first := undone.begin_of_range(seq)) is not None:
            seq = first - 1
        return self._log.event_time(seq)
