"""What reactors hand to Python: whole requests, whose answers go back, and connections, which may go back too.

A request goes to the application as it would come from the HTTP server, without that server: its head has been checked
by the reactor, so it is split and no more. A connection is served by the HTTP server from its first byte on, and comes
back when that has answered it and nothing more has come (`connection.py`). Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

from tierstore.service.bounds.pool import ByteBudget
from tierstore.service.http.guard import DataApp
from tierstore.service.http.messages import ARRIVED, CONNECTION, Scope
from tierstore.service.reactor.reactors import Reactors, Reply

logger = logging.getLogger(__name__)

_JOINED_BYTES = 16 << 10  # answers up to here are copied
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
Head = list[tuple[bytes, bytes]]


class Host(Protocol):
    """The HTTP server that connections go over to."""

    @property
    def default_headers(self) -> Head: ...
    def adopt(self, sock: socket.socket, data: bytes, *, refused: bool) -> None: ...


class Handover:
    """`reactors` hand to the application `app`, and to `host` what is not a request for it."""

    def __init__(self, reactors: Reactors, app: DataApp, host: Host, inflight: ByteBudget) -> None:
        self._reactors, self._app, self._host, self._inflight = reactors, app, host, inflight
        self._tasks: set[asyncio.Task[None]] = set()
        self.ending = False  # whether answers end their connections

    @property
    def busy(self) -> bool:
        """Whether a request is at work, or its answer has not left."""
        return bool(self._tasks or self._reactors.sending or self._reactors.unsent_bytes)

    def connection(self, sock: socket.socket, data: bytes) -> None:
        self._host.adopt(sock, data, refused=False)

    def refused(self, sock: socket.socket) -> None:
        self._host.adopt(sock, b"", refused=True)

    def request(self, reply: Reply, data: bytes) -> None:
        end = data.index(b"\r\n\r\n")
        first, *lines = data[:end].split(b"\r\n")
        headers: Head = []
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name.lower(), value.lstrip(b" ")))
        now_ns = time.perf_counter_ns()
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": first[5:-9].decode(),
            "query_string": b"",
            "headers": headers,
            ARRIVED: reply.began_ns or now_ns,
            CONNECTION: reply,
        }
        body = memoryview(data)[end + 4 :]
        response = self._app.at_once(scope, body)
        if response is not None:
            self._answer(reply, response.status, *response.pieces())
            return
        task = asyncio.get_running_loop().create_task(self._ask(reply, scope, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, reply: Reply, scope: Scope, body: memoryview) -> None:
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
        for name, value in (*self._host.default_headers, *headers):
            head += (name, b": ", value, b"\r\n")
        if self.ending:
            head.append(b"connection: close\r\n")
        head.append(b"\r\n")
        pieces: list[bytes | memoryview] = [b"".join(head), *(chunk for chunk in chunks if len(chunk))]
        size = sum(map(len, pieces))
        if size <= _JOINED_BYTES:
            reply.send_copy(b"".join(pieces), closes=self.ending)
            return
        self._inflight.hold(size)  # until it has left, however long the client takes
        reply.send(pieces, self._release(size), closes=self.ending)

    def _release(self, size: int) -> Callable[[], None]:
        return lambda: self._inflight.give(size)
