"""uvicorn with the settings of the service.

`make_server` may be called on any thread; the server runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from tierstore.service.http.connection import Back, BoundedHttpProtocol
from tierstore.service.http.connection_limit import ConnectionLimit
from tierstore.service.http.tls_transport import TlsTransport
from tierstore.service.openssl import Session

BACKLOG = 1024
FINISH_S = 30  # for what is in progress when the listener closes


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handling: the service's own handlers drain first, and end the process normally."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def adopt(
        self,
        limit: ConnectionLimit,
        sock: socket.socket,
        data: bytes,
        *,
        refused: bool,
        back: Back | None = None,
        session: Session | None = None,
        admin: bool = False,
    ) -> asyncio.Task[None]:
        """Serve a connection that was accepted before, and has sent `data`; see `BoundedHttpProtocol`. With TLS it has a `session`.

        The task ends when it is served, or could not be.
        """
        loop = asyncio.get_running_loop()

        def protocol() -> BoundedHttpProtocol:
            return BoundedHttpProtocol(
                config=self.config,
                server_state=self.server_state,
                app_state={},
                limit=limit,
                first=data,
                refused=refused,
                back=None if self.should_exit else back,
                admin=admin,
            )

        task = loop.create_task(
            self._connect(protocol, sock, lambda: None if refused else limit.release(True), session)
        )
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)
        return task

    async def _connect(
        self,
        protocol: Callable[[], BoundedHttpProtocol],
        sock: socket.socket,
        lost: Callable[[], None],
        session: Session | None,
    ) -> None:
        if session is not None:
            served = protocol()
            TlsTransport(sock, session, served).begin()
            if self.should_exit:
                served.shutdown()
            return
        try:
            _, made = await asyncio.get_running_loop().connect_accepted_socket(protocol, sock)
        except (OSError, asyncio.CancelledError) as error:  # the client has gone
            sock.close()
            lost()
            if isinstance(error, OSError):
                return
            raise
        if self.should_exit:
            made.shutdown()


def make_server(app: Any, limit: ConnectionLimit, idle_s: float) -> HttpServer:
    """A server of the application, not started. Connections are counted by `limit`, and closed after `idle_s` without a byte."""
    config = uvicorn.Config(
        app,
        http=functools.partial(BoundedHttpProtocol, limit=limit),  # type: ignore[arg-type]
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=idle_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=FINISH_S,
    )
    return HttpServer(config)
