"""The cascade: the tiers of one table of a version, reads from the last of them, promotion, and counts.

Look-ups come through a view's `TableView`. Any thread; shared data is either immutable or guarded by the tier that
owns it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np

from tierstore.engine.data.insight import CacheInsight
from tierstore.engine.data.reading_order import pieces, stretch_after
from tierstore.formats.keys import are_own, check_own
from tierstore.kernels import codec
from tierstore.lookup import table_rows
from tierstore.tiers.background import is_background, yield_if_background
from tierstore.tiers.base import VersionStore
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.host.table import HostTable
from tierstore.types import Keys, Partitions, Rows, States, TableSpec, Tier, Vectors

_ANSWERING = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.REMOTE, Tier.OVERLAY, Tier.ABSENT)
_DISK, _REMOTE = np.uint8(Tier.DISK), np.uint8(Tier.REMOTE)
_PENDING = np.uint8(Tier.PENDING)  # for arrays, where an enum's member is slow
_NONE = np.empty(0, np.int64)
READ_BATCH = 8192  # keys of one read while warming up
SHORT_BATCH = 1024  # while requests are served: half a millisecond, then another thread gets the processor


class LookupCounts:
    """How many keys each tier has answered, for one table of a model, over all its versions. Any thread."""

    def __init__(self) -> None:
        self.insight = CacheInsight()  # further statistics of these look-ups
        self._lock = threading.Lock()
        self._counts = np.zeros(len(Tier), np.int64)
        self._from_host = 0  # more keys, of batches that the host tier answered as a whole

    def add(self, counts: np.ndarray) -> None:
        with self._lock:
            self._counts += counts

    def add_states(self, state: States, skipped: int) -> int:
        """See `Cascade.count`."""
        with self._lock:
            from_host: int = table_rows.count_states(state, self._counts)
            if skipped:
                self._counts[Tier.ABSENT] -= skipped
        return from_host

    def add_host(self, keys: int) -> None:
        """`add` for keys that were all answered by the host tier."""
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


class Cascade:
    """One table of one version: caches over a row store.

    `default` is float32[dim]. `own`: the partitions whose keys it has, None for all. Other keys are never in memory,
    so only reads from the row store check this.
    """

    def __init__(
        self,
        spec: TableSpec,
        table_id: int,
        default: np.ndarray,
        store: VersionStore,
        counts: LookupCounts,
        own: Partitions | None = None,
    ) -> None:
        self.spec, self.table_id, self.default, self.store = spec, table_id, default, store
        self.own = own
        self.host: HostTable | None = None
        self.device: DeviceTable | None = None
        self.offer: Callable[..., None] | None = None  # gets keys for the device; does not wait
        self.counts = counts
        self.epochs_id: int | None = None  # see `Epochs.table_id`

    def count(self, state: States, skipped: int) -> int:
        """Count keys by the tiers that answered them; `skipped` of the ABSENT keys were not looked up.

        Returns how many keys the host tier has answered.
        """
        return self.counts.add_states(state, skipped)

    def read(self, seq: int, keys: Keys, pending: np.ndarray, out: Vectors, state: States) -> None:
        """Read the keys at positions `pending` from the row store, under a view of `seq`, and promote them."""
        distinct, inverse = np.unique(keys[pending], return_inverse=True)
        if self.own is not None:
            check_own(distinct, self.own, self.spec.name)
        rows, found, there = self.read_and_promote(seq, distinct)
        hit = there[inverse]
        codec.decode_scatter(rows, inverse[hit], pending[hit], self.spec.dtype, out)
        out[pending[~hit]] = self.default
        state[pending] = found[inverse]

    def read_and_promote(self, seq: int, distinct: Keys) -> tuple[Rows, States, np.ndarray]:
        """`read_rows`, then promotion. Keys that could not be read are ABSENT if they are to get defaults, and are
        not promoted.
        """
        rows, found, there = self.read_rows(distinct, seq)
        if found.all():
            self.promote(seq, distinct, rows, there)
        else:
            read = found != _PENDING
            self.promote(seq, distinct[read], rows[read], there[read])
            found[~read] = Tier.ABSENT
        return rows, found, there

    def promote(self, seq: int, distinct: Keys, rows: Rows, there: np.ndarray) -> None:
        """Offer rows of distinct keys, read under a view of `seq` that may have been released since, to the host
        tier.
        """
        if self.host is None:
            return
        if there.all():
            self.host.insert(distinct, rows, seq)
        else:
            self.host.insert(distinct[there], rows[there], seq)
            self.host.insert_absent(distinct[~there], seq)

    def read_rows(self, distinct: Keys, seq: int | None = None) -> tuple[Rows, States, np.ndarray]:
        """Read keys, ascending and distinct, from the row store alone: (rows, states, which are there).

        `seq` is the seq of the reading view; None for a version that does not serve yet.
        """
        rows = np.empty((len(distinct), self.spec.row_bytes), np.uint8)
        found = np.zeros(len(distinct), np.uint8)
        if seq is None:
            self.store.get(self.table_id, distinct, rows, found)
        else:
            self.store.get_at(self.table_id, distinct, rows, found, seq)
        return rows, found, (found == _DISK) | (found == _REMOTE)

    def warm(self, tier: Tier, keys: Keys, progress: Callable[[int], None]) -> None:
        """Read these keys (distinct, hottest first) into the cache of `tier`, until it is full.

        Called before the version serves, by the thread that also applies its deltas.
        """
        cache = self.caches[tier]
        with contextlib.ExitStack() as gently:
            if isinstance(cache, HostTable) and is_background():
                gently.enter_context(cache.gently_warmed(len(keys)))
            self._warm(cache, keys, progress)

    def _warm(self, cache: DeviceTable | HostTable, keys: Keys, progress: Callable[[int], None]) -> None:
        step, done = SHORT_BATCH if is_background() else READ_BATCH, 0
        while done < len(keys):
            for piece in pieces(keys[done : done + stretch_after(done)], self.in_order):
                for begin in range(0, len(piece), step):
                    part = piece[begin : begin + step]
                    batch = np.sort(self.own_of(part))
                    rows, _, there = self.read_rows(batch)
                    yield_if_background()
                    cache.warm(batch[there], rows[there])
                    yield_if_background()
                    done += len(part)
                    progress(done)
                    if cache.rows_resident >= cache.capacity_rows:
                        return

    def in_order(self, keys: Keys) -> Keys:
        """`keys` in the order in which the row store reads them fastest."""
        return self.store.in_order(self.table_id, keys)

    def own_of(self, keys: Keys) -> Keys:
        """The keys that this node owns. Keys that were hot elsewhere, or that a snapshot names, may be others."""
        return keys if self.own is None else keys[are_own(keys, self.own)]

    @property
    def caches(self) -> dict[Tier, DeviceTable | HostTable]:
        """The caches of the table. A row may be in both: each keeps what its own look-ups ask for."""
        found = {Tier.DEVICE: self.device, Tier.HOST: self.host}
        return {tier: cache for tier, cache in found.items() if cache is not None}

    def hot_keys(self, tier: Tier, limit: int) -> Keys:
        """At most `limit` keys that the cache of `tier` holds, hottest first; without that cache, another's."""
        caches = self.caches
        cache = caches.get(tier, next(iter(caches.values()), None))
        return _NONE if cache is None else cache.hot_keys(limit)

    def raise_floor(self, seq: int) -> None:
        """Prepare caches for the fold of a delta of `seq`; see `HostTable.raise_floor`."""
        for cache in self.caches.values():
            cache.raise_floor(seq)
        self.store.raise_floor(self.table_id, seq)

    def update_caches(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        """Apply a delta that the disk tier holds already to resident rows and absent marks."""
        for cache in self.caches.values():
            cache.update(keys, rows, deleted)
        self.store.forget(self.table_id, keys)
