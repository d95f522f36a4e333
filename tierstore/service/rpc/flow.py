"""An open stream of gRPC messages: the bytes that have arrived, and the message in progress. Any thread may call
`send`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from tierstore.errors import Closed, InvalidInput, Overloaded
from tierstore.service.context import Service
from tierstore.service.limits.shedding import Gone
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.reactor.streams import Stream
from tierstore.service.rpc.caller import RpcCaller, sent_back
from tierstore.service.rpc.messages import ACCEPTED, CONTENT_TYPE, ENDS, Messages, prefixed, status_of
from tierstore.service.rpc.methods import Method

HEADERS = [(b"content-type", CONTENT_TYPE), ACCEPTED]
FIRST_S = 10.0  # for the first message of a stream to come


class Flows(Protocol):
    """The part of the calls that a stream of messages needs."""

    service: Service
    most_message: int
    closing: bool

    def authorise(self, method: Method, stream: Stream, caller: RpcCaller) -> None: ...
    def make_room(self) -> None: ...
    def to_the_end(self, flow: Flow) -> None: ...
    def forget(self, flow: Flow) -> None: ...


class Flow:
    """An open stream of messages; see `methods.MessageStream`.

    The bytes of its messages are reserved until they were handled.
    """

    def __init__(self, calls: Flows, method: Method, stream: Stream) -> None:
        """Open it. TierstoreError if it is refused."""
        self._calls, self._method, self.stream = calls, method, stream
        caller = self.caller = RpcCaller(stream, calls.service.proxies)
        calls.authorise(method, stream, caller)
        if calls.closing:
            raise Closed(ENDS)
        self._holding = Reservation(calls.service.inflight)
        self._messages = Messages(caller.coding, calls.most_message)
        calls.make_room()
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()  # when it became idle
        self.busy = self._over = self._has_ended = False
        self._owed = 0  # bytes that the client may send again once the message in progress is done
        self._when_over: Callable[[], None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        if (remaining_s := self.caller.waiting.remaining_s()) is not None:
            self._deadline = self._loop.call_later(
                max(0.0, remaining_s), self.finish, "DEADLINE_EXCEEDED", "the call's deadline passed"
            )
        self._first: asyncio.TimerHandle | None = self._loop.call_later(
            FIRST_S, self.finish, "DEADLINE_EXCEEDED", "the message did not arrive in time"
        )

    # --- from the client

    def open(self) -> None:
        self.stream.send_headers(200, HEADERS)

    def data(self, data: bytes) -> None:
        if self._over:
            return
        try:
            self._holding.reserve(len(data))
        except Overloaded as error:
            self._fail(error)
            return
        self._messages.add(data)
        self._owed += len(data)
        self._go_on()

    def no_more(self) -> None:
        self._has_ended = True
        self._go_on()

    def forget(self) -> None:
        """End its part here, because the stream is over."""
        if self._over:
            return
        self._over = True
        self._calls.forget(self)
        for timer in (self._deadline, self._first):
            if timer is not None:
                timer.cancel()
        self._holding.release()
        if self._when_over is not None:
            self._when_over()

    # --- for its method

    def caller_now(self) -> RpcCaller:
        caller = RpcCaller(self.stream, self._calls.service.proxies, arrived_ns=time.perf_counter_ns())
        self._calls.authorise(self._method, self.stream, caller)  # its token may have expired since
        caller.waiting.deadline_ns = self.caller.waiting.deadline_ns
        return caller

    def send(self, message: bytes, sent: Callable[[], None] | None = None) -> None:
        self.stream.send_data(prefixed(message), sent)

    def done(self) -> None:
        self.busy = False
        if self._over:
            return
        self.since = self._loop.time()
        self._calls.to_the_end(self)
        self._holding.release()
        try:
            self._holding.reserve(len(self._messages))
        except Overloaded as error:
            self._fail(error)
            return
        self._loop.call_soon(self._go_on)

    def when_over(self, ended: Callable[[], None]) -> None:
        self._when_over = ended

    def finish(self, code: str = "OK", details: str = "") -> None:
        if not self._over:
            self.stream.end([*status_of(code, details), *sent_back(self.caller.request_id)])
            self.forget()

    # --- its messages, one after the other

    def _go_on(self) -> None:
        if self._over:
            return
        if not self.busy:
            try:
                self._begin()
            except Gone:
                self.forget()
            except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
                self._fail(error)
        if self._owed and not (self.busy and self._messages.is_whole):
            owed, self._owed = self._owed, 0
            self.stream.consumed(owed)

    def _begin(self) -> None:
        message = self._messages.next()
        if message is not None:
            if self._first is not None:
                self._first.cancel()
                self._first = None
            self.busy = True
            assert self._method.serve is not None
            self._method.serve(message, self)
        elif self._calls.closing:
            self.finish("UNAVAILABLE", ENDS)
        elif self._has_ended:
            if len(self._messages):
                raise InvalidInput("the stream ends within a message")
            self.finish()

    def _fail(self, error: Exception) -> None:
        self.finish(*self._method.accounts.failed(self.caller, error))
