"""Halving and doubling of the host tier's cache (`layout.py`) in place, and lists of its keys.

`merge` and `split` are for the one writer, like `write.py`: a range of sets for each call, so that other writers get their turn. `count_ranks` and
`list_keys` read without a lock, beside any writer.
"""

from __future__ import annotations

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import BORROWS, compiled
from tierstore.kernels.atomics import fence_acquire, load_acquire, load_relaxed, store_release
from tierstore.kernels.hashing import mix
from tierstore.tiers.host.cache.heat import POLICY_BYTES, PROBATION, QUEUE, enter_probation
from tierstore.tiers.host.cache.layout import (
    ABSENT_BYTES,
    ABSENT_WAYS,
    ABSENTS,
    AREAS,
    AWAY_AT,
    GEOMETRY,
    LINE_BYTES,
    LINE_WAYS,
    LINES,
    OCCUPIED_AT,
    WAYS,
    home_of,
    set_of,
)
from tierstore.tiers.host.cache.write import (
    ABSENT_KEYS,
    COUNTERS,
    EVICTED,
    ROWS,
    close_version,
    forget_absent,
    free_way,
    heat_at,
    is_occupied,
    key_at,
    make_home,
    mark_absent,
    open_version,
    put,
    rank_of,
    remove,
    row_at,
)

RANKS = 8  # values of `rank_of`
_POSITIONS = types.Array(types.int64, 1, "C")


@nb.njit(**BORROWS)
def _move_in(areas, low, key, heat, rank, source, counters):
    """Move a row from a set that is given up into set `low`, if there is room or a row of lower rank."""
    home = home_of(mix(key))
    way = free_way(areas, low, home)
    if way < 0:
        counters[ROWS] -= 1
        counters[EVICTED] += 1
        way = 0
        for other in range(1, WAYS):
            if rank_of(areas, low, other) < rank_of(areas, low, way):
                way = other
        if rank <= rank_of(areas, low, way):
            return
        remove(areas, low, way)
    put(areas, low, make_home(areas, low, way, home), key, heat, source)


@nb.njit(**BORROWS)
def _clear(areas, s):
    for line in range(s * LINES, (s + 1) * LINES):
        version = open_version(areas.lines32, line)
        areas.lines[line * LINE_BYTES + OCCUPIED_AT] = 0
        areas.lines[line * LINE_BYTES + AWAY_AT] = 0
        close_version(areas.lines32, line, version)
    for a in range(s * ABSENTS, (s + 1) * ABSENTS):
        version = open_version(areas.absent32, a)
        areas.absent[a * ABSENT_BYTES + 4] = 0
        close_version(areas.absent32, a, version)


@compiled(types.void(AREAS, types.int64, types.int64, COUNTERS), **BORROWS)
def merge(areas, begin, end, counters):
    """Move sets half + [begin, end) onto [begin, end), keeping the hottest rows; then publish `end` as the cursor."""
    depth = areas.control[GEOMETRY] & 255
    half = (areas.sets_per_region << depth) >> 1
    for low in range(begin, end):
        high = low + half
        for way in range(WAYS):
            if is_occupied(areas, high, way):
                key, heat, rank = key_at(areas, high, way), heat_at(areas, high, way), rank_of(areas, high, way)
                _move_in(areas, low, key, heat, rank, row_at(areas, high, way), counters)
        for a in range(high * ABSENTS, (high + 1) * ABSENTS):
            occupied = nb.int64(areas.absent[a * ABSENT_BYTES + 4])
            for place in range(ABSENT_WAYS):
                if (occupied >> place) & 1:
                    counters[ABSENT_KEYS] -= 1
                    mark_absent(areas, counters, a - half * ABSENTS, areas.absent_keys[a * 8 + 1 + place])
        _clear(areas, high)
    store_release(areas.control, GEOMETRY, (end << 8) | depth)


@compiled(types.void(AREAS, types.int64, types.int64, COUNTERS), **BORROWS)
def split(areas, begin, end, counters):
    """Move the keys of sets half + [begin, end) there from [begin, end); then publish `begin` as the cursor."""
    depth = areas.control[GEOMETRY] & 255
    half = (areas.sets_per_region << depth) >> 1
    for low in range(begin, end):
        high = low + half
        for i in range(POLICY_BYTES):
            areas.policy[high * POLICY_BYTES + i] = areas.policy[low * POLICY_BYTES + i]
        for i in range(PROBATION):
            areas.policy[high * POLICY_BYTES + QUEUE + i] = 0
        for i in range(PROBATION):  # oldest first
            way = nb.int64(areas.policy[low * POLICY_BYTES + QUEUE + i]) - 1
            if way >= 0 and set_of(mix(key_at(areas, low, way)), depth, areas.sets_per_region) == high:
                enter_probation(areas.policy, high, way)
        for way in range(WAYS):
            key = key_at(areas, low, way)
            if is_occupied(areas, low, way) and set_of(mix(key), depth, areas.sets_per_region) == high:
                put(areas, high, way, key, heat_at(areas, low, way), row_at(areas, low, way))
                remove(areas, low, way)
        for a in range(low * ABSENTS, (low + 1) * ABSENTS):
            occupied = nb.int64(areas.absent[a * ABSENT_BYTES + 4])
            for place in range(ABSENT_WAYS):
                key = areas.absent_keys[a * 8 + 1 + place]
                if (occupied >> place) & 1 and set_of(mix(key), depth, areas.sets_per_region) == high:
                    mark_absent(areas, counters, a + half * ABSENTS, key)
                    forget_absent(areas, counters, a, key)
    store_release(areas.control, GEOMETRY, (begin << 8) | depth)


@compiled(types.void(AREAS, types.int64, types.int64, _POSITIONS), **BORROWS)
def count_ranks(areas, first, last, counts):
    """Add to counts[rank], int64[8], the number of resident rows of each rank in the sets [first, last)."""
    for s in range(first, last):
        for way in range(WAYS):
            if is_occupied(areas, s, way):
                counts[rank_of(areas, s, way)] += 1


@compiled(types.void(AREAS, types.int64, types.int64, _POSITIONS, _POSITIONS, _POSITIONS))
def list_keys(areas, first, last, out, begin, end):
    """Write resident keys of rank r in the sets [first, last) to out[begin[r]:end[r]] while there is room.

    `begin` comes back advanced. Lines that are being written are skipped.
    """
    ranks = np.empty(LINE_WAYS, np.int64)
    found = np.empty(LINE_WAYS, np.int64)
    for line in range(first * LINES, last * LINES):
        version = load_acquire(areas.lines32, line * 16)
        s, way0, n = line // LINES, line % LINES * LINE_WAYS, 0
        for way in range(way0, way0 + LINE_WAYS):
            if is_occupied(areas, s, way):
                ranks[n] = rank_of(areas, s, way)
                found[n] = key_at(areas, s, way)
                n += 1
        fence_acquire()
        if version & 1 or load_relaxed(areas.lines32, line * 16) != version:
            continue
        for i in range(n):
            at = begin[ranks[i]]
            if at < end[ranks[i]]:
                out[at] = found[i]
                begin[ranks[i]] = at + 1
