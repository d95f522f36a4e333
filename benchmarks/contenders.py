"""Who is compared in process: the store's look-up, what users would pick instead, and numpy.take as the limit.

All hold the same rows under the same keys, and answer a batch of int64 keys into the caller's array. `numpy.take` is
told the positions instead: it is what a look-up would cost if finding rows were free. Preparing the call (a list of
Python integers) is part of what a contender costs, since callers hold NumPy arrays.

`lookup` of tierstore and numpy.take may run in several threads; each needs its own `session`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.footprint import anonymous_bytes
from tierstore.engine.data.cascade import Cascade, LookupCounts
from tierstore.engine.reads.view import View
from tierstore.engine.serving.publisher import Publisher
from tierstore.engine.serving.routing import Routing
from tierstore.kernels import codec
from tierstore.tiers.host.table import HostTable
from tierstore.types import FeatureSpec, KeyType, StorageDtype, TableSpec, Tier

CHUNK = 1 << 16
SPARE = 1.25  # slots a row when all rows shall be resident: sets fill unevenly
FEATURE = "item_id"

Positions = npt.NDArray[np.int64]
Lookup = Callable[[Positions, np.ndarray], Any]  # (keys, or positions for numpy.take; answer) → nothing


def keys_of(positions: Positions) -> npt.NDArray[np.int64]:
    """Distinct keys all over 64 bits: the finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection."""
    x = positions.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


class Rows:
    """`count` rows as stored, uint8[count, row_bytes] in `stored`; row i has the key `keys_of(i)`."""

    def __init__(self, count: int, dim: int, dtype: StorageDtype, seed: int = 1) -> None:
        self.count, self.spec = count, TableSpec("item", KeyType.INT64, dim, dtype)
        self.stored = np.empty((count, self.spec.row_bytes), np.uint8)
        rng = np.random.default_rng(seed)
        for begin in range(0, count, CHUNK):
            vectors = rng.random((min(CHUNK, count - begin), dim), np.float32)
            codec.encode(vectors, dtype, out=self.stored[begin : begin + len(vectors)])

    @property
    def label(self) -> str:
        return f"{self.spec.dim} {self.spec.dtype.value}"

    def answer(self, positions: Positions) -> npt.NDArray[np.float32]:
        """The rows at these positions as float32, decoded by NumPy alone: what every contender must answer."""
        return decoded(self.stored[positions], self.spec)

    def chunks(self) -> Any:
        """(keys, stored rows) of all rows, piece by piece."""
        for begin in range(0, self.count, CHUNK):
            end = min(self.count, begin + CHUNK)
            yield keys_of(np.arange(begin, end)), self.stored[begin:end]


def decoded(stored: npt.NDArray[np.uint8], spec: TableSpec) -> npt.NDArray[np.float32]:
    """Stored rows as float32[n, dim], by NumPy alone."""
    if spec.dtype is StorageDtype.INT8:
        scale, offset = stored[:, :4].copy().view(np.float32), stored[:, 4:8].copy().view(np.float32)
        return offset + scale * stored[:, 8:].astype(np.float32)
    if spec.dtype is StorageDtype.INT4:
        scale, offset = (stored[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
        codes = np.stack([stored[:, 4:] & 15, stored[:, 4:] >> 4], axis=2).reshape(len(stored), -1)
        return offset + scale * codes[:, : spec.dim].astype(np.float32)
    kind = {StorageDtype.FLOAT32: np.float32, StorageDtype.FLOAT16: np.float16}[spec.dtype]
    return stored.view(kind).astype(np.float32)


class NoDisk:
    """The tier below a host tier that holds everything: being asked is the benchmark's mistake."""

    def get(self, table_id: int, keys: np.ndarray, rows: np.ndarray, state: np.ndarray) -> None:
        raise RuntimeError(f"{len(keys)} keys were not in the host tier; the benchmark asks resident keys only")


class Tierstore:
    """A served model whose rows are all in the host tier, looked up as `model.lookup` does: a view a call."""

    name = "tierstore"
    wants_keys = True

    def __init__(self, rows: Rows, *, slots_a_row: float = SPARE) -> None:
        spec = rows.spec
        default = np.zeros(spec.dim, np.float32)
        before = anonymous_bytes()
        probe = HostTable(spec, 1 << 20, default_vector=default)
        slot_bytes = probe.bytes_in_use / probe.capacity_rows
        probe.close()
        self.host = HostTable(spec, int(rows.count * slots_a_row * slot_bytes) + (64 << 10), default_vector=default)
        for keys, stored in rows.chunks():
            self.host.warm(keys, stored)
        self.memory = anonymous_bytes() - before
        table = Cascade(spec, 1, default, NoDisk(), LookupCounts())  # type: ignore[arg-type]
        table.host = self.host
        holder: Any = SimpleNamespace(
            number=1, specs={spec.name: spec}, tables={spec.name: table}, features={FEATURE: FeatureSpec(FEATURE, spec.name)}, padding={},
            heads={}, colliding={},
        )  # fmt: skip
        self._publisher = Publisher("bench")
        self._publisher.publish(Routing(View(holder, (), 0)))

    def resident(self, rows: Rows) -> Positions:
        """Positions of the rows that found a place."""
        there = []
        for first, (keys, _) in zip(range(0, rows.count, CHUNK), rows.chunks(), strict=True):
            state = np.zeros(len(keys), np.uint8)
            self.host.lookup(keys, np.empty((len(keys), rows.spec.dim), np.float32), state)
            there.append(first + np.flatnonzero(state == Tier.HOST))
        return np.concatenate(there)

    def session(self) -> Lookup:
        publisher = self._publisher

        def lookup(keys: Positions, out: np.ndarray) -> None:  # as `Model.lookup`
            view = publisher.acquire()
            try:
                view.lookup(FEATURE, keys, out=out)
            finally:
                publisher.release(view)

        return lookup

    def bags(self, keys: Positions, offsets: Positions, out: np.ndarray) -> None:
        """Sums of bags, pooled by the store."""
        view = self._publisher.acquire()
        try:
            view.lookup_bags(FEATURE, keys, offsets, combiner="sum", out=out)
        finally:
            self._publisher.release(view)

    @property
    def rows_held(self) -> int:
        return self.host.rows_resident

    def close(self) -> None:
        self.host.close()


class Take:
    """numpy.take of rows at known positions. `decode` says whether the answer is float32 or the rows as stored."""

    wants_keys = False
    memory = 0  # the rows themselves, which every benchmark holds anyway

    def __init__(self, rows: Rows, *, decode: bool = False) -> None:
        self._rows, self._decode = rows, decode
        self.name = "numpy.take, decoded by NumPy" if decode else "numpy.take"
        self.memory = rows.stored.nbytes
        self.rows_held = rows.count

    def session(self) -> Lookup:
        spec = self._rows.spec
        stored = self._rows.stored
        if spec.dtype is StorageDtype.FLOAT32:
            vectors = stored.view(np.float32)
            return lambda positions, out: np.take(vectors, positions, axis=0, out=out, mode="clip")
        as_stored = np.empty((0, spec.row_bytes), np.uint8)

        def lookup(positions: Positions, out: np.ndarray) -> None:
            nonlocal as_stored
            if len(as_stored) != len(positions):
                as_stored = np.empty((len(positions), spec.row_bytes), np.uint8)
            np.take(stored, positions, axis=0, out=as_stored, mode="clip")
            if self._decode:
                out[:] = decoded(as_stored, spec)

        return lookup

    def close(self) -> None:
        pass


class Mapped:
    """A Python mapping from key to one NumPy array a row, asked key by key: a dict, or cachetools.LRUCache."""

    wants_keys = True

    def __init__(self, rows: Rows, name: str, mapping: Any) -> None:
        self.name, self._mapping = name, mapping
        vectors = rows.stored.view(np.float32)
        before = anonymous_bytes()
        gc.disable()  # millions of new objects would have it run again and again
        try:
            for begin in range(0, rows.count, CHUNK):
                keys = keys_of(np.arange(begin, min(rows.count, begin + CHUNK))).tolist()
                mapping.update(zip(keys, map(np.copy, vectors[begin : begin + CHUNK]), strict=True))
        finally:
            gc.enable()
        self.memory = anonymous_bytes() - before
        self.rows_held = rows.count

    def session(self) -> Lookup:
        get = self._mapping.__getitem__

        def lookup(keys: Positions, out: np.ndarray) -> None:
            np.concatenate(list(map(get, keys.tolist())), out=out.reshape(-1))

        return lookup

    def close(self) -> None:
        self._mapping.clear()


def dict_of_arrays(rows: Rows) -> Mapped:
    return Mapped(rows, "dict of arrays", {})


def lru_cache(rows: Rows) -> Mapped:
    import cachetools

    return Mapped(rows, "cachetools.LRUCache", cachetools.LRUCache(rows.count))


PEERS: dict[str, Callable[[Rows], Any]] = {
    "dict of arrays": dict_of_arrays,
    "cachetools.LRUCache": lru_cache,
}
