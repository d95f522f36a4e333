"""Accepts the connections that Python serves from their first byte on: those with TLS, and those for admin requests.

So it is with all connections until the kernels of reactors are compiled. Reactors do the same for plain HTTP, and hand
off what they do not know. Event loop only, from `start` to `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from functools import partial
from pathlib import Path
from typing import Any

from tierstore.service.http.connection import Back
from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.http.server import BACKLOG, HttpServer
from tierstore.service.http.tls_transport import handshake
from tierstore.service.limits.silent import Silent, host_of
from tierstore.service.openssl import Session
from tierstore.service.tls import Tls

logger = logging.getLogger(__name__)
_AT_ONCE = 64  # connections accepted in one turn of the event loop
_PAUSE_S = 0.1  # where no more files may be opened


class Listener:
    """Accepts from `sock`, bound and not listening yet, and has `server` serve what `limit` allows.

    With `tls` each connection begins with a handshake; where there is no place left one that has been in it for a while
    makes room. `admin`: admin requests may come here. `back` is where connections go that are idle, as for
    `HttpConnection`, and those that have made their handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        server: HttpServer,
        limit: ConnectionLimit,
        tls: Tls | None = None,
        *,
        admin: bool = False,
        back: Back | None = None,
    ) -> None:
        self._socket, self._server, self._limit = sock, server, limit
        self._tls, self._admin, self._back = tls, admin, back
        self._path = Path(sock.getsockname()) if sock.family == socket.AF_UNIX else None
        self._refusing = 0
        self._beginning: set[asyncio.Task[Any]] = set()  # connections in their handshake
        self._handshakes: Silent[asyncio.Task[Any]] = Silent()  # those that are counted
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._loop.add_reader(self._socket, self._accept)

    def suspend(self) -> None:
        """Accept no more. The socket goes on listening, for somebody else: those that wait are theirs."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop = None

    def stop(self) -> None:
        """Accept no more, and end handshakes. A client that connects from here on is refused, and does not wait."""
        self.suspend()
        for task in self._beginning:
            task.cancel()
        self._remove_path()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Any thread, when the event loop has ended, whether or not it was started or stopped. May be called twice."""
        self._remove_path()
        self._socket.close()

    def _remove_path(self) -> None:
        """Remove the socket's name: while it is bound no other process has it."""
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("connections wait: %s", error)
                self._pause()
                return
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        refused = not (self._limit.admit() or self._make_room() or self._limit.make_room())
        if refused and self._refusing >= self._limit.most_refused:
            connection.close()
            return
        if self._tls is None:
            task: asyncio.Task[Any] = self._adopt(connection, refused)
        else:
            host = host_of(connection)
            context = self._tls.current.http1 if self._admin else self._tls.current.context
            task = asyncio.get_running_loop().create_task(handshake(connection, context))
            if not refused:
                self._handshakes.add(host, task)
            task.add_done_callback(partial(self._begin, connection, host, refused))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)
        if refused:
            self._refusing += 1
            task.add_done_callback(self._refused)

    def _make_room(self) -> bool:
        """End a handshake in progress, whose place is free then. False: there is none, or it has begun just now."""
        if (task := self._handshakes.pop()) is None:
            return False
        task.cancel()
        return True

    def _begin(self, connection: socket.socket, host: str, refused: bool, task: asyncio.Task[Session]) -> None:
        """A handshake has ended: give the connection to a reactor as soon as there are any, else to the server."""
        counted = self._handshakes.discard(host, task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None or not (counted or refused):
            if not task.cancelled() and error is None:
                task.result().close(abort=True)
            elif error is not None and not isinstance(error, OSError):  # else the client has gone, or speaks no TLS
                logger.error("a connection was lost in its handshake: %s", error)
            connection.close()
            if counted:
                self._limit.release(True)
            return
        session = task.result()
        give_back = None if refused or self._back is None else self._back()
        if give_back is None:
            self._adopt(connection, refused, session)
        else:
            give_back(connection.detach(), session)

    def _adopt(self, connection: socket.socket, refused: bool, session: Session | None = None) -> asyncio.Task[None]:
        return self._server.adopt(
            self._limit, connection, b"", refused=refused, back=self._back, session=session, admin=self._admin
        )

    def _refused(self, _: asyncio.Task[None]) -> None:
        self._refusing -= 1

    def _pause(self) -> None:
        loop = self._loop
        if loop is not None:
            loop.remove_reader(self._socket)
            loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._socket, self._accept)
