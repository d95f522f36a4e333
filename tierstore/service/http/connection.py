"""uvicorn's HTTP/1.1 protocol with limits, and with responses that are sent in one piece.

It serves connections that reactors hand off, because they do not know a request. A connection goes back to them once it is
answered and nothing more has come. Event loop only; an object for each connection. `tests/service/test_uvicorn.py` names
the private parts of uvicorn that this relies on.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tierstore import kernels
from tierstore.service.addresses import is_on_host
from tierstore.service.http.connection_limit import REFUSED_S, ConnectionLimit
from tierstore.service.http.deadlines import Deadlines
from tierstore.service.http.frames import PREFACE, FrameSession
from tierstore.service.http.messages import CONNECTION, PEER, UNNAMED, Peer
from tierstore.service.http.tls_transport import SESSION
from tierstore.service.limits.silent import host_of
from tierstore.service.openssl import Session

Back: TypeAlias = Callable[[], Callable[[int, Session | None], None] | None]
HEAD_BYTES = 64 << 10
PIPELINED = 64  # requests that a client may send ahead of their answers
_HEALTH = {"/v2/health/live", "/v2/health/ready"}
_UPGRADE = re.compile(rb"(?i)\r\nupgrade:")
_PARTIAL_UPGRADE = re.compile(rb"(?i)\r\nu(p(g(r(a(de?)?)?)?)?)?\Z")


class _JoiningTransport:
    """Holds back a response's head until the next write: one system call and one packet instead of two.

    The head is sent with the next write, when the response is complete (`flush`), or when the connection is closed.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._transport.is_closing():  # because of bytes behind the request that is answered
            self._head = None
        elif self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines((head, data))
        elif (
            type(data) is bytes and data.startswith(b"HTTP/1.1 ") and data[9:10] != b"1"
        ):  # 1xx: the client waits for it
            self._head = data
        else:
            self._transport.write(data)

    def writelines(self, pieces: list[bytes | memoryview]) -> None:
        self.flush()
        self._transport.writelines(pieces)

    def flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            if not self._transport.is_closing():
                self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection, counted by `limit` if there is one.

    Closes a connection whose request line and headers exceed HEAD_BYTES, finished or not; or the trailers of whose chunked body
    do (they are read and dropped, as RFC 9110, 6.5.1, allows); that sends more than PIPELINED requests ahead; or that sends
    nothing for as long as an idle one is kept, in the middle of a request too. Bytes behind a request that ends its connection
    are dropped (RFC 9112, 9.6).

    `first` are bytes that came before; `back` returns what gets the descriptor of a connection that goes back, and its TLS, or None.
    `admin`: it is one of the listener of admin requests. One that begins as HTTP/2 is served
    as `limit.http2` has it.
    """

    def __init__(
        self,
        *args: Any,
        limit: ConnectionLimit | None = None,
        first: bytes = b"",
        refused: bool = False,
        back: Back | None = None,
        admin: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._http2 = None if limit is None or refused else limit.http2
        self._frames: FrameSession | None = None
        self._first_bytes: bytes | None = None if self._http2 is None else b""  # None: it has begun as HTTP/1.1
        self._admin, self._peer = admin, UNNAMED
        self._limit, self._first, self._refused, self._back = limit, first, refused, back
        self._served: bool | None = None
        self._running: Any = None  # the request that is being answered: the first of those that were sent ahead
        self._lost = False
        self._head_bytes = 0
        self._held = b""  # of a head: it may be the beginning of `Upgrade`
        self._before = b""  # the last bytes that the parser got
        self._beside_bytes = 0  # of a chunked body, since its last data: sizes, trailers
        self._in_head = True
        self._in_request = False  # the parser may hold some bytes of a head
        self._patience_s = float(self.timeout_keep_alive)
        self._deadlines: Deadlines | None = None

    def is_lost(self) -> bool:
        """Whether the client has gone. Any thread."""
        return self._lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_JoiningTransport(transport))  # type: ignore[arg-type]
        self._session: Session | None = transport.get_extra_info(SESSION)
        names = () if self._session is None else self._session.names
        sock = transport.get_extra_info("socket")
        self._peer, self._host = Peer(self._admin, names, is_on_host(sock)), host_of(sock)
        if self._limit is not None:
            self._served = self._limit.acquire(refused=self._refused)
            if self._served is None:
                transport.abort()
                return
            if not self._served:
                self.app, self._patience_s = self._limit.app, REFUSED_S
            self._deadlines = self._limit.deadlines(transport, refused=not self._served)
        self._be_patient()
        first, self._first = self._first, b""
        if first:
            self.data_received(first)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """A client that has sent a whole request and then ends only its own side is still answered."""
        if (
            self._frames is not None
            or self.cycle is None
            or self.cycle.response_complete
            or not self._in_head
            or self.pipeline
        ):
            return None
        if self.scheme == "https":  # TLS ends for both sides
            return None
        self.cycle.keep_alive = False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._frames is not None:
            self._frames.close()
        if self._deadlines is not None:
            self._deadlines.close()
        if self._running is not None and not self._running.response_complete:  # else uvicorn logs a defect
            self._running.disconnected = True
            self._running.message_event.set()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._limit is not None and self._served is not None:
            self._limit.heads.discard(self._host, self.transport)
            self._limit.release(self._served)
            self._served = None

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        keeps = self.cycle.keep_alive
        self._running = self.pipeline[-1][0] if self.pipeline else self.cycle
        super().on_response_complete()
        if keeps and self._is_idle():
            self._go_back()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Answer a request, when it is its turn."""
        begin = super()._start_asgi_task
        if self._limit is None:
            begin(cycle, app)
            return
        sent_ahead = cycle is self._running
        self._limit.turns.put(
            lambda: None if self._lost else begin(cycle, app),
            health=not sent_ahead and cycle.scope["path"] in _HEALTH,
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._frames is not None:
            self._frames.pause_writing()
        if self._deadlines is not None:
            self._deadlines.wait_for_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._frames is not None:
            self._frames.resume_writing()
        if self._deadlines is not None:
            self._deadlines.all_sent()

    def shutdown(self) -> None:
        if self._frames is not None:
            self._frames.go_away()
            return
        super().shutdown()
        if self._running is not None:  # those that were sent ahead have not begun
            self._running.keep_alive = False
        if self._deadlines is not None:
            self._deadlines.finish()

    def _is_idle(self) -> bool:
        """Whether nothing is pending: no request, and no byte of a request or a response."""
        return (
            self._served is True
            and not self.pipeline
            and not self._in_request
            and not self._head_bytes
            and not self.transport.is_closing()
            and not self.transport.get_write_buffer_size()
            and self.cycle.response_complete
        )

    def _go_back(self) -> None:
        """Give the connection back to the reactors. The transport closes only its own descriptor of it."""
        give_back = None if self._back is None else self._back()
        if give_back is None:
            return
        self.transport.pause_reading()
        fd = os.dup(self.transport.get_extra_info("socket").fileno())
        self._served = None  # the reactors count it from here on
        self._unset_keepalive_if_required()
        if self._session is None:
            self.transport.abort()
            give_back(fd, None)
        else:
            give_back(fd, self.transport.hand_over(fd))  # type: ignore[attr-defined]

    def _has_last(self) -> bool:
        """Whether the request that ends the connection has come."""
        return self.cycle is not None and not self._in_request and not self.cycle.keep_alive

    def data_received(self, data: bytes) -> None:
        if self._frames is not None:
            self._frames.feed(data)
            return
        if self._first_bytes is not None:
            data = self._first_bytes = self._first_bytes + data
            if PREFACE.startswith(data[: len(PREFACE)]):
                if len(data) >= len(PREFACE):
                    self._begin_http2(data[len(PREFACE) :])
                return
            self._first_bytes = None
        if self._has_last():
            return
        # Only while a head is open: bytes of a body do not count, and one read holds at most one read's worth too much.
        if not self._in_head:
            self._beside_bytes += len(data)
        else:
            self._expect_head()
            self._head_bytes += len(data)
            data = self._without_upgrade(data)
        self._before = (self._before + data[-3:])[-3:]
        super().data_received(data)
        if self._has_last():
            return
        if not self.transport.is_closing():
            if self._in_head:
                if self._head_bytes > HEAD_BYTES:
                    self.send_400_response("Request head too large.")
            elif self._beside_bytes > HEAD_BYTES:
                self.transport.abort()  # even if part of a response was sent
        if (self._head_bytes or not self._in_head) and self.timeout_keep_alive_task is None:
            self._be_patient()  # the next bytes of a request may take no longer than an idle connection is kept

    def _begin_http2(self, data: bytes) -> None:
        if not kernels.is_complete():  # they are being compiled: a client tries again
            self.transport.abort()
            return
        assert self._http2 is not None
        self._frames = FrameSession(self._http2, self.transport, self._peer.names, admin=self._admin)
        self._frames.feed(data)
        self._be_patient()

    def _without_upgrade(self, data: bytes) -> bytes:
        """Bytes of a head without its `Upgrade`, such as the one to HTTP/2 that Java's client sends by default.

        A server may ignore it (RFC 9110, 7.8); the parser would read the body in that protocol. Bytes that may be the beginning of
        `Upgrade` are held back until more come.
        """
        before, data, self._held = self._before, self._held + data, b""
        text = before + data
        end = text.find(b"\r\n\r\n")
        if (upgrade := _UPGRADE.search(text, 0, len(text) if end < 0 else end)) is not None:
            if (at := upgrade.start() + 2 - len(before)) >= 0:
                data = b"x-".join((data[:at], data[at:]))
        elif (
            end < 0
            and (partial := _PARTIAL_UPGRADE.search(text)) is not None
            and (at := partial.start() + 2 - len(before)) >= 0
        ):
            data, self._held = data[:at], data[at:]
        return data

    def send_400_response(self, msg: str) -> None:
        if not self._has_last():
            super().send_400_response(msg)

    def _unsupported_upgrade_warning(self) -> None:
        """An `Upgrade` behind another request: the parser would read the body as the next request."""
        self.transport.close()

    def _be_patient(self) -> None:
        if not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(self._patience_s, self._silent)

    def _silent(self) -> None:
        """Nothing came for the idle time."""
        if self._frames is not None:
            if self._frames.idle:
                self._frames.go_away()
            self._be_patient()
        elif self.flow.read_paused:  # this side does not read
            self._be_patient()
        else:
            self.timeout_keep_alive_handler()

    def on_message_begin(self) -> None:
        if self._has_last():
            raise BufferError("the request before ends the connection")
        if len(self.pipeline) >= PIPELINED:
            self.transport.abort()
            raise BufferError(f"more than {PIPELINED} requests were sent ahead of their answers")
        super().on_message_begin()
        self._in_request = True
        self._expect_head()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self.scope[PEER] = self._peer  # type: ignore[literal-required]
        self._in_head = True

    def _expect_head(self) -> None:
        if self._deadlines is not None:
            self._deadlines.expect_head()
        if self._limit is not None and self._served and (self.cycle is None or self.cycle.response_complete):
            self._limit.heads.add(self._host, self.transport)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer would pass for a header, after those were checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        if self._limit is not None and self._limit.draining:
            self.cycle.keep_alive = False
        if self._deadlines is not None:
            self._deadlines.expect_body()
        if self._limit is not None:
            self._limit.heads.discard(self._host, self.transport)
        self._in_head = False
        self._head_bytes = self._beside_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._beside_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._in_request = True, False
        if self._deadlines is not None:
            self._deadlines.arrived()
