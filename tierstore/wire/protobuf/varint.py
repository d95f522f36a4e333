"""Varints of protobuf's wire format (https://protobuf.dev/programming-guides/encoding), read and written at addresses.

Free functions, nogil. Only varints that are not negative and as short as possible are read: protobuf itself must read others.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.raw import load_u8, store_u8

MOST_VARINT_BYTES = 9  # of 63 bits


@nb.njit(inline="always")
def varint_at(text, i, end):
    """(value, what follows) of the varint at `i`, before `end`; what follows is -1 where there is none of this form."""
    value, shift = nb.int64(0), nb.int64(0)
    while i < end and shift < 7 * MOST_VARINT_BYTES:
        byte = nb.int64(load_u8(text, i))
        i += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, i if byte != 0 or shift == 0 else nb.int64(-1)
        shift += 7
    return value, nb.int64(-1)


@nb.njit(inline="always")
def varint_bytes(value):
    """The bytes of a number that is not negative, as a varint."""
    size = 1
    while value > 0x7F:
        value >>= 7
        size += 1
    return size


@nb.njit(inline="always")
def write_varint(at, value):
    """Write a number that is not negative. Returns what follows."""
    while value > 0x7F:
        store_u8(at, 0, nb.uint8(value & 0x7F | 0x80))
        value >>= 7
        at += 1
    store_u8(at, 0, nb.uint8(value))
    return at + 1


@nb.njit(inline="always")
def varint_before(end, value):
    """Write a number so that it ends at the address `end`. Returns where it begins."""
    begin = end - varint_bytes(value)
    write_varint(begin, value)
    return begin
