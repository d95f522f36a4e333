"""What each tier holds of a key, as a look-up would find it, read without changing anything: for `explain`.

No row is promoted, no heat is counted, no cache of ours is filled; pages that are read from disk may stay in the system's cache. Any
thread, for as long as it holds the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierstore.engine.cluster.base import Place
from tierstore.engine.data.cascade import Cascade
from tierstore.engine.reads.view import View
from tierstore.errors import TierstoreError
from tierstore.formats.keys import are_own
from tierstore.formats.row_times import TIME_BYTES, from_rows
from tierstore.tiers.base import Peek
from tierstore.tiers.disk.tier import DiskTier
from tierstore.types import Keys

CACHES = ("device", "host", "ssd_cache")


@dataclass(slots=True)
class Holdings:
    """What tiers hold of one key, in the order in which look-ups ask them: (tier, what, more about it).

    `agree`: whether every cache holds what lies beneath; None where there is nothing to compare. `errors`: by tier.
    """

    code: int
    own: bool = True
    place: Place | None = None
    tiers: list[tuple[str, Peek, dict[str, Any]]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    time_s: int | None = None  # when its row was last written, where that is kept
    agree: bool | None = None
    differ: list[str] = field(default_factory=list)

    @property
    def answering(self) -> tuple[str, Peek]:
        """The first tier that holds something, as a look-up finds it; `absent` where none does."""
        read = ((tier, peek) for tier, peek, _ in self.tiers if not peek.heat.get("filtered"))
        return next(((tier, peek) for tier, peek in read if peek.holds != "nothing"), ("absent", Peek(absent=True)))

    def of(self, tier: str) -> Peek:
        return next((peek for name, peek, _ in self.tiers if name == tier), Peek())


def look(view: View, table: Cascade, codes: Keys) -> list[Holdings]:
    """What tiers hold of each of `codes`."""
    places: Sequence[Place | None] = [None] * len(codes)
    if (remote := view.open_version.remote) is not None:
        places = remote.places(table.spec.name, codes, view.seq)
    found = []
    for code, place in zip(codes.tolist(), places, strict=True):
        one = _look_at(view, table, code, place)
        if one.differ and table.shared is None:  # a fold or an expiry may have come in between: both hold this lock
            with view.open_version.writing:
                one = _look_at(view, table, code, place)
        found.append(one)
    return found


def _look_at(view: View, table: Cascade, code: int, place: Place | None) -> Holdings:
    seen = Holdings(code, place=place)
    if table.own is not None and not are_own(np.array([code], np.int64), table.own)[0]:
        seen.own = False
        return seen
    overlaid = _look_in_overlays(seen, view, table)
    caches = {"device": table.device, "host": table.host}
    for name, cache in caches.items():
        if cache is not None:
            seen.tiers.append((name, peek := cache.peek(code), dict(peek.heat)))
    beneath = _look_on_disk(seen, view, table) if table.shared is None else _look_remote(seen, view, table)
    if beneath is not None and not (overlaid and table.shared is not None):
        held = [(name, peek) for name, peek, _ in seen.tiers if name in CACHES and peek.holds != "nothing"]
        seen.differ = [name for name, peek in held if peek.row != beneath.row]
        seen.agree = not seen.differ if held else None
    return seen


def _look_in_overlays(seen: Holdings, view: View, table: Cascade) -> bool:
    found = False
    for overlay in view.overlays:
        part = overlay.tables.get(table.spec.name)
        at = 0 if part is None else int(np.searchsorted(part.keys, seen.code))
        if part is None or at == len(part.keys) or int(part.keys[at]) != seen.code:
            continue
        peek = Peek(absent=True) if part.deleted[at] else Peek(part.rows[at].tobytes())
        seen.tiers.append(("overlay", peek, {"seqs": [overlay.lo, overlay.hi]}))
        if not found and part.times is not None and peek.row is not None:
            seen.time_s = int(part.times[at])
        found = True
    return found


def _look_on_disk(seen: Holdings, view: View, table: Cascade) -> Peek | None:
    """What look-ups read from disk; None where that cannot be read."""
    version = view.open_version
    disk, times = version.disk, version.info.times_ids.get(table.spec.name)
    assert isinstance(disk, DiskTier)
    try:
        parts = disk.peek(table.table_id, table.spec.row_bytes, seen.code)
        if times is not None and seen.time_s is None:
            kept = disk.peek(times, TIME_BYTES, seen.code)
            row = next((peek.row for peek in kept.values() if peek.row is not None), None)
            seen.time_s = None if row is None else int(from_rows(np.frombuffer(row, np.uint8).reshape(1, -1))[0])
    except TierstoreError as error:
        seen.errors["disk"] = str(error)
        return None
    for name, peek in parts.items():
        seen.tiers.append((name, peek, dict(peek.heat)))
    read = (peek for peek in parts.values() if not peek.heat.get("filtered"))
    return next((peek for peek in read if peek.holds != "nothing"), Peek(absent=True))


def _look_remote(seen: Holdings, view: View, table: Cascade) -> Peek | None:
    remote, place = view.open_version.remote, seen.place
    assert remote is not None
    if (cached := remote.peek_cached(table.table_id, seen.code)) is not None:
        seen.tiers.append(("ssd_cache", cached, dict(cached.heat)))
    if place is None or place.peek is None:
        seen.errors["remote"] = "not known" if place is None else place.error or "not known"
        return None
    seen.tiers.append(("remote", place.peek, {"node": place.node}))
    return place.peek
