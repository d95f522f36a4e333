"""The set-associative cache of the host tier: where a key lies, and how a batch is looked up.

Free functions of the arrays in `Areas`, which are views of one mapping. Any number of threads may run
`lookup` at any time, without a lock and without the GIL; the functions that write (`setwrite`) are
run by one thread at a time. Memory only: nothing survives the process.

**A set** has 56 ways, in eight lines of seven. A key belongs to one line of its set, its home, and lies there unless
that is full of others that belong there; then it lies in another line of the set, and the home says in which. So a
look-up reads one line, as a rule, and the row: what it costs is a matter of how many places it asks memory for.
All-zero memory is an empty set, so fresh pages need no writing. Numbers are little-endian.

    line, 64 bytes      0  uint32 version, odd while the line or one of its rows is written
                        4  7 x 2 bits heat      6  uint8 which of the 7 are taken
                        7  uint8 in which lines of the set keys lie that belong here
                        8  7 x int64 key
    absent, 64 bytes    of four lines: 0  uint32 version   4  uint8 which of the 7 are taken   5  uint8 which were
                        asked for lately    6  uint8 hand   8  7 x int64 keys known not to exist
    policy, 128 bytes   a set: `heat.py`

**Which set**: `region * sets_per_region + fastrange(high hash bits)`, where the region is the low
`depth` bits of the hash. One bit less and the upper half of all sets falls onto the lower half, one
more and it splits again: that is how a table is halved and doubled in place. While that is under way,
sets up to a cursor are merged already (as in linear hashing), so that at every moment each key has
exactly one set. Depth and cursor are one word, the geometry.

**Reading without a lock** (a sequence lock a line): read the version, read the line and the row, read the version
again; had it been odd or has it changed, all that was read is void and read again. After a bounded
number of tries the key is treated as a miss, which is always allowed; so is a key missed because it was just being
moved to another line. A reader with an old geometry
looks in a set that its key has left, and misses. Memory is given back only above the last region in
use, and pages come back as zeros; versions then start from 0 again, so that a reader which slept from
before could take two lives of a line for one. The epoch, which changes before memory is given back and
before it is used again, voids such a read.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels.atomics import (
    copy_bytes,
    copy_line,
    fence_acquire,
    load_acquire,
    load_relaxed,
    match8,
    prefetch_far,
    trailing_zeros,
)
from tierstore.kernels.codec import decode_row
from tierstore.kernels.heat import bump_heat
from tierstore.types import Tier

LINE_BYTES = 64
LINE_WAYS = 7
LINES = 8
WAYS = LINES * LINE_WAYS
ABSENT_BYTES = 64
ABSENT_WAYS = 7
LINES_AN_ABSENT = 4  # that have one line of absent keys together
ABSENTS = LINES // LINES_AN_ABSENT  # of a set
CONTROL_BYTES = 128  # what follows begins at a multiple of it: two lines that processors like to fetch together

HEAT_AT, TAKEN_AT, AWAY_AT = 4, 6, 7  # byte offsets in a line
GEOMETRY, EPOCH = 0, 1  # words of the control line

_AHEAD = 16  # keys between the stages of a look-up
_RING = 64  # at least three stages and the key itself; a power of two
_TRIES = 64  # of a reader against a writer
_PREFETCH_BYTES = 512  # of a row; the hardware follows from there
_SKIP, _ELSEWHERE, _SEARCH = -1, -2, -3  # instead of a slot: not asked for, not in its home line, to be searched for

_PENDING = np.uint8(Tier.PENDING)
_HOST = np.uint8(Tier.HOST)
_ABSENT = np.uint8(Tier.ABSENT)


class Areas(NamedTuple):
    """Views of one mapping; all but `rows` twice where two widths are needed. Index is set or line times size."""

    control: npt.NDArray[np.int64]  # geometry, epoch
    lines: npt.NDArray[np.uint8]
    lines32: npt.NDArray[np.uint32]  # the same bytes
    lines64: npt.NDArray[np.int64]  # the same bytes
    policy: npt.NDArray[np.uint8]
    policy16: npt.NDArray[np.uint16]  # the same bytes
    absent: npt.NDArray[np.uint8]
    absent32: npt.NDArray[np.uint32]  # the same bytes
    absent_keys: npt.NDArray[np.int64]  # the same bytes
    rows: int  # address of the first row
    row_bytes: int
    sets_per_region: int


def _array(element: types.Type, *, readonly: bool = False) -> types.Array:
    return types.Array(element, 1, "C", readonly=readonly)


_BYTES = _array(types.uint8)
AREAS = types.NamedTuple(
    (
        _array(types.int64), _BYTES, _array(types.uint32), _array(types.int64), _BYTES, _array(types.uint16), _BYTES,
        _array(types.uint32), _array(types.int64), types.int64, types.int64, types.int64,
    ),
    Areas,
)  # fmt: skip
KEYS = _array(types.int64, readonly=True)
BOOLS = _array(types.boolean, readonly=True)


@nb.njit(inline="always")
def mix(key):  # type: ignore[no-untyped-def]
    """64 well mixed bits of a key (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = nb.uint64(key) + nb.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> nb.uint64(30))) * nb.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> nb.uint64(27))) * nb.uint64(0x94D049BB133111EB)
    return x ^ (x >> nb.uint64(31))


@nb.njit(inline="always")
def home_of(hashed):  # type: ignore[no-untyped-def]
    """Which line of its set a key belongs to, from bits that choose neither region nor set nor fingerprint."""
    return nb.int64((hashed >> nb.uint64(8)) & nb.uint64(LINES - 1))


@nb.njit(inline="always")
def set_of(hashed, geometry, sets_per_region):  # type: ignore[no-untyped-def]
    """The key's set under a geometry (see the module's text): depth in its low 8 bits, cursor above."""
    depth, cursor = nb.uint64(geometry & 255), geometry >> 8
    within = nb.int64(((hashed >> nb.uint64(32)) * nb.uint64(sets_per_region)) >> nb.uint64(32))
    index = nb.int64(hashed & ((nb.uint64(1) << depth) - nb.uint64(1))) * sets_per_region + within
    half = (sets_per_region << nb.int64(depth)) >> 1
    return index - half if index >= half and index - half < cursor else index


@nb.njit(inline="always")
def find_in_line(lines, lines64, line, key):  # type: ignore[no-untyped-def]
    """Where in a line `key` is, 0..6, or -1."""
    matches = (match8(lines64, line * 8, key) >> nb.uint32(1)) & nb.uint32(lines[line * LINE_BYTES + TAKEN_AT])
    return trailing_zeros(matches) if matches != 0 else -1


@nb.njit(inline="always")
def find_way(lines, lines64, s, home, key):  # type: ignore[no-untyped-def]
    """The way of set `s` that holds `key`, whose line is `home`, or -1."""
    place = find_in_line(lines, lines64, s * LINES + home, key)
    if place >= 0:
        return home * LINE_WAYS + place
    away = nb.uint32(lines[(s * LINES + home) * LINE_BYTES + AWAY_AT])
    while away != 0:
        other = trailing_zeros(away)
        place = find_in_line(lines, lines64, s * LINES + other, key)
        if place >= 0:
            return other * LINE_WAYS + place
        away &= away - nb.uint32(1)
    return -1


@nb.njit(inline="always")
def find_absent(absent, absent_keys, a, key):  # type: ignore[no-untyped-def]
    """The place of `key` in line `a` of absent keys, or -1."""
    taken = absent[a * ABSENT_BYTES + 4]
    for i in range(ABSENT_WAYS):
        if absent_keys[a * 8 + 1 + i] == key and (taken >> i) & 1:
            return i
    return -1


@nb.njit(inline="always")
def _copy(code, out_code, source, target, dim, out_bytes):  # type: ignore[no-untyped-def]
    if code != out_code:
        decode_row(code, out_code, source, target, dim)
    else:
        copy_bytes(target, source, out_bytes)


@nb.njit
def _read(areas, epoch, line, key, code, out_code, target, dim, out_bytes):  # type: ignore[no-untyped-def]
    """Write the row of `key` to `target` if `line` holds it. Returns 1, or 0 if not, or -1 if there is no telling."""
    for _ in range(_TRIES):
        version = load_acquire(areas.lines32, line * 16)
        if version & 1:
            continue
        place = find_in_line(areas.lines, areas.lines64, line, key)
        if place >= 0:
            source = areas.rows + (line * LINE_WAYS + place) * areas.row_bytes
            _copy(code, out_code, source, target, dim, out_bytes)
        fence_acquire()
        if load_relaxed(areas.control, EPOCH) != epoch:
            return -1
        if load_relaxed(areas.lines32, line * 16) == version:
            if place >= 0:
                bump_heat(areas.lines, line * LINE_BYTES + HEAT_AT, place)
                return 1
            return 0
    return -1


@nb.njit
def _search(areas, epoch, s, home, key, code, out_code, target, dim, out_bytes, default):  # type: ignore[no-untyped-def]
    """The whole way of one key, step by step: home, the other lines that it may be in, the absent keys."""
    line = s * LINES + home
    if _read(areas, epoch, line, key, code, out_code, target, dim, out_bytes) > 0:
        return _HOST
    away = nb.uint32(areas.lines[line * LINE_BYTES + AWAY_AT])
    while away != 0:
        other = s * LINES + trailing_zeros(away)
        if _read(areas, epoch, other, key, code, out_code, target, dim, out_bytes) > 0:
            return _HOST
        away &= away - nb.uint32(1)
    absent, a = areas.absent, line // LINES_AN_ABSENT
    for _ in range(_TRIES):
        version = load_acquire(areas.absent32, a * 16)
        if version & 1:
            continue
        place = find_absent(absent, areas.absent_keys, a, key)
        fence_acquire()
        if load_relaxed(areas.control, EPOCH) != epoch:
            break
        if load_relaxed(areas.absent32, a * 16) == version:
            if place < 0:
                break
            copy_bytes(target, default, out_bytes)
            asked = absent[a * ABSENT_BYTES + 5]
            if not (asked >> place) & 1:
                absent[a * ABSENT_BYTES + 5] = asked | (1 << place)
            return _ABSENT
    return _PENDING


@nb.njit(
    types.int64(AREAS, KEYS, _BYTES, types.int64, types.int64, types.int64, types.int64, types.int64),
    nogil=True, cache=True,
)  # fmt: skip
def lookup(areas, keys, state, code, out_code, out, dim, default):  # type: ignore[no-untyped-def]
    """Answer what is here among the keys whose state is PENDING: rows with HOST, absent keys with ABSENT.

    `out` is the address of float32 (`out_code` 0) or float16 (1) [n, dim], `default` that of one such
    row, `code` the storage dtype's. Rows of keys left PENDING hold anything. Counts heat. Returns how many keys were
    answered with HOST.

    Four stages a key, `_AHEAD` keys apart, so that memory answers while others are worked on: ask for the line; find
    the key in it and ask for the row; for the few that lie in another line of the set, do that there; check and copy.
    """
    n = keys.size
    control, lines, lines32, lines64 = areas.control, areas.lines, areas.lines32, areas.lines64
    rows, row_bytes, sets_per_region = areas.rows, areas.row_bytes, areas.sets_per_region
    lines_at, absent_at = lines.ctypes.data, areas.absent.ctypes.data
    asked_bytes = min(row_bytes, _PREFETCH_BYTES)
    out_bytes = dim * (4 >> out_code)
    whole_lines = code == out_code and out_bytes & 63 == 0
    epoch = load_acquire(control, EPOCH)
    geometry = load_acquire(control, GEOMETRY)
    homes = np.empty(_RING, np.int64)
    slots = np.empty(_RING, np.int64)
    hits = 0
    for step in range(n + 3 * _AHEAD):
        if step < n:
            hashed = mix(keys[step])
            line = set_of(hashed, geometry, sets_per_region) * LINES + home_of(hashed)
            homes[step & (_RING - 1)] = line
            slots[step & (_RING - 1)] = _ELSEWHERE if state[step] == _PENDING else _SKIP
            prefetch_far(lines_at + line * LINE_BYTES)
        i = step - _AHEAD
        if 0 <= i < n and slots[i & (_RING - 1)] != _SKIP:
            line = homes[i & (_RING - 1)]
            place = find_in_line(lines, lines64, line, keys[i])
            if place >= 0:
                slot = line * LINE_WAYS + place
                slots[i & (_RING - 1)] = slot
                for at in range(0, asked_bytes, 64):
                    prefetch_far(rows + slot * row_bytes + at)
            else:
                prefetch_far(absent_at + line // LINES_AN_ABSENT * ABSENT_BYTES)
                away = nb.uint32(lines[line * LINE_BYTES + AWAY_AT])
                while away != 0:
                    prefetch_far(lines_at + (line // LINES * LINES + trailing_zeros(away)) * LINE_BYTES)
                    away &= away - nb.uint32(1)
        i = step - 2 * _AHEAD
        if 0 <= i < n and slots[i & (_RING - 1)] == _ELSEWHERE:
            line = homes[i & (_RING - 1)]
            slot = _SEARCH
            away = nb.uint32(lines[line * LINE_BYTES + AWAY_AT])
            while away != 0:
                other = line // LINES * LINES + trailing_zeros(away)
                place = find_in_line(lines, lines64, other, keys[i])
                if place >= 0:
                    slot = other * LINE_WAYS + place
                    for at in range(0, asked_bytes, 64):
                        prefetch_far(rows + slot * row_bytes + at)
                    break
                away &= away - nb.uint32(1)
            slots[i & (_RING - 1)] = slot
        i = step - 3 * _AHEAD
        if i < 0:
            continue
        slot = slots[i & (_RING - 1)]
        if slot == _SKIP:
            continue
        target = out + i * out_bytes
        if slot >= 0:
            line = slot // LINE_WAYS
            place = slot - line * LINE_WAYS
            head = load_acquire(lines64, line * 8)
            if lines64[line * 8 + 1 + place] == keys[i] and head & 1 == 0 and (head >> (8 * TAKEN_AT + place)) & 1:
                if whole_lines:
                    for at in range(0, out_bytes, 64):
                        copy_line(target + at, rows + slot * row_bytes + at)
                else:
                    _copy(code, out_code, rows + slot * row_bytes, target, dim, out_bytes)
                fence_acquire()
                if load_relaxed(lines32, line * 16) == nb.uint32(head):
                    bump_heat(lines, line * LINE_BYTES + HEAT_AT, place)
                    state[i] = _HOST
                    hits += 1
                    continue
        line = homes[i & (_RING - 1)]
        s = line // LINES
        answer = _search(areas, epoch, s, line - s * LINES, keys[i], code, out_code, target, dim, out_bytes, default)
        state[i] = answer
        hits += answer == _HOST
    fence_acquire()
    if load_relaxed(control, EPOCH) != epoch:  # rather than at each key: it changes only with the size
        for i in range(n):
            if state[i] == _HOST:
                state[i] = _PENDING
        return 0
    return hits
