"""A table under a view: the view's overlays over the table's tiers. Every look-up reads its rows here.

Immutable; any number of threads. The view must be held during a look-up, because that makes the promotion at its end
safe. Nothing here survives a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tierstore import kernels
from tierstore.engine.data.cascade import Cascade
from tierstore.engine.data.overlay import OverlayTable
from tierstore.kernels.codec import AS_STORED, address_of
from tierstore.kernels.pool import combiner_code
from tierstore.lookup import table_rows as kernel
from tierstore.lookup.plans import TABLE
from tierstore.lookup.table_rows import NOT_POOLED
from tierstore.tiers.background import yield_if_background
from tierstore.tiers.device.lookup import LookUp, OtherTiers, Pooling, from_device, look_up_into
from tierstore.types import GpuArray, Keys, Rows, States, Tier, Vectors

DTYPES = np.dtype(np.float32), np.dtype(np.float16)  # of answers, by their codes
_BYTES = np.dtype(np.uint8)
_PENDING = np.uint8(Tier.PENDING)
_NO_WEIGHTS = np.empty(0, np.float32)


class TableView:
    """One table in a view of `seq`: `overlays`, newest first, over the tiers.

    It keeps alive the memory that kernels read by `words`, also of a host tier that is closed meanwhile, which answers
    nothing then.
    """

    __slots__ = ("_addresses", "_at", "_kept", "filters", "overlays", "seq", "table", "words")

    def __init__(self, table: Cascade, overlays: Sequence[OverlayTable], seq: int) -> None:
        self.table, self.overlays, self.seq = table, overlays, seq
        host = table.host
        areas = None if host is None else host.areas
        self._addresses = np.array([address_of(overlay.words) for overlay in overlays], np.int64)
        self.filters = sum(overlay.filter_bytes for overlay in overlays)  # bytes
        defaults = [np.ascontiguousarray(table.default, dtype) for dtype in DTYPES]
        self._kept = areas, defaults
        # a `plans.TABLE`, without the fields that only compiled readers need
        self.words = TABLE.make(
            host=0 if host is None or areas is None else host.words_at,
            overlays=len(overlays), overlays_at=address_of(self._addresses),
            default_at=address_of(defaults[0]), half_default_at=address_of(defaults[1]),
            dim=table.spec.dim, code=table.spec.dtype.code, row_bytes=table.spec.row_bytes,
        )  # fmt: skip
        self._at = address_of(self.words)

    @property
    def address(self) -> int:
        """The address of the words."""
        return self._at

    def probe(self, keys: Keys, out: Vectors, state: States, code: int, padding: int | None = None) -> int:
        """The first part of a look-up, which never waits: answer the PENDING keys that memory has.

        `out[i]` becomes the row or the default, in the dtype of `code`, or zeros for the `padding` key; `state[i]` the
        tier. Returns how many keys the host tier has answered. Call `finish` afterwards, once; it counts the keys.
        """
        padded = padding is not None
        try:
            if code == 0:
                hits: int = kernel.lookup_float32(self._at, keys, state, padded, padding or 0, out)
            else:
                hits = kernel.lookup(self._at, keys, state, code, padded, padding or 0, out.view(_BYTES))
        except TypeError:  # an array of the caller's, at an odd address
            hits = kernel.lookup(self._at, keys, state, code, padded, padding or 0, out.view(_BYTES))
        return hits

    def finish(self, keys: Keys, out: Vectors, state: States, padding: int | None = None) -> None:
        """Read from disk what `probe` has left, promote it, and count.

        If the host tier has answered all keys, `LookupCounts.add_host` is enough.
        """
        table = self.table
        pending = np.flatnonzero(state == _PENDING)
        if pending.size:
            table.read(self.seq, keys, pending, out, state)
        table.count(state, 0 if padding is None else int(np.count_nonzero(keys == padding)))

    def lookup(self, keys: Keys, out: Vectors, state: States, code: int = 0) -> None:
        """Answer every key; all states are PENDING."""
        self.probe(keys, out, state, code)
        self.finish(keys, out, state)

    def pool(
        self, keys: Keys, bags: Pooling, out: Vectors, state: States, code: int, padding: int | None = None
    ) -> int:
        """Pool the bags whose keys are all in the host tier; returns as `table_rows.pool_found`."""
        if kernels.awaited or self.overlays:
            return NOT_POOLED
        came: int = kernel.pool(
            self._at, keys, state, padding is not None, padding or 0, bags.offsets,
            _NO_WEIGHTS if bags.weights is None else bags.weights, combiner_code(bags.combiner), code, out.view(_BYTES),
        )  # fmt: skip
        return came

    def stored(self, keys: Keys) -> tuple[Rows, States]:
        """Look up keys, ascending and distinct, in memory alone: (rows as stored, states). Rows of PENDING or ABSENT
        keys are undefined.

        Call `finish_stored` afterwards.
        """
        rows, state = np.empty((len(keys), self.table.spec.row_bytes), np.uint8), np.zeros(len(keys), np.uint8)
        kernel.lookup(self._at, keys, state, AS_STORED, False, 0, rows)
        return rows, state

    def finish_stored(self, keys: Keys, rows: Rows, state: States) -> None:
        """Read what is PENDING after `stored`, and count."""
        pending = np.flatnonzero(state == _PENDING)
        if pending.size:
            rows[pending], state[pending], _ = self.table.read_and_promote(self.seq, keys[pending])
        self.table.count(state, 0)

    def on_device(
        self,
        keys: Keys | GpuArray,
        state: States,
        dtype: Any,
        bags: Pooling | None,
        padding: int | None,
        out: GpuArray | None,
    ) -> LookUp | None:
        """A look-up of rows, or pooled bags, into `out` or a new array of `dtype` on the device; None if there is no
        device tier, or no room for a new array.

        Like `lookup` otherwise. `state` gets the tiers, or PADDING; call `count_on_device` then.
        """
        table = self.table
        cache = table.device
        if cache is None:
            return None
        tiers = OtherTiers(self._below_device, table.host, self._addresses, self.filters)
        return look_up_into(dtype if out is None else out, cache, keys, state, tiers, bags, padding)

    def count_on_device(self, keys: Keys | GpuArray, state: States) -> int:
        """Count, and promote, what `on_device` has answered.

        Returns how many keys the host tier has answered.
        """
        table = self.table
        from_host = table.count(state, 0)
        if from_host and table.offer is not None and table.device is not None:
            table.offer(from_device(table.device.device, keys) if isinstance(keys, GpuArray) else keys, state)
        return from_host

    def overlaid(self, keys: Keys) -> np.ndarray:
        """Which of `keys` deltas have changed, bool[n]."""
        rows, state = np.empty((len(keys), self.table.spec.row_bytes), np.uint8), np.zeros(len(keys), np.uint8)
        self._from_overlays(np.ascontiguousarray(keys), rows, state, AS_STORED)
        changed: np.ndarray = state != _PENDING
        return changed

    def _from_overlays(self, keys: Keys, rows: Any, state: States, code: int) -> None:
        """Answer the keys that overlays have; others stay PENDING."""
        if self.overlays:
            above = self.words.copy()
            above["host"] = 0
            kernel.lookup(address_of(above), keys, state, code, False, 0, rows.view(_BYTES))

    def _below_device(self, keys: Keys, dtype: Any) -> tuple[Vectors, States]:
        """Look up keys that the device tier lacks, or that deltas may have changed: (rows of `dtype`, states)."""
        table = self.table
        rows, state = np.empty((len(keys), table.spec.dim), dtype), np.zeros(len(keys), np.uint8)
        self._from_overlays(keys, rows, state, DTYPES.index(rows.dtype))
        if table.host is not None:
            table.host.lookup(keys, rows, state)
        pending = np.flatnonzero(state == _PENDING)
        if pending.size:
            table.read(self.seq, keys, pending, rows, state)
        return rows, state

    def warm(self, keys: Keys, tier: Tier) -> None:
        """Read one batch of hot keys into the cache of `tier`.

        For a version that serves. As in every promotion, keys in the overlays are left out, and no delta newer than
        the view is folded meanwhile.
        """
        table = self.table
        cache = table.caches.get(tier)
        if cache is None:
            return
        keys = np.unique(table.own_of(keys))
        keys = keys[~self.overlaid(keys)]
        rows, _, there = table.read_rows(keys, self.seq)
        yield_if_background()
        cache.warm(keys[there], rows[there], self.seq)
