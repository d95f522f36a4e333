"""The request by which nodes that should serve the same are compared."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, FastAPI, Path
from pydantic import BaseModel, ConfigDict, Field

from tierstore.engine.operations.sample import MOST_KEYS, sample
from tierstore.service.context import Service
from tierstore.types import NAME


class SampleRequest(BaseModel):
    """The rows to sample, and their version."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Annotated[
        int | str | None, Field(description="number or label of a version that is served; default: active")
    ] = None
    keys: Annotated[
        dict[str, list[int]] | None,
        Field(description="codes of keys by table, as an answer lists them; default: some of each table are chosen"),
    ] = None
    rows: Annotated[int, Field(ge=1, le=MOST_KEYS, description="how many are chosen of each table")] = 256
    expired_at_s: Annotated[
        int | None,
        Field(ge=0, description="seconds since 1970; rows that are expired then count as absent, removed or not"),
    ] = None


def add_samples(app: FastAPI, service: Service) -> None:
    """Add the route that samples rows to the application."""

    @app.post("/admin/models/{model}/sample", tags=["models"])
    async def sample_rows(
        model: Annotated[str, Path(pattern=f"^{NAME.pattern}$", description="name of the model")],
        request: Annotated[SampleRequest | None, Body()] = None,
    ) -> dict[str, Any]:
        """Digests of some rows as they are answered now, at one seq. Nodes with the same rows have the same digests."""
        wanted = request or SampleRequest()
        held = service.store.model(model)
        answer: dict[str, Any] = await service.admin_pool.run(
            sample, held, wanted.version, wanted.keys, wanted.rows, wanted.expired_at_s
        )
        return answer
