"""Carries operations out over HTTP, for asyncio.

An `AsyncTransport` belongs to one event loop, whose tasks share it. The bytes of an answer go from the socket straight
into the arrays (`asyncio.BufferedProtocol`). A cancelled operation closes the connections that it was using.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from tierstore.client.aio_connecting import addresses_of, first_connected
from tierstore.client.attempts import Attempt, CallGroup, NodeCall, RetryBudget
from tierstore.client.balancing import Balancer
from tierstore.client.inference import Operation, Pause, T
from tierstore.client.replies import DocumentReply
from tierstore.client.settings import CONNECT_TIMEOUT_S, ClientSettings, Node
from tierstore.client.transport import sum_stats
from tierstore.client.unreachable import connection_lost, not_connected
from tierstore.errors import Closed, InvalidInput, TierstoreError, Unreachable
from tierstore.forks import renew_in_child
from tierstore.http1 import Incoming


class AsyncTransport:
    """The connections of one client."""

    def __init__(self, settings: ClientSettings, budget: RetryBudget, balancer: Balancer) -> None:
        self._settings, self._budget, self._balancer = settings, budget, balancer
        self._pools = [_Pool(node, settings.max_connections) for node in settings.nodes]

    def stats(self) -> dict[str, int]:
        """How full the pools of connections are, all nodes together: `busy`, `idle`,
        `limit`, and requests `waiting`.
        """
        return sum_stats([pool.stats() for pool in self._pools])

    async def close(self) -> None:
        """Close the idle connections; operations that have started still end."""
        for pool in self._pools:
            pool.close()
        await asyncio.sleep(0)  # transports close in the loop's next round

    async def run(self, operation: Operation[T]) -> T:
        """Carry out the steps of an operation and return its result."""
        replies: list[DocumentReply] | None = None
        error: TierstoreError | None = None
        try:
            while True:
                step = operation.send(replies) if error is None else operation.throw(error)
                replies, error = None, None
                try:
                    if isinstance(step, Pause):
                        await asyncio.sleep(step.seconds)
                    else:
                        replies = await self._exchange(step)
                except TierstoreError as failure:
                    error = failure
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            operation.close()

    async def _exchange(self, calls: Sequence[NodeCall]) -> list[DocumentReply]:
        for pool in self._pools:
            pool.check_loop()
        group = CallGroup(calls, self._settings.retry, self._budget, time.monotonic(), self._balancer)
        return await _Exchange(self._pools, group).run()


class _Connection(asyncio.BufferedProtocol):
    """One connection to the service. All of it runs on the event loop."""

    def __init__(self, pool: _Pool) -> None:
        self.pool = pool
        self._incoming = Incoming()
        self._scratch = memoryview(bytearray(64))  # receives bytes that no request asked for
        self._transport: Any = None
        self._exchange: _Exchange | None = None
        self.attempt: Attempt | None = None
        self.uses = 0
        self.lost = False

    @property
    def stale(self) -> bool:
        """Whether it was used before and not a byte of this answer arrived: the service had closed it, it seems."""
        return self.uses > 1 and not self._incoming.started

    @property
    def reusable(self) -> bool:
        if self.lost or not (self._incoming.idle and self._incoming.reusable):
            return False
        return not self._transport.get_write_buffer_size()

    def begin(self, exchange: _Exchange, attempt: Attempt, head: bytes) -> None:
        """Send an attempt; `exchange` is notified of its end."""
        self._exchange, self.attempt = exchange, attempt
        self.uses += 1
        self._incoming.expect(attempt.reply)
        self._transport.writelines([head, *attempt.outgoing.pieces])

    def close(self) -> None:
        self._exchange = self.attempt = None
        self._incoming.forget()
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._incoming.idle else self._incoming.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._took(lambda: self._incoming.received(nbytes))

    def eof_received(self) -> bool:
        self._took(self._incoming.closed)
        return False

    def _took(self, completes: Callable[[], bool]) -> None:
        try:
            if completes():
                self._end(None)
        except TierstoreError as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        heard = self.uses > 1 or self._incoming.started
        self._end(connection_lost(self.pool.node.address, exc, heard=heard))

    def _end(self, error: TierstoreError | None) -> None:
        exchange, attempt = self._exchange, self.attempt
        self._exchange = self.attempt = None
        if exchange is not None and attempt is not None:
            exchange.ended(self, attempt, error)
        elif not self.lost:
            self.close()  # it sent bytes that no request asked for


class _Pool:
    """At most `limit` connections of one event loop. Exchanges that wait for one are served in order."""

    def __init__(self, node: Node, limit: int) -> None:
        self.node, self.limit = node, limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: list[_Connection] = []
        self._busy = 0
        self._waiting: deque[_Exchange] = deque()
        self._closed = False
        renew_in_child(self)

    def renew(self) -> None:
        """The loop and its connections are the parent's."""
        self._loop, self._idle, self._busy, self._waiting = None, [], 0, deque()

    def stats(self) -> dict[str, int]:
        return {"busy": self._busy, "idle": len(self._idle), "limit": self.limit, "waiting": len(self._waiting)}

    def check_loop(self) -> None:
        """Closed after `close`; InvalidInput in a second event loop while the first still runs."""
        if self._closed:
            raise Closed("the client was closed")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise InvalidInput("an AsyncClient belongs to one event loop; make one for each")
            self._loop, self._idle, self._busy, self._waiting = loop, [], 0, deque()

    def acquire(self, exchange: _Exchange, *, fresh: bool) -> tuple[bool, _Connection | None]:
        """(whether a slot is reserved, an open connection if there is one).

        Without a slot, `exchange` gets the next one.
        """
        if exchange.granted[self]:
            connection = exchange.granted[self].pop()
        elif not self._waiting and (self._idle or self._busy < self.limit):
            connection = self._idle.pop() if self._idle else None
            self._busy += 1
        else:
            if exchange not in self._waiting:
                self._waiting.append(exchange)
            return False, None
        while connection is not None and (fresh or connection.lost):
            connection.close()
            connection = self._idle.pop() if self._idle else None
        return True, connection

    def release(self, connection: _Connection | None) -> None:
        """Return a slot, and its connection if that can be used again."""
        if connection is not None and (self._closed or not connection.reusable):
            connection.close()
            connection = None
        if self._waiting:
            self._waiting.popleft().grant(self, connection)
            return
        self._busy -= 1
        if connection is not None:
            self._idle.append(connection)

    def stop_waiting(self, exchange: _Exchange) -> None:
        """Return what was granted to `exchange`, and grant it nothing more."""
        if exchange in self._waiting:
            self._waiting.remove(exchange)
        while exchange.granted[self]:
            self.release(exchange.granted[self].pop())

    async def connect(self, timeout_s: float) -> _Connection:
        """Open a connection. Raises Unreachable."""
        address, tls, loop = self.node.address, self.node.tls, self._loop
        assert loop is not None
        try:
            async with asyncio.timeout(min(timeout_s, CONNECT_TIMEOUT_S)):
                if address.socket is not None:
                    _, connection = await loop.create_unix_connection(lambda: _Connection(self), address.socket)
                else:
                    sock = await first_connected(loop, await addresses_of(address, loop))
                    name = None if tls is None else address.host
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self), sock=sock, ssl=tls, server_hostname=name
                    )
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            raise not_connected(address, error) from error
        return connection

    def close(self) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class _Exchange:
    """Carries out the calls of one request, in the task that awaits them."""

    def __init__(self, pools: Sequence[_Pool], group: CallGroup) -> None:
        self._pools, self._group = pools, group
        self._loop = asyncio.get_running_loop()
        self._wakeup: asyncio.Future[None] | None = None
        self._busy: list[_Connection] = []
        self._ended: list[tuple[_Connection, Attempt, TierstoreError | None]] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self.granted: defaultdict[_Pool, list[_Connection | None]] = defaultdict(list)

    async def run(self) -> list[DocumentReply]:
        group = self._group
        try:
            while not group.ended():
                now = time.monotonic()
                group.expire(now)
                group.resume(now)
                self._close_dropped()
                while (attempt := group.next(now)) is not None:
                    if not self._start(attempt):
                        break
                if group.ended():
                    break
                await self._wait(group.wake_at() - time.monotonic())
                ended, self._ended = self._ended, []
                for connection, attempt, error in ended:
                    self._finish(connection, attempt, error)
            return group.replies()
        finally:
            group.abandon()
            for task in self._connecting:
                task.cancel()
            ended, self._ended = self._ended, []
            for connection in [*self._busy, *(connection for connection, _, _ in ended)]:
                connection.close()
                connection.pool.release(connection)
            for pool in self._pools:
                pool.stop_waiting(self)

    # --- called by the pool and the connections, on the same loop

    def ended(self, connection: _Connection, attempt: Attempt, error: TierstoreError | None) -> None:
        """An attempt has its answer, or failed with `error`."""
        self._busy.remove(connection)
        self._ended.append((connection, attempt, error))
        self._wake()

    def grant(self, pool: _Pool, connection: _Connection | None) -> None:
        """The slot of `pool` that was waited for is free."""
        self.granted[pool].append(connection)
        self._wake()

    # --- inside

    def _start(self, attempt: Attempt) -> bool:
        reserved, connection = self._pools[attempt.node].acquire(self, fresh=attempt.fresh)
        if not reserved:
            self._group.postpone(attempt)
            return False
        if connection is not None:
            self._send(connection, attempt)
            return True
        task = self._loop.create_task(self._connect(attempt))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, attempt: Attempt) -> None:
        connection, pool = None, self._pools[attempt.node]
        try:
            connection = await pool.connect(max(0.001, attempt.pending.deadline - time.monotonic()))
        except Unreachable as error:
            self._group.failed(attempt, error, time.monotonic())
        finally:
            if connection is None or attempt.dropped:
                if connection is not None:
                    connection.close()
                pool.release(None)
            else:
                self._send(connection, attempt)
            self._wake()

    def _send(self, connection: _Connection, attempt: Attempt) -> None:
        self._busy.append(connection)
        connection.begin(self, attempt, attempt.head(connection.pool.node))

    def _finish(self, connection: _Connection, attempt: Attempt, error: TierstoreError | None) -> None:
        if error is None:
            self._group.answered(attempt, time.monotonic())
        else:
            self._group.failed(attempt, error, time.monotonic(), stale=connection.stale)
            connection.close()
        connection.pool.release(connection)

    def _close_dropped(self) -> None:
        for connection in [one for one in self._busy if one.attempt is None or one.attempt.dropped]:
            self._busy.remove(connection)
            connection.close()
            connection.pool.release(connection)

    async def _wait(self, seconds: float) -> None:
        """Wait until an attempt has ended, a slot was granted, or the time is over."""
        if self._ended or any(self.granted.values()):
            return
        self._wakeup = self._loop.create_future()
        timer = None if seconds > 3600 else self._loop.call_later(max(0.0, seconds), self._wake)
        try:
            await self._wakeup
        finally:
            self._wakeup = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
