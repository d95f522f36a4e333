"""Large requests cut into shards, and their answers as one: what to send in each, and where its rows belong.

A shard's answer has a place in the whole of every output, along axis 0; `Gather` makes each whole array once, when the
first shard's answer tells its shape, and every shard is received straight into its place. What does not fit (an output
without the batch dimension, shards of different widths) is noted in `misfit`, never put together.

Plain values, and one `Gather` a try; the thread or loop that runs the request uses them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.client import wire
from tierstore.client.batches import Batch, split

Place = slice | None  # of rows in the whole; None: every shard answers the same


@dataclass(frozen=True, slots=True)
class Shard:
    """One request of several. `rest` is the place of outputs that are not in `places`."""

    inputs: Sequence[wire.Input]
    outputs: Sequence[wire.Output]
    places: Mapping[str, Place] = field(default_factory=dict)
    rest: Place = None


@dataclass(frozen=True, slots=True)
class Cut:
    """A request as shards. `rows` are those of each whole output; `n` of outputs that are not in it."""

    shards: Sequence[Shard]
    rows: Mapping[str, int] = field(default_factory=dict)
    n: int = 0


class Gather:
    """The arrays of one answer that comes in shards."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._first: dict[str, int] = {}  # of outputs that every shard answers alike: whose answer is kept
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.misfit: str | None = None  # the first output that could not be put together

    def place(self, shard: int, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        """Where this output of this shard is to be written; None where it belongs nowhere."""
        mine = self._cut.shards[shard]
        at = mine.places.get(name, mine.rest)
        if at is None:
            if self._first.setdefault(name, shard) != shard:
                return None
            self.arrays[name] = whole = np.empty(shape, dtype)
            return whole
        if not shape or shape[0] != at.stop - at.start:
            self.misfit = self.misfit or name
            return None
        array = self.arrays.get(name)
        if array is None:
            array = self.arrays[name] = np.empty((self._cut.rows.get(name, self._cut.n), *shape[1:]), dtype)
        elif array.shape[1:] != shape[1:] or array.dtype != dtype:
            self.misfit = self.misfit or name
            return None
        return array[at]


# --- look-ups: features are independent of each other, so each is cut by itself


def cut_lookup(batches: Sequence[Batch], outputs: Mapping[str, Sequence[wire.Output]], most: int | None) -> Cut:
    """Shards of about equal size, of at most `most` keys where no bag is longer. `outputs` are those of each feature."""
    total = sum(batch.n for batch in batches)
    if most is None or total <= most:
        inputs = [tensor for batch in batches for tensor in batch.inputs()]
        return Cut([Shard(inputs, [output for batch in batches for output in outputs[batch.feature]])])
    most = -(-total // -(-total // most))  # as many shards, but none that is nearly empty
    packed: list[list[tuple[Batch, int, int]]] = [[]]  # (part, its first row, its first key)
    room = most
    rows: dict[str, int] = {}
    for batch in batches:
        row = key = 0
        for part in split(batch, most):
            if packed[-1] and (part.n > room or packed[-1][-1][0].feature == part.feature):
                packed.append([])
                room = most
            packed[-1].append((part, row, key))
            room -= part.n
            row, key = row + part.rows, key + part.n
        rows[batch.feature], rows[f"{batch.feature}.found"] = row, key
    shards = []
    for parts in packed:
        places: dict[str, Place] = {}
        for part, row, key in parts:
            places[part.feature] = slice(row, row + part.rows)
            places[f"{part.feature}.found"] = slice(key, key + part.n)
        inputs = [tensor for part, _, _ in parts for tensor in part.inputs()]
        wanted = [output for part, _, _ in parts for output in outputs[part.feature]]
        shards.append(Shard(inputs, wanted, places))
    return Cut(shards, rows)


# --- predict: all inputs share the batch dimension, one entry an item to score


@dataclass(frozen=True, slots=True)
class Plain:
    """An input of `predict` that is one tensor: numbers of any shape, or strings (flat, `shape` apart).

    `items`: whether axis 0 may be the batch dimension.
    """

    name: str
    values: Any
    shape: tuple[int, ...]
    items: bool = True

    @property
    def n(self) -> int | None:
        """Entries along the batch dimension; None without one."""
        return self.shape[0] if self.items and self.shape else None

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs that would have an entry an entry of this input."""
        return (self.name, f"{self.name}.found")

    def part(self, begin: int, end: int) -> Plain:
        width = 1 if isinstance(self.values, np.ndarray) else int(np.prod(self.shape[1:], dtype=np.int64))
        return Plain(self.name, self.values[begin * width : end * width], (end - begin, *self.shape[1:]))

    def inputs(self) -> list[wire.Input]:
        if isinstance(self.values, np.ndarray):
            return [wire.numbers(self.name, self.values)]
        tensor = wire.strings(self.name, self.values)
        return [wire.Input(tensor.name, tensor.datatype, self.shape, tensor.data)]


@dataclass(frozen=True, slots=True)
class Bags:
    """An input of `predict` that is ragged: one bag an item."""

    batch: Batch

    @property
    def n(self) -> int | None:
        return self.batch.rows

    @property
    def names(self) -> tuple[str, ...]:
        return (self.batch.feature, f"{self.batch.feature}.found")

    def part(self, begin: int, end: int) -> Bags:
        return Bags(self.batch.bags(begin, end))

    def inputs(self) -> list[wire.Input]:
        return self.batch.inputs()


def cut_items(given: Sequence[Plain | Bags], outputs: Sequence[wire.Output], most: int | None) -> Cut:
    """Shards of about equal size, of at most `most` items. What has one entry for all items goes with every shard."""
    n = max((one.n or 0 for one in given), default=0)
    if most is None or n <= most:
        return Cut([Shard([tensor for one in given for tensor in one.inputs()], outputs)])
    count = -(-n // most)
    edges = [n * i // count for i in range(count + 1)]
    everywhere: dict[str, Place] = {name: None for one in given if one.n != n for name in one.names}
    repeated = {id(one): one.inputs() for one in given if one.n != n}
    rows: dict[str, int] = {}
    keys: dict[str, int] = {}
    shards = []
    for begin, end in pairwise(edges):
        inputs: list[wire.Input] = []
        places = dict(everywhere)
        for one in given:
            if one.n != n:
                inputs += repeated[id(one)]
                continue
            part = one.part(begin, end)
            inputs += part.inputs()
            if isinstance(part, Bags):  # `found` tells of keys, not of bags
                name = part.names[1]
                first = keys.get(name, 0)
                places[name] = slice(first, first + part.batch.n)
                keys[name] = rows[name] = first + part.batch.n
        shards.append(Shard(inputs, outputs, places, slice(begin, end)))
    return Cut(shards, rows, n)
