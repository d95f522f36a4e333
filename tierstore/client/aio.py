"""`AsyncClient`: the verbs of a store, over HTTP, for asyncio.

One client belongs to one event loop; any number of its tasks may share it. Bytes go from the socket straight into the
arrays (`asyncio.BufferedProtocol`). A verb that is cancelled closes the connections it was using.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tierstore.client.address import CONNECT_TIMEOUT_S, Address
from tierstore.client.face import Face
from tierstore.client.flights import Attempt, Call, Group
from tierstore.client.http1 import Incoming
from tierstore.client.replies import Reply
from tierstore.client.signatures import AwaitedVerbs
from tierstore.client.steps import Pause, Steps
from tierstore.errors import Closed, InvalidInput, TierstoreError, Unreachable


class AsyncClient(AwaitedVerbs):
    __doc__ = (
        f"{Face.__doc__}\n\n    Every verb is to be awaited; `model`, `figures` and the making of the client are not."
    )

    def _open(self) -> None:
        self._pool = _Pool(self._address, self._settings.max_connections)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; verbs under way still end. May be called twice."""
        await self._run(self._shared.close())
        self._pool.close()
        await asyncio.sleep(0)  # transports close in the loop's next round

    def _connections(self) -> dict[str, int]:
        return self._pool.figures()

    async def _run(self, steps: Steps) -> Any:
        """Carry out what the verb asks for, step by step."""
        answer: Any = None
        error: TierstoreError | None = None
        try:
            while True:
                step = steps.send(answer) if error is None else steps.throw(error)
                answer, error = None, None
                try:
                    if isinstance(step, Pause):
                        await asyncio.sleep(step.seconds)
                    else:
                        answer = await self._exchange(step)
                except TierstoreError as failed:
                    error = failed
        except StopIteration as done:
            return done.value
        finally:
            steps.close()

    async def _exchange(self, calls: Sequence[Call]) -> list[Reply]:
        self._pool.use_here()
        group = Group(calls, self._settings.policy, self._budget, time.monotonic())
        return await _Carrier(self._pool, group, self._fields).run()


class _Link(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self) -> None:
        self._incoming = Incoming()
        self._spare = memoryview(bytearray(64))
        self._transport: Any = None
        self._carrier: _Carrier | None = None
        self.attempt: Attempt | None = None
        self.uses = 0
        self.lost = False

    @property
    def stale(self) -> bool:
        """Whether it failed as an old connection does that the other side had closed."""
        return self.uses > 1 and not self._incoming.begun

    @property
    def reusable(self) -> bool:
        if self.lost or not (self._incoming.idle and self._incoming.reusable):
            return False
        return not self._transport.get_write_buffer_size()

    def begin(self, carrier: _Carrier, attempt: Attempt, head: bytes) -> None:
        self._carrier, self.attempt = carrier, attempt
        self.uses += 1
        self._incoming.expect(attempt.reply)
        self._transport.writelines([head, *attempt.outgoing.pieces])

    def close(self) -> None:
        self._carrier = self.attempt = None
        self._incoming.forget()
        self.lost = True
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._spare if self._incoming.idle else self._incoming.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._incoming.received(nbytes):
                self._end(None)
        except TierstoreError as error:
            self._end(error)

    def eof_received(self) -> bool:
        if self._incoming.closed():
            self._end(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        why = "the service closed the connection before it answered" if exc is None else f"the connection failed: {exc}"
        self._end(Unreachable(why))

    def _end(self, error: TierstoreError | None) -> None:
        carrier, attempt = self._carrier, self.attempt
        self._carrier = self.attempt = None
        if carrier is not None and attempt is not None:
            carrier.ended(self, attempt, error)
        elif not self.lost:
            self.close()  # it says what nobody has asked


class _Pool:
    """At most `most` connections of one event loop. Those that wait for one are served in their order."""

    def __init__(self, address: Address, most: int) -> None:
        self.address, self.most = address, most
        self._tls = address.tls_context()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: list[_Link] = []
        self._taken = 0
        self._waiting: deque[_Carrier] = deque()
        self._closed = False

    def figures(self) -> dict[str, int]:
        return {"busy": self._taken, "idle": len(self._idle), "limit": self.most, "waiting": len(self._waiting)}

    def use_here(self) -> None:
        """Closed after `close`; InvalidInput in a second event loop while the first still runs."""
        if self._closed:
            raise Closed("the client was closed")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise InvalidInput("an AsyncClient belongs to one event loop; make one for each")
            self._loop, self._idle, self._taken, self._waiting = loop, [], 0, deque()

    def take(self, carrier: _Carrier, *, fresh: bool) -> tuple[bool, _Link | None]:
        """(whether there is a place, a connection that is open). Without a place, the carrier is told of the next."""
        if carrier.granted:
            link = carrier.granted.pop()
        elif not self._waiting and (self._idle or self._taken < self.most):
            link = self._idle.pop() if self._idle else None
            self._taken += 1
        else:
            if carrier not in self._waiting:
                self._waiting.append(carrier)
            return False, None
        while link is not None and (fresh or link.lost):
            link.close()
            link = self._idle.pop() if self._idle else None
        return True, link

    def release(self, link: _Link | None) -> None:
        """Give a place back, with its connection if that is still good."""
        if link is not None and (self._closed or not link.reusable):
            link.close()
            link = None
        if self._waiting:
            self._waiting.popleft().grant(link)
            return
        self._taken -= 1
        if link is not None:
            self._idle.append(link)

    def leave(self, carrier: _Carrier) -> None:
        """Wait no more."""
        if carrier in self._waiting:
            self._waiting.remove(carrier)
        while carrier.granted:
            self.release(carrier.granted.pop())

    async def connect(self, timeout_s: float) -> _Link:
        address = self.address
        assert self._loop is not None
        name = address.host if self._tls is not None else None
        try:
            async with asyncio.timeout(min(timeout_s, CONNECT_TIMEOUT_S)):
                _, link = await self._loop.create_connection(
                    _Link, address.host, address.port, ssl=self._tls, server_hostname=name
                )
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            raise Unreachable(f"no service answers at {address.url}: {error}") from error
        return link

    def close(self) -> None:
        self._closed = True
        idle, self._idle = self._idle, []
        for link in idle:
            link.close()


class _Carrier:
    """Carries the calls of one request, in the task that asked for it."""

    def __init__(self, pool: _Pool, group: Group, fields: str) -> None:
        self._pool, self._group, self._fields = pool, group, fields
        self._loop = asyncio.get_running_loop()
        self._waker: asyncio.Future[None] | None = None
        self._busy: list[_Link] = []
        self._ended: list[tuple[_Link, Attempt, TierstoreError | None]] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self.granted: list[_Link | None] = []

    async def run(self) -> list[Reply]:
        group = self._group
        try:
            while not group.ended():
                now = time.monotonic()
                group.expire(now)
                group.resume(now)
                self._drop_unwanted()
                while (attempt := group.next(now)) is not None:
                    if not self._begin(attempt):
                        break
                if group.ended():
                    break
                await self._wait(group.wake_at() - time.monotonic())
                ended, self._ended = self._ended, []
                for link, attempt, error in ended:
                    self._settle(link, attempt, error)
            return group.replies()
        finally:
            group.abandon()
            for task in self._connecting:
                task.cancel()
            ended, self._ended = self._ended, []
            for link in [*self._busy, *(link for link, _, _ in ended)]:
                link.close()
                self._pool.release(link)
            self._pool.leave(self)

    # --- what the pool and the links call, on the same loop

    def ended(self, link: _Link, attempt: Attempt, error: TierstoreError | None) -> None:
        """A link is done with an attempt, for good or bad."""
        self._busy.remove(link)
        self._ended.append((link, attempt, error))
        self._wake()

    def grant(self, link: _Link | None) -> None:
        """The place that was waited for."""
        self.granted.append(link)
        self._wake()

    # --- inside

    def _begin(self, attempt: Attempt) -> bool:
        there, link = self._pool.take(self, fresh=attempt.fresh)
        if not there:
            self._group.put_back(attempt)
            return False
        if link is not None:
            self._send(link, attempt)
            return True
        task = self._loop.create_task(self._connect(attempt))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, attempt: Attempt) -> None:
        link = None
        try:
            link = await self._pool.connect(max(0.001, attempt.flight.deadline - time.monotonic()))
        except Unreachable as error:
            self._group.failed(attempt, error, time.monotonic())
        finally:
            if link is None or attempt.dropped:
                if link is not None:
                    link.close()
                self._pool.release(None)
            else:
                self._send(link, attempt)
            self._wake()

    def _send(self, link: _Link, attempt: Attempt) -> None:
        self._busy.append(link)
        link.begin(self, attempt, attempt.head(self._pool.address, self._fields))

    def _settle(self, link: _Link, attempt: Attempt, error: TierstoreError | None) -> None:
        if error is None:
            self._group.answered(attempt, time.monotonic())
        else:
            self._group.failed(attempt, error, time.monotonic(), stale=link.stale)
            link.close()
        self._pool.release(link)

    def _drop_unwanted(self) -> None:
        for link in [link for link in self._busy if link.attempt is None or link.attempt.dropped]:
            self._busy.remove(link)
            link.close()
            self._pool.release(link)

    async def _wait(self, seconds: float) -> None:
        """Until something ended, a place came free, or the time is over."""
        if self._ended or self.granted:
            return
        self._waker = self._loop.create_future()
        timer = None if seconds > 3600 else self._loop.call_later(max(0.0, seconds), self._wake)
        try:
            await self._waker
        finally:
            self._waker = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)
