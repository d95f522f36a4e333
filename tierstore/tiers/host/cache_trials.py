"""Trials that estimate the host tier's hit rate with less or more memory: small caches fed with sampled look-ups.

A cache of C rows under all look-ups behaves like a cache of C/k rows under the look-ups of one key in k (Waldspurger, Saemundsson, Ahmad, Park,
USENIX ATC 2017). So each size has a cache of about `TRIAL_ROWS` times its scale, with the same kernels and policy, that gets the look-ups of sampled
keys only.

The share of misses counts all keys that were looked up during the sample, sampled or not: the few keys that most look-ups ask for rarely miss, and
the result must not depend on whether one of them is in the sample.

For one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierstore.kernels.hashing import mix_all
from tierstore.tiers.host.access_sample import ALL
from tierstore.tiers.host.cache.layout import CONTROL_BYTES, WAYS
from tierstore.tiers.host.table import HostTable
from tierstore.tiers.host.table_layout import Layout
from tierstore.types import Keys, KeyType, StorageDtype, TableSpec

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # relative to the present cache
TRIAL_ROWS = 2048  # of the trial cache that stands for it
_HALF_LIFE = 64 * TRIAL_ROWS  # sampled look-ups after which earlier ones count half
_ENOUGH = (
    32  # look-ups for each row held, after which a cache that is not full has warmed up: it has all keys that are used
)

_SPEC = TableSpec("trial", KeyType.INT64, 1, StorageDtype.INT8, "zeros")
_SET_BYTES = Layout(_SPEC, 0).set_bytes


class Point(NamedTuple):
    """`hit_rate` of the look-ups that reach the host tier, if it held `rows` rows; None while it is unknown."""

    scale: float
    rows: int
    hit_rate: float | None


@dataclass(slots=True)
class _Trial:
    scale: float
    cache: HostTable
    tried: int = 0
    misses: float = 0.0  # of the counted look-ups; older ones fade
    seen: float = 0.0

    @property
    def is_warm(self) -> bool:
        stats = self.cache.stats()
        is_full = stats["evicted"] >= stats["capacity_rows"]
        return bool(is_full or self.tried >= _ENOUGH * max(stats["rows"], WAYS))


class CacheTrials:
    """Trials for a cache of `rows` rows. Sample look-ups by `bound` (see `AccessSample.collect`)."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._share = min(1.0, TRIAL_ROWS / rows)
        self.bound = ALL if self._share == 1.0 else int(self._share * 2.0**64)
        self._trials = [_Trial(scale, _cache_of(rows * self._share * scale)) for scale in SCALES]

    @property
    def nbytes(self) -> int:
        return sum(trial.cache.bytes_in_use for trial in self._trials)

    def add(self, keys: Keys, seen: int) -> None:
        """Try sampled look-ups, int64[n], one after the other; they are a sample of `seen` look-ups."""
        keys = mix_all(keys).view(np.int64)  # or the bits that choose the sample would choose the sets too
        faded = 0.5 ** (len(keys) / _HALF_LIFE)
        for trial in self._trials:
            counts = trial.is_warm
            misses = trial.cache.try_accesses(keys)
            trial.tried += len(keys)
            if counts:
                trial.misses = trial.misses * faded + misses
                trial.seen = trial.seen * faded + seen

    def curve(self) -> list[Point]:
        """The estimates by size, ascending; more memory never gives a lower hit rate."""
        points, best = [], 0.0
        for trial in self._trials:
            hit_rate = None
            if trial.seen:
                best = hit_rate = max(best, 1.0 - trial.misses / self._share / trial.seen)
            points.append(Point(trial.scale, round(trial.cache.capacity_rows / self._share), hit_rate))
        return points

    def close(self) -> None:
        for trial in self._trials:
            trial.cache.close()


def _cache_of(rows: float) -> HostTable:
    sets = max(1, round(rows / WAYS))
    return HostTable(_SPEC, CONTROL_BYTES + sets * _SET_BYTES, default_vector=np.zeros(1, np.float32))
