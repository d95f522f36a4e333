"""The host tier: one table's hottest rows in CPU memory.

Any number of threads may call `lookup` and `hot_keys` at any time; they take no lock. Writers hold the table's own lock for a short time. `insert`
and `insert_absent` give up if it is held, because no request should wait for a promotion; other writers wait.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tierstore import kernels
from tierstore.kernels.codec import AS_STORED, address_of, out_code
from tierstore.tiers.base import Peek
from tierstore.tiers.checks import check_answer, check_rows
from tierstore.tiers.host.access_sample import NOTHING, AccessSample
from tierstore.tiers.host.cache import lookup as lookup_kernels
from tierstore.tiers.host.cache import sampling
from tierstore.tiers.host.cache import write as write_kernels
from tierstore.tiers.host.cache.layout import CONTROL_BYTES, WAYS, Areas
from tierstore.tiers.host.memory import HostMemory
from tierstore.tiers.host.peek import peek
from tierstore.tiers.host.table_layout import Layout
from tierstore.types import Keys, Rows, States, TableSpec, Vectors

_CHUNK = 2048  # keys that a writer handles before other threads get the lock
_PART = 1 << 15  # sets whose keys are listed together: 15 MB of them
_BYTES_A_KEY = 1 << 18  # bytes for each key: with more keys than that nearly every huge page gets a row
_FLOAT32 = np.dtype(np.float32)
_NO_WEIGHTS = np.empty(0, np.float32)


class HostTable:
    """A set-associative cache of one table of one version (see `tiers/host/cache/layout.py`) in one mapping.

    The mapping is never larger than `budget_bytes` and includes all bookkeeping; its pages become real as they are touched. `fraction` (0 to 1) of it
    may be in use; `resize` changes that. With a budget too small for one set the table holds nothing, and the next tier answers every key. Look-ups
    are noted in `sample`.
    """

    def __init__(
        self,
        spec: TableSpec,
        budget_bytes: int,
        *,
        default_vector: np.ndarray,
        fraction: float = 1.0,
        sample: AccessSample = NOTHING,
    ) -> None:
        # constant after construction
        self.spec, self.budget_bytes, self._sample = spec, int(budget_bytes), sample
        self._defaults = [np.ascontiguousarray(default_vector, dtype) for dtype in (np.float32, np.float16)]
        self._layout = Layout(spec, self.budget_bytes)
        # the mapping and its addresses; a thread that uses addresses holds the areas meanwhile. None if the table holds nothing, or is closed
        self._memory: HostMemory | None = None
        self._areas: Areas | None = None  # of `_memory`
        self._where = lookup_kernels.HOST_TABLE.new()
        self._where_at = address_of(self._where)
        # guarded by _lock
        self._lock = threading.Lock()
        self._floor_seq = -1
        self._counters = np.zeros(4, np.int64)
        self._dropped_stale = self._dropped_busy = 0
        self._fraction = fraction
        if self._layout.sets:
            self._open(fraction)
        self._resize_lock = threading.Lock()  # held for a whole resize; acquired before _lock
        self._stop_readers: Callable[[], None] | None = None  # of the reader by `open_to`; guarded by _resize_lock

    def _open(self, fraction: float) -> None:
        self._memory = HostMemory(self._layout, self._sets_of(fraction), self.spec.name)
        areas = self._memory.areas
        self._where[...] = (
            address_of(areas.control), address_of(areas.lines), address_of(areas.absent), areas.rows,
            self.spec.row_bytes, self._layout.sets_per_region, self.spec.dtype.code, self.spec.dim,
            address_of(self._defaults[0]),
            self._sample.address,
        )  # fmt: skip
        self._areas = areas

    def _sets_of(self, fraction: float) -> int:
        """The number of sets in a fraction of the budget; at least one region is always in use."""
        sets = (int(self.budget_bytes * fraction) - CONTROL_BYTES) // self._layout.set_bytes
        return min(max(sets, self._layout.sets_per_region), self._layout.sets)

    @property
    def allowed_bytes(self) -> int:
        """Bytes that the table may use now: `fraction` of the budget."""
        return int(self.budget_bytes * self._fraction)

    @property
    def areas(self) -> Areas | None:
        """An object that keeps the mapping alive, for users of `words_at`; None if the table holds nothing."""
        return self._areas

    @property
    def words_at(self) -> int:
        """The address of the words for look-up kernels (`tiers/host/cache/lookup.py`), or 0 if the table holds nothing."""
        return 0 if self._areas is None else self._where_at

    def lookup(self, keys: Keys, out: Vectors, state: States) -> int:
        """Answer keys whose state is PENDING: row and HOST, or the default and ABSENT; leave other keys unchanged.

        `keys` int64[n], `out` float32 or float16 [n, dim], `state` uint8[n], all contiguous. Rows of `out` whose keys stay PENDING are undefined.
        Counts heat. Returns how many keys were answered with a row.
        """
        areas = self._areas  # keeps the mapping alive until the return
        if areas is None:
            return 0
        check_answer(self.spec, keys, out, state)
        code, keys = out_code(out), np.ascontiguousarray(keys)
        default = address_of(self._defaults[code])
        return int(lookup_kernels.lookup(self._where_at, keys, state, code, address_of(out), default))

    def stored(self, keys: Keys, *, noted: bool = True) -> tuple[Rows, States]:
        """(rows uint8[n, row_bytes], states) of keys, as stored; the state of resident keys is HOST.

        Counts heat, and is `noted` as a look-up.
        """
        rows, state = np.zeros((len(keys), self.spec.row_bytes), np.uint8), np.zeros(len(keys), np.uint8)
        with contextlib.nullcontext(self.words_at) if noted else self.unnoted() as where_at:
            areas = self._areas  # keeps the mapping alive until the return
            if areas is not None and where_at:
                at = address_of(rows)  # absent keys get bytes from here too
                lookup_kernels.lookup(where_at, np.ascontiguousarray(keys), state, AS_STORED, at, at)
        return rows, state

    def note_answered(self, keys: Keys, state: States) -> None:
        """Note in the sample the keys whose state is HOST, which a reader has looked up by `open_to`."""
        sampling.note_answered(self._sample.address, keys, state)

    def open_to(self, read: Callable[[HostMemory], None], stop: Callable[[], None]) -> None:
        """Let `read` read the memory directly, beside writers, until `stop` was called.

        `stop` is called once, before keys move to other sets or memory is freed, and returns when nothing reads any more. Neither is called if the
        table holds nothing.
        """
        with self._resize_lock:
            self._recall()
            if self._memory is not None:
                self._stop_readers = stop
                read(self._memory)

    def _recall(self) -> None:
        """Stop the reader of `open_to`, if there is one. Called with `_resize_lock` held."""
        stop, self._stop_readers = self._stop_readers, None
        if stop is not None:
            stop()

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[int]:
        """In the block kernels may look up by the words at this address, without noting samples; 0: the table holds nothing."""
        areas, where = self._areas, self._where.copy()
        where["sample"] = NOTHING.address
        yield 0 if areas is None else address_of(where)
        del areas, where  # keeps them alive until here

    def try_accesses(self, keys: Keys) -> int:
        """Look keys up one after the other, and admit each missing key with a row of zeros. Returns the misses.

        For a trial table that one thread uses alone, to measure a cache of its size.
        """
        areas = self._areas
        if areas is None or kernels.awaited:
            return len(keys)
        row = np.zeros(self.spec.row_bytes, np.uint8)
        return int(write_kernels.try_accesses(areas, np.ascontiguousarray(keys), address_of(row), self._counters))

    def absent_among(self, keys: Keys) -> np.ndarray:
        """Which of these keys are remembered as not existing, bool[n]; does not count as a look-up."""
        absent, areas = np.zeros(len(keys), np.uint8), self._areas
        if areas is not None and not kernels.awaited:
            write_kernels.find_absent_keys(areas, np.ascontiguousarray(keys), absent)
        return absent.view(np.bool_)

    @property
    def capacity_rows(self) -> int:
        """Rows that fit into the part in use."""
        memory = self._memory
        return 0 if memory is None else memory.sets_in_use * WAYS

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the mapping that may be touched at the present fraction."""
        memory = self._memory
        return 0 if memory is None else memory.bytes_in_use

    def peek(self, key: int) -> Peek:
        """The table's entry for a key, read without counting. A promotion at that moment is dropped."""
        with self._lock:
            return Peek() if self._areas is None else peek(self._areas, key)

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        """Promote distinct keys with rows uint8[n, row_bytes] read under a view of `seq`. Returns the rows admitted.

        Dropped as a whole (0) if `seq` is below the floor, another writer is at work, or the kernel is not compiled yet.
        """
        areas = self._begin_promotion(seq)
        if areas is None:
            return 0
        try:
            rows = check_rows(self.spec, keys, rows)
            return int(write_kernels.insert(areas, np.ascontiguousarray(keys), address_of(rows), True, self._counters))
        finally:
            self._lock.release()

    def insert_absent(self, keys: Keys, seq: int) -> int:
        """Remember distinct keys that do not exist in a view of `seq`; dropped as by `insert`. Returns the keys admitted."""
        areas = self._begin_promotion(seq)
        if areas is None:
            return 0
        try:
            return int(write_kernels.insert_absent(areas, np.ascontiguousarray(keys), self._counters))
        finally:
            self._lock.release()

    def _begin_promotion(self, seq: int) -> Areas | None:
        """Take the lock if it is free and the promotion is not stale; the caller releases it.

        Why the floor is checked under the lock. A request reads row r0 of key k from disk under seq 5. Delta 6 changes k to r1: its fold raises the
        floor to 6, writes r1 to disk, then updates k here if resident. If the promotion checked the floor first, lost its processor, and wrote only
        after that update had found k not resident, r0 would hide r1 for good. Under one lock the promotion is either wholly before `raise_floor`, and
        then the update finds k and overwrites it, or wholly after, and then it is dropped.
        """
        if self._areas is None or kernels.awaited:
            return None
        if not self._lock.acquire(blocking=False):
            self._dropped_busy += 1
            return None
        if self._areas is None or seq < self._floor_seq:
            self._dropped_stale += 1
            self._lock.release()
            return None
        return self._areas

    def raise_floor(self, seq: int) -> None:
        """Drop, from now on, promotions read under a view older than `seq`. Call it before the fold writes to disk."""
        with self._lock:
            self._floor_seq = max(self._floor_seq, seq)

    def update(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        """Fold: apply a delta to resident rows of distinct `keys`; rows uint8[n, row_bytes], deleted bool[n].

        Rows of deleted keys are not read. Keys that are not resident are not admitted. The lock is released between chunks: promotions in between
        were read under the delta's view or a newer one, or the floor refuses them, so they never bring an older row.
        """
        rows = check_rows(self.spec, keys, rows)
        keys, deleted = np.ascontiguousarray(keys), np.ascontiguousarray(deleted)
        if deleted.shape != keys.shape:
            raise ValueError(f"expected deleted[{len(keys)}], got {list(deleted.shape)}")
        for begin in range(0, len(keys), _CHUNK):
            with self._lock:
                if self._areas is None:
                    return
                end = min(len(keys), begin + _CHUNK)
                write_kernels.update(self._areas, keys, address_of(rows), deleted, begin, end, self._counters)

    @contextlib.contextmanager
    def gently_warmed(self, keys: int) -> Iterator[None]:
        """In the block, `warm` brings so many keys beside requests, before the table serves: memory is taken a little at a time."""
        memory = self._memory
        if memory is None or memory.bytes_in_use > keys * _BYTES_A_KEY:  # with fewer keys, rows touch hardly any of it
            yield
            return
        memory.populate()
        try:
            yield
        finally:
            memory.allow_huge_pages()

    def warm(self, keys: Keys, rows: Rows, seq: int | None = None) -> int:
        """Fill free places with distinct keys, hottest first; nothing is evicted. Returns the rows admitted.

        Once the version serves, `seq` is the seq of the view under which they were read; dropped if it is below the floor.
        """
        keys, rows = np.ascontiguousarray(keys), check_rows(self.spec, keys, rows)
        admitted = 0
        for begin in range(0, len(keys), _CHUNK):
            with self._lock:
                if self._areas is None or (seq is not None and seq < self._floor_seq):
                    return admitted
                chunk = keys[begin : begin + _CHUNK]
                admitted += int(
                    write_kernels.insert(self._areas, chunk, address_of(rows[begin:]), False, self._counters)
                )
        return admitted

    def hot_keys(self, limit: int) -> Keys:
        """Resident keys int64[m], m <= limit, hottest first, by 8 degrees of heat; approximate while others write."""
        return self._hottest(limit, None)

    def sample_keys(self, limit: int) -> Keys:
        """Some resident keys int64[m], m <= limit, from so few sets that it is fast, however large the table is."""
        return self._hottest(limit, limit)

    def _hottest(self, limit: int, sets: int | None) -> Keys:
        """The hottest rows of the first `sets` sets, by default of all."""
        with self._resize_lock:  # a key moves to another set only with this lock: none is listed twice
            memory = self._memory
            if memory is None or limit <= 0:
                return np.empty(0, np.int64)
            all_sets = memory.sets_spanned
            sets = all_sets if sets is None else min(sets, all_sets)
            return np.concatenate(memory.keys_by_heat(0, sets, limit))

    def hot_keys_by_part(self) -> Iterator[list[Keys]]:
        """All resident keys, part by part: for each part int64 arrays, one for each degree of heat, hottest first.

        Uses memory for one part only, and other threads go on between two parts. During a `resize` a key may be missing or appear twice.
        """
        first = 0
        while True:
            with self._resize_lock:
                memory = self._memory
                if memory is None or first >= memory.sets_spanned:
                    return
                part = memory.keys_by_heat(first, min(first + _PART, memory.sets_spanned), sys.maxsize)
            yield part
            first += _PART

    def resize(self, fraction: float) -> None:
        """Use `fraction` (0 to 1) of the budget, keep the hottest rows, and free the other memory.

        Readers and writers go on meanwhile; only another resize waits. The time is in proportion to the change. A table cannot shrink below
        `smallest_fraction`, and stays there.
        """
        with self._resize_lock:
            if self._memory is None:
                return
            self._fraction, sets = fraction, self._sets_of(fraction)
            if sets != self._memory.sets_in_use:
                self._recall()
                self._memory.resize(sets, self._lock, self._counters)

    @property
    def smallest_fraction(self) -> float:
        return 0.5**self._layout.max_depth

    def huge_page_bytes(self) -> int:
        """Bytes of the mapping that the kernel backs with huge pages (0 if it does not report them). Takes milliseconds."""
        memory = self._memory
        return 0 if memory is None else memory.huge_page_bytes()

    @property
    def rows_resident(self) -> int:
        return int(self._counters[write_kernels.ROWS])

    def stats(self) -> dict[str, Any]:
        """Counts since construction, and sizes; read without the lock."""
        rows, absent, admitted, evicted = self._counters.tolist()
        return {
            "rows": rows, "capacity_rows": self.capacity_rows, "absent_keys": absent, "bytes": self.bytes_in_use,
            "budget_bytes": self.allowed_bytes, "admitted": admitted, "evicted": evicted,
            "dropped_stale": self._dropped_stale, "dropped_busy": self._dropped_busy,
        }  # fmt: skip

    def close(self) -> None:
        """Free the memory. Look-ups under way end safely; later ones leave every key PENDING."""
        with self._resize_lock, self._lock:
            self._recall()
            memory, self._memory, self._areas = self._memory, None, None
            self._counters[:2] = 0
            if memory is not None:
                memory.void()
