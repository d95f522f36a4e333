"""Connections for threads: non-blocking sockets in a bounded pool, each with one request at a time.

Any thread may use a `ConnectionPool`; a `ServiceConnection` belongs to the thread that acquired it until it is
released. A forked child starts without connections.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time

from tierstore.client.attempts import Attempt
from tierstore.client.connecting import open_socket
from tierstore.client.settings import CONNECT_TIMEOUT_S, Node
from tierstore.client.unreachable import connection_lost, not_connected
from tierstore.errors import Closed, TierstoreError, Unreachable
from tierstore.forks import renew_in_child
from tierstore.http1 import Incoming

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_PIECES_LIMIT = 64  # buffers of one system call


class ServiceConnection:
    """One connection to the service."""

    def __init__(self, sock: socket.socket, pool: ConnectionPool) -> None:
        self._socket, self.pool = sock, pool
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._incoming = Incoming()
        self._out: list[memoryview] = []
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.uses = 0
        self.attempt: Attempt | None = None
        renew_in_child(self)

    def renew(self) -> None:
        self._socket.close()

    @property
    def poll_events(self) -> int:
        """The events to poll for."""
        return select.POLLIN | select.POLLOUT if self._out else select.POLLIN

    @property
    def stale(self) -> bool:
        """Whether it was used before and not a byte of this answer arrived: the service had closed it, it seems."""
        return self.uses > 1 and not self._incoming.started

    @property
    def reusable(self) -> bool:
        return self._incoming.idle and self._incoming.reusable and not self._out

    def wait(self, timeout_s: float) -> bool:
        """Whether it became ready to read or write within that time."""
        self._poll.modify(self._socket, self.poll_events)
        return bool(self._poll.poll(timeout_s * 1e3))

    def fileno(self) -> int:
        return self._socket.fileno()

    def quiet(self) -> bool:
        """Whether nothing arrived while it was idle. Data on an idle connection means that it was closed."""
        return not self.wait(0.0)

    def begin(self, attempt: Attempt, head: bytes) -> None:
        """Start an attempt: send as much as is possible without waiting."""
        self.attempt = attempt
        self.uses += 1
        self._incoming.expect(attempt.reply)
        self._out = [memoryview(piece).cast("B") for piece in (head, *attempt.outgoing.pieces) if len(piece)]
        self._send()

    def pump(self) -> bool:
        """Send and receive without waiting. True when the answer is complete. Raises Unreachable or Malformed."""
        try:
            if self._out:
                self._send()
            while True:
                buffer = self._incoming.buffer()
                try:
                    n = self._socket.recv_into(buffer)
                except _NOT_NOW:
                    return False
                if n == 0:
                    if self._incoming.closed():
                        return True
                    raise self._lost(None)
                if self._incoming.received(n):
                    return True
                if n < len(buffer) and not self._tls:
                    return False  # that was all; with TLS more may be buffered inside
        except OSError as error:
            if isinstance(error, TierstoreError):
                raise
            raise self._lost(error) from error

    def _send(self) -> None:
        try:
            while self._out:
                if self._tls:
                    n = self._socket.send(self._out[0])
                else:
                    n = self._socket.sendmsg(self._out[:_PIECES_LIMIT])
                while self._out and n >= len(self._out[0]):
                    n -= len(self._out.pop(0))
                if n:
                    self._out[0] = self._out[0][n:]
        except _NOT_NOW:
            pass
        except OSError as error:
            # The service may have answered (413, say) before it closed: the answer is read next.
            # Without one, reading fails.
            self._out = []
            if not isinstance(error, (BrokenPipeError, ConnectionResetError)):
                raise self._lost(error) from error

    def _lost(self, error: Exception | None) -> Unreachable:
        return connection_lost(self.pool.node.address, error, heard=self.uses > 1 or self._incoming.started)

    def close(self) -> None:
        self._incoming.forget()
        self._socket.close()


class ConnectionPool:
    """At most `limit` connections to one node."""

    def __init__(self, node: Node, limit: int) -> None:
        # constant after construction
        self.node, self.limit = node, limit
        self._changed = threading.Condition()
        # guarded by _changed
        self._idle: list[ServiceConnection] = []  # the one used last is used first
        self._busy = 0
        self._closed = False
        renew_in_child(self)

    def renew(self) -> None:
        self._changed, self._idle, self._busy = threading.Condition(), [], 0

    def stats(self) -> dict[str, int]:
        """How full the pool is."""
        with self._changed:
            return {"busy": self._busy, "idle": len(self._idle), "limit": self.limit}

    def acquire(self, *, fresh: bool, wait: bool, until: float) -> ServiceConnection | None:
        """A connection; None if none is free, with `wait` until then. Unreachable where none can be opened by then."""
        old: list[ServiceConnection] = []
        try:
            with self._changed:
                while True:
                    if self._closed:
                        raise Closed("the client was closed")
                    if fresh:
                        old, self._idle = [*old, *self._idle], []
                    while self._idle:
                        connection = self._idle.pop()
                        if connection.quiet():
                            self._busy += 1
                            return connection
                        old.append(connection)
                    if self._busy < self.limit:
                        self._busy += 1
                        break
                    remaining_s = until - time.monotonic() if wait else 0.0
                    if remaining_s <= 0 or not self._changed.wait(remaining_s):
                        return None
        finally:
            for connection in old:
                connection.close()
        try:
            return ServiceConnection(self._connect(until), self)
        except BaseException:
            self._forget()
            raise

    def release(self, connection: ServiceConnection) -> None:
        """Return a connection. It is closed unless it can carry another request."""
        connection.attempt = None
        keep = connection.reusable
        with self._changed:
            self._busy -= 1
            keep = keep and not self._closed
            if keep:
                self._idle.append(connection)
            self._changed.notify()
        if not keep:
            connection.close()

    def drop(self, connection: ServiceConnection) -> None:
        """Close a connection, even in the middle of an answer."""
        connection.close()
        self._forget()

    def close(self) -> None:
        """Close the idle connections; a busy one is closed when it is released."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for connection in idle:
            connection.close()

    def _forget(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify()

    def _connect(self, until: float) -> socket.socket:
        address = self.node.address
        try:
            return open_socket(address, self.node.tls, min(until, time.monotonic() + CONNECT_TIMEOUT_S))
        except (OSError, UnicodeError) as error:
            raise not_connected(address, error) from error
