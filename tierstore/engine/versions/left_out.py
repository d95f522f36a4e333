"""Which undone deltas a version's rows are without: a record of its disk tier, by which a copy is recognised whose
`undone.json` is of another moment than the rows (`lifecycle/copied.py`).

Written by a fold that leaves some out, in one step with its rows, and true for as long as the rows are there. What
earlier releases have left out is not known.
"""

from __future__ import annotations

import json

from tierstore.engine.data.overlay import Overlay
from tierstore.engine.serving.undone_record import Undone, joined

RECORD = "undone"


def record(overlay: Overlay, after: int) -> dict[str, bytes]:
    """What the fold of an overlay onto rows of the watermark `after` says; nothing where it leaves none out."""
    if not overlay.undone:
        return {}
    document = {"after": after, "upto": overlay.hi, "ranges": joined(overlay.undone, after, overlay.hi)}
    return {RECORD: json.dumps(document).encode()}


def agrees(found: bytes | None, undone: Undone) -> bool:
    """Whether rows that say this of themselves are without what is undone, and without nothing else."""
    if found is None:
        return True
    try:
        document = json.loads(found)
        return bool(undone.within(document["after"], document["upto"]) == document["ranges"])
    except (ValueError, LookupError, TypeError):
        return False
