"""The writing half of the set-associative cache (`setcache`): insert, update, erase, halve and double.

One thread at a time runs these, on one table; readers go on meanwhile. Whatever a reader could take for
an answer (tag, key, row, absent key) is written between `open_set` and `close_set` of its set. Heat, hands
and ghosts are advice, and written without.
"""

from __future__ import annotations

import numba as nb
from numba import types

from tierstore.kernels.atomics import (
    copy_bytes,
    fence_release,
    last_one,
    match32,
    prefetch,
    store_relaxed,
    store_release,
    trailing_zeros,
)
from tierstore.kernels.heat import (
    GHOST_BYTES,
    MOVE_AT,
    PROBATION,
    add_ghost,
    get_heat,
    next_victim,
    set_heat,
    take_ghost,
)
from tierstore.kernels.setcache import (
    ABSENT_BYTES,
    ABSENT_WAYS,
    AREAS,
    BOOLS,
    GEOMETRY,
    HEAD_BYTES,
    HEAT_AT,
    KEYS,
    TAGS_AT,
    WAYS,
    find_absent,
    find_way,
    mix,
    set_of,
    tag_of,
)

ROWS, ABSENT_KEYS, ADMITTED, EVICTED = range(4)  # of the counters, int64[4]

_AHEAD = 8  # keys asked for ahead
COUNTERS = types.Array(types.int64, 1, "C")


@nb.njit
def open_set(words, s):  # type: ignore[no-untyped-def]
    """Make a set's version odd, before anything in the set changes. Returns the version to close with."""
    version = words[s * 16]
    store_relaxed(words, s * 16, nb.uint32(version + 1))
    fence_release()
    return nb.uint32(version + 2)


@nb.njit
def close_set(words, s, version):  # type: ignore[no-untyped-def]
    store_release(words, s * 16, version)


@nb.njit
def forget_absent(areas, counters, s, key):  # type: ignore[no-untyped-def]
    if areas.absent[s * ABSENT_BYTES + 4] == 0:
        return
    place = find_absent(areas.absent, areas.absent_keys, s, key)
    if place >= 0:
        version = open_set(areas.absent32, s)
        areas.absent[s * ABSENT_BYTES + 4] &= ~(1 << place)
        close_set(areas.absent32, s, version)
        counters[ABSENT_KEYS] -= 1


@nb.njit
def mark_absent(areas, counters, s, key):  # type: ignore[no-untyped-def]
    """Clock: the first place from the hand that was not asked for since the hand last passed makes room."""
    if find_absent(areas.absent, areas.absent_keys, s, key) >= 0:
        return False
    base = s * ABSENT_BYTES
    taken, asked = nb.int64(areas.absent[base + 4]), nb.int64(areas.absent[base + 5])
    place = nb.int64(areas.absent[base + 6]) % ABSENT_WAYS
    for _ in range(2 * ABSENT_WAYS):
        if not (taken >> place) & 1 or not (asked >> place) & 1:
            break
        asked &= ~(1 << place)
        place = (place + 1) % ABSENT_WAYS
    counters[ABSENT_KEYS] += 0 if (taken >> place) & 1 else 1
    version = open_set(areas.absent32, s)
    areas.absent_keys[s * 8 + 1 + place] = key
    areas.absent[base + 4] = taken | (1 << place)
    areas.absent[base + 5] = asked & ~(1 << place)
    areas.absent[base + 6] = place + 1
    close_set(areas.absent32, s, version)
    return True


@nb.njit
def put(areas, s, way, tag, key, heat, source):  # type: ignore[no-untyped-def]
    """Let `way` of set `s` hold this key and the row at address `source`."""
    version = open_set(areas.heads32, s)
    areas.heads[s * HEAD_BYTES + TAGS_AT + way] = tag
    areas.keys[s * WAYS + way] = key
    copy_bytes(areas.rows + (s * WAYS + way) * areas.row_bytes, source, areas.row_bytes)
    close_set(areas.heads32, s, version)
    set_heat(areas.heads, s * HEAD_BYTES + HEAT_AT, way, heat)


@nb.njit
def erase(areas, s, way):  # type: ignore[no-untyped-def]
    version = open_set(areas.heads32, s)
    areas.heads[s * HEAD_BYTES + TAGS_AT + way] = 0
    close_set(areas.heads32, s, version)


@nb.njit
def rank_of(areas, s, way):  # type: ignore[no-untyped-def]
    """0..7: how much a row is worth keeping, by hits, then by queue."""
    return get_heat(areas.heads, s * HEAD_BYTES + HEAT_AT, way) * 2 + (1 if way >= PROBATION else 0)


@nb.njit
def make_room(areas, s, hashed):  # type: ignore[no-untyped-def]
    """Put a row out of the full set `s`, by the rules of `heat`. Returns the way that a new key is to take.

    The row there may be one that still stands elsewhere in the set: `put` the new one at once.
    """
    heads, base = areas.heads, s * HEAD_BYTES
    known = take_ghost(areas.ghosts, s, hashed)
    way = nb.int64(heads[base + 4]) % PROBATION
    victim, moves = way, False
    if known or get_heat(heads, base + HEAT_AT, way) >= MOVE_AT:
        victim = next_victim(heads, base + HEAT_AT, nb.int64(heads[base + 5]), WAYS)
        heads[base + 5] = victim + 1 if victim + 1 < WAYS else PROBATION
        moves = not known
    heads[base + 6] = add_ghost(areas.ghosts, s, nb.int64(heads[base + 6]), mix(areas.keys[s * WAYS + victim]))
    if known:
        return victim
    heads[base + 4] = (way + 1) % PROBATION
    if moves:
        at = areas.rows + (s * WAYS + way) * areas.row_bytes
        put(
            areas,
            s,
            victim,
            heads[base + TAGS_AT + way],
            areas.keys[s * WAYS + way],
            get_heat(heads, base + HEAT_AT, way),
            at,
        )
    return way


@nb.njit(types.int64(AREAS, KEYS, types.int64, types.boolean, COUNTERS), nogil=True, cache=True)
def insert(areas, keys, rows, evict, counters):  # type: ignore[no-untyped-def]
    """Let in distinct keys with the rows at address `rows`. Returns how many were let in.

    A key that is resident keeps its row: both were read under views that are current. Without `evict`
    only free ways are filled, main's first, because such keys come hottest first.
    """
    geometry = areas.control[GEOMETRY]
    heads = areas.heads
    admitted = 0
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            ahead = set_of(mix(keys[i + _AHEAD]), geometry, areas.sets_per_region)
            prefetch(heads.ctypes.data + ahead * HEAD_BYTES)
            prefetch(areas.ghosts.ctypes.data + ahead * GHOST_BYTES)
            prefetch(areas.absent.ctypes.data + ahead * ABSENT_BYTES)
        key = keys[i]
        hashed = mix(key)
        s = set_of(hashed, geometry, areas.sets_per_region)
        tag = tag_of(hashed)
        if find_way(heads, areas.keys, s, tag, key) >= 0:
            continue
        free = match32(heads, s * HEAD_BYTES + TAGS_AT, nb.uint8(0))
        if free != 0:
            way = trailing_zeros(free) if evict else last_one(free)
            counters[ROWS] += 1
        elif evict:
            way = make_room(areas, s, hashed)
            counters[EVICTED] += 1
        else:
            continue
        forget_absent(areas, counters, s, key)
        put(areas, s, way, tag, key, 0, rows + i * areas.row_bytes)
        admitted += 1
    counters[ADMITTED] += admitted
    return admitted


@nb.njit(types.int64(AREAS, KEYS, COUNTERS), nogil=True, cache=True)
def insert_absent(areas, keys, counters):  # type: ignore[no-untyped-def]
    """Remember distinct keys as not existing. Returns how many are new."""
    geometry = areas.control[GEOMETRY]
    marked = 0
    for i in range(keys.size):
        hashed = mix(keys[i])
        s = set_of(hashed, geometry, areas.sets_per_region)
        if find_way(areas.heads, areas.keys, s, tag_of(hashed), keys[i]) < 0 and mark_absent(
            areas, counters, s, keys[i]
        ):
            marked += 1
    return marked


@nb.njit(types.void(AREAS, KEYS, types.int64, BOOLS, types.int64, types.int64, COUNTERS), nogil=True, cache=True)
def update(areas, keys, rows, deleted, begin, end, counters):  # type: ignore[no-untyped-def]
    """Bring what is held of keys[begin:end] up to a delta: overwrite or erase rows, set and clear absent marks."""
    geometry = areas.control[GEOMETRY]
    heads = areas.heads
    for i in range(begin, end):
        if i + _AHEAD < end:
            ahead = set_of(mix(keys[i + _AHEAD]), geometry, areas.sets_per_region)
            prefetch(heads.ctypes.data + ahead * HEAD_BYTES)
            prefetch(areas.absent.ctypes.data + ahead * ABSENT_BYTES)
        key = keys[i]
        hashed = mix(key)
        s = set_of(hashed, geometry, areas.sets_per_region)
        way = find_way(heads, areas.keys, s, tag_of(hashed), key)
        if deleted[i]:
            if way >= 0:
                erase(areas, s, way)
                counters[ROWS] -= 1
                mark_absent(areas, counters, s, key)
            continue
        forget_absent(areas, counters, s, key)
        if way >= 0:
            version = open_set(areas.heads32, s)
            copy_bytes(areas.rows + (s * WAYS + way) * areas.row_bytes, rows + i * areas.row_bytes, areas.row_bytes)
            close_set(areas.heads32, s, version)
