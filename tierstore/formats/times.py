"""Moments as they are written in manifests and deltas: ISO 8601. Pure functions."""

from __future__ import annotations

from datetime import UTC, datetime


def parse_time(text: str) -> datetime:
    """The moment that `text` (ISO 8601) names, in UTC; without an offset it is taken as UTC. ValueError otherwise."""
    if len(text) < len("2026-11-20"):
        raise ValueError(f"expected an ISO 8601 time such as 2026-11-20T02:00:00Z, came {text!r}")
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"expected an ISO 8601 time such as 2026-11-20T02:00:00Z, came {text!r}") from error


def format_time(moment: datetime) -> str:
    """ISO 8601 in UTC, ending in Z; a moment without a time zone is taken as UTC."""
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
