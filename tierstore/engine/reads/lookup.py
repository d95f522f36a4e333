"""Look-ups under way: begun with what memory can answer, finished with what the disk tier must.

The view is held until they are finished. Each belongs to one thread at a time; another one may finish
it.
"""

from __future__ import annotations

import numpy as np

from tierstore.engine.reads.batch import KeyBatch
from tierstore.kernels.pool import pool_bags
from tierstore.types import Tier, Vectors

_ABSENT = np.uint8(Tier.ABSENT)
_FLOAT32, _STATE = np.dtype(np.float32), np.dtype(np.uint8)


def begin(batch: KeyBatch) -> Lookup | BagLookup:
    """Start a look-up: what memory can answer is answered, without waiting."""
    return Lookup(batch) if batch.bags is None else BagLookup(batch)


class Lookup:
    """A look-up of rows, one a key."""

    __slots__ = ("_batch", "_pending", "_rows", "_skipped", "state")

    def __init__(self, batch: KeyBatch) -> None:
        self._batch, self._rows = batch, batch.answer_array()
        self.state = np.zeros(len(batch.codes), _STATE)
        self._skipped = batch.skipped
        if self._skipped:
            self._rows[batch.padding] = 0
            self.state[batch.padding] = _ABSENT
        self._pending = batch.table.probe(batch.overlays, batch.codes, self._rows, self.state)

    @property
    def pending(self) -> bool:
        """Whether there are rows that only the disk tier can answer: then `finish` waits for it."""
        return bool(self._pending.size)

    @property
    def found(self) -> np.ndarray:
        """bool[n], False where the table's default was answered. After `finish`."""
        found: np.ndarray = self.state != _ABSENT
        return found

    def finish(self) -> Vectors:
        """The answer, complete: vectors [n, dim]. To be called once."""
        batch = self._batch
        batch.table.finish(batch.seq, batch.codes, self._pending, self._rows, self.state, self._skipped)
        return self._rows


class BagLookup:
    """A look-up of pooled bags.

    Bags of which the host tier has all keys are pooled there, as their rows are found. Of the others, all rows are
    looked up and then pooled; so are all bags of a table that has overlays, or that the device tier holds too.
    """

    __slots__ = ("_answer", "_batch", "_hits", "_pooled", "_remaining", "_skipped", "_state")

    def __init__(self, batch: KeyBatch) -> None:
        self._batch, self._answer = batch, batch.answer_array()
        self._pooled = self._answer
        if self._answer.dtype is not _FLOAT32 or not self._answer.flags.aligned:
            self._pooled = np.empty(self._answer.shape, np.float32)
        self._state = np.zeros(len(batch.codes), _STATE)
        self._skipped = 0 if batch.padding is None else batch.skipped
        if self._skipped:
            self._state[batch.padding] = _ABSENT
        self._hits = -1
        remaining = np.zeros(len(self._answer), _STATE)
        table, bags = batch.table, batch.bags
        assert bags is not None
        if not batch.overlays and table.device is None and table.host is not None:
            self._hits = table.host.pool(
                batch.codes, bags.offsets, bags.weights, bags.combiner, self._pooled, self._state, remaining
            )
        if self._hits < 0:
            remaining[:] = 1
        self._remaining: _SomeBags | None = None
        if self._hits < len(batch.codes) and remaining.any():
            self._remaining = _SomeBags(batch, np.flatnonzero(remaining))

    @property
    def pending(self) -> bool:
        """As `Lookup.pending`."""
        return self._remaining is not None and self._remaining.lookup.pending

    @property
    def found(self) -> np.ndarray:
        """As `Lookup.found`, one a key."""
        found: np.ndarray = self._state != _ABSENT
        return found

    def finish(self) -> Vectors:
        """The answer, complete: vectors [bags, dim]. To be called once."""
        remaining, state, table = self._remaining, self._state, self._batch.table
        if self._hits == len(state):
            table.counts.add_host(len(state))
        elif remaining is None:
            table.count(state, self._skipped)
        else:
            self._pooled[remaining.which] = remaining.finish()
            done = np.ones(len(state), np.bool_)
            done[remaining.positions] = False
            if done.any():
                table.count(state[done], self._skipped - remaining.skipped)
            state[remaining.positions] = remaining.lookup.state
        if self._pooled is not self._answer:
            with np.errstate(over="ignore"):  # what is beyond float16 is infinite there
                self._answer[:] = self._pooled
        return self._answer


class _SomeBags:
    """Bags `which`, int64[m], of a batch: a look-up of rows at `positions` of its keys, then pooled."""

    __slots__ = ("_combiner", "_counts", "_starts", "_weights", "lookup", "positions", "skipped", "which")

    def __init__(self, batch: KeyBatch, which: np.ndarray) -> None:
        bags = batch.bags
        assert bags is not None
        self.which = which
        lengths = np.append(bags.offsets[1:], len(batch.codes))[which] - bags.offsets[which]
        self._starts = np.cumsum(lengths) - lengths
        positions = np.repeat(bags.offsets[which] - self._starts, lengths)
        positions += np.arange(len(positions))
        self.positions = positions
        self._weights = None if bags.weights is None else bags.weights[positions]
        self._combiner = bags.combiner
        rows = np.empty((len(positions), batch.table.spec.dim), np.float32)
        some = batch.rows_at(positions, rows)
        self._counts = None if some.padding is None else ~some.padding
        self.skipped = some.skipped
        self.lookup = Lookup(some)

    def finish(self) -> Vectors:
        rows: np.ndarray = self.lookup.finish()
        return pool_bags(rows, self._starts, self._weights, self._counts, self._combiner)
