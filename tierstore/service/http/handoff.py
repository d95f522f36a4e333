"""Requests that reactors hand off to Python; their answers go back to the reactors.

HTTP/2 hands off streams (`reactor/streams.py`): gRPC streams have their own receiver, any other is a request. The
reactor has framed an HTTP/1 request and checked its head, so Python only splits it. Event loop only; the thread that
has a response sends it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Protocol

from tierstore.config import Settings
from tierstore.errors import Closed, Overloaded, TooLarge
from tierstore.reactor import layout as kernel
from tierstore.service.addresses import is_on_host
from tierstore.service.error_status import CUT_OFF
from tierstore.service.http.application import HttpRequest
from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.http.messages import (
    ARRIVED,
    CLOSE,
    CONNECTION,
    FAILED,
    PEER,
    UNPLANNED,
    HttpPeer,
    Receive,
    Response,
    Scope,
    date_now,
    failed_response,
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


class RootApplication(Protocol):
    """Answers requests over HTTP, see `service/root.py`."""

    def open(self, scope: Scope) -> HttpRequest | None: ...
    def begin(self, request: HttpRequest, done: Callable[[Response | None], None]) -> None: ...
    def cut_off(self, scope: Scope) -> Response: ...
    async def __call__(self, scope: Scope, receive: Receive) -> Response | None: ...


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


def _received(body: memoryview | Exception) -> Receive:
    """A `receive` for a body that is there, or that has failed."""

    async def receive() -> MutableMapping[str, Any]:
        if isinstance(body, Exception):
            raise body
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


class Handoff:
    """Has requests from `reactors` answered by `root`, and by `limit` those of connections beyond it."""

    def __init__(
        self,
        reactors: Reactors,
        root: RootApplication,
        limit: ConnectionLimit,
        inflight: ByteBudget,
        settings: Settings,
    ) -> None:
        self._reactors, self._root, self._limit, self._inflight = reactors, root, limit, inflight
        self._too_large = (
            f"the body has more bytes than are allowed: {settings.max_request} (max_request), or for a delta "
            f"{settings.max_delta} (max_delta)"
        )
        self._tasks: set[asyncio.Task[None]] = set()
        # who removes a request answers it: its thread, or the loop when its time is over
        self._unanswered: dict[HttpRequest, Answer | StreamAnswer] = {}
        self._cut = False  # whether the time for all requests is over
        self.draining = False  # whether answers end connections on which nothing more has come
        self.ending = False  # whether answers end their connections

    @property
    def busy(self) -> bool:
        """Whether a request is in progress, or an answer is not sent yet."""
        reactors = self._reactors
        return bool(
            self._tasks
            or self._unanswered
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
        answer = Answer(self, reply, is_head=method == b"HEAD")
        if reply.is_refused:
            _send(answer, scope, self._limit.refusal.answer(scope))
        elif reply.has_body:
            self._begin(answer, scope, memoryview(data)[body_at:])
        else:
            no_room = TooLarge(self._too_large) if reply.reason == kernel.SIZE else Overloaded(_NO_ROOM)
            self._begin(answer, scope, no_room)

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
        self._begin(StreamAnswer(stream), scope, TooLarge(self._too_large) if stream.too_large else memoryview(body))

    def _begin(self, answer: Answer | StreamAnswer, scope: Scope, body: memoryview | Exception) -> None:
        if self._cut and FAILED not in scope:
            answer.send(None)
            return
        request = self._root.open(scope)
        if request is None:
            task = asyncio.get_running_loop().create_task(self._await(answer, scope, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        request.take(body)
        self._unanswered[request] = answer
        self._root.begin(request, partial(self._answered, request))

    def _answered(self, request: HttpRequest, response: Response | None) -> None:
        """Send a response, unless the time of its request is over. Any thread."""
        answer = self._unanswered.pop(request, None)
        if answer is not None:
            _send(answer, request.scope, response)

    async def _await(self, answer: Answer | StreamAnswer, scope: Scope, body: memoryview | Exception) -> None:
        """Answer a request to the admin application."""
        try:
            response = await self._root(scope, _received(body))
        except Exception:  # noqa: BLE001 - the last place where an error can still be answered
            response = failed_response(scope["path"])
        _send(answer, scope, response)

    def cut_off(self) -> None:
        """Answer requests in progress in place of their threads. Once; afterwards none is left."""
        if self._cut:
            return
        self._cut = True
        for request in list(self._unanswered):
            if (answer := self._unanswered.pop(request, None)) is not None:
                _send(answer, request.scope, self._root.cut_off(request.scope))
        for task in self._tasks:
            task.cancel()
        self._reactors.cut_off(Closed(CUT_OFF))

    def hold(self, size: int) -> Callable[[], None]:
        """Count so many bytes of an answer. Call the result once they were sent."""
        self._inflight.hold(size)
        return partial(self._inflight.release, size)


def _send(answer: Answer | StreamAnswer, scope: Scope, response: Response | None) -> None:
    """Send the response; if that fails, an error, or nothing: while Python has a request, it has no deadline."""
    try:
        answer.send(response)
    except Exception:  # noqa: BLE001 - the last place where an error can still be answered
        try:
            answer.send(failed_response(scope["path"]))
        except Exception:
            logger.exception("a request to %s is not answered", scope["path"])
            answer.send(None)
