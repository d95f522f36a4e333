"""The duty cycle of background work, chosen so that look-ups stay about as quick as in quiet times.

Loads, verification and warming use processors, memory and drives that look-ups need. How much that costs cannot be
predicted, so it is measured: the p99 of look-ups during such work, compared with quiet times. `Control` decides, and
is pure; `Throttle` measures, on a thread of its own, and background work reads its `share`. Without look-ups the share
is 1.

Quiet is when no such work is done. A load may take hours, and a measurement from before it would be too old, so work
pauses for a moment now and then, and look-ups are measured meanwhile. Folds follow the share too, but count as quiet:
deltas arrive all day.

Any thread may call anything.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels.latency import BOUNDS_NS, BUCKETS
from tierstore.threads import Thread

log = logging.getLogger(__name__)

LEAST_SHARE = 0.05  # so that a load ends, however slow look-ups get
LEAST_OF_A_SWITCH = 0.25  # for work that a caller waits for, and for folds
_FASTER, _FASTER_OF = 0.05, 0.15  # added to the share, a window; at most this part of the share
_SLOWER_LEAST, _SLOWER_MOST = 0.5, 0.85  # factors for the share, by how much too slow look-ups are
_NEW_QUIET = 0.5  # weight of a quiet window against earlier ones
_QUIET_EVERY_S = 60.0  # of work, or of time without a measurement
_SLOW, _QUIET_EVERY_S_IF_SLOW = (
    0.5,
    10.0,
)  # below that share it costs little to find out whether work is the cause
_HARDLY_SLOWED, _TRIES, _NO_QUICKER, _IN_VAIN_S = 0.8, 3, 0.8, 60.0  # see `Control._weigh`
_WINDOW_S, _LONGEST = 1.0, 5  # a window; so many together if look-ups are few
_QUIET_WINDOWS = 2  # at most, while work pauses
_COMES_TO_A_STOP_S = 0.3  # in which work stops
_ENOUGH, _FEWEST = 500, 200  # look-ups of a window: at which it may end, and below which its p99 means nothing


class LookupTimes:
    """Counts of look-ups by duration. Any thread may add; of two additions at the same time one may be lost."""

    def __init__(self) -> None:
        self.watched = False  # whether look-ups that are not measured elsewhere should be
        self.counts = [0] * BUCKETS

    def add(self, ns: int) -> None:
        self.counts[bisect_left(BOUNDS_NS, ns)] += 1

    def absorb(self, counts: npt.NDArray[np.int64]) -> None:
        """Add counts from elsewhere, int64[BUCKETS]."""
        for bucket in np.flatnonzero(counts).tolist():
            self.counts[bucket] += int(counts[bucket])


def p99_s(counts: Sequence[int]) -> float | None:
    """The 99th percentile of look-ups counted by bucket; None if they are too few."""
    reached = np.cumsum(counts)
    if reached[-1] < _FEWEST:
        return None
    wanted = 0.99 * float(reached[-1])
    bucket = int(np.searchsorted(reached, wanted))
    low = BOUNDS_NS[bucket - 1] if bucket else BOUNDS_NS[0] / 2
    high = BOUNDS_NS[min(bucket, len(BOUNDS_NS) - 1)]
    within = 1 - (float(reached[bucket]) - wanted) / counts[bucket]
    return float(low * (high / low) ** within / 1e9)


@dataclass(slots=True)
class Control:
    """The decision: additive increase, multiplicative decrease, between `LEAST_SHARE` and 1.

    `most`: the allowed p99 during work, as a multiple of the quiet p99.
    """

    most: float
    share: float = 1.0
    quiet_s: float | None = None
    since_quiet_s: float = math.inf  # of work
    full_s: float | None = None  # the p99 while work is hardly slowed down
    at_least: list[float] = field(default_factory=list)  # the latest p99s at the least share, all too slow
    vain_s: float = 0.0  # so long work is not slowed down

    def quiet(self, p99: float | None) -> None:
        """Take in a window without work; None for too few look-ups."""
        self.since_quiet_s = 0.0
        if p99 is not None:
            before = p99 if self.quiet_s is None else self.quiet_s
            self.quiet_s = before * (p99 / before) ** _NEW_QUIET

    def worked(self, p99: float | None, lookups: int, seconds: float) -> None:
        """Take in a window with work."""
        self.since_quiet_s += seconds
        if not lookups:
            self.share = 1.0
        elif p99 is None:
            self.share = self._faster()
        elif self.quiet_s is not None:
            self._weigh(p99, self.most * self.quiet_s, seconds)

    def _faster(self) -> float:
        return min(1.0, self.share + min(_FASTER, _FASTER_OF * self.share))

    def _weigh(self, p99: float, limit: float, seconds: float) -> None:
        if self.share >= _HARDLY_SLOWED:
            self.full_s = p99
        self.vain_s = max(0.0, self.vain_s - seconds)
        self.at_least = [*self.at_least, p99] if self.share == LEAST_SHARE and p99 > limit else []
        if p99 <= limit:
            self.share = self._faster()
        elif self.vain_s:
            self.share = 1.0
        elif (
            self.full_s is not None and len(self.at_least) == _TRIES and min(self.at_least) > _NO_QUICKER * self.full_s
        ):
            # look-ups are as slow as with work at full speed: the sooner it is over, the better
            self.vain_s, self.share, self.at_least = _IN_VAIN_S, 1.0, []
        else:
            self.at_least = self.at_least[1 - _TRIES :]
            self.share = max(LEAST_SHARE, self.share * min(_SLOWER_MOST, max(_SLOWER_LEAST, limit / p99)))

    def wants_quiet(self, p99: float | None) -> bool:
        """Whether work should pause for a window, after a window of work with that p99."""
        every_s = _QUIET_EVERY_S if self.share > _SLOW else _QUIET_EVERY_S_IF_SLOW
        return p99 is not None and self.since_quiet_s >= every_s


class Throttle:
    """The measuring thread. `refresh` brings `times` up to now; with `most` 0 the share is always 1."""

    def __init__(
        self, times: LookupTimes, refresh: Callable[[], None], most: float, *, window_s: float = _WINDOW_S
    ) -> None:
        # constant after construction
        self.times, self._refresh, self.window_s = times, refresh, window_s
        self.control = Control(most)  # for the thread; others read
        self._thread = Thread(target=self._run, name="tierstore-throttle", daemon=True)
        self._changed = threading.Condition()
        # guarded by _changed
        self._work: Counter[str] = Counter()
        self._generation = 0  # how often work has begun after quiet, or ended
        self._stopping = False
        # written by the thread
        self._paused = False
        self._p99_s: float | None = None

    @property
    def share(self) -> float:
        """The share of the time for work now: 0, for a moment, to 1."""
        return 0.0 if self._paused else self.control.share

    @contextlib.contextmanager
    def at_work(self, kind: str) -> Iterator[None]:
        """In the block work is done that may slow look-ups."""
        self._count(kind, 1)
        try:
            yield
        finally:
            self._count(kind, -1)

    def _count(self, kind: str, more: int) -> None:
        with self._changed:
            before = self._busy
            self._work[kind] += more
            if self._busy != before:
                self._generation += 1
                self.times.watched = self._busy
                self._changed.notify_all()

    @property
    def _busy(self) -> bool:
        return any(self._work.values())

    def status(self) -> dict[str, Any]:
        """`share` of the time, what is at work, and the p99 of look-ups: now, in quiet, and the allowed multiple."""
        with self._changed:
            work = sorted(kind for kind, count in self._work.items() if count)
        return {
            "share": self.share,
            "work": work,
            "p99_s": self._p99_s,
            "quiet_p99_s": self.control.quiet_s,
            "p99_ratio": self.control.most,
        }

    def start(self) -> None:
        if self.control.most:
            self._thread.start()

    def close(self) -> None:
        """End the thread; the share is 1 from then on. May be called if it was never started."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._window()
            except Exception:
                log.exception("look-ups are not measured; background work goes on")
                self._wait(self._generation, _LONGEST * self.window_s)
        self._paused, self.control.share = False, 1.0

    def _window(self) -> None:
        busy, generation, began = self._busy, self._generation, time.monotonic()
        p99, lookups = self._measure(generation, _LONGEST)
        if generation != self._generation:
            return  # of both kinds
        self._p99_s, seconds = p99, time.monotonic() - began
        if busy:
            self.control.worked(p99, lookups, seconds)
            if self.control.wants_quiet(p99):
                self._pause(generation)
        elif p99 is not None:
            self.control.quiet(p99)
        else:
            self.control.since_quiet_s += seconds

    def _pause(self, generation: int) -> None:
        """Pause work, and measure."""
        self._paused = True
        try:
            if self._wait(generation, min(_COMES_TO_A_STOP_S, self.window_s)):
                p99, _ = self._measure(generation, _QUIET_WINDOWS)
                if generation == self._generation:
                    self.control.quiet(p99)
        finally:
            self._paused = False

    def _measure(self, generation: int, most: int) -> tuple[float | None, int]:
        """(p99, look-ups) of at most so many windows, which end early after enough look-ups, or when work begins or
        ends.
        """
        begin, new = self._counts(), [0]
        for _ in range(most):
            goes_on = self._wait(generation, self.window_s)
            new = [now - before for now, before in zip(self._counts(), begin, strict=True)]
            if not goes_on or sum(new) >= _ENOUGH:
                break
        return p99_s(new), sum(new)

    def _counts(self) -> list[int]:
        self._refresh()
        return self.times.counts.copy()

    def _wait(self, generation: int, seconds: float) -> bool:
        """Wait. False if work has begun or ended, or the thread should end."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._stopping or generation != self._generation, seconds)
