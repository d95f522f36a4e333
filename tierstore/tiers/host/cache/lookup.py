"""Look-ups in the host tier's cache (`layout.py`), a batch of keys at a time.

Any number of threads may run these at any time, without a lock and without the GIL, while one thread writes (`write.py`). A table is passed as an
address (`HOST_TABLE`), because unpacking a dozen arrays would be slow for a batch of few keys. The caller holds the mapping while they run.

**Four stages for each key**, `AHEAD` keys apart, so that memory loads while other keys are worked on: prefetch the line; find the key in it and
prefetch the row; do the same for the few keys in another line of the set; copy and check. A ring on the stack passes data of each key from stage to
stage: its line (with its place there in the low bits), the address of its row, and the version of the line when the key was found.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
from numba import types

from tierstore.kernels import compiled
from tierstore.kernels.atomics import (
    acquire_i64,
    acquire_u32,
    copy_bytes,
    copy_line,
    fence_acquire,
    prefetch_far,
    relaxed_i64,
    relaxed_u32,
    stack_bytes,
    trailing_zeros,
)
from tierstore.kernels.codec import AS_STORED, decode_row
from tierstore.kernels.hashing import mix
from tierstore.kernels.raw import load_u8, load_u64, store_u8, store_u64
from tierstore.kernels.records import at, define
from tierstore.tiers.host.cache.heat import bump_heat
from tierstore.tiers.host.cache.layout import (
    ABSENT_BYTES,
    ABSENT_WAYS,
    AWAY_AT,
    EPOCH,
    GEOMETRY,
    HEAT_AT,
    KEYS,
    LINE_BYTES,
    LINE_WAYS,
    LINES,
    LINES_AN_ABSENT,
    find_in_line,
    home_of,
    prefetch_row,
    set_of,
)
from tierstore.tiers.host.cache.sampling import BELOW, count_seen, note
from tierstore.types import Tier

HOST_TABLE = define("HostTable", "the cache of a table; nothing of it moves during a look-up", {
    "control lines absent rows": "the addresses of its areas (`layout.py`)",
    "row_bytes sets_per_region": "the bytes of a row, and the sets of a region",
    "code dim": "the dtype and the length of a row",
    "default_at": "the address of the default row, as float32",
    "sample": "the address of the sample of look-ups (`sampling.py`)",
})  # fmt: skip
_host_at = at(HOST_TABLE)

AHEAD = 16  # keys between the stages
_RING = 64  # at least three stages and the key itself; a power of two
RING_BYTES = 8 * _RING
_TRIES = 64  # tries of a reader against a writer
SKIP, _ELSEWHERE = -1, 0  # in place of a row: not requested; not in its home line

_PENDING = int(Tier.PENDING)
_HOST = int(Tier.HOST)
_ABSENT = int(Tier.ABSENT)
_STATES = types.Array(types.uint8, 1, "C")


class Where(NamedTuple):
    """The fields of a HOST_TABLE as values: a record in memory would be read again after every store."""

    control: int
    lines: int
    absent: int
    rows: int
    row_bytes: int
    sets_per_region: int
    code: int
    dim: int
    default_at: int
    sample: int


@nb.njit
def values_of(host):
    return Where(
        host.control, host.lines, host.absent, host.rows, host.row_bytes, host.sets_per_region, host.code, host.dim,
        host.default_at, host.sample,
    )  # fmt: skip


@nb.njit
def values_at(address):
    return values_of(_host_at(address))


@nb.njit(inline="always")
def _row_of(where, line, place):
    return where.rows + ((line - where.lines) // LINE_BYTES * LINE_WAYS + place) * where.row_bytes


@nb.njit(inline="always")
def _set_at(where, line):
    """The address of the first line of the set of `line`."""
    return line - ((line - where.lines) & (LINES * LINE_BYTES - 1))


@nb.njit(inline="always")
def _absent_at(where, line):
    return where.absent + (line - where.lines) // (LINE_BYTES * LINES_AN_ABSENT) * ABSENT_BYTES


@nb.njit(inline="always")
def _copy(where, out_code, row, target, out_bytes):
    if out_code == where.code or out_code == AS_STORED:
        copy_bytes(target, row, out_bytes)
    else:
        decode_row(where.code, out_code, row, target, where.dim)


@nb.njit
def _read(where, epoch, line, key, out_code, target, out_bytes):
    """Write the row of `key` to `target` if `line` holds it. Returns 1, or 0 if not, or -1 if a writer interfered."""
    for _ in range(_TRIES):
        version = acquire_u32(line)
        if version & 1:
            continue
        place = find_in_line(line, key)
        if place >= 0:
            _copy(where, out_code, _row_of(where, line, place), target, out_bytes)
        fence_acquire()
        if relaxed_i64(where.control + 8 * EPOCH) != epoch:
            return -1
        head = relaxed_i64(line)
        if head & 0xFFFFFFFF == version:
            if place >= 0:
                bump_heat(line + HEAT_AT, place, head >> (8 * HEAT_AT))
                return 1
            return 0
    return -1


@nb.njit
def _search(where, geometry, epoch, key, out_code, target, out_bytes, default):
    """Look one key up without stages: in its home line, the other lines that it may be in, and the absent keys."""
    hashed = mix(key)
    home = set_of(hashed, geometry, where.sets_per_region) * LINES + home_of(hashed)
    line = where.lines + home * LINE_BYTES
    if _read(where, epoch, line, key, out_code, target, out_bytes) > 0:
        return _HOST
    away = nb.uint32(load_u8(line, AWAY_AT))
    while away != 0:
        other = _set_at(where, line) + trailing_zeros(away) * LINE_BYTES
        if _read(where, epoch, other, key, out_code, target, out_bytes) > 0:
            return _HOST
        away &= away - nb.uint32(1)
    absent = _absent_at(where, line)
    for _ in range(_TRIES):
        version = acquire_u32(absent)
        if version & 1:
            continue
        occupied, place = nb.int64(load_u8(absent, 4)), -1
        for i in range(ABSENT_WAYS):
            if nb.int64(load_u64(absent, 1 + i)) == key and (occupied >> i) & 1:
                place = i
        fence_acquire()
        if relaxed_i64(where.control + 8 * EPOCH) != epoch:
            break
        if relaxed_u32(absent) == version:
            if place < 0:
                break
            copy_bytes(target, default, out_bytes)
            used = nb.int64(load_u8(absent, 5))
            if not (used >> place) & 1:
                store_u8(absent, 5, nb.uint8(used | (1 << place)))
            return _ABSENT
    return _PENDING


@nb.njit(inline="always")
def _prefetch_line(where, geometry, key, lines, i):
    """Prefetch the home line of key `i`, and note its address. Returns the key's hash."""
    hashed = mix(key)
    line = where.lines + (set_of(hashed, geometry, where.sets_per_region) * LINES + home_of(hashed)) * LINE_BYTES
    store_u64(lines, i & (_RING - 1), nb.uint64(line))
    prefetch_far(line)
    return hashed


@nb.njit
def prefetch_lines(where, geometry, keys, state, begin, end, rings):
    """Stage 1 for keys [begin, end): prefetch lines. Returns how many keys are requested, if look-ups are sampled; else 0."""
    sample, seen = where.sample, 0
    below = load_u64(sample, BELOW)
    if below == nb.uint64(0):
        for i in range(begin, end):
            _prefetch_line(where, geometry, nb.int64(load_u64(keys, i)), rings[0], i)
        return 0
    for i in range(begin, end):
        key = nb.int64(load_u64(keys, i))
        if _prefetch_line(where, geometry, key, rings[0], i) < below and load_u8(state, i) == _PENDING:
            note(sample, key)
    for i in range(begin, end):
        seen += load_u8(state, i) == _PENDING
    return seen


@nb.njit(inline="always")
def _find_in(where, line, key, at, rings):
    """If `line` holds `key`, note the address of its row as entry `at` of the rings, and prefetch it."""
    lines, rows, versions = rings
    version = acquire_u32(line)
    place = find_in_line(line, key)
    if place < 0:
        return False
    row = _row_of(where, line, place)
    prefetch_row(row, where.row_bytes)
    store_u64(lines, at, nb.uint64(line | place))
    store_u64(rows, at, nb.uint64(row))
    store_u64(versions, at, nb.uint64(version))
    return True


@nb.njit
def find_at_home(where, keys, state, begin, end, rings):
    """Stage 2 for keys [begin, end): find them in their home lines."""
    lines, rows, _ = rings
    for i in range(begin, end):
        at = i & (_RING - 1)
        if load_u8(state, i) != _PENDING:
            store_u64(rows, at, nb.uint64(SKIP))
            continue
        line = nb.int64(load_u64(lines, at))
        if _find_in(where, line, nb.int64(load_u64(keys, i)), at, rings):
            continue
        store_u64(rows, at, nb.uint64(_ELSEWHERE))
        prefetch_far(_absent_at(where, line))
        away = nb.uint32(load_u8(line, AWAY_AT))
        while away != 0:
            prefetch_far(_set_at(where, line) + trailing_zeros(away) * LINE_BYTES)
            away &= away - nb.uint32(1)


@nb.njit
def find_elsewhere(where, keys, begin, end, rings):
    """Stage 3 for keys [begin, end): find them in other lines of their sets."""
    lines, rows, _ = rings
    for i in range(begin, end):
        at = i & (_RING - 1)
        if nb.int64(load_u64(rows, at)) != _ELSEWHERE:
            continue
        line = nb.int64(load_u64(lines, at))
        away = nb.uint32(load_u8(line, AWAY_AT))
        while away != 0:
            other = _set_at(where, line) + trailing_zeros(away) * LINE_BYTES
            if _find_in(where, other, nb.int64(load_u64(keys, i)), at, rings):
                break
            away &= away - nb.uint32(1)


@nb.njit(inline="always")
def answer(where, geometry, epoch, keys, i, kind, target, rings):
    """Stage 4 for key `i`: write its row to address `target`. Returns its state, or SKIP if it was not requested.

    `kind` of answer: its code, its bytes, whether these are the row's own lines of 64 bytes, the default's address.
    """
    lines, rows, versions = rings
    out_code, out_bytes, whole, default = kind
    at = i & (_RING - 1)
    row = nb.int64(load_u64(rows, at))
    if row == SKIP:
        return SKIP
    if row != _ELSEWHERE:
        line = nb.int64(load_u64(lines, at))
        place, line = line & 63, line & ~63
        version = nb.int64(load_u64(versions, at))
        if whole:
            for offset in range(0, out_bytes, 64):
                copy_line(target + offset, row + offset)
        else:
            _copy(where, out_code, row, target, out_bytes)
        fence_acquire()
        head = relaxed_i64(line)
        if head & 0xFFFFFFFF == version and version & 1 == 0:
            bump_heat(line + HEAT_AT, place, head >> (8 * HEAT_AT))
            return _HOST
    return _search(where, geometry, epoch, nb.int64(load_u64(keys, i)), out_code, target, out_bytes, default)


@nb.njit
def lookup_at(where, keys_at, n, state_at, out_code, out, default):
    """Answer the resident ones of `n` keys whose state is PENDING: rows with HOST, absent keys with ABSENT and the `default`.

    `where` is the table; the others are addresses of any alignment: `out` of [n, dim], float32 (`out_code` 0) or float16 (1), or of n rows AS_STORED;
    `default` of one such row. Rows of keys left PENDING are undefined. Counts heat. Returns how many keys were answered with HOST.
    """
    out_bytes = where.row_bytes if out_code == AS_STORED else where.dim * (4 >> out_code)
    kind = out_code, out_bytes, out_code == where.code and out_bytes & 63 == 0, default
    epoch = acquire_i64(where.control + 8 * EPOCH)
    geometry = acquire_i64(where.control + 8 * GEOMETRY)
    rings = stack_bytes(RING_BYTES), stack_bytes(RING_BYTES), stack_bytes(RING_BYTES)
    hits = seen = 0
    for step in range(0, n + 3 * AHEAD, AHEAD):
        seen += prefetch_lines(where, geometry, keys_at, state_at, step, min(step + AHEAD, n), rings)
        begin = step - AHEAD
        if begin >= 0:
            find_at_home(where, keys_at, state_at, begin, min(step, n), rings)
        begin -= AHEAD
        if begin >= 0:
            find_elsewhere(where, keys_at, begin, min(begin + AHEAD, n), rings)
        begin -= AHEAD
        for i in range(max(begin, 0), min(begin + AHEAD, n)):
            of_key = answer(where, geometry, epoch, keys_at, i, kind, out + i * out_bytes, rings)
            if of_key != SKIP:
                store_u8(state_at, i, nb.uint8(of_key))
                hits += of_key == _HOST
    if seen != 0:
        count_seen(where.sample, seen, 0, 0, 0, 0)
    fence_acquire()
    if relaxed_i64(where.control + 8 * EPOCH) != epoch:  # checked once: it changes only with the size
        for i in range(n):
            if load_u8(state_at, i) == _HOST:
                store_u8(state_at, i, nb.uint8(_PENDING))
        return 0
    return hits


@compiled(types.int64(types.int64, KEYS, _STATES, types.int64, types.int64, types.int64))
def lookup(table, keys, state, out_code, out, default):
    """`lookup_at` of arrays, in the HOST_TABLE at address `table`."""
    keys_at, state_at = nb.int64(keys.ctypes.data), nb.int64(state.ctypes.data)
    return lookup_at(values_at(table), keys_at, keys.size, state_at, out_code, out, default)
