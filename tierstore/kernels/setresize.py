"""Halving and doubling the set-associative cache (`setcache`) in place, and listing what it holds.

`merge` and `split` are a writer's, like `setwrite`: a range of sets a call, so that the caller can let
other writers in between. `hottest` reads without a lock, beside any writer.
"""

from __future__ import annotations

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels.atomics import fence_acquire, load_acquire, load_relaxed, match32, store_release, trailing_zeros
from tierstore.kernels.heat import GHOST_BYTES, get_heat
from tierstore.kernels.setcache import (
    ABSENT_BYTES,
    ABSENT_WAYS,
    AREAS,
    GEOMETRY,
    HEAD_BYTES,
    HEAT_AT,
    TAGS_AT,
    WAYS,
    mix,
    set_of,
)
from tierstore.kernels.setwrite import (
    ABSENT_KEYS,
    COUNTERS,
    EVICTED,
    ROWS,
    close_set,
    erase,
    forget_absent,
    mark_absent,
    open_set,
    put,
    rank_of,
)

RANKS = 8  # degrees of `rank_of`
_POSITIONS = types.Array(types.int64, 1, "C")


@nb.njit(types.void(AREAS, types.int64, types.int64, COUNTERS), nogil=True, cache=True)
def merge(areas, begin, end, counters):  # type: ignore[no-untyped-def]
    """Move sets half + [begin, end) onto [begin, end), where the hottest stay; then publish `end` as the cursor."""
    depth = areas.control[GEOMETRY] & 255
    half = (areas.sets_per_region << depth) >> 1
    for low in range(begin, end):
        high = low + half
        for way in range(WAYS):
            tag = areas.heads[high * HEAD_BYTES + TAGS_AT + way]
            if tag == 0:
                continue
            heat = get_heat(areas.heads, high * HEAD_BYTES + HEAT_AT, way)
            free = match32(areas.heads, low * HEAD_BYTES + TAGS_AT, nb.uint8(0))
            if free != 0:
                target = trailing_zeros(free)
            else:
                counters[ROWS] -= 1
                counters[EVICTED] += 1
                target = 0
                for other in range(1, WAYS):
                    if rank_of(areas, low, other) < rank_of(areas, low, target):
                        target = other
                if rank_of(areas, high, way) <= rank_of(areas, low, target):
                    continue
            put(
                areas,
                low,
                target,
                tag,
                areas.keys[high * WAYS + way],
                heat,
                areas.rows + (high * WAYS + way) * areas.row_bytes,
            )
        taken = nb.int64(areas.absent[high * ABSENT_BYTES + 4])
        for place in range(ABSENT_WAYS):
            if (taken >> place) & 1:
                counters[ABSENT_KEYS] -= 1
                mark_absent(areas, counters, low, areas.absent_keys[high * 8 + 1 + place])
        version = open_set(areas.heads32, high)
        areas.heads[high * HEAD_BYTES + TAGS_AT : high * HEAD_BYTES + TAGS_AT + WAYS] = 0
        close_set(areas.heads32, high, version)
        version = open_set(areas.absent32, high)
        areas.absent[high * ABSENT_BYTES + 4] = 0
        close_set(areas.absent32, high, version)
    store_release(areas.control, GEOMETRY, (end << 8) | depth)


@nb.njit(types.void(AREAS, types.int64, types.int64, COUNTERS), nogil=True, cache=True)
def split(areas, begin, end, counters):  # type: ignore[no-untyped-def]
    """Move what belongs to sets half + [begin, end) there from [begin, end); then publish `begin` as the cursor."""
    depth = areas.control[GEOMETRY] & 255
    half = (areas.sets_per_region << depth) >> 1
    for low in range(begin, end):
        high = low + half
        for i in range(GHOST_BYTES // 2):
            areas.ghosts[high * (GHOST_BYTES // 2) + i] = areas.ghosts[low * (GHOST_BYTES // 2) + i]
        for way in range(WAYS):
            tag, key = areas.heads[low * HEAD_BYTES + TAGS_AT + way], areas.keys[low * WAYS + way]
            if tag != 0 and set_of(mix(key), depth, areas.sets_per_region) == high:
                heat = get_heat(areas.heads, low * HEAD_BYTES + HEAT_AT, way)
                put(areas, high, way, tag, key, heat, areas.rows + (low * WAYS + way) * areas.row_bytes)
                erase(areas, low, way)
        taken = nb.int64(areas.absent[low * ABSENT_BYTES + 4])
        for place in range(ABSENT_WAYS):
            key = areas.absent_keys[low * 8 + 1 + place]
            if (taken >> place) & 1 and set_of(mix(key), depth, areas.sets_per_region) == high:
                mark_absent(areas, counters, high, key)
                forget_absent(areas, counters, low, key)
    store_release(areas.control, GEOMETRY, (begin << 8) | depth)


@nb.njit(types.void(AREAS, types.int64, _POSITIONS), nogil=True, cache=True)
def count_ranks(areas, sets, counts):  # type: ignore[no-untyped-def]
    """Add to counts[rank], int64[8], the resident rows of each rank in the first `sets` sets."""
    for s in range(sets):
        for way in range(WAYS):
            if areas.heads[s * HEAD_BYTES + TAGS_AT + way] != 0:
                counts[rank_of(areas, s, way)] += 1


@nb.njit(types.void(AREAS, types.int64, _POSITIONS, _POSITIONS, _POSITIONS), nogil=True, cache=True)
def list_keys(areas, sets, out, begin, end):  # type: ignore[no-untyped-def]
    """Put resident keys of rank r into out[begin[r]:end[r]] while there is room; `begin` comes back advanced.

    Sets that a writer is in are passed over.
    """
    ranks = np.empty(WAYS, np.int64)
    found = np.empty(WAYS, np.int64)
    for s in range(sets):
        version = load_acquire(areas.heads32, s * 16)
        n = 0
        for way in range(WAYS):
            if areas.heads[s * HEAD_BYTES + TAGS_AT + way] != 0:
                ranks[n] = rank_of(areas, s, way)
                found[n] = areas.keys[s * WAYS + way]
                n += 1
        fence_acquire()
        if version & 1 or load_relaxed(areas.heads32, s * 16) != version:
            continue
        for i in range(n):
            at = begin[ranks[i]]
            if at < end[ranks[i]]:
                out[at] = found[i]
                begin[ranks[i]] = at + 1
