"""Requests and responses over HTTP: bodies read within limits, responses, errors, content codings.

A request is a scope as in ASGI, with a `receive` where its body may still come. `read_body` runs on the event loop; the
rest are pure functions for any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import unquote

import orjson

from tierstore.access.roles import NOBODY, Principal
from tierstore.errors import InvalidInput, SequenceGap, TooLarge, Unauthorized
from tierstore.service.error_status import HttpError, as_text, http_status, message_of, retry_after
from tierstore.service.limits import slow_clients
from tierstore.service.limits.inflate import MOST_MEMBERS, inflate
from tierstore.service.limits.shedding import Caller
from tierstore.service.limits.worker_pool import Reservation
from tierstore.wire.http1.date import DATE_PLACE

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Headers = dict[bytes, bytes]
Fields = Sequence[tuple[bytes, bytes]]

JSON = b"application/json"
_AUTO_DETECT = 47  # zlib's wbits for gzip and zlib streams alike
_SMALL_JSON = 64 << 10  # parsing so little JSON takes less than a thread needs anyway
_ACCEPTED = {b"gzip": 31, b"deflate": 15}
_REFUSED = re.compile(rb"q\s*=\s*0(?:\.0*)?")
CLOSE = b"connection", b"close"
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


# a whole number of milliseconds: our header, and the one that Envoy, and so Istio, passes on to the services behind it
TIMEOUT_HEADERS = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
# in a scope: the connection, which knows whether it is lost; when the head came, by `time.perf_counter_ns`
CONNECTION, ARRIVED = "tierstore.connection", "tierstore.arrived"
# and for the log: why it failed, where its time went
ERROR, SPENT = "tierstore.error", "tierstore.spent"
# and for access: where the request came in, and from whom
PEER, PRINCIPAL = "tierstore.peer", "tierstore.principal"
REQUEST_ID = b"x-request-id"  # sent back; requests with the same id get the same version


@dataclass(frozen=True, slots=True)
class HttpPeer:
    """The client's side of a connection: whether it is at the admin listener, its certificate's names, and whether
    it is surely on this machine (over loopback, or by a unix socket).
    """

    admin: bool = False
    names: tuple[str, ...] = ()
    on_host: bool = False


UNNAMED = HttpPeer()


# the error of a request that has failed before it came
FAILED = "tierstore.failed"
# whether a reactor may have handed the request over for lack of a plan, or of its caller
UNPLANNED = "tierstore.unplanned"


class Disconnected(Exception):
    """The client went away before its body was complete; there is nobody to answer."""


@dataclass(slots=True)
class Response:
    """A response. `chunks` are bytes-like and sent in order, without a copy.

    `outcome` is its label in the metrics, if its status alone does not determine it.
    """

    status: int
    chunks: Iterable[bytes | memoryview] = (b"",)
    content_type: bytes = JSON
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    outcome: str | None = None

    def pieces(self) -> tuple[list[tuple[bytes, bytes]], list[bytes | memoryview]]:
        """(headers, chunks) as they are sent."""
        chunks = list(self.chunks)
        length = sum(map(len, chunks))
        headers = [(b"content-length", b"%d" % length), *self.headers]
        if length and self.content_type:
            headers.append((b"content-type", self.content_type))
        return headers, chunks


App: TypeAlias = Callable[[Scope, Receive], Coroutine[Any, Any, Response | None]]  # None: nobody waits for a response


def json_response(document: Any, status: int = 200) -> Response:
    return Response(status, [orjson.dumps(document)])


def error_response(error: BaseException) -> Response:
    """The protocol's `{"error": …}` with the error's status."""
    response = json_response({"error": message_of(error)}, http_status(error))
    if (seconds := retry_after(error)) is not None:
        response.headers.append((b"retry-after", seconds))
    if isinstance(error, Unauthorized):
        response.headers.append((b"www-authenticate", b"Bearer"))
    if response.status == 408:  # the remainder of its body is not waited for
        response.headers.append((b"connection", b"close"))
    return response


def ready_response(response: Response) -> bytes:
    """All bytes of a response that is sent more than once, with `DATE_PLACE` in place of its date."""
    headers, chunks = response.pieces()
    return b"".join([response_head(response.status, headers, date=DATE_PLACE), *chunks])


def response_head(status: int, headers: Fields, *, closes: bool = False, date: bytes | None = None) -> bytes:
    """The head of a response over HTTP/1.1, with its date; if it `closes` the connection it says so."""
    lines = [_STATUS_LINES[status], b"date: ", date or date_now(), b"\r\n"]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    if closes and CLOSE not in headers:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


_date = 0, b""  # a second, and its text


def date_now() -> bytes:
    """The date of a response that is sent now. Any thread."""
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = now, formatdate(now, usegmt=True).encode()
    return _date[1]


_NAMED = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)(.*)")  # a target with the name of the service in it

# where others have their health → where it is here
HEALTH = {
    **dict.fromkeys(("/healthz", "/livez"), "/v2/health/live"),
    **dict.fromkeys(("/health", "/ready", "/readyz"), "/v2/health/ready"),
}


def scope_of(version: str, method: bytes, path: bytes, query: bytes, headers: list[tuple[bytes, bytes]]) -> Scope:
    """A request as an ASGI scope, without its connection."""
    named = unquote(path.decode("ascii"))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "scheme": "http",
        "method": method.decode("ascii"),
        "path": HEALTH.get(named, named),
        "raw_path": path,
        "root_path": "",
        "query_string": query,
        "headers": headers,
        "state": {},
    }


def without_name(target: bytes, headers: list[tuple[bytes, bytes]]) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """A target without the name in it, which counts in place of the one in Host (RFC 9112, 3.2.2)."""
    match = _NAMED.fullmatch(target)
    if match is None:
        return target, headers
    name, path = match[1].rpartition(b"@")[2], match[2]
    named = [(field, name if field == b"host" else value) for field, value in headers]
    return path if path.startswith(b"/") else b"/" + path, named


def principal_of(scope: Scope) -> Principal:
    """Who has sent a request: nobody, unless the check of access has found out."""
    principal: Principal = scope.get(PRINCIPAL, NOBODY)
    return principal


def caller_of(scope: Scope, headers: Headers) -> Caller:
    """The caller, with the deadline in its headers. InvalidInput for a malformed deadline."""
    connection = scope.get(CONNECTION)
    caller = Caller(scope[ARRIVED], None if connection is None else connection.is_lost, principal_of(scope))
    for name in TIMEOUT_HEADERS:
        value = headers.get(name)
        if value is not None:
            if not value.isdigit() or len(value) > 12:
                raise InvalidInput(
                    f"{name.decode()} is {value[:40].decode('latin-1')!r}, expected a number of milliseconds"
                )
            caller.within(int(value) * 1_000_000 or None)
    return caller


async def read_body(
    receive: Receive, headers: Headers, limit: int, holding: Reservation, setting: str = ""
) -> memoryview:
    """The whole body. TooLarge from the first byte beyond `limit` (or from Content-Length, before any byte is read).

    `setting`: the name of the setting with this limit. Every byte that has arrived is reserved; announced bytes are
    not, so idle connections hold nothing. The HTTP parser reads and drops the remainder of a refused body.
    """
    which = _check_declared(headers, limit, setting)
    async with body_deadline():
        message = await receive()
        body: bytes = _part(message, 0, limit, holding, which)
        if not message.get("more_body", False):
            return memoryview(body)
        gathered = bytearray(body)
        while message.get("more_body", False):
            message = await receive()
            gathered += _part(message, len(gathered), limit, holding, which)
    return memoryview(gathered)


def take_body(body: memoryview, headers: Headers, limit: int, holding: Reservation, setting: str = "") -> memoryview:
    """`read_body` of a body that is there."""
    which = _check_declared(headers, limit, setting)
    _reserve(0, len(body), limit, holding, which)
    return body


def _check_declared(headers: Headers, limit: int, setting: str) -> str:
    """TooLarge for a Content-Length beyond the limit. Returns the setting, for messages."""
    which = f" ({setting})" if setting else ""
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise TooLarge(f"the body has {declared[:20].decode()} bytes, {limit} are allowed{which}")
    return which


@contextlib.asynccontextmanager
async def body_deadline(since: float | None = None, seconds: float | None = None) -> AsyncIterator[None]:
    """A deadline for receiving a body: so many seconds, by default BODY_S, from a moment of the loop's time, by default
    now.

    HttpError 408 then.
    """
    if since is None:
        since = asyncio.get_running_loop().time()
    if seconds is None:
        seconds = slow_clients.BODY_S
    try:
        async with asyncio.timeout_at(since + seconds):
            yield
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {seconds:g} seconds") from None


def _part(message: MutableMapping[str, Any], before: int, limit: int, holding: Reservation, which: str) -> bytes:
    if message["type"] == "http.disconnect":
        raise Disconnected
    part: bytes = message.get("body", b"")
    _reserve(before, len(part), limit, holding, which)
    return part


def _reserve(before: int, more: int, limit: int, holding: Reservation, which: str) -> None:
    if before + more > limit:
        raise TooLarge(f"the body has more than the {limit} bytes that are allowed{which}")
    holding.reserve(more)


def decode_body(body: memoryview, coding: bytes, limit: int, reserve: Callable[[int], None]) -> memoryview:
    """`body` without its Content-Encoding. TooLarge beyond `limit` decoded bytes, however few were sent.

    `reserve` is called for bytes before they are decoded, a part at a time; its error ends the decoding.
    """
    if coding in (b"", b"identity"):
        return body
    if coding not in (b"gzip", b"x-gzip", b"deflate"):
        raise HttpError(415, f"Content-Encoding {coding[:40]!r} is not known; use gzip or deflate")
    try:
        decoded, read = inflate(body, _AUTO_DETECT, limit, reserve)
    except EOFError:
        raise InvalidInput(f"the {coding.decode()} body is cut short") from None
    except zlib.error as error:
        raise InvalidInput(f"the body is not valid {coding.decode()}: {error}") from error
    if len(decoded) > limit:
        raise TooLarge(f"the decoded body has more than the {limit} bytes that are allowed (max_request)")
    if read < len(body):
        raise InvalidInput(f"the body is made of more than {MOST_MEMBERS} gzip members")
    return memoryview(decoded)


def decoded(body: memoryview, headers: Headers, limit: int, holding: Reservation) -> memoryview:
    """`decode_body` by the request's header, with the added bytes reserved before."""
    coding = headers.get(b"content-encoding")
    if coding is None:
        return body
    return decode_body(body, coding.strip().lower(), limit, holding.reserve)


def to_parse(text: memoryview, limit: int, holding: Reservation) -> memoryview:
    """`text`, a JSON document, after the memory for parsing it is reserved. TooLarge beyond `limit`."""
    nbytes = parsed_bytes(text)
    if nbytes > limit:
        raise TooLarge(
            f"the JSON would take up to {nbytes:,} bytes once parsed, {limit:,} are allowed (max_inflight): send "
            "binary tensors"
        )
    if nbytes:
        holding.reserve(nbytes)
    return text


def parsed_bytes(text: memoryview) -> int:
    """The most memory that a JSON document takes while it is parsed and after, beside its own bytes; 0 if it is small.

    Estimated by what the parser takes for each value, object, string and character; a body of empty objects is the
    worst, 35 times its size.
    """
    if len(text) <= _SMALL_JSON:
        return 0
    count = bytes(text).count
    containers, values = count(b"{") + count(b"["), count(b",") + 1
    return 8 * len(text) + 40 * values + 100 * containers + 110 * count(b":") + 25 * count(b'"')


def wanted_coding(accept: bytes) -> bytes | None:
    """The coding of the response: gzip or deflate if Accept-Encoding takes one of them, and refuses an uncompressed
    answer.

    HTTP libraries send codings with every request, some only gzip. Vectors hardly shrink, and compressing them costs
    milliseconds, so that is not taken as a wish. RFC 9110 always allows identity, unless a weight of 0 refuses it.
    """
    if b";" not in accept:
        return None
    weights: dict[bytes, bool] = {}  # whether each coding is accepted
    for entry in accept.lower().split(b","):
        coding, _, weight = entry.partition(b";")
        weights[coding.strip()] = _REFUSED.fullmatch(weight.strip()) is None
    if weights.get(b"identity", weights.get(b"*", True)):
        return None
    return next((coding for coding in _ACCEPTED if weights.get(coding, weights.get(b"*", False))), None)


def compress(chunks: Iterable[bytes | memoryview], coding: bytes) -> bytes:
    """`chunks` as one body in `coding`, at the fastest level."""
    stream = zlib.compressobj(1, zlib.DEFLATED, _ACCEPTED[coding])
    return b"".join([*(stream.compress(chunk) for chunk in chunks), stream.flush()])


def coded(response: Response, headers: Headers) -> Response:
    """The response, in the coding that the client wants."""
    if (accept := headers.get(b"accept-encoding")) and (wish := wanted_coding(accept)) is not None:
        response.chunks = [compress(response.chunks, wish)]
        response.headers.append((b"content-encoding", wish))
    return response


PROBLEM = b"application/problem+json"


def problem(status: int, detail: str, headers: dict[bytes, bytes] | None = None, **more: Any) -> Response:
    """problem+json (RFC 9457), the errors of the admin interface; `more` are further members of the document."""
    document = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": as_text(detail),
        **more,
    }
    return Response(status, [orjson.dumps(document)], PROBLEM, [*(headers or {}).items()])


def problem_response(error: BaseException) -> Response:
    """`error` as problem+json."""
    status = http_status(error)
    more = {"expected_seq": error.expected_seq} if isinstance(error, SequenceGap) else {}
    seconds = retry_after(error)
    headers = {b"retry-after": seconds} if seconds is not None else {b"connection": b"close"} if status == 408 else None
    return problem(status, message_of(error), headers, **more)


def failed_response(path: str) -> Response:
    """The response where no other can be made or sent; the exception that is being handled goes to the log."""
    logger.exception("a request to %s failed", path)
    return Response(500, [b"Internal Server Error"], b"text/plain; charset=utf-8", [CLOSE])


def error_for_path(path: str, error: Exception) -> Response:
    """`error` in the form for `path`: that of its protocol, or problem+json."""
    return error_response(error) if path.startswith(("/v2", "/v1")) else problem_response(error)
