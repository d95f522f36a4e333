"""The writer of gRPC answers: a serialized ModelInferResponse around rows that a run has already put in place, or a PredictResponse (`tensor_answer.py`).

Each output's elements follow a tag and a length, for which `binding.bind` or `scoring.bind` leaves room. The description comes before all of them; it
is written backwards, because each length stands before what it counts.

The pieces of a variant: the fields of the model, with the number of outputs; then, for each output, its shape (sizes that all answers share, and
which value is the last size), and its name and datatype, with their number.

Free functions of addresses, nogil.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_i64, store_u8
from tierstore.lookup.answer_values import value_at
from tierstore.lookup.binding import NONE
from tierstore.lookup.plans import TENSORS_FRAMED, piece_at
from tierstore.lookup.tensor_answer import write_frames
from tierstore.wire.protobuf.varint import varint_before
from tierstore.wire.request_record import NO_ID

ID, OUTPUT, RAW_OUTPUT, SHAPE = 0x1A, 0x2A, 0x32, 0x1A  # protobuf tags; SHAPE is a field of an output


@nb.njit(inline="always")
def _length_before(begin, end, tag):
    """Write the tag and the length of a field in front of the bytes from `begin` to `end`. Returns the new beginning."""
    at = varint_before(begin, end - begin) - 1
    store_u8(at, 0, nb.uint8(tag))
    return at


@nb.njit(inline="always")
def _piece_before(end, piece):
    at = end - piece.bytes
    copy_bytes(at, piece.at, piece.bytes)
    return at


@nb.njit
def frame_outputs(variant, values, data):
    """Write what is in front of the elements of each output: a tag and a length. Places of outputs count from the address `data`."""
    if variant.framed == TENSORS_FRAMED:
        write_frames(variant, values, data)
        return
    for i in range(variant.texts.value):
        value = value_at(values, i)
        begin = data + value.at
        _length_before(begin, begin + value.bytes, RAW_OUTPUT)


@nb.njit
def describe(variant, record, values, end):
    """Write the description backwards from the address `end`, where the first output begins. Returns where the description begins.

    `values` come from `bind`; `record` has the id.
    """
    if variant.framed == TENSORS_FRAMED:
        return end
    pieces, k = variant.texts, variant.pieces - 1
    for _ in range(pieces.value):
        named, at = piece_at(pieces, k), end
        for _ in range(named.value):
            k -= 1
            piece = piece_at(pieces, k)
            if piece.value != NONE:
                at = varint_before(at, load_i64(values, piece.value))
            at = _piece_before(at, piece)
        if named.value > 0:
            at = _length_before(at, end, SHAPE)
        end = _length_before(_piece_before(at, named), end, OUTPUT)
        k -= 1
    size = record.id_bytes
    if size != NO_ID:
        copy_bytes(end - size, record.id_at, size)
        end = _length_before(end - size, end, ID)
    return _piece_before(end, pieces)
