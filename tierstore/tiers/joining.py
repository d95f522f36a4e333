"""Joined reads of one table from other machines: a key that a thread is already reading is not read a second time.

Any thread. The bytes that look-ups wait for are bounded. Which deltas a row has is not known beforehand: every read reports it (`Watermarks`), and
the caller compares with its view.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.errors import Overloaded, RemoteUnavailable
from tierstore.kernels.partitions import match_sorted
from tierstore.types import Keys, Rows, States, Tier

_REQUEST_BYTES = 64  # of a key on its way, beside its row
NO_LIMIT = np.iinfo(np.int64).max
REPLACED = 1 << 62  # above every seq: rows are not those of the line that was asked for, but of a later one


class Watermarks(NamedTuple):
    """The deltas of the rows that were read, by part: int64 [parts] each.

    Rows of part p have every delta up to `low[p]` and none above `high[p]`; NO_LIMIT and -1 for parts that no key was read from.
    """

    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]

    @classmethod
    def none(cls, parts: int) -> Watermarks:
        return cls(np.full(parts, NO_LIMIT), np.full(parts, -1, np.int64))

    @property
    def lowest(self) -> int:
        """The seq up to which all rows have every delta; NO_LIMIT if nothing was read."""
        return int(self.low.min())

    @property
    def highest(self) -> int:
        """The seq above which no row has a delta; -1 if nothing was read."""
        return int(self.high.max())

    def with_others(self, other: Watermarks) -> Watermarks:
        return Watermarks(np.minimum(self.low, other.low), np.maximum(self.high, other.high))


class LookupLimits(Protocol):
    """Limits of the look-ups of all tables together."""

    @property
    def timeout_s(self) -> float: ...
    def check_open(self) -> None: ...
    def reserve(self, size: int) -> bool: ...
    def release(self, size: int) -> None: ...


class Bounds(NamedTuple):
    """The deltas that rows of a read may have: none above `upto` (None: no limit), and all up to `floor`."""

    upto: int | None = None
    floor: int = 0


class _Reading:
    """Keys that one thread is reading, and the result, for other threads that want some of them."""

    def __init__(self, codes: Keys, bounds: Bounds) -> None:
        self.codes, self.bounds = codes, bounds
        self.followers = 0  # guarded by the table's lock
        self.done = threading.Event()
        # written before `done`, and only if there are followers
        self.rows: Rows = np.empty((0, 0), np.uint8)
        self.state: States = np.empty(0, np.uint8)
        self.watermarks: Watermarks | None = None


class _Follow(NamedTuple):
    reading: _Reading
    ours: Keys  # places of the keys in our batch
    theirs: Keys  # and in theirs


class JoinedTable:
    """One table of one version; a subclass implements the reading. `parts`: of its watermarks."""

    def __init__(self, limits: LookupLimits, row_bytes: int, parts: int) -> None:
        # constant after construction
        self._limits, self.row_bytes, self._parts = limits, row_bytes, parts
        # guarded by _lock
        self._lock = threading.Lock()
        self._reading: list[_Reading] = []

    def _read(
        self, codes: Keys, places: Keys, rows: Rows, state: States, deadline_s: float, bounds: Bounds
    ) -> Watermarks:
        """Read the `places` of `codes` into the same places of `rows` and `state`. RemoteUnavailable for keys that could not be read."""
        raise NotImplementedError

    def fetch(
        self,
        codes: Keys,
        rows: Rows,
        state: States,
        *,
        deadline_s: float | None = None,
        upto: int | None = None,
        floor: int = 0,
    ) -> Watermarks:
        """Read `codes` (int64 [n], ascending, distinct) into `rows` (uint8 [n, row_bytes], rows may have gaps between them).

        state[i] becomes REMOTE with rows[i] filled, or ABSENT. `deadline_s` is of `time.monotonic`; without it the options' time counts. `upto` and
        `floor` as in `Bounds`, if the other side can choose; compare with the returned watermarks. Keys that could not be read stay as they were
        (PENDING); after all others are answered, RemoteUnavailable is raised with their codes in `.keys`. Raises Overloaded (nothing was read) if
        look-ups already wait for too many bytes, and Closed.
        """
        self._limits.check_open()
        size = self.row_bytes
        if rows.shape != (len(codes), size) or rows.dtype != np.uint8 or (len(codes) and rows.strides[1] != 1):
            raise ValueError(f"expected rows uint8[{len(codes)}, {size}], got {rows.dtype}{list(rows.shape)}")
        if deadline_s is None:
            deadline_s = time.monotonic() + self._limits.timeout_s
        if not len(codes):
            return Watermarks.none(self._parts)
        codes = np.ascontiguousarray(codes)
        waiting = len(codes) * (size + _REQUEST_BYTES)
        if not self._limits.reserve(waiting):
            raise Overloaded("look-ups wait for as many bytes of other machines as `outstanding_bytes` allows")
        try:
            return self._fetch(codes, rows, state, deadline_s, Bounds(upto, floor))
        finally:
            self._limits.release(waiting)

    def _fetch(self, codes: Keys, rows: Rows, state: States, deadline_s: float, bounds: Bounds) -> Watermarks:
        reading, wanted, follows = self._join(codes, bounds)
        watermarks = Watermarks.none(self._parts)
        failures: list[RemoteUnavailable] = []

        def read(places: Keys) -> Watermarks | None:
            try:
                return self._read(codes, places, rows, state, deadline_s, bounds)
            except RemoteUnavailable as error:
                failures.append(error)
                return None

        if reading is not None:
            found = None
            try:
                found = read(wanted)
            finally:
                self._finish(reading, wanted, rows, state, found)
            watermarks = watermarks.with_others(found) if found else watermarks
        again: list[Keys] = []
        for follow in follows:
            got = self._copy(follow, rows, state, deadline_s)
            if got is None:
                again.append(follow.ours)
            else:
                watermarks = watermarks.with_others(got)
        if again and (found := read(np.sort(np.concatenate(again)))):
            watermarks = watermarks.with_others(found)
        self._limits.check_open()
        if failures:
            keys = sorted({key for error in failures for key in error.keys})
            raise RemoteUnavailable("; ".join(dict.fromkeys(map(str, failures))), keys=keys)
        return watermarks

    def _join(self, codes: Keys, bounds: Bounds) -> tuple[_Reading | None, Keys, list[_Follow]]:
        """The keys that this thread reads itself (now announced to others), and where the other keys will come from."""
        wanted = np.arange(len(codes))
        follows: list[_Follow] = []
        with self._lock:
            if self._reading:
                mine = np.ones(len(codes), np.bool_)
                for reading in self._reading:
                    if reading.bounds.upto != bounds.upto:
                        continue
                    where = np.full(len(codes), -1, np.int64)
                    if match_sorted(codes, reading.codes, where):
                        ours = np.flatnonzero(mine & (where >= 0))
                        if len(ours):
                            reading.followers += 1
                            follows.append(_Follow(reading, ours, where[ours]))
                            mine[ours] = False
                wanted = np.flatnonzero(mine)
            if not len(wanted):
                return None, wanted, follows
            announced = _Reading(codes if len(wanted) == len(codes) else codes[wanted], bounds)
            self._reading.append(announced)
            return announced, wanted, follows

    def _finish(self, reading: _Reading, wanted: Keys, rows: Rows, state: States, found: Watermarks | None) -> None:
        with self._lock:
            self._reading.remove(reading)
            followed = reading.followers > 0
        if followed and found is not None:
            reading.rows, reading.state, reading.watermarks = rows[wanted], state[wanted], found
        reading.done.set()

    def _copy(self, follow: _Follow, rows: Rows, state: States, deadline_s: float) -> Watermarks | None:
        """Copy what another thread has read; None if it failed or is too late."""
        reading = follow.reading
        if not reading.done.wait(max(0.0, deadline_s - time.monotonic())) or reading.watermarks is None:
            return None
        states = reading.state[follow.theirs]
        found = states == Tier.REMOTE
        rows[follow.ours[found]] = reading.rows[follow.theirs[found]]
        state[follow.ours] = states
        return reading.watermarks
