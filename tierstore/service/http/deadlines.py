"""When a connection that Python serves is late: a client that is silent, a head or a body that does not
arrive, an answer that is not read.

Bytes that wait for the client count in `max_inflight` until they have left. A silent connection is closed. A late
one is reset, because closing it would wait for the client. Time in which the event loop stood still does not count:
nobody could read what the client sent, send it more, or refuse it. Each connection has an object of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from tierstore.service.limits import slow_clients
from tierstore.service.limits.worker_pool import ByteBudget

_DROP = struct.pack("ii", 1, 0)  # linger, for no time


class Deadlines:
    """The deadlines of a connection over `transport`.

    A head may take `head_s` seconds from its first byte on; where bytes are expected, `idle_s` may pass without one.
    """

    def __init__(self, transport: asyncio.Transport, inflight: ByteBudget, head_s: float, idle_s: float) -> None:
        # The connection hears when bytes begin to wait, and of the last that has left. (Over TLS 0 would be always.)
        transport.set_write_buffer_limits(high=1, low=0)
        self._transport, self._inflight, self._head_s, self._idle_s = transport, inflight, head_s, idle_s
        self._loop = asyncio.get_running_loop()
        self._silent_since: float | None = self._loop.time()  # None: no bytes are expected
        self._arrival: float | None = None  # when the head, or the body, has to be here
        self._end: float | None = None  # when the service does not wait for clients any more
        self._unsent = self._unsent_first = 0
        self._unsent_since = self._moved = 0.0
        self._every_s = min(slow_clients.CHECK_S, head_s, idle_s)
        self._check_later()

    def expect_bytes(self) -> None:
        """Some have come now, or are to come from now on."""
        self._silent_since = self._loop.time()

    def expect_head(self) -> None:
        """Bytes of a head have come."""
        if self._arrival is None:
            self._arrival = self._loop.time() + self._head_s

    def expect_body(self) -> None:
        """A head is complete."""
        self._arrival = self._loop.time() + slow_clients.BODY_S + slow_clients.CHECK_S  # after a refusal of its own

    def arrived(self) -> None:
        """A request is complete."""
        self._arrival = self._silent_since = None

    def wait_for_client(self) -> None:
        """The transport could not send all."""
        self._release()
        self._unsent = self._unsent_first = self._transport.get_write_buffer_size()
        self._inflight.hold(self._unsent)
        self._unsent_since = self._moved = self._loop.time()

    def all_sent(self) -> None:
        """The transport has sent all."""
        self._release()

    def finish(self) -> None:
        """The service ends."""
        self._end = self._loop.time() + slow_clients.ENDING_S

    def close(self) -> None:
        """The connection has ended."""
        self._timer.cancel()
        self._release()

    def _release(self) -> None:
        unsent, self._unsent = self._unsent, 0
        if unsent:
            self._inflight.release(unsent)

    def _check_later(self) -> None:
        self._due = self._loop.time() + self._every_s
        self._timer = self._loop.call_at(self._due, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        self._allow(now - self._due)
        self._check_later()
        if self._unsent:
            self._note_sent(now)
        if not self._transport.is_reading():  # this side does not
            self._wait(self._every_s)
        waits = self._arrival is not None or self._unsent
        late = self._arrival is not None and now > self._arrival
        if late or self._reads_too_slowly(now) or (waits and self._end is not None and now > self._end):
            self._reset()
        elif self._silent_since is not None and now - self._silent_since > self._idle_s:
            self._transport.close()

    def _allow(self, seconds: float) -> None:
        """The loop stood still for so long."""
        self._unsent_since, self._moved = self._unsent_since + seconds, self._moved + seconds
        self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        """The client has so much longer to send."""
        if self._arrival is not None:
            self._arrival += seconds
        if self._silent_since is not None:
            self._silent_since += seconds

    def _reset(self) -> None:
        """Close the connection, and drop what the system has of it: it would keep that
        for a client that does not read.
        """
        made = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP)
        self._transport.abort()

    def _note_sent(self, now: float) -> None:
        remaining = self._transport.get_write_buffer_size()
        if remaining < self._unsent:
            self._inflight.release(self._unsent - remaining)
            self._unsent, self._moved = remaining, now

    def _reads_too_slowly(self, now: float) -> bool:
        if not self._unsent:
            return False
        patience_s = slow_clients.stall_s(self._inflight.used_bytes, self._inflight.limit_bytes)
        expected = (now - self._unsent_since - slow_clients.STALL_S) * slow_clients.SLOWEST_RATE
        return now - self._moved > patience_s or self._unsent_first - self._unsent < expected
