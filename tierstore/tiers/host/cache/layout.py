"""The memory layout of the host tier's set-associative cache, and where in it a key may be.

`lookup.py` reads it: any number of threads at any time, without a lock and without the GIL. `write.py` writes it: one thread at a time. `Areas` are
views of one mapping. Nothing survives the process.

**A set** has 56 ways, in eight lines of seven. Each key has a home: one line of its set. A key is in its home, or, if that is full of other keys with
this home, in another line of the set, and the home says in which. So a look-up usually reads one line and the row; its cost is the number of places
in memory that it reads. A set of zeros is empty, so fresh pages need no writing. Numbers are little-endian.

    line, 64 bytes      0  uint32 version, odd while the line or one of its rows is written
                        4  7 x 2 bits heat      6  uint8 which of the 7 are occupied
                        7  uint8 which lines of the set hold keys whose home this is
                        8  7 x int64 key
    absent, 64 bytes    of four lines: 0  uint32 version   4  uint8 which of the 7 are occupied   5  uint8 which were
                        looked up lately    6  uint8 hand   8  7 x int64 keys that do not exist
    policy, 128 bytes   a set: `heat.py`

**The set of a key**: `region * sets_per_region + fastrange(high hash bits)`, where the region is the low `depth` bits of the hash. With one bit less,
the upper half of all sets falls onto the lower half; with one more it splits again. So a table is halved and doubled in place. Meanwhile sets up to a
cursor are merged already (as in linear hashing), so that each key has exactly one set at every moment. Depth and cursor are one word, the geometry.

**Reading without a lock** (a sequence lock for each line): read the version, read the line and the row, read the version again. If it was odd or has
changed, everything that was read is void and is read again. After a bounded number of tries the key counts as a miss, which is always allowed. A key
that is being moved to another line may be missed too. A reader with an old geometry looks in a set that its key has left, and misses. Memory is freed
only above the last region in use, and pages come back as zeros. Versions then start from 0 again, so a reader that slept since before could mistake a
new state of a line for the old one. The epoch changes before memory is freed and before it is used again, and voids such a read.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels.atomics import match8_at, prefetch_far, trailing_zeros
from tierstore.kernels.raw import load_u8

LINE_BYTES = 64
LINE_WAYS = 7
LINES = 8
WAYS = LINES * LINE_WAYS
ABSENT_BYTES = 64
ABSENT_WAYS = 7
LINES_AN_ABSENT = 4  # lines that share one line of absent keys
ABSENTS = LINES // LINES_AN_ABSENT  # of a set
CONTROL_BYTES = 128  # areas behind it begin at multiples of this: two lines that processors like to fetch together

_PREFETCH_BYTES = 512  # of a row; the hardware continues from there
HEAT_AT, OCCUPIED_AT, AWAY_AT = 4, 6, 7  # byte offsets in a line
GEOMETRY, EPOCH = 0, 1  # words of the control line


class Areas(NamedTuple):
    """Views of one mapping; two views where two widths are needed. An index is set or line times size."""

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
def home_of(hashed):
    """The home line of a key in its set, from hash bits that choose neither region nor set nor fingerprint."""
    return nb.int64((hashed >> nb.uint64(8)) & nb.uint64(LINES - 1))


@nb.njit(inline="always")
def set_of(hashed, geometry, sets_per_region):
    """The key's set under a geometry (see the module's text): depth in its low 8 bits, cursor above."""
    depth, cursor = nb.uint64(geometry & 255), geometry >> 8
    within = nb.int64(((hashed >> nb.uint64(32)) * nb.uint64(sets_per_region)) >> nb.uint64(32))
    index = nb.int64(hashed & ((nb.uint64(1) << depth) - nb.uint64(1))) * sets_per_region + within
    half = (sets_per_region << nb.int64(depth)) >> 1
    return index - half if index >= half and index - half < cursor else index


@nb.njit(inline="always")
def find_in_line(line, key):
    """The place of `key` in the line at an address, 0..6, or -1."""
    matches = (match8_at(line, key) >> 1) & nb.int64(load_u8(line, OCCUPIED_AT))
    return trailing_zeros(nb.uint32(matches)) if matches != 0 else -1


@nb.njit(inline="always")
def find_way(lines, s, home, key):
    """The way of set `s` that holds `key`, whose home is line `home`, or -1."""
    first = nb.int64(lines.ctypes.data) + s * LINES * LINE_BYTES
    place = find_in_line(first + home * LINE_BYTES, key)
    if place >= 0:
        return home * LINE_WAYS + place
    away = nb.uint32(lines[(s * LINES + home) * LINE_BYTES + AWAY_AT])
    while away != 0:
        other = trailing_zeros(away)
        place = find_in_line(first + other * LINE_BYTES, key)
        if place >= 0:
            return other * LINE_WAYS + place
        away &= away - nb.uint32(1)
    return -1


@nb.njit(inline="always")
def find_absent(absent, absent_keys, a, key):
    """The place of `key` in line `a` of absent keys, or -1."""
    occupied = absent[a * ABSENT_BYTES + 4]
    for i in range(ABSENT_WAYS):
        if absent_keys[a * 8 + 1 + i] == key and (occupied >> i) & 1:
            return i
    return -1


@nb.njit(inline="always")
def prefetch_row(row, size):
    """Prefetch the row of `size` bytes at an address.

    No branch depends on where in a cache line the row begins: of rows of 36 bytes every other one reaches into a second line.
    """
    size = min(size, _PREFETCH_BYTES)
    for offset in range(0, size, 64):
        prefetch_far(row + offset)
    if size & 63:
        prefetch_far(row + size - 1)
