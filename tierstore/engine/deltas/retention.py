"""What a log of deltas may forget: one rule for the log on a node and for the one in a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import takewhile


def may_go(
    entries: Iterable[tuple[int, float]], held: Iterable[int], loading: Iterable[int], start: int, keep_s: float
) -> int | None:
    """The newest entry up to which a log that begins after `start` is needed no more; None where all of it is to stay.

    `entries`: (seq, when it came, in seconds since 1970), ascending; each stays for `keep_s`.
    `held`: what each kept version has.
    `loading`: where the snapshots begin that are being loaded. Whatever lacks more than the log has is stale, and needs
    nothing of it; where nothing says what is needed, everything stays.
    """
    needed = min((seq for seq in (*held, *loading) if seq >= start), default=None)
    if needed is None:
        return None
    came_s = time.time() - keep_s
    return max((seq for seq, _ in takewhile(lambda e: e[0] <= needed and e[1] <= came_s, entries)), default=None)
