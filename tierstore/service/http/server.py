"""The connections that Python serves, from where they were accepted, or handed off, to an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from tierstore.service.http.connection import Back, HttpConnection
from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.http.messages import App
from tierstore.service.http.tls_transport import TlsTransport
from tierstore.service.openssl import Session

logger = logging.getLogger(__name__)
BACKLOG = 1024
FINISH_S = 30  # for what is in progress when the service ends


class HttpServer:
    """Serves an application. Made on any thread."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self._ends = False

    def adopt(
        self,
        limit: ConnectionLimit,
        sock: socket.socket,
        data: bytes,
        *,
        refused: bool,
        back: Back | None = None,
        session: Session | None = None,
    ) -> None:
        """Serve a connection that was accepted before, and has sent `data`; see `HttpConnection`.

        With TLS it has a `session`.
        """

        def protocol() -> HttpConnection:
            given_back = None if self._ends else back
            return HttpConnection(self, limit, first=data, refused=refused, back=given_back)

        connecting = self._connect(protocol, sock, lambda: None if refused else limit.release(True), session)
        task = asyncio.get_running_loop().create_task(connecting)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect(
        self,
        protocol: Callable[[], HttpConnection],
        sock: socket.socket,
        lost: Callable[[], None],
        session: Session | None,
    ) -> None:
        if session is not None:
            made = protocol()
            TlsTransport(sock, session, made).begin()
        else:
            try:
                _, made = await asyncio.get_running_loop().connect_accepted_socket(protocol, sock)
            except (OSError, asyncio.CancelledError) as error:  # the client has gone
                sock.close()
                lost()
                if isinstance(error, OSError):
                    return
                raise
        if self._ends:
            made.shutdown()

    async def finish(self) -> None:
        """Close idle connections, and the others once they are answered.

        What is in progress after a time is cut off.
        """
        self._ends = True
        for connection in list(self.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(FINISH_S):
                while self.connections or self.tasks:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logger.error("%d requests are cut off, as the time for them is over", len(self.tasks))
            for task in self.tasks:
                task.cancel()
