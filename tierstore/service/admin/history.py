"""The admin route to the last hour of a model."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request

from tierstore.access.roles import Action
from tierstore.service.admin.exports import ModelName
from tierstore.service.context import Service
from tierstore.service.http.messages import principal_of


def add_history(app: FastAPI, service: Service) -> None:
    """Add the route to the application."""

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
