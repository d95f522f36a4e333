"""Calls under way: which attempts are made, when, and what becomes of them. Knows no socket and no clock.

A `Call` is one HTTP exchange; a `Group` the calls of one request, in flight at once. The driver (`sync.py`, `aio.py`)
asks for attempts that are due, carries them out, and reports how they ended; times are seconds of a monotonic clock that
the driver names. The rules: a call that may be repeated is repeated when the connection fails or the service is
overloaded, after an exponential backoff with full jitter ("Exponential Backoff And Jitter", AWS Architecture Blog) and not
before Retry-After; never beyond its deadline; and only while the budget lasts, which all calls of a client share and fill
by a share of an attempt each ("Retry throttling", gRPC proposal A6), so that an overload is not multiplied.

A group belongs to one thread at a time; a `RetryBudget` may be used by many.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.client.address import Address
from tierstore.client.http1 import request_head
from tierstore.client.replies import Reply
from tierstore.errors import DeadlineExceeded, NotReady, Overloaded, TierstoreError, Unreachable

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Policy:
    """How often and when a call is repeated.

    retries: further attempts a call, at most. backoff_s: the mean-doubled wait before the first; doubles up to
    `backoff_most_s`. retry_burst, retry_share: the budget's size, and what each call adds to it.
    """

    retries: int = 3
    backoff_s: float = 0.05
    backoff_most_s: float = 2.0
    retry_burst: float = 10.0
    retry_share: float = 0.1
    parallel: int = 4


class RetryBudget:
    """Repeats that all calls together may still make. Any thread."""

    def __init__(self, most: float, share: float) -> None:
        self.most, self._share = most, share
        self._lock = threading.Lock()
        self._left = most  # guarded by _lock
        self.taken = self.refused = 0  # guarded by _lock

    @property
    def left(self) -> float:
        return self._left

    def add(self) -> None:
        """A call begins."""
        with self._lock:
            self._left = min(self.most, self._left + self._share)

    def take(self) -> bool:
        """Whether one more repeat is allowed."""
        with self._lock:
            if self._left < 1.0:
                self.refused += 1
                return False
            self._left -= 1.0
            self.taken += 1
            return True


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What an attempt sends: whole header lines beyond the client's own, and the body in pieces."""

    fields: str
    pieces: Sequence[Buffer]


@dataclass(frozen=True, slots=True)
class Call:
    """One exchange. `outgoing` is asked with the seconds left, `reply` with whether it may write directly."""

    method: str
    path: str
    timeout_s: float
    outgoing: Callable[[float], Outgoing]
    reply: Callable[[bool], Reply] = lambda _: Reply()
    repeat: bool = False
    hedge_after_s: float | None = None


class Attempt:
    """One try of a call. `fresh`: not on a connection that was used before. `dropped`: nobody wants its answer."""

    __slots__ = ("call", "dropped", "flight", "fresh", "outgoing", "reply")

    def __init__(self, flight: Flight, outgoing: Outgoing, reply: Reply, *, fresh: bool) -> None:
        self.flight, self.call, self.outgoing, self.reply, self.fresh = flight, flight.call, outgoing, reply, fresh
        self.dropped = False

    def head(self, address: Address, fields: str) -> bytes:
        """The request's head. `fields` are the client's own header lines."""
        nbytes = sum(memoryview(piece).nbytes for piece in self.outgoing.pieces)
        call = self.call
        return request_head(call.method, address.prefix + call.path, fields + self.outgoing.fields, nbytes)


class Flight:
    """A call and its attempts."""

    def __init__(self, call: Call, policy: Policy, budget: RetryBudget, now: float) -> None:
        self.call = call
        self.deadline = now + call.timeout_s
        self._policy, self._budget = policy, budget
        self._start_at: float | None = now  # when the next attempt is due
        self._hedge_at: float | None = None
        self._fresh = False
        self._tries = 0
        self.live: list[Attempt] = []
        self.reply: Reply | None = None
        self.error: TierstoreError | None = None
        budget.add()

    @property
    def done(self) -> bool:
        return self.reply is not None or self.error is not None

    @property
    def begun(self) -> bool:
        return self._tries > 0

    def due(self, now: float) -> bool:
        """Whether an attempt is to be started."""
        if self.done:
            return False
        if self._start_at is not None:
            return self._start_at <= now
        if self._hedge_at is not None and self._hedge_at <= now:
            if self._budget.take():
                return True
            self._hedge_at = None
        return False

    def start(self, now: float) -> Attempt:
        """The attempt that is due."""
        hedge = self._start_at is None
        self._start_at = self._hedge_at = None
        if not hedge and self.call.hedge_after_s is not None and not self.begun:
            self._hedge_at = now + self.call.hedge_after_s
        self._tries += 1
        reply = self.call.reply(not self.live)  # only one attempt at a time writes into the caller's arrays
        attempt = Attempt(self, self.call.outgoing(max(0.0, self.deadline - now)), reply, fresh=self._fresh)
        self.live.append(attempt)
        return attempt

    def hold(self) -> None:
        """The attempt that was just started could not be; another is due after `resume`."""
        self._tries -= 1
        self._start_at = math.inf

    def resume(self, now: float) -> None:
        if self._start_at == math.inf:
            self._start_at = now

    def wake_at(self) -> float:
        """When to come back, if nothing happens before."""
        times = [time for time in (self._start_at, self._hedge_at) if time is not None]
        return min([self.deadline, *times])

    def answered(self, attempt: Attempt, now: float) -> None:
        """Tell that the whole answer came."""
        if self._gone(attempt):
            return
        try:
            # of a refusal nothing is written, so another attempt may go on
            if attempt.reply.status < 300:
                self._drop_all()
            attempt.reply.finish()
        except (Overloaded, NotReady) as error:
            temporary = attempt.reply.status in (429, 503)
            self._again(error, now, error.retry_after_s if isinstance(error, Overloaded) else 0.0, temporary)
        except TierstoreError as error:
            self._fail(error)
        else:
            self.reply = attempt.reply

    def failed(self, attempt: Attempt, error: TierstoreError, now: float, *, stale: bool = False) -> None:
        """Tell that the connection failed. `stale`: it was an old one and brought not a byte, so it had been closed before."""
        if self._gone(attempt):
            return
        if not isinstance(error, Unreachable):
            self._fail(error)
        elif stale and self.call.repeat and not self._fresh:
            self._fresh, self._start_at = True, now  # costs the service nothing
            self._tries -= 1
        else:
            self._again(error, now, 0.0, True)

    def expire(self, now: float) -> None:
        """Look whether the deadline has passed."""
        if not self.done and now >= self.deadline:
            self._fail(
                DeadlineExceeded(f"{self.call.method} {self.call.path}: no answer within {self.call.timeout_s:.2g} s")
            )

    def abandon(self) -> None:
        """Whatever comes, nobody waits for it."""
        self._drop_all()
        self._start_at = self._hedge_at = None

    def _again(self, error: TierstoreError, now: float, at_least_s: float, temporary: bool) -> None:
        if self.live:
            return  # the other copy may still bring the answer
        number = self._tries
        most = min(self._policy.backoff_most_s, self._policy.backoff_s * 2 ** (number - 1))
        start_at = now + at_least_s + random.uniform(0.0, most)
        if (
            temporary
            and self.call.repeat
            and number <= self._policy.retries
            and start_at < self.deadline
            and self._budget.take()
        ):
            self._start_at, self._hedge_at = start_at, None
        else:
            self._fail(error)

    def _gone(self, attempt: Attempt) -> bool:
        if attempt in self.live:
            self.live.remove(attempt)
        return self.done or attempt.dropped

    def _fail(self, error: TierstoreError) -> None:
        self._drop_all()
        self.error = error

    def _drop_all(self) -> None:
        for attempt in self.live:
            attempt.dropped = True
        self.live.clear()


class Group:
    """The calls of one request. The first that fails fails the group."""

    def __init__(self, calls: Sequence[Call], policy: Policy, budget: RetryBudget, now: float) -> None:
        self._flights = [Flight(call, policy, budget, now) for call in calls]
        self._parallel = policy.parallel
        self._came = 0
        self.starved = False  # whether an attempt waits for a connection

    def ended(self) -> bool:
        """Whether there is nothing left to do."""
        return all(flight.reply is not None for flight in self._flights) or self._error() is not None

    def next(self, now: float) -> Attempt | None:
        """The next attempt to start now, None if there is none."""
        busy = sum(1 for flight in self._flights if flight.live)
        for flight in self._flights:
            if (flight.live or busy < self._parallel) and flight.due(now):
                return flight.start(now)
        return None

    def put_back(self, attempt: Attempt) -> None:
        """No connection was to be had for an attempt; it waits for `resume`."""
        flight = attempt.flight
        flight.live.remove(attempt)
        flight.hold()
        self.starved = True

    def resume(self, now: float) -> None:
        """There may be a connection again."""
        if self.starved:
            self.starved = False
            for flight in self._flights:
                flight.resume(now)

    def wake_at(self) -> float:
        """When to look for due attempts and passed deadlines again. One that waits for its turn is not waited for."""
        busy = [flight for flight in self._flights if not flight.done and flight.live]
        waiting = [flight for flight in self._flights if not flight.done and not flight.live]
        if len(busy) >= self._parallel:
            return min([flight.wake_at() for flight in busy] + [flight.deadline for flight in waiting])
        return min(flight.wake_at() for flight in busy + waiting)

    def answered(self, attempt: Attempt, now: float) -> None:
        self._came += 1
        attempt.reply.order = self._came
        attempt.flight.answered(attempt, now)

    def failed(self, attempt: Attempt, error: TierstoreError, now: float, *, stale: bool = False) -> None:
        attempt.flight.failed(attempt, error, now, stale=stale)

    def expire(self, now: float) -> None:
        for flight in self._flights:
            flight.expire(now)

    def replies(self) -> list[Reply]:
        """All of them, in the order of the calls. Raises the error of the group if it failed."""
        error = self._error()
        if error is not None:
            raise error
        return [flight.reply for flight in self._flights if flight.reply is not None]

    def abandon(self) -> None:
        for flight in self._flights:
            flight.abandon()

    def _error(self) -> TierstoreError | None:
        return next((flight.error for flight in self._flights if flight.error is not None), None)
