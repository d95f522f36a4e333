"""A request on a connection that Python serves, and its response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any, Protocol

from tierstore.service.http.messages import CLOSE, App, Response, Scope, response_head

logger = logging.getLogger(__name__)
TEXT = b"text/plain; charset=utf-8"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # an interim answer


class RequestConnection(Protocol):
    """What a request needs of its connection."""

    transport: asyncio.Transport
    writable: asyncio.Event  # whether the client reads what is sent

    def is_lost(self) -> bool: ...
    def read_on(self) -> None: ...
    def answered(self, request: HttpRequest) -> None: ...


class HttpRequest:
    """A request, from its head on; `receive` is as ASGI has it."""

    def __init__(self, connection: RequestConnection, scope: Scope, *, keeps: bool) -> None:
        self._connection, self.scope = connection, scope
        self.keeps = keeps  # whether the connection stays open after the response
        self.has_interim = scope["http_version"] >= "1.1"  # an expectation of HTTP/1.0 is passed over
        self._awaits_continue = self.has_interim and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]
        )
        self._body, self.has_come = bytearray(), False
        self.heard = asyncio.Event()  # more of the body has come, or no more will
        self.is_answered = False

    async def run(self, app: App) -> None:
        response: Response | None
        if self._connection.transport.is_closing():  # what came right behind its head was no HTTP
            return
        try:
            response = await app(self.scope, self.receive)
        except Exception:
            logger.exception("a request to %s failed", self.scope["path"])
            response = Response(500, [b"Internal Server Error"], TEXT, [CLOSE])
        connection = self._connection
        await connection.writable.wait()
        if connection.transport.is_closing():
            return
        if response is None:
            connection.transport.close()
            return
        headers, chunks = response.pieces()
        self.is_answered = True
        self.keeps = self.keeps and CLOSE not in headers
        head = response_head(response.status, headers, closes=not self.keeps)
        is_head = self.scope["method"] == "HEAD"
        connection.transport.writelines([head, *([] if is_head else [chunk for chunk in chunks if len(chunk)])])
        connection.answered(self)

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
            connection.transport.write(CONTINUE)
            self._awaits_continue = False
        if not connection.is_lost():
            connection.read_on()
            await self.heard.wait()
            self.heard.clear()
        if connection.is_lost():
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.has_come}
