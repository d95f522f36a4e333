"""Writes to the host tier's cache (`layout.py`): insert, update, erase.

One thread at a time runs these on a table, while readers go on. Everything that readers take as an answer (key, row, absent key) is written between
`open_version` and `close_version` of its line. Heat, hands and ghosts are only advice and are written without. So is a line's note of its keys in
other lines: a reader that sees it late misses.

A row that is moved within its set is there twice for a moment, and never missing.
"""

from __future__ import annotations

import numba as nb
from numba import types

from tierstore.kernels import BORROWS, compiled
from tierstore.kernels.atomics import copy_bytes, fence_release, prefetch, store_relaxed, store_release, trailing_zeros
from tierstore.kernels.hashing import mix
from tierstore.tiers.host.cache.heat import (
    MAIN_HAND,
    MAX_HEAT,
    MOVE_AT,
    POLICY_BYTES,
    add_ghost,
    enter_probation,
    get_heat,
    oldest_on_probation,
    on_probation,
    remove_from_probation,
    remove_ghost,
    rename_on_probation,
    set_heat,
)
from tierstore.tiers.host.cache.layout import (
    ABSENT_BYTES,
    ABSENT_WAYS,
    AREAS,
    AWAY_AT,
    BOOLS,
    GEOMETRY,
    HEAT_AT,
    KEYS,
    LINE_BYTES,
    LINE_WAYS,
    LINES,
    LINES_AN_ABSENT,
    OCCUPIED_AT,
    WAYS,
    find_absent,
    find_way,
    home_of,
    prefetch_row,
    set_of,
)

ROWS, ABSENT_KEYS, ADMITTED, EVICTED = range(4)  # of the counters, int64[4]

_AHEAD = 8  # keys prefetched ahead
_FULL = (1 << LINE_WAYS) - 1
COUNTERS = types.Array(types.int64, 1, "C")


@nb.njit(**BORROWS)
def open_version(words, line):
    """Make a line's version odd, before anything in it changes. Returns the version to close with."""
    version = words[line * 16]
    store_relaxed(words, line * 16, nb.uint32(version + 1))
    fence_release()
    return nb.uint32(version + 2)


@nb.njit(**BORROWS)
def close_version(words, line, version):
    store_release(words, line * 16, version)


@nb.njit(**BORROWS)
def forget_absent(areas, counters, a, key):
    if areas.absent[a * ABSENT_BYTES + 4] == 0:
        return
    place = find_absent(areas.absent, areas.absent_keys, a, key)
    if place >= 0:
        version = open_version(areas.absent32, a)
        areas.absent[a * ABSENT_BYTES + 4] &= ~(1 << place)
        close_version(areas.absent32, a, version)
        counters[ABSENT_KEYS] -= 1


@nb.njit(**BORROWS)
def mark_absent(areas, counters, a, key):
    """Note an absent key. Clock: it replaces the first one from the hand on that was not looked up since the hand last passed."""
    if find_absent(areas.absent, areas.absent_keys, a, key) >= 0:
        return False
    base = a * ABSENT_BYTES
    occupied, used = nb.int64(areas.absent[base + 4]), nb.int64(areas.absent[base + 5])
    place = nb.int64(areas.absent[base + 6]) % ABSENT_WAYS
    for _ in range(2 * ABSENT_WAYS):
        if not (occupied >> place) & 1 or not (used >> place) & 1:
            break
        used &= ~(1 << place)
        place = (place + 1) % ABSENT_WAYS
    counters[ABSENT_KEYS] += 0 if (occupied >> place) & 1 else 1
    version = open_version(areas.absent32, a)
    areas.absent_keys[a * 8 + 1 + place] = key
    areas.absent[base + 4] = occupied | (1 << place)
    areas.absent[base + 5] = used & ~(1 << place)
    areas.absent[base + 6] = place + 1
    close_version(areas.absent32, a, version)
    return True


@nb.njit(**BORROWS)
def is_occupied(areas, s, way):
    occupied = nb.int64(areas.lines[(s * LINES + way // LINE_WAYS) * LINE_BYTES + OCCUPIED_AT])
    return (occupied >> (way % LINE_WAYS)) & 1 == 1


@nb.njit(**BORROWS)
def key_at(areas, s, way):
    return areas.lines64[(s * LINES + way // LINE_WAYS) * 8 + 1 + way % LINE_WAYS]


@nb.njit(**BORROWS)
def row_at(areas, s, way):
    """The address of the row of the key at `way`."""
    return areas.rows + (s * WAYS + way) * areas.row_bytes


@nb.njit(**BORROWS)
def heat_at(areas, s, way):
    base = (s * LINES + way // LINE_WAYS) * LINE_BYTES + HEAT_AT
    return get_heat(areas.lines, base, way % LINE_WAYS)


@nb.njit(**BORROWS)
def set_heat_at(areas, s, way, heat):
    set_heat(areas.lines, (s * LINES + way // LINE_WAYS) * LINE_BYTES + HEAT_AT, way % LINE_WAYS, heat)


@nb.njit(**BORROWS)
def rank_of(areas, s, way):
    """The rank of a row, 0..7: how much it is worth keeping, by hits, then by queue."""
    return heat_at(areas, s, way) * 2 + (0 if on_probation(areas.policy, s, way) else 1)


@nb.njit(**BORROWS)
def put(areas, s, way, key, heat, source):
    """Put this key and the row at address `source` into `way` of set `s`, which is free."""
    line, place = s * LINES + way // LINE_WAYS, way % LINE_WAYS
    version = open_version(areas.lines32, line)
    areas.lines64[line * 8 + 1 + place] = key
    areas.lines[line * LINE_BYTES + OCCUPIED_AT] |= 1 << place
    copy_bytes(row_at(areas, s, way), source, areas.row_bytes)
    close_version(areas.lines32, line, version)
    set_heat_at(areas, s, way, heat)
    home = home_of(mix(key))
    if home != way // LINE_WAYS:
        areas.lines[(s * LINES + home) * LINE_BYTES + AWAY_AT] |= 1 << (way // LINE_WAYS)


@nb.njit(inline="always")
def remove(areas, s, way):
    """Free `way` of set `s`."""
    line, place = s * LINES + way // LINE_WAYS, way % LINE_WAYS
    version = open_version(areas.lines32, line)
    areas.lines[line * LINE_BYTES + OCCUPIED_AT] &= ~(1 << place)
    close_version(areas.lines32, line, version)
    remove_from_probation(areas.policy, s, way)
    home = home_of(mix(key_at(areas, s, way)))
    if home == way // LINE_WAYS:
        return
    first = way - place
    for other in range(first, first + LINE_WAYS):
        if is_occupied(areas, s, other) and home_of(mix(key_at(areas, s, other))) == home:
            return
    areas.lines[(s * LINES + home) * LINE_BYTES + AWAY_AT] &= ~(1 << (way // LINE_WAYS))


@nb.njit(**BORROWS)
def free_way(areas, s, home):
    """A free way of set `s`, in line `home` if there is one; -1 if the set is full."""
    for i in range(LINES):
        line = (home + i) % LINES
        free = ~nb.int64(areas.lines[(s * LINES + line) * LINE_BYTES + OCCUPIED_AT]) & _FULL
        if free != 0:
            return line * LINE_WAYS + trailing_zeros(nb.uint32(free))
    return -1


@nb.njit(inline="always")
def make_home(areas, s, way, home):
    """The way that a key with home line `home` takes, given that `way` of its set is free.

    If a row in the home line has another home, it makes room and moves to `way`, which suits it best if that is in its own home.
    """
    if way // LINE_WAYS == home:
        return way
    guest = -1
    for other in range(home * LINE_WAYS, (home + 1) * LINE_WAYS):
        owner = home_of(mix(key_at(areas, s, other)))
        if is_occupied(areas, s, other) and owner != home:
            guest = other
            if owner == way // LINE_WAYS:
                break
    if guest < 0:
        return way
    put(areas, s, way, key_at(areas, s, guest), heat_at(areas, s, guest), row_at(areas, s, guest))
    rename_on_probation(areas.policy, s, guest, way)
    remove(areas, s, guest)
    return guest


@nb.njit(**BORROWS)
def next_victim(areas, s):
    """The way of the main queue to evict next, from its hand on. Ways that the hand passes lose a hit."""
    at = s * POLICY_BYTES + MAIN_HAND
    way = nb.int64(areas.policy[at]) % WAYS
    for _ in range((MAX_HEAT + 1) * WAYS):  # ends sooner unless readers count all the time
        if not on_probation(areas.policy, s, way):
            heat = heat_at(areas, s, way)
            if heat == 0:
                break
            set_heat_at(areas, s, way, heat - 1)
        way = (way + 1) % WAYS
    areas.policy[at] = way + 1
    return way


@nb.njit(inline="always")
def make_room(areas, s, hashed):
    """Evict a row from the full set `s`, by the rules of `heat.py`. Returns (its way, whether the new key is on probation)."""
    had_ghost = remove_ghost(areas.policy16, s, hashed)
    way = -1 if had_ghost else oldest_on_probation(areas.policy, s)
    if way < 0:
        way = next_victim(areas, s)
    elif heat_at(areas, s, way) >= MOVE_AT:
        moved, way = way, next_victim(areas, s)
        remove_from_probation(areas.policy, s, moved)
    add_ghost(areas.policy, areas.policy16, s, mix(key_at(areas, s, way)))
    remove(areas, s, way)
    return way, not had_ghost


@nb.njit(inline="always")
def _prefetch_set(areas, geometry, key):
    """Prefetch the memory that decides which way of its set a key takes."""
    hashed = mix(key)
    s = set_of(hashed, geometry, areas.sets_per_region)
    for line in range(s * LINES, (s + 1) * LINES):
        prefetch(areas.lines.ctypes.data + line * LINE_BYTES)
    for at in range(s * POLICY_BYTES, (s + 1) * POLICY_BYTES, 64):
        prefetch(areas.policy.ctypes.data + at)
    prefetch(areas.absent.ctypes.data + (s * LINES + home_of(hashed)) // LINES_AN_ABSENT * ABSENT_BYTES)


@nb.njit(inline="always")
def _prefetch_room(areas, geometry, key):
    """Prefetch the row that a key will probably replace: most evicted keys are in probation."""
    hashed = mix(key)
    s = set_of(hashed, geometry, areas.sets_per_region)
    way = free_way(areas, s, home_of(hashed))
    if way < 0:
        way = oldest_on_probation(areas.policy, s)
    if way >= 0:
        prefetch_row(row_at(areas, s, way), areas.row_bytes)


@nb.njit(inline="always")
def _let_in(areas, counters, key, hashed, s, row, evict):
    """Admit a key that is not resident into set `s`, with the row at an address. Returns 1, or 0 if there is no room without `evict`."""
    home = home_of(hashed)
    way, probation = free_way(areas, s, home), evict
    if way >= 0:
        counters[ROWS] += 1
    elif evict:
        way, probation = make_room(areas, s, hashed)
        counters[EVICTED] += 1
    if way < 0:
        return 0
    forget_absent(areas, counters, (s * LINES + home) // LINES_AN_ABSENT, key)
    way = make_home(areas, s, way, home)
    put(areas, s, way, key, 0, row)
    if probation:
        enter_probation(areas.policy, s, way)
    return 1


@compiled(types.int64(AREAS, KEYS, types.int64, types.boolean, COUNTERS), **BORROWS)
def insert(areas, keys, rows, evict, counters):
    """Admit distinct keys with the rows at address `rows`. Returns how many were admitted.

    A resident key keeps its row: both were read under views that are current. Without `evict` only free ways are filled, and without probation,
    because such keys come hottest first.
    """
    geometry = areas.control[GEOMETRY]
    admitted = 0
    for i in range(-2 * _AHEAD, keys.size):  # three stages, so that memory loads while other keys are worked on
        if i + 2 * _AHEAD < keys.size:
            _prefetch_set(areas, geometry, keys[i + 2 * _AHEAD])
        if 0 <= i + _AHEAD < keys.size:
            _prefetch_room(areas, geometry, keys[i + _AHEAD])
        if i < 0:
            continue
        key = keys[i]
        hashed = mix(key)
        s = set_of(hashed, geometry, areas.sets_per_region)
        if find_way(areas.lines, s, home_of(hashed), key) < 0:
            admitted += _let_in(areas, counters, key, hashed, s, rows + i * areas.row_bytes, evict)
    counters[ADMITTED] += admitted
    return admitted


@compiled(types.int64(AREAS, KEYS, types.int64, COUNTERS), **BORROWS)
def try_accesses(areas, keys, row, counters):
    """Look keys up one after the other, counting heat, and admit each missing key with the row at an address. Returns the misses.

    For a trial cache that nobody else uses: what a cache of its size would have done with these look-ups.
    """
    geometry = areas.control[GEOMETRY]
    misses = 0
    for i in range(keys.size):
        hashed = mix(keys[i])
        s = set_of(hashed, geometry, areas.sets_per_region)
        way = find_way(areas.lines, s, home_of(hashed), keys[i])
        if way < 0:
            misses += 1
            counters[ADMITTED] += _let_in(areas, counters, keys[i], hashed, s, row, True)
        elif heat_at(areas, s, way) < MAX_HEAT:
            set_heat_at(areas, s, way, heat_at(areas, s, way) + 1)
    return misses


@compiled(types.void(AREAS, KEYS, types.Array(types.uint8, 1, "C")), **BORROWS)
def find_absent_keys(areas, keys, absent):
    """Set `absent` to 1 for keys that are remembered as not existing. Beside a writer an answer may be slightly out of date."""
    geometry = areas.control[GEOMETRY]
    for i in range(keys.size):
        hashed = mix(keys[i])
        a = (set_of(hashed, geometry, areas.sets_per_region) * LINES + home_of(hashed)) // LINES_AN_ABSENT
        absent[i] = find_absent(areas.absent, areas.absent_keys, a, keys[i]) >= 0


@compiled(types.int64(AREAS, KEYS, COUNTERS), **BORROWS)
def insert_absent(areas, keys, counters):
    """Remember distinct keys as not existing. Returns how many are new."""
    geometry = areas.control[GEOMETRY]
    marked = 0
    for i in range(keys.size):
        hashed = mix(keys[i])
        s = set_of(hashed, geometry, areas.sets_per_region)
        a = (s * LINES + home_of(hashed)) // LINES_AN_ABSENT
        resident = find_way(areas.lines, s, home_of(hashed), keys[i]) >= 0
        if not resident and mark_absent(areas, counters, a, keys[i]):
            marked += 1
    return marked


@compiled(types.void(AREAS, KEYS, types.int64, BOOLS, types.int64, types.int64, COUNTERS), **BORROWS)
def update(areas, keys, rows, deleted, begin, end, counters):
    """Apply a delta to keys[begin:end] that are resident: overwrite or erase rows, set and clear absent marks."""
    geometry = areas.control[GEOMETRY]
    lines = areas.lines
    for i in range(begin, end):
        if i + _AHEAD < end:
            hashed = mix(keys[i + _AHEAD])
            ahead = set_of(hashed, geometry, areas.sets_per_region)
            line = ahead * LINES + home_of(hashed)
            prefetch(lines.ctypes.data + line * LINE_BYTES)
            prefetch(areas.absent.ctypes.data + line // LINES_AN_ABSENT * ABSENT_BYTES)
        key = keys[i]
        hashed = mix(key)
        s = set_of(hashed, geometry, areas.sets_per_region)
        a = (s * LINES + home_of(hashed)) // LINES_AN_ABSENT
        way = find_way(lines, s, home_of(hashed), key)
        if deleted[i]:
            if way >= 0:
                remove(areas, s, way)
                counters[ROWS] -= 1
                mark_absent(areas, counters, a, key)
            continue
        forget_absent(areas, counters, a, key)
        if way >= 0:
            line = s * LINES + way // LINE_WAYS
            version = open_version(areas.lines32, line)
            copy_bytes(row_at(areas, s, way), rows + i * areas.row_bytes, areas.row_bytes)
            close_version(areas.lines32, line, version)
