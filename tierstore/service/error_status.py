"""The status of an error over HTTP and gRPC, and its text for the client. Immutable; any thread may use it."""

from __future__ import annotations

import logging
import math

from tierstore.errors import (
    Closed,
    InvalidInput,
    NotReady,
    Overloaded,
    RunLimit,
    StorageError,
    TierstoreError,
    TooLarge,
    explained,
)

logger = logging.getLogger(__name__)


CUT_OFF = "the service stopped before this request was finished, which may have had its effect; send it again"


class HttpError(TierstoreError):
    """An error of the HTTP transport itself, with a status of its own (method, media type, host)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.http_status = status


class Unserved(TierstoreError):
    """A part of a protocol that this server does not have. Only over gRPC."""

    grpc_status = "UNIMPLEMENTED"


class Cancelled(TierstoreError):
    """The client cancelled the call and waits for no answer. Only over gRPC."""

    grpc_status = "CANCELLED"


class MessageTooLarge(TooLarge):
    """A message above the size limit. Only over gRPC."""

    grpc_status = "RESOURCE_EXHAUSTED"


# Errors that only a client causes, wherever they are noticed: deeply nested JSON, or half a character in a string.
_CAUSED_BY_CLIENT: tuple[tuple[type[Exception], str], ...] = (
    (RecursionError, "the request is nested too deep"),
    (UnicodeError, "the request holds text that is not Unicode"),
)

# The metric label of a status: few values, whatever a client sends.
_HTTP_OUTCOMES = {
    401: "refused",
    403: "refused",
    404: "not_found",
    409: "conflict",
    413: "too_large",
    429: "overloaded",
    503: "overloaded",
    504: "deadline",
}
_GRPC_OUTCOMES = {
    "OK": "ok",
    "NOT_FOUND": "not_found",
    "PERMISSION_DENIED": "refused",
    "UNAUTHENTICATED": "refused",
    "FAILED_PRECONDITION": "conflict",
    "RESOURCE_EXHAUSTED": "overloaded",
    "UNAVAILABLE": "unavailable",
    "DEADLINE_EXCEEDED": "deadline",
    "CANCELLED": "cancelled",
    "INTERNAL": "error",
}


def _status_of(error: BaseException) -> type[TierstoreError] | TierstoreError:
    """The error that determines the status: an error that is not ours is the client's fault, or a defect of the
    server.
    """
    if isinstance(error, TierstoreError):
        return error
    return InvalidInput if isinstance(error, tuple(kind for kind, _ in _CAUSED_BY_CLIENT)) else TierstoreError


def http_status(error: BaseException) -> int:
    """The HTTP status of `error`: 500 for a defect of the server."""
    return _status_of(error).http_status


def grpc_status(error: BaseException) -> str:
    """The name of the gRPC status code of `error`: INTERNAL for a defect of the server."""
    return _status_of(error).grpc_status


def outcome_of(error: BaseException) -> str:
    """The metric label of `error` when it is counted for a version.

    It distinguishes failing storage from too many requests, and a slow dense part from a caller's deadline.
    """
    if isinstance(error, RunLimit):
        return "error"
    if isinstance(error, StorageError) and http_status(error) == 503:
        return "unavailable"
    return http_outcome(http_status(error))


def http_outcome(status: int) -> str:
    """The metric label of an HTTP status."""
    return _HTTP_OUTCOMES.get(status) or ("error" if status >= 500 else "bad_input" if status >= 400 else "ok")


def grpc_outcome(code: str) -> str:
    """The metric label of a gRPC status code: the HTTP label if one fits."""
    return _GRPC_OUTCOMES.get(code, "bad_input")


def retry_after(error: BaseException) -> bytes | None:
    """The value of `Retry-After` (whole seconds) for `error`, or None."""
    if isinstance(error, Overloaded):
        return str(max(1, math.ceil(error.retry_after_s))).encode()
    return b"1" if isinstance(error, (Closed, NotReady, StorageError)) else None


def message_of(error: BaseException) -> str:
    """The text for a client. Details of a defect go only to the log."""
    if isinstance(error, TierstoreError):
        return as_text(explained(error))
    for kind, message in _CAUSED_BY_CLIENT:
        if isinstance(error, kind):
            return message
    return "internal error; the server's log has the details"


def as_text(text: str) -> str:
    """`text` in a form that can be sent: half characters, which JSON and file names may hold, are escaped."""
    return text.encode(errors="backslashreplace").decode()


def log_failure(error: BaseException, what: str) -> None:
    """Log what an operator should see: defects with their traceback, storage failures in one line."""
    if isinstance(error, StorageError):
        logger.error("%s: %s", what, error)
    elif isinstance(error, tuple(kind for kind, _ in _CAUSED_BY_CLIENT)):
        logger.warning("%s: %s: %s", what, message_of(error), type(error).__name__)
    elif not isinstance(error, TierstoreError):
        logger.error("%s failed", what, exc_info=error)
