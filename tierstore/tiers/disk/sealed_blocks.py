"""Blocks of a sealed base file: packing, unpacking, and looking keys up in them.

Free functions of arrays, nogil; any number of threads, each with a buffer of its own. A block holds, without gaps, `per_block` keys (int64,
ascending), as many rows, zeros, and a checksum in its last 8 bytes; only the last block of a file may hold fewer, and then its other places are
zeros. schema/layout.md has each byte.

Blocks are read with `preadv2`, not through a mapping: a read error of the drive is an error number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels import compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.partitions import partition_at
from tierstore.kernels.raw import fold_multiply, load_u64, store_u64
from tierstore.kernels.sysio import NOWAIT, WILL_NEED, advise, read_at
from tierstore.types import Keys, Rows, Tier

# what may be wrong with a block; positive numbers are the system's (errno)
DAMAGED = -1  # the checksum does not match
CUT = -2  # the file ends before the block
MISPLACED = -3  # a whole block, but another one than expected

HEADER_BYTES = 4096  # blocks begin here, so that each has pages of its own

_U64 = np.uint64
# digits of the fractional part of the golden ratio, and the primes of XXH64: any odd numbers with mixed bits would do
_S0, _S1 = _U64(0x9E3779B97F4A7C15), _U64(0xC2B2AE3D27D4EB4F)
_S2, _S3 = _U64(0x165667B19E3779F9), _U64(0x27D4EB2F165667C5)
_C1, _C2 = _U64(0xFF51AFD7ED558CCD), _U64(0xC4CEB9FE1A85EC53)
_EINTR = 4
_DISK, _ABSENT = np.uint8(Tier.DISK), np.uint8(Tier.ABSENT)

_KEYS = types.Array(types.int64, 1, "C", readonly=True)
_WANTED = types.Array(types.boolean, 1, "C", readonly=True)
_I64S = types.int64[::1]


@compiled("uint64(int64, int64, int64)", inner=True)
def _checksum(at: Any, block_bytes: Any, number: Any) -> Any:
    """The checksum of a block's bytes before its last 8, with the block's number in place of those."""
    a, b, c, d = _S0, _S1, _S2, _S3
    words = block_bytes >> 3
    for j in range(0, words, 8):
        last = load_u64(at, j + 7) if j + 8 < words else _U64(number)
        a = fold_multiply(load_u64(at, j) ^ _S0 ^ a, load_u64(at, j + 1) ^ _S1)
        b = fold_multiply(load_u64(at, j + 2) ^ _S1 ^ b, load_u64(at, j + 3) ^ _S2)
        c = fold_multiply(load_u64(at, j + 4) ^ _S2 ^ c, load_u64(at, j + 5) ^ _S3)
        d = fold_multiply(load_u64(at, j + 6) ^ _S3 ^ d, last ^ _S0)
    x = fold_multiply(a ^ _S1, b ^ _S2) ^ fold_multiply(c ^ _S3, d ^ _S0) ^ _U64(block_bytes)
    x = (x ^ (x >> _U64(33))) * _C1
    x = (x ^ (x >> _U64(33))) * _C2
    return x ^ (x >> _U64(33))


@compiled(types.void(_KEYS, *[types.int64] * 6))
def _pack(keys: Any, rows: Any, row_bytes: Any, out: Any, per_block: Any, block_bytes: Any, first_block: Any) -> Any:
    for block in range((len(keys) + per_block - 1) // per_block):
        at = out + block * block_bytes
        first = block * per_block
        count = min(per_block, len(keys) - first)
        copy_bytes(at, np.int64(keys.ctypes.data) + 8 * first, 8 * count)
        copy_bytes(at + 8 * per_block, rows + first * row_bytes, row_bytes * count)
        words = block_bytes >> 3
        store_u64(at, words - 1, _checksum(at, block_bytes, first_block + block))


@compiled(types.int64(_I64S, *[types.int64] * 7))
def _unpack(
    keys: Any, rows: Any, row_bytes: Any, blocks: Any, per_block: Any, block_bytes: Any, first_block: Any, floor: Any
) -> Any:
    """Unpack blocks. Returns -1, or the first block that is damaged or out of order; `floor` is the key before the first."""
    last = floor
    for block in range((len(keys) + per_block - 1) // per_block):
        at = blocks + block * block_bytes
        first = block * per_block
        count = min(per_block, len(keys) - first)
        if load_u64(at, (block_bytes >> 3) - 1) != _checksum(at, block_bytes, first_block + block):
            return block
        copy_bytes(np.int64(keys.ctypes.data) + 8 * first, at, 8 * count)
        copy_bytes(rows + first * row_bytes, at + 8 * per_block, row_bytes * count)
        for i in range(first, first + count):
            if keys[i] < last or (keys[i] == last and (i > 0 or floor != np.iinfo(np.int64).min)):
                return block
            last = keys[i]
    return -1


@compiled("int64(int64, int64, int64, int64)", inner=True)
def read_whole(fd: Any, buffer: Any, size: Any, offset: Any) -> Any:
    """Read all of `size` bytes: 0, an error number, or CUT. Waits for the drive."""
    done = 0
    while done < size:
        got = read_at(fd, buffer + done, size - done, offset + done, 0)
        if got > 0:
            done += got
        elif got == 0:
            return CUT
        elif got != -_EINTR:
            return -got
    return 0


@compiled(types.int64(_KEYS, types.int64, types.int64, types.int64), inner=True)
def _last_at_most(sorted_keys: Any, key: Any, start: Any, end: Any) -> Any:
    """The last place before `end` whose key is at most `key`, given that the key at `start` is; strides grow from there, then halve."""
    low, step = start, 1
    while low + step < end and sorted_keys[low + step] <= key:
        low += step
        step += step
    high = min(low + step, end)
    while high - low > 1:
        middle = (low + high) >> 1
        if sorted_keys[middle] <= key:
            low = middle
        else:
            high = middle
    return low


@compiled(
    types.int64(
        _KEYS, _WANTED, types.int64, types.int64, types.uint8[::1], types.int32[::1],
        types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64,
    ),
    inner=True,
)  # fmt: skip
def _answer(
    keys: Any, wanted: Any, rows: Any, row_bytes: Any, state: Any, trouble: Any,
    first: Any, last: Any, buffer: Any, per_block: Any, block_bytes: Any, number: Any, count: Any, fence: Any,
) -> Any:  # fmt: skip
    """Answer keys[first:last] from the block in `buffer`. Returns 1 if the block cannot answer, 0 otherwise."""
    wrong = 0
    if load_u64(buffer, (block_bytes >> 3) - 1) != _checksum(buffer, block_bytes, number):
        wrong = DAMAGED
    elif np.int64(load_u64(buffer, 0)) != fence:
        wrong = MISPLACED
    if wrong != 0:
        trouble[first:last] = wrong
        return 1
    at = 0
    for i in range(first, last):
        if not wanted[i]:
            continue
        key, high = keys[i], count  # keys ascend, so each is searched for from the place of the one before
        while high - at > 1:
            middle = (at + high) >> 1
            if np.int64(load_u64(buffer, middle)) <= key:
                at = middle
            else:
                high = middle
        if np.int64(load_u64(buffer, at)) == key:
            copy_bytes(rows + i * row_bytes, buffer + 8 * per_block + at * row_bytes, row_bytes)
            state[i] = _DISK
        else:
            state[i] = _ABSENT
    return 0


@compiled(
    types.int64(
        _KEYS, _WANTED, types.int64, types.int64, types.uint8[::1], types.int32[::1],
        _KEYS, _KEYS, _KEYS, _KEYS, _KEYS, types.int64, types.int64, types.int64,
    ),
    inner=True,
)  # fmt: skip
def look_up(
    keys: Any, wanted: Any, rows: Any, row_bytes: Any, state: Any, trouble: Any,
    fences: Any, part_starts: Any, file_ends: Any, file_rows: Any, fds: Any,
    per_block: Any, block_bytes: Any, window: Any,
) -> Any:  # fmt: skip
    """Answer the `wanted` of `keys` (int64[n], distinct, by part and then ascending): rows[i] and state[i] DISK, or ABSENT.

    `fences` is the first key of each block of all files in order. With one part, keys ascend from file to file, and the wanted keys may also ascend
    in runs; otherwise part p has the keys of partition p, and the blocks part_starts[p] to part_starts[p + 1] - 1. `file_ends`, `file_rows` and
    `fds`, one for each file: the blocks up to its end, counted over all files; its rows; its descriptor. `rows`: the address of n rows of
    `row_bytes`.

    Blocks in the page cache are read at once; the others afterwards, `window` of them at a time. With a window of 0 nothing waits for the drive: keys
    of other blocks stay as they are. Returns how many blocks failed; `trouble` has the error for their keys.
    """
    buffer_array = np.empty(block_bytes, np.uint8)
    buffer = np.int64(buffer_array.ctypes.data)
    waiting = np.empty(
        (len(keys) if window > 0 else 0, 4), np.int64
    )  # of blocks that are not in memory: first key, last key, block, file
    waits, failed, first, block, file = 0, 0, 0, 0, 0
    parts, part, end = len(part_starts) - 1, -1, 0
    while first < len(keys):
        if parts == 1 and first > 0 and keys[first] < keys[first - 1]:
            part = -1  # another run begins, whether its first key is wanted or not
        if not wanted[first]:
            first += 1
            continue
        of = 0 if parts == 1 else partition_at(keys[first], parts)
        if of != part:
            part, block, end = of, part_starts[of], part_starts[of + 1]
        if block == end or keys[first] < fences[block]:  # before all keys of its part
            state[first] = _ABSENT
            first += 1
            continue
        block = _last_at_most(fences, keys[first], block, end)
        last = first + 1
        while last < len(keys) and (block + 1 == end or keys[last] < fences[block + 1]):
            if (parts == 1 and keys[last] < keys[last - 1]) or (parts > 1 and partition_at(keys[last], parts) != part):
                break
            last += 1
        if file > 0 and block < file_ends[file - 1]:
            file = 0
        while block >= file_ends[file]:
            file += 1
        start = 0 if file == 0 else file_ends[file - 1]
        offset = HEADER_BYTES + (block - start) * block_bytes
        if read_at(fds[file], buffer, block_bytes, offset, NOWAIT) == block_bytes:
            count = min(per_block, file_rows[file] - (block - start) * per_block)
            failed += _answer(
                keys, wanted, rows, row_bytes, state, trouble,
                first, last, buffer, per_block, block_bytes, block - start, count, fences[block],
            )  # fmt: skip
        elif window > 0:  # whatever the reason, the read that waits will report it
            waiting[waits, 0], waiting[waits, 1], waiting[waits, 2], waiting[waits, 3] = first, last, block, file
            waits += 1
            if waits <= window:
                advise(fds[file], offset, block_bytes, WILL_NEED)
        first = last
    for i in range(waits):
        # the drive works on the next `window` blocks while this one is waited for
        if i + window < waits:
            block, file = waiting[i + window, 2], waiting[i + window, 3]
            start = 0 if file == 0 else file_ends[file - 1]
            advise(fds[file], HEADER_BYTES + (block - start) * block_bytes, block_bytes, WILL_NEED)
        first, last, block, file = waiting[i, 0], waiting[i, 1], waiting[i, 2], waiting[i, 3]
        start = 0 if file == 0 else file_ends[file - 1]
        wrong = read_whole(fds[file], buffer, block_bytes, HEADER_BYTES + (block - start) * block_bytes)
        if wrong != 0:
            trouble[first:last] = wrong
            failed += 1
        else:
            count = min(per_block, file_rows[file] - (block - start) * per_block)
            failed += _answer(
                keys, wanted, rows, row_bytes, state, trouble,
                first, last, buffer, per_block, block_bytes, block - start, count, fences[block],
            )  # fmt: skip
    return failed if buffer_array.size >= 0 else 0


def pack(keys: Keys, rows: Rows, per_block: int, block_bytes: int, first_block: int) -> npt.NDArray[np.uint8]:
    """Pack `keys` (int64 [n], ascending, distinct) and `rows` (uint8 [n, row_bytes]) into blocks, end to end.

    `first_block` is the number in its file of the first of them.
    """
    blocks = -(-len(keys) // per_block)
    out = np.zeros(blocks * block_bytes, np.uint8)
    rows = np.ascontiguousarray(rows)
    _pack(
        np.ascontiguousarray(keys), rows.ctypes.data, rows.shape[1],
        out.ctypes.data, per_block, block_bytes, first_block,
    )  # fmt: skip
    return out


def unpack(
    blocks: npt.NDArray[np.uint8],
    count: int,
    row_bytes: int,
    per_block: int,
    block_bytes: int,
    first_block: int,
    floor: int | None,
) -> tuple[Keys, Rows, int]:
    """Unpack `count` keys and rows from blocks made by `pack`.

    The third item is -1, or the number within `blocks` of the first block that is damaged or out of order; `floor` is the key before the first, if
    there is one.
    """
    keys = np.empty(count, np.int64)
    rows = np.empty((count, row_bytes), np.uint8)
    before = np.iinfo(np.int64).min if floor is None else floor
    bad = _unpack(
        keys, rows.ctypes.data, row_bytes, blocks.ctypes.data, per_block, block_bytes, first_block, before
    )  # fmt: skip
    return keys, rows, int(bad)
