"""What of a log of deltas is still needed: one rule for the log on a node and for the one in a cluster."""

from __future__ import annotations

from collections.abc import Iterable


def needed_above(held: Iterable[int], loading: Iterable[int], start: int) -> int | None:
    """The seq above which a log that begins after `start` is needed; None where nothing says so.

    `held`: what each kept version has. `loading`: where the snapshots begin that are being loaded. Whatever lacks more than the log has
    is stale, and needs nothing of it.
    """
    return min((seq for seq in (*held, *loading) if seq >= start), default=None)
