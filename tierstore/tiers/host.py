"""The host tier: one table's hottest rows in CPU memory.

Any number of threads may call `lookup` and `hot_keys` at any time; they take no lock. Everything that
writes takes the table's own lock for a short while: `insert` and `insert_absent` not at all if it is
taken (a promotion is worth nobody's wait), the others by waiting. Nothing survives the process.
Linux only: that given-back pages come back as zeros is what makes them empty sets.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError
from tierstore.kernels import setlookup, setpool, setresize, setwrite
from tierstore.kernels.codec import address_of, out_code
from tierstore.kernels.heat import POLICY_BYTES
from tierstore.kernels.pool import combiner_code
from tierstore.kernels.setcache import (
    ABSENT_BYTES,
    ABSENTS,
    CONTROL_BYTES,
    EPOCH,
    GEOMETRY,
    LINE_BYTES,
    LINES,
    WAYS,
    Areas,
)
from tierstore.tiers.background import hand_over, rest
from tierstore.types import Combiner, Keys, Rows, States, TableSpec, Vectors

_MAX_DEPTH = (
    8  # halvings: the table can go down to 1/256; further bits of a hash say which line of its set a key belongs to
)
_CHUNK = 2048  # keys that a writer handles before it lets others have the lock
_CHUNK_BYTES = 1 << 18  # and of sets, their bytes
_SCANNED = 512  # sets that are looked through before others have their turn
_PART = 64 * _SCANNED  # sets whose keys are listed as one: 15 MB of them
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)  # the budget is a bound, not a claim on memory that is not touched yet
_FLOAT32 = np.dtype(np.float32)
_NO_WEIGHTS = np.empty(0, np.float32)


class _Layout:
    """Where the parts of a table of `budget_bytes` lie in its mapping. Immutable."""

    def __init__(self, spec: TableSpec, budget_bytes: int) -> None:
        self.row_bytes = spec.row_bytes
        self.set_bytes = sum(self.area_bytes())
        sets = max(0, (budget_bytes - CONTROL_BYTES) // self.set_bytes)
        # a deeper table can shrink further, but loses the sets that are left over from whole regions
        large = min(6, (sets // 64).bit_length() - 1), min(_MAX_DEPTH, (sets // 256).bit_length() - 1)
        self.max_depth = max(min(2, sets.bit_length() - 1), *large, 0)
        self.sets_per_region = sets >> self.max_depth
        self.sets = self.sets_per_region << self.max_depth
        self.size = CONTROL_BYTES + self.sets * self.set_bytes

    def area_bytes(self) -> tuple[int, ...]:
        """Bytes a set, area by area, each of which is halved by itself. Lines and rows begin where cache lines do."""
        return LINES * LINE_BYTES, ABSENTS * ABSENT_BYTES, WAYS * self.row_bytes, POLICY_BYTES

    def cut(self, memory: mmap.mmap) -> Areas:
        """Views of the areas of a mapping of `size` bytes, which they keep alive."""
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages is only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        parts, begin = [], 0
        for size in (CONTROL_BYTES, *(self.sets * n for n in self.area_bytes())):
            parts.append(whole[begin : begin + size])
            begin += size
        control, lines, absent, rows, policy = parts
        return Areas(
            control.view(np.int64), lines, lines.view(np.uint32), lines.view(np.int64), policy, policy.view(np.uint16),
            absent, absent.view(np.uint32), absent.view(np.int64), address_of(rows), self.row_bytes, self.sets_per_region,
        )  # fmt: skip


def _ranked(areas: Areas, begin: int, end: int, limit: int) -> list[Keys]:
    """At most `limit` resident keys of the sets [begin, end): one array for each degree of heat, hottest first."""
    steps = [(first, min(first + _SCANNED, end)) for first in range(begin, end, _SCANNED)]
    counts = np.zeros(setresize.RANKS, np.int64)
    for first, last in steps:
        setresize.count_ranks(areas, first, last, counts)
        rest()
    stop = np.minimum(counts[::-1].cumsum(), limit)[::-1].copy()
    start = np.append(stop[1:], 0)
    at = start.copy()
    out = np.empty(stop[0], np.int64)
    for first, last in steps:
        setresize.list_keys(areas, first, last, out, at, stop)
        rest()
    return [out[start[rank] : at[rank]] for rank in reversed(range(setresize.RANKS))]


def least_budget(spec: TableSpec) -> int:
    """Bytes below which a table, once halved, may hold nothing: those of two sets."""
    return 2 * (CONTROL_BYTES + _Layout(spec, 0).set_bytes)


class HostTable:
    """A set-associative cache of one table of one version (see `kernels/setcache.py`) in one mapping.

    The mapping is never larger than `budget_bytes` and holds all bookkeeping; its memory becomes real
    as it is touched. `fraction` (0 to 1) says how much of it may be in use; `resize` changes that.
    A budget too small for one set holds nothing, and every look-up is left to the next tier.
    """

    def __init__(
        self, spec: TableSpec, budget_bytes: int, *, default_vector: np.ndarray, fraction: float = 1.0
    ) -> None:
        # constant after construction
        self.spec, self.budget_bytes = spec, int(budget_bytes)
        self._defaults = [np.ascontiguousarray(default_vector, dtype) for dtype in (np.float32, np.float16)]
        self._layout = _Layout(spec, self.budget_bytes)
        # what holds the mapping, and its addresses: whoever uses these holds the other meanwhile; None where there is
        # nothing (any more) to look in
        self._areas: Areas | None = None
        self._where = np.zeros(setlookup.WORDS, np.int64)
        # guarded by _lock
        self._lock = threading.Lock()
        self._floor_seq = -1
        self._counters = np.zeros(4, np.int64)
        self._dropped_stale = self._dropped_busy = 0
        self._fraction = fraction
        if self._layout.sets:
            self._open(fraction)
        self._resize_lock = threading.Lock()  # held for a whole resize; taken before _lock

    def _open(self, fraction: float) -> None:
        size = self._layout.size
        try:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as error:
            raise ConfigError(
                f"cannot reserve {size} bytes for table {self.spec.name}: {error}; lower host_budget"
            ) from error
        areas = self._layout.cut(self._memory)
        depth, sets = self._layout.max_depth, self._sets_of(fraction)
        while depth and sets <= self._layout.sets_per_region << (depth - 1):
            depth -= 1
        areas.control[GEOMETRY] = (self._layout.sets_per_region << depth) - sets << 8 | depth
        areas.control[EPOCH] = 1  # never 0, as it reads once the memory is given back
        self._where[:] = (
            address_of(areas.control), address_of(areas.lines), address_of(areas.absent), areas.rows,
            self.spec.row_bytes, self._layout.sets_per_region, self.spec.dtype.code, self.spec.dim, address_of(self._defaults[0]),
        )  # fmt: skip
        self._areas = areas

    def _sets_of(self, fraction: float) -> int:
        """How many sets a fraction of the budget pays for; but one region is always in use."""
        sets = (int(self.budget_bytes * fraction) - CONTROL_BYTES) // self._layout.set_bytes
        return min(max(sets, self._layout.sets_per_region), self._layout.sets)

    @property
    def allowed_bytes(self) -> int:
        """What it may take at present: `fraction` of the budget."""
        return int(self.budget_bytes * self._fraction)

    @property
    def words_at(self) -> int:
        """The address of the words by which kernels look up here (`setlookup.WHERE`), or 0 where nothing is to be found."""
        return 0 if self._areas is None else address_of(self._where)

    def lookup(self, keys: Keys, out: Vectors, state: States) -> int:
        """Answer keys whose state is PENDING: row and HOST, or the default and ABSENT; the rest is left as it is.

        `keys` int64[n], `out` float32 or float16 [n, dim], `state` uint8[n], all contiguous. Rows of `out`
        that stay PENDING hold anything. Counts heat. Returns how many were answered with a row.
        """
        areas = self._areas  # keeps the mapping until this returns
        if areas is None:
            return 0
        if out.dtype is _FLOAT32:
            try:
                hits = int(setlookup.lookup_float32(self._where, keys, state, out))
            except TypeError:  # not contiguous, read-only, or at an odd address
                hits = -1
            if hits >= 0:
                return hits
        self._check(keys, out, state)
        half = out_code(out)
        keys = np.ascontiguousarray(keys)
        return int(setlookup.lookup(self._where, keys, state, half, address_of(out), address_of(self._defaults[half])))

    def pool(
        self,
        keys: Keys,
        starts: Keys,
        weights: npt.NDArray[np.float32] | None,
        combiner: Combiner,
        out: Vectors,
        state: States,
        left: npt.NDArray[np.uint8],
    ) -> int:
        """Pool the bags of which all keys are here; those of which not are marked with 1 in `left`, uint8[bags], zeros.

        `keys` int64[n], `starts` int64[bags] as `check_offsets` returns them, `weights` float32[n] or None, `out`
        float32 [bags, dim], `state` uint8[n], all contiguous. Keys whose state is not PENDING contribute nothing; the
        state of the others becomes HOST, ABSENT or stays. Counts heat. Returns how many keys were answered with a row,
        or -1 if nothing came of it.
        """
        areas = self._areas  # keeps the mapping until this returns
        if areas is None:
            return -1
        given = _NO_WEIGHTS if weights is None else weights
        code = combiner_code(combiner)
        hits: int = setpool.pool(self._where, keys, state, starts, given, code, out, left)
        return hits

    def stored(self, keys: Keys) -> tuple[Rows, States]:
        """(rows uint8[n, row_bytes], states) of keys as they are stored: HOST for what is here. Counts heat."""
        size = self.spec.row_bytes
        rows, state, absent = (
            np.zeros((len(keys), size), np.uint8),
            np.zeros(len(keys), np.uint8),
            np.zeros(size, np.uint8),
        )
        areas = self._areas  # keeps the mapping until this returns
        if areas is not None:
            keys = np.ascontiguousarray(keys)
            setlookup.lookup(self._where, keys, state, setlookup.AS_STORED, address_of(rows), address_of(absent))
        return rows, state

    def _check(self, keys: Keys, out: Vectors, state: States) -> None:
        n = len(keys)
        if (
            out.shape != (n, self.spec.dim)
            or state.shape != (n,)
            or not out.flags.c_contiguous
            or not out.flags.writeable
        ):
            raise ValueError(
                f"expected contiguous out[{n}, {self.spec.dim}] and state[{n}], got {out.shape} and {state.shape}"
            )

    @property
    def _shape(self) -> tuple[int, int]:
        """(depth, cursor) as in `setcache`."""
        geometry = 0 if self._areas is None else int(self._areas.control[GEOMETRY])
        return geometry & 255, geometry >> 8

    @property
    def _sets_spanned(self) -> int:
        """Beyond these nothing lies."""
        return self._layout.sets_per_region << self._shape[0]

    @property
    def _sets_in_use(self) -> int:
        depth, cursor = self._shape
        return (self._layout.sets_per_region << depth) - cursor

    @property
    def capacity_rows(self) -> int:
        """Rows that fit into the part in use."""
        return 0 if self._areas is None else self._sets_in_use * WAYS

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the mapping that may be touched at the present fraction."""
        return 0 if self._areas is None else CONTROL_BYTES + self._sets_in_use * self._layout.set_bytes

    def insert(self, keys: Keys, rows: Rows, seq: int) -> int:
        """Promote distinct keys with rows uint8[n, row_bytes] read under a view of `seq`. Returns rows let in.

        Dropped whole (0) if `seq` is below the floor or another writer is at work.
        """
        areas = self._begin_promotion(seq)
        if areas is None:
            return 0
        try:
            rows = self._check_rows(keys, rows)
            return int(setwrite.insert(areas, np.ascontiguousarray(keys), address_of(rows), True, self._counters))
        finally:
            self._lock.release()

    def insert_absent(self, keys: Keys, seq: int) -> int:
        """Remember distinct keys that do not exist in a view of `seq`; dropped as `insert` is. Returns keys let in."""
        areas = self._begin_promotion(seq)
        if areas is None:
            return 0
        try:
            return int(setwrite.insert_absent(areas, np.ascontiguousarray(keys), self._counters))
        finally:
            self._lock.release()

    def _begin_promotion(self, seq: int) -> Areas | None:
        """Take the lock if it is free and the promotion is not stale; the caller releases it.

        Why the floor is checked under the lock. A request reads row r0 of key k from disk under seq 5.
        Delta 6 changes k to r1: its fold raises the floor to 6, writes r1 to disk, then updates k here
        if resident. If the promotion came to check the floor first, lost its thread, and wrote only
        after that update had found k not resident, r0 would stay over r1 for good. Under one lock the
        promotion lies wholly before `raise_floor`, and then the update sees k and overwrites it, or
        wholly after, and then it is dropped.
        """
        if self._areas is None:
            return None
        if not self._lock.acquire(blocking=False):
            self._dropped_busy += 1
            return None
        if self._areas is None or seq < self._floor_seq:
            self._dropped_stale += 1
            self._lock.release()
            return None
        return self._areas

    def _check_rows(self, keys: Keys, rows: Rows) -> Rows:
        if rows.shape != (len(keys), self.spec.row_bytes) or rows.dtype != np.uint8:
            raise ValueError(
                f"expected rows uint8[{len(keys)}, {self.spec.row_bytes}], got {rows.dtype}{list(rows.shape)}"
            )
        return np.ascontiguousarray(rows)

    def raise_floor(self, seq: int) -> None:
        """From now on promotions read under a view older than `seq` are dropped. Comes before the fold's disk write."""
        with self._lock:
            self._floor_seq = max(self._floor_seq, seq)

    def update(self, keys: Keys, rows: Rows, deleted: np.ndarray) -> None:
        """Fold: bring what is resident up to a delta of distinct `keys`, rows uint8[n, row_bytes], deleted bool[n].

        Rows of deleted keys are not read. Keys that are not resident are not let in. The lock is given
        up between chunks: promotions that come between were read under the delta's view or a newer one,
        or are refused by the floor, and so never bring an older row.
        """
        rows = self._check_rows(keys, rows)
        keys, deleted = np.ascontiguousarray(keys), np.ascontiguousarray(deleted)
        if deleted.shape != keys.shape:
            raise ValueError(f"expected deleted[{len(keys)}], got {list(deleted.shape)}")
        for begin in range(0, len(keys), _CHUNK):
            with self._lock:
                if self._areas is None:
                    return
                end = min(len(keys), begin + _CHUNK)
                setwrite.update(self._areas, keys, address_of(rows), deleted, begin, end, self._counters)

    def warm(self, keys: Keys, rows: Rows, seq: int | None = None) -> int:
        """Fill free places with distinct keys, hottest first; nobody is put out. Returns rows let in.

        Once the version serves, `seq` is that of the view they were read under; dropped if it is below the floor.
        """
        keys, rows = np.ascontiguousarray(keys), self._check_rows(keys, rows)
        admitted = 0
        for begin in range(0, len(keys), _CHUNK):
            with self._lock:
                if self._areas is None or (seq is not None and seq < self._floor_seq):
                    return admitted
                chunk = keys[begin : begin + _CHUNK]
                admitted += int(setwrite.insert(self._areas, chunk, address_of(rows[begin:]), False, self._counters))
        return admitted

    def hot_keys(self, limit: int) -> Keys:
        """Resident keys int64[m], m <= limit, hottest first as far as 8 degrees of heat tell; approximate beside writers."""
        return self._hottest(limit, None)

    def sample_keys(self, limit: int) -> Keys:
        """Some resident keys int64[m], m <= limit, out of so few sets that it takes no time however large the table is."""
        return self._hottest(limit, limit)

    def _hottest(self, limit: int, sets: int | None) -> Keys:
        """Of the first `sets` sets, by default of all."""
        with self._resize_lock:  # a key moves to another set only under it: none is listed twice
            areas = self._areas
            if areas is None or limit <= 0:
                return np.empty(0, np.int64)
            all_sets = self._sets_spanned
            sets = all_sets if sets is None else min(sets, all_sets)
            return np.concatenate(_ranked(areas, 0, sets, limit))

    def hot_keys_by_part(self) -> Iterator[list[Keys]]:
        """All resident keys, one part of the table after the other: for each, int64 arrays by degree of heat, hottest first.

        Takes memory for one part alone, and lets everything else go on between two. Beside a `resize` a key may be
        missing or come twice.
        """
        first = 0
        while True:
            with self._resize_lock:
                areas = self._areas
                sets = 0 if areas is None else self._sets_spanned
                if areas is None or first >= sets:
                    return
                part = _ranked(areas, first, min(first + _PART, sets), sys.maxsize)
            yield part
            first += _PART

    def resize(self, fraction: float) -> None:
        """Use `fraction` (0 to 1) of the budget, keeping the hottest rows; what is above goes back.

        Readers and writers go on meanwhile; only another resize waits. Takes time in proportion to the change. A table
        cannot shrink below `smallest_fraction`, and stays there.
        """
        with self._resize_lock:
            if self._areas is None:
                return
            self._fraction = fraction
            wanted = self._sets_of(fraction)
            while self._sets_in_use > wanted:
                self._merge(self._sets_in_use - wanted)
            while self._sets_in_use < wanted:
                self._split(wanted - self._sets_in_use)

    def _merge(self, most: int) -> None:
        """Give back at most so many sets of the upper half, and at least one."""
        areas, (depth, cursor) = self._areas, self._shape
        assert areas is not None
        if not depth:
            return
        half = self._layout.sets_per_region << (depth - 1)
        until = min(half, cursor + most)
        for begin, end in self._steps(cursor, until):
            with self._lock:
                setresize.merge(areas, begin, end, self._counters)
            hand_over()
        with self._lock:
            if until == half:
                areas.control[GEOMETRY] = depth - 1
            areas.control[EPOCH] += 1
            self._give_back(half, self._layout.sets if until == half else half + until)

    def _split(self, most: int) -> None:
        """Take at most so many sets of the upper half into use, and at least one."""
        areas, (depth, cursor) = self._areas, self._shape
        assert areas is not None
        with self._lock:
            areas.control[EPOCH] += 1
            if not cursor:
                depth, cursor = depth + 1, self._layout.sets_per_region << depth
                areas.control[GEOMETRY] = (
                    cursor << 8 | depth
                )  # twice the sets, all of them merged: the same places as before
        for begin, end in reversed(self._steps(max(0, cursor - most), cursor)):
            with self._lock:
                setresize.split(areas, begin, end, self._counters)
            hand_over()

    def _steps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The sets [begin, end) in parts, between which others have the lock."""
        step = max(1, _CHUNK_BYTES // self._layout.set_bytes)
        return [(at, min(at + step, end)) for at in range(begin, end, step)]

    def _give_back(self, begin: int, end: int) -> None:
        """Free the memory of the sets [begin, end) in every area, whole pages; they read as zeros, as empty sets do."""
        page = mmap.PAGESIZE
        at = CONTROL_BYTES
        for size in self._layout.area_bytes():
            first = -(-(at + begin * size) // page) * page
            last = (at + end * size) // page * page
            if last > first:
                self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
            at += self._layout.sets * size

    @property
    def smallest_fraction(self) -> float:
        return 0.5**self._layout.max_depth

    def huge_page_bytes(self) -> int:
        """Bytes of the mapping that the kernel backs with huge pages (0 where it does not tell). Takes milliseconds."""
        areas = self._areas
        if areas is None:
            return 0
        first = address_of(areas.control)
        last, total, inside = first + self._layout.size, 0, False
        with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                word, _, rest = line.partition(" ")
                if word.endswith(":"):
                    total += int(rest.split()[0]) << 10 if inside and word == "AnonHugePages:" else 0
                else:
                    begin, end = (int(address, 16) for address in word.split("-"))
                    inside = begin < last and end > first
        return total

    @property
    def rows_resident(self) -> int:
        return int(self._counters[setwrite.ROWS])

    def stats(self) -> dict[str, Any]:
        """Counts since construction, and sizes; a snapshot that is taken without the lock."""
        rows, absent, admitted, evicted = self._counters.tolist()
        return {
            "rows": rows, "capacity_rows": self.capacity_rows, "absent_keys": absent, "bytes": self.bytes_in_use,
            "budget_bytes": self.allowed_bytes, "admitted": admitted, "evicted": evicted,
            "dropped_stale": self._dropped_stale, "dropped_busy": self._dropped_busy,
        }  # fmt: skip

    def close(self) -> None:
        """Give the memory back. Look-ups that are under way end safely; later ones leave every key PENDING."""
        with self._resize_lock, self._lock:
            areas, self._areas = self._areas, None
            self._counters[:2] = 0
            if areas is not None:
                # a reader may still hold the arrays: void what it reads, then free the pages, after which the epoch
                # is 0; the address range itself goes with the last reference
                areas.control[EPOCH] += 1
                self._memory.madvise(mmap.MADV_DONTNEED)
                del self._memory
