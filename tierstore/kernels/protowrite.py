"""The writer of answers over gRPC: a serialized ModelInferResponse around rows that the run has put in their places.

Each output's elements have a tag and their length before them; `binding.bind` keeps that room. Before all of them comes the
description, which is written from its end to its beginning, as each length stands before what it counts.

The pieces of a variant: the fields of the model, then two for each output: its name and datatype, with how many of its sizes are
values of the request; and its other sizes.

Free functions of addresses, nogil.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.binding import (
    value_at,
)
from tierstore.kernels.plan_records import piece_at
from tierstore.kernels.raw import load_i64, store_u8
from tierstore.kernels.request_record import NO_ID
from tierstore.kernels.varint import varint_before

ID, OUTPUT, RAW_OUTPUT, SHAPE = 0x1A, 0x2A, 0x32, 0x1A  # tags; SHAPE is of an output


@nb.njit(inline="always")
def _length_before(begin, end, tag):  # type: ignore[no-untyped-def]
    """Write the tag and the length of a field before what lies from `begin` to `end`. Returns where it begins then."""
    at = varint_before(begin, end - begin) - 1
    store_u8(at, 0, nb.uint8(tag))
    return at


@nb.njit(inline="always")
def _piece_before(end, piece):  # type: ignore[no-untyped-def]
    at = end - piece.bytes
    copy_bytes(at, piece.at, piece.bytes)
    return at


@nb.njit
def write_message(variant, record, values, data):  # type: ignore[no-untyped-def]
    """Complete the message whose elements are at the address `data`: write all but those. Returns where it begins.

    `values` are those of `bind`, `record` has the id.
    """
    pieces, end = variant.texts, data
    for i in range(variant.outputs - 1, -1, -1):
        value, piece = value_at(values, i), piece_at(pieces, 1 + 2 * i)
        begin = data + value.at
        _length_before(begin, begin + value.bytes, RAW_OUTPUT)
        at = _piece_before(end, piece_at(piece, 1))
        for k in range(piece.value - 1, -1, -1):
            at = varint_before(at, load_i64(value, k))
        at = _piece_before(_length_before(at, end, SHAPE), piece)
        end = _length_before(at, end, OUTPUT)
    size = record.id_bytes
    if size != NO_ID:
        copy_bytes(end - size, record.id_at, size)
        end = _length_before(end - size, end, ID)
    return _piece_before(end, pieces)
