"""The scanner of gRPC inference requests (Open Inference Protocol): a serialized ModelInferRequest in, a record out (`wire/request_record.py`).

It reads only the fields of look-ups and predictions with raw tensors, in the order of their numbers, as all writers write them:

    request      model_name, model_version, id, parameters…, inputs…, outputs…, raw_input_contents… (one for each input)
    input        name, datatype, shape (packed or not), parameters…, empty contents
    output       name, parameters…
    parameter    a name and one value of any type; timeout: a number; dtype, combiner: text

Other parameters, which the protocol ignores, are skipped. All other messages are not of this FORM: a field of another number, type or order, a field
that comes twice, a varint that is longer than needed, text outside the structure that is not UTF-8, contents with data, shared memory. Then protobuf
itself gets the same bytes. Nothing is guessed: a SCANNED message means the same to every reader of protobuf.

The elements of an input stay in place: AT counts from the message's first byte. The row of the request has the model's name. A `dtype` or `combiner`
begins with the last byte of its length, so that an empty text differs from none.

Free functions of addresses, nogil. `tests/wire/test_protobuf_scan.py` compares with protobuf.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.raw import load_u8
from tierstore.kernels.records import place, text_at
from tierstore.wire.json.text import MOST_ID_BYTES, is_utf8, names_of, place_of
from tierstore.wire.protobuf.varint import varint_at
from tierstore.wire.request_record import (
    DATATYPES,
    MOST_RANK,
    MOST_SIZE,
    MOST_TENSORS,
    NOT_OF_FORM,
    SCANNED,
    begin,
    clear_row,
    record_at,
    row_at,
    write_structure,
)

MOST_DESCRIPTION_BYTES = 1 << 18  # of a message without its raw tensors

_VARINT, _FIXED64, _BYTES = 0, 1, 2  # types on the wire
# tags, a byte each: a field's number and type
_MODEL, _VERSION, _ID, _PARAMETERS, _INPUT, _OUTPUT, _RAW = (number << 3 | _BYTES for number in range(1, 8))
_NAME, _DATATYPE, _SHAPE, _INPUT_PARAMETERS, _CONTENTS = (number << 3 | _BYTES for number in range(1, 6))
_ONE_SIZE = 3 << 3 | _VARINT
_OUTPUT_PARAMETERS = 2 << 3 | _BYTES
_KEY, _VALUE = 1 << 3 | _BYTES, 2 << 3 | _BYTES
_BOOL, _INT64, _TEXT, _DOUBLE, _UINT64 = (
    1 << 3 | _VARINT,
    2 << 3 | _VARINT,
    3 << 3 | _BYTES,
    4 << 3 | _FIXED64,
    5 << 3 | _VARINT,
)
_MOST_NUMBER_BYTES = 10

_READ, _READ_FROM = names_of(
    "dtype", "combiner", "timeout",
    "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification",
)  # fmt: skip
_DTYPE, _COMBINER, _TIMEOUT = range(3)
_NAMES, _NAMES_FROM = names_of(*DATATYPES)


@nb.njit(inline="always")
def field_at(text, i, end):
    """A length-delimited field at `i`: (tag, where its content begins, where it ends); the end is -1 where there is none."""
    tag = nb.int64(load_u8(text, i))
    if tag & 7 != _BYTES:
        return tag, i + 1, nb.int64(-1)
    size, at = varint_at(text, i + 1, end)
    if at < 0 or size > end - at:
        return tag, at, nb.int64(-1)
    return tag, at, at + size


@nb.njit
def _is_number(text, i, end):
    """Whether the bytes from `i` to `end` are one varint of at most 64 bits."""
    size = end - i
    if size < 1 or size > _MOST_NUMBER_BYTES:
        return False
    for k in range(i, end - 1):
        if load_u8(text, k) < 0x80:
            return False
    last = load_u8(text, end - 1)
    return last < 0x80 and (last != 0 or size == 1) and (size < _MOST_NUMBER_BYTES or last == 1)


@nb.njit
def _is_value(text, i, end):
    """Whether the bytes from `i` to `end` are the value of an unknown parameter."""
    if i == end:
        return True
    tag = nb.int64(load_u8(text, i))
    if tag == _TEXT:
        _, at, after = field_at(text, i, end)
        return after == end and is_utf8(text + at, end - at)
    if tag == _DOUBLE:
        return end - i == 9
    if tag == _BOOL:
        return end - i == 2 and load_u8(text, i + 1) < 2
    return tag in (_INT64, _UINT64) and _is_number(text, i + 1, end)


@nb.njit
def _text_value(text, i, end, target):
    """Note a parameter's text value in `target` (address and bytes). False for another type, or a second value."""
    if i == end or target.bytes != 0:
        return False
    tag, begins, after = field_at(text, i, end)
    target.at, target.bytes = text + begins - 1, end - begins + 1
    return tag == _TEXT and after == end and is_utf8(text + begins, end - begins)


@nb.njit
def _parameter(text, i, end, row):
    """Read the parameter from `i` to `end` into a row. False for another form."""
    if i == end:
        return False
    tag, key, key_end = field_at(text, i, end)
    if tag != _KEY or key_end < 0 or key_end == end:
        return False
    tag, value, value_end = field_at(text, key_end, end)
    if tag != _VALUE or value_end != end:
        return False
    which = place_of(text, key, key_end - key, _READ, _READ_FROM)
    if which < 0:
        return is_utf8(text + key, key_end - key) and _is_value(text, value, end)
    if which == _DTYPE:
        return _text_value(text, value, end, text_at(place(row, "dtype_at")))
    if which == _COMBINER:
        return _text_value(text, value, end, text_at(place(row, "combiner_at")))
    if which != _TIMEOUT or value == end or row.timeout_us != 0:
        return False
    tag = nb.int64(load_u8(text, value))
    number, after = varint_at(text, value + 1, end)
    row.timeout_us = number
    return tag in (_INT64, _UINT64) and after == end


@nb.njit
def _sizes(text, i, end, row, most):
    """Add at most `most` sizes, from `i` to `end`, to a row's shape. Returns what follows, or -1."""
    while i < end and most > 0:
        size, i = varint_at(text, i, end)
        rank = row.rank
        if i < 0 or size > MOST_SIZE or rank == MOST_RANK:
            return nb.int64(-1)
        row.dims[rank] = size
        row.rank = rank + 1
        most -= 1
    return i


@nb.njit
def _input(text, i, end, row):
    """Read the input from `i` to `end` into a row, except where its elements are. False for another form."""
    clear_row(row)
    last = nb.int64(0)
    while i < end:
        tag = nb.int64(load_u8(text, i))
        number = tag >> 3
        if number < last or (number == last and tag in (_NAME, _DATATYPE)):
            return False
        last = number
        if tag == _ONE_SIZE:
            after = _sizes(text, i + 1, end, row, 1)
            if after <= i + 1:
                return False
            i = after
            continue
        _, at, i = field_at(text, i, end)
        if i < 0:
            return False
        if tag == _NAME:
            row.name_at = text + at
            row.name_bytes = i - at
        elif tag == _DATATYPE:
            row.datatype = 1 + place_of(text, at, i - at, _NAMES, _NAMES_FROM)
        elif tag == _SHAPE:
            if _sizes(text, at, i, row, MOST_RANK + 1) != i:
                return False
        elif tag == _INPUT_PARAMETERS:
            if not _parameter(text, at, i, row):
                return False
        elif tag != _CONTENTS or at != i:
            return False
    return row.name_bytes > 0 and row.datatype > 0 and row.rank > 0


@nb.njit
def _output(text, i, end, row):
    """Read the requested output from `i` to `end` into a row. False for another form."""
    clear_row(row)
    while i < end:
        tag, at, i = field_at(text, i, end)
        if i < 0:
            return False
        if tag == _NAME and row.name_at == 0:
            row.name_at = text + at
            row.name_bytes = i - at
        elif tag != _OUTPUT_PARAMETERS or not _parameter(text, at, i, row):
            return False
    return row.name_bytes > 0


@nb.njit
def _repeated(text, tag, at, end, record, raws):
    """Read a repeated field of the request. False for another form."""
    inputs, outputs = record.inputs, record.outputs
    if tag == _RAW:
        if raws == inputs or end - at > MOST_SIZE:
            return False
        row = row_at(record, 1 + raws)
        row.at = at
        row.size = end - at
        return True
    if end > MOST_DESCRIPTION_BYTES:
        return False
    if tag == _PARAMETERS:
        return _parameter(text, at, end, row_at(record, 0))
    if tag == _INPUT:
        record.inputs = inputs + 1
        return inputs < MOST_TENSORS and _input(text, at, end, row_at(record, 1 + inputs))
    record.outputs = outputs + 1
    return tag == _OUTPUT and outputs < MOST_TENSORS and _output(text, at, end, row_at(record, 1 + inputs + outputs))


@nb.njit
def scan_at(text, n, record):
    """Fill a record from a message of `n` bytes at `text`. Returns SCANNED, or NOT_OF_FORM with the record undefined."""
    begin(record)
    own, i, last, raws = row_at(record, 0), nb.int64(0), nb.int64(0), 0
    while i < n:
        tag, at, i = field_at(text, i, n)
        if i < 0 or tag < last or (tag == last and tag < _PARAMETERS):
            return NOT_OF_FORM
        last = tag
        if tag == _MODEL:
            own.name_at = text + at
            own.name_bytes = i - at
        elif tag == _VERSION:
            own.version_at = text + at
            own.version_bytes = i - at
        elif tag == _ID:
            if i - at > MOST_ID_BYTES or not is_utf8(text + at, i - at):
                return NOT_OF_FORM
            if i > at:
                record.id_at = text + at
                record.id_bytes = i - at
        else:
            if not _repeated(text, tag, at, i, record, raws):
                return NOT_OF_FORM
            raws += tag == _RAW
    return SCANNED if raws == record.inputs else NOT_OF_FORM


@compiled(types.int64(types.int64, types.int64, types.int64, types.int64), when=LAST)
def scan(text: Any, n: Any, record: Any, structure: Any) -> Any:
    """For Python: scan a message of `n` bytes at an address, and write the structure. Returns its bytes; 0 where the message is not of the form."""
    record = record_at(record)
    if scan_at(text, n, record) != SCANNED:
        return 0
    return write_structure(record, structure)
