"""The application as ASGI servers call it, and uvicorn, which serves it where no compiled thread does.

uvicorn serves the address of admin requests, every request until the kernels of reactors are compiled, and every
request with `server = "uvicorn"`. It does not pass on a client's certificate, so a caller with TLS needs a token
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from tierstore.addresses import is_loopback
from tierstore.service.http.connection_limit import ConnectionRefusal
from tierstore.service.http.messages import CLOSE, HEALTH, PEER, App, HttpPeer, Receive, Scope, without_name
from tierstore.service.limits.slow_clients import BACKLOG, FINISH_S
from tierstore.service.tls import Tls

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Asgi:
    """`app` as an ASGI 3 application. `admin`: admin requests may come here. `closes`: whether answers end connections.

    `on_host`: the caller is on this machine.
    """

    def __init__(
        self,
        app: App,
        *,
        admin: bool = True,
        on_host: bool = False,
        closes: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._admin, self._on_host, self._closes = app, admin, on_host, closes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, client, target = scope["path"], scope.get("client"), scope.get("raw_path") or b"/"
        if not target.startswith(b"/"):
            target, scope["headers"] = without_name(target, scope["headers"])
            path = unquote(target.decode("ascii"))
        scope["path"] = HEALTH.get(path, path)
        scope[PEER] = HttpPeer(self._admin, on_host=self._on_host or (client is not None and is_loopback(client[0])))
        response = await self._app(scope, receive)
        if response is None:  # nobody waits for one
            return
        headers, chunks = response.pieces()
        if self._closes() and CLOSE not in headers:
            headers.append(CLOSE)
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(chunks)})


class UvicornListener:
    """Serves `app` to clients of a bound `sock`, and `refusal` to those beyond its limit, from `start` on."""

    def __init__(
        self,
        sock: socket.socket,
        app: App,
        refusal: ConnectionRefusal,
        tls: Tls | None,
        idle_s: float,
        draining: Callable[[], bool],
        *,
        admin: bool = True,
    ) -> None:
        import uvicorn  # most services need none

        self._app, self._refusal, self._ending = app, refusal, False
        self._path = Path(sock.getsockname()) if sock.family == socket.AF_UNIX else None
        self._socket = sock.dup()  # uvicorn closes its own socket
        self._task: asyncio.Task[None] | None = None
        self._server = uvicorn.Server(
            uvicorn.Config(
                Asgi(
                    self._limited,
                    admin=admin,
                    on_host=self._path is not None,
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
                backlog=BACKLOG,
                timeout_keep_alive=max(1, int(idle_s)),
                timeout_graceful_shutdown=FINISH_S,
                ssl_context_factory=None if tls is None else lambda *_: tls.for_python(),
            )
        )

    async def start(self) -> None:
        """Start. Returns once it serves."""
        self._task = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.001)

    def hand_on(self) -> None:
        """Accept no more, and end each connection with its next answer. Waiting connections are for other listeners."""
        self._ending = True
        for server in self._server.servers:
            server.close()

    async def stop(self) -> None:
        """Accept no more, and return once requests in progress are answered, or their time is over."""
        self._remove_path()
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """Close it after the event loop has ended, whether or not it was started or stopped. Any thread; may be
        called twice.
        """
        self._remove_path()
        self._socket.close()

    def _remove_path(self) -> None:
        """Remove the socket's name: while it is bound no other process has it."""
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def _limited(self, scope: Scope, receive: Receive) -> Any:
        over = len(self._server.server_state.connections) > self._refusal.limit
        return (self._refusal.app if over else self._app)(scope, receive)
