"""The set-associative cache of the host tier: how it is laid out, and where a key lies.

What reads it is `setlookup`, run by any number of threads at any time, without a lock and without the GIL; what
writes it is `setwrite`, run by one thread at a time. `Areas` are views of one mapping. Memory only: nothing survives
the process.

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

from tierstore.kernels.atomics import match8, trailing_zeros

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
