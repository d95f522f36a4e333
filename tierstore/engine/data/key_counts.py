"""Counts of the keys that are looked up most, in bounded memory. For one thread; others may call `hottest`."""

from __future__ import annotations

import numpy as np

from tierstore.types import Keys

PLACES = 4096  # keys that are counted; beyond that the rarest are forgotten
_HALF_LIFE_S = 600.0  # after which a look-up counts half


class KeyCounts:
    """Counts of samples of all look-ups, which fade with time."""

    def __init__(self) -> None:
        # replaced as a whole, so that readers need no lock: keys, their counts in descending order, all look-ups
        self._counted = np.empty(0, np.int64), np.empty(0, np.float64), 0.0
        self._clock_s = 0.0

    @property
    def nbytes(self) -> int:
        keys, counts, _ = self._counted
        return keys.nbytes + counts.nbytes

    def add(self, keys: Keys, clock_s: float) -> None:
        """Count look-ups, at a time on a clock that never goes back."""
        faded = 0.5 ** ((clock_s - self._clock_s) / _HALF_LIFE_S)
        before, counts, total = self._counted
        distinct, place = np.unique(np.concatenate([before, keys]), return_inverse=True)
        summed = np.zeros(len(distinct), np.float64)
        np.add.at(summed, place, np.concatenate([counts * faded, np.ones(len(keys))]))
        first = np.argsort(-summed, kind="stable")[:PLACES]
        self._counted = distinct[first], summed[first], total * faded + len(keys)
        self._clock_s = clock_s

    def hottest(self, limit: int) -> list[tuple[int, float]]:
        """(key, its share of the look-ups) of at most `limit` keys, the hottest first."""
        keys, counts, total = self._counted
        return [(key, count / total) for key, count in zip(keys[:limit].tolist(), counts[:limit].tolist(), strict=True)]
