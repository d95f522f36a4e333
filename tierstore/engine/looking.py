"""Look-ups under way: begun with what memory can answer, finished with what the disk tier must.

Made by `View.begin`, whose view is held until they are finished. Each belongs to one thread at a time; another one may
finish it. Nothing survives a crash.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierstore.engine.overlay import OverlayTable
from tierstore.engine.table import Table
from tierstore.kernels.pool import pool_bags
from tierstore.types import Combiner, Keys, Tier, Vectors

_ABSENT = np.uint8(Tier.ABSENT)
_FLOAT32, _STATE = np.dtype(np.float32), np.dtype(np.uint8)
Bags = tuple[Keys, "np.ndarray | None", Combiner]  # starts, weights


class Lookup:
    """Of rows: `rows` [n, dim] becomes the answer. Keys at `padding`, bool[n] or None, are answered with zeros."""

    __slots__ = ("_codes", "_left", "_rows", "_seq", "_settled", "_table", "state")

    def __init__(
        self,
        table: Table,
        overlays: Sequence[OverlayTable],
        seq: int,
        codes: Keys,
        rows: Vectors,
        padding: np.ndarray | None,
    ) -> None:
        self._table, self._seq, self._codes, self._rows = table, seq, codes, rows
        self.state = np.zeros(len(codes), np.uint8)
        self._settled = 0
        if padding is not None and padding.any():
            self._settled = int(np.count_nonzero(padding))
            rows[padding] = 0
            self.state[padding] = _ABSENT
        self._left = table.probe(overlays, codes, rows, self.state)

    @property
    def pending(self) -> bool:
        """Whether rows are left that only the disk tier can answer: then `finish` waits for it."""
        return bool(self._left.size)

    @property
    def found(self) -> np.ndarray:
        """bool[n], False where the table's default was answered. After `finish`."""
        found: np.ndarray = self.state != _ABSENT
        return found

    def finish(self) -> Vectors:
        """The answer, complete: vectors [n, dim]. To be called once."""
        self._table.finish(self._seq, self._codes, self._left, self._rows, self.state, self._settled)
        return self._rows


class BagLookup:
    """Of pooled bags: `answer` [bags, dim] is filled.

    Bags of which the host tier has all keys are pooled there, as their rows are found. Of the others, all rows are
    looked up and then pooled; so are all bags of a table that deltas lie over, or that the device tier holds too.
    """

    __slots__ = ("_answer", "_hits", "_pooled", "_rest", "_settled", "_state", "_table")

    def __init__(
        self,
        table: Table,
        overlays: Sequence[OverlayTable],
        seq: int,
        codes: Keys,
        padding: np.ndarray | None,
        answer: Vectors,
        bags: Bags,
    ) -> None:
        self._table, self._answer = table, answer
        self._pooled = answer
        if answer.dtype is not _FLOAT32 or not answer.flags.aligned:
            self._pooled = np.empty(answer.shape, np.float32)
        self._state = np.zeros(len(codes), _STATE)
        self._settled = 0
        if padding is not None:
            self._settled = int(np.count_nonzero(padding))
            self._state[padding] = _ABSENT
        self._rest: _Rest | None = None
        self._hits = -1
        left = np.zeros(len(answer), _STATE)
        if not overlays and table.device is None and table.host is not None:
            self._hits = table.host.pool(codes, *bags, self._pooled, self._state, left)
        if self._hits < 0:
            left[:] = 1
        if self._hits < len(codes) and left.any():
            self._rest = _Rest(table, overlays, seq, codes, padding, bags, np.flatnonzero(left))

    @property
    def pending(self) -> bool:
        """As `Lookup.pending`."""
        return self._rest is not None and self._rest.lookup.pending

    @property
    def found(self) -> np.ndarray:
        """As `Lookup.found`, one a key."""
        found: np.ndarray = self._state != _ABSENT
        return found

    def finish(self) -> Vectors:
        """The answer, complete: vectors [bags, dim]. To be called once."""
        rest, state = self._rest, self._state
        if self._hits == len(state):
            self._table.counts.add_host(len(state))
        elif rest is None:
            self._table.count(state, self._settled)
        else:
            self._pooled[rest.which] = rest.finish()
            done = np.ones(len(state), np.bool_)
            done[rest.positions] = False
            if done.any():
                self._table.count(state[done], self._settled - rest.settled)
            state[rest.positions] = rest.lookup.state
        if self._pooled is not self._answer:
            with np.errstate(over="ignore"):  # what is beyond float16 is infinite there
                self._answer[:] = self._pooled
        return self._answer


class _Rest:
    """Bags `which`, int64[m], of those that were asked for: a look-up of rows at `positions` of the keys, then pooled."""

    __slots__ = ("_counts", "_how", "_starts", "_weights", "lookup", "positions", "settled", "which")

    def __init__(
        self,
        table: Table,
        overlays: Sequence[OverlayTable],
        seq: int,
        codes: Keys,
        padding: np.ndarray | None,
        bags: Bags,
        which: np.ndarray,
    ) -> None:
        starts, weights, self._how = bags
        self.which = which
        lengths = np.append(starts[1:], len(codes))[which] - starts[which]
        self._starts = np.cumsum(lengths) - lengths
        positions = np.repeat(starts[which] - self._starts, lengths)
        positions += np.arange(len(positions))
        self.positions = positions
        padding = None if padding is None else padding[positions]
        self._weights = None if weights is None else weights[positions]
        self._counts = None if padding is None else ~padding
        self.settled = 0 if padding is None else int(np.count_nonzero(padding))
        rows = np.empty((len(positions), table.spec.dim), np.float32)
        self.lookup = Lookup(table, overlays, seq, codes[positions], rows, padding)

    def finish(self) -> Vectors:
        rows: np.ndarray = self.lookup.finish()
        return pool_bags(rows, self._starts, self._weights, self._counts, self._how)
