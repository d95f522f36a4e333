"""The cascade: how a batch of keys of one table is answered, tier by tier, and what is promoted on the way.

Any number of threads may look up; what is shared is either immutable or guarded by the tier that owns it.
Nothing here survives a crash: the tiers and the delta log do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tierstore.engine.overlay import OverlayTable
from tierstore.kernels import codec
from tierstore.tiers.background import gives_way, rest
from tierstore.tiers.base import RowStore
from tierstore.tiers.device_group import DeviceCache
from tierstore.tiers.host import HostTable
from tierstore.types import Keys, Rows, States, TableSpec, Tier, Vectors

_ANSWERING = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE, Tier.OVERLAY, Tier.ABSENT)
_PENDING, _HOST = np.uint8(Tier.PENDING), np.uint8(Tier.HOST)  # compared with arrays, where an enum's member is slow
_NONE = np.empty(0, np.int64)
_ALL_HOST = np.empty(0, np.int64)  # none is left either, and the host tier has answered all
READ_BATCH = 8192  # keys of one read while warming up
SHORT_BATCH = 1024  # beside requests: half a millisecond, after which who waits for the processor gets it


class LookupCounts:
    """How many keys each tier has answered, for one table of a model, over all its versions. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = np.zeros(len(Tier), np.int64)
        self._from_host = 0  # keys besides, of batches that the host tier answered as a whole

    def add(self, counts: np.ndarray) -> None:
        with self._lock:
            self._counts += counts

    def add_host(self, keys: int) -> None:
        """`add`, for keys that were all answered by the host tier."""
        with self._lock:
            self._from_host += keys

    def as_dict(self) -> dict[str, int]:
        """`{tier label: keys}`; only ever grows."""
        with self._lock:
            counts = self._all()
        return {tier.label: counts[tier] for tier in _ANSWERING}

    @property
    def total(self) -> int:
        with self._lock:
            return sum(self._all())

    def _all(self) -> list[int]:
        counts: list[int] = self._counts.tolist()
        counts[Tier.HOST] += self._from_host
        return counts


class Table:
    """One table of one version: caches over a row store. `default` is float32[dim]."""

    def __init__(
        self, spec: TableSpec, table_id: int, default: np.ndarray, rows: int, disk: RowStore, counts: LookupCounts
    ) -> None:
        self.spec, self.table_id, self.default, self.rows, self.disk = spec, table_id, default, rows, disk
        self.host: HostTable | None = None
        self.device: DeviceCache | None = None
        self.offer: Callable[[Keys], None] | None = None  # what the host tier answered, to the device; does not wait
        self.counts = counts
        self.epochs_id: int | None = None  # see `Epochs.table_id`

    def lookup(self, overlays: Sequence[OverlayTable], seq: int, keys: Keys, out: Vectors, state: States) -> None:
        """Answer every key, whose state is PENDING: `out[i]` is its row or the default, `state[i]` the tier.

        `overlays` (newest first) and `seq` are those of the view that the request works on; the caller
        keeps that view for as long as this runs, which is what makes the promotion at the end safe.
        """
        host = self.host
        if overlays or host is None or self.device is not None:
            left = self.probe(overlays, keys, out, state)
        elif host.lookup(keys, out, state) == len(state):
            self._all_from_host(keys)
            return
        else:
            left = np.flatnonzero(state == _PENDING)
        self.finish(seq, keys, left, out, state, 0)

    def probe(self, overlays: Sequence[OverlayTable], keys: Keys, out: Vectors, state: States) -> np.ndarray:
        """The part of `lookup` that never waits: answer from memory alone. Returns the positions that are left.

        It must be followed by `finish`, once, under the same view; the keys are counted there.
        """
        for overlay in overlays:
            overlay.lookup(keys, out, state, self.default)
        if self.device is not None:
            self.device.lookup(keys, out, state)
        if self.host is not None and self.host.lookup(keys, out, state) == len(state):
            return _ALL_HOST
        return _NONE if np.count_nonzero(state) == len(state) else np.flatnonzero(state == _PENDING)

    def finish(self, seq: int, keys: Keys, pending: np.ndarray, out: Vectors, state: States, settled: int) -> None:
        """Read what `probe` has left from disk, promote it, and count. `settled` keys were not looked up at all."""
        if pending is _ALL_HOST:
            self._all_from_host(keys)
            return
        if pending.size:
            self._read_disk(seq, keys, pending, out, state)
        if self.offer is not None:
            self.offer(keys[state == _HOST])
        self.count(state, settled)

    def count(self, state: States, settled: int) -> None:
        """Count keys by the tiers that answered them; `settled` of those that are ABSENT were not looked up."""
        if not settled and (state == _HOST).all():
            self.counts.add_host(len(state))
            return
        counts = np.bincount(state, minlength=len(Tier))
        counts[Tier.ABSENT] -= settled
        self.counts.add(counts)

    def _all_from_host(self, keys: Keys) -> None:
        """Count and offer keys that the host tier has answered, as most are; cheaper than telling tiers apart."""
        self.counts.add_host(len(keys))
        if self.offer is not None:
            self.offer(keys)

    def below_device(self, seq: int, distinct: Keys, dtype: Any) -> tuple[Vectors, States]:
        """(rows of `dtype`, states) of distinct keys that the device tier does not hold, from the tiers below it.

        Under a view of `seq`, as `finish` is; none of the keys is in its overlays.
        """
        rows, state = np.empty((len(distinct), self.spec.dim), dtype), np.zeros(len(distinct), np.uint8)
        if self.host is not None:
            self.host.lookup(distinct, rows, state)
        pending = np.flatnonzero(state == _PENDING)
        if pending.size:
            self._read_disk(seq, distinct, pending, rows, state)
        if self.offer is not None:
            self.offer(distinct[state == _HOST])
        return rows, state

    def _read_disk(self, seq: int, keys: Keys, pending: np.ndarray, out: Vectors, state: States) -> None:
        distinct, inverse = np.unique(keys[pending], return_inverse=True)
        rows, found, there = self._read(distinct)
        self.promote(seq, distinct, rows, there)
        hit = there[inverse]
        codec.decode_scatter(rows, inverse[hit], pending[hit], self.spec.dtype, out)
        out[pending[~hit]] = self.default
        state[pending] = found[inverse]

    def promote(self, seq: int, distinct: Keys, rows: Rows, there: np.ndarray) -> None:
        """Offer to the host tier what was read of distinct keys under a view of `seq`; it may have been left since."""
        if self.host is None:
            return
        if there.all():
            self.host.insert(distinct, rows, seq)
        else:
            self.host.insert(distinct[there], rows[there], seq)
            self.host.insert_absent(distinct[~there], seq)

    def _read(self, distinct: Keys) -> tuple[Rows, States, np.ndarray]:
        """(rows, states, which are there) of keys, ascending and distinct, from the row store alone."""
        rows = np.empty((len(distinct), self.spec.row_bytes), np.uint8)
        found = np.zeros(len(distinct), np.uint8)
        self.disk.get(self.table_id, distinct, rows, found)
        return rows, found, found == Tier.DISK

    def warm(self, keys: Keys, progress: Callable[[int], None]) -> None:
        """Read these keys (distinct, hottest first) into the device tier and what is left of them into the host tier.

        Ends when both are full. Called before the version serves, by the thread that also applies its deltas.
        """
        first = 0 if self.device is None else self.device.capacity_rows
        for cache, begin, end in ((self.device, 0, first), (self.host, first, len(keys))):
            if cache is not None:
                self._warm(cache, keys[begin:end], lambda n, done=begin: progress(done + n))  # type: ignore[misc]

    def warm_beside(self, keys: Keys, at: int, overlays: Sequence[OverlayTable], seq: int) -> None:
        """Read one batch of hot keys, which `at` hotter ones came before, into the tier that has their place.

        For a version that serves: `overlays` and `seq` are those of a view that the caller holds. As in every promotion,
        keys in its overlays are left out, and no delta newer than the view is folded meanwhile.
        """
        cache = self.host if self.device is None or at >= self.device.capacity_rows else self.device
        if cache is None:
            return
        keys = np.unique(keys)
        if overlays:
            fresh, nothing = np.zeros(len(keys), np.uint8), np.empty((len(keys), self.spec.dim), np.float32)
            for overlay in overlays:
                overlay.lookup(keys, nothing, fresh, self.default)
            keys = keys[fresh == _PENDING]
        rows, _, there = self._read(keys)
        rest()
        cache.warm(keys[there], rows[there], seq)

    def _warm(self, cache: DeviceCache | HostTable, keys: Keys, progress: Callable[[int], None]) -> None:
        step = SHORT_BATCH if gives_way() else READ_BATCH
        for begin in range(0, len(keys), step):
            batch = np.sort(keys[begin : begin + step])
            rows, _, there = self._read(batch)
            rest()
            cache.warm(batch[there], rows[there])
            rest()
            progress(begin + len(batch))
            if cache.rows_resident >= cache.capacity_rows:
                break

    @property
    def caches(self) -> list[DeviceCache | HostTable]:
        """Those there are, fastest first."""
        return [cache for cache in (self.device, self.host) if cache is not None]

    @property
    def capacity_rows(self) -> int:
        """Rows that the caches hold together."""
        return sum(cache.capacity_rows for cache in self.caches)

    def hot_keys(self, limit: int) -> Keys:
        """At most `limit` keys that the caches hold, hottest first; one that both hold comes twice."""
        return np.concatenate([_NONE, *(cache.hot_keys(limit) for cache in self.caches)])[:limit]

    def hot_keys_by_part(self) -> Iterator[list[Keys]]:
        """All keys that the caches hold, a part at a time: by degree of heat, hottest first; the device's before all others."""
        if self.device is not None:
            yield [self.device.hot_keys(self.device.capacity_rows)]
        if self.host is not None:
            for part in self.host.hot_keys_by_part():
                yield [_NONE, *part]

    def raise_floor(self, seq: int) -> None:
        """A delta of `seq` is about to be folded; see `CacheTier`."""
        for cache in self.caches:
            cache.raise_floor(seq)

    def update_caches(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        """Bring resident rows and absent marks up to a delta that the disk tier holds already."""
        for cache in self.caches:
            cache.update(keys, rows, deleted)
