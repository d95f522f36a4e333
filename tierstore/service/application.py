"""The service as an ASGI application, for another server: `uvicorn tierstore.service:app --http h11`.

The settings are those of `tierstore serve` without flags: tierstore.toml and the environment. Python answers every
request, and gRPC is not served. The server decides where it listens, so `allowed_host` must name the hosts that
clients use. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tierstore.config import Settings, load_settings
from tierstore.engine.store import Store
from tierstore.errors import ConfigError
from tierstore.service.admin.application import AdminApplication
from tierstore.service.context import Service
from tierstore.service.http.asgi import Asgi, Send
from tierstore.service.http.messages import Receive, Scope
from tierstore.service.renewal import Files
from tierstore.service.root import Root
from tierstore.service.server import check_settings
from tierstore.service.sources.start import start_sources


class ServiceApplication:
    """Opens the store when the server starts, and closes it when the server ends, by the messages of `lifespan`."""

    def __init__(self, settings: Settings | None = None) -> None:
        """By default the settings are read when the server starts."""
        self._settings = settings
        self._app: Asgi | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is None:
            raise RuntimeError("expected a server that runs the application's lifespan: it opens the store")
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with self._serving():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            phase = "startup" if self._app is None else "shutdown"
            await send({"type": f"lifespan.{phase}.failed", "message": str(error)})
            raise
        await send({"type": "lifespan.shutdown.complete"})

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        settings = self._settings or load_settings()
        if settings.admin_listen is not None:
            raise ConfigError("admin_listen: expected `tierstore serve`, which listens there; or leave the setting out")
        check_settings(settings)
        with await asyncio.to_thread(Store, settings) as store:
            service = Service(store, settings)
            try:
                self._app = Asgi(Root(service, AdminApplication(service), lambda *_: None))
                service.sources = start_sources(service, settings)
                following = asyncio.create_task(Files(service.access, service.tls, None, store.audit).follow())
                yield
                following.cancel()
                service.draining = True
            finally:
                await asyncio.to_thread(service.close)


app = ServiceApplication()
