"""TLS between the event loop's transport and a protocol, whose bytes on their way can be counted.

The TLS of asyncio and of uvloop does not say how much of a large piece that was written has yet to leave. Event loop
only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

_READ_BYTES = 64 << 10


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The server's side of a connection: a protocol for the event loop, a transport for `protocol`.

    `protocol.connection_made` is called after the handshake.
    """

    def __init__(self, context: ssl.SSLContext, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol, self._context = protocol, context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._raw: asyncio.Transport | None = None
        self._is_made = self._is_ending = False

    # --- for the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_ending:  # it is not read, only counted
            self._protocol.data_received(data)
            return
        self._incoming.write(data)
        try:
            if not self._is_made:
                self._session.do_handshake()
                self._is_made = True
                self._protocol.connection_made(self)
            while not self.is_closing():
                if part := self._session.read(_READ_BYTES):
                    self._protocol.data_received(part)
                else:  # the client has ended its side
                    self.eof_received()
        except ssl.SSLWantReadError:
            self._send()
        except ssl.SSLError:  # what came is no TLS, or no good certificate: the client is told
            self._send()
            self._transport.close()

    def eof_received(self) -> bool | None:
        if self._is_made:
            self._protocol.eof_received()
        self.close()
        return None

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    # --- for the protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._context if name == "sslcontext" else self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            return
        with memoryview(data) as rest:
            at = 0
            while at < len(rest):
                at += self._session.write(rest[at:])  # a record at a time
        self._send()

    def close(self) -> None:
        self._say_end()
        self._transport.close()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._say_end()
        self._transport.write_eof()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._is_ending or self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    @property
    def _transport(self) -> asyncio.Transport:
        assert self._raw is not None
        return self._raw

    def _send(self) -> None:
        if (data := self._outgoing.read()) and not self._transport.is_closing():
            self._transport.write(data)

    def _say_end(self) -> None:
        """Tell the client that nothing more comes, once; its own word is not waited for."""
        if self._is_made and not self.is_closing():
            self._is_ending = True
            with contextlib.suppress(ssl.SSLError):  # its word has yet to come
                self._session.unwrap()
            self._send()
