"""What a client was made with, for those who carry out its verbs. Immutable."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.client.flights import Policy


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client was made with, checked."""

    timeout_s: float
    hedge_after_s: float | None
    split_keys: int | None
    split_items: int | None
    max_connections: int
    policy: Policy
