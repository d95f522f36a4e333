"""The scanner of TensorFlow Serving's predict requests over gRPC: a serialized PredictRequest in, a record out (`wire/request_record.py`).

It reads only fields in the order of their numbers, as all writers write them:

    request      model_spec (name first), inputs… (key and value each), output_filter…
    tensor       dtype, tensor_shape of known sizes without names; then tensor_content, values of one kind, packed (strings one by one), or nothing

All other messages are not of this FORM, as those of `scan.py`: a scalar, strings in tensor_content, a field that comes twice. Inputs are in the order
of their names, as a map has none. What follows the name in `model_spec`, the version and the signature, is part of the structure as it came.

`read_at` finds the elements once the plan is known, because integers of 32 bits may stand for keys of 64. Where all of them are in place as they are,
AT counts from the message's first byte; otherwise all are written to other memory.

Free functions of addresses, nogil. `tests/wire/test_protobuf_predict.py` compares with protobuf.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_i64, load_u8, store_u8, store_u64
from tierstore.wire.json.scan import DATA_BYTES
from tierstore.wire.protobuf.scan import MOST_DESCRIPTION_BYTES, field_at
from tierstore.wire.protobuf.varint import varint_at
from tierstore.wire.request_record import (
    DATATYPES,
    MOST_RANK,
    MOST_SIZE,
    MOST_TENSORS,
    NOT_OF_FORM,
    SCANNED,
    WIDTHS,
    begin,
    clear_row,
    record_at,
    row_at,
    sort_inputs,
    write_structure,
)

_VARINT, _BYTES = 0, 2  # types on the wire
_SPEC, _INPUT, _OUTPUT = (number << 3 | _BYTES for number in range(1, 4))
_KEY, _VALUE = (number << 3 | _BYTES for number in range(1, 3))
_DTYPE, _SHAPE, _CONTENT = 1 << 3 | _VARINT, 2 << 3 | _BYTES, 4 << 3 | _BYTES
_SIZES, _SIZE = 2 << 3 | _BYTES, 1 << 3 | _VARINT
_NOTHING = 0  # of an input's `value_kind`, beside the tags of fields
_MOST_TAG = 17 << 3 | _BYTES
# by datatype: its number in TensorFlow, and the tag of the field with its elements one by one
_NUMBERS = {
    "BOOL": (10, 11), "UINT8": (4, 7), "UINT16": (17, 7), "UINT32": (22, 16), "UINT64": (23, 17), "INT8": (6, 7), "INT16": (5, 7),
    "INT32": (3, 7), "INT64": (9, 10), "FP16": (19, 13), "FP32": (1, 5), "FP64": (2, 6), "BYTES": (7, 8),
}  # fmt: skip
_OF_NUMBER = np.zeros(32, np.int64)  # by TensorFlow's number: the datatype
_OF_NUMBER[[number for number, _ in _NUMBERS.values()]] = [1 + DATATYPES.index(name) for name in _NUMBERS]
_TAGS = np.array([0, *(_NUMBERS[name][1] << 3 | _BYTES for name in DATATYPES)], np.int64)
_IS_FIXED = np.array(
    [False, *(name in ("FP32", "FP64") for name in DATATYPES)]
)  # on the wire elements are as they are in memory
_STRINGS = 1 + DATATYPES.index("BYTES")
_BOOL, _INT32, _INT64 = (1 + DATATYPES.index(name) for name in ("BOOL", "INT32", "INT64"))
_IS_SIGNED = np.array([False, *(name.startswith("INT") for name in DATATYPES)])
_MOST_TIMES = 8  # bytes of an element for each byte of a value on the wire, at most

_U64 = np.uint64


@nb.njit
def _tag_at(text, i, end):
    """(a tag of one or two bytes, what follows); 0 for another one."""
    tag, after = varint_at(text, i, end)
    return (tag, after) if after > 0 and tag <= _MOST_TAG else (nb.int64(0), after)


@nb.njit
def _shape(text, i, end, row):
    """Read a TensorShapeProto into a row. False for another form."""
    while i < end:
        tag, at, i = field_at(text, i, end)
        if i < 0 or tag != _SIZES or row.rank == MOST_RANK:
            return False
        size = nb.int64(0)
        if at < i:
            if load_u8(text, at) != _SIZE:
                return False
            size, at = varint_at(text, at + 1, i)
            if at != i or size > MOST_SIZE:
                return False
        row.dims[row.rank] = size
        row.rank += 1
    return row.rank > 0


@nb.njit
def _tensor(text, i, end, row):
    """Read a TensorProto into a row, except its elements. False for another form."""
    if end - i < 2 or load_u8(text, i) != _DTYPE or load_u8(text, i + 1) >= _OF_NUMBER.size:
        return False
    row.datatype = _OF_NUMBER[load_u8(text, i + 1)]
    if row.datatype == 0 or i + 2 == end:
        return False
    tag, at, after = field_at(text, i + 2, end)
    if after < 0 or tag != _SHAPE or not _shape(text, at, after, row):
        return False
    if after == end:
        row.value_kind = _NOTHING
        return True
    tag, at = _tag_at(text, after, end)
    if tag == _TAGS[_STRINGS] and row.datatype == _STRINGS:
        row.value_at, row.value_bytes, row.value_kind = text + after, end - after, tag
        return True
    if (tag != _CONTENT and tag != _TAGS[row.datatype]) or row.datatype == _STRINGS:
        return False
    size, at = varint_at(text, at, end)
    row.value_at, row.value_bytes, row.value_kind = text + at, size, tag
    return at > 0 and size == end - at and size <= MOST_SIZE


@nb.njit
def _input(text, i, end, row):
    """Read an entry of `inputs` into a row. False for another form."""
    clear_row(row)
    if i == end:
        return False
    tag, at, after = field_at(text, i, end)
    if after <= at or tag != _KEY or after == end:
        return False
    row.name_at, row.name_bytes = text + at, after - at
    tag, at, after = field_at(text, after, end)
    return tag == _VALUE and after == end and _tensor(text, at, end, row)


@nb.njit
def _spec(text, i, end, own):
    """Read a ModelSpec into the request's own row. False for another form."""
    if i == end:
        return False
    tag, at, after = field_at(text, i, end)
    if after < 0 or tag != _KEY:
        return False
    own.name_at, own.name_bytes = text + at, after - at
    own.version_at, own.version_bytes = text + after, end - after
    return True


@nb.njit
def scan_at(text, n, record):
    """Fill a record from a message of `n` bytes at `text`, except for elements. Returns SCANNED, or NOT_OF_FORM with the record undefined."""
    begin(record)
    i, last, described = nb.int64(0), nb.int64(0), n
    while i < n:
        tag, at, i = field_at(text, i, n)
        if i < 0 or tag < last or (tag == _SPEC and last == _SPEC):
            return NOT_OF_FORM
        last = tag
        if tag == _SPEC:
            if not _spec(text, at, i, row_at(record, 0)):
                return NOT_OF_FORM
        elif tag == _INPUT:
            if record.inputs == MOST_TENSORS:
                return NOT_OF_FORM
            record.inputs += 1
            row = row_at(record, record.inputs)
            if not _input(text, at, i, row):
                return NOT_OF_FORM
            described -= row.value_bytes
        elif tag == _OUTPUT and i > at and record.outputs < MOST_TENSORS:
            row = row_at(record, 1 + record.inputs + record.outputs)
            clear_row(row)
            row.name_at, row.name_bytes = text + at, i - at
            record.outputs += 1
        else:
            return NOT_OF_FORM
    if row_at(record, 0).name_bytes == 0 or described > MOST_DESCRIPTION_BYTES or not sort_inputs(record):
        return NOT_OF_FORM
    return SCANNED


# --- elements, once the plan is known


@nb.njit
def _count(row):
    """The number of elements that a row's shape says, at most MOST_SIZE + 1."""
    count = nb.int64(1)
    for axis in range(row.rank):
        count = min(count * row.dims[axis], nb.int64(MOST_SIZE + 1))
    return count


@nb.njit
def _long_varint_at(text, i, end):
    """(the 64 bits of the varint at `i`, what follows or -1), of any length that protobuf reads."""
    value, shift = _U64(0), _U64(0)
    while i < end and shift < _U64(70):
        byte = _U64(load_u8(text, i))
        i += 1
        value |= (byte & _U64(0x7F)) << shift
        if byte < _U64(0x80):
            return value, i if shift < _U64(63) or byte <= _U64(1) else nb.int64(-1)
        shift += _U64(7)
    return value, nb.int64(-1)


@nb.njit
def _read_varints(text, end, count, datatype, wide, target):
    """Write `count` packed integers, up to `end`, to the address `target`, `wide` bytes each. False: too few or too many, or one does not fit."""
    i, bits, signed = nb.int64(0), _U64(8 * WIDTHS[datatype]), _IS_SIGNED[datatype]
    half = (_U64(1) << (bits - _U64(1))) if signed else _U64(0)  # from the lowest number to 0
    most = _U64(0xFFFFFFFFFFFFFFFF) >> (_U64(64) - bits) if datatype != _BOOL else _U64(1)
    for k in range(count):
        value, i = _long_varint_at(text, i, end)
        if i < 0 or value + half > most:
            return False
        if wide == 8:
            store_u64(target, k, value)
        else:
            for byte in range(wide):
                store_u8(target, k * wide + byte, nb.uint8(value >> _U64(8 * byte)))
    return i == end


@nb.njit
def _read_strings(text, end, count, target):
    """Write `count` strings, a field each, to the address `target`, each behind its length. Returns where they end; 0: too few or too many."""
    i = nb.int64(0)
    for _ in range(count):
        if i == end or load_u8(text, i) != _TAGS[_STRINGS]:
            return nb.int64(0)
        _, at, i = field_at(text, i, end)
        if i < 0:
            return nb.int64(0)
        for k in range(4):
            store_u8(target, k, nb.uint8(((i - at) >> (8 * k)) & 255))
        copy_bytes(target + 4, text + at, i - at)
        target += 4 + i - at
    return target if i == end else nb.int64(0)


@nb.njit
def _widen(at, n, target):
    """Write `n` integers of 32 bits as integers of 64."""
    for k in range(n):
        value = _U64(0)
        for byte in range(4):
            value |= _U64(load_u8(at, 4 * k + byte)) << _U64(8 * byte)
        if value >> _U64(31) != _U64(0):
            value |= _U64(0xFFFFFFFF00000000)
        store_u64(target, k, value)


@nb.njit
def _read(row, datatype, target):
    """Write the elements of an input with this datatype to the address `target`. Returns where they end; 0 for another form."""
    count, had, at, size = _count(row), row.datatype, row.value_at, row.value_bytes
    if had != datatype and not (had == _INT32 and datatype == _INT64):
        return nb.int64(0)
    if row.value_kind == _NOTHING:
        return target if count == 0 else nb.int64(0)
    if had == _STRINGS:
        return _read_strings(at, size, count, target)
    wide = WIDTHS[datatype]
    if row.value_kind == _CONTENT or _IS_FIXED[had]:
        if size != count * WIDTHS[had]:
            return nb.int64(0)
        if had == datatype:
            copy_bytes(target, at, size)
        else:
            _widen(at, count, target)
    elif count > size or not _read_varints(at, size, count, had, wide, target):
        return nb.int64(0)
    return target + wide * count


@nb.njit
def read_at(message, datatypes, record, data):
    """Find the elements of the record's inputs, in `message` or, all of them, from the address `data` on (DATA_BYTES).

    `datatypes`: the address of the number of each input's datatype. False where they are not of the form.
    """
    in_place, room = True, nb.int64(0)
    for k in range(record.inputs):
        row = row_at(record, 1 + k)
        kept = row.value_kind == _CONTENT or (row.value_kind != _NOTHING and _IS_FIXED[row.datatype])
        in_place = in_place and kept and row.datatype == load_i64(datatypes, k)
        row.at, row.size = row.value_at - message, row.value_bytes
        room += (2 if kept else _MOST_TIMES) * row.value_bytes
    if in_place:
        return True
    if room > DATA_BYTES:
        return False
    begins = data
    for k in range(record.inputs):
        row, datatype = row_at(record, 1 + k), load_i64(datatypes, k)
        row.at = data - begins
        data = _read(row, datatype, data)
        if data == 0:
            return False
        row.datatype, row.size = datatype, data - begins - row.at
    record.decoded, record.data_bytes = record.inputs, data - begins
    return True


@compiled(types.int64(types.int64, types.int64, types.int64, types.int64), when=LAST)
def scan(text: Any, n: Any, record: Any, structure: Any) -> Any:
    """For Python: scan a message of `n` bytes at an address, and write the structure. Returns its bytes; 0 where the message is not of the form."""
    record = record_at(record)
    if scan_at(text, n, record) != SCANNED:
        return 0
    return write_structure(record, structure)


@compiled(types.boolean(types.int64, types.int64, types.int64, types.int64), when=LAST)
def read(message: Any, datatypes: Any, record: Any, data: Any) -> Any:
    """`read_at` for Python."""
    return read_at(message, datatypes, record_at(record), data)
