"""A service's refusals turned back into the errors that they were. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tierstore.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    NotReady,
    Overloaded,
    SequenceGap,
    TierstoreError,
    TooLarge,
)


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> TierstoreError:
    """The error that a refusal stands for. `headers` by lower-case name."""
    document = _document(body)
    message = str(
        document.get("detail") or document.get("error") or document.get("title") or f"the service answered {status}"
    )
    match status:
        case 401 | 403:
            return Forbidden(message)
        case 404:
            return NotFound(message)
        case 409 if isinstance(document.get("expected_seq"), int):
            return SequenceGap(message, expected_seq=document["expected_seq"])
        case 409:
            return Conflict(message)
        case 413:
            return TooLarge(message)
        case 429 | 503 if "retry-after" in headers:
            return Overloaded(message, retry_after_s=_seconds(headers["retry-after"]))
        case 429:
            return Overloaded(message)
        case 503:
            return NotReady(message)
        case 504:
            return DeadlineExceeded(message)
        case _ if 400 <= status < 500:
            return InvalidInput(message)
        case _:
            return TierstoreError(f"the service failed ({status}): {message}")


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        text = body[:200].decode("utf-8", "replace").strip()
        return {"error": text} if text else {}
    return document if isinstance(document, dict) else {"error": str(document)}


def _seconds(value: str) -> float:
    try:
        return max(0.0, float(value))
    except ValueError:
        return 1.0  # the other form of the header, a date, which our service does not send
