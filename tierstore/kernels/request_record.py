"""The record of an inference request: what its description says, as numbers, whatever protocol it came in.

A scanner of each protocol fills it (`jsonscan.py`, `protoscan.py`); `binding.py` reads it. It has a head, then rows of one form: the request's own, one for
each input, one for each requested output. Names and texts are places in the request's bytes, by address. What tells
requests apart that need another plan is written as a *structure*: names, datatypes, ranks and what is asked of outputs,
in their order. Sizes, the id and the timeout are values, and not in it.

Free functions of addresses, nogil; the memory belongs to the caller. Layouts: int64 words.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u64, store_u8, store_u64

# the head
INPUTS, OUTPUTS, ID_AT, ID_BYTES, DATA_BYTES = range(5)  # DATA_BYTES: of all inputs, where they lie end to end
HEAD_WORDS = 8
NO_ID = -1  # of ID_BYTES

# a row; the parameters that a place does not know are not read there
(
    NAME_AT, NAME_BYTES, DATATYPE, RANK, DIMS, SIZE, AT, BINARY, BY_DEFAULT, DTYPE_AT, DTYPE_BYTES, COMBINER_AT, COMBINER_BYTES,
    TIMEOUT_US,
) = (0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14, 15, 16)  # fmt: skip
ROW_WORDS = 18
MOST_RANK = 4
VERSION_AT, VERSION_BYTES = DIMS, DIMS + 1  # of the request's own row, as a name: what a model's version is called
NOT_GIVEN, NO, YES = range(3)  # of BINARY and BY_DEFAULT
NO_SIZE = -1  # of SIZE, the bytes of an input; AT is where they are, from the request's data on
MOST_SIZE = (1 << 31) - 1  # of a dimension, and of SIZE
MOST_TENSORS = 128  # inputs, and outputs
RECORD_BYTES = 8 * (HEAD_WORDS + ROW_WORDS * (1 + 2 * MOST_TENSORS))

# datatypes by number, from 1 on, and the bytes of an element; 0: any number
DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES",
)  # fmt: skip
WIDTHS = np.array([0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0], np.int64)

SCANNED, NOT_OF_FORM = 0, 1  # what a scanner says

MOST_STRUCTURE_BYTES = 8192
_LENGTH_BYTES = 2


@nb.njit(inline="always")
def get(at, i):  # type: ignore[no-untyped-def]
    """The word `i` at an address."""
    return nb.int64(load_u64(at, i))


@nb.njit(inline="always")
def put(at, i, value):  # type: ignore[no-untyped-def]
    store_u64(at, i, nb.uint64(value))


@nb.njit(inline="always")
def row_at(record, number):  # type: ignore[no-untyped-def]
    """The address of a row: 0 is the request's own, then come the inputs, then the outputs."""
    return record + 8 * (HEAD_WORDS + ROW_WORDS * number)


@nb.njit
def begin(record):  # type: ignore[no-untyped-def]
    """An empty record."""
    put(record, INPUTS, 0)
    put(record, OUTPUTS, 0)
    put(record, ID_BYTES, NO_ID)
    put(record, DATA_BYTES, 0)
    clear_row(row_at(record, 0))


@nb.njit
def clear_row(row):  # type: ignore[no-untyped-def]
    for i in range(ROW_WORDS):
        put(row, i, 0)
    put(row, SIZE, NO_SIZE)


@nb.njit(inline="always")
def _text(target, text, size):  # type: ignore[no-untyped-def]
    """Write the length of a text and the text. Returns what follows."""
    store_u8(target, 0, nb.uint8(size & 255))
    store_u8(target, 1, nb.uint8(size >> 8))
    copy_bytes(target + _LENGTH_BYTES, text, size)
    return target + _LENGTH_BYTES + size


@nb.njit
def write_structure(record, target):  # type: ignore[no-untyped-def]
    """Write a record's structure to memory of MOST_STRUCTURE_BYTES. Returns how many bytes it has; 0: it has no room."""
    inputs, outputs = get(record, INPUTS), get(record, OUTPUTS)
    room = MOST_STRUCTURE_BYTES
    for i in range(1 + inputs + outputs):
        row = row_at(record, i)
        room -= 16 + get(row, NAME_BYTES) + get(row, DTYPE_BYTES) + get(row, COMBINER_BYTES)
    own = row_at(record, 0)
    if room < get(own, VERSION_BYTES):
        return 0
    store_u8(target, 0, nb.uint8(get(own, BY_DEFAULT)))
    store_u8(target, 1, nb.uint8(inputs))
    at = _text(target + 2, get(own, COMBINER_AT), get(own, COMBINER_BYTES))
    at = _text(at, get(own, VERSION_AT), get(own, VERSION_BYTES))
    for i in range(inputs):
        row = row_at(record, 1 + i)
        store_u8(at, 0, nb.uint8(get(row, DATATYPE)))
        store_u8(at, 1, nb.uint8(get(row, RANK)))
        at = _text(at + 2, get(row, NAME_AT), get(row, NAME_BYTES))
    for i in range(outputs):
        row = row_at(record, 1 + inputs + i)
        store_u8(at, 0, nb.uint8(get(row, BINARY)))
        at = _text(at + 1, get(row, DTYPE_AT), get(row, DTYPE_BYTES))
        at = _text(at, get(row, COMBINER_AT), get(row, COMBINER_BYTES))
        at = _text(at, get(row, NAME_AT), get(row, NAME_BYTES))
    return at - target
