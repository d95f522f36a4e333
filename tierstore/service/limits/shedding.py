"""Load shedding: how long callers wait, which calls are not run any more, and how many those were.

A thread that pops a call from a queue first calls `Waits.check`: a call whose deadline has passed, whose client has
gone, or which has waited too long, is refused before work is done for it. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from prometheus_client.core import Metric

from tierstore.access.roles import NOBODY, Principal
from tierstore.errors import DeadlineExceeded, Overloaded
from tierstore.service.families import counters, histograms
from tierstore.service.stats import REQUEST_BOUNDS_S, Histogram

# reasons: no room in a queue, too long in it, deadline passed there, client gone, too many connections, a rate
REASONS = ("queue_full", "queue_wait", "deadline", "gone", "connections", "rate")

T = TypeVar("T")
_RECENT = 64  # calls whose times predict those of the next ones
WAITS_TOO_LONG = "too many calls wait for a thread already; try again in a second"


class Gone(Exception):
    """The client went away while its request waited; there is nobody to answer. Not an error."""


class Caller:
    """The client that waits for an answer: its identity, since when and until when it waits, and whether it is still
    connected.

    Times are of `time.perf_counter_ns`. One thread at a time, except `gone`.
    """

    __slots__ = ("arrived_ns", "deadline_ns", "gone", "principal")

    def __init__(self, arrived_ns: int, gone: Callable[[], bool] | None = None, principal: Principal = NOBODY) -> None:
        self.arrived_ns, self.gone, self.principal = arrived_ns, gone, principal
        self.deadline_ns: int | None = None

    def within(self, timeout_ns: int | None) -> None:
        """Set the deadline to this time after the arrival; of several deadlines the earliest counts."""
        if timeout_ns is not None:
            until_ns = self.arrived_ns + timeout_ns
            self.deadline_ns = until_ns if self.deadline_ns is None else min(self.deadline_ns, until_ns)

    def remaining_s(self) -> float | None:
        """The time until the deadline, if there is one."""
        return None if self.deadline_ns is None else (self.deadline_ns - time.perf_counter_ns()) / 1e9


class Shed:
    """Counts of refused requests, by reason, and waiting times of calls, by pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # guarded by _lock
        self._counts = dict.fromkeys(REASONS, 0)
        self._waits: dict[str, Histogram] = {}

    def count(self, reason: str, calls: int = 1) -> None:
        with self._lock:
            self._counts[reason] += calls

    def of(self, reason: str) -> int:
        """The number of requests refused for a reason."""
        return self._counts[reason]

    def check(self, caller: Caller) -> None:
        """Raise DeadlineExceeded or Gone if nobody waits for the answer any more, and count it."""
        self.check_at(caller, time.perf_counter_ns())

    def check_at(self, caller: Caller, now_ns: int) -> None:
        """`check`, at a moment of `time.perf_counter_ns`."""
        if caller.gone is not None and caller.gone():
            self.count("gone")
            raise Gone
        if caller.deadline_ns is not None and now_ns >= caller.deadline_ns:
            self.count("deadline")
            timeout_us = (caller.deadline_ns - caller.arrived_ns) // 1000
            raise DeadlineExceeded(
                f"the request's timeout of {timeout_us} microseconds passed before work on it began; nothing was done"
            )

    def waited(self, pool: str, seconds: float) -> None:
        """Note how long a call has waited for a thread."""
        with self._lock:
            waits = self._waits.get(pool)
            if waits is None:
                waits = self._waits[pool] = Histogram(REQUEST_BOUNDS_S)
            waits.add(seconds)

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        with self._lock:
            counts = dict(self._counts)
            waited = histograms(
                "tierstore_queue_seconds", "Seconds that calls waited for a thread.", "pool", self._waits
            )
        text = "Requests refused before any work was done for them, so that others are answered."
        yield from (counters("tierstore_shed", text, "reason", counts), waited)


class Waits:
    """The rule of one queue: a call waits at most `limit_s`, and is not queued if it would wait too long. Any thread.

    The expected wait follows from the number of calls before it and the time of the last ones. In a queue as long as
    its calls' deadlines, each call would begin just before its deadline and end after it, which helps nobody.
    """

    def __init__(self, pool: str, shed: Shed, limit_s: float) -> None:
        self._pool, self.shed, self._limit_s = pool, shed, limit_s
        self.call_s = 0.0  # the time of a call; of two threads that note one at the same time one may be lost

    def timed(self, call: Callable[..., T], *args: Any) -> T:
        """Run a call, and note how long it takes its thread, whether it succeeds or not."""
        began_s = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.ran(time.perf_counter() - began_s)

    def ran(self, took_s: float) -> None:
        """Note how long a call took its thread."""
        self.call_s += (took_s - self.call_s) / (_RECENT if self.call_s else 1)

    def expected_s(self, pending: int, threads: int) -> float:
        """How long a call that comes now would wait, with so many queued or running on `threads` threads."""
        busy = pending >= threads  # running calls are half done, on average
        return busy * (pending - threads + 0.5) * self.call_s / threads

    def admit(self, wait_s: float, remaining_s: float | None) -> None:
        """Check a call before it is queued: it would wait about `wait_s`; its deadline is in `remaining_s`, or None.

        Raises Overloaded if it would wait for more than half of that: the other half is for its own work, and for
        errors of the estimate.
        """
        if wait_s > (self._limit_s if remaining_s is None else min(self._limit_s, max(remaining_s, 0) / 2)):
            self.shed.count("queue_wait")
            raise Overloaded(WAITS_TOO_LONG)

    def check(self, queued_ns: int, caller: Caller | None = None) -> None:
        """Check a call that was popped, before it is run. `queued_ns` is when it was queued.

        Raises Gone, DeadlineExceeded or Overloaded for a call that should not be run any more.
        """
        now_ns = time.perf_counter_ns()
        waited_s = (now_ns - queued_ns) / 1e9
        self.shed.waited(self._pool, waited_s)
        if caller is not None:
            self.shed.check_at(caller, now_ns)
        if waited_s > self._limit_s:
            self.shed.count("queue_wait")
            raise Overloaded(
                f"the request waited {waited_s:.3f} s for a thread, max_queue_s is {self._limit_s:g}; try again in a "
                "second"
            )
