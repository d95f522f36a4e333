"""The listener for TLS: accepts connections, makes their handshake, and gives them to reactors, which accept others
themselves.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.limits.silent import Silent, host_of
from tierstore.service.limits.slow_clients import BACKLOG
from tierstore.service.openssl import WANTS_READ, Context, Session
from tierstore.service.tls import Tls, has_ended

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0  # for a client to begin TLS
_AT_ONCE = 64  # connections accepted in one turn of the event loop
_PAUSE_S = 0.1  # if no more files may be opened


class Listener:
    """Accepts connections from `sock`, bound and not listening yet, as many as `limit` allows, and a few to be refused.

    If no place is left, a connection that has been in its handshake for a while makes room. `serve_connection` gets
    the descriptor and the session of each connection, and whether it is to be refused.
    """

    def __init__(
        self,
        sock: socket.socket,
        limit: ConnectionLimit,
        tls: Tls,
        serve_connection: Callable[[int, Session | None, bool], None],
    ) -> None:
        self._socket, self._limit, self._tls, self._serve_connection = sock, limit, tls, serve_connection
        self._beginning: set[asyncio.Task[Any]] = set()  # connections in their handshake
        self._handshakes: Silent[asyncio.Task[Any]] = Silent()  # counted handshakes
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        self._loop.add_reader(self._socket, self._accept)

    def stop(self) -> None:
        """Accept no more, and end handshakes."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop = None
        for task in self._beginning:
            task.cancel()

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
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        refused = not (self._limit.admit() or self._make_room() or self._limit.make_room())
        if refused and not self._limit.refuse():
            connection.close()
            return
        host = host_of(connection)
        task = asyncio.get_running_loop().create_task(handshake(connection, self._tls.current.context))
        if not refused:
            self._handshakes.add(host, task)
        task.add_done_callback(partial(self._begin, connection, host, refused))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    def _make_room(self) -> bool:
        """End a handshake in progress to free its place. False: there is none, or it has begun just now."""
        if (task := self._handshakes.pop()) is None:
            return False
        task.cancel()
        return True

    def _begin(self, connection: socket.socket, host: str, refused: bool, task: asyncio.Task[Session]) -> None:
        """After a handshake: give the connection to a reactor."""
        counted = self._handshakes.discard(host, task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None or not (counted or refused):
            if not task.cancelled() and error is None:
                task.result().close(abort=True)
            elif error is not None and not isinstance(error, OSError):  # else the client has gone, or speaks no TLS
                logger.error("a connection was lost in its handshake: %s", error)
            connection.close()
            if counted or refused:
                self._limit.release(refused=refused)
            return
        self._serve_connection(connection.detach(), task.result(), refused)

    def _pause(self) -> None:
        loop = self._loop
        if loop is not None:
            loop.remove_reader(self._socket)
            loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._socket, self._accept)


async def handshake(sock: socket.socket, context: Context) -> Session:
    """The session of a connection after its handshake. OSError if that fails, or takes too long."""
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
