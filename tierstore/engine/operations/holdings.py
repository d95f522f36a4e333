"""The entries of all tiers for a key, as a look-up would find them, read without changing anything: for `explain`.

No row is promoted, no heat is counted, no cache of ours is filled; pages that are read from disk may stay in the page
cache. Any thread, while it holds the view.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.reads.view import View
from tierstore.engine.versions.rows import Place
from tierstore.formats.keys import are_own
from tierstore.tiers.base import Peek
from tierstore.types import Keys

CACHES = ("device", "host", "ssd_cache")


@dataclass(slots=True)
class Holdings:
    """The entries of tiers for one key, in the order of look-ups: (tier, entry, more about it).

    `agree`: whether every cache agrees with the tiers below; None if there is nothing to compare. `errors`: by tier.
    """

    code: int
    own: bool = True
    place: Place | None = None
    tiers: list[tuple[str, Peek, dict[str, Any]]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    time_s: int | None = None  # when its row was last written, if that is kept
    agree: bool | None = None
    differ: list[str] = field(default_factory=list)

    @property
    def answering(self) -> tuple[str, Peek]:
        """The first tier that holds something, as a look-up finds it; `absent` if none does."""
        read = ((tier, peek) for tier, peek, _ in self.tiers if not peek.heat.get("filtered"))
        return next(((tier, peek) for tier, peek in read if peek.holds != "nothing"), ("absent", Peek(absent=True)))

    def of(self, tier: str) -> Peek:
        return next((peek for name, peek, _ in self.tiers if name == tier), Peek())


def look(view: View, table: Cascade, codes: Keys) -> list[Holdings]:
    """The entries of tiers for each of `codes`."""
    places = view.open_version.rows.places(table.spec.name, codes, view.seq)
    found = []
    for code, place in zip(codes.tolist(), places, strict=True):
        one = _look_at(view, table, code, place)
        if one.differ:  # a fold or an expiry may have come in between: both hold this lock
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
    beneath = view.open_version.rows.beneath(view.open_version.info, table.spec.name, code, place)
    seen.tiers += beneath.tiers
    seen.errors |= beneath.errors
    seen.time_s = beneath.time_s if seen.time_s is None else seen.time_s
    if (answer := beneath.answer) is not None and not (overlaid and beneath.newer_than_overlays):
        held = [(name, peek) for name, peek, _ in seen.tiers if name in CACHES and peek.holds != "nothing"]
        seen.differ = [name for name, peek in held if peek.row != answer.row]
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
