"""Admin routes of parked messages: list, show, their payload, retry, skip. Handlers run on the event loop."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Path
from fastapi.responses import Response

from tierstore.service.context import Service

ParkedId = Annotated[str, Path(pattern="^[0-9]+-[0-9]+-[0-9a-f]{16}$", description="id of a parked message")]


def add_parked(app: FastAPI, service: Service) -> None:
    store = service.store

    @app.get("/admin/parked", tags=["parked"])
    async def parked(all_states: bool = False) -> dict[str, Any]:
        """Messages of a source that could not be applied; with `all_states` also those that were retried or skipped."""
        return {"parked": await service.admin_pool.run(store.parked, all_states)}

    @app.get("/admin/parked/{name}", tags=["parked"])
    async def parked_message(name: ParkedId) -> dict[str, Any]:
        """A parked message."""
        return dict(await service.admin_pool.run(store.parked_message, name))

    @app.get("/admin/parked/{name}/payload", tags=["parked"])
    async def parked_payload(name: ParkedId) -> Response:
        """The bytes of a parked message, as they came."""
        payload = await service.admin_pool.run(store.parked_payload, name)
        return Response(payload, media_type="application/octet-stream")

    @app.post("/admin/parked/{name}/retry", tags=["parked"])
    async def retry(name: ParkedId) -> dict[str, Any]:
        """Apply it now. What fails stays parked, and the error says why.

        409 where it is not the next delta of its model.
        """
        return dict(await service.change(store.retry_parked, name, pool=service.admin_pool))

    @app.post("/admin/parked/{name}/skip", tags=["parked"])
    async def skip(name: ParkedId) -> dict[str, Any]:
        """Do without it: a delta without rows gets its seq. 409 where an earlier delta is still to come."""
        return dict(await service.change(store.skip_parked, name, pool=service.admin_pool))
