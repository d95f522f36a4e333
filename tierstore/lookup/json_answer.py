"""The writer of answers whose elements are in the JSON, as orjson spells them: integers, true and false, and float32 with the fewest digits that are
read back as the same. NaN and infinite numbers are null.

The pieces of a variant: texts, each followed by a number among the answer's values, or by the elements of an output (`plans.PIECE`).

Free functions of addresses, nogil. `tests/lookup/test_json_answer.py` compares with orjson.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import HTTP, compiled_c
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_i64, load_u8, load_u32, store_u8
from tierstore.lookup.binding import CLOSE_OBJECT, ID, MOST_ADDED_BYTES, MOST_DIGITS, NONE, QUOTE, value_at, values_at
from tierstore.lookup.plans import piece_at, variant_at
from tierstore.wire.json.numbers import write_float32, write_integer
from tierstore.wire.json.text import CLOSE_LIST, COMMA, OPEN_LIST
from tierstore.wire.request_record import DATATYPES, NO_ID, WIDTHS

HEAD_ROOM = 256  # bytes in front of the JSON, for the head of the answer
GROWTH = 6  # bytes of text for each byte of an element: "false,"
WRITTEN = tuple(name for name in DATATYPES if name not in ("FP16", "FP64", "BYTES"))  # datatypes that are written here

_U64 = np.uint64
_BOOL, _FP32 = 1 + DATATYPES.index("BOOL"), 1 + DATATYPES.index("FP32")
_SIGNED = np.array([False, *(name.startswith("INT") for name in DATATYPES)])
_INFINITE = 0x7F800000
_TRUE, _FALSE, _NULL = (np.frombuffer(text, np.uint8) for text in (b"true,", b"false,", b"null,"))


@nb.njit
def most_bytes(variant, data_bytes):  # type: ignore[no-untyped-def]
    """The most bytes of an answer's JSON whose elements take `data_bytes`."""
    size = MOST_ADDED_BYTES + GROWTH * data_bytes
    for i in range(variant.pieces):
        size += piece_at(variant.texts, i).bytes + MOST_DIGITS
    return size


@nb.njit(inline="always")
def _word(target, word):  # type: ignore[no-untyped-def]
    copy_bytes(target, nb.int64(word.ctypes.data), word.size)
    return target + word.size


@nb.njit
def _write_floats(target, data, n):  # type: ignore[no-untyped-def]
    for i in range(n):
        if load_u32(data, i) & _U64(0x7FFFFFFF) >= _U64(_INFINITE):
            target = _word(target, _NULL)
        else:
            target = write_float32(target, data + 4 * i)
            store_u8(target, 0, nb.uint8(COMMA))
            target += 1
    return target


@nb.njit
def _write_integers(target, data, n, datatype):  # type: ignore[no-untyped-def]
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
def _write_list(target, data, size, datatype):  # type: ignore[no-untyped-def]
    """Write the elements in `size` bytes at `data` as a list. Returns what follows."""
    store_u8(target, 0, nb.uint8(OPEN_LIST))
    target += 1
    n = size // WIDTHS[datatype]
    if datatype == _FP32:
        target = _write_floats(target, data, n)
    elif datatype == _BOOL:
        for i in range(n):
            target = _word(target, _TRUE) if load_u8(data, i) != 0 else _word(target, _FALSE)
    else:
        target = _write_integers(target, data, n, datatype)
    if n > 0:  # over the last comma
        target -= 1
    store_u8(target, 0, nb.uint8(CLOSE_LIST))
    return target + 1


@compiled_c(types.int64(*[types.int64] * 6), when=HTTP)
def write(variant: Any, values: Any, id_at: Any, id_bytes: Any, data: Any, target: Any) -> Any:
    """Write an answer's JSON to the address `target`. Returns where it ends.

    `values` come from `binding.bind`, or for a prediction from `scoring.bind`; `data` is the address of the elements; the id is that of the record.
    """
    variant, values = variant_at(variant), values_at(values)
    pieces = variant.texts
    for i in range(variant.pieces):
        piece = piece_at(pieces, i)
        size, value = piece.bytes, piece.value
        copy_bytes(target, piece.at, size)
        target += size
        if piece.datatype != 0:
            output = value_at(values, value)
            target = _write_list(target, data + output.at, output.bytes, piece.datatype)
        elif value != NONE:
            target = write_integer(target, False, _U64(load_i64(values, value)))
    if id_bytes != NO_ID:
        target = _word(target, ID)
        copy_bytes(target, id_at, id_bytes)
        target += id_bytes
        store_u8(target, 0, nb.uint8(QUOTE))
        target += 1
    store_u8(target, 0, nb.uint8(CLOSE_OBJECT))
    return target + 1
