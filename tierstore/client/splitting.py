"""Large requests split into parts that go out side by side, and the answers of the parts joined into one.

Every output of a part has a position in the whole output, a range of rows along axis 0. `JoinedOutputs` allocates a
whole array when the first answer shows its shape, and each answer is received straight into its rows. An output that
cannot be joined (one without the batch dimension, or parts of different widths) is named in `misfit`.

Plain values, and one `JoinedOutputs` per attempt at a request; the thread or loop that runs
the request uses them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tierstore.client import wire
from tierstore.client.inputs import Bags, Batch, Plain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    from tierstore.lazy import np

Position = slice | None  # rows of the whole output; None: the output is the same in every part


@dataclass(frozen=True, slots=True)
class RequestPart:
    """One of the requests that a large one is split into.

    `default` is the position of outputs that are not in `positions`.
    """

    inputs: Sequence[wire.Input]
    outputs: Sequence[wire.Output]
    positions: Mapping[str, Position] = field(default_factory=dict)
    default: Position = None


@dataclass(frozen=True, slots=True)
class Split:
    """A request in parts. `rows`: how many each whole output has; `n`: those of outputs that are not in `rows`."""

    parts: Sequence[RequestPart]
    rows: Mapping[str, int] = field(default_factory=dict)
    n: int = 0


class JoinedOutputs:
    """The whole outputs of a request that is answered in parts."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._kept: dict[str, int] = {}  # outputs that are the same in every part: the part whose answer is kept
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.misfit: str | None = None  # the first output that could not be joined

    def destination(
        self, number: int, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any] | None:
        """The array that this output of part `number` is to be written to; None where it is not needed."""
        part = self._split.parts[number]
        position = part.positions.get(name, part.default)
        if position is None:
            if self._kept.setdefault(name, number) != number:
                return None
            self.arrays[name] = whole = np.empty(shape, dtype)
            return whole
        if not shape or shape[0] != position.stop - position.start:
            self.misfit = self.misfit or name
            return None
        array = self.arrays.get(name)
        if array is None:
            array = self.arrays[name] = np.empty((self._split.rows.get(name, self._split.n), *shape[1:]), dtype)
        elif array.shape[1:] != shape[1:] or array.dtype != dtype:
            self.misfit = self.misfit or name
            return None
        return array[position]


# --- look-ups: each feature is split by itself


def split_batch(batch: Batch, limit: int) -> list[Batch]:
    """Parts of at most `limit` keys each, in order. A bag is never split, so a longer one is a part of its own."""
    if batch.n <= limit:
        return [batch]
    if batch.offsets is None:
        return [Batch(batch.feature, batch.keys[begin : begin + limit]) for begin in range(0, batch.n, limit)]
    starts = batch.offsets
    parts = []
    first = 0
    while first < len(starts):
        # a bag ends where the next one starts: `reach` is the bag after the last one that ends within the limit
        reach = int(np.searchsorted(starts, starts[first] + limit, side="right")) - 1
        last = len(starts) if batch.n - starts[first] <= limit else max(reach, first + 1)
        parts.append(batch.bags(first, last))
        first = last
    return parts


def split_lookup(batches: Sequence[Batch], outputs: Mapping[str, Sequence[wire.Output]], limit: int | None) -> Split:
    """Parts of about equal size, of at most `limit` keys unless a bag is longer.

    `outputs`: those wanted of each feature.
    """
    total = sum(batch.n for batch in batches)
    if limit is None or total <= limit:
        inputs = [tensor for batch in batches for tensor in batch.inputs()]
        return Split([RequestPart(inputs, [output for batch in batches for output in outputs[batch.feature]])])
    limit = -(-total // -(-total // limit))  # as many parts, but none that is nearly empty
    packed: list[list[tuple[Batch, int, int]]] = [[]]  # (batch, its first row, its first key)
    room = limit
    rows: dict[str, int] = {}
    for whole in batches:
        row = key = 0
        for batch in split_batch(whole, limit):
            if packed[-1] and (batch.n > room or packed[-1][-1][0].feature == batch.feature):
                packed.append([])
                room = limit
            packed[-1].append((batch, row, key))
            room -= batch.n
            row, key = row + batch.rows, key + batch.n
        rows[whole.feature], rows[f"{whole.feature}.found"] = row, key
    parts = []
    for group in packed:
        positions: dict[str, Position] = {}
        for batch, row, key in group:
            positions[batch.feature] = slice(row, row + batch.rows)
            positions[f"{batch.feature}.found"] = slice(key, key + batch.n)
        inputs = [tensor for batch, _, _ in group for tensor in batch.inputs()]
        parts.append(
            RequestPart(inputs, [output for batch, _, _ in group for output in outputs[batch.feature]], positions)
        )
    return Split(parts, rows)


# --- predict: all inputs share the batch dimension, one entry per item to score


def split_predict(inputs: Sequence[Plain | Bags], outputs: Sequence[wire.Output], limit: int | None) -> Split:
    """Parts of about equal size, of at most `limit` items.

    An input with one entry for all items is sent with every part.
    """
    n = max((one.n or 0 for one in inputs), default=0)
    if limit is None or n <= limit:
        return Split([RequestPart([tensor for one in inputs for tensor in one.inputs()], outputs)])
    count = -(-n // limit)
    edges = [n * i // count for i in range(count + 1)]
    same: dict[str, Position] = {name: None for one in inputs if one.n != n for name in one.names}
    repeated = {id(one): one.inputs() for one in inputs if one.n != n}
    rows: dict[str, int] = {}
    parts = []
    for begin, end in pairwise(edges):
        tensors: list[wire.Input] = []
        positions = dict(same)
        for one in inputs:
            if one.n != n:
                tensors += repeated[id(one)]
                continue
            piece = one.part(begin, end)
            tensors += piece.inputs()
            if isinstance(piece, Bags):  # `found` has one entry per key, not per bag
                name = piece.names[1]
                first = rows.get(name, 0)
                rows[name] = first + piece.batch.n
                positions[name] = slice(first, rows[name])
        parts.append(RequestPart(tensors, outputs, positions, slice(begin, end)))
    return Split(parts, rows, n)
