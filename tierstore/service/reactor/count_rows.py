"""Counts that compiled threads add to, in rows of their own, so that nothing is locked; a reader adds them up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

K = TypeVar("K", bound=Hashable)
Counts = npt.NDArray[np.int64]


class CountRows(Generic[K]):
    """`rows` rows of `width` counts for each of `threads`, assigned by key: int64[threads, rows, width] in `words`.

    A row is kept while it has users. `absorb` gets its counts in parts, at `collect` and when the last user releases
    it: the additions to each count, and the highest of any thread. Any thread.
    """

    def __init__(self, threads: int, rows: int, width: int, absorb: Callable[[K, Counts, Counts], None]) -> None:
        # constant after construction
        self.words = np.zeros((threads, rows, width), np.int64)
        self._absorb = absorb
        self._lock = threading.Lock()
        # guarded by _lock
        self._row_of: dict[K, int] = {}
        self._users: dict[K, int] = {}
        self._free = list(range(rows - 1, -1, -1))
        self._seen = np.zeros((rows, width), np.int64)

    def acquire(self, key: K) -> int | None:
        """The row of a key, to be released; None if all rows are in use."""
        with self._lock:
            row = self._row_of.get(key)
            if row is None:
                if not self._free:
                    return None
                row = self._row_of[key] = self._free.pop()
                self._seen[row] = self.words[:, row].sum(0)
            self._users[key] = self._users.get(key, 0) + 1
            return row

    def release(self, key: K) -> None:
        """Release a user's row. Called when no thread adds to the row for that user any more."""
        with self._lock:
            self._users[key] -= 1
            if self._users[key]:
                return
            del self._users[key]
            row = self._row_of.pop(key)
            self._collect(key, row)
            self._free.append(row)

    def collect(self) -> None:
        """Pass on everything that was counted since the last call."""
        with self._lock:
            for key, row in self._row_of.items():
                self._collect(key, row)

    def _collect(self, key: Any, row: int) -> None:
        now = self.words[:, row].sum(0)
        new = now - self._seen[row]
        self._seen[row] = now
        if new.any():
            self._absorb(key, new, self.words[:, row].max(0))
