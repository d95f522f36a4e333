"""The undone deltas that a version's rows lack: a record of its disk tier, by which a copy is recognised whose document
is of another moment than the rows (`lifecycle/copied.py`).

Written by a fold that leaves some out, in one step with its rows, and true for as long as the rows are there. What
earlier releases have left out is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tierstore.engine.data.overlay import Overlay

RECORD = "undone"


def record(overlay: Overlay, after: int) -> dict[str, bytes]:
    """What the fold of an overlay onto rows of the watermark `after` says; nothing where it leaves none out."""
    if not overlay.undone:
        return {}
    document = {"after": after, "upto": overlay.hi, "ranges": joined(overlay.undone, after, overlay.hi)}
    return {RECORD: json.dumps(document).encode()}


def joined(ranges: Iterable[Sequence[int]], low: int, high: int) -> list[list[int]]:
    """What of the ranges is above `low` and up to `high`; neighbours as one."""
    found: list[list[int]] = []
    for first, last in ranges:
        first, last = max(first, low + 1), min(last, high)
        if first > last:
            continue
        if found and found[-1][1] + 1 == first:
            found[-1][1] = last
        else:
            found.append([first, last])
    return found
