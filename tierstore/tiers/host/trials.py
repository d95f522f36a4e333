"""How often the host tier would answer with less or more memory: small caches of its kind, tried with sampled look-ups.

A cache of C rows and look-ups of all keys behave like one of C/k rows and the look-ups of one key of k (Waldspurger,
Saemundsson, Ahmad, Park, USENIX ATC 2017). So for each size there is a cache of about `TRIAL_ROWS` times its scale, by
the same kernels and with the same policy, that is asked for the sampled keys alone.

The share of misses is taken of all keys that were looked up while the sample was, sampled or not: the few keys that
nearly all look-ups ask for are hardly ever missing, and whether one of them is in the sample must not matter.

For one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierstore.kernels.hashing import mix_all
from tierstore.tiers.host.cache.layout import CONTROL_BYTES, WAYS
from tierstore.tiers.host.layout import Layout
from tierstore.tiers.host.sample import ALL
from tierstore.tiers.host.table import HostTable
from tierstore.types import Keys, KeyType, StorageDtype, TableSpec

SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the cache that there is
TRIAL_ROWS = 2048  # of the cache that stands for it
_HALF_LIFE = 64 * TRIAL_ROWS  # sampled look-ups after which what came before counts half
_ENOUGH = (
    32  # look-ups a row that it holds, after which a cache has is_warm in that is not full: it has what is asked for
)

_SPEC = TableSpec("trial", KeyType.INT64, 1, StorageDtype.INT8, "zeros")
_SET_BYTES = Layout(_SPEC, 0).set_bytes


class Point(NamedTuple):
    """`hit_rate` of the look-ups that reach the host tier, if it held `rows` rows; None while that is not known yet."""

    scale: float
    rows: int
    hit_rate: float | None


@dataclass(slots=True)
class _Trial:
    scale: float
    cache: HostTable
    tried: int = 0
    misses: float = 0.0  # of the look-ups that count, which fade
    seen: float = 0.0

    @property
    def is_warm(self) -> bool:
        stats = self.cache.stats()
        is_full = stats["evicted"] >= stats["capacity_rows"]
        return bool(is_full or self.tried >= _ENOUGH * max(stats["rows"], WAYS))


class CacheTrials:
    """Trials for a cache of `rows` rows. Look-ups are to be sampled by `bound` (see `AccessSample.collect`)."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._share = min(1.0, TRIAL_ROWS / rows)
        self.bound = ALL if self._share == 1.0 else int(self._share * 2.0**64)
        self._trials = [_Trial(scale, _cache_of(rows * self._share * scale)) for scale in SCALES]

    @property
    def nbytes(self) -> int:
        return sum(trial.cache.bytes_in_use for trial in self._trials)

    def add(self, keys: Keys, seen: int) -> None:
        """Try sampled look-ups, int64[n], one after the other, out of `seen` look-ups of any keys."""
        keys = mix_all(keys).view(np.int64)  # else the bits by which keys were sampled would say in which sets they are
        faded = 0.5 ** (len(keys) / _HALF_LIFE)
        for trial in self._trials:
            counts = trial.is_warm
            misses = trial.cache.try_accesses(keys)
            trial.tried += len(keys)
            if counts:
                trial.misses = trial.misses * faded + misses
                trial.seen = trial.seen * faded + seen

    def curve(self) -> list[Point]:
        """By size, ascending; more memory never answers less."""
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
