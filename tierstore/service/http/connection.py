"""A connection over HTTP/1.1 that Python serves: llhttp parses its requests, the application answers them.

Reactors hand connections off because they do not know a request; one goes back to them once it is answered and nothing
more has come. Each connection has an object of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import httptools

from tierstore.service.addresses import is_on_host, peer_of
from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.http.deadlines import Deadlines
from tierstore.service.http.messages import CONNECTION, PEER, App, OtherSide, response_head, scope_of
from tierstore.service.http.request import CONTINUE, TEXT, HttpRequest
from tierstore.service.http.tls_transport import SESSION
from tierstore.service.openssl import Session

Back: TypeAlias = Callable[[], Callable[[int, Session | None], None] | None]
HEAD_BYTES = 64 << 10
PROBE_S = 0.5  # between questions whether a client that has ended its side still waits
PIPELINED = 64  # requests that a client may send ahead of their answers
_UNREAD_BYTES = 64 << 10  # of a body, that the application has not taken: no more is read then
_HEALTH = {"/v2/health/live", "/v2/health/ready"}
_FRAMING = (b"content-length", b"transfer-encoding")  # where a body ends


class Server(Protocol):
    """What connections have in common."""

    app: App
    connections: set[HttpConnection]
    tasks: set[asyncio.Task[Any]]


class HttpConnection(asyncio.Protocol):
    """A connection, counted by `limit`.

    Closes a connection whose request line and headers exceed HEAD_BYTES, finished or not; or the trailers of whose
    chunked body do (they are read and dropped, as RFC 9110, 6.5.1, allows); that sends more than PIPELINED requests
    ahead; or that sends nothing for as long as an idle one is kept, in the middle of a request too. Bytes behind a
    request that ends its connection are dropped (RFC 9112, 9.6).

    `first` are bytes that came before; `back` returns what gets the descriptor of a connection that goes back, and its
    TLS, or None.
    """

    transport: asyncio.Transport
    _deadlines: Deadlines

    def __init__(
        self,
        server: Server,
        limit: ConnectionLimit,
        *,
        first: bytes = b"",
        refused: bool = False,
        back: Back | None = None,
    ) -> None:
        self._server, self._limit, self._app = server, limit, server.app
        self._first, self._refused, self._back = first, refused, back
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[HttpRequest] = deque()  # not answered; the first has begun, others were sent ahead
        self._newest: HttpRequest | None = None  # whose head has come last
        self._lost = False
        self._ended = False  # the client sends nothing more
        self._served: bool | None = None  # False: it is refused
        self.writable = asyncio.Event()
        self.writable.set()
        # of the request that is coming
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head, self._in_request = True, False
        self._head_bytes = 0
        self._beside_bytes = 0  # of a chunked body, since its last data: sizes, trailers
        self._skips_head = False  # as it has been read before

    def is_lost(self) -> bool:
        """Whether the client has gone. Any thread."""
        return self._lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._server.connections.add(self)
        sock = transport.get_extra_info("socket")
        self._session: Session | None = transport.get_extra_info(SESSION)
        self.client = peer_of(sock)
        self._host = "" if self.client is None else self.client[0]
        self._peer = OtherSide(False, () if self._session is None else self._session.names, is_on_host(sock))
        self._deadlines = self._limit.deadlines(transport, refused=self._refused)
        self._served = self._limit.acquire(refused=self._refused)
        if self._served is None:
            transport.abort()
            return
        if not self._served:
            self._app = self._limit.app
        first, self._first = self._first, b""
        if first:
            self.data_received(first)

    def eof_received(self) -> bool | None:
        """A client that ends only its own side is still answered all that has come whole.

        A request that it has cut short is dropped.
        """
        if not self._requests or not self._requests[0].has_come or self._session is not None:  # TLS ends for both sides
            return None
        if not self._requests[-1].has_come:
            self._requests.pop()
        self._requests[-1].keeps = False
        if not self._ended:
            self._ended = True
            asyncio.get_running_loop().call_later(PROBE_S, self._probe_client)
        return True

    def _probe_client(self) -> None:
        """Send an interim answer to a client that has ended its side.

        If it is gone, that resets the connection, which the next one finds out.
        """
        if self._lost or not self._requests or self.transport.is_closing():
            return
        if self._requests[0].has_interim and self.writable.is_set():
            self.transport.write(CONTINUE)
        asyncio.get_running_loop().call_later(PROBE_S, self._probe_client)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._server.connections.discard(self)
        self.writable.set()
        for request in self._requests:
            request.heard.set()
        self._deadlines.close()
        if self._served is not None:
            self._limit.heads.discard(self._host, self.transport)
            self._limit.release(self._served)
            self._served = None

    def pause_writing(self) -> None:
        self.writable.clear()
        self._deadlines.wait_for_client()

    def resume_writing(self) -> None:
        self.writable.set()
        self._deadlines.all_sent()

    def read_on(self) -> None:
        if not self.transport.is_reading() and not self.transport.is_closing():
            self.transport.resume_reading()

    def _pause_reading(self) -> None:
        if self.transport.is_reading():
            self.transport.pause_reading()

    def shutdown(self) -> None:
        """The service ends: close the connection, after the answer to the request that has begun."""
        if not self._requests:
            self.transport.close()
            return
        self._requests[0].keeps = self._requests[-1].keeps = False
        self._deadlines.finish()

    # --- requests

    def _begin(self, request: HttpRequest, *, sent_ahead: bool) -> None:
        """Run a request, when it is its turn."""

        def run() -> None:
            if not self._lost:
                task = asyncio.get_running_loop().create_task(request.run(self._app))
                self._server.tasks.add(task)
                task.add_done_callback(self._server.tasks.discard)

        self._limit.turns.put(run, health=not sent_ahead and request.scope["path"] in _HEALTH)

    def answered(self, request: HttpRequest) -> None:
        """The response to the first request is complete."""
        self._requests.popleft()
        if not request.keeps:
            self.transport.close()
            return
        self.read_on()
        if self._requests:
            self._begin(self._requests[0], sent_ahead=True)
            return
        self._deadlines.expect_bytes()
        if self._is_idle():
            self._go_back()

    def _is_idle(self) -> bool:
        """Whether nothing is pending: no request, and no byte of a request or a response."""
        return (
            self._served is True
            and not self._requests
            and not self._in_request
            and not self._head_bytes
            and not self.transport.is_closing()
            and not self.transport.get_write_buffer_size()
        )

    def _go_back(self) -> None:
        """Give the connection back to the reactors. The transport closes only its own descriptor of it."""
        give_back = None if self._back is None else self._back()
        if give_back is None:
            return
        self._pause_reading()
        fd = os.dup(self.transport.get_extra_info("socket").fileno())
        self._served = None  # the reactors count it from here on
        if self._session is None:
            self.transport.abort()
            give_back(fd, None)
        else:
            give_back(fd, self.transport.hand_over(fd))  # type: ignore[attr-defined]

    # --- what comes

    def _has_last(self) -> bool:
        """Whether the request that ends the connection has come."""
        return self._newest is not None and not self._in_request and not self._newest.keeps

    def data_received(self, data: bytes) -> None:
        if self._has_last():
            return
        # Only while a head is open: bytes of a body do not count, and one read holds at most one read's worth too much.
        if self._in_head:
            self._expect_head()
            self._head_bytes += len(data)
        else:
            self._beside_bytes += len(data)
        self._parse(data)
        if self._has_last() or self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > HEAD_BYTES:
            self._refuse(b"Request head too large.")
        elif not self._in_head and self._beside_bytes > HEAD_BYTES:
            self.transport.abort()  # even if part of a response was sent
        elif self._head_bytes or not self._in_head:
            self._deadlines.expect_bytes()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = self._ignore_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(b"Invalid HTTP request received.")
                return

    def _ignore_upgrade(self) -> bytes:
        """Begin another parser for the body of a request whose head has an `Upgrade`, such as the one to HTTP/2 that
        Java's client sends by default. Returns the head that it is to be fed first.

        A server may ignore it (RFC 9110, 7.8); this parser has ended, as it takes what follows for that protocol.
        """
        framing = b"".join(b"%s: %s\r\n" % field for field in self._headers if field[0] in _FRAMING)
        self._parser, self._skips_head = httptools.HttpRequestParser(self), True
        return b"POST / HTTP/1.1\r\n%s\r\n" % framing

    def _refuse(self, text: bytes) -> None:
        """Answer what cannot be parsed, and close the connection."""
        if self._has_last() or self.transport.is_closing():
            return
        head = response_head(400, [(b"content-type", TEXT), (b"content-length", b"%d" % len(text))], closes=True)
        self.transport.write(head + text)
        self.transport.close()

    def _expect_head(self) -> None:
        self._deadlines.expect_head()
        if self._served and not self._requests:
            self._limit.heads.add(self._host, self.transport)

    # --- for the parser

    def on_message_begin(self) -> None:
        if self._skips_head:
            return
        if self._has_last():
            raise BufferError("the request before ends the connection")
        if len(self._requests) > PIPELINED:
            self.transport.abort()
            raise BufferError(f"more than {PIPELINED} requests were sent ahead of their answers")
        self._url, self._headers = b"", []
        self._in_head = self._in_request = True
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer would pass for a header, after those were checked
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._skips_head:
            self._skips_head = False
            return
        parser, url = self._parser, httptools.parse_url(self._url)
        version, headers = parser.get_http_version(), self._headers
        if url.host is not None:  # the name in a target counts, and the one in Host does not (RFC 9112, 3.2.2)
            name = b"[%b]" % url.host if b":" in url.host else url.host
            name += b"" if url.port is None else b":%d" % url.port
            headers = [(field, name if field == b"host" else value) for field, value in headers]
        scope = scope_of(version, parser.get_method(), url.path or b"/", url.query or b"", headers)
        scope["scheme"], scope["client"] = "http" if self._session is None else "https", self.client
        scope[CONNECTION], scope[PEER] = self, self._peer
        keeps = version >= "1.1" and parser.should_keep_alive() and not self._limit.draining
        request = self._newest = HttpRequest(self, scope, keeps=keeps)
        self._requests.append(request)
        if len(self._requests) == 1:
            self._begin(request, sent_ahead=False)
        else:
            self._pause_reading()
        self._deadlines.expect_body()
        self._limit.heads.discard(self._host, self.transport)
        self._in_head = False
        self._head_bytes = self._beside_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._beside_bytes = 0
        if self._newest is not None and self._newest.add(body) > _UNREAD_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():  # its body is to come, see `_ignore_upgrade`
            return
        assert self._newest is not None
        self._newest.has_come = True
        self._newest.heard.set()
        self._in_head, self._in_request = True, False
        self._deadlines.arrived()
