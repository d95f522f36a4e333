"""Retention of deltas: one rule for what the log on a node, and the log in a cluster, may forget."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import takewhile


def may_go(
    entries: Iterable[tuple[int, float]], held: Iterable[int], loading: Iterable[int], start: int, keep_s: float
) -> int | None:
    """The newest entry up to which a log that begins after `start` may forget all; None if everything must stay.

    `entries`: (seq, when it came, in seconds since 1970), ascending; each stays for `keep_s`. `held`: the watermark of
    each kept version. `loading`: where the snapshots that are being loaded begin. A version that lacks more than the
    log has is stale, and needs nothing of it; if nothing says what is needed, everything stays.
    """
    needed = min((seq for seq in (*held, *loading) if seq >= start), default=None)
    if needed is None:
        return None
    came_s = time.time() - keep_s
    return max((seq for seq, _ in takewhile(lambda e: e[0] <= needed and e[1] <= came_s, entries)), default=None)
