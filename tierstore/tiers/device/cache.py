"""The device tier of a table over all GPUs: the same rows on each, or a share of the keys on each.

`replica`: every device holds the hottest rows; look-ups use the devices in turn. `shard`: a hash of the key says which
device holds it. With one device both are that device's table. Any thread may call anything. Nothing survives the process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from tierstore.kernels.hashing import mix_all
from tierstore.tiers.checks import check_answer, check_rows
from tierstore.tiers.device.backend import OutOfDeviceMemory
from tierstore.tiers.device.layout import MAX_HEAT
from tierstore.tiers.device.lookup import Bags, Fetch, look_up
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.device.workspaces import DeviceMemory
from tierstore.types import Keys, Rows, States, TableSpec, Tier, Vectors

DeviceLayoutKind = Literal["replica", "shard"]
_COUNTS = ("rows", "absent_keys", "bytes", "admitted", "evicted", "dropped_stale", "dropped_busy")


class DeviceCache:
    """A `CacheTier` over one table on each device of `memories`; `budget_bytes` is for all devices together."""

    def __init__(
        self,
        spec: TableSpec,
        budget_bytes: int,
        memories: Sequence[DeviceMemory],
        *,
        kind: DeviceLayoutKind,
        default_vector: np.ndarray,
        fraction: float = 1.0,
    ) -> None:
        # constant after construction
        self.spec, self.budget_bytes = spec, int(budget_bytes)
        self.parts = [
            DeviceTable(spec, budget_bytes // len(memories), memory, default_vector=default_vector, fraction=fraction)
            for memory in memories
        ]
        self._sharded = kind == "shard" and len(memories) > 1
        self._turn = itertools.count()

    def _owners(self, keys: Keys) -> np.ndarray:
        """Which part holds each key: by bits of the hash that choose neither region nor set."""
        owners: np.ndarray = (mix_all(np.ascontiguousarray(keys)) >> np.uint64(8) & np.uint64(0xFFFFFF)) % np.uint64(
            len(self.parts)
        )
        return owners

    def _split(self, keys: Keys) -> Iterator[tuple[DeviceTable, np.ndarray | slice]]:
        """(part, positions of its keys): all keys for each replica, each key for one shard."""
        if not self._sharded:
            for part in self.parts:
                yield part, slice(None)
            return
        owners = self._owners(keys)
        for number, part in enumerate(self.parts):
            yield part, np.flatnonzero(owners == number)

    def _count(self, offered: Keys, call: Callable[[DeviceTable, np.ndarray | slice], int]) -> int:
        """Keys admitted: of all shards, or of the replica that admitted most."""
        counts = [call(part, at) for part, at in self._split(offered)]
        return sum(counts) if self._sharded else max(counts)

    # --- look-ups

    def lookup(self, keys: Keys, out: Vectors, state: States) -> int:
        """As `DeviceTable.lookup`: an answer in CPU memory."""
        check_answer(self.spec, keys, out, state)
        if not self._sharded:
            return self.parts[next(self._turn) % len(self.parts)].lookup(keys, out, state)
        answered = 0
        for part, at in self._split(keys):
            rows, states = np.empty((len(keys[at]), self.spec.dim), out.dtype), state[at]
            answered += part.lookup(keys[at], rows, states)
            hit = (state[at] == Tier.PENDING) & (states != Tier.PENDING)
            out[at[hit]] = rows[hit]  # type: ignore[index]
            state[at] = states
        return answered

    def answer(
        self,
        keys: Keys,
        state: States,
        answered: Vectors,
        dtype: Any,
        fetch: Fetch,
        bags: Bags | None = None,
        number: int | None = None,
    ) -> Any:
        """An answer on device `number` (None: on one of them), or None where the device cannot; see `look_up`.

        Rows of another shard come through CPU memory, like rows of the tiers below.
        """
        parts = [part for part in self.parts if number in (None, part.device.backend.number)]
        if not parts:
            return None
        home = parts[next(self._turn) % len(parts)]
        shape = (len(keys) if bags is None else len(bags.offsets), self.spec.dim)
        try:
            out = home.device.backend.empty(shape, dtype)
        except OutOfDeviceMemory:
            return None
        below = self._across(home, fetch) if self._sharded else fetch
        return out if look_up(home, keys, state, answered, out, below, bags) else None

    def _across(self, home: DeviceTable, fetch: Fetch) -> Fetch:
        def fetch_or_borrow(keys: Keys, dtype: Any) -> tuple[Vectors, States]:
            rows, states = np.empty((len(keys), self.spec.dim), dtype), np.zeros(len(keys), np.uint8)
            for part, at in self._split(keys):
                if part is not home:
                    theirs, found = np.empty((len(keys[at]), self.spec.dim), dtype), np.zeros(len(keys[at]), np.uint8)
                    part.lookup(keys[at], theirs, found)
                    rows[at], states[at] = theirs, found
            missing = np.flatnonzero(states == Tier.PENDING)
            if missing.size:
                rows[missing], states[missing] = fetch(keys[missing], dtype)
            return rows, states

        return fetch_or_borrow

    # --- writers

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        rows = check_rows(self.spec, keys, rows)
        return self._count(keys, lambda part, at: part.insert(keys[at], rows[at], seq))

    def exchange(self, keys: Keys, rows: Rows, seq: int) -> tuple[int, Keys, Rows]:
        """`insert`, and (keys, rows) of those that were evicted for it and are on no device any more."""
        rows = check_rows(self.spec, keys, rows)
        if self._sharded or len(self.parts) == 1:
            done = [part.exchange(keys[at], rows[at], seq) for part, at in self._split(keys)]
            return (
                sum(n for n, _, _ in done),
                np.concatenate([k for _, k, _ in done]),
                np.concatenate([r for *_, r in done]),
            )
        # a row that one replica evicts may still be in another
        return self.insert(keys, rows, seq), keys[:0], rows[:0]

    def insert_absent(self, keys: Keys, seq: int) -> int:
        return self._count(keys, lambda part, at: part.insert_absent(keys[at], seq))

    def warm(self, keys: Keys, rows: Rows, seq: int | None = None) -> int:
        rows = check_rows(self.spec, keys, rows)
        return self._count(keys, lambda part, at: part.warm(keys[at], rows[at], seq))

    def raise_floor(self, seq: int) -> None:
        for part in self.parts:
            part.raise_floor(seq)

    def update(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        for part, at in self._split(keys):
            part.update(keys[at], rows[at], deleted[at])

    # --- size

    def hot_keys(self, limit: int) -> Keys:
        """Resident keys, distinct, hottest first: of one replica, or of all shards."""
        if limit <= 0:
            return np.empty(0, np.int64)
        if not self._sharded:
            return self.parts[0].hot_keys(limit)
        lists = [part.hot(limit) for part in self.parts]
        heat = np.concatenate([heat for _, heat in lists])
        hottest: Keys = np.concatenate([keys for keys, _ in lists])[np.argsort(MAX_HEAT - heat, kind="stable")][:limit]
        return hottest

    def resize(self, fraction: float) -> None:
        for part in self.parts:
            part.resize(fraction)

    @property
    def rows_resident(self) -> int:
        rows = [part.rows_resident for part in self.parts]
        return sum(rows) if self._sharded else max(rows)

    @property
    def capacity_rows(self) -> int:
        """Different rows that fit into the part in use."""
        rows = [part.capacity_rows for part in self.parts]
        return sum(rows) if self._sharded else max(rows)

    @property
    def allowed_bytes(self) -> int:
        """Bytes that all devices together may use at the present fraction."""
        return sum(part.allowed_bytes for part in self.parts)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all devices together."""
        return sum(part.bytes_in_use for part in self.parts)

    def stats(self) -> dict[str, Any]:
        stats = [part.stats() for part in self.parts]
        summed: dict[str, Any] = {name: sum(one[name] for one in stats) for name in _COUNTS}
        problems = [one["problem"] for one in stats if one["problem"]]
        return summed | {
            "capacity_rows": self.capacity_rows,
            "budget_bytes": self.budget_bytes,
            "devices": len(stats),
            "problem": "; ".join(problems) or None,
        }

    def close(self) -> None:
        for part in self.parts:
            part.close()
