"""Look-ups in two steps: begun with the keys that memory can answer, finished with the keys for the disk tier.

The view is held until they are finished. Each belongs to one thread at a time; another one may finish it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tierstore.engine.data.table_view import DTYPES
from tierstore.engine.reads.feature_view import FeatureView
from tierstore.kernels.pool import pool_bags
from tierstore.lookup.table_rows import NOT_POOLED
from tierstore.tiers.device.lookup import Pooling
from tierstore.types import Keys, Tier, Vectors

_ABSENT, _PENDING = np.uint8(Tier.ABSENT), np.uint8(Tier.PENDING)
_STATE = np.dtype(np.uint8)
_ALL = slice(None)


class Lookup:
    """A look-up of rows, one for each key."""

    __slots__ = ("_codes", "_feature", "_hits", "_rows", "state")

    def __init__(self, feature: FeatureView, codes: Keys, code: int, out: Vectors | None = None) -> None:
        """`code` is that of the answer's dtype, `out` as for `FeatureView.checked_out`."""
        n = len(codes)
        self._feature, self._codes = feature, codes
        rows = np.empty((n, feature.dim), DTYPES[code]) if out is None else feature.checked_out(out, n, code)
        self._rows = rows
        self.state = state = np.zeros(n, _STATE)
        self._hits = feature.rows.probe(codes, rows, state, code, feature.padding)

    @property
    def pending(self) -> bool:
        """Whether some rows must come from the disk tier: then `finish` waits for it."""
        return self._hits < len(self._codes) and bool((self.state == _PENDING).any())

    @property
    def found(self) -> np.ndarray:
        """bool[n], False where the table's default was answered. After `finish`."""
        found: np.ndarray = self.state != _ABSENT
        return found

    def finish(self) -> Vectors:
        """The answer, complete: vectors [n, dim]. Call it once."""
        codes, feature = self._codes, self._feature
        if self._hits == len(codes):
            feature.rows.table.counts.add_host(len(codes))
        else:
            feature.rows.finish(codes, self._rows, self.state, feature.padding)
        return self._rows


class BagLookup:
    """A look-up of pooled bags.

    Bags whose keys are all in the host tier are pooled as their rows are found. For the other bags all rows are looked
    up, and then pooled; so are all bags of a table that has overlays.
    """

    __slots__ = ("_answer", "_bags", "_codes", "_feature", "_hits", "_other", "_others", "_places", "state")

    def __init__(self, feature: FeatureView, codes: Keys, bags: Pooling, code: int, out: Vectors | None = None) -> None:
        self._feature, self._codes, self._bags = feature, codes, bags
        n = len(bags.offsets)
        answer = np.empty((n, feature.dim), DTYPES[code]) if out is None else feature.checked_out(out, n, code)
        self._answer = answer
        self.state = np.zeros(len(codes), _STATE)
        self._hits = hits = feature.rows.pool(codes, bags, answer, self.state, code, feature.padding)
        self._others: Lookup | None = None  # of the keys of `_other` bags
        self._other: Any = _ALL
        self._places: Any = _ALL  # of these keys
        if hits == NOT_POOLED:
            self._others = Lookup(feature, codes, 0)
        elif hits < len(codes) and (cold := np.flatnonzero(self.state == _PENDING)).size:
            are_cold = np.zeros(n, np.bool_)
            are_cold[np.searchsorted(bags.offsets, cold, side="right") - 1] = True
            self._other = np.flatnonzero(are_cold)
            self._places, self._bags = _bags_at(bags, self._other, len(codes))
            self._others = Lookup(feature, codes[self._places], 0)

    @property
    def pending(self) -> bool:
        """See `Lookup.pending`."""
        return self._others is not None and self._others.pending

    @property
    def found(self) -> np.ndarray:
        """See `Lookup.found`; one for each key."""
        found: np.ndarray = self.state != _ABSENT
        return found

    def finish(self) -> Vectors:
        """The answer, complete: vectors [bags, dim]. Call it once."""
        feature, others, bags, codes = self._feature, self._others, self._bags, self._codes
        if self._hits == len(codes):
            feature.rows.table.counts.add_host(len(codes))
        elif others is None:
            feature.rows.table.count(self.state, feature.skipped(codes))
        else:
            rows: Any = others.finish()
            counted = None if feature.padding is None else codes[self._places] != feature.padding
            with np.errstate(over="ignore"):  # values beyond float16 are infinite there
                self._answer[self._other] = pool_bags(rows, bags.offsets, bags.weights, counted, bags.combiner)
            at_once = np.ones(len(codes), np.bool_)
            at_once[self._places] = False
            if at_once.any():
                feature.rows.table.count(self.state[at_once], feature.skipped(codes[at_once]))
            self.state[self._places] = others.state
        return self._answer


def _bags_at(bags: Pooling, which: np.ndarray, n: int) -> tuple[np.ndarray, Pooling]:
    """Positions of the keys of the bags `which`, int64[m], and their pooling; `n` keys are in all bags."""
    lengths = np.append(bags.offsets[1:], n)[which] - bags.offsets[which]
    starts = np.cumsum(lengths) - lengths
    positions = np.repeat(bags.offsets[which] - starts, lengths)
    positions += np.arange(len(positions))
    return positions, Pooling(starts, None if bags.weights is None else bags.weights[positions], bags.combiner)
