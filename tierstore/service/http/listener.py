"""Listeners of the event loop: they accept connections within a limit. One makes handshakes of TLS for reactors, which
accept others themselves.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.limits import slow_clients
from tierstore.service.limits.silent import host_of
from tierstore.service.openssl import WANTS_READ, Context, TlsSession
from tierstore.service.tls import Tls, has_ended

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # connections accepted in one turn of the event loop
_PAUSE_S = 0.1  # if no more files may be opened


class Listener:
    """Accepts connections from `sock`, bound and not listening yet, as many as `limit` allows, and a few to be refused.

    Further ones are closed at once, so that no more files are open than are counted. `begin` gets each connection, and
    whether it is to be refused; whoever has the connection then counts it off.
    """

    def __init__(
        self, sock: socket.socket, limit: ConnectionLimit, begin: Callable[[socket.socket, bool], None]
    ) -> None:
        self._socket, self._limit, self._begin = sock, limit, begin
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._socket.listen(slow_clients.BACKLOG)
        self._loop.add_reader(self._socket, self._accept)

    def stop(self) -> None:
        """Accept no more. Connections that wait are for other listeners of the socket. May be called twice."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop = None

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
            self._count(connection)

    def _count(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        refused = not (self._limit.admit() or self._limit.make_room())
        if refused and not self._limit.refuse():
            connection.close()
        else:
            self._begin(connection, refused)

    def _pause(self) -> None:
        loop = self._loop
        if loop is not None:
            loop.remove_reader(self._socket)
            loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._socket, self._accept)


class TlsListener:
    """Makes the handshakes of connections to `sock`, and gives them to reactors.

    `serve_connection` gets the descriptor and the session of each connection, and whether it is to be refused. If no
    place is left, a connection that has been in its handshake for a while makes room.
    """

    def __init__(
        self,
        sock: socket.socket,
        limit: ConnectionLimit,
        tls: Tls,
        serve_connection: Callable[[int, TlsSession | None, bool], None],
    ) -> None:
        self._limit, self._tls, self._serve_connection = limit, tls, serve_connection
        self._listener = Listener(sock, limit, self._shake_hands)
        self._beginning: set[asyncio.Task[Any]] = set()  # connections in their handshake

    def start(self) -> None:
        self._listener.start()

    def stop(self) -> None:
        """Accept no more, and end handshakes."""
        self._listener.stop()
        for task in self._beginning:
            task.cancel()

    def _shake_hands(self, connection: socket.socket, refused: bool) -> None:
        host = host_of(connection)
        task = asyncio.get_running_loop().create_task(handshake(connection, self._tls.current.context))
        if not refused:
            self._limit.silent.add(host, task.cancel)
        task.add_done_callback(partial(self._begin, connection, host, refused))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    def _begin(self, connection: socket.socket, host: str, refused: bool, task: asyncio.Task[TlsSession]) -> None:
        """After a handshake: give the connection to a reactor."""
        made_room = not refused and not self._limit.silent.discard(host, task.cancel)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None or made_room:
            if not task.cancelled() and error is None:
                task.result().close(abort=True)
            elif error is not None and not isinstance(error, OSError):  # else the client has gone, or speaks no TLS
                logger.error("a connection was lost in its handshake: %s", error)
            connection.close()
            self._limit.release(refused=refused)
            return
        self._serve_connection(connection.detach(), task.result(), refused)


async def handshake(sock: socket.socket, context: Context) -> TlsSession:
    """The session of a connection after its handshake. OSError if that fails, or takes too long."""
    loop, fd = asyncio.get_running_loop(), sock.fileno()
    session = context.session(fd)
    try:
        async with asyncio.timeout(slow_clients.HANDSHAKE_S):
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
