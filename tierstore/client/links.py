"""Connections for threads: non-blocking sockets, a bounded pool of them, and one request on each at a time.

`Links` may be used by any thread; a `Link` belongs to the thread that took it until it is given back. Nothing survives a
crash or a fork: a child begins without connections.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time

from tierstore.client.address import CONNECT_TIMEOUT_S, Address
from tierstore.client.flights import Attempt
from tierstore.client.http1 import Incoming
from tierstore.errors import Closed, TierstoreError, Unreachable

_WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_MOST_PIECES = 64  # of one system call


class Link:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._tls = isinstance(connection, ssl.SSLSocket)
        self._incoming = Incoming()
        self._out: list[memoryview] = []
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.uses = 0
        self.attempt: Attempt | None = None

    @property
    def wants(self) -> int:
        """What to poll for."""
        return select.POLLIN | select.POLLOUT if self._out else select.POLLIN

    @property
    def stale(self) -> bool:
        """Whether it failed as an old connection does that the other side had closed."""
        return self.uses > 1 and not self._incoming.begun

    @property
    def reusable(self) -> bool:
        return self._incoming.idle and self._incoming.reusable and not self._out

    def wait(self, timeout_s: float) -> bool:
        """Whether something came, or went, within that time."""
        self._poll.modify(self._socket, self.wants)
        return bool(self._poll.poll(timeout_s * 1e3))

    def fileno(self) -> int:
        return self._socket.fileno()

    def quiet(self) -> bool:
        """Whether nothing came while it was idle; what comes then is its end."""
        return not self.wait(0.0)

    def begin(self, attempt: Attempt, head: bytes) -> None:
        """Send as much as goes at once."""
        self.attempt = attempt
        self.uses += 1
        self._incoming.expect(attempt.reply)
        self._out = [memoryview(piece).cast("B") for piece in (head, *attempt.outgoing.pieces) if len(piece)]
        self._send()

    def pump(self) -> bool:
        """Send and receive what can be without waiting. True when the answer is complete. Raises Unreachable or Malformed."""
        try:
            if self._out:
                self._send()
            while True:
                into = self._incoming.buffer()
                try:
                    n = self._socket.recv_into(into)
                except _WAITS:
                    return False
                if n == 0:
                    if self._incoming.closed():
                        return True
                    raise Unreachable("the service closed the connection before it answered")
                if self._incoming.received(n):
                    return True
                if n < len(into) and not self._tls:
                    return False  # that was all there is; TLS may hold more than it gave
        except OSError as error:
            if isinstance(error, TierstoreError):
                raise
            raise Unreachable(f"the connection failed: {error}") from error

    def _send(self) -> None:
        try:
            while self._out:
                if self._tls:
                    n = self._socket.send(self._out[0])
                else:
                    n = self._socket.sendmsg(self._out[:_MOST_PIECES])
                while self._out and n >= len(self._out[0]):
                    n -= len(self._out.pop(0))
                if n:
                    self._out[0] = self._out[0][n:]
        except _WAITS:
            pass
        except OSError as error:
            # An answer may have come before the service hung up (413, say); it will be read. Without one that fails too.
            self._out = []
            if not isinstance(error, (BrokenPipeError, ConnectionResetError)):
                raise Unreachable(f"the connection failed: {error}") from error

    def close(self) -> None:
        self._incoming.forget()
        self._socket.close()


class Links:
    """At most `most` connections to one address."""

    def __init__(self, address: Address, most: int) -> None:
        # constant after construction
        self.address, self.most = address, most
        self._tls = address.tls_context()
        self._changed = threading.Condition()
        # guarded by _changed
        self._idle: list[Link] = []  # the one used last is taken first
        self._taken = 0
        self._closed = False
        self._process = os.getpid()

    def figures(self) -> dict[str, int]:
        """How full the pool is."""
        with self._changed:
            return {"busy": self._taken, "idle": len(self._idle), "limit": self.most}

    def take(self, *, fresh: bool, wait_s: float, timeout_s: float) -> Link | None:
        """A connection, None if none is free within `wait_s`. Unreachable where none can be made within `timeout_s`."""
        until = time.monotonic() + wait_s
        old: list[Link] = []
        try:
            with self._changed:
                while True:
                    if self._closed:
                        raise Closed("the client was closed")
                    if self._process != os.getpid():  # its sockets are the parent's
                        self._process, self._taken = os.getpid(), 0
                        old, self._idle = self._idle, []
                    if fresh:
                        old, self._idle = [*old, *self._idle], []
                    while self._idle:
                        link = self._idle.pop()
                        if link.quiet():
                            self._taken += 1
                            return link
                        old.append(link)
                    if self._taken < self.most:
                        self._taken += 1
                        break
                    left = until - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        return None
        finally:
            for link in old:
                link.close()
        try:
            return Link(self._connect(timeout_s))
        except BaseException:
            self._leave()
            raise

    def give_back(self, link: Link) -> None:
        """Done with it. It is closed unless it may carry another request."""
        link.attempt = None
        keep = link.reusable
        with self._changed:
            self._taken -= 1
            keep = keep and not self._closed
            if keep:
                self._idle.append(link)
            self._changed.notify()
        if not keep:
            link.close()

    def drop(self, link: Link) -> None:
        """Close it, whatever it is doing."""
        link.close()
        self._leave()

    def close(self) -> None:
        """Close what is idle; what is busy is closed when it is given back."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for link in idle:
            link.close()

    def _leave(self) -> None:
        with self._changed:
            self._taken -= 1
            self._changed.notify()

    def _connect(self, timeout_s: float) -> socket.socket:
        address, timeout_s = self.address, max(0.001, min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            connection = socket.create_connection((address.host, address.port), timeout_s)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_hostname=address.host)
                connection.setblocking(False)
            except BaseException:
                connection.close()
                raise
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"no service answers at {address.url}: {error}") from error
        return connection
