"""Requests that reactors hand off to Python; their answers go back to the reactors.

HTTP/2 hands off streams (`reactor/streams.py`): gRPC streams have their own receiver, any other is a request. The
reactor has framed an HTTP/1 request and checked its head, so Python only splits it. Event loop only, except that
threads answer the requests that were left to them.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Generator, MutableMapping
from functools import partial
from typing import Any, Protocol

from tierstore.config import Settings
from tierstore.errors import Closed, Overloaded, TierstoreError, TooLarge
from tierstore.reactor import layout as kernel
from tierstore.service.addresses import is_on_host
from tierstore.service.error_status import CUT_OFF
from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.http.messages import (
    ARRIVED,
    CLOSE,
    CONNECTION,
    FAILED,
    PEER,
    UNPLANNED,
    App,
    HttpPeer,
    Receive,
    Response,
    Scope,
    date_now,
    problem,
    response_head,
    scope_of,
    without_name,
)
from tierstore.service.limits.worker_pool import ByteBudget
from tierstore.service.reactor.reactors import Reactors
from tierstore.service.reactor.reply import Reply, split_head
from tierstore.service.reactor.streams import Stream, StreamReceiver

logger = logging.getLogger(__name__)

_JOINED_BYTES = 16 << 10  # answers up to here are copied
_NO_ROOM = "requests in progress hold as many bytes as they may (max_inflight); try again in a second"
_NOT_GRPC = (
    "this is a method of gRPC: expected the Content-Type application/grpc; gRPC-Web is not spoken here, have a proxy "
    "translate it"
)


class Answer:
    """The HTTP/1.1 connection that waits for an answer. Any thread."""

    def __init__(self, handoff: Handoff, reply: Reply, *, is_head: bool) -> None:
        self._handoff, self._reply, self._is_head = handoff, reply, is_head

    def send(self, response: Response | None) -> None:
        """Send the response; None: nobody waits for one."""
        handoff, reply = self._handoff, self._reply
        if response is None:
            reply.drop()
            return
        headers, chunks = response.pieces()
        if self._is_head:
            chunks = []
        closes = reply.closes or CLOSE in headers or handoff.ending or (handoff.draining and reply.is_last)
        head = response_head(response.status, headers, closes=closes)
        pieces: list[bytes | memoryview] = [head, *(chunk for chunk in chunks if len(chunk))]
        size = sum(map(len, pieces))
        if size <= _JOINED_BYTES:
            reply.send_copy(b"".join(pieces), closes=closes)
            return
        reply.send(pieces, handoff.hold(size), closes=closes)  # held until it is sent, however slowly the client reads


class StreamAnswer:
    """The HTTP/2 stream that waits for an answer. Any thread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def send(self, response: Response | None) -> None:
        if response is None:
            self._stream.reset()
            return
        headers, chunks = response.pieces()
        if self._stream.method == b"HEAD":
            chunks = []
        self._stream.respond(response.status, [(b"date", date_now()), *headers], chunks)


class CallReceiver(StreamReceiver, Protocol):
    """Receives the streams of gRPC."""

    def has(self, path: bytes) -> bool:
        """Whether a path is a method's."""


class RequestDispatch:
    """Receives streams: gRPC streams go to `calls`, the others are whole requests for `handoff`."""

    def __init__(self, handoff: Handoff, calls: CallReceiver | None) -> None:
        self._handoff, self._calls = handoff, calls

    def request(self, stream: Stream, body: bytes) -> None:
        if not stream.is_grpc:
            if self._calls is not None and self._calls.has(stream.path):
                StreamAnswer(stream).send(problem(415, _NOT_GRPC))
            else:
                self._handoff.stream(stream, body)
        elif self._calls is not None:
            self._calls.request(stream, body)
        else:
            stream.respond(200, [(b"content-type", b"application/grpc"), (b"grpc-status", b"12")])

    def opened(self, stream: Stream) -> None:
        if self._calls is not None:
            self._calls.opened(stream)

    def data(self, stream: Stream, data: bytes) -> None:
        if self._calls is not None:
            self._calls.data(stream, data)

    def ended(self, stream: Stream) -> None:
        if self._calls is not None:
            self._calls.ended(stream)

    def lost(self, stream: Stream) -> None:
        if self._calls is not None and stream.is_grpc:
            self._calls.lost(stream)


def _whole(body: memoryview) -> Receive:
    """A `receive` for a body that is there."""

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _failing(error: TierstoreError) -> Receive:
    """A `receive` that raises an error in place of a body."""

    async def receive() -> MutableMapping[str, Any]:
        raise error

    return receive


class _Run:
    """A request that the application answers. It begins without a task, as most end where they begin.

    One thread at a time: the event loop, then perhaps the thread that has a look-up's answer.
    """

    def __init__(
        self, answer: Answer | StreamAnswer, path: str, coroutine: Coroutine[Any, Any, Response | None]
    ) -> None:
        self._answer, self._path, self._coroutine = answer, path, coroutine
        self.context = contextvars.copy_context()
        self.has_ended = False

    def step(self, value: Any = None, error: BaseException | None = None) -> Any:
        """Go on, with the awaited value. Returns what is awaited next: a future, the handover of a look-up, or None."""
        try:
            if error is not None:
                return self.context.run(self._coroutine.throw, error)
            return self.context.run(self._coroutine.send, value)
        except StopIteration as end:
            self._end(end.value)
        except Exception:  # noqa: BLE001 - the last place where an error can still be answered
            self._end(self._failed())
        return None

    async def end(self, awaited: Any) -> None:
        """Go on, in a task, to the end."""
        try:
            response = await _Resumed(self._coroutine, awaited)
        except Exception:  # noqa: BLE001 - as above
            response = self._failed()
        self._end(response)

    def _failed(self) -> Response:
        logger.exception("a request to %s failed", self._path)
        return Response(500, [b"Internal Server Error"], b"text/plain; charset=utf-8", [CLOSE])

    def _end(self, response: Response | None) -> None:
        """Send the response; if that fails, an error, or nothing: while Python has a request, it has no deadline."""
        self.has_ended = True
        try:
            self._answer.send(response)
        except Exception:  # noqa: BLE001 - as above
            try:
                self._answer.send(self._failed())
            except Exception:
                logger.exception("a request to %s is not answered", self._path)
                self._answer.send(None)


class _Resumed:
    """A coroutine that has begun already and awaits something, to be awaited in a task."""

    def __init__(self, coroutine: Coroutine[Any, Any, Response | None], awaited: Any) -> None:
        self._coroutine, self._awaited = coroutine, awaited

    def __await__(self) -> Generator[Any, Any, Response | None]:
        awaited, error = self._awaited, None
        while True:
            try:
                yield awaited
                error = None
            except BaseException as caught:  # noqa: BLE001 - the coroutine's own
                error = caught
            try:
                awaited = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                response: Response | None = end.value
                return response


class Handoff:
    """Passes requests from `reactors` to the application `app`, and to that of `limit` for connections beyond it."""

    def __init__(
        self, reactors: Reactors, app: App, limit: ConnectionLimit, inflight: ByteBudget, settings: Settings
    ) -> None:
        self._reactors, self._app, self._limit, self._inflight = reactors, app, limit, inflight
        self._too_large = (
            f"the body has more bytes than are allowed: {settings.max_request} (max_request), or for a delta "
            f"{settings.max_delta} (max_delta)"
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        # guarded by _lock
        self._left: dict[_Run, None] = {}  # requests that a thread may answer
        self._cut = False  # whether the time for all requests is over
        self.draining = False  # whether answers end connections on which nothing more has come
        self.ending = False  # whether answers end their connections

    @property
    def busy(self) -> bool:
        """Whether a request is in progress, or an answer is not sent yet."""
        reactors = self._reactors
        return bool(
            self._tasks
            or self._left
            or reactors.lanes
            or reactors.sending
            or reactors.unsent_bytes
            or len(reactors.streams)
        )

    def refused(self, fd: int) -> None:
        """Handle a connection beyond the limit: a silent one makes room for it, or it is refused."""
        if self._limit.make_room():
            self._reactors.serve_connection(fd)
        elif self._limit.refuse():
            self._reactors.serve_connection(fd, refused=True)
        else:
            os.close(fd)

    def request(self, reply: Reply, data: bytes) -> None:
        """Answer an HTTP/1 request."""
        try:
            self._request(reply, data)
        except Exception:
            logger.exception("a request is not answered")
            reply.drop()

    def _request(self, reply: Reply, data: bytes) -> None:
        first, headers, body_at = split_head(data)
        method, target, version = first.split(b" ")
        if not target.startswith(b"/"):
            target, headers = without_name(target, headers)
        path, _, query = target.partition(b"#")[0].partition(b"?")
        scope = scope_of(version[5:].decode(), method, path, query, headers)
        scope[ARRIVED], scope[CONNECTION] = reply.began_ns or time.perf_counter_ns(), reply
        scope[UNPLANNED] = reply.reason in (kernel.NO_PLAN, kernel.ACCESS)
        scope[PEER] = HttpPeer(names=reply.peer_names, on_host=reply.on_host)
        if reply.error is not None:
            scope[FAILED] = reply.error
        if reply.has_body:
            receive = _whole(memoryview(data)[body_at:])
        else:
            receive = _failing(TooLarge(self._too_large) if reply.reason == kernel.SIZE else Overloaded(_NO_ROOM))
        app = self._limit.refusal.app if reply.is_refused else self._app
        self._begin(Answer(self, reply, is_head=method == b"HEAD"), scope, receive, app)

    def stream(self, stream: Stream, body: bytes) -> None:
        """Answer a whole HTTP/2 request."""
        try:
            self._request_of(stream, body)
        except Exception:
            logger.exception("a request to %s is not answered", stream.path.decode("latin-1"))
            stream.reset()

    def _request_of(self, stream: Stream, body: bytes) -> None:
        path, _, query = stream.path.partition(b"?")
        headers = stream.headers
        if stream.authority and all(name != b"host" for name, _ in headers):
            headers = [(b"host", stream.authority), *headers]
        with stream.connection() as connection:
            on_host = connection is not None and is_on_host(connection)
        scope = scope_of("2", stream.method, path, query, headers)
        scope[ARRIVED], scope[CONNECTION] = stream.arrived_ns, stream
        scope[PEER] = HttpPeer(False, stream.peer_names, on_host)
        answer = StreamAnswer(stream)
        self._begin(
            answer, scope, _failing(TooLarge(self._too_large)) if stream.too_large else _whole(memoryview(body))
        )

    def _begin(self, answer: Answer | StreamAnswer, scope: Scope, receive: Receive, app: App | None = None) -> None:
        if self._cut and FAILED not in scope:
            answer.send(None)
            return
        self._go_on(_Run(answer, scope["path"], (app or self._app)(scope, receive)))

    def _go_on(self, run: _Run) -> None:
        """Run a request as far as possible, and arrange for it to go on."""
        awaited = run.step()
        while callable(awaited):
            self._left[run] = None
            try:
                awaited(partial(self._answer_left, run))
                return
            except Exception as error:  # noqa: BLE001 - the request's own, which it answers
                del self._left[run]
                awaited = run.step(error=error)
        if not run.has_ended:
            task = asyncio.get_running_loop().create_task(run.end(awaited), context=run.context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _answer_left(self, run: _Run, answer: Any, error: BaseException | None) -> None:
        """Go on with a request that was left to a thread, unless its time is over. Any thread."""
        with self._lock:
            is_left = run in self._left
            self._left.pop(run, None)
        if is_left:
            run.step(answer, error)

    def cut_off(self) -> None:
        """Answer requests in progress in place of their threads. Once; afterwards none is left."""
        if self._cut:
            return
        self._cut = True
        with self._lock:
            left, self._left = list(self._left), {}
        for run in left:
            run.step(error=asyncio.CancelledError())
        for task in self._tasks:
            task.cancel()
        self._reactors.cut_off(Closed(CUT_OFF))

    def hold(self, size: int) -> Callable[[], None]:
        """Count so many bytes of an answer. Call the result once they were sent."""
        self._inflight.hold(size)
        return partial(self._inflight.release, size)
