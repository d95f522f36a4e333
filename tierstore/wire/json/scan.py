"""The scanner of JSON inference requests (Open Inference Protocol): JSON in, a record out (`wire/request_record.py`).

It reads only the JSON of look-ups and predictions whose tensors all are binary, or all are in the JSON:

    request      { "id": text, "parameters": {…}, "inputs": [tensor, …], "outputs": [tensor, …] }   in any order
    tensor       { "name": text, "datatype": text, "shape": [number, …], "parameters": {…}, "data": [element, …] }
    data         of an input: elements as `elements.py` reads them, flat, or in lists as its shape says
    parameters   binary_data_size, timeout: number; binary_data, binary_data_output: true or false; dtype, combiner: text
    text         printable ASCII without \\ and "; an id may have the escapes that JSON's writers write, and other characters
    number       digits, without leading zeros

Unknown members, which the protocol ignores, are skipped if they are a text, an integer, true, false or null. All other JSON is not of this FORM: a
member that comes twice, shared memory, an escape in a name, a size with an exponent. Then the full parser gets the same bytes. Nothing is guessed:
SCANNED JSON means the same to every reader of JSON.

Free functions of addresses, nogil. `tests/wire/test_json_scan.py` compares with a twin in Python.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import HTTP, compiled, compiled_c
from tierstore.kernels.raw import call_at
from tierstore.wire.json.elements import GROWTH, elements_at, pass_lists
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

MOST_TEXT_BYTES = 1 << 19  # of numbers some 25,000; a reactor reads it in about a millisecond
DATA_BYTES = GROWTH * MOST_TEXT_BYTES  # the most that elements in it take

# known members, by their place in a list
_REQUEST, _REQUEST_FROM = names_of("id", "parameters", "inputs", "outputs")
_TENSOR, _TENSOR_FROM = names_of("name", "datatype", "shape", "parameters", "data")
_PARAMETER, _PARAMETER_FROM = names_of(
    "binary_data_size", "binary_data", "binary_data_output", "dtype", "combiner", "timeout",
    "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification",
)  # fmt: skip
_DATATYPE, _DATATYPE_FROM = names_of(*DATATYPES)


@nb.njit
def _parameters(text, i, n, row):
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
def _shape(text, i, n, row):
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
def _is_shaped(row, record):
    """Whether the lists that were read are flat, or of the shape in the row. Binding compares the number of elements."""
    if record.depth > 1:
        if record.depth != row.rank:
            return False
        for k in range(row.rank):
            if record.sizes[k] != row.dims[k]:
                return False
    return True


@nb.njit
def _elements(text, i, n, row, data, record):
    """Read the elements of an input, whose datatype is known, behind those of others. Returns what follows, or -1."""
    if row.size != NO_SIZE:
        return -1  # binary data too
    at = record.data_bytes
    i, end = elements_at(text, i, n, row.datatype, data + at, record)
    row.at, row.size = at, end - data - at
    record.data_bytes = end - data
    record.decoded += 1
    return i


@nb.njit
def _tensor(text, i, n, row, data, record):
    """Read a tensor into a row, its elements to the address `data`; 0: it must have none. Returns what follows, or -1."""
    clear_row(row)
    if not is_there(text, i, n, OPEN):
        return -1
    i, seen, over = skip_blanks(text, i + 1, n), 0, False
    later = -1  # where elements are that came before their datatype
    while not over:
        at, size, i = member_at(text, i, n)
        if i < 0:
            return -1
        which = place_of(text, at, size, _TENSOR, _TENSOR_FROM)
        if (which == 4 and data == 0) or (which >= 0 and seen & (1 << which)):
            return -1
        if which < 0:
            i = pass_over(text, i, n)
        elif which == 2:
            i = _shape(text, i, n, row)
        elif which == 3:
            size_of_data, row.size = row.size, NO_SIZE
            i = _parameters(text, i, n, row)
            if size_of_data != NO_SIZE:
                if row.size != NO_SIZE:
                    return -1  # both data and the size of binary data
                row.size = size_of_data
        elif which == 4:
            if row.datatype != 0:
                i = _elements(text, i, n, row, data, record)
            else:
                later = i
                _, _, i = pass_lists(text, i, n)
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
    if seen & 1 == 0:
        return -1
    if seen & 16:
        if later >= 0 and (row.datatype == 0 or _elements(text, later, n, row, data, record) < 0):
            return -1
        if not _is_shaped(row, record):
            return -1
    return i


@nb.njit
def _tensors(text, i, n, record, of_outputs, data):
    """Read a list of tensors, inputs or outputs, into the rows behind the existing ones; elements of inputs to `data`. Returns what follows, or -1."""
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
        i = _tensor(text, i, n, row_at(record, number), nb.int64(0) if of_outputs else data, record)
        if i < 0:
            return -1
        if of_outputs:
            record.outputs += 1
        else:
            record.inputs += 1
        i, over = next_at(text, i, n, CLOSE_LIST)
    return i


@nb.njit
def _finish_inputs(record):
    """Note where the bytes of each binary input are. False if the description of an input is incomplete, or only some are binary."""
    if record.decoded != 0 and record.decoded != record.inputs:
        return False
    at = nb.int64(0)
    for i in range(record.inputs):
        row = row_at(record, 1 + i)
        size = row.size
        if size == NO_SIZE or size > MOST_SIZE or row.datatype == 0 or row.rank == 0:
            return False
        if record.decoded == 0:
            row.at = at
        at += size
    record.data_bytes = at
    return True


@nb.njit
def _scan(text, n, record, data):
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
            i = _tensors(text, i, n, record, False, data)
        elif inputs_at < 0:  # outputs before inputs: read them again after the inputs
            outputs_at = i
            i = _tensors(text, i, n, record, True, data)
            record.outputs = 0
        else:
            i = _tensors(text, i, n, record, True, data)
        if which >= 0:
            seen |= 1 << which
        if i < 0:
            return NOT_OF_FORM
        i, over = next_at(text, i, n, CLOSE)
    if i < 0 or skip_blanks(text, i, n) != n or inputs_at < 0:
        return NOT_OF_FORM
    if outputs_at >= 0:
        _tensors(text, outputs_at, n, record, True, data)
    return SCANNED if _finish_inputs(record) else NOT_OF_FORM


@compiled_c(types.int64(*[types.int64] * 6), when=HTTP)
def fill(text: Any, n: Any, record: Any, data: Any, _a: Any, _b: Any) -> Any:
    """Fill a record from `n` bytes of JSON at `text`, and GROWTH times as many bytes at `data` with the elements that are in it.

    Returns SCANNED, or NOT_OF_FORM with the record undefined.
    """
    return _scan(text, n, record_at(record), data)


@compiled(types.int64(*[types.int64] * 6), when=HTTP)
def scan_with(filler: Any, text: Any, n: Any, record: Any, data: Any, structure: Any) -> Any:
    """For Python: scan with the scanner at the address `filler`, and write the structure, MOST_STRUCTURE_BYTES. Returns its bytes, or 0."""
    if call_at(filler, text, n, record, data, 0, 0) != SCANNED:
        return 0
    return write_structure(record_at(record), structure)


def scan(text: int, n: int, record: int, data: int, structure: int) -> int:
    """`fill` for Python, and the structure, MOST_STRUCTURE_BYTES. Returns its bytes; 0 where the JSON is not of the form."""
    return int(scan_with(fill.address, text, n, record, data, structure))
