"""The admin route of cache statistics: hit rates and hottest keys of a table."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Path, Query

from tierstore.engine.reads.cache_report import MOST_HOTTEST
from tierstore.service.admin.exports import ModelName
from tierstore.service.context import Service
from tierstore.types import NAME

TableName = Annotated[str, Path(pattern=f"^{NAME.pattern}$", description="name of the table")]
Limit = Annotated[int, Query(ge=1, le=MOST_HOTTEST, description="how many of the hottest keys")]


def add_caches(app: FastAPI, service: Service) -> None:
    """Add the route to the application."""

    @app.get("/admin/models/{model}/tables/{table}/cache", tags=["models"])
    async def cache(model: ModelName, table: TableName, limit: Limit = 20) -> dict[str, Any]:
        """Hit rate of the host tier at its size and at others, by the minute of the last hour,
        and the keys looked up most.
        """
        return dict(await service.admin_pool.run(service.store.model(model).cache, table, limit))
