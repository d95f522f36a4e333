"""Admin routes to figures of a model: what its caches do, and its last hour."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request

from tierstore.access.roles import Action
from tierstore.engine.reads.cache_report import MOST_HOTTEST
from tierstore.service.admin.exports import ModelName
from tierstore.service.context import Service
from tierstore.service.http.messages import principal_of
from tierstore.types import NAME

TableName = Annotated[str, Path(pattern=f"^{NAME.pattern}$", description="name of the table")]
Limit = Annotated[int, Query(ge=1, le=MOST_HOTTEST, description="how many of the hottest keys")]


def add_figures(app: FastAPI, service: Service) -> None:
    """Add the routes to the application."""

    @app.get("/admin/models/{model}/tables/{table}/cache", tags=["models"])
    async def cache(model: ModelName, table: TableName, limit: Limit = 20) -> dict[str, Any]:
        """Hit rate of the host tier at its size and at others, by the minute of the last hour,
        and the keys looked up most.
        """
        return dict(await service.admin_pool.run(service.store.model(model).cache, table, limit))

    @app.get("/admin/models/{model}/history", tags=["models"])
    async def history(model: ModelName, request: Request) -> dict[str, Any]:
        """Requests, latencies, errors, keys and deltas of the last hour, in steps, by version, and
        what was changed in it.
        """
        service.store.model(model)  # NotFound
        to_admin = principal_of(request.scope).may(Action.ADMIN, model)

        def document() -> dict[str, Any]:
            return {"model": model, **service.history.document(model, time.time(), to_admin=to_admin)}

        return await service.status_pool.run(document)
