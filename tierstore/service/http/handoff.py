"""What reactors hand off to Python: whole requests, whose answers go back to them, and connections, which may go back too.

A request goes to the application as from the HTTP server, but without that server: the reactor has checked its head, so it
is only split. A connection is served by the HTTP server from its first byte on, and goes back when it is answered and
nothing more has come (`connection.py`). Event loop only, but that threads answer the requests that were left to them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from tierstore.errors import Closed
from tierstore.kernels import reactor_words as kernel
from tierstore.service.http.messages import (
    ARRIVED,
    CONNECTION,
    ERROR,
    FAILED,
    LATER,
    LEFT,
    UNPLANNED,
    Response,
    Scope,
    error_for_path,
)
from tierstore.service.http.middleware import CUT_OFF, DataApp
from tierstore.service.limits.worker_pool import ByteBudget
from tierstore.service.reactor.reactors import Reactors
from tierstore.service.reactor.reply import Reply

logger = logging.getLogger(__name__)

_JOINED_BYTES = 16 << 10  # answers up to here are copied
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
Head = list[tuple[bytes, bytes]]


class ConnectionServer(Protocol):
    """The HTTP server that serves connections which are handed off."""

    @property
    def default_headers(self) -> Head: ...
    def adopt(self, sock: socket.socket, data: bytes, *, refused: bool) -> None: ...


class Handoff:
    """From `reactors` to the application `app`, and to `server` for anything that is not a request for it."""

    def __init__(self, reactors: Reactors, app: DataApp, server: ConnectionServer, inflight: ByteBudget) -> None:
        self._reactors, self._app, self._server, self._inflight = reactors, app, server, inflight
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        # guarded by _lock
        self._left: dict[Reply, Scope] = {}  # requests that a thread may answer
        self._cut = False  # whether the time for all requests is over
        self.draining = False  # whether answers end connections on which nothing more has come
        self.ending = False  # whether answers end their connections

    @property
    def busy(self) -> bool:
        """Whether a request is in progress, or its answer is not sent."""
        reactors = self._reactors
        return bool(self._tasks or self._left or reactors.lanes or reactors.sending or reactors.unsent_bytes)

    def connection(self, sock: socket.socket, data: bytes) -> None:
        self._server.adopt(sock, data, refused=False)

    def refused(self, sock: socket.socket) -> None:
        self._server.adopt(sock, b"", refused=True)

    def request(self, reply: Reply, data: bytes) -> None:
        if self._cut and reply.error is None:
            reply.drop()
            return
        end = data.index(b"\r\n\r\n")
        first, *lines = data[:end].split(b"\r\n")
        headers: Head = []
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name.lower(), value.strip(b" \t")))
        now_ns = time.perf_counter_ns()
        scope: Scope = {
            "type": "http",
            "http_version": first[-3:].decode(),
            "method": "POST",
            "path": first[5:-9].decode(),
            "query_string": b"",
            "headers": headers,
            ARRIVED: reply.began_ns or now_ns,
            CONNECTION: reply,
            UNPLANNED: reply.reason in (kernel.NO_PLAN, kernel.ACCESS),
            LATER: partial(self._answer_left, reply),
        }
        if reply.error is not None:
            scope[FAILED] = reply.error
        body = memoryview(data)[end + 4 :]
        self._left[reply] = scope
        response = self._app.at_once(scope, body)
        if LEFT in scope:
            return
        del self._left[reply]
        if response is not None:
            self._answer(reply, response.status, *response.pieces())
            return
        task = asyncio.get_running_loop().create_task(self._answer_later(reply, scope, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer_left(self, reply: Reply, response: Response | None) -> bool:
        """Answer a request that was left to a thread; None: nobody waits for that. Returns whether it was not answered yet. Any thread."""
        with self._lock:
            if self._left.pop(reply, None) is None:
                return False
            if response is None:
                reply.drop()
            else:
                self._answer(reply, response.status, *response.pieces())
            return True

    def cut_off(self) -> None:
        """Answer requests that were left to threads, in place of those. Once; then nothing is left."""
        if self._cut:
            return
        self._cut = True
        for scope in list(self._left.values()):
            error = scope[ERROR] = Closed(CUT_OFF)
            scope[LATER](error_for_path(scope["path"], error))
        for reply, data in self._reactors.cut_off():
            reply.error = Closed(CUT_OFF)
            self.request(reply, data)

    async def _answer_later(self, reply: Reply, scope: Scope, body: memoryview) -> None:
        """Have the application answer as any ASGI server would."""
        status, headers, chunks = 0, [], []

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message["headers"])
            else:
                chunks.append(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("a request to %s failed", scope["path"])
        if status:
            self._answer(reply, status, headers, chunks)
        else:
            reply.drop()

    def _answer(self, reply: Reply, status: int, headers: Head, chunks: list[bytes | memoryview]) -> None:
        head = [_STATUS_LINES[status]]
        for name, value in (*self._server.default_headers, *headers):
            head += (name, b": ", value, b"\r\n")
        closes = reply.closes or self.ending or (self.draining and reply.is_last)
        if closes:
            head.append(b"connection: close\r\n")
        head.append(b"\r\n")
        pieces: list[bytes | memoryview] = [b"".join(head), *(chunk for chunk in chunks if len(chunk))]
        size = sum(map(len, pieces))
        if size <= _JOINED_BYTES:
            reply.send_copy(b"".join(pieces), closes=closes)
            return
        self._inflight.hold(size)  # until it is sent, however slowly the client reads
        reply.send(pieces, self._release(size), closes=closes)

    def _release(self, size: int) -> Callable[[], None]:
        return lambda: self._inflight.release(size)
