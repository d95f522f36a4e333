"""The memory of a host table: one mapping, the part in use, and how that grows and shrinks in place.

Linux only: freed pages come back as zeros, which are empty sets. Any thread may read; `resize` is for one thread at a time, `void` for a thread that
holds all of the table's locks.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError
from tierstore.kernels.codec import address_of
from tierstore.tiers.background import yield_if_background, yield_to_requests
from tierstore.tiers.host.cache import resize as resize_kernels
from tierstore.tiers.host.cache.layout import CONTROL_BYTES, EPOCH, GEOMETRY
from tierstore.tiers.host.table_layout import Layout
from tierstore.types import Keys

_STEP_BYTES = 1 << 18  # bytes of sets that a resize changes before other writers get the lock
_STEP_SETS = 512  # sets whose keys are listed before other threads get their turn
_FREED_BYTES = 8 << 20  # bytes freed at once: half a millisecond with small pages
_HUGE_PAGE = 2 << 20
_LONGEST_PAGE_S = 1e-3  # nothing else runs on the processor while the kernel makes a page: 0.2 ms if it has the memory
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)  # the budget is a bound, not a claim on memory that is not touched yet


class HostMemory:
    """A mapping laid out by `layout`, of which at least `sets` are in use. Its pages become real when they are touched.

    Raises ConfigError if it cannot be reserved.
    """

    def __init__(self, layout: Layout, sets: int, table: str) -> None:
        # constant after construction
        self._layout = layout
        try:
            self._mapping = mmap.mmap(-1, layout.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as error:
            raise ConfigError(
                f"cannot reserve {layout.size} bytes for table {table}: {error}; lower host_budget"
            ) from error
        self.allow_huge_pages()
        self.areas = layout.cut(self._mapping)
        depth = layout.max_depth
        while depth and sets <= layout.sets_per_region << (depth - 1):
            depth -= 1
        self.areas.control[GEOMETRY] = (layout.sets_per_region << depth) - sets << 8 | depth
        self.areas.control[EPOCH] = 1  # never 0, which is read once the memory is freed

    @property
    def size(self) -> int:
        """Bytes of the mapping."""
        return self._layout.size

    @property
    def shape(self) -> tuple[int, int]:
        """(depth, cursor) as in `tiers/host/cache/layout.py`."""
        geometry = int(self.areas.control[GEOMETRY])
        return geometry & 255, geometry >> 8

    @property
    def sets_spanned(self) -> int:
        """The number of sets up to the last one in use."""
        return self._layout.sets_per_region << self.shape[0]

    @property
    def sets_in_use(self) -> int:
        depth, cursor = self.shape
        return (self._layout.sets_per_region << depth) - cursor

    @property
    def bytes_in_use(self) -> int:
        """Bytes that may be touched now."""
        return CONTROL_BYTES + self.sets_in_use * self._layout.set_bytes

    def keys_by_heat(self, begin: int, end: int, limit: int) -> list[Keys]:
        """At most `limit` resident keys of the sets [begin, end): one array for each degree of heat, hottest first."""
        steps = [(first, min(first + _STEP_SETS, end)) for first in range(begin, end, _STEP_SETS)]
        counts = np.zeros(resize_kernels.RANKS, np.int64)
        for first, last in steps:
            resize_kernels.count_ranks(self.areas, first, last, counts)
            yield_if_background()
        stop = np.minimum(counts[::-1].cumsum(), limit)[::-1].copy()
        start = np.append(stop[1:], 0)
        at = start.copy()
        out = np.empty(stop[0], np.int64)
        for first, last in steps:
            resize_kernels.list_keys(self.areas, first, last, out, at, stop)
            yield_if_background()
        return [out[start[rank] : at[rank]] for rank in reversed(range(resize_kernels.RANKS))]

    def populate(self) -> None:
        """Take the memory of all sets in use, a huge page at a time, between requests. Call it before anybody else uses the table.

        If a huge page takes long (4.5 ms from a hypervisor that must find the memory itself), the remaining pages are small and are taken as rows
        come; after `allow_huge_pages` the kernel makes huge pages of them.
        """
        start = address_of(self.areas.control)
        for begin, end in self._parts(0, self.sets_spanned):
            for at in range(-(-(start + begin) // _HUGE_PAGE) * _HUGE_PAGE - start, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                began = time.thread_time()
                ctypes.memset(start + at, 0, 1)  # it reads as 0 anyway; memset releases the interpreter lock
                if time.thread_time() - began > _LONGEST_PAGE_S:
                    self._advise("MADV_NOHUGEPAGE")
                    return
                yield_to_requests()

    def allow_huge_pages(self) -> None:
        """Let the kernel back the whole mapping with huge pages, in its own time."""
        self._advise("MADV_HUGEPAGE")

    def _advise(self, name: str) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages is only slower
            self._mapping.madvise(getattr(mmap, name))

    def resize(self, sets: int, lock: threading.Lock, counters: npt.NDArray[np.int64]) -> None:
        """Use so many sets, keeping the hottest rows. Takes `lock`, the writers', for one step after the other.

        A table that cannot be halved any further stays as it is.
        """
        while self.sets_in_use > sets and self.shape[0]:
            self._merge(self.sets_in_use - sets, lock, counters)
        while self.sets_in_use < sets:
            self._split(sets - self.sets_in_use, lock, counters)

    def _merge(self, most: int, lock: threading.Lock, counters: npt.NDArray[np.int64]) -> None:
        """Free at most so many sets of the upper half, and at least one."""
        depth, cursor = self.shape
        half = self._layout.sets_per_region << (depth - 1)
        until = min(half, cursor + most)
        for begin, end in self._steps(cursor, until):
            with lock:
                resize_kernels.merge(self.areas, begin, end, counters)
            yield_to_requests()
        with lock:
            if until == half:
                self.areas.control[GEOMETRY] = depth - 1
            self.areas.control[EPOCH] += 1
            self._give_back(half, self._layout.sets if until == half else half + until)

    def _split(self, most: int, lock: threading.Lock, counters: npt.NDArray[np.int64]) -> None:
        """Take at most so many sets of the upper half into use, and at least one."""
        depth, cursor = self.shape
        with lock:
            self.areas.control[EPOCH] += 1
            if not cursor:
                depth, cursor = depth + 1, self._layout.sets_per_region << depth
                # twice the sets, all of them still merged: every key stays in its place
                self.areas.control[GEOMETRY] = cursor << 8 | depth
        for begin, end in reversed(self._steps(max(0, cursor - most), cursor)):
            with lock:
                resize_kernels.split(self.areas, begin, end, counters)
            yield_to_requests()

    def _steps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The sets [begin, end) in parts, between which other threads get the lock."""
        step = max(1, _STEP_BYTES // self._layout.set_bytes)
        return [(at, min(at + step, end)) for at in range(begin, end, step)]

    def _give_back(self, begin: int, end: int) -> None:
        """Free the memory of the sets [begin, end) in every area, whole pages; they read as zeros, which are empty sets."""
        page = mmap.PAGESIZE
        for first, last in self._parts(begin, end):
            first, last = -(-first // page) * page, last // page * page
            if last > first:
                self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The places of the sets [begin, end) in the mapping, area by area: [first byte, last byte)."""
        at = CONTROL_BYTES
        for size in self._layout.area_bytes():
            yield at + begin * size, at + end * size
            at += self._layout.sets * size

    def ranges_in_use(self) -> list[tuple[int, int]]:
        """The address ranges [begin, end) that may be touched now: whole pages, ascending."""
        depth, cursor = self.shape
        half = self._layout.sets_per_region << depth >> 1
        start, page = address_of(self.areas.control), mmap.PAGESIZE
        ranges = [(start, start + page)]
        for begin, end in sorted(
            part
            for sets in ([(0, half), (half + cursor, 2 * half)] if cursor else [(0, self.sets_spanned)])
            for part in self._parts(*sets)
        ):
            first, last = (start + begin) // page * page, -(-(start + end) // page) * page
            if first <= ranges[-1][1]:
                ranges[-1] = ranges[-1][0], max(ranges[-1][1], last)
            else:
                ranges.append((first, last))
        return ranges

    def huge_page_bytes(self) -> int:
        """Bytes of the mapping that the kernel backs with huge pages (0 if it does not report them). Takes milliseconds."""
        first = address_of(self.areas.control)
        last, total, inside = first + self.size, 0, False
        with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                word, _, value = line.partition(" ")
                if word.endswith(":"):
                    total += int(value.split()[0]) << 10 if inside and word == "AnonHugePages:" else 0
                else:
                    begin, end = (int(address, 16) for address in word.split("-"))
                    inside = begin < last and end > first
        return total

    def void(self) -> None:
        """Free the pages, though a reader may still hold the arrays: its reads become void first, then zeros.

        The address range itself is freed with the last reference to the areas.
        """
        self.areas.control[EPOCH] += 1
        for at in range(0, self.size, _FREED_BYTES):
            self._mapping.madvise(mmap.MADV_DONTNEED, at, min(_FREED_BYTES, self.size - at))
            yield_to_requests()
