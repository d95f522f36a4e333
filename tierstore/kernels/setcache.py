"""The set-associative cache of the host tier: where a key's set lies, and how a batch is looked up.

Free functions of the arrays in `Areas`, which are views of one mapping. Any number of threads may run
`lookup` at any time, without a lock and without the GIL; the functions that write (`setwrite`) are
run by one thread at a time. Memory only: nothing survives the process.

**A set** has 32 ways. Its head is one cache line: version, hands, a heat counter and a one-byte tag a way. Keys and rows lie apart, so that a look-up reads the head, then as a rule one line of keys
and the row. All-zero memory is an empty set (tag 0 = empty way), so fresh pages need no writing.

    head, 64 bytes      0  uint32 version, odd while the set is written
                        4  uint8 hand of probation   5  uint8 hand of main   6  uint8 hand of the ghosts
                        8  32 x 2 bits heat         16  unused
                       32  32 x uint8 tag
    ghosts, 64 bytes    28 x uint16 fingerprints of keys put out lately (`heat.py`)
    absent, 64 bytes    0  uint32 version   4  uint8 which of the 7 are taken   5  uint8 which were asked for lately
                        6  uint8 hand       8  7 x int64 keys known not to exist

**Which set**: `region * sets_per_region + fastrange(high hash bits)`, where the region is the low
`depth` bits of the hash. One bit less and the upper half of all sets falls onto the lower half, one
more and it splits again: that is how a table is halved and doubled in place. While that is under way,
sets up to a cursor are merged already (as in linear hashing), so that at every moment each key has
exactly one set. Depth and cursor are one word, the geometry.

**Reading without a lock** (a sequence lock a set): read the version, read the set, read the version
again; had it been odd or has it changed, all that was read is void and read again. After a bounded
number of tries the key is treated as a miss, which is always allowed. A reader with an old geometry
looks in a set that its key has left, and misses. Memory is given back only above the last region in
use, and pages come back as zeros; versions then start from 0 again, so that a reader which slept from
before could take two lives of a set for one. The epoch, which changes before memory is given back and
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
    fence_acquire,
    load_acquire,
    load_relaxed,
    match32,
    prefetch,
    trailing_zeros,
)
from tierstore.kernels.codec import decode_row
from tierstore.kernels.heat import bump_heat
from tierstore.types import Tier

WAYS = 32
HEAD_BYTES = 64
ABSENT_BYTES = 64
ABSENT_WAYS = 7
CONTROL_BYTES = 64

HEAT_AT, TAGS_AT = 8, 32  # byte offsets in a head
GEOMETRY, EPOCH = 0, 1  # words of the control line

_AHEAD = 16  # keys between the stages of a look-up
_RING = 64  # at least two stages and the key itself; a power of two
_TRIES = 64  # of a reader against a writer
_PREFETCH_BYTES = 512  # of a row; the hardware follows from there

_PENDING = np.uint8(Tier.PENDING)
_HOST = np.uint8(Tier.HOST)
_ABSENT = np.uint8(Tier.ABSENT)


class Areas(NamedTuple):
    """Views of one mapping; all but `rows` twice where two widths are needed. Index is set times size."""

    control: npt.NDArray[np.int64]  # geometry, epoch
    heads: npt.NDArray[np.uint8]
    heads32: npt.NDArray[np.uint32]  # the same bytes
    keys: npt.NDArray[np.int64]
    ghosts: npt.NDArray[np.uint16]
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
        _array(types.int64), _BYTES, _array(types.uint32), _array(types.int64), _array(types.uint16), _BYTES,
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
def tag_of(hashed):  # type: ignore[no-untyped-def]
    """1..255, from bits that choose neither region nor set nor fingerprint."""
    tag = nb.uint8(hashed >> nb.uint64(8))
    return tag if tag != 0 else nb.uint8(255)


@nb.njit(inline="always")
def set_of(hashed, geometry, sets_per_region):  # type: ignore[no-untyped-def]
    """The key's set under a geometry (see the module's text): depth in its low 8 bits, cursor above."""
    depth, cursor = nb.uint64(geometry & 255), geometry >> 8
    within = nb.int64(((hashed >> nb.uint64(32)) * nb.uint64(sets_per_region)) >> nb.uint64(32))
    index = nb.int64(hashed & ((nb.uint64(1) << depth) - nb.uint64(1))) * sets_per_region + within
    half = (sets_per_region << nb.int64(depth)) >> 1
    return index - half if index >= half and index - half < cursor else index


@nb.njit(inline="always")
def find_way(heads, keys, s, tag, key):  # type: ignore[no-untyped-def]
    """The way of set `s` that holds `key`, or -1."""
    matches = match32(heads, s * HEAD_BYTES + TAGS_AT, tag)
    while matches != 0:
        way = trailing_zeros(matches)
        if keys[s * WAYS + way] == key:
            return way
        matches &= matches - nb.uint32(1)
    return -1


@nb.njit(inline="always")
def find_absent(absent, absent_keys, s, key):  # type: ignore[no-untyped-def]
    """The place of `key` among the absent keys of set `s`, or -1."""
    taken = absent[s * ABSENT_BYTES + 4]
    for i in range(ABSENT_WAYS):
        if absent_keys[s * 8 + 1 + i] == key and (taken >> i) & 1:
            return i
    return -1


@nb.njit(
    types.void(AREAS, KEYS, _BYTES, types.int64, types.int64, types.int64, types.int64, types.int64),
    nogil=True, cache=True,
)  # fmt: skip
def lookup(areas, keys, state, code, out_code, out, dim, default):  # type: ignore[no-untyped-def]
    """Answer what is here among the keys whose state is PENDING: rows with HOST, absent keys with ABSENT.

    `out` is the address of float32 (`out_code` 0) or float16 (1) [n, dim], `default` that of one such
    row, `code` the storage dtype's. Rows of keys left PENDING hold anything. Counts heat.

    Three stages a key, `_AHEAD` keys apart, so that memory answers while others are worked on: ask for
    the set's head; scan tags and ask for key and row, or for the absent line; check and copy.
    """
    n = keys.size
    control, heads, heads32, all_keys = areas.control, areas.heads, areas.heads32, areas.keys
    absent, absent32, absent_keys = areas.absent, areas.absent32, areas.absent_keys
    rows, row_bytes, sets_per_region = areas.rows, areas.row_bytes, areas.sets_per_region
    heads_at, keys_at, absent_at = heads.ctypes.data, all_keys.ctypes.data, absent.ctypes.data
    out_bytes = dim * (4 >> out_code)
    epoch = load_acquire(control, EPOCH)
    geometry = load_acquire(control, GEOMETRY)
    hashes = np.empty(_RING, np.uint64)
    sets = np.empty(_RING, np.int64)
    for step in range(n + 2 * _AHEAD):
        if step < n:
            hashed = mix(keys[step])
            s = set_of(hashed, geometry, sets_per_region)
            hashes[step & (_RING - 1)] = hashed
            sets[step & (_RING - 1)] = s
            prefetch(heads_at + s * HEAD_BYTES)
        i = step - _AHEAD
        if 0 <= i < n and state[i] == _PENDING:
            s = sets[i & (_RING - 1)]
            matches = match32(heads, s * HEAD_BYTES + TAGS_AT, tag_of(hashes[i & (_RING - 1)]))
            if matches != 0:
                slot = s * WAYS + trailing_zeros(matches)
                prefetch(keys_at + slot * 8)
                for line in range(0, min(row_bytes, _PREFETCH_BYTES), 64):
                    prefetch(rows + slot * row_bytes + line)
            else:
                prefetch(absent_at + s * ABSENT_BYTES)
        i = step - 2 * _AHEAD
        if i < 0 or state[i] != _PENDING:
            continue
        key, s, hashed = keys[i], sets[i & (_RING - 1)], hashes[i & (_RING - 1)]
        for _ in range(_TRIES):
            version = load_acquire(heads32, s * 16)
            if version & 1:
                continue
            way = find_way(heads, all_keys, s, tag_of(hashed), key)
            if way >= 0:
                source = rows + (s * WAYS + way) * row_bytes
                if code == out_code:
                    copy_bytes(out + i * out_bytes, source, out_bytes)
                else:
                    decode_row(code, out_code, source, out + i * out_bytes, dim)
            fence_acquire()
            if load_relaxed(control, EPOCH) != epoch:
                break
            if load_relaxed(heads32, s * 16) == version:
                if way >= 0:
                    state[i] = _HOST
                    bump_heat(heads, s * HEAD_BYTES + HEAT_AT, way)
                break
        if state[i] == _HOST:
            continue
        for _ in range(_TRIES):
            version = load_acquire(absent32, s * 16)
            if version & 1:
                continue
            place = find_absent(absent, absent_keys, s, key)
            fence_acquire()
            if load_relaxed(control, EPOCH) != epoch:
                break
            if load_relaxed(absent32, s * 16) == version:
                if place >= 0:
                    state[i] = _ABSENT
                    copy_bytes(out + i * out_bytes, default, out_bytes)
                    asked = absent[s * ABSENT_BYTES + 5]
                    if not (asked >> place) & 1:
                        absent[s * ABSENT_BYTES + 5] = asked | (1 << place)
                break
