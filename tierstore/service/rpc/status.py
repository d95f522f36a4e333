"""Which gRPC status an error is. Immutable; any thread may use it."""

from __future__ import annotations

from typing import Any

import grpc

from tierstore.errors import (
    Closed,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    Locked,
    MissingExtra,
    NotFound,
    NotReady,
    Overloaded,
    StorageError,
    TierstoreError,
    TooLarge,
)
from tierstore.service.status import SENT, message_of

Code = grpc.StatusCode
MAX_DETAILS = 2048  # bytes; up to three times as many once encoded, and grpcio takes 8 KiB of metadata for sure


class Unserved(TierstoreError):
    """A part of a protocol that this server does not have."""


class Cancelled(TierstoreError):
    """Nobody waits for the answer any more."""


# In this order: the first class that fits wins, so subclasses stand before their bases.
_CODES: tuple[tuple[type[Exception], Any], ...] = (
    (Unserved, Code.UNIMPLEMENTED),
    (Cancelled, Code.CANCELLED),
    (InvalidInput, Code.INVALID_ARGUMENT),
    (NotFound, Code.NOT_FOUND),
    (Forbidden, Code.PERMISSION_DENIED),
    (Conflict, Code.FAILED_PRECONDITION),
    (TooLarge, Code.INVALID_ARGUMENT),
    (DeadlineExceeded, Code.DEADLINE_EXCEEDED),
    (NotReady, Code.UNAVAILABLE),
    (MissingExtra, Code.FAILED_PRECONDITION),
    (Overloaded, Code.RESOURCE_EXHAUSTED),
    (Closed, Code.UNAVAILABLE),
    (Locked, Code.UNAVAILABLE),
    (StorageError, Code.UNAVAILABLE),
    *((kind, Code.INVALID_ARGUMENT) for kind, _ in SENT),
)

# The metric label: the words of the HTTP front where one fits.
_OUTCOMES = {
    Code.OK: "ok",
    Code.NOT_FOUND: "not_found",
    Code.PERMISSION_DENIED: "refused",
    Code.FAILED_PRECONDITION: "conflict",
    Code.RESOURCE_EXHAUSTED: "overloaded",
    Code.UNAVAILABLE: "unavailable",
    Code.DEADLINE_EXCEEDED: "deadline",
    Code.CANCELLED: "cancelled",
    Code.INTERNAL: "error",
}


def code_of(error: BaseException) -> Any:
    """The status code of `error`: INTERNAL for what is not one of ours, which is a defect of the server."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), Code.INTERNAL)


def details_of(error: BaseException) -> str:
    """What a client is told, in so few bytes that they pass as metadata: of longer ones it would see no status at all."""
    text = message_of(error)
    told = text.encode(errors="replace")
    return text if len(told) <= MAX_DETAILS else told[:MAX_DETAILS].decode(errors="ignore") + "…"


def outcome_of(code: Any) -> str:
    """The metric label of a status: few values, whatever a client sends."""
    return _OUTCOMES.get(code, "bad_input")
