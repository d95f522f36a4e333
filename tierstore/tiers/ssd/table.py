"""The rows of one table of one version that are on the local SSD.

Any thread may look up and offer; one thread writes (`cache.py`). The rules of every cache apply: rows read under a view from before a fold are
refused (`raise_floor`), and rows that a fold changes are dropped (`forget`). So a held row is right for every view that reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore import kernels
from tierstore.kernels.hashing import mix_all
from tierstore.tiers.base import Peek
from tierstore.tiers.ssd import index as ssd_index
from tierstore.tiers.ssd.file import Bytes, CacheFile
from tierstore.types import Keys, Rows, States, Tier

_FILL = 0.85  # of the index: few keys then find both buckets full
_FEWEST = 4096  # rows for which the index of a small table has room, as deltas bring more
_MOST_KEPT = 0.5  # of a segment that makes room: so each admitted byte costs at most one more


class Offer(NamedTuple):
    """Rows that may be held, as read under a view of `seq`."""

    table: SsdTable
    keys: Keys
    rows: Rows
    seq: int


class Kept(NamedTuple):
    """Slots of a segment that makes room that are worth keeping, and the table's count of changes by then."""

    slots: Bytes
    changes: int


class SsdTable:
    """One table of the cache. `rows`: how many the table has, as far as is known.

    `put` gives an offer to the thread that writes; it does not wait. `number`: unique in the file, for good. A segment may change its table between
    the moment at which a look-up finds a slot in the index and the moment at which it reads it; then the checksum does not match.
    """

    def __init__(self, file: CacheFile, number: int, rows: int, row_bytes: int, put: Callable[[Offer], None]) -> None:
        # constant after construction
        self.row_bytes, self._file, self._number, self._put = row_bytes, file, number, put
        self.slot_bytes = ssd_index.HEAD_BYTES + (row_bytes + 7) // 8 * 8
        self.per_segment = file.segment_bytes // self.slot_bytes
        self._layout = np.array([self.per_segment, file.segment_bytes, self.slot_bytes, number], np.int64)
        most = min(max(rows, _FEWEST), file.segments * self.per_segment)
        buckets = min(int(most / _FILL) // ssd_index.WAYS + 1, ssd_index.MAX_BUCKETS)
        # guarded by _lock
        self._lock = threading.Lock()
        self._index = np.zeros(buckets * ssd_index.WAYS, np.uint64)
        self._seen = np.zeros(buckets * ssd_index.WAYS // 4, np.uint64)  # keys that were offered lately
        self._counters = np.zeros(2, np.int64)
        self._hits = self._misses = self._admitted = 0
        self._floor_seq, self._changes = -1, 0
        self.closed = False
        # of the thread that writes
        self.open: int | None = None  # the segment that is being filled
        self.filled = 0  # its slots in use
        self.segments = 0

    @property
    def index_bytes(self) -> int:
        return self._index.nbytes + self._seen.nbytes

    def lookup(self, keys: Keys, rows: Rows, state: States) -> None:
        """For held rows, state[i] becomes DISK with rows[i] filled; all are PENDING before."""
        if self._file.problem is not None or kernels.awaited:
            return
        slots = np.empty(len(keys), np.int64)
        with self._lock:
            found = 0 if self.closed else ssd_index.find(self._index, keys, slots)
        if found:
            self._file.read(self._layout, slots, keys, rows, state)
        hits = int(np.count_nonzero(state == Tier.DISK))
        with self._lock:
            self._hits += hits
            self._misses += len(keys) - hits

    def peek(self, key: int) -> Peek:
        """The cache's entry for a key, read without counting."""
        with self._lock:
            entry = 0 if self.closed or self._file.problem is not None else _entry_of(self._index, key)
        if not entry or kernels.awaited:
            return Peek()
        row, state = np.empty((1, self.row_bytes), np.uint8), np.zeros(1, np.uint8)
        slot, heat = np.array([(entry >> int(ssd_index._SLOT_AT)) - 1]), entry & int(ssd_index._HEAT)
        self._file.read(self._layout, slot, np.array([key], np.int64), row, state)
        return Peek(row.tobytes(), heat={"hits": heat}) if state[0] == Tier.DISK else Peek()

    def offer(self, keys: Keys, rows: Rows, seq: int) -> None:
        """Offer rows of distinct keys, read elsewhere under a view of `seq`; nobody changes the arrays afterwards.

        They are held if there is room, otherwise when offered for the second time: a row that is read once is not worth another's place.
        """
        if self._file.problem is not None or kernels.awaited or not len(keys):
            return
        before = np.empty(len(keys), np.bool_)
        with self._lock:
            if seq < self._floor_seq or self.closed:
                return
            ssd_index.note(self._seen, keys, before)
        if not self._file.has_room:
            keys, rows = keys[before], rows[before]
        if len(keys):
            self._put(Offer(self, keys, rows, seq))

    def raise_floor(self, seq: int) -> None:
        """Refuse, from now on, rows that were read under a view older than `seq`. Call it before the delta `seq` is folded."""
        with self._lock:
            self._floor_seq = max(self._floor_seq, seq)
            self._changes += 1

    def forget(self, keys: Keys) -> None:
        """Drop these keys: a delta that was folded has changed them."""
        keys = np.ascontiguousarray(keys)
        with self._lock:
            self._changes += 1
            if not self.closed:
                ssd_index.drop(self._index, keys, self._counters)

    # --- for the thread that writes

    def pack(self, keys: Keys, rows: Rows) -> Bytes:
        """Slots with these keys and rows: uint8 [n, slot_bytes]."""
        slots = np.zeros((len(keys), self.slot_bytes), np.uint8)
        ssd_index.pack(
            keys, rows.ctypes.data, rows.strides[0], self.row_bytes, slots.ctypes.data, self.slot_bytes, self._number
        )
        return slots

    def admit(self, keys: Keys, first: int, seq: int) -> None:
        """Note that the keys of an offer are in slots from `first` on."""
        with self._lock:
            if seq >= self._floor_seq and not self.closed:
                ssd_index.put(self._index, keys, first, self._counters)
                self._admitted += len(keys)

    def admit_again(self, keys: Keys, first: int, changes: int) -> None:
        """Note that the keys of `Kept` are in slots from `first` on, unless a fold since then may have changed them."""
        with self._lock:
            if changes == self._changes and not self.closed:
                ssd_index.put(self._index, keys, first, self._counters)
            else:
                self._counters[ssd_index.EVICTED] += len(keys)

    def release(self, segment: int, may_stay: bool) -> Kept | None:
        """Drop everything in a segment. Returns what was asked for since its last turn, hottest first.

        None if it `may_stay` and does, because most of it was asked for.
        """
        slots = self._file.read_segment(segment, self.per_segment * self.slot_bytes).reshape(-1, self.slot_bytes)
        keys, heat = slot_keys(slots), np.empty(len(slots), np.int8)
        with self._lock:
            if self.closed:
                return Kept(slots[:0], self._changes)
            ssd_index.cool(self._index, keys, segment * self.per_segment, heat)
            most = int(len(heat) * _MOST_KEPT)
            if may_stay and np.count_nonzero(heat > 0) > most:
                return None
            order = np.argsort(-heat, kind="stable")[:most]
            kept = order[heat[order] > 0]
            ssd_index.drop(self._index, keys[heat >= 0], self._counters)
            self._counters[ssd_index.EVICTED] += np.count_nonzero(heat >= 0) - len(kept)
            return Kept(slots[kept], self._changes)

    def stats(self) -> dict[str, Any]:
        """Counts since the version was opened, and sizes."""
        with self._lock:
            rows, evicted = self._counters.tolist()
            return {
                "rows": rows, "bytes": self.segments * self._file.segment_bytes, "index_bytes": self.index_bytes,
                "hits": self._hits, "misses": self._misses, "admitted": self._admitted, "evicted": evicted,
            }  # fmt: skip

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self.closed = True
            self._index, self._seen = np.zeros(0, np.uint64), np.zeros(0, np.uint64)


def _entry_of(index: npt.NDArray[np.uint64], key: int) -> int:
    """The entry that `index.find` finds, or 0, without counting heat."""
    hashed, ways = int(mix_all(np.array([key], np.int64))[0]), ssd_index.WAYS
    wanted = hashed << 2 & int(ssd_index._TAG)
    for each in (hashed, hashed * int(ssd_index._S0) & (1 << 64) - 1):
        start = ((each >> 32) * (len(index) // ways) >> 32) * ways
        for entry in index[start : start + ways].tolist():
            if entry and entry & int(ssd_index._TAG) == wanted:
                return int(entry)
    return 0


def slot_keys(slots: Bytes) -> npt.NDArray[np.int64]:
    """The keys in slots, uint8 [n, slot_bytes]."""
    return np.ascontiguousarray(slots[:, :8]).view(np.int64).reshape(-1)
