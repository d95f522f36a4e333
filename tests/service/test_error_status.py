"""The status of an error: one that the class says, which the service answers with and the client reads."""

from __future__ import annotations

import inspect
from http import HTTPStatus

import orjson
import pytest

from tierstore import errors
from tierstore.client.replies import error_of
from tierstore.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    RateLimited,
    TierstoreError,
    TooLarge,
    Unauthorized,
    WrongPartition,
)
from tierstore.service.error_status import HttpError, grpc_status, http_status
from tierstore.service.http.messages import error_response

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, TierstoreError)]
GRPC = {
    "OUT_OF_RANGE", "INVALID_ARGUMENT", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED", "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INTERNAL",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_says_its_status(kind: type[TierstoreError]) -> None:
    assert 400 <= HTTPStatus(kind.http_status) < 600
    assert kind.grpc_status in GRPC


@pytest.mark.parametrize(
    "kind",
    [Forbidden, InvalidInput, NotFound, NotReady, TooLarge, Unauthorized, WrongPartition, DeadlineExceeded, Overloaded],
)
def test_the_client_raises_what_the_service_has_raised(kind: type[TierstoreError]) -> None:
    response = error_response(kind("why"))
    headers = {name.decode(): value.decode() for name, value in response.headers}
    error = error_of(response.status, headers, b"".join(response.chunks))
    assert type(error) is kind
    assert str(error).startswith("why")


def test_a_status_of_http_alone_and_what_is_no_error_of_ours() -> None:
    assert http_status(HttpError(415, "media type")) == 415
    assert (http_status(RecursionError()), grpc_status(RecursionError())) == (400, "INVALID_ARGUMENT")
    assert (http_status(ZeroDivisionError()), grpc_status(ZeroDivisionError())) == (500, "INTERNAL")
    assert type(error_of(RateLimited.http_status, {}, orjson.dumps({"error": "slowly"}))) is Overloaded
