"""The application as ASGI servers call it, and uvicorn, which serves it where no compiled thread does.

uvicorn serves the address of admin requests, every request until the kernels of reactors are compiled, and every
request with `server = "uvicorn"`. It does not pass on a client's certificate, so a caller with TLS needs a token
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from tierstore.addresses import is_loopback
from tierstore.service.http.bounded import BoundedConnection, ConnectionBounds, HttpProtocol
from tierstore.service.http.listener import Listener
from tierstore.service.http.messages import (
    ARRIVED,
    CLOSE,
    CONNECTION,
    HEALTH,
    PEER,
    App,
    HttpPeer,
    Receive,
    Response,
    Scope,
    without_name,
)
from tierstore.service.http.tls_transport import TlsTransport
from tierstore.service.limits import slow_clients
from tierstore.service.tls import Tls
from tierstore.wire.http1.frame import MOST_HEAD_BYTES

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Asgi:
    """`app` as an ASGI 3 application. `admin`: admin requests may come here. `closes`: whether answers end connections.

    `on_host`: the caller is on this machine. `refusal` answers connections beyond a limit. Connections that
    this service has accepted are in the `state` of their requests.
    """

    def __init__(
        self,
        app: App,
        *,
        admin: bool = True,
        on_host: bool = False,
        refusal: Callable[[Scope], Response] | None = None,
        closes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._admin, self._on_host, self._closes = app, admin, on_host, closes
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: BoundedConnection | None = scope.get("state", {}).pop(CONNECTION, None)
        scope[ARRIVED], refused = time.perf_counter_ns(), False
        if connection is not None:
            if not await connection.turn():
                return
            scope[CONNECTION], receive = connection, connection.in_time(receive)
            refused = connection.refused
        path, client, target = scope["path"], scope.get("client"), scope.get("raw_path") or b"/"
        if not target.startswith(b"/"):
            target, scope["headers"] = without_name(target, scope["headers"])
            path = unquote(target.decode("ascii"))
        scope["path"] = HEALTH.get(path, path)
        scope[PEER] = HttpPeer(self._admin, on_host=self._on_host or (client is not None and is_loopback(client[0])))
        if refused and self._refusal is not None:
            response: Response | None = self._refusal(scope)
        else:
            response = await self._app(scope, receive)
        if response is None:  # nobody waits for one
            return
        headers, chunks = response.pieces()
        if self._closes() and CLOSE not in headers:
            headers.append(CLOSE)
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(chunks)})


class UvicornListener:
    """Serves `app` to clients of a bound `sock`, within the bounds of its connections, from `start` on."""

    def __init__(
        self,
        sock: socket.socket,
        app: App,
        bounds: ConnectionBounds,
        tls: Tls | None,
        draining: Callable[[], bool],
        *,
        admin: bool = True,
    ) -> None:
        import uvicorn  # most services need none

        self._bounds, self._tls, self._ending = bounds, tls, False
        self._path = Path(sock.getsockname()) if sock.family == socket.AF_UNIX else None
        self._listener = Listener(sock, bounds.limit, self._begin)
        self._connections: set[BoundedConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._config = uvicorn.Config(
            Asgi(
                app,
                admin=admin,
                on_host=self._path is not None,
                refusal=bounds.limit.refusal.answer,
                closes=lambda: self._ending or draining(),
            ),
            http="h11",
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(bounds.idle_s),
            timeout_graceful_shutdown=slow_clients.FINISH_S,
            h11_max_incomplete_event_size=MOST_HEAD_BYTES,
        )
        self._server = uvicorn.Server(self._config)

    async def start(self) -> None:
        """Start. Returns once it serves."""
        self._task = asyncio.create_task(self._server.serve([]))  # its connections are accepted here
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.001)
        if not self._ending:  # a stop may have come meanwhile
            self._listener.start()

    def stop_accepting(self) -> None:
        """Accept no more, and end each connection with its next answer. Waiting connections are for other listeners."""
        self._ending = True
        self._listener.stop()

    def hand_on(self, serve_connection: Callable[[int], None]) -> None:
        """Give the connections that are idle to `serve_connection`."""
        for connection in list(self._connections):
            connection.hand_on(serve_connection)

    def finish(self) -> None:
        """Accept no more, and give clients a little time for what they send or read."""
        self.stop_accepting()
        for connection in list(self._connections):
            connection.finish()

    async def stop(self) -> None:
        """Return once requests in progress are answered, or their time is over."""
        self.stop_accepting()
        self._remove_path()
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Close it after the event loop has ended, whether or not it was started or stopped. Any thread; may be
        called twice.
        """
        self._remove_path()

    def _remove_path(self) -> None:
        """Remove the socket's name: while it is bound no other process has it."""
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _begin(self, sock: socket.socket, refused: bool) -> None:
        connection = BoundedConnection(sock, refused, self._bounds, self._protocol, self._connections.discard)
        self._connections.add(connection)
        task = asyncio.get_running_loop().create_task(self._open(sock, connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _protocol(self, connection: BoundedConnection) -> HttpProtocol:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return H11Protocol(self._config, self._server.server_state, {CONNECTION: connection})

    async def _open(self, sock: socket.socket, connection: BoundedConnection) -> None:
        try:
            protocol = connection if self._tls is None else TlsTransport(self._tls.for_python(), connection)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock)
        except OSError:  # the client has gone, or the files of TLS cannot be read
            sock.close()
            connection.count_off()
