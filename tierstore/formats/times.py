"""Moments as they are written in manifests and deltas: ISO 8601. Pure functions."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from typing import Any

import numpy as np

TimeLike = datetime | float | str
_MAX_EPOCH_S = 1e11  # the year 5138: a larger number is in milliseconds or smaller units


def parse_time(text: str) -> datetime:
    """The moment that `text` (ISO 8601) of a manifest or a delta names, in UTC; without an offset it is in UTC.

    Raises ValueError.
    """
    if len(text) < len("2026-11-20"):
        raise ValueError(f"expected an ISO 8601 time such as 2026-11-20T02:00:00Z, got {text!r}")
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"expected an ISO 8601 time such as 2026-11-20T02:00:00Z, got {text!r}") from error


def as_utc(value: Any) -> datetime:
    """A moment in UTC from a datetime with a zone, seconds since 1970, or ISO 8601 text with an offset.

    ValueError for anything else. A datetime or a text without a zone is refused, because it could be local time or UTC.
    """
    if isinstance(value, str):
        moment = parse_time(value)
        if datetime.fromisoformat(value).tzinfo is None:
            raise ValueError(
                f"expected an ISO 8601 time with an offset, got {value!r} without one: "
                f"write {format_time(moment)!r} if it is UTC, else its offset, such as +01:00"
            )
        return moment
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(
                f"expected a datetime with a time zone, got {value!r} without one: "
                "use datetime.now(UTC), or .replace(tzinfo=UTC) if it is UTC"
            )
        return value.astimezone(UTC)
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        seconds = float(value)
        if not math.isfinite(seconds) or not 0 <= seconds < _MAX_EPOCH_S:
            raise ValueError(f"expected seconds since 1970, such as time.time(), got {value!r}")
        return datetime.fromtimestamp(seconds, UTC)
    what = "a date without a time" if isinstance(value, date) else type(value).__name__
    if isinstance(value, np.datetime64):
        what = "a datetime64, which has no zone: use value.item().replace(tzinfo=UTC) if it is UTC, of unit us or s"
    raise ValueError(f"expected a datetime with a time zone, seconds since 1970 or ISO 8601 text, got {what}")


def format_time(moment: datetime) -> str:
    """ISO 8601 in UTC, ending in Z; a moment without a time zone is taken as UTC."""
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
