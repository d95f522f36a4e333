"""XXH3-64 with seed 0: of many strings at once, the codes of string keys; and of the parts of a long input, in any order.

Functions of arrays without state, nogil; any thread may call them. The hashes are on disk and in clients, so they never change. Written from the
public description of the algorithm (xxhash.com, doc/xxhash_spec.md, XXH3 by Yann Collet); the tests compare with the `xxhash` package for every
length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels import compiled
from tierstore.kernels.raw import fold_multiply, load_u8, load_u32, load_u64, swap_bytes
from tierstore.types import Keys

_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P64_1, _P64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3, _P64_4 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63)
_P64_5 = np.uint64(0x27D4EB2F165667C5)
_MIX_1, _MIX_2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)

# the algorithm's default secret
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
_STRIPE, _STRIPES = (
    64,
    16,
)  # bytes of a stripe; stripes of a block: one for every 8 bytes of the secret but the last 64

# words of the secret, by their first byte
_WORDS = np.array(
    [int.from_bytes(_SECRET[at : at + 8].tobytes(), "little") for at in range(len(_SECRET) - 7)], np.uint64
)
BLOCK = _STRIPE * _STRIPES  # bytes
LANES = 8
_EMPTY = _WORDS[56] ^ _WORDS[64]
_FLIP_1_TO_3 = (_WORDS[0] & np.uint64(0xFFFFFFFF)) ^ (_WORDS[0] >> np.uint64(32))
_FLIP_4_TO_8 = _WORDS[8] ^ _WORDS[16]
_FLIP_LOW, _FLIP_HIGH = _WORDS[24] ^ _WORDS[32], _WORDS[40] ^ _WORDS[48]
_START = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1])

_U64 = np.uint64
_OFFSETS = types.Array(types.int64, 1, "C", readonly=True)


@compiled("uint64(uint64)", inner=True)
def _avalanche(x: Any) -> Any:
    x = (x ^ (x >> _U64(37))) * _MIX_1
    return x ^ (x >> _U64(32))


@compiled("uint64(uint64)", inner=True)
def _avalanche_small(x: Any) -> Any:
    x = (x ^ (x >> _U64(33))) * _P64_2
    x = (x ^ (x >> _U64(29))) * _P64_3
    return x ^ (x >> _U64(32))


@compiled("uint64(uint64, uint64)", inner=True)
def _rotate(x: Any, bits: Any) -> Any:
    return (x << bits) | (x >> (_U64(64) - bits))


@compiled("uint64(int64, int64)", inner=True)
def _hash_to_16(at: Any, size: Any) -> Any:
    if size > 8:
        low = _FLIP_LOW ^ load_u64(at, 0)
        high = _FLIP_HIGH ^ load_u64(at + size - 8, 0)
        return _avalanche(_U64(size) + swap_bytes(low) + high + fold_multiply(low, high))
    if size >= 4:
        x = _FLIP_4_TO_8 ^ (load_u32(at + size - 4, 0) | (load_u32(at, 0) << _U64(32)))
        x ^= _rotate(x, _U64(49)) ^ _rotate(x, _U64(24))
        x *= _MIX_2
        x ^= (x >> _U64(35)) + _U64(size)
        x *= _MIX_2
        return x ^ (x >> _U64(28))
    if size > 0:
        first, middle, last = _U64(load_u8(at, 0)), _U64(load_u8(at, size >> 1)), _U64(load_u8(at, size - 1))
        combined = last | (_U64(size) << _U64(8)) | (first << _U64(16)) | (middle << _U64(24))
        return _avalanche_small(_FLIP_1_TO_3 ^ combined)
    return _avalanche_small(_EMPTY)


@compiled("uint64(int64, int64)", inner=True)
def _mix(at: Any, secret: Any) -> Any:
    """Mix 16 bytes with the 16 bytes of the secret from `secret` on."""
    return fold_multiply(load_u64(at, 0) ^ _WORDS[secret], load_u64(at, 1) ^ _WORDS[secret + 8])


@compiled("uint64(int64, int64)", inner=True)
def _hash_to_240(at: Any, size: Any) -> Any:
    acc = _U64(size) * _P64_1
    if size <= 128:
        for i in range(((size - 1) >> 5) + 1):  # pairs from both ends inwards; the order of additions does not matter
            acc += _mix(at + 16 * i, 32 * i) + _mix(at + size - 16 * i - 16, 32 * i + 16)
        return _avalanche(acc)
    for i in range(8):
        acc += _mix(at + 16 * i, 16 * i)
    acc = _avalanche(acc)
    for i in range(8, size >> 4):
        acc += _mix(at + 16 * i, 16 * (i - 8) + 3)
    return _avalanche(acc + _mix(at + size - 16, 119))


@compiled(types.void(types.int64, types.int64, types.uint64[::1]), inner=True)
def _accumulate(at: Any, secret: Any, acc: Any) -> Any:
    """Add one stripe to the eight accumulators."""
    for i in range(8):
        lane = load_u64(at, i)
        keyed = lane ^ _WORDS[secret + 8 * i]
        acc[i ^ 1] += lane
        acc[i] += (keyed & _U64(0xFFFFFFFF)) * (keyed >> _U64(32))


@compiled(types.void(types.uint64[::1]), inner=True)
def _scramble(acc: Any) -> Any:
    """Scramble the accumulators after each block but the last."""
    for i in range(8):
        acc[i] = (acc[i] ^ (acc[i] >> _U64(47)) ^ _WORDS[128 + 8 * i]) * _P32_1


@compiled(types.uint64(types.int64, types.int64, types.uint64[::1]), inner=True)
def _finish(end: Any, size: Any, acc: Any) -> Any:
    """The hash of a long input from its accumulators; the last stripe ends at the input's end."""
    _accumulate(end - _STRIPE, 121, acc)
    x = _U64(size) * _P64_1
    for i in range(0, 8, 2):
        x += fold_multiply(acc[i] ^ _WORDS[11 + 8 * i], acc[i + 1] ^ _WORDS[19 + 8 * i])
    return _avalanche(x)


@compiled(types.uint64(types.int64, types.int64, types.uint64[::1]), inner=True)
def _hash_long(at: Any, size: Any, acc: Any) -> Any:
    for i in range(8):  # a loop: assigning a slice takes 2 s to compile, for the message of an error that cannot occur
        acc[i] = _START[i]
    for n in range((size - 1) // _STRIPE):
        _accumulate(at + _STRIPE * n, 8 * (n % _STRIPES), acc)
        if n % _STRIPES == _STRIPES - 1:
            _scramble(acc)
    return _finish(at + size, size, acc)


@compiled(types.uint64(types.int64, types.int64, types.uint64[::1]), inner=True)
def hash_at(at: Any, size: Any, acc: Any) -> Any:
    """XXH3-64 of `size` bytes at an address; `acc`, uint64[8], is working memory."""
    if size <= 16:
        return _hash_to_16(at, size)
    return _hash_to_240(at, size) if size <= 240 else _hash_long(at, size, acc)


@compiled(types.int64(types.int64, types.int64, _OFFSETS, types.int64[::1]))
def _hash_strings(data: Any, data_size: Any, offsets: Any, out: Any) -> Any:
    """Hash strings. Returns -1, or the first string that is not within the data."""
    acc = np.empty(8, np.uint64)
    for i in range(len(out)):
        start, stop = offsets[i], offsets[i + 1]
        if start < 0 or stop < start or stop > data_size:
            return i
        out[i] = np.int64(hash_at(data + start, stop - start, acc))
    return -1


def hash_strings(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Keys:
    """XXH3-64, seed 0, of each string, as the int64 of the same bits: int64[n].

    String i is `data[offsets[i]:offsets[i + 1]]`; `data` uint8[bytes], `offsets` int64 or int32 [n + 1], as in Arrow's string arrays. Raises
    ValueError for a string that is not within the data.
    """
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"data is uint8[bytes], got {data.dtype}{list(data.shape)}")
    if offsets.ndim != 1 or len(offsets) == 0 or offsets.dtype.kind != "i":
        raise ValueError(f"offsets are int64[n + 1] of n strings, got {offsets.dtype}{list(offsets.shape)}")
    packed = np.ascontiguousarray(data)
    out = np.empty(len(offsets) - 1, np.int64)
    bad = _hash_strings(packed.ctypes.data, len(packed), np.ascontiguousarray(offsets, np.int64), out)
    if bad >= 0:
        raise ValueError(
            f"string {bad} lies within {len(data)} bytes, got offsets {offsets[bad]} to {offsets[bad + 1]}"
        )
    return out


@compiled(types.void(types.int64, types.uint64[:, ::1]))
def _sum_blocks(at: Any, out: Any) -> Any:
    for n in range(len(out)):
        for i in range(8):
            out[n, i] = _U64(0)
        for stripe in range(_STRIPES):
            _accumulate(at + BLOCK * n + _STRIPE * stripe, 8 * stripe, out[n])


@compiled(types.void(types.uint64[:, ::1], types.uint64[::1]))
def add_sums(sums: Any, acc: Any) -> Any:
    """Add the sums of the next blocks, uint64[n, LANES], to the accumulators, uint64[LANES]."""
    for n in range(len(sums)):
        for i in range(8):
            acc[i] += sums[n, i]
        _scramble(acc)


@compiled(types.uint64(types.int64, types.int64, types.int64, types.uint64[::1]))
def _hash_end(at: Any, end: Any, size: Any, acc: Any) -> Any:
    for n in range((end - at - 1) // _STRIPE):
        _accumulate(at + _STRIPE * n, 8 * n, acc)
    return _finish(end, size, acc)


def started() -> npt.NDArray[np.uint64]:
    """The accumulators before the first block."""
    return _START.copy()


def sum_blocks(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """What each whole block of `data` (uint8[n * BLOCK]) adds to the accumulators, wherever it is in the input: uint64[n, LANES]."""
    out = np.empty((len(data) // BLOCK, LANES), np.uint64)
    _sum_blocks(data.ctypes.data, out)
    return out


def hash_end(tail: npt.NDArray[np.uint8], size: int, acc: npt.NDArray[np.uint64]) -> int:
    """XXH3-64 of an input of `size` bytes, more than 240, after all blocks but the last (whole or not) were added to `acc`.

    `tail` is the last block, with the 64 bytes before it in front, if there are any.
    """
    last = (size - 1) % BLOCK + 1
    at = tail.ctypes.data
    return int(_hash_end(at + len(tail) - last, at + len(tail), size, acc))
