"""Rate limits for the log: no kind of line comes more often than a person can use, as clients must not fill a disk.

Any thread may log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

BURST = 100  # warnings and errors of one line of code at once
EVERY_S = 1.0  # and then one in so long
LIMITED = "limited"  # an attribute of records that a `LineLimit` has admitted already: `extra={LIMITED: True}`


@dataclass(slots=True)
class _Kind:
    remaining: float
    at_s: float
    left_out: int = 0


class LineLimit:
    """Admits `burst` lines of one kind at once, then one every `every_s`. Any thread."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._every_s, self._clock = burst, every_s, clock
        self._lock = threading.Lock()
        self._kinds: dict[Hashable, _Kind] = {}  # guarded by _lock; there are few, the callers see to that

    def admit(self, kind: Hashable) -> int | None:
        """How many lines of a kind were left out since the last one; None: leave this one out too."""
        with self._lock:
            now = self._clock()
            counts = self._kinds.setdefault(kind, _Kind(self._burst, now))
            counts.remaining = min(self._burst, counts.remaining + (now - counts.at_s) / self._every_s)
            counts.at_s = now
            if counts.remaining < 1:
                counts.left_out += 1
                return None
            counts.remaining -= 1
            left_out, counts.left_out = counts.left_out, 0
            return left_out


class Limited(logging.Filter):
    """Limits warnings and errors by the line of code that logs them; the next one says how many were not written."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = LineLimit(BURST, EVERY_S, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.levelno < logging.WARNING or getattr(record, LIMITED, False):
            return True
        left_out = self._limit.admit((record.pathname, record.lineno))
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more like it that were not written)", None
        return left_out is not None
