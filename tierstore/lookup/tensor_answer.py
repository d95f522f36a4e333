"""The writer of answers of TensorFlow Serving over gRPC: a serialized PredictResponse around rows that a run has already put in place.

Each output is an entry of a map whose value ends with its elements, as `tensor_content`. In front of them are its name and its shape, for which
`binding.bind` or `scoring.bind` leaves room; the model's fields are behind the last output, and so the answer's data are the whole message.

The pieces of a variant: one for each output, its name as a field, with its number, its datatype in TensorFlow's numbers, and its sizes; then the fields
of the model.

Free functions of records and addresses, nogil.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import store_u8
from tierstore.lookup.answer_values import size_of, value_at
from tierstore.lookup.plans import piece_at
from tierstore.wire.protobuf.varint import varint_before, varint_bytes

ENTRY, VALUE, DTYPE, SHAPE, DIM, SIZE, CONTENT = 0x0A, 0x12, 0x08, 0x12, 0x12, 0x08, 0x22  # protobuf tags


@nb.njit
def _dim_bytes(size):
    """The bytes of a dimension, without its tag and length. A size of 0 is left out, as protobuf does."""
    return 1 + varint_bytes(size) if size > 0 else 0


@nb.njit
def frame_bytes(variant, values, number):
    """The bytes in front of the elements of an output, whose bytes and sizes are among the values."""
    piece, data, dims = piece_at(variant.texts, number), value_at(values, number).bytes, 0
    for axis in range(piece.rank):
        dims += 2 + _dim_bytes(size_of(values, piece, axis))
    tensor = 2 + 1 + varint_bytes(dims) + dims + 1 + varint_bytes(data)
    entry = piece.bytes + 1 + varint_bytes(tensor + data) + tensor
    return 1 + varint_bytes(entry + data) + entry


@nb.njit
def ending_bytes(variant):
    """The bytes behind the last output."""
    return piece_at(variant.texts, variant.pieces - 1).bytes


@nb.njit(inline="always")
def _tag_before(end, number, tag):
    """Write a tag and a number in front of the address `end`. Returns where they begin."""
    at = varint_before(end, number) - 1
    store_u8(at, 0, nb.uint8(tag))
    return at


@nb.njit
def write_frames(variant, values, data):
    """Write what is in front of the elements of each output, and what is behind the last one. Places of outputs count from the address `data`."""
    after = data
    for number in range(variant.pieces - 1):
        piece, value = piece_at(variant.texts, number), value_at(values, number)
        begin = data + value.at
        after = begin + value.bytes
        at = _tag_before(begin, value.bytes, CONTENT)
        dims_end = at
        for axis in range(piece.rank - 1, -1, -1):
            size, dim_end = size_of(values, piece, axis), at
            if size > 0:
                at = _tag_before(at, size, SIZE)
            at = _tag_before(at, dim_end - at, DIM)
        at = _tag_before(at, dims_end - at, SHAPE)
        at = _tag_before(at, piece.datatype, DTYPE)
        at = _tag_before(at, after - at, VALUE) - piece.bytes
        copy_bytes(at, piece.at, piece.bytes)
        _tag_before(at, after - at, ENTRY)
    ending = piece_at(variant.texts, variant.pieces - 1)
    copy_bytes(after, ending.at, ending.bytes)
