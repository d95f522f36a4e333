"""The hashes by which trainers make row numbers of features: of many keys at once, and of one for the binding of requests.

What they answer is in models that were trained with them, so it never changes. Each is written from its public description: FarmHash's Fingerprint64
(github.com/google/farmhash), SipHash-2-4 (Aumasson and Bernstein 2012), XXH64 (xxhash.com, doc/xxhash_spec.md), MurmurHash 2 and 3
(github.com/aappleby/smhasher), Java's `hashCode` (the Java language's API). `formats/trainer_hash.py` says which trainer uses which, and how.

Functions of addresses without state, nogil; any thread. `make_rows` is called by its address, so it is compiled once and not into each of its callers.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import HTTP, compiled, compiled_c
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import call_at, load_i64, load_u8, load_u32, load_u64, store_i64, store_u8
from tierstore.kernels.records import at, define
from tierstore.kernels.sysio import allocate, release

FINGERPRINT64, SIPHASH, MURMUR64A, MURMUR3, MURMUR3_UTF16, SPARK_MURMUR3, XXH64, VOWPAL_WABBIT, JAVA, MURMUR3_128 = (
    range(10)
)  # algorithms
AS_TEXT, OF_8_BYTES, OF_4_BYTES = range(3)  # how an integer is hashed
UNSIGNED, FLOOR, ABSOLUTE, WRAPPED_ABSOLUTE, WITH_SIGN, NO_REST = range(6)  # how a hash becomes a row number
OF_INTEGERS, OF_STRINGS, OF_ONE = range(3)  # forms of keys for `make_rows`

TRAINER_HASH = define("TrainerHash", "how a trainer makes row numbers of keys", {
    "algorithm integers rest": "the algorithm; AS_TEXT, OF_8_BYTES or OF_4_BYTES; UNSIGNED, FLOOR, ABSOLUTE, WRAPPED_ABSOLUTE, WITH_SIGN or NO_REST",
    "buckets first": "the number of row numbers of hashed keys, and the first of them",
    "unsigned": "1: integers are uint64",
    "seed key_0 key_1": (np.uint64, "the seed, and the key of SIPHASH"),
    "mask_at mask_bytes": "the text of the key that has row 0; -1 bytes: there is none",
    "prefix_at prefix_bytes": "a text that is hashed before that of each key",
})  # fmt: skip
trainer_hash_at = at(TRAINER_HASH)

_U64, _I64 = nb.uint64, nb.int64
_LOW32 = np.uint64(0xFFFFFFFF)
_MOST_DIGITS = 20


@nb.njit(inline="always")
def _rotated(x, bits):
    """To the left."""
    return (x << _U64(bits)) | (x >> _U64(64 - bits))


@nb.njit(inline="always")
def _rotated32(x, bits):
    return ((x << _U64(bits)) | (x >> _U64(32 - bits))) & _LOW32


@nb.njit(inline="always")
def _byte(address, index):
    return _U64(load_u8(address, index))


@nb.njit
def _bytes(address, n):
    """The number of up to 7 bytes, little-endian."""
    number = _U64(0)
    for i in range(n):
        number |= _byte(address, i) << _U64(8 * i)
    return number


@nb.njit(inline="always")
def _signed32(x):
    """The low 32 bits as a signed number."""
    return _I64(_U64(x) << _U64(32)) >> _I64(32)


# FarmHash's Fingerprint64

_K0, _K1, _K2 = np.uint64(0xC3A5C85C97CB3127), np.uint64(0xB492B66FBE98F273), np.uint64(0x9AE16A3B2F90404F)


@nb.njit(inline="always")
def _folded(x):
    return x ^ (x >> _U64(47))


@nb.njit
def _two_to_one(low, high, factor):
    mixed = _folded((low ^ high) * factor)
    return _folded((high ^ mixed) * factor) * factor


@nb.njit
def _five_to_one(a, b, c, d, e, factor):
    low = _rotated(a + b, 21) + _rotated(c, 34) + d  # to the right by 43, 30 and 18
    return _two_to_one(low, a + _rotated(b + e, 46) + c, factor)


@nb.njit
def _fingerprint_to_16(text, size):
    length = _U64(size)
    factor = _K2 + length * _U64(2)
    if size >= 8:
        first, last = load_u64(text, 0) + _K2, load_u64(text + size - 8, 0)
        low = _rotated(last, 27) * factor + first  # to the right by 37
        return _two_to_one(low, (_rotated(first, 39) + last) * factor, factor)
    if size >= 4:
        return _two_to_one(length + (load_u32(text, 0) << _U64(3)), load_u32(text + size - 4, 0), factor)
    if size > 0:
        y = _byte(text, 0) + (_byte(text, size >> 1) << _U64(8))
        z = length + (_byte(text, size - 1) << _U64(2))
        return _folded((y * _K2) ^ (z * _K0)) * _K2
    return _K2


@nb.njit
def _fingerprint_to_32(text, size):
    factor = _K2 + _U64(size) * _U64(2)
    a, b = load_u64(text, 0) * _K1, load_u64(text, 1)
    c, d = load_u64(text + size - 8, 0) * factor, load_u64(text + size - 16, 0) * _K2
    return _five_to_one(a, b, c, d, _K2, factor)


@nb.njit
def _fingerprint_to_64(text, size):
    factor = _K2 + _U64(size) * _U64(2)
    a, b = load_u64(text, 0) * _K2, load_u64(text, 1)
    c, d = load_u64(text + size - 8, 0) * factor, load_u64(text + size - 16, 0) * _K2
    y = _rotated(a + b, 21) + _rotated(c, 34) + d
    z = _five_to_one(a, b, c, d, _K2, factor)
    e, f = load_u64(text, 2) * factor, load_u64(text, 3)
    g, h = (y + load_u64(text + size - 32, 0)) * factor, (z + load_u64(text + size - 24, 0)) * factor
    return _five_to_one(e, f, g, h, a, factor)


@nb.njit
def _two_of_32(text, a, b):
    """Two words of 32 bytes of the text and two seeds."""
    first, last = load_u64(text, 0), load_u64(text, 3)
    a += first
    b = _rotated(b + a + last, 43)  # to the right by 21
    start = a
    a += load_u64(text, 1) + load_u64(text, 2)
    return a + last, b + _rotated(a, 20) + start  # to the right by 44


@nb.njit
def _fingerprint_long(text, size):
    x = _U64(81) * _K2 + load_u64(text, 0)
    y = _U64(81) * _K1 + _U64(113)
    z = _folded(y * _K2 + _U64(113)) * _K2
    v0, v1, w0, w1 = _U64(0), _U64(0), _U64(0), _U64(0)
    part = text
    for _ in range((size - 1) >> 6):
        x = _rotated(x + y + v0 + load_u64(part, 1), 27) * _K1  # to the right by 37, 42 and 33
        y = _rotated(y + v1 + load_u64(part, 6), 22) * _K1
        x ^= w1
        y += v0 + load_u64(part, 5)
        z = _rotated(z + w0, 31) * _K1
        v0, v1 = _two_of_32(part, v1 * _K1, x + w0)
        w0, w1 = _two_of_32(part + 32, z + w1, y + load_u64(part, 2))
        x, z = z, x
        part += 64
    factor = _K1 + ((z & _U64(0xFF)) << _U64(1))
    part = text + size - 64
    w0 += _U64((size - 1) & 63)
    v0 += w0
    w0 += v0
    x = _rotated(x + y + v0 + load_u64(part, 1), 27) * factor
    y = _rotated(y + v1 + load_u64(part, 6), 22) * factor
    x ^= w1 * _U64(9)
    y += v0 * _U64(9) + load_u64(part, 5)
    z = _rotated(z + w0, 31) * factor
    v0, v1 = _two_of_32(part, v1 * factor, x + w0)
    w0, w1 = _two_of_32(part + 32, z + w1, y + load_u64(part, 2))
    x, z = z, x
    low = _two_to_one(v0, w0, factor) + _folded(y) * _K0 + z
    return _two_to_one(low, _two_to_one(v1, w1, factor) + x, factor)


@nb.njit
def _fingerprint64(text, size):
    if size <= 16:
        return _fingerprint_to_16(text, size)
    if size <= 32:
        return _fingerprint_to_32(text, size)
    return _fingerprint_to_64(text, size) if size <= 64 else _fingerprint_long(text, size)


# SipHash-2-4


@nb.njit
def _sip_round(a, b, c, d):
    a += b
    b = _rotated(b, 13) ^ a
    a = _rotated(a, 32)
    c += d
    d = _rotated(d, 16) ^ c
    a += d
    d = _rotated(d, 21) ^ a
    c += b
    b = _rotated(b, 17) ^ c
    return a, b, _rotated(c, 32), d


@nb.njit
def _siphash(text, size, key_0, key_1):
    a, b = key_0 ^ _U64(0x736F6D6570736575), key_1 ^ _U64(0x646F72616E646F6D)
    c, d = key_0 ^ _U64(0x6C7967656E657261), key_1 ^ _U64(0x7465646279746573)
    words = size >> 3
    for i in range(words + 1):
        word = load_u64(text, i) if i < words else _bytes(text + 8 * words, size & 7) | (_U64(size) << _U64(56))
        d ^= word
        for _ in range(2):
            a, b, c, d = _sip_round(a, b, c, d)
        a ^= word
    c ^= _U64(0xFF)
    for _ in range(4):
        a, b, c, d = _sip_round(a, b, c, d)
    return a ^ b ^ c ^ d


# MurmurHash 2 and 3

_MURMUR2 = np.uint64(0xC6A4A7935BD1E995)
_C1, _C2 = np.uint64(0xCC9E2D51), np.uint64(0x1B873593)


@nb.njit
def _murmur64a(text, size, seed):
    hashed = seed ^ (_U64(size) * _MURMUR2)
    for i in range(size >> 3):
        hashed = (hashed ^ _folded(load_u64(text, i) * _MURMUR2) * _MURMUR2) * _MURMUR2
    if size & 7:
        hashed = (hashed ^ _bytes(text + (size & ~7), size & 7)) * _MURMUR2
    return _folded(_folded(hashed) * _MURMUR2)


@nb.njit
def _block32(x):
    return (_rotated32((x * _C1) & _LOW32, 15) * _C2) & _LOW32


@nb.njit
def _with_block32(hashed, block):
    return (_rotated32(hashed ^ _block32(block), 13) * _U64(5) + _U64(0xE6546B64)) & _LOW32


@nb.njit
def _end32(hashed, size):
    hashed ^= _U64(size) & _LOW32
    hashed = ((hashed ^ (hashed >> _U64(16))) * _U64(0x85EBCA6B)) & _LOW32
    hashed = ((hashed ^ (hashed >> _U64(13))) * _U64(0xC2B2AE35)) & _LOW32
    return hashed ^ (hashed >> _U64(16))


@nb.njit
def _murmur3(text, size, seed):
    hashed = seed & _LOW32
    for i in range(size >> 2):
        hashed = _with_block32(hashed, load_u32(text, i))
    if size & 3:
        hashed ^= _block32(_bytes(text + (size & ~3), size & 3))
    return _end32(hashed, size)


@nb.njit
def _spark_murmur3(text, size, seed):
    """Each byte of the tail is a block of its own, as a signed number."""
    hashed = seed & _LOW32
    for i in range(size >> 2):
        hashed = _with_block32(hashed, load_u32(text, i))
    for i in range(size & ~3, size):
        byte = _byte(text, i)
        hashed = _with_block32(hashed, byte | _U64(0xFFFFFF00) if byte > _U64(127) else byte)
    return _end32(hashed, size)


@nb.njit
def _next_code_point(text, i):
    """The code point at byte `i` of valid UTF-8, and where the next one is."""
    byte = _byte(text, i)
    if byte < _U64(0x80):
        return byte, i + 1
    more = 1 if byte < _U64(0xE0) else 2 if byte < _U64(0xF0) else 3
    point = byte & (_U64(0x3F) >> _U64(more))
    for k in range(more):
        point = (point << _U64(6)) | (_byte(text, i + 1 + k) & _U64(0x3F))
    return point, i + 1 + more


@nb.njit
def _murmur3_utf16(text, size, seed):
    """Of the text's UTF-16 units, little-endian; two are a block."""
    hashed, held, units, i = seed & _LOW32, _U64(0), 0, 0
    while i < size:
        point, i = _next_code_point(text, i)
        two = point > _U64(0xFFFF)
        unit = _U64(0xD7C0) + (point >> _U64(10)) if two else point
        for _ in range(2 if two else 1):
            if units & 1:
                hashed = _with_block32(hashed, held | (unit << _U64(16)))
            held = unit
            units += 1
            unit = _U64(0xDC00) | (point & _U64(0x3FF))
    if units & 1:
        hashed ^= _block32(held)
    return _end32(hashed, 2 * units)


@nb.njit
def _end64(x):
    x = (x ^ (x >> _U64(33))) * _U64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> _U64(33))) * _U64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> _U64(33))


@nb.njit
def _murmur3_128(number):
    """The xor of the two halves of MurmurHash3_x64_128, seed 0, of a number's eight bytes and eight zeros."""
    low = _rotated(number * _U64(0x87C37B91114253D5), 31) * _U64(0x4CF5AD432745937F)
    low = _rotated(low, 27) * _U64(5) + _U64(0x52DCE729)
    high = low * _U64(5) + _U64(0x38495AB5)
    low, high = low ^ _U64(16), high ^ _U64(16)
    low += high
    high += low
    low, high = _end64(low), _end64(high)
    low += high
    return low ^ (high + low)


# XXH64

_P1, _P2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P3, _P4, _P5 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)


@nb.njit
def _xxh_round(lane, word):
    return _rotated(lane + word * _P2, 31) * _P1


@nb.njit
def _xxh64(text, size, seed):
    done = size & ~31
    if done > 0:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        for part in range(text, text + done, 32):
            a, b = _xxh_round(a, load_u64(part, 0)), _xxh_round(b, load_u64(part, 1))
            c, d = _xxh_round(c, load_u64(part, 2)), _xxh_round(d, load_u64(part, 3))
        hashed = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
        for lane in (a, b, c, d):
            hashed = (hashed ^ _xxh_round(_U64(0), lane)) * _P1 + _P4
    else:
        hashed = seed + _P5
    hashed += _U64(size)
    while done + 8 <= size:
        hashed = _rotated(hashed ^ _xxh_round(_U64(0), load_u64(text + done, 0)), 27) * _P1 + _P4
        done += 8
    if done + 4 <= size:
        hashed = _rotated(hashed ^ (load_u32(text + done, 0) * _P1), 23) * _P2 + _P3
        done += 4
    for i in range(done, size):
        hashed = _rotated(hashed ^ (_byte(text, i) * _P5), 11) * _P1
    hashed = (hashed ^ (hashed >> _U64(33))) * _P2
    hashed = (hashed ^ (hashed >> _U64(29))) * _P3
    return hashed ^ (hashed >> _U64(32))


# Vowpal Wabbit, Java


@nb.njit
def _vowpal_wabbit(text, size, seed):
    """A text of digits alone is a number, which is added to the seed; blanks and control characters around it do not count."""
    while size > 0 and load_u8(text, 0) <= 0x20:
        text, size = text + 1, size - 1
    while size > 0 and load_u8(text, size - 1) <= 0x20:
        size -= 1
    number = _U64(0)
    for i in range(size):
        digit = _byte(text, i) - _U64(48)
        if digit > _U64(9):
            return _murmur3(text, size, seed)
        number = number * _U64(10) + digit
    return number + seed


@nb.njit
def _java(text, size):
    """`String.hashCode()`."""
    hashed, i = _U64(0), 0
    while i < size:
        point, i = _next_code_point(text, i)
        if point > _U64(0xFFFF):
            hashed = hashed * _U64(31) + _U64(0xD7C0) + (point >> _U64(10))
            point = _U64(0xDC00) | (point & _U64(0x3FF))
        hashed = (hashed * _U64(31) + point) & _LOW32
    return hashed


# from a hash to a row number


@nb.njit
def _hash_text(how, text, size):
    """The hash of a text, as the int64 of its bits; one of 32 bits with its sign."""
    algorithm = how.algorithm
    if algorithm == FINGERPRINT64:
        return _I64(_fingerprint64(text, size))
    if algorithm == SIPHASH:
        return _I64(_siphash(text, size, how.key_0, how.key_1))
    if algorithm == MURMUR64A:
        return _I64(_murmur64a(text, size, how.seed))
    if algorithm == XXH64:
        return _I64(_xxh64(text, size, how.seed))
    if algorithm == VOWPAL_WABBIT:
        return _I64(_vowpal_wabbit(text, size, how.seed))
    if algorithm == MURMUR3:
        return _signed32(_murmur3(text, size, how.seed))
    if algorithm == MURMUR3_UTF16:
        return _signed32(_murmur3_utf16(text, size, how.seed))
    if algorithm == SPARK_MURMUR3:
        return _signed32(_spark_murmur3(text, size, how.seed))
    return _signed32(_java(text, size))


@nb.njit
def _hash_number(how, number_at):
    """The hash of the eight or four bytes of an integer."""
    size = _I64(4 if how.integers == OF_4_BYTES else 8)
    if how.algorithm == MURMUR3_128:
        return _I64(_murmur3_128(load_u64(number_at, 0)))
    if how.algorithm == JAVA:
        number = load_u64(number_at, 0)
        return _signed32(number ^ (number >> _U64(32)) if size == 8 else number)
    return _hash_text(how, number_at, size)


@nb.njit
def _row(how, hashed):
    rest, buckets = how.rest, how.buckets
    if rest == UNSIGNED:
        return how.first + _I64(_U64(hashed) % _U64(buckets))
    if rest == FLOOR:
        return how.first + hashed % buckets
    if rest == NO_REST:
        return hashed
    if rest == WRAPPED_ABSOLUTE:  # the absolute value of the lowest number of 32 bits is itself
        return how.first + _signed32(_U64(-hashed if hashed < 0 else hashed)) % buckets
    size = _U64(-hashed) if hashed < 0 else _U64(hashed)
    negative = rest == WITH_SIGN and hashed < 0
    return how.first + _I64(size % _U64(buckets)) + (buckets if negative else _I64(0))


@nb.njit
def _row_of_text(how, text, size):
    if size == how.mask_bytes:
        same = True
        for i in range(size):
            same = same and load_u8(text, i) == load_u8(how.mask_at, i)
        if same:
            return _I64(0)
    before = how.prefix_bytes
    if before == 0:
        return _row(how, _hash_text(how, text, size))
    whole = allocate(before + size)
    if whole == 0:
        return _I64(-1)
    copy_bytes(whole, how.prefix_at, before)
    copy_bytes(whole + before, text, size)
    row = _row(how, _hash_text(how, whole, before + size))
    release(whole)
    return row


@nb.njit
def _row_of_decimal(how, number, room):
    """Of an integer's decimal text, for which there are _MOST_DIGITS bytes at `room`."""
    negative = how.unsigned == 0 and number < 0
    left, begin = _U64(-number if negative else number), _I64(_MOST_DIGITS)
    while True:
        tenth = left // _U64(10)
        begin -= 1
        store_u8(room, begin, nb.uint8(_U64(48) + left - tenth * _U64(10)))
        left = tenth
        if left == _U64(0):
            break
    if negative:
        begin -= 1
        store_u8(room, begin, nb.uint8(45))
    return _row_of_text(how, room + begin, _MOST_DIGITS - begin)


@nb.njit
def _make_rows_of_integers(how, keys, n, out):
    room = np.empty(_MOST_DIGITS, np.uint8)
    digits = _I64(room.ctypes.data)
    for i in range(n):
        key = load_i64(keys, i)
        if how.integers == AS_TEXT:
            row = _row_of_decimal(how, key, digits)
            if row < 0 and how.rest != NO_REST:
                return _I64(i)
        else:
            if how.integers == OF_4_BYTES and key != _signed32(key):
                return _I64(i)
            row = _row(how, _hash_number(how, keys + 8 * i))
        store_i64(out, i, row)
    return _I64(-1)


@compiled_c(types.int64(*[types.int64] * 6), when=HTTP)
def make_rows(how: Any, form: Any, keys: Any, sizes: Any, n: Any, out: Any) -> Any:
    """Write the row numbers of `n` keys, int64[n] at `out`. Returns -1, or the first key that has none: one beyond 32 bits, or for
    want of memory.

    `how` is a TRAINER_HASH. OF_INTEGERS: `keys` are int64[n], which may be `out`. OF_STRINGS: `keys` is UTF-8, of which `sizes`, int64[n + 1], are the
    ends, as in Arrow's arrays. OF_ONE: `keys` is the UTF-8 of one key of `sizes` bytes, and its row is returned.
    """
    function = trainer_hash_at(how)
    if form == OF_ONE:
        return _row_of_text(function, keys, sizes)
    if form == OF_INTEGERS:
        return _make_rows_of_integers(function, keys, n, out)
    for i in range(n):
        begin = load_i64(sizes, i)
        row = _row_of_text(function, keys + begin, load_i64(sizes, i + 1) - begin)
        if row < 0 and function.rest != NO_REST:
            return i
        store_i64(out, i, row)
    return -1


@compiled("int64(int64, int64, int64, int64, int64, int64, int64)", when=HTTP)
def call_make_rows(function: Any, how: Any, form: Any, keys: Any, sizes: Any, n: Any, out: Any) -> Any:
    """`make_rows`, by its address `function`."""
    return call_at(function, how, form, keys, sizes, n, out)
