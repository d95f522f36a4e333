"""Connections of uvicorn's protocol, within the bounds that reactors keep.

uvicorn parses requests and writes answers; it has no limits of its own for a client that says nothing, sends slowly, or
does not read. So each connection has this around the protocol. After every event it looks at what its client owes (a
request, the rest of one, an answer's reading), and until when; the bytes that are not read count in `max_inflight`.

    HANDSHAKE ──► WAITING ──► HEAD ──► BODY ──► SERVED ──► WAITING or CLOSING, behind the last answer
                    idle       └─ arrival ─┘    no limit

Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import h11

from tierstore.config import Settings
from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.http.messages import Receive, body_deadline
from tierstore.service.limits import slow_clients
from tierstore.service.limits.silent import host_of
from tierstore.service.limits.worker_pool import ByteBudget

_LOOK_S = 0.25  # between two looks at an answer that is not read


class Phase(Enum):
    """What a connection waits for."""

    HANDSHAKE = "TLS to begin"
    WAITING = "a request"
    HEAD = "the rest of a head"
    BODY = "the rest of a body"
    SERVED = "the application"
    CLOSING = "its end"


class HttpProtocol(Protocol):
    """uvicorn's protocol of a connection, over h11."""

    conn: h11.Connection
    client: tuple[str, int] | None

    def connection_made(self, transport: asyncio.Transport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> None: ...


class ConnectionBounds:
    """The bounds of a listener's connections: `limit` counts them, and their unread bytes are held in `budget`."""

    def __init__(self, settings: Settings, limit: ConnectionLimit, budget: ByteBudget) -> None:
        self.limit, self.budget = limit, budget
        self.idle_s, self.arrival_s = settings.idle_timeout_s, settings.arrival_timeout_s

    def stall_s(self) -> float:
        """How long a client may read nothing of an answer."""
        pressed = self.budget.used_bytes > self.budget.limit_bytes // 2
        return slow_clients.PRESSED_STALL_S if pressed else slow_clients.STALL_S


class BoundedConnection(asyncio.Protocol):
    """An accepted and counted connection, which it counts off at its end. `refused`: it is beyond the limit.

    `make` gives uvicorn's protocol for it. `ended` is called once it is over.
    """

    def __init__(
        self,
        sock: socket.socket,
        refused: bool,
        bounds: ConnectionBounds,
        make: Callable[[BoundedConnection], HttpProtocol],
        ended: Callable[[BoundedConnection], None],
    ) -> None:
        self._socket, self.refused, self._bounds, self._ended = sock, refused, bounds, ended
        self._loop = asyncio.get_running_loop()
        self._host = host_of(sock)
        self._protocol = make(self)
        self._transport: asyncio.Transport | None = None  # with TLS there is none before the handshake is over
        self._with_tls = self._lost = self._counted_off = False
        self._phase, self._since_s = Phase.HANDSHAKE, self._loop.time()
        self._began_s = self._since_s
        self._finish_s: float | None = None  # the service ends: no client has longer
        self._dropped = 0  # bytes behind the last answer
        # an answer that is not read: its bytes when it began, those that count, those that the client has yet to take
        self._answer, self._held, self._unread = 0, 0, 0
        self._answered_s = self._read_s = 0.0  # when it began; when the client last took some of it
        self._all_read: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    # --- for the application

    def is_lost(self) -> bool:
        """Whether the client has gone. Any thread."""
        return self._lost

    @property
    def client(self) -> tuple[str, int] | None:
        return self._protocol.client

    async def turn(self) -> bool:
        """Wait until the answer before has left: requests that are sent ahead wait. False: the client has gone."""
        while self._unread and not self._lost:
            self._all_read = self._all_read or self._loop.create_future()
            await asyncio.shield(self._all_read)
        return not self._lost

    def in_time(self, receive: Receive) -> Receive:
        """`receive` of a request whose body has as long as a request may take to arrive."""

        async def receive_in_time() -> Any:
            if self._phase is not Phase.BODY:
                return await receive()
            async with body_deadline(self._since_s, self._bounds.arrival_s):
                return await receive()

        return receive_in_time

    # --- for the listener

    def finish(self) -> None:
        """Give the client a little time for what it sends or reads: the service ends."""
        self._finish_s = self._loop.time() + slow_clients.ENDING_S
        if self._transport is None:
            self.abort()
        self._look()

    def hand_on(self, serve_connection: Callable[[int], None]) -> None:
        """Give the connection to another server as it is, if nothing of a request or of an answer is under way."""
        self._look()
        idle = self._phase is Phase.WAITING and not self._unread and not self._with_tls and not self.refused
        if self._transport is None or not idle:
            return
        fd = os.dup(self._socket.fileno())
        self._counted_off = True
        self.abort()
        serve_connection(fd)

    def abort(self) -> None:
        """Reset the connection."""
        if self._transport is not None:
            self._transport.abort()
        else:  # its handshake fails
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def count_off(self) -> None:
        """Note that it is over. May be called twice."""
        if self._lost:
            return
        self._lost = True
        self._hold(0)
        if self._timer is not None:
            self._timer.cancel()
        if self._all_read is not None and not self._all_read.done():
            self._all_read.set_result(None)
        self._bounds.limit.silent.discard(self._host, self.abort)
        if not self._counted_off:
            self._bounds.limit.release(refused=self.refused)
        self._ended(self)

    # --- for the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport, self._with_tls = transport, transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(high=0)  # else nobody says when all has left
        self._phase, self._since_s = Phase.WAITING, self._loop.time()
        self._protocol.connection_made(_ServedTransport(transport, self._look_soon, self._close))
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self.count_off()
        if self._transport is not None:
            self._protocol.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.CLOSING:
            self._dropped += len(data)
            if self._dropped > slow_clients.LINGER_BYTES:
                self.abort()
            return
        self._protocol.data_received(data)
        self._look()

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._look()

    def resume_writing(self) -> None:
        self._look()

    # --- what the client owes

    def _look(self) -> None:
        """Note what the client owes now, and end the connection if its time is over."""
        if self._lost:
            return
        now_s = self._loop.time()
        if self._transport is not None:
            self._note_phase(self._transport, now_s)
            self._note_unread(self._transport, now_s)
        self._note_silence()
        until_s = self._deadline_s()
        if until_s is None:
            return
        if now_s >= until_s:
            self._end()
            return
        next_s = min(until_s, now_s + _LOOK_S) if self._unread else until_s
        if self._timer is None or self._timer.cancelled() or next_s < self._timer.when():
            self._look_at(next_s)

    def _look_at(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._look()

    def _look_soon(self) -> None:
        """Look once the event loop has sent what it can."""
        self._loop.call_soon(self._look)

    def _note_phase(self, transport: asyncio.Transport, now_s: float) -> None:
        phase = self._current_phase(transport)
        if phase is self._phase:
            return
        if (self._phase, phase) != (Phase.HEAD, Phase.BODY):
            self._since_s = now_s
        self._phase = phase

    def _current_phase(self, transport: asyncio.Transport) -> Phase:
        connection = self._protocol.conn
        if self._phase is Phase.CLOSING or transport.is_closing():
            return Phase.CLOSING
        if connection.their_state is h11.SEND_BODY:
            return Phase.BODY
        if connection.their_state is h11.IDLE:
            return Phase.HEAD if connection.trailing_data[0] else Phase.WAITING
        return Phase.SERVED

    def _note_unread(self, transport: asyncio.Transport, now_s: float) -> None:
        size = transport.get_write_buffer_size()
        unread = size + _queued_bytes(self._socket) if size else 0
        self._hold(size)
        if not unread:
            if self._unread and self._phase is Phase.WAITING:
                self._since_s = now_s
            if self._all_read is not None:
                self._all_read.set_result(None)
                self._all_read = None
        elif not self._unread:
            self._answer, self._answered_s, self._read_s = unread, now_s, now_s
        elif unread < self._unread:
            self._read_s = now_s
        self._unread = unread

    def _note_silence(self) -> None:
        """Note whether it makes room for others, if it stays so for a while."""
        silent = self._bounds.limit.silent
        if self._phase in (Phase.HANDSHAKE, Phase.WAITING, Phase.HEAD) and not self._unread and not self.refused:
            silent.add(self._host, self.abort)
        else:
            silent.discard(self._host, self.abort)

    def _hold(self, size: int) -> None:
        if size != self._held:
            self._bounds.budget.hold(size - self._held)
            self._held = size

    def _deadline_s(self) -> float | None:
        """When the client's time is over; None: it owes nothing."""
        bounds, until_s = self._bounds, []
        if self._unread:
            in_all_s = slow_clients.STALL_S + self._answer / slow_clients.SLOWEST_RATE
            until_s = [self._read_s + bounds.stall_s(), self._answered_s + in_all_s]
        if self._phase is Phase.HANDSHAKE:
            until_s.append(self._since_s + slow_clients.HANDSHAKE_S)
        elif self._phase in (Phase.HEAD, Phase.BODY):
            answer_s = slow_clients.ENDING_S if self._phase is Phase.BODY else 0.0  # for the 408 to be sent
            until_s.append(self._since_s + bounds.arrival_s + answer_s)
        elif self._phase is Phase.WAITING and not self._unread:
            until_s.append(self._since_s + bounds.idle_s)
        elif self._phase is Phase.CLOSING and not self._unread:
            until_s.append(max(self._since_s, self._read_s) + slow_clients.ENDING_S)
        if self.refused and self._phase is not Phase.CLOSING and not self._unread:
            until_s.append(self._began_s + min(slow_clients.TURN_OFF_S, bounds.idle_s))
        if self._finish_s is not None and until_s:
            began_s = self._answered_s if self._unread else self._since_s  # perhaps after that
            until_s.append(max(self._finish_s, began_s + slow_clients.ENDING_S))
        return min(until_s, default=None)

    def _end(self) -> None:
        """End the connection of a client whose time is over."""
        if self._transport is not None and self._phase in (Phase.WAITING, Phase.HEAD) and not self._unread:
            self._transport.close()
            self._look()
        else:
            self.abort()

    def _close(self) -> None:
        """End the connection behind its last answer; a client that is still sending may go on for a while, unheard."""
        assert self._transport is not None
        self._look()
        if self._phase is Phase.BODY and self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
        else:
            self._transport.close()
        self._phase, self._since_s = Phase.CLOSING, self._loop.time()
        self._look()


class _ServedTransport(asyncio.Transport):
    """The transport of a connection for uvicorn's protocol: `written` is called after each write, `closing` closes."""

    def __init__(self, transport: asyncio.Transport, written: Callable[[], None], closing: Callable[[], None]) -> None:
        super().__init__()
        self._transport, self._written, self._closing = transport, written, closing
        self._is_closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)
        self._written()

    def close(self) -> None:
        if not self.is_closing():
            self._is_closing = True
            self._closing()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._transport.resume_reading()


def _queued_bytes(sock: socket.socket) -> int:
    """The bytes that the system has yet to bring to the other end of a socket."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):  # it is closed
        return 0
