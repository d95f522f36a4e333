"""Attempts of calls: when one starts, when it is repeated or hedged, and how a call ends. Knows no socket and no clock.

A `NodeCall` is one HTTP exchange. A `CallGroup` holds the calls of one request, which run side by side. The transport
asks the group for attempts that are due, carries them out and reports how they ended. Times are seconds of a monotonic
clock, passed in by the transport.

A call that may be repeated is repeated when its connection fails, or a status says that this node cannot now: after an
exponential backoff with full jitter ("Exponential Backoff And Jitter", AWS Architecture Blog), not before Retry-After,
never beyond its deadline, and only within the retry budget. All calls of a client share that budget and each adds a
share of one attempt to it ("Retry throttling", gRPC proposal A6), so that retries do not multiply an overload. Where
there are several nodes the next attempt goes to another one, at once.

A group belongs to one thread at a time; any thread may use a `RetryBudget`.
"""

from __future__ import annotations

import math
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierstore.client.balancing import Balancer, NodeRoute
from tierstore.client.replies import DocumentReply
from tierstore.client.settings import Node, RetryPolicy
from tierstore.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    TierstoreError,
    Unreachable,
)
from tierstore.forks import renew_in_child
from tierstore.http1 import request_head
from tierstore.trace_context import current_trace, header_lines

Buffer = bytes | memoryview
TEMPORARY = (429, 500, 502, 503, 504)  # statuses after which another node, or the same one later, may answer


class RetryBudget:
    """Retries that all calls of a client together may still make. Any thread."""

    def __init__(self, limit: float, share: float) -> None:
        self.limit, self._share = limit, share
        self._lock = threading.Lock()
        self._remaining = limit  # guarded by _lock
        self.reserved = self.refused = 0  # guarded by _lock
        renew_in_child(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    @property
    def remaining(self) -> float:
        return self._remaining

    def add(self) -> None:
        """Add the share of one call."""
        with self._lock:
            self._remaining = min(self.limit, self._remaining + self._share)

    def reserve(self) -> bool:
        """Whether one more retry is allowed; it is then counted."""
        with self._lock:
            if self._remaining < 1.0:
                self.refused += 1
                return False
            self._remaining -= 1.0
            self.reserved += 1
            return True


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What an attempt sends: header lines beyond the client's own, and the body in pieces."""

    header_lines: str
    pieces: Sequence[Buffer]


def new_request_id() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class NodeCall:
    """One exchange. `outgoing` is called with the seconds that remain, `reply` with whether it may write directly.

    `request_id` goes out with every attempt, and an error of the call names it: the service's log has it too. `trace`
    is the one that the call was made in.
    """

    method: str
    path: str
    timeout_s: float
    outgoing: Callable[[float], Outgoing]
    reply: Callable[[bool], DocumentReply] = lambda _: DocumentReply()
    repeat: bool = False
    hedge_after_s: float | None = None
    request_id: str = field(default_factory=new_request_id)
    trace: str = field(default_factory=lambda: header_lines(current_trace()))  # header lines


class Attempt:
    """One attempt of a call, at the node of that number.

    `fresh`: needs a new connection. `dropped`: nobody waits for its answer. `began_at`: by the transport's clock.
    """

    __slots__ = ("began_at", "call", "dropped", "fresh", "node", "outgoing", "pending", "reply")

    def __init__(
        self, pending: PendingCall, outgoing: Outgoing, reply: DocumentReply, *, fresh: bool, node: int, began_at: float
    ) -> None:
        self.pending, self.call, self.outgoing, self.reply, self.fresh = pending, pending.call, outgoing, reply, fresh
        self.node, self.began_at, self.dropped = node, began_at, False

    def head(self, node: Node) -> bytes:
        """The request's head, which is sent now."""
        self.pending.is_sent = True
        nbytes = sum(memoryview(piece).nbytes for piece in self.outgoing.pieces)
        ours = f"x-request-id: {self.call.request_id}\r\n{self.call.trace}"
        lines = f"{node.header_lines}{ours}{self.outgoing.header_lines}"
        return request_head(self.call.method, node.address.prefix + self.call.path, lines, nbytes)


class PendingCall:
    """A call, its attempts that run, and in the end its reply or error."""

    def __init__(
        self, call: NodeCall, policy: RetryPolicy, budget: RetryBudget, now: float, route: NodeRoute | None = None
    ) -> None:
        self.call = call
        self.deadline = now + call.timeout_s
        self._route = route or NodeRoute(Balancer())
        self._nodes = self._route.balancer
        self._tried: set[int] = set()  # nodes that did not answer the call
        self._policy, self._budget = policy, budget
        self._start_at: float | None = now  # when the next attempt is due
        self._hedge_at: float | None = None
        self._fresh = False
        self._attempts = 0
        self.is_sent = False  # to some node, whose log may have its id
        self.running: list[Attempt] = []
        self.reply: DocumentReply | None = None
        self.error: TierstoreError | None = None
        budget.add()

    @property
    def done(self) -> bool:
        return self.reply is not None or self.error is not None

    def due(self, now: float) -> bool:
        """Whether an attempt is to be started now."""
        if self.done:
            return False
        if self._start_at is not None:
            return self._start_at <= now
        if self._hedge_at is not None and self._hedge_at <= now:
            if self._budget.reserve():
                return True
            self._hedge_at = None
        return False

    def start(self, now: float) -> Attempt:
        """Start the attempt that is due."""
        hedge = self._start_at is None
        self._start_at = self._hedge_at = None
        if not hedge and self.call.hedge_after_s is not None and not self._attempts:
            self._hedge_at = now + self.call.hedge_after_s
        self._attempts += 1
        avoid = self._tried | {attempt.node for attempt in self.running}
        node = self._nodes.choose(self.call.path, now, avoid) if hedge else self._route.next(self.call.path, now, avoid)
        reply = self.call.reply(not self.running)  # only one attempt at a time writes into the caller's arrays
        outgoing = self.call.outgoing(max(0.0, self.deadline - now))
        attempt = Attempt(self, outgoing, reply, fresh=self._fresh, node=node, began_at=now)
        self.running.append(attempt)
        self._nodes.started(node)
        return attempt

    def postpone(self, attempt: Attempt) -> None:
        """The attempt that was just started got no connection; the next one is due after `resume`."""
        self._remove(attempt)
        self._attempts -= 1
        self._start_at = math.inf

    def resume(self, now: float) -> None:
        if self._start_at == math.inf:
            self._start_at = now

    def wake_at(self) -> float:
        """When to look again if nothing happens before."""
        times = [time for time in (self._start_at, self._hedge_at) if time is not None]
        return min([self.deadline, *times])

    def answered(self, attempt: Attempt, now: float) -> None:
        """Report that the whole answer was received."""
        if self._forget(attempt):
            return
        temporary = attempt.reply.status in TEMPORARY
        if not temporary:
            self._nodes.answered(attempt.node, self.call.path, now)
        try:
            # a refusal writes nothing into the caller's arrays, so another attempt may go on
            if attempt.reply.status < 300:
                self._drop_all()
            attempt.reply.finish()
        except TierstoreError as error:
            if temporary:
                self._failed_for_a_while(attempt, error, now)
            elif isinstance(error, (NotFound, NotReady, InvalidInput)):
                self._try_others(attempt, error, now)
            else:
                self._fail(error)
        else:
            self.reply = attempt.reply

    def _failed_for_a_while(self, attempt: Attempt, error: TierstoreError, now: float) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
        if isinstance(error, DeadlineExceeded):  # of the request, which may be short
            self._nodes.silent(attempt.node, attempt.began_at, now)
        else:
            self._nodes.failed(attempt.node, now, retry_after_s)
        self._retry(attempt, error, now, retry_after_s)

    def failed(self, attempt: Attempt, error: TierstoreError, now: float, *, stale: bool = False) -> None:
        """Report that the connection failed.

        `stale`: it was reused and not a byte arrived, so it had been closed before.
        """
        self.expire(now, error)
        if self._forget(attempt):
            return
        if not isinstance(error, Unreachable):
            self._fail(error)
        elif stale and self.call.repeat and not self._fresh:
            self._fresh, self._start_at = True, now  # the service saw nothing of it: not counted as a retry
            self._attempts -= 1
        else:
            self._nodes.failed(attempt.node, now)
            self._retry(attempt, error, now)

    def expire(self, now: float, why: TierstoreError | None = None) -> None:
        """Fail the call if its deadline has passed. `why`: what came last in place of an answer."""
        if not self.done and now >= self.deadline:
            for attempt in self.running:
                self._nodes.silent(attempt.node, attempt.began_at, now)
            within = f"{self.call.method} {self.call.path}: no answer within {self.call.timeout_s:.2g} s"
            self._fail(DeadlineExceeded(within if why is None else f"{within}: {why}"))

    def abandon(self) -> None:
        """Drop all attempts: nobody waits for an answer any more."""
        self._drop_all()
        self._start_at = self._hedge_at = None

    def _try_others(self, attempt: Attempt, error: TierstoreError, now: float) -> None:
        """Plan an attempt at a node that may have what this one lacks, if there is one;
        else the call ends with `error`.

        It is a model or version that is not there, or not ready. What is bad input here may be none for one more node,
        whose version is another. Such attempts are not retries: each node gets at most one.
        """
        if isinstance(error, NotFound):
            self._nodes.lacks(attempt.node, self.call.path, now)
        elif isinstance(error, InvalidInput) and len(self._tried) > 0:
            return self._fail(error)
        self._tried.add(attempt.node)
        if self.running:
            return None  # the hedge, at another node
        if self.call.repeat and self._nodes.has_others(self.call.path, now, self._tried):
            self._attempts -= 1
            self._start_at, self._hedge_at = now, None
            return None
        return self._fail(error)

    def _retry(self, attempt: Attempt, error: TierstoreError, now: float, at_least_s: float = 0.0) -> None:
        """Plan another attempt where one is allowed; else the call ends with `error`."""
        self._tried.add(attempt.node)
        if self.running:
            return  # the hedge may still bring the answer
        number = self._attempts
        if self._nodes.has_others(self.call.path, now, self._tried):
            start_at = now
        else:
            self._tried.clear()
            longest_s = min(self._policy.backoff_limit_s, self._policy.backoff_s * 2 ** (number - 1))
            start_at = now + at_least_s + random.uniform(0.0, longest_s)
        if self.call.repeat and number <= self._policy.retries and start_at < self.deadline and self._budget.reserve():
            self._start_at, self._hedge_at = start_at, None
        else:
            self._fail(error)

    def _forget(self, attempt: Attempt) -> bool:
        """The attempt has ended. Returns whether its result no longer matters."""
        if attempt in self.running:
            self._remove(attempt)
        return self.done or attempt.dropped

    def _remove(self, attempt: Attempt) -> None:
        self.running.remove(attempt)
        self._nodes.ended(attempt.node)

    def _fail(self, error: TierstoreError) -> None:
        self._drop_all()
        self.error = error.with_request_id(self.call.request_id if self.is_sent else None)

    def _drop_all(self) -> None:
        for attempt in self.running:
            attempt.dropped = True
            self._nodes.ended(attempt.node)
        self.running.clear()


class CallGroup:
    """The calls of one request. The first call that fails fails the group."""

    def __init__(
        self,
        calls: Sequence[NodeCall],
        policy: RetryPolicy,
        budget: RetryBudget,
        now: float,
        balancer: Balancer | None = None,
    ) -> None:
        route = NodeRoute(balancer or Balancer())
        self._calls = [PendingCall(call, policy, budget, now, route) for call in calls]
        self._parallel = policy.parallel
        self._received = 0
        self.starved = False  # whether an attempt waits for a connection

    def ended(self) -> bool:
        """Whether all calls have replies, or one has failed."""
        return all(call.reply is not None for call in self._calls) or self._error() is not None

    def next(self, now: float) -> Attempt | None:
        """The next attempt to start now, None if there is none."""
        busy = sum(1 for call in self._calls if call.running)
        for call in self._calls:
            if (call.running or busy < self._parallel) and call.due(now):
                return call.start(now)
        return None

    def postpone(self, attempt: Attempt) -> None:
        """No connection was free for an attempt; it waits for `resume`."""
        attempt.pending.postpone(attempt)
        self.starved = True

    def resume(self, now: float) -> None:
        """A connection may be free again."""
        if self.starved:
            self.starved = False
            for call in self._calls:
                call.resume(now)

    def wake_at(self) -> float:
        """When to look for due attempts and passed deadlines again. Calls beyond `parallel` wait for others to end."""
        busy = [call for call in self._calls if not call.done and call.running]
        waiting = [call for call in self._calls if not call.done and not call.running]
        if len(busy) >= self._parallel:
            return min([call.wake_at() for call in busy] + [call.deadline for call in waiting])
        return min(call.wake_at() for call in busy + waiting)

    def answered(self, attempt: Attempt, now: float) -> None:
        """Report that the whole answer of an attempt was received."""
        self._received += 1
        attempt.reply.order = self._received
        attempt.pending.answered(attempt, now)

    def failed(self, attempt: Attempt, error: TierstoreError, now: float, *, stale: bool = False) -> None:
        """Report that the connection of an attempt failed, see `PendingCall.failed`."""
        attempt.pending.failed(attempt, error, now, stale=stale)

    def expire(self, now: float) -> None:
        """Fail the calls whose deadline has passed."""
        for call in self._calls:
            call.expire(now)

    def replies(self) -> list[DocumentReply]:
        """All replies, in the order of the calls. Raises the error of the group if it failed."""
        error = self._error()
        if error is not None:
            raise error
        return [call.reply for call in self._calls if call.reply is not None]

    def abandon(self) -> None:
        """Drop all attempts that still run."""
        for call in self._calls:
            call.abandon()

    def _error(self) -> TierstoreError | None:
        return next((call.error for call in self._calls if call.error is not None), None)
