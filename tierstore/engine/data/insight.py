"""Statistics of a table's host tier: its hit rate at this size and at others, and the keys that are looked up most.

`step` is for one thread, at intervals; any thread may read. Look-ups are sampled in turn in two ways: by key, for
trials of caches of other sizes, and all of them for a moment, for counts of keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierstore.engine.data.hour import Hour
from tierstore.tiers.host.access_sample import ALL, AccessSample
from tierstore.tiers.host.cache_trials import CacheTrials
from tierstore.tiers.host.table import HostTable
from tierstore.types import Keys

PLACES = 4096  # keys that are counted; beyond that the rarest are forgotten
_HALF_LIFE_S = 600.0  # after which a look-up counts half
_LATE = 10  # minutes
_COUNTED = 2048  # look-ups sampled in such a moment
_AFRESH = 1.5  # if a cache gets so many times larger or smaller, its trials begin anew


class KeyCounts:
    """Counts of the keys that are looked up most, in bounded memory: of samples of all look-ups, which fade with time.

    For one thread; others may call `hottest`.
    """

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


class CacheInsight:
    """Statistics of a table's cache, at its size and at other sizes, over all versions of its model."""

    def __init__(self) -> None:
        self.sample = AccessSample()
        self.counts = KeyCounts()
        self._trials: CacheTrials | None = None
        self._counting = False  # what is being sampled now
        self._capacity_rows = 0
        self._hour = Hour(2, 2, 60)  # keys, and keys that were read; version and seq

    @property
    def nbytes(self) -> int:
        trials = self._trials
        return self.sample.nbytes + self.counts.nbytes + self._hour.nbytes + (0 if trials is None else trials.nbytes)

    def step(self, host: HostTable, clock_s: float) -> None:
        """Take the samples since the last step from the table that serves, and sample on. `clock_s` never goes back."""
        trials, rows = self._trials, host.capacity_rows
        if trials is None or not 1 / _AFRESH <= rows / trials.rows <= _AFRESH:
            if trials is not None:
                trials.close()
            trials = self._trials = CacheTrials(rows)
            self.sample.collect(0)
        self._capacity_rows = rows
        counted, self._counting = self._counting, not self._counting
        keys, seen = self.sample.collect(ALL, _COUNTED) if self._counting else self.sample.collect(trials.bound)
        if counted:
            self.counts.add(keys, clock_s)
        elif seen:
            trials.add(keys[~host.absent_among(keys)], seen)

    def note_minute(self, now_s: float, lookup_keys: dict[str, int], version: int, seq: int) -> None:
        """Once a minute, note how often memory has answered, and what is served."""
        self._hour.note(now_s, (sum(lookup_keys.values()), read_keys(lookup_keys), version, seq))

    def forget(self) -> None:
        """Forget everything: the table has no cache any more."""
        self.sample.collect(0)
        self._capacity_rows, trials, self._trials = 0, self._trials, None
        if trials is not None:
            trials.close()

    def status(self) -> dict[str, Any]:
        """`rows` that the cache can hold, its recent `hit_rate`, the `curve` of it by size, and the `bytes` of these
        statistics.

        A hit rate is the share of keys that were not read from disk or another machine, so keys that do not exist
        count as answered. The recent one is of `_LATE` minutes; None if nothing was looked up.
        """
        trials = self._trials
        curve = [] if trials is None else [point._asdict() for point in trials.curve()]
        _, _, keys, read, *_ = self._hour.steps(_LATE).sum(axis=0).tolist()
        return {
            "rows": self._capacity_rows,
            "hit_rate": 1.0 - read / keys if keys else None,
            "curve": curve,
            "bytes": self.nbytes,
        }

    def history(self) -> list[dict[str, Any]]:
        """The last hour by minutes, oldest first: the minute's end, keys looked up, keys read, what was served."""
        return [
            {"at_s": at_s, "keys": keys, "read": read, "version": version, "seq": seq}
            for at_s, _, keys, read, version, seq in self._hour.steps().tolist()
        ]


def read_keys(lookup_keys: dict[str, int]) -> int:
    """How many of the keys counted by tier were read from disk or another machine."""
    return lookup_keys.get("disk", 0) + lookup_keys.get("remote", 0)
