"""What reactors hand off to Python: whole requests, whose answers go back to them, and
connections, which may go back too.

HTTP/2 hands off streams (`reactor/streams.py`): those of gRPC go on to their own receiver, any other is a request.

A handed-off request goes straight to the application: the reactor has checked its head, so Python only splits it. The
HTTP server serves a handed-off connection from its first byte on, and gives it back once every request is answered and
nothing more has arrived (`connection.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, Protocol

from tierstore.errors import Closed, TooLarge
from tierstore.kernels import reactor_words as kernel
from tierstore.service.addresses import is_on_host
from tierstore.service.error_status import CUT_OFF
from tierstore.service.http.messages import (
    ARRIVED,
    CONNECTION,
    ERROR,
    FAILED,
    LATER,
    LEFT,
    PEER,
    UNPLANNED,
    OtherSide,
    Response,
    Scope,
    date_now,
    error_for_path,
    problem,
    response_head,
    scope_of,
)
from tierstore.service.http.middleware import DataApp
from tierstore.service.limits.worker_pool import ByteBudget
from tierstore.service.openssl import Session
from tierstore.service.reactor.reactors import Reactors
from tierstore.service.reactor.reply import Reply, split_head
from tierstore.service.reactor.streams import Stream, StreamReceiver

logger = logging.getLogger(__name__)

_JOINED_BYTES = 16 << 10  # answers up to here are copied
_GRPC = b"application/grpc"
_NOT_GRPC = (
    "this is a method of gRPC: expected the Content-Type application/grpc; gRPC-Web is not spoken here, have a proxy "
    "translate it"
)


class ConnectionServer(Protocol):
    """The HTTP server that serves connections which are handed off."""

    def adopt(self, sock: socket.socket, data: bytes, *, refused: bool, session: Session | None = None) -> None: ...


class Answer:
    """Where the answer to a request goes: to its connection, as HTTP/1.1. Any thread."""

    def __init__(self, handoff: Handoff, reply: Reply) -> None:
        self._handoff, self._reply = handoff, reply

    def send(self, response: Response | None) -> None:
        """None: nobody waits for one."""
        handoff, reply = self._handoff, self._reply
        if response is None:
            reply.drop()
            return
        headers, chunks = response.pieces()
        closes = reply.closes or handoff.ending or (handoff.draining and reply.is_last)
        head = response_head(response.status, headers, closes=closes)
        pieces: list[bytes | memoryview] = [head, *(chunk for chunk in chunks if len(chunk))]
        size = sum(map(len, pieces))
        if size <= _JOINED_BYTES:
            reply.send_copy(b"".join(pieces), closes=closes)
            return
        reply.send(pieces, handoff.hold(size), closes=closes)  # held until it is sent, however slowly the client reads


class StreamAnswer(Answer):
    """Where the answer to a request on a stream of HTTP/2 goes. Any thread."""

    def __init__(self, handoff: Handoff, stream: Stream) -> None:
        self._handoff, self._stream = handoff, stream

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
        """Whether a path is that of a method."""


class RequestDispatch:
    """Receives streams: those of gRPC are for `calls`, the others are whole requests for `handoff`."""

    def __init__(self, handoff: Handoff, calls: CallReceiver | None) -> None:
        self._handoff, self._calls = handoff, calls

    def request(self, stream: Stream, body: bytes) -> None:
        if not is_grpc(stream):
            if self._calls is not None and self._calls.has(stream.path):
                StreamAnswer(self._handoff, stream).send(problem(415, _NOT_GRPC))
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
        if self._calls is not None and is_grpc(stream):
            self._calls.lost(stream)


def is_grpc(stream: Stream) -> bool:
    """Whether a request is a call of gRPC, by the rule of the kernel `h2head.read_head`.

    One of `application/grpcfoo` or `application/grpc-web` is none.
    """
    types = (value for name, value in stream.headers if name == b"content-type")
    return any(value == _GRPC or value.startswith((_GRPC + b"+", _GRPC + b";")) for value in types)


class Handoff:
    """From `reactors` to the application `app`, and to `server` for anything that is not a request for it."""

    def __init__(self, reactors: Reactors, app: DataApp, server: ConnectionServer, inflight: ByteBudget) -> None:
        self._reactors, self._app, self._server, self._inflight = reactors, app, server, inflight
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        # guarded by _lock
        self._left: dict[Answer, Scope] = {}  # requests that a thread may answer
        self._cut = False  # whether the time for all requests is over
        self.draining = False  # whether answers end connections on which nothing more has come
        self.ending = False  # whether answers end their connections

    @property
    def busy(self) -> bool:
        """Whether a request is in progress, or its answer is not sent."""
        reactors = self._reactors
        return bool(
            self._tasks
            or self._left
            or reactors.lanes
            or reactors.sending
            or reactors.unsent_bytes
            or len(reactors.streams)
        )

    def connection(self, sock: socket.socket, data: bytes, session: Session | None) -> None:
        self._server.adopt(sock, data, refused=False, session=session)

    def refused(self, sock: socket.socket) -> None:
        self._server.adopt(sock, b"", refused=True)

    def request(self, reply: Reply, data: bytes) -> None:
        first, headers, body_at = split_head(data)
        scope: Scope = {
            "type": "http",
            "http_version": first[-3:].decode(),
            "method": "POST",
            "path": first[5:-9].decode(),
            "query_string": b"",
            "headers": headers,
            ARRIVED: reply.began_ns or time.perf_counter_ns(),
            CONNECTION: reply,
            UNPLANNED: reply.reason in (kernel.NO_PLAN, kernel.ACCESS),
            PEER: OtherSide(names=reply.peer_names),
        }
        if reply.error is not None:
            scope[FAILED] = reply.error
        self._begin(Answer(self, reply), scope, memoryview(data)[body_at:])

    def stream(self, stream: Stream, body: bytes) -> None:
        """Answer a whole request of HTTP/2."""
        path, _, query = stream.path.partition(b"?")
        headers = stream.headers
        if all(name != b"host" for name, _ in headers):
            headers = [(b"host", stream.authority), *headers]
        with stream.connection() as connection:
            on_host = connection is not None and is_on_host(connection)
        scope = scope_of("2", stream.method, path, query, headers)
        scope[ARRIVED], scope[CONNECTION] = stream.arrived_ns, stream
        scope[PEER] = OtherSide(False, stream.peer_names, on_host)
        answer = StreamAnswer(self, stream)
        if stream.too_large:
            error = scope[ERROR] = TooLarge(
                "the body has more bytes than are allowed (max_request, and max_delta for deltas)"
            )
            answer.send(error_for_path(scope["path"], error))
            return
        self._begin(answer, scope, memoryview(body))

    def _begin(self, answer: Answer, scope: Scope, body: memoryview) -> None:
        if self._cut and FAILED not in scope:
            answer.send(None)
            return
        if scope["method"] == "POST":
            scope[LATER] = partial(self._answer_left, answer)
            self._left[answer] = scope
            response = self._app.at_once(scope, body)
            if LEFT in scope:
                return
            del self._left[answer]
            if response is not None:
                answer.send(response)
                return
        task = asyncio.get_running_loop().create_task(self._answer_later(answer, scope, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer_left(self, reply: Answer, response: Response | None) -> bool:
        """Answer a request that was left to a thread; None: nobody waits for that.

        Returns whether it was not answered yet. Any thread.
        """
        with self._lock:
            if self._left.pop(reply, None) is None:
                return False
            reply.send(response)
            return True

    def cut_off(self) -> None:
        """Answer requests that were left to threads, in place of those. Once; then nothing is left."""
        if self._cut:
            return
        self._cut = True
        for scope in list(self._left.values()):
            error = scope[ERROR] = Closed(CUT_OFF)
            scope[LATER](error_for_path(scope["path"], error))
        self._reactors.cut_off(Closed(CUT_OFF))

    async def _answer_later(self, reply: Answer, scope: Scope, body: memoryview) -> None:
        """Have the application answer what `at_once` did not."""
        response = None

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        try:
            response = await self._app(scope, receive)
        except Exception:
            logger.exception("a request to %s failed", scope["path"])
        reply.send(response)

    def hold(self, size: int) -> Callable[[], None]:
        """Count so many bytes of an answer; what is returned is called when it has left."""
        self._inflight.hold(size)
        return partial(self._inflight.release, size)
