"""uvicorn's HTTP/1.1 protocol with bounds, with look-ups answered at once, and with answers that leave in one piece.

Event loop only, an object a connection.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tierstore.service.http.call import DIRECT_BODY_BYTES
from tierstore.service.http.door import REFUSED_S, Door
from tierstore.service.http.messages import ARRIVED, CONNECTION, Response, Scope

HEAD_BYTES = 64 << 10
PIPELINED = 64  # requests that a client may send ahead of their answers
# a look-up, of nothing that would have to be decoded
_LOOKUP = re.compile(rb"/v2/models/[\w./-]+/infer|/v1/models/[\w./-]+:predict", re.ASCII)
_UPGRADE = re.compile(rb"(?i)\r\nupgrade:")


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class _JoiningTransport:
    """Lets an answer's head wait for what is written next: one system call and one packet where there were two.

    What waits goes out at the next write, when the answer is complete (`flush`), or when the connection is closed.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._head is not None:
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
    chunked body do (they are read and dropped, as RFC 9110, 6.5.1, allows), which sends more than PIPELINED requests ahead, or which sends nothing for as long as an idle one is kept, in the middle of a request too.

    A look-up that has come whole, or in two pieces, its head and its body, is first offered to the application as it is
    (`at_once`): without a task and an event of its own it costs about a quarter less. What the application does not answer then
    is uvicorn's, as anything else is. One a read, so that a client which sends many ahead holds up nobody.
    """

    def __init__(self, *args: Any, door: Door | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._door = door
        self._served: bool | None = None
        self._at_once: Callable[[Scope, bytes], Response | None] | None = None  # of an application that has it
        self._lost = False
        self._held: list[bytes] | None = None  # the body so far of a look-up that uvicorn has not been told of
        self._is_first = True  # whether none of this read's requests was answered at once: others have their turn then
        self._head_bytes = 0
        self._beside_bytes = 0  # of a chunked body that came since the last of what it carries: sizes, trailers
        self._in_head = True
        self._patience_s = float(self.timeout_keep_alive)

    def is_lost(self) -> bool:
        """Whether the client has gone. Any thread."""
        return self._lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_JoiningTransport(transport))  # type: ignore[arg-type]
        if self._door is not None:
            self._served = self._door.enter()
            if self._served is None:
                transport.abort()
                return
            if not self._served:
                self.app, self._patience_s = self._door, REFUSED_S
        self._at_once = getattr(self.app, "at_once", None)
        self._be_patient()

    def shutdown(self) -> None:
        if self._held is not None:  # what has begun is finished
            self._pass_on(self._held)
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._door is not None and self._served is not None:
            self._door.leave(self._served)
            self._served = None

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        # Only while a head is open: bytes of a body do not count, and one read holds at most one read's worth too much.
        if not self._in_head:
            self._beside_bytes += len(data)
        else:
            self._head_bytes += len(data)
            # A server may pass over a wish for another protocol (RFC 9110, 7.8), such as the one for HTTP/2 that Java's client
            # has by default; the parser would take the body for that protocol.
            end = data.find(b"\r\n\r\n")
            if (wish := _UPGRADE.search(data, 0, len(data) if end < 0 else end)) is not None:
                at = wish.start() + 2
                data = b"x-".join((data[:at], data[at:]))
        self._is_first = True
        super().data_received(data)
        if self._held is not None:  # more of it is to come
            if self._held or not self._is_to_be_short():
                self._pass_on(self._held)
            else:
                self.scope.setdefault(ARRIVED, time.perf_counter_ns())  # type: ignore[misc]
        if not self.transport.is_closing():
            if self._in_head:
                if self._head_bytes > HEAD_BYTES:
                    self.send_400_response("Request head too large.")
            elif self._beside_bytes > HEAD_BYTES:
                self.transport.abort()  # whatever the application has answered with so far
        if (self._head_bytes or not self._in_head) and self.timeout_keep_alive_task is None:
            self._be_patient()  # of a request that has begun to arrive the next bytes are waited for no longer

    def _unsupported_upgrade_warning(self) -> None:
        """A wish for another protocol that came in pieces: the body would be taken for the next request."""
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
        if len(self.pipeline) >= PIPELINED:
            self.transport.abort()
            raise BufferError(f"more than {PIPELINED} requests were sent ahead of their answers")
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer would pass for a header, after those were checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._may_be_at_once():
            self._held = []
        else:
            # of one that was answered at once in the same read, and would go off while this one is worked on
            self._unset_keepalive_if_required()
            super().on_headers_complete()
        self._in_head = False
        self._head_bytes = self._beside_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._beside_bytes = 0
        if self._held is not None:
            self._held.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._held is None or not self._answer_at_once(self._held):
            super().on_message_complete()
        self._in_head = True

    # --- look-ups answered at once

    def _may_be_at_once(self) -> bool:
        """Whether a request is a look-up that nothing else is to be seen to with."""
        return (
            self._is_first
            and self._at_once is not None
            and _LOOKUP.fullmatch(self.url) is not None
            and (self.cycle is None or self.cycle.response_complete)
            and not self.pipeline
            and not self.expect_100_continue
            and not self.flow.write_paused
            and self.parser.get_method() == b"POST"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
        )

    def _is_to_be_short(self) -> bool:
        """Whether a body is announced that may be waited for: many clients send it apart from the head."""
        declared = dict(self.headers).get(b"content-length", b"")
        return declared.isdigit() and len(declared) < 9 and int(declared) <= DIRECT_BODY_BYTES

    def _answer_at_once(self, held: list[bytes]) -> bool:
        assert self._at_once is not None
        self.scope["method"], self.scope["path"] = "POST", self.url.decode()
        response = self._at_once(self.scope, held[0] if len(held) == 1 else b"".join(held))  # type: ignore[arg-type]
        if response is None:
            self._pass_on(held)
            return False
        self._held, self._is_first = None, False
        headers, chunks = response.pieces()
        head = [_STATUS_LINES[response.status]]
        for name, value in (*self.server_state.default_headers, *headers):
            head += (name, b": ", value, b"\r\n")
        head.append(b"\r\n")
        self.transport.writelines([b"".join(head), *chunks])
        self.on_response_complete()
        return True

    def _pass_on(self, held: list[bytes]) -> None:
        """Tell uvicorn of the request that it has not been told of."""
        self._held = None
        super().on_headers_complete()
        for body in held:
            super().on_body(body)
