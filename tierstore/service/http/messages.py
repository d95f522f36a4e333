"""What the raw ASGI parts share: bodies read within bounds, answers, and content codings.

`read_body` and `Response.send` run on the event loop; the rest are pure functions for any thread.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from tierstore.errors import InvalidInput, TooLarge
from tierstore.service.bounds.pool import Holding
from tierstore.service.bounds.shed import Caller
from tierstore.service.status import HttpError, message_of, retry_after, status_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

JSON = b"application/json"
BODY_TIMEOUT_S = 60.0  # for a body that has begun to arrive
_AUTO_DETECT = 47  # zlib's wbits for gzip and zlib streams alike
_MAX_MEMBERS = 16  # of a gzip body: what is left is copied for each
_ACCEPTED = {b"gzip": 31, b"deflate": 15}


# a whole number of milliseconds: ours, and the one that Envoy, and so Istio, passes on to the services behind it
TIMEOUT_HEADERS = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
# in a scope: the connection, which knows whether it is lost; when the head came, if that was before the body's time
CONNECTION, ARRIVED = "tierstore.connection", "tierstore.arrived"
# and for the log: why it failed, where its time went
ERROR, SPENT = "tierstore.error", "tierstore.spent"
REQUEST_ID = b"x-request-id"  # sent back; requests of one id get one version


class Disconnected(Exception):
    """The client went away before its body was complete; there is nobody to answer."""


@dataclass(slots=True)
class Response:
    """An answer. `chunks` are bytes-like, sent in order; no copy is made of them."""

    status: int
    chunks: Iterable[bytes | memoryview] = (b"",)
    content_type: bytes = JSON
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    def pieces(self) -> tuple[list[tuple[bytes, bytes]], list[bytes | memoryview]]:
        """(headers, chunks) as they are sent."""
        chunks = list(self.chunks)
        length = sum(map(len, chunks))
        headers = [(b"content-length", b"%d" % length), *self.headers]
        if length:
            headers.append((b"content-type", self.content_type))
        return headers, chunks

    async def send(self, send: Send) -> None:
        headers, chunks = self.pieces()
        chunks = chunks or [b""]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        last = len(chunks) - 1
        for i, chunk in enumerate(chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": i != last})


def json_response(document: Any, status: int = 200) -> Response:
    return Response(status, [orjson.dumps(document)])


def error_response(error: BaseException) -> Response:
    """The protocol's `{"error": …}` with the status that fits."""
    response = json_response({"error": message_of(error)}, status_of(error))
    if (seconds := retry_after(error)) is not None:
        response.headers.append((b"retry-after", seconds))
    return response


def caller_of(scope: Scope, headers: Headers, arrived_ns: int) -> Caller:
    """Who waits for the answer, with the deadline that its headers name. InvalidInput for one that has no meaning."""
    connection = scope.get(CONNECTION)
    caller = Caller(arrived_ns, None if connection is None else connection.is_lost)
    for name in TIMEOUT_HEADERS:
        value = headers.get(name)
        if value is not None:
            if not value.isdigit() or len(value) > 12:
                raise InvalidInput(
                    f"{name.decode()} is {value[:40].decode('latin-1')!r}, expected a number of milliseconds"
                )
            caller.within(int(value) * 1_000_000 or None)
    return caller


async def read_body(receive: Receive, headers: Headers, limit: int, holding: Holding) -> memoryview:
    """The whole body. TooLarge from the first byte beyond `limit` on (or from Content-Length, before any is read).

    Every byte that has arrived is taken from the budget; one that is only announced is not, so idle connections
    hold nothing. What is left of a refused body is read and dropped by the HTTP parser.
    """
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise TooLarge(f"the body has {declared[:20].decode()} bytes, {limit} are allowed")
    message = await receive()
    body: bytes = _part(message, 0, limit, holding)
    if not message.get("more_body", False):
        return memoryview(body)
    gathered = bytearray(body)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while message.get("more_body", False):
                message = await receive()
                gathered += _part(message, len(gathered), limit, holding)
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} seconds") from None
    return memoryview(gathered)


def _part(message: MutableMapping[str, Any], before: int, limit: int, holding: Holding) -> bytes:
    if message["type"] == "http.disconnect":
        raise Disconnected
    part: bytes = message.get("body", b"")
    if before + len(part) > limit:
        raise TooLarge(f"the body has more than the {limit} bytes that are allowed")
    holding.take(len(part))
    return part


def decode_body(body: memoryview, coding: bytes, limit: int) -> memoryview:
    """`body` without its Content-Encoding. TooLarge beyond `limit` decoded bytes, however small it came."""
    if coding in (b"", b"identity"):
        return body
    if coding not in (b"gzip", b"x-gzip", b"deflate"):
        raise HttpError(415, f"Content-Encoding {coding[:40]!r} is not known; use gzip or deflate")
    decoded = bytearray()
    rest: bytes | memoryview = body
    try:
        for _ in range(_MAX_MEMBERS):
            stream = zlib.decompressobj(_AUTO_DETECT)
            decoded += stream.decompress(rest, limit + 1 - len(decoded))
            if len(decoded) > limit:
                raise TooLarge(f"the decoded body has more than the {limit} bytes that are allowed")
            if not stream.eof:
                raise InvalidInput(f"the {coding.decode()} body is cut short")
            rest = stream.unused_data
            if not rest:
                return memoryview(decoded)
        raise InvalidInput(f"the body is made of more than {_MAX_MEMBERS} gzip members")
    except zlib.error as error:
        raise InvalidInput(f"the body is not valid {coding.decode()}: {error}") from error


def wanted_coding(accept: bytes) -> bytes | None:
    """The coding to answer in: gzip or deflate where Accept-Encoding names just that one.

    HTTP libraries send a list of all they know with every request; vectors hardly shrink and cost milliseconds to
    compress, so a list counts as no wish. Identity is always allowed by RFC 9110, unless refused by name.
    """
    asked = accept.strip().lower()
    return asked if asked in _ACCEPTED else None


def compress(chunks: Iterable[bytes | memoryview], coding: bytes) -> bytes:
    """`chunks` as one body in `coding`, at the fastest level."""
    stream = zlib.compressobj(1, zlib.DEFLATED, _ACCEPTED[coding])
    return b"".join([*(stream.compress(chunk) for chunk in chunks), stream.flush()])
