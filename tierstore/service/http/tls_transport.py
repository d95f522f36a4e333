"""Connections with TLS on the event loop: their handshake, and those that Python serves, as asyncio's transports are.

Most go on to a reactor after their handshake. What a reactor hands off comes back with its session, and may go
there again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

import numpy as np

from tierstore.kernels.codec import address_of
from tierstore.service.openssl import WANTS_READ, Context, Session
from tierstore.service.tls import has_ended

HANDSHAKE_S = 10.0  # for a client to begin TLS
SESSION = "tierstore.session"  # what `get_extra_info` has the session as
_HIGH, _LOW = 1 << 16, 1 << 14  # bytes that wait to leave
_TURN = 16  # reads of one connection, before others have their turn
_TURN_BYTES = 1 << 20  # that are sent of one


async def handshake(sock: socket.socket, context: Context) -> Session:
    """The session of a connection whose handshake has been made. OSError where that fails, or takes too long."""
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    session = context.session(fd)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            while (wanted := session.accept()) is not None:
                await _ready(loop, fd, wanted)
        session.names, end_s = session.certificate()
        if has_ended(end_s):
            raise ConnectionError("the client's certificate has expired")
    except BaseException:
        session.close(abort=True)
        raise
    return session


async def _ready(loop: asyncio.AbstractEventLoop, fd: int, wanted: int) -> None:
    add, remove = (
        (loop.add_reader, loop.remove_reader) if wanted == WANTS_READ else (loop.add_writer, loop.remove_writer)
    )
    ready = loop.create_future()
    add(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)


class TlsTransport(asyncio.Transport):
    """The transport of a protocol over a connection with TLS. `begin` starts it."""

    def __init__(self, sock: socket.socket, session: Session, protocol: asyncio.Protocol) -> None:
        super().__init__({"socket": sock, "sslcontext": session, SESSION: session})
        self._socket, self._session, self._protocol = sock, session, protocol
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._high, self._low = _HIGH, _LOW
        self._reads = self._pauses_writing = False
        self._closing = self._ended = False

    def begin(self) -> None:
        self._protocol.connection_made(self)
        self.resume_reading()

    # --- what comes

    def is_reading(self) -> bool:
        return self._reads

    def pause_reading(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        if not self._reads and not self._closing:
            self._reads = True
            self._loop.add_reader(self._fd, self._read)
            self._loop.call_soon(self._read)  # OpenSSL may hold bytes already, of which the socket does not tell

    def _read(self) -> None:
        for _ in range(_TURN):
            if not self._reads or self._closing:
                return
            try:
                data = self._session.read()
            except OSError as error:
                self._lose(error)
                return
            if data is None:
                return
            if not data:  # TLS ends for both sides
                self._protocol.eof_received()
                self.close()
                return
            try:
                self._protocol.data_received(data)
            except BaseException:
                self._lose(None)
                raise
        self._loop.call_soon(self._read)

    # --- what leaves

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or not len(data):
            return
        sent = 0
        if not self._unsent:
            try:
                sent = self._send(data)
            except OSError as error:
                self._lose(error)
                return
            if sent == len(data):
                return
            self._loop.add_writer(self._fd, self._write_more)
        self._unsent += memoryview(data)[sent:]
        if len(self._unsent) > self._high and not self._pauses_writing:
            self._pauses_writing = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _send(self, data: bytes | bytearray | memoryview) -> int:
        """Send as much as the socket takes, within a turn."""
        array = np.frombuffer(data, np.uint8)
        at, size, sent = address_of(array), len(array), 0
        while sent < min(size, _TURN_BYTES) and (took := self._session.write(at + sent, size - sent)):
            sent += took
        return sent

    def _write_more(self) -> None:
        if self._ended:
            return
        try:
            sent = self._send(self._unsent)
        except OSError as error:
            self._lose(error)
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._fd)
            if self._closing:
                self._end(None)
                return
        if self._pauses_writing and len(self._unsent) <= self._low:
            self._pauses_writing = False
            self._protocol.resume_writing()

    # --- the end

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self.pause_reading()
        self._closing = True
        if not self._unsent:
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        self._lose(None)

    def hand_over(self, fd: int) -> Session:
        """The session, for who serves the connection from here on, as the descriptor `fd`.

        The transport ends, without a word to the client.
        """
        session, self._session = self._session, Session(0)
        self._lose(None)
        return session.moved(fd)

    def _lose(self, error: OSError | None) -> None:
        self.pause_reading()
        self._closing = True
        self._unsent = bytearray()  # not cleared: where a write has failed, its frame still refers to the bytes
        self._loop.call_soon(self._end, error, True)

    def _end(self, error: OSError | None, abort: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._loop.remove_writer(self._fd)
        self._protocol.connection_lost(error)
        self._session.close(abort=abort)
        self._socket.close()
