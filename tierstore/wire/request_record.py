"""The record of an inference request: what the request says, as numbers, whatever its protocol.

Each protocol has a scanner that fills it (`wire/json/scan.py`, `wire/protobuf/scan.py`); `lookup/binding.py` reads it. It has a head, then rows of
one form: one for the request, one for each input, one for each requested output. Names and texts are addresses in the request's bytes. Requests that
need different plans differ in their *structure*: names, datatypes, ranks and options of outputs, in order. Sizes, the id and the timeout are values,
and not part of it.

Free functions of records, nogil; the memory belongs to the caller.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u8, store_u8
from tierstore.kernels.records import at, define
from tierstore.kernels.sysio import clear_bytes

MOST_RANK = 4
MOST_TENSORS = 1024  # inputs, and outputs
RECORD = define("RequestRecord", "an inference request, followed by its own row, one row for each input, and one for each output", {
    "inputs outputs": "the numbers of inputs and outputs",
    "id_at id_bytes": "the place and the bytes of its id; NO_ID: it has none",
    "data_bytes": "the bytes of all inputs, which lie end to end",
    "decoded": "the number of inputs whose elements are not taken as they came but were written to other memory: either all or none",
    "depth": "of the lists of elements that are being read: how many are around an element; 0: it is not known yet",
    "sizes counts": ((np.int64, (MOST_RANK,)), "the entries of each list, by its depth, and the entries that have come"),
    "columns": ((np.int64, (MOST_TENSORS,)), "of rows as objects of JSON: the number of the input for each member, in the order of the text"),
})  # fmt: skip
record_at = at(RECORD)
NO_ID = -1  # of `id_bytes`
ROW = define("RequestRow", "the description of a request, an input or an output", {
    "name_at name_bytes": "the place and the bytes of the name; in the own row of a gRPC request the model's",
    "datatype": "the datatype, counted from 1 in `DATATYPES`; 0: none is given",
    "rank": "the number of dimensions",
    "dims": ((np.int64, (MOST_RANK,)), "the dimensions"),
    "size at": "the bytes of an input, and their offset in the request's data",
    "binary by_default": "NOT_GIVEN, NO or YES",
    "dtype_at dtype_bytes combiner_at combiner_bytes": "the places and the bytes of the parameters dtype and combiner",
    "timeout_us": "the timeout, in the request's own row",
    "version_at version_bytes": "the place and the bytes of the model's version, in the request's own row",
    "value_at value_bytes value_kind": "of requests whose plan says the datatypes: the place, the bytes and the kind of an input's elements, which are read then",
    "starts": "of an input whose elements are bags: the number of the input with their starts, which are counted when they are read",
})  # fmt: skip
_row_at, _ROW_BYTES = at(ROW), ROW.bytes
NOT_GIVEN, NO, YES = range(3)  # of `binary` and `by_default`
NO_SIZE = -1  # of `size`
MOST_SIZE = (1 << 31) - 1  # of a dimension, and of `size`
RECORD_BYTES = RECORD.bytes + ROW.bytes * (2 + 2 * MOST_TENSORS)  # one more row, for sorting

# datatypes by number, from 1 on, and the bytes of an element; 0: variable
DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES",
)  # fmt: skip
WIDTHS = np.array([0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0], np.int64)

SCANNED, NOT_OF_FORM = 0, 1  # results of a scanner

MOST_STRUCTURE_BYTES = 1 << 17
_LENGTH_BYTES = 3


@nb.njit
def row_at(record, number):
    """A row of the record: 0 is the request's, then the inputs', then the outputs'."""
    return _row_at(record_at(record, 1), number)


@nb.njit
def begin(record):
    """Make a record empty."""
    record.inputs = 0
    record.outputs = 0
    record.id_bytes = NO_ID
    record.data_bytes = 0
    record.decoded = 0
    clear_row(row_at(record, 0))


@nb.njit
def clear_row(row):
    clear_bytes(row, _ROW_BYTES)
    row.size = NO_SIZE


@nb.njit
def _name_order(one, other):
    """Below 0, 0 or above: the order of two rows by their names."""
    for i in range(min(one.name_bytes, other.name_bytes)):
        difference = nb.int64(load_u8(one.name_at, i)) - nb.int64(load_u8(other.name_at, i))
        if difference != 0:
            return difference
    return one.name_bytes - other.name_bytes


@nb.njit
def sort_inputs(record):
    """Put the inputs in the order of their names (Shell sort: writers have few orders, most of them this one). False if two have the same name."""
    n = record.inputs
    first, kept = row_at(record, 1), row_at(record, 1 + 2 * MOST_TENSORS)
    gap = 1
    while 9 * gap < 4 * n:
        gap = 9 * gap // 4 + 1
    while n > 1:
        for i in range(gap, n):
            if _name_order(_row_at(first, i - gap), _row_at(first, i)) <= 0:
                continue
            copy_bytes(kept, _row_at(first, i), _ROW_BYTES)
            k = i
            while k >= gap and _name_order(_row_at(first, k - gap), kept) > 0:
                copy_bytes(_row_at(first, k), _row_at(first, k - gap), _ROW_BYTES)
                k -= gap
            copy_bytes(_row_at(first, k), kept, _ROW_BYTES)
        if gap == 1:
            break
        gap = max(4 * gap // 9, 1)
    for i in range(1, n):  # noqa: SIM110 - for the compiler
        if _name_order(_row_at(first, i - 1), _row_at(first, i)) == 0:
            return False
    return True


@nb.njit(inline="always")
def _text(target, text, size):
    """Write a text, its length first. Returns what follows."""
    for i in range(_LENGTH_BYTES):
        store_u8(target, i, nb.uint8((size >> (8 * i)) & 255))
    copy_bytes(target + _LENGTH_BYTES, text, size)
    return target + _LENGTH_BYTES + size


@nb.njit
def write_structure(record, target):
    """Write a record's structure to memory of MOST_STRUCTURE_BYTES. Returns its bytes; 0: it does not fit."""
    inputs, outputs = record.inputs, record.outputs
    room = MOST_STRUCTURE_BYTES
    for i in range(1 + inputs + outputs):
        row = row_at(record, i)
        room -= 16 + row.name_bytes + row.dtype_bytes + row.combiner_bytes
    own = row_at(record, 0)
    if room < own.version_bytes:
        return 0
    store_u8(target, 0, nb.uint8(own.by_default))
    store_u8(target, 1, nb.uint8(inputs & 255))
    store_u8(target, 2, nb.uint8(inputs >> 8))
    at = _text(target + 3, own.combiner_at, own.combiner_bytes)
    at = _text(at, own.version_at, own.version_bytes)
    for i in range(inputs):
        row = row_at(record, 1 + i)
        store_u8(at, 0, nb.uint8(row.datatype))
        store_u8(at, 1, nb.uint8(row.rank))
        at = _text(at + 2, row.name_at, row.name_bytes)
    for i in range(outputs):
        row = row_at(record, 1 + inputs + i)
        store_u8(at, 0, nb.uint8(row.binary))
        at = _text(at + 1, row.dtype_at, row.dtype_bytes)
        at = _text(at, row.combiner_at, row.combiner_bytes)
        at = _text(at, row.name_at, row.name_bytes)
    return at - target
