"""A request on a connection that Python serves, and its response: the two sides of ASGI. Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol, TypeAlias

from tierstore.service.http.messages import Receive, Scope, Send, response_head

logger = logging.getLogger(__name__)
App: TypeAlias = Callable[[Scope, Receive, Send], Any]
PLAIN = (b"content-type", b"text/plain; charset=utf-8")


class Connection(Protocol):
    """What a request needs of its connection."""

    transport: asyncio.Transport
    writable: asyncio.Event  # whether the client reads what is sent

    def is_lost(self) -> bool: ...
    def read_on(self) -> None: ...
    def answered(self, request: Request) -> None: ...


class Request:
    """A request, from its head on, and its response: `receive` and `send` are those of ASGI."""

    def __init__(self, connection: Connection, scope: Scope, *, keeps: bool) -> None:
        self._connection, self.scope = connection, scope
        self.keeps = keeps  # whether the connection stays open after the response
        self._awaits_continue = any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
        )
        self._body, self.has_come = bytearray(), False
        self.heard = asyncio.Event()  # more of the body has come, or no more will
        self._head: bytes | None = None  # of the response, until it leaves together with the first of its body
        self._is_started = self._is_chunked = self.is_answered = False

    async def run(self, app: App) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            logger.exception("a request to %s failed", self.scope["path"])
        transport = self._connection.transport
        if self.is_answered or transport.is_closing():
            return
        if self._is_started:
            transport.close()
            return
        text = b"Internal Server Error"
        headers = [PLAIN, (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": text})

    def add(self, data: bytes) -> int:
        """More of the body has come. Returns how many bytes the application has not taken."""
        if self.is_answered:  # it is dropped
            return 0
        self._body += data
        self.heard.set()
        return len(self._body)

    async def receive(self) -> MutableMapping[str, Any]:
        connection = self._connection
        if self._awaits_continue and not connection.transport.is_closing():
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._awaits_continue = False
        if not connection.is_lost() and not self.is_answered:
            connection.read_on()
            await self.heard.wait()
            self.heard.clear()
        if connection.is_lost() or self.is_answered:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.has_come}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        connection = self._connection
        await connection.writable.wait()
        transport = connection.transport
        if transport.is_closing():
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        pieces: list[bytes | memoryview] = [] if self._head is None else [self._head]
        self._head = None
        if self.scope["method"] == "HEAD":
            pass
        elif not self._is_chunked:
            pieces += [body] if len(body) else []
        else:
            pieces += [b"%x\r\n" % len(body), body, b"\r\n"] if len(body) else []
            pieces += [] if more else [b"0\r\n\r\n"]
        if pieces:
            transport.writelines(pieces)
        if not more:
            self.is_answered = True
            self.heard.set()
            connection.answered(self)

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        names = [name for name, _ in headers]
        self._is_started, self._awaits_continue = True, False
        self._is_chunked = (
            b"content-length" not in names and self.scope["method"] != "HEAD" and status not in (204, 304)
        )
        if self._is_chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        self.keeps = self.keeps and (b"connection", b"close") not in headers
        self._head = response_head(status, headers, closes=not self.keeps)
