"""Which HTTP status an error is. Immutable; any thread may use it."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus

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
    explained,
)

logger = logging.getLogger(__name__)


class HttpError(TierstoreError):
    """An error of the transport itself, which has a status of its own (method, media type, host)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


# In this order: the first class that fits wins, so subclasses stand before their bases.
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (InvalidInput, HTTPStatus.BAD_REQUEST),
    (NotFound, HTTPStatus.NOT_FOUND),
    (Forbidden, HTTPStatus.FORBIDDEN),
    (Conflict, HTTPStatus.CONFLICT),
    (TooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (DeadlineExceeded, HTTPStatus.GATEWAY_TIMEOUT),
    (NotReady, HTTPStatus.BAD_REQUEST),
    (MissingExtra, HTTPStatus.BAD_REQUEST),
    (Overloaded, HTTPStatus.SERVICE_UNAVAILABLE),
    (Closed, HTTPStatus.SERVICE_UNAVAILABLE),
    (Locked, HTTPStatus.SERVICE_UNAVAILABLE),
    (StorageError, HTTPStatus.SERVICE_UNAVAILABLE),
    (RecursionError, HTTPStatus.BAD_REQUEST),
    (UnicodeError, HTTPStatus.BAD_REQUEST),
)
# What only a client brings about, by JSON nested very deep or half a character in a string, wherever it is noticed.
SENT: tuple[tuple[type[Exception], str], ...] = (
    (RecursionError, "the request is nested too deep"),
    (UnicodeError, "the request holds text that is not Unicode"),
)


def status_of(error: BaseException) -> int:
    """The HTTP status of `error`: 500 for what is not one of ours, which is a defect of the server."""
    if isinstance(error, HttpError):
        return error.status
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return int(status)
    return int(HTTPStatus.INTERNAL_SERVER_ERROR)


def retry_after(error: BaseException) -> bytes | None:
    """The value of `Retry-After` (whole seconds) for `error`, or None."""
    if isinstance(error, Overloaded):
        return str(max(1, math.ceil(error.retry_after_s))).encode()
    return b"1" if isinstance(error, (Closed, StorageError)) else None


def message_of(error: BaseException) -> str:
    """What a client is told. Details of a defect go to the log alone."""
    if isinstance(error, TierstoreError):
        return as_text(explained(error))
    for kind, message in SENT:
        if isinstance(error, kind):
            return message
    return "internal error; the server's log has the details"


def as_text(text: str) -> str:
    """`text` as it can be sent: half characters, which JSON and names of files may hold, are escaped."""
    return text.encode(errors="backslashreplace").decode()


def log_failure(error: BaseException, what: str) -> None:
    """Log what an operator should look at: defects with their traceback, storage failures in a line."""
    if isinstance(error, StorageError):
        logger.error("%s: %s", what, error)
    elif isinstance(error, tuple(kind for kind, _ in SENT)):
        logger.warning("%s: %s: %s", what, message_of(error), type(error).__name__)
    elif not isinstance(error, TierstoreError):
        logger.error("%s failed", what, exc_info=error)


OUTCOMES = {
    200: "ok",
    202: "ok",
    204: "ok",
    403: "refused",
    404: "not_found",
    409: "conflict",
    413: "too_large",
    429: "overloaded",
    503: "overloaded",
    504: "deadline",
}


def outcome_of(status: int) -> str:
    """The metric label of a status: few values, whatever a client sends."""
    return OUTCOMES.get(status) or ("error" if status >= 500 else "bad_input" if status >= 400 else "ok")
