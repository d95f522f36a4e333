"""uvicorn with the service's settings: how an application is served over HTTP, by the owner and by worker processes.

`make_server` may be called on any thread; the server runs on one event loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import uvicorn

from tierstore.service.http.connection import BoundedHttpProtocol
from tierstore.service.http.door import Door

BACKLOG = 1024
KEEP_ALIVE_S = 75
FINISH_S = 30  # for what is in progress when the listener closes


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling: the handlers here drain first, and end the process normally."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, door: Door) -> _Server:
    """uvicorn for the application, with the connections that `door` lets in; it is not started."""
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
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FINISH_S,
    )
    return _Server(config)
