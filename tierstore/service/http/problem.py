"""Errors as problem+json (RFC 9457), as whatever is not the data plane answers them. Pure functions; any thread."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse, Response

from tierstore.errors import SequenceGap
from tierstore.service.status import as_text, message_of, retry_after, status_of

PROBLEM = "application/problem+json"


def problem(status: int, detail: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    """An answer that says what is wrong; `more` are further members of the document."""
    document = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": as_text(detail),
        **more,
    }
    return JSONResponse(document, status, headers, media_type=PROBLEM)


def answer_error(error: Exception) -> Response:
    """`error` as problem+json."""
    status = status_of(error)
    more = {"expected_seq": error.expected_seq} if isinstance(error, SequenceGap) else {}
    seconds = retry_after(error)
    headers = {"Retry-After": seconds.decode()} if seconds is not None else None
    return problem(status, message_of(error), headers, **more)
