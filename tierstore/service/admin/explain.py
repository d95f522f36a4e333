"""The request that says why keys are answered as they are: for whoever may look rows up."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field, StrictInt, StrictStr

from tierstore.engine.operations.explain import MOST_KEYS
from tierstore.service.admin.exports import ModelName, Strict
from tierstore.service.context import Service
from tierstore.service.http.messages import principal_of


class ExplainRequest(Strict):
    """The keys to explain."""

    feature: str
    keys: Annotated[
        list[StrictInt | StrictStr], Field(min_length=1, max_length=MOST_KEYS, description="numbers, or strings")
    ]
    version: Annotated[
        StrictInt | StrictStr | None, Field(description="number or label of a version that is served; default: active")
    ] = None


def add_explain(app: FastAPI, service: Service) -> None:
    """Add the route that explains keys to the application."""

    @app.post("/admin/models/{model}/explain", tags=["models"])
    async def explain(model: ModelName, request: ExplainRequest, given: Request) -> dict[str, Any]:
        """Why keys are answered as they are: what each tier holds, which delta wrote or deleted them last.

        Changes nothing.
        """
        nbytes = int(given.headers.get("content-length", "0"))
        if (charge := service.rates.admit(principal_of(given.scope), model, nbytes)) is not None:
            charge.keys(len(request.keys))
        answer: dict[str, Any] = await service.explain_pool.run(
            lambda: service.store.explain(model, request.feature, request.keys, version=request.version)
        )
        return answer
