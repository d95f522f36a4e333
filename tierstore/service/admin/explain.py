"""The request that explains answers for keys: for every caller that may look rows up."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import FailFast, Field, StrictInt, StrictStr, ValidationError

from tierstore.engine.operations.explain import MOST_KEYS
from tierstore.errors import InvalidInput, shown
from tierstore.service.admin.exports import ModelName, Strict
from tierstore.service.context import Service
from tierstore.service.error_status import HttpError
from tierstore.service.http.messages import Disconnected, principal_of, read_body
from tierstore.service.limits.worker_pool import Reservation

MOST_BYTES = 64 << 10  # of a body, which the event loop parses: readers send it, and look-ups wait for that loop


class ExplainRequest(Strict):
    """The keys to explain."""

    feature: str
    keys: Annotated[
        list[StrictInt | StrictStr],
        FailFast(),
        Field(min_length=1, max_length=MOST_KEYS, description="numbers, or strings"),
    ]
    version: Annotated[
        StrictInt | StrictStr | None, Field(description="number or label of a version that is served; default: active")
    ] = None


_BODY = {"required": True, "content": {"application/json": {"schema": ExplainRequest.model_json_schema()}}}


def add_explain(app: FastAPI, service: Service) -> None:
    """Add the route that explains keys to the application."""

    @app.post("/admin/models/{model}/explain", tags=["models"], openapi_extra={"requestBody": _BODY})
    async def explain(model: ModelName, given: Request) -> dict[str, Any]:
        """Why keys are answered as they are: what each tier holds, which delta wrote or deleted them last.

        Changes nothing.
        """
        holding = Reservation(service.inflight)
        headers = {name.lower(): value for name, value in given.scope["headers"]}
        try:
            body = await read_body(given.receive, headers, MOST_BYTES, holding)
            charge = service.rates.admit(principal_of(given.scope), model, len(body))
            request = _parse(body)
        except Disconnected:
            raise HttpError(400, "the body ended early") from None
        finally:
            holding.release()
        if charge is not None:
            charge.keys(len(request.keys))
        answer: dict[str, Any] = await service.explain_pool.run(
            lambda: service.store.explain(model, request.feature, request.keys, version=request.version)
        )
        return answer


def _parse(body: memoryview) -> ExplainRequest:
    """The request. Only the first fault is named: to find thousands would keep the event loop for half a second."""
    with suppress(orjson.JSONDecodeError):
        document = orjson.loads(body)
        names = document if isinstance(document, dict) else ()
        if (unknown := next((name for name in names if name not in ExplainRequest.model_fields), None)) is not None:
            raise InvalidInput(f"unknown member {shown(unknown)}; expected {', '.join(ExplainRequest.model_fields)}")
    try:
        return ExplainRequest.model_validate_json(bytes(body))
    except ValidationError as error:
        raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]) from None
