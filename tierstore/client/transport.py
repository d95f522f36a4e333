"""Carries operations out over HTTP, for threads: the calling thread does all of the work, there are no others.

Any thread may use a `Transport`; the parts of one request go out side by side on several connections.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from tierstore.client.attempts import Attempt, CallGroup, NodeCall, RetryBudget
from tierstore.client.balancing import Balancer
from tierstore.client.connections import ConnectionPool, ServiceConnection
from tierstore.client.inference import Operation, Pause, T
from tierstore.client.replies import DocumentReply
from tierstore.client.settings import ClientSettings
from tierstore.errors import TierstoreError

POOL_S = 0.002  # how often a request that has connections, but could use another, looks for a free one


class Transport:
    """The connections of one client."""

    def __init__(self, settings: ClientSettings, budget: RetryBudget, balancer: Balancer) -> None:
        self._settings, self._budget, self._balancer = settings, budget, balancer
        self._pools = [ConnectionPool(node, settings.max_connections) for node in settings.nodes]

    def stats(self) -> dict[str, int]:
        """How full the pools of connections are, all nodes together: `busy`, `idle`, `limit`."""
        return sum_stats([pool.stats() for pool in self._pools])

    def close(self) -> None:
        """Close the connections; requests that other threads have started still end."""
        for pool in self._pools:
            pool.close()

    def run(self, operation: Operation[T]) -> T:
        """Carry out the steps of an operation and return its result."""
        replies: list[DocumentReply] | None = None
        error: TierstoreError | None = None
        try:
            while True:
                step = operation.send(replies) if error is None else operation.throw(error)
                replies, error = None, None
                try:
                    if isinstance(step, Pause):
                        time.sleep(step.seconds)
                    else:
                        replies = self._exchange(step)
                except TierstoreError as failure:
                    error = failure
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            operation.close()

    def _exchange(self, calls: Sequence[NodeCall]) -> list[DocumentReply]:
        """Carry out the calls side by side, retries included."""
        group = CallGroup(calls, self._settings.retry, self._budget, time.monotonic(), self._balancer)
        busy: list[ServiceConnection] = []
        try:
            while not group.ended():
                now = time.monotonic()
                group.expire(now)
                group.resume(now)
                self._close_dropped(busy)
                while (attempt := group.next(now)) is not None:
                    connection = self._start(group, attempt, wait=not busy)
                    if connection is None:
                        break
                    busy.append(connection)
                if not group.ended():
                    self._wait(group, busy)
            return group.replies()
        finally:
            group.abandon()
            self._close_dropped(busy)

    def _start(self, group: CallGroup, attempt: Attempt, *, wait: bool) -> ServiceConnection | None:
        """Send the attempt. Returns its connection; None if there is none."""
        pool = self._pools[attempt.node]
        try:
            connection = pool.acquire(fresh=attempt.fresh, wait=wait, until=attempt.pending.deadline)
        except TierstoreError as error:
            group.failed(attempt, error, time.monotonic())
            return None
        if connection is None:
            group.postpone(attempt)
            return None
        try:
            connection.begin(attempt, attempt.head(pool.node))
        except TierstoreError as error:
            group.failed(attempt, error, time.monotonic(), stale=connection.stale)
            connection.pool.drop(connection)
            return None
        return connection

    def _wait(self, group: CallGroup, busy: list[ServiceConnection]) -> None:
        """Wait until a connection is ready or an attempt is due, and move the data of those that are ready."""
        wait_s = group.wake_at() - time.monotonic()
        if group.starved:
            wait_s = min(wait_s, POOL_S)
        if not busy:
            if wait_s > 0:
                time.sleep(wait_s)
            return
        for connection in _ready(busy, max(0.0, wait_s)):
            attempt = connection.attempt
            assert attempt is not None
            if attempt.dropped:
                continue
            try:
                if not connection.pump():
                    continue
            except TierstoreError as error:
                busy.remove(connection)
                group.failed(attempt, error, time.monotonic(), stale=connection.stale)
                connection.pool.drop(connection)
            else:
                busy.remove(connection)
                group.answered(attempt, time.monotonic())
                connection.pool.release(connection)

    def _close_dropped(self, busy: list[ServiceConnection]) -> None:
        for connection in [one for one in busy if one.attempt is None or one.attempt.dropped]:
            busy.remove(connection)
            connection.pool.drop(connection)


def sum_stats(stats: Sequence[dict[str, int]]) -> dict[str, int]:
    """The sums of what each pool of connections says of itself."""
    return {name: sum(one[name] for one in stats) for name in stats[0]}


def _ready(connections: list[ServiceConnection], timeout_s: float) -> list[ServiceConnection]:
    if len(connections) == 1:
        return connections[:] if connections[0].wait(timeout_s) else []
    poll = select.poll()
    for connection in connections:
        poll.register(connection, connection.poll_events)
    ready = {descriptor for descriptor, _ in poll.poll(timeout_s * 1e3)}
    return [connection for connection in connections if connection.fileno() in ready]
