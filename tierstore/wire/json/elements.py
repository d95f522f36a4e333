"""Elements of tensors in JSON: lists, flat or nested, become the bytes that a binary tensor would have.

Integers that fit the datatype, numbers as floats of 32 or 64 bits, and strings without escapes. Lists of one level have the same length, as a tensor's
rows have. All other elements are for the full parser: true, false and null, halves, escapes, an exponent or a point in an integer.

Free functions of addresses, nogil. Each element takes at most four times the bytes of its text.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u8, store_f32, store_f64, store_u8, store_u64
from tierstore.wire.json.numbers import float_at, integer_at
from tierstore.wire.json.text import BACKSLASH, CLOSE_LIST, COMMA, OPEN_LIST, QUOTE, is_there, skip_blanks
from tierstore.wire.request_record import DATATYPES, MOST_RANK, WIDTHS

GROWTH = 4  # bytes of an element for each byte of its text

_U64 = np.uint64
_BOOL, _FP16, _FP32, _FP64, _BYTES = (1 + DATATYPES.index(name) for name in ("BOOL", "FP16", "FP32", "FP64", "BYTES"))
_MOST_FLOAT32 = float(np.finfo(np.float32).max)


def _limits(name: str) -> tuple[int, int]:
    """The highest number of an integer datatype, and the magnitude of its lowest."""
    if not name.startswith(("INT", "UINT")):
        return 0, 0
    limits = np.iinfo(name.lower())
    return int(limits.max), -int(limits.min)


_MOST, _LEAST = (np.array(limits, np.uint64) for limits in zip((0, 0), *map(_limits, DATATYPES), strict=True))


@nb.njit
def _integer(text, i, n, datatype, target):
    """`element_at` for integers."""
    width = WIDTHS[datatype]
    minus, value, i = integer_at(text, i, n)
    if i < 0 or value > (_LEAST[datatype] if minus else _MOST[datatype]):
        return nb.int64(-1), target
    if minus:
        value = _U64(0) - value
    if width == 8:
        store_u64(target, 0, value)
    else:
        for k in range(width):
            store_u8(target, k, nb.uint8(value >> _U64(8 * k)))
    return i, target + width


@nb.njit
def _float(text, i, n, datatype, target):
    """`element_at` for floats."""
    value, i = float_at(text, i, n)
    if datatype == _FP64:
        store_f64(target, 0, value)
        return i, target + 8
    rounded = nb.float32(value)
    store_f32(target, 0, rounded)
    return i if abs(rounded) <= _MOST_FLOAT32 else nb.int64(-1), target + 4


@nb.njit
def _string(text, i, n, target):
    """`element_at` for strings, each behind its length. Nothing says yet that it is UTF-8."""
    if not is_there(text, i, n, QUOTE):
        return nb.int64(-1), target
    i += 1
    begin = i
    while i < n and load_u8(text, i) != QUOTE:
        if load_u8(text, i) < 32 or load_u8(text, i) == BACKSLASH:
            return nb.int64(-1), target
        i += 1
    if i == n:
        return nb.int64(-1), target
    size = i - begin
    for k in range(4):
        store_u8(target, k, nb.uint8((size >> (8 * k)) & 255))
    copy_bytes(target + 4, text + begin, size)
    return i + 1, target + 4 + size


@nb.njit
def element_at(text, i, n, datatype, target):
    """Read the element at `i` to the address `target`. Returns (what follows or -1, where the next element goes)."""
    if datatype == _BYTES:
        return _string(text, i, n, target)
    if datatype in (_FP32, _FP64):
        return _float(text, i, n, datatype, target)
    if datatype in (_BOOL, _FP16):
        return nb.int64(-1), target
    return _integer(text, i, n, datatype, target)


@nb.njit
def _list(text, i, n, datatype, target):
    """Read a list's elements from the first one on. Returns (how many, where its bracket is or -1, where the next element goes)."""
    count = 0
    while True:
        i, target = element_at(text, i, n, datatype, target)
        if i < 0:
            return 0, i, target
        count += 1
        i = skip_blanks(text, i, n)
        if not is_there(text, i, n, COMMA):
            return count, i if is_there(text, i, n, CLOSE_LIST) else nb.int64(-1), target
        i = skip_blanks(text, i + 1, n)


@nb.njit
def elements_at(text, i, n, datatype, target, record):
    """Read the lists at `i` to the address `target`, and their depth and sizes into the record. Returns (what follows or -1, where the elements end)."""
    depth = 0
    record.depth = 0  # until the first elements have come
    while True:
        if not is_there(text, i, n, OPEN_LIST) or depth == MOST_RANK or (record.depth != 0 and depth == record.depth):
            return nb.int64(-1), target
        if record.depth == 0:
            record.sizes[depth] = -1
        record.counts[depth] = 0
        depth += 1
        i = skip_blanks(text, i + 1, n)
        if is_there(text, i, n, OPEN_LIST):
            continue
        if record.depth == 0:
            record.depth = depth
        elif record.depth != depth:
            return nb.int64(-1), target
        count = 0
        if not is_there(text, i, n, CLOSE_LIST):
            count, i, target = _list(text, i, n, datatype, target)
            if i < 0:
                return nb.int64(-1), target
        while True:  # at the end of a list with `count` entries
            depth -= 1
            if record.sizes[depth] >= 0 and record.sizes[depth] != count:
                return nb.int64(-1), target
            record.sizes[depth] = count
            i += 1
            if depth == 0:
                return i, target
            record.counts[depth - 1] += 1
            i = skip_blanks(text, i, n)
            if is_there(text, i, n, COMMA):
                i = skip_blanks(text, i + 1, n)
                break
            if not is_there(text, i, n, CLOSE_LIST):
                return nb.int64(-1), target
            count = record.counts[depth - 1]


@nb.njit
def pass_lists(text, i, n):
    """Skip the lists at `i`, whatever is in them: `elements_at` looks at it later. Returns (their depth, the entries of the outer one, what follows or -1).

    The depth is that of the first element. Entries are counted by commas.
    """
    if not is_there(text, i, n, OPEN_LIST):
        return 0, nb.int64(0), nb.int64(-1)
    around, depth, commas, first, empty = 0, 0, nb.int64(0), True, False
    while i < n:
        byte = load_u8(text, i)
        if byte == OPEN_LIST:
            around += 1
            if first:
                depth = around
        elif byte == CLOSE_LIST:
            empty = empty or (first and around == 1)
            first = False
            around -= 1
            if around == 0:
                return depth, nb.int64(0) if empty else commas + 1, i + 1
        elif byte == COMMA:
            commas += around == 1
        elif byte == QUOTE:
            first = False
            i += 1
            while i < n and load_u8(text, i) != QUOTE:
                if load_u8(text, i) == BACKSLASH:
                    return 0, nb.int64(0), nb.int64(-1)
                i += 1
        elif byte > 32:
            first = False
        i += 1
    return 0, nb.int64(0), nb.int64(-1)
