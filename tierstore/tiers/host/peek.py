"""A host table's entry for one key, read in Python without counting, for people who inspect a store.

`tiers/host/cache/layout.py` and `heat.py` describe the memory. For a thread that holds the lock of the table's writers.
"""

from __future__ import annotations

import ctypes

import numpy as np

from tierstore.kernels.hashing import mix_all
from tierstore.tiers.base import Peek
from tierstore.tiers.host.cache.heat import GHOSTS, POLICY_BYTES, PROBATION, QUEUE
from tierstore.tiers.host.cache.layout import (
    ABSENT_BYTES,
    ABSENT_WAYS,
    ABSENTS,
    GEOMETRY,
    HEAT_AT,
    LINE_BYTES,
    LINE_WAYS,
    LINES,
    OCCUPIED_AT,
    WAYS,
    Areas,
)


def peek(areas: Areas, key: int) -> Peek:
    """The table's entry for `key`, a code. `heat`: its recent hits (0 to 3) and its queue, or whether it was evicted lately."""
    hashed = int(mix_all(np.array([key], np.int64))[0])
    home = _set_of(areas, hashed)
    way = _way(areas, home, key)
    if way is not None:
        line, place = divmod(way, LINE_WAYS)
        at = (home * LINES + line) * LINE_BYTES
        heat = int(areas.lines[at + HEAT_AT : at + HEAT_AT + 2].view(np.uint16)[0]) >> (2 * place) & 3
        queue = areas.policy[home * POLICY_BYTES + QUEUE :][:PROBATION]
        row = ctypes.string_at(areas.rows + (home * WAYS + way) * areas.row_bytes, areas.row_bytes)
        return Peek(row, heat={"hits": heat, "queue": "probation" if way + 1 in queue else "main"})
    fingerprint = max(1, hashed >> 16 & 0xFFFF)
    ghosts = areas.policy[home * POLICY_BYTES :][: 2 * GHOSTS].view(np.uint16)
    return Peek(absent=_is_absent(areas, home, key), heat={"evicted_lately": bool((ghosts == fingerprint).any())})


def _set_of(areas: Areas, hashed: int) -> int:
    geometry, sets = int(areas.control[GEOMETRY]), areas.sets_per_region
    depth, cursor = geometry & 255, geometry >> 8
    index = (hashed & ((1 << depth) - 1)) * sets + ((hashed >> 32) * sets >> 32)
    half = (sets << depth) >> 1
    return index - half if half <= index < half + cursor else index


def _way(areas: Areas, number: int, key: int) -> int | None:
    for line in range(LINES):
        at = number * LINES + line
        occupied = int(areas.lines[at * LINE_BYTES + OCCUPIED_AT])
        for place in range(LINE_WAYS):
            if occupied >> place & 1 and int(areas.lines64[at * 8 + 1 + place]) == key:
                return line * LINE_WAYS + place
    return None


def _is_absent(areas: Areas, number: int, key: int) -> bool:
    for at in range(number * ABSENTS, (number + 1) * ABSENTS):
        occupied = int(areas.absent[at * ABSENT_BYTES + 4])
        for place in range(ABSENT_WAYS):
            if occupied >> place & 1 and int(areas.absent_keys[at * 8 + 1 + place]) == key:
                return True
    return False
