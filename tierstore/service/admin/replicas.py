"""Requests for comparing nodes that should serve the same: of some rows, and of all."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body, FastAPI
from pydantic import Field

from tierstore.engine.operations.digests import MOST_BUCKETS
from tierstore.engine.operations.sampled_digests import MOST_KEYS, sampled_digests
from tierstore.formats.names import MAX_ORDINAL
from tierstore.service.admin.exports import ModelName, Strict
from tierstore.service.context import Service


class SampleRequest(Strict):
    """The rows to sample, and their version."""

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


class DigestsRequest(Strict):
    """All rows of a version, and how their digests are to come."""

    version: Annotated[
        int | str | None, Field(description="number or label of a version that is served; default: active")
    ] = None
    seq: Annotated[int | None, Field(ge=0, le=MAX_ORDINAL, description="at which; at another one `tables` is null")] = (
        None
    )
    buckets: Annotated[int, Field(ge=1, le=MOST_BUCKETS, description="into so many the rows of a table are put")] = 1024
    listed: Annotated[
        dict[str, list[int]] | None,
        Field(description="by table, buckets whose keys are listed with a digest each; then no other rows are read"),
    ] = None
    expired_at_s: Annotated[
        int | None, Field(ge=0, description="seconds since 1970; rows that are expired then count as absent")
    ] = None


def add_samples(app: FastAPI, service: Service) -> None:
    """Add the routes to the application."""

    @app.post("/admin/models/{model}/sample", tags=["models"])
    async def sample_rows(model: ModelName, request: Annotated[SampleRequest | None, Body()] = None) -> dict[str, Any]:
        """Digests of some rows as they are answered now, at one seq. Nodes with the same rows have the same digests."""
        wanted = request or SampleRequest()
        held = service.store.model(model)
        answer: dict[str, Any] = await service.admin_pool.run(
            sampled_digests, held, wanted.version, wanted.keys, wanted.rows, wanted.expired_at_s
        )
        return answer

    @app.post("/admin/models/{model}/digests", tags=["models"])
    async def digests_of_rows(
        model: ModelName, request: Annotated[DigestsRequest | None, Body()] = None
    ) -> dict[str, Any]:
        """Digests of all rows at one seq. Every row is read, beside what serves: the answer takes as long as that."""
        wanted = (request or DigestsRequest()).model_dump()
        answer: dict[str, Any] = await service.switch_pool.run(lambda: service.store.digests(model, **wanted))
        return answer
