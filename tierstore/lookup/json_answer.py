"""The writer of answers whose elements are in the JSON, as orjson spells them: integers, true and false, and floats with the fewest digits that are
read back as the same.

The pieces of a variant: texts, each followed by a number among the answer's values, or by the elements of an output (`plans.PIECE`). Elements are

    FLAT      in one list. NaN and infinite numbers are null
    NESTED    in lists as the output is shaped. Answers with NaN or infinite numbers are for the full writer
    BY_ROW    as NESTED, with an object for each row that has a part of each output. The first piece is in front of the objects

Free functions of addresses, nogil. `tests/lookup/test_json_answer.py` compares with orjson.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import HTTP, compiled_c
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_f16, load_i64, load_u8, load_u32, load_u64, store_f32, store_u8
from tierstore.lookup.answer_values import size_of, value_at, values_at
from tierstore.lookup.binding import CLOSE_OBJECT, ID, MOST_ADDED_BYTES, MOST_DIGITS, NONE, QUOTE
from tierstore.lookup.plans import BY_ROW, FLAT, lookup_at, piece_at
from tierstore.wire.json.numbers import write_float32, write_float64, write_integer
from tierstore.wire.json.text import CLOSE_LIST, COMMA, OPEN_LIST
from tierstore.wire.request_record import DATATYPES, NO_ID, WIDTHS

HEAD_ROOM = 256  # bytes in front of the JSON, for the head of the answer
WRITTEN = tuple(name for name in DATATYPES if name != "BYTES")  # datatypes that are written here
_MOST = {
    "BOOL": len("false,"), "FP16": len("-0.0000012345678,"), "FP32": len("-0.00000123456789,"), "FP64": len("-1.2345678901234567e-300,"),
}  # fmt: skip
# the most bytes of an element's text, with a comma
MOST_ELEMENT = np.array(
    [0, *(_MOST.get(name) or (0 if name == "BYTES" else len(f"{np.iinfo(name.lower()).min},") + 1) for name in DATATYPES)], np.int64
)  # fmt: skip
_MOST_LIST = len("[],")

_U64 = np.uint64
_BOOL, _FP16, _FP32, _FP64 = (1 + DATATYPES.index(name) for name in ("BOOL", "FP16", "FP32", "FP64"))
_SIGNED = np.array([False, *(name.startswith("INT") for name in DATATYPES)])
_INFINITE, _INFINITE_64 = 0x7F800000, 0x7FF00000_00000000
_TRUE, _FALSE, _NULL = (np.frombuffer(text, np.uint8) for text in (b"true,", b"false,", b"null,"))


@nb.njit
def _inner(values, piece, first):
    """Of an output's lists from axis `first` on: (the number of innermost lists, the axis whose entries those have). Lists in an empty list are none."""
    lists, last = nb.int64(1), first
    while last < piece.rank - 1 and size_of(values, piece, last) > 0:
        lists *= size_of(values, piece, last)
        last += 1
    return lists, last


@nb.njit
def most_bytes(variant, values):
    """The most bytes of the JSON of an answer with these values."""
    size, form, rows = nb.int64(MOST_ADDED_BYTES), variant.as_json, nb.int64(1)
    if form == BY_ROW:
        rows = size_of(values, piece_at(variant.texts, 1), 0)
    for i in range(variant.pieces):
        piece = piece_at(variant.texts, i)
        size += rows * (piece.bytes + MOST_DIGITS)
        if piece.datatype == 0:
            continue
        size += value_at(values, piece.value).bytes // WIDTHS[piece.datatype] * MOST_ELEMENT[piece.datatype]
        lists = nb.int64(1)
        for axis in range(piece.rank):
            size += _MOST_LIST * lists
            lists *= size_of(values, piece, axis)
    return size


@nb.njit(inline="always")
def _word(target, word):
    copy_bytes(target, nb.int64(word.ctypes.data), word.size)
    return target + word.size


@nb.njit
def _are_finite(data, size, datatype):
    """Whether none of the elements in `size` bytes is NaN or infinite."""
    if datatype == _FP32:
        for i in range(size >> 2):
            if load_u32(data, i) & _U64(0x7FFFFFFF) >= _U64(_INFINITE):
                return False
    elif datatype == _FP64:
        for i in range(size >> 3):
            if load_u64(data, i) & _U64(0x7FFFFFFF_FFFFFFFF) >= _U64(_INFINITE_64):
                return False
    elif datatype == _FP16:
        for i in range(size >> 1):
            if (load_u8(data, 2 * i + 1) & 0x7C) == 0x7C:
                return False
    return True


@nb.njit
def _write_float(target, data, i, datatype):
    """Write the float number `i`. Returns what follows."""
    if datatype == _FP64:
        bits = load_u64(data, i)
        if bits & _U64(0x7FFFFFFF_FFFFFFFF) >= _U64(_INFINITE_64):
            return _word(target, _NULL) - 1
        return write_float64(target, bits)
    if datatype == _FP16:
        store_f32(target, 0, load_f16(data, i))
        bits = _U64(load_u32(target, 0))
    else:
        bits = _U64(load_u32(data, i))
    if bits & _U64(0x7FFFFFFF) >= _U64(_INFINITE):
        return _word(target, _NULL) - 1
    return write_float32(target, bits)


@nb.njit
def _write_floats(target, data, n, datatype):
    for i in range(n):
        target = _write_float(target, data, i, datatype)
        store_u8(target, 0, nb.uint8(COMMA))
        target += 1
    return target


@nb.njit
def _write_integers(target, data, n, datatype):
    width = WIDTHS[datatype]
    sign = _U64(1) << _U64(8 * width - 1)
    for i in range(n):
        value = _U64(0)
        for k in range(width):
            value |= _U64(load_u8(data, width * i + k)) << _U64(8 * k)
        minus = _SIGNED[datatype] and value & sign != _U64(0)
        if minus:
            value = (sign - (value ^ sign)) & (sign | (sign - _U64(1)))
        target = write_integer(target, minus, value)
        store_u8(target, 0, nb.uint8(COMMA))
        target += 1
    return target


@nb.njit
def _write_elements(target, data, n, datatype):
    """Write `n` elements at `data`, with a comma behind each. Returns what follows."""
    if datatype in (_FP16, _FP32, _FP64):
        return _write_floats(target, data, n, datatype)
    if datatype == _BOOL:
        for i in range(n):
            target = _word(target, _TRUE) if load_u8(data, i) != 0 else _word(target, _FALSE)
        return target
    return _write_integers(target, data, n, datatype)


@nb.njit
def _byte(target, byte):
    store_u8(target, 0, nb.uint8(byte))
    return target + 1


@nb.njit
def _write_list(target, data, n, datatype):
    """Write `n` elements at `data` as a list. Returns what follows."""
    target = _write_elements(_byte(target, OPEN_LIST), data, n, datatype)
    return _byte(target - 1 if n > 0 else target, CLOSE_LIST)  # over the last comma


@nb.njit
def _write_lists(target, data, values, piece, first):
    """Write the elements at `data` in lists, as an output is shaped from axis `first` on. Returns what follows."""
    datatype = piece.datatype
    if first == piece.rank:
        return _write_elements(target, data, 1, datatype) - 1
    lists, last = _inner(values, piece, first)
    n = size_of(values, piece, last)
    for k in range(lists):
        inside, axis = nb.int64(1), last - 1  # of a list along this axis: how many innermost ones it has
        while axis >= first:
            inside *= size_of(values, piece, axis)
            if k % inside == 0:
                target = _byte(target, OPEN_LIST)
            axis -= 1
        target = _write_list(target, data + k * n * WIDTHS[datatype], n, datatype)
        inside, axis = nb.int64(1), last - 1
        while axis >= first:
            inside *= size_of(values, piece, axis)
            if (k + 1) % inside == 0:
                target = _byte(target, CLOSE_LIST)
            axis -= 1
        target = _byte(target, COMMA)
    return target - 1


@nb.njit
def _may_nest(variant, values, data):
    """Whether the answer's elements are numbers of JSON, and its outputs have as many rows as each other where rows are asked for."""
    rows = nb.int64(-1)
    for i in range(variant.pieces):
        piece = piece_at(variant.texts, i)
        if piece.datatype == 0:
            continue
        output = value_at(values, piece.value)
        if not _are_finite(data + output.at, output.bytes, piece.datatype):
            return False
        if variant.as_json == BY_ROW:
            size = size_of(values, piece, 0)
            if rows >= 0 and size != rows:
                return False
            rows = size
    return True


@nb.njit
def _write_rows(variant, values, data, target):
    """Write an object for each row. Returns what follows."""
    pieces = variant.texts
    rows = size_of(values, piece_at(pieces, 1), 0)
    copy_bytes(target, pieces.at, pieces.bytes)
    target += pieces.bytes
    for row in range(rows):
        for i in range(1, variant.pieces):
            piece = piece_at(pieces, i)
            copy_bytes(target, piece.at, piece.bytes)
            target += piece.bytes
            output = value_at(values, piece.value)
            target = _write_lists(target, data + output.at + row * (output.bytes // rows), values, piece, 1)
        target = _byte(_byte(target, CLOSE_OBJECT), COMMA)
    return _byte(target - 1 if rows > 0 else target, CLOSE_LIST)


@nb.njit
def _write_pieces(variant, values, data, target):
    """Write texts, and what is behind each. Returns what follows."""
    for i in range(variant.pieces):
        piece = piece_at(variant.texts, i)
        size, value = piece.bytes, piece.value
        copy_bytes(target, piece.at, size)
        target += size
        if piece.datatype != 0:
            output = value_at(values, value)
            if variant.as_json == FLAT:
                n = output.bytes // WIDTHS[piece.datatype]
                target = _write_list(target, data + output.at, n, piece.datatype)
            else:
                target = _write_lists(target, data + output.at, values, piece, 0)
        elif value != NONE:
            target = write_integer(target, False, _U64(load_i64(values, value)))
    return target


@compiled_c(types.int64(*[types.int64] * 6), when=HTTP)
def write(variant: Any, values: Any, id_at: Any, id_bytes: Any, data: Any, target: Any) -> Any:
    """Write an answer's JSON to the address `target`. Returns where it ends; 0, with nothing written: the full writer must write it.

    `values` come from `binding.bind`, or for a prediction from `scoring.bind`; `data` is the address of the elements; the id is that of the record.
    """
    variant, values = lookup_at(variant), values_at(values)
    if variant.as_json != FLAT and not _may_nest(variant, values, data):
        return 0
    if variant.as_json == BY_ROW:
        target = _write_rows(variant, values, data, target)
    else:
        target = _write_pieces(variant, values, data, target)
    if id_bytes != NO_ID:
        target = _word(target, ID)
        copy_bytes(target, id_at, id_bytes)
        target = _byte(target + id_bytes, QUOTE)
    return _byte(target, CLOSE_OBJECT)
