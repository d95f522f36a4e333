"""uvicorn's HTTP/1.1 protocol with bounds, and with answers that leave in one piece.

It serves what the reactors hand over: connections whose requests they do not know. One goes back to them once it has
been answered and nothing more has come. Event loop only, an object a connection.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tierstore.service.http.door import REFUSED_S, Door
from tierstore.service.http.messages import CONNECTION

HEAD_BYTES = 64 << 10
PIPELINED = 64  # requests that a client may send ahead of their answers
_UPGRADE = re.compile(rb"(?i)\r\nupgrade:")
_BEGUN = re.compile(rb"(?i)\r\nu(p(g(r(a(de?)?)?)?)?)?\Z")


class _JoiningTransport:
    """Lets an answer's head wait for what is written next: one system call and one packet where there were two.

    What waits goes out at the next write, when the answer is complete (`flush`), or when the connection is closed.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._transport.is_closing():  # by what came behind the request that is answered
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
    """One of the `door`'s connections, if there is one.

    Closes a connection whose request line and headers go beyond HEAD_BYTES, finished or not, or the trailers of whose
    chunked body do (they are read and dropped, as RFC 9110, 6.5.1, allows), which sends more than PIPELINED requests ahead,
    or which sends nothing for as long as an idle one is kept, in the middle of a request too. What comes behind a request
    that ends its connection is dropped (RFC 9112, 9.6).

    `first` are bytes that came before; `back` takes the descriptor of a connection that is to go back.
    """

    def __init__(
        self,
        *args: Any,
        door: Door | None = None,
        first: bytes = b"",
        refused: bool = False,
        back: Callable[[int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._door, self._first, self._refused, self._back = door, first, refused, back
        self._served: bool | None = None
        self._running: Any = None  # the request that is being answered: the first of those that were sent ahead
        self._lost = False
        self._head_bytes = 0
        self._held = b""  # of a head: it may begin a wish for another protocol
        self._before = b""  # the last bytes that the parser has
        self._beside_bytes = 0  # of a chunked body that came since the last of what it carries: sizes, trailers
        self._in_head = True
        self._in_request = False  # of a head some bytes may be with the parser alone
        self._patience_s = float(self.timeout_keep_alive)

    def is_lost(self) -> bool:
        """Whether the client has gone. Any thread."""
        return self._lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_JoiningTransport(transport))  # type: ignore[arg-type]
        if self._door is not None:
            self._served = self._door.enter(refused=self._refused)
            if self._served is None:
                transport.abort()
                return
            if not self._served:
                self.app, self._patience_s = self._door.app, REFUSED_S
        self._be_patient()
        first, self._first = self._first, b""
        if first:
            self.data_received(first)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Who has sent a whole request and ends only his side is answered still."""
        if self.cycle is None or self.cycle.response_complete or not self._in_head or self.pipeline:
            return None
        self.cycle.keep_alive = False
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._running is not None and not self._running.response_complete:  # else uvicorn takes it for a defect
            self._running.disconnected = True
            self._running.message_event.set()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._door is not None and self._served is not None:
            self._door.leave(self._served)
            self._served = None

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        keeps = self.cycle.keep_alive
        self._running = self.pipeline[-1][0] if self.pipeline else self.cycle
        super().on_response_complete()
        if keeps and self._is_idle():
            self._go_back()

    def _is_idle(self) -> bool:
        """Whether nothing is left to be done: no request, and no byte of one or of an answer."""
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
        """Leave the connection to the reactors. What the transport closes is only its own descriptor of it."""
        if self._back is None:
            return
        self.transport.pause_reading()
        fd = os.dup(self.transport.get_extra_info("socket").fileno())
        self._served = None  # counted by them from here on
        self._unset_keepalive_if_required()
        self.transport.abort()
        self._back(fd)

    def _has_last(self) -> bool:
        """Whether the request that ends the connection is here."""
        return self.cycle is not None and not self._in_request and not self.cycle.keep_alive

    def data_received(self, data: bytes) -> None:
        if self._has_last():
            return
        # Only while a head is open: bytes of a body do not count, and one read holds at most one read's worth too much.
        if not self._in_head:
            self._beside_bytes += len(data)
        else:
            self._head_bytes += len(data)
            data = self._without_wish(data)
        self._before = (self._before + data[-3:])[-3:]
        super().data_received(data)
        if self._has_last():
            return
        if not self.transport.is_closing():
            if self._in_head:
                if self._head_bytes > HEAD_BYTES:
                    self.send_400_response("Request head too large.")
            elif self._beside_bytes > HEAD_BYTES:
                self.transport.abort()  # whatever the application has answered with so far
        if (self._head_bytes or not self._in_head) and self.timeout_keep_alive_task is None:
            self._be_patient()  # of a request that has begun to arrive the next bytes are waited for no longer

    def _without_wish(self, data: bytes) -> bytes:
        """Bytes of a head without its wish for another protocol, such as the one for HTTP/2 that Java's client has by default.

        A server may pass over it (RFC 9110, 7.8); the parser would take the body for that protocol. What may be the
        beginning of a wish stays here until more comes.
        """
        before, data, self._held = self._before, self._held + data, b""
        text = before + data
        end = text.find(b"\r\n\r\n")
        if (wish := _UPGRADE.search(text, 0, len(text) if end < 0 else end)) is not None:
            if (at := wish.start() + 2 - len(before)) >= 0:
                data = b"x-".join((data[:at], data[at:]))
        elif end < 0 and (begun := _BEGUN.search(text)) is not None and (at := begun.start() + 2 - len(before)) >= 0:
            data, self._held = data[:at], data[at:]
        return data

    def send_400_response(self, msg: str) -> None:
        if not self._has_last():
            super().send_400_response(msg)

    def _unsupported_upgrade_warning(self) -> None:
        """A wish for another protocol behind another request: the body would be taken for the next one."""
        self.transport.close()

    def _be_patient(self) -> None:
        if not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(self._patience_s, self._silent)

    def _silent(self) -> None:
        """Nothing came for so long."""
        if self.flow.read_paused:  # it is we who do not read
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
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer would pass for a header, after those were checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        self._in_head = False
        self._head_bytes = self._beside_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._beside_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._in_request = True, False
