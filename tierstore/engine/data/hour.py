"""Counters over the last hour, in steps: what was counted in each step, and levels at its end.

One thread notes, any may read.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

HOUR_S = 3600


class Hour:
    """The values of `counters` counters, which only grow, and `levels` other numbers at the ends of steps of `step_s`
    seconds.

    Takes `HOUR_S / step_s + 1` rows of 8 bytes for each number and for the time, however long it runs.
    """

    def __init__(self, counters: int, levels: int, step_s: int) -> None:
        self.step_s = step_s
        self._counters = counters
        self._lock = threading.Lock()
        # guarded by _lock: rows of the time, the counters and the levels, row `noted % len` being the next
        self._rows = np.zeros((HOUR_S // step_s + 1, 1 + counters + levels), np.int64)
        self._noted = 0

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def note(self, now_s: float, numbers: Sequence[int]) -> bool:
        """Note the counters and levels, unless that was done in this step. Returns whether it was done now."""
        at_s = int(now_s // self.step_s) * self.step_s
        with self._lock:
            last_s = int(self._rows[(self._noted - 1) % len(self._rows), 0]) if self._noted else -1
            if at_s == last_s:
                return False
            if at_s < last_s:  # the clock was set back
                self._noted = 0
            self._rows[self._noted % len(self._rows)] = (at_s, *numbers)
            self._noted += 1
        return True

    def steps(self, last: int | None = None) -> np.ndarray:
        """int64 [n, 2 + counters + levels], oldest first: the end of each step, its seconds, its counts, the levels at
        its end.

        `last`: only so many steps. A step without a note is part of the next.
        """
        with self._lock:
            first = self._noted - min(self._noted, len(self._rows) if last is None else last + 1)
            rows = self._rows[np.arange(first, self._noted) % len(self._rows)]
        counted = np.diff(rows[:, : 1 + self._counters], axis=0)
        return np.concatenate([rows[1:, :1], counted, rows[1:, 1 + self._counters :]], axis=1)
