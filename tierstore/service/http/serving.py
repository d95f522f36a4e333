"""uvicorn with the service's settings: how an application is served over HTTP.

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

from tierstore.service.http.connection import BoundedHttpProtocol
from tierstore.service.http.door import Door

BACKLOG = 1024
FINISH_S = 30  # for what is in progress when the listener closes


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handling: the handlers here drain first, and end the process normally."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def adopt(
        self, door: Door, sock: socket.socket, data: bytes, *, refused: bool, back: Callable[[int], None] | None
    ) -> None:
        """Serve a connection that was made before, of which `data` has come; `BoundedHttpProtocol` has the rest."""
        loop = asyncio.get_running_loop()

        def protocol() -> BoundedHttpProtocol:
            return BoundedHttpProtocol(
                config=self.config,
                server_state=self.server_state,
                app_state={},
                door=door,
                first=data,
                refused=refused,
                back=None if self.should_exit else back,
            )

        task = loop.create_task(self._connect(protocol, sock, lambda: None if refused else door.leave(True)))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    async def _connect(
        self, protocol: Callable[[], BoundedHttpProtocol], sock: socket.socket, lost: Callable[[], None]
    ) -> None:
        try:
            _, made = await asyncio.get_running_loop().connect_accepted_socket(protocol, sock)
        except OSError:  # the client has gone
            sock.close()
            lost()
            return
        if self.should_exit:
            made.shutdown()


def make_server(app: Any, door: Door, idle_s: float) -> HttpServer:
    """uvicorn for the application, with the connections that `door` lets in, each kept so long without a byte; it is not started."""
    config = uvicorn.Config(
        app,
        http=functools.partial(BoundedHttpProtocol, door=door),  # type: ignore[arg-type]
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
