"""Requests that a worker does not answer itself, handed to the owner's HTTP service and back, as they come.

An ASGI application for a worker's event loop. A connection a request, made by the owner; bodies are passed on in
parts, so their bounds are the owner's. Nothing is tried twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httptools

from tierstore.errors import Overloaded, StorageError
from tierstore.service.http.messages import Receive, Scope, Send, error_response

AT_ONCE = 64
_PART_BYTES = 1 << 18
# of one connection, and so not of the other (RFC 9110, 7.6.1); the date is set where it is sent
_OF_A_CONNECTION = {
    b"connection",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"expect",
    b"date",
}


class _Answer:
    """What httptools calls while it reads the owner's answer."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.begun = self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, part: bytes) -> None:
        self.parts.append(part)

    def on_message_complete(self) -> None:
        self.complete = True


class Replay:
    """A request's body, remembered while it is read, so that another application can read it `again`. Event loop only."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._held: list[Any] = []

    async def __call__(self) -> Any:
        message = await self._receive()
        self._held.append(message)
        return message

    async def again(self) -> Any:
        """What was read so far, then what is left."""
        return self._held.pop(0) if self._held else await self._receive()


class Forward:
    """`connect` makes a connection to the owner; it is awaited on the event loop."""

    def __init__(self, connect: Callable[[], Awaitable[socket.socket]]) -> None:
        self._connect = connect
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._under_way >= AT_ONCE:
            await error_response(Overloaded(f"{AT_ONCE} requests wait for the owner of the store; try again")).send(
                send
            )
            return
        self._under_way += 1
        try:
            await self._forward(scope, receive, send)
        finally:
            self._under_way -= 1

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            reader, writer = await asyncio.open_unix_connection(sock=await self._connect())
            asking = asyncio.ensure_future(_ask(scope, receive, writer))
            try:
                answer = _Answer()
                parser = httptools.HttpResponseParser(answer)
                while not answer.complete:
                    data = await reader.read(_PART_BYTES)
                    if not data:
                        raise ConnectionError("the owner of the store closed the connection")
                    parser.feed_data(data)
                    if answer.begun and not begun:
                        begun = True
                        answer.complete |= scope["method"] == "HEAD"
                        headers = [header for header in answer.headers if header[0] not in _OF_A_CONNECTION]
                        await send(
                            {"type": "http.response.start", "status": parser.get_status_code(), "headers": headers}
                        )
                    for part in answer.parts:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    answer.parts.clear()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await asking
                writer.close()
        except (OSError, httptools.HttpParserError) as error:
            if begun:  # the client sees an answer that is cut short
                raise
            lost = StorageError(f"the owner of the store does not answer: {error}")
            await error_response(lost).send(send)


async def _ask(scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> None:
    """Pass the request on. The owner is to keep the connection, so that it reads a body that it refused to its end."""
    path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    headers: dict[bytes, bytes] = dict(scope["headers"])
    chunked = b"content-length" not in headers and b"transfer-encoding" in headers
    lines = [scope["method"].encode() + b" " + path + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in scope["headers"] if name not in _OF_A_CONNECTION]
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
    message: Any = {"more_body": chunked or headers.get(b"content-length", b"0") != b"0"}
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            writer.transport.abort()
            return
        body = message.get("body", b"")
        if body:
            writer.write(b"%x\r\n%b\r\n" % (len(body), body) if chunked else body)
            await writer.drain()
    if chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
