"""The scanner of JSON inference requests (Open Inference Protocol): JSON in, a record out (`wire/request_record.py`).

It reads only the JSON of look-ups and predictions with binary tensors:

    request      { "id": text, "parameters": {…}, "inputs": [tensor, …], "outputs": [tensor, …] }   in any order
    tensor       { "name": text, "datatype": text, "shape": [number, …], "parameters": {…} }
    parameters   binary_data_size, timeout: number; binary_data, binary_data_output: true or false; dtype, combiner: text
    text         printable ASCII without \\ and "; an id may have the escapes that JSON's writers write, and other characters
    number       digits, without leading zeros

Unknown members, which the protocol ignores, are skipped if they are a text, an integer, true, false or null. All other JSON is not of this FORM: a
member that comes twice, data in the JSON, shared memory, an escape in a name, an exponent. Then the full parser gets the same bytes. Nothing is
guessed: SCANNED JSON means the same to every reader of JSON.

Free functions of addresses, nogil. `tests/wire/test_json_scan.py` compares with a twin in Python.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import HTTP, compiled
from tierstore.wire.json.text import (
    CLOSE,
    CLOSE_LIST,
    FALSE,
    NULL,
    OPEN,
    OPEN_LIST,
    TRUE,
    id_end,
    is_there,
    member_at,
    names_of,
    next_at,
    number_at,
    pass_over,
    place_of,
    skip_blanks,
    text_end,
    word_at,
)
from tierstore.wire.request_record import (
    DATATYPES,
    MOST_RANK,
    MOST_SIZE,
    MOST_TENSORS,
    NO,
    NO_SIZE,
    NOT_OF_FORM,
    SCANNED,
    YES,
    begin,
    clear_row,
    record_at,
    row_at,
    write_structure,
)

MOST_TEXT_BYTES = 1 << 16

# known members, by their place in a list
_REQUEST, _REQUEST_FROM = names_of("id", "parameters", "inputs", "outputs")
_TENSOR, _TENSOR_FROM = names_of("name", "datatype", "shape", "parameters", "data")
_PARAMETER, _PARAMETER_FROM = names_of(
    "binary_data_size", "binary_data", "binary_data_output", "dtype", "combiner", "timeout",
    "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification",
)  # fmt: skip
_DATATYPE, _DATATYPE_FROM = names_of(*DATATYPES)


@nb.njit
def _parameters(text, i, n, row):  # type: ignore[no-untyped-def]
    """Read parameters into a row. Returns what follows, or -1."""
    which, after = word_at(text, i, n)
    if which == NULL:
        return after
    if not is_there(text, i, n, OPEN):
        return -1
    i = skip_blanks(text, i + 1, n)
    if is_there(text, i, n, CLOSE):
        return i + 1
    seen, over = 0, False
    while not over:
        at, size, i = member_at(text, i, n)
        if i < 0:
            return -1
        which = place_of(text, at, size, _PARAMETER, _PARAMETER_FROM)
        if which < 0:
            i = pass_over(text, i, n)
        elif which > 5 or seen & (1 << which):
            return -1
        elif which == 0 or which == 5:
            value, i = number_at(text, i, n)
            if value < 0:
                return -1
            if which == 0:
                row.size = value
            else:
                row.timeout_us = value
        elif which < 3:
            value, i = word_at(text, i, n)
            if value != TRUE and value != FALSE:
                return -1
            if which == 1:
                row.binary = YES if value == TRUE else NO
            else:
                row.by_default = YES if value == TRUE else NO
        else:
            end = text_end(text, i, n)
            if end < 0:
                return -1
            # with its quote, so that an empty text differs from none
            if which == 3:
                row.dtype_at, row.dtype_bytes = text + i, end - i
            else:
                row.combiner_at, row.combiner_bytes = text + i, end - i
            i = end + 1
        if which >= 0:
            seen |= 1 << which
        if i < 0:
            return -1
        i, over = next_at(text, i, n, CLOSE)
    return i


@nb.njit
def _shape(text, i, n, row):  # type: ignore[no-untyped-def]
    if not is_there(text, i, n, OPEN_LIST):
        return -1
    i, rank, over = skip_blanks(text, i + 1, n), 0, False
    while not over:
        value, i = number_at(text, i, n)
        if value < 0 or value > MOST_SIZE or rank == MOST_RANK:
            return -1
        row.dims[rank] = value
        rank += 1
        i, over = next_at(text, i, n, CLOSE_LIST)
    row.rank = rank
    return i


@nb.njit
def _tensor(text, i, n, row):  # type: ignore[no-untyped-def]
    """Read a tensor's description into a row. Returns what follows, or -1."""
    clear_row(row)
    if not is_there(text, i, n, OPEN):
        return -1
    i, seen, over = skip_blanks(text, i + 1, n), 0, False
    while not over:
        at, size, i = member_at(text, i, n)
        if i < 0:
            return -1
        which = place_of(text, at, size, _TENSOR, _TENSOR_FROM)
        if which > 3 or (which >= 0 and seen & (1 << which)):
            return -1
        if which < 0:
            i = pass_over(text, i, n)
        elif which == 2:
            i = _shape(text, i, n, row)
        elif which == 3:
            i = _parameters(text, i, n, row)
        else:
            end = text_end(text, i, n)
            if end <= i + 1:
                return -1
            if which == 0:
                row.name_at = text + i + 1
                row.name_bytes = end - i - 1
            else:
                row.datatype = 1 + place_of(text, i + 1, end - i - 1, _DATATYPE, _DATATYPE_FROM)
                if row.datatype == 0:
                    return -1
            i = end + 1
        if which >= 0:
            seen |= 1 << which
        if i < 0:
            return -1
        i, over = next_at(text, i, n, CLOSE)
    return i if seen & 1 else -1


@nb.njit
def _tensors(text, i, n, record, of_outputs):  # type: ignore[no-untyped-def]
    """Read a list of tensors, inputs or outputs, into the rows behind the existing ones. Returns what follows, or -1."""
    if of_outputs:
        which, after = word_at(text, i, n)
        if which == NULL:
            return after
    if not is_there(text, i, n, OPEN_LIST):
        return -1
    i, over = skip_blanks(text, i + 1, n), False
    if is_there(text, i, n, CLOSE_LIST):
        return i + 1
    while not over:
        if (record.outputs if of_outputs else record.inputs) == MOST_TENSORS:
            return -1
        number = 1 + record.inputs + record.outputs
        i = _tensor(text, i, n, row_at(record, number))
        if i < 0:
            return -1
        if of_outputs:
            record.outputs += 1
        else:
            record.inputs += 1
        i, over = next_at(text, i, n, CLOSE_LIST)
    return i


@nb.njit
def _finish_inputs(record):  # type: ignore[no-untyped-def]
    """Note where the bytes of each input are. False if the description of an input is incomplete."""
    at = nb.int64(0)
    for i in range(record.inputs):
        row = row_at(record, 1 + i)
        size = row.size
        if size == NO_SIZE or size > MOST_SIZE or row.datatype == 0 or row.rank == 0:
            return False
        row.at = at
        at += size
    record.data_bytes = at
    return True


@nb.njit
def scan_at(text, n, record):  # type: ignore[no-untyped-def]
    """Fill a record from `n` bytes of JSON at `text`. Returns SCANNED, or NOT_OF_FORM with the record undefined."""
    begin(record)
    own, i = row_at(record, 0), skip_blanks(text, 0, n)
    if n > MOST_TEXT_BYTES or not is_there(text, i, n, OPEN):
        return NOT_OF_FORM
    i, seen, over = skip_blanks(text, i + 1, n), 0, False
    inputs_at = outputs_at = -1
    while not over:
        at, size, i = member_at(text, i, n)
        if i < 0:
            return NOT_OF_FORM
        which = place_of(text, at, size, _REQUEST, _REQUEST_FROM)
        if which >= 0 and seen & (1 << which):
            return NOT_OF_FORM
        if which < 0:
            i = pass_over(text, i, n)
        elif which == 0:
            word, after = word_at(text, i, n)
            if word == NULL:
                i = after
            else:
                end = id_end(text, i, n)
                record.id_at = text + i + 1
                record.id_bytes = end - i - 1
                i = -1 if end < 0 else end + 1
        elif which == 1:
            i = _parameters(text, i, n, own)
        elif which == 2:
            inputs_at = i
            i = _tensors(text, i, n, record, False)
        elif inputs_at < 0:  # outputs before inputs: read them again after the inputs
            outputs_at = i
            i = _tensors(text, i, n, record, True)
            record.outputs = 0
        else:
            i = _tensors(text, i, n, record, True)
        if which >= 0:
            seen |= 1 << which
        if i < 0:
            return NOT_OF_FORM
        i, over = next_at(text, i, n, CLOSE)
    if i < 0 or skip_blanks(text, i, n) != n or inputs_at < 0:
        return NOT_OF_FORM
    if outputs_at >= 0:
        _tensors(text, outputs_at, n, record, True)
    return SCANNED if _finish_inputs(record) else NOT_OF_FORM


@compiled(types.int64(types.int64, types.int64, types.int64, types.int64), when=HTTP)
def scan(text: Any, n: Any, record: Any, structure: Any) -> Any:
    """For Python: scan `n` bytes of JSON at an address, and write the structure. Returns its bytes; 0 where the JSON is not of the form."""
    record = record_at(record)
    if scan_at(text, n, record) != SCANNED:
        return 0
    return write_structure(record, structure)
