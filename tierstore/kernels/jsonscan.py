"""The scanner of inference requests of the Open Inference Protocol: their JSON into a record (`request_record.py`).

It knows the JSON that look-ups and predictions with binary tensors consist of, and nothing else:

    request      { "id": text, "parameters": {…}, "inputs": [tensor, …], "outputs": [tensor, …] }   in any order
    tensor       { "name": text, "datatype": text, "shape": [number, …], "parameters": {…} }
    parameters   binary_data_size, timeout: number; binary_data, binary_data_output: true or false; dtype, combiner: text
    text         printable ASCII without \\ and "; an id may have the escapes that JSON's writers write, and other characters
    number       digits, no zero before others

Other members, which the protocol passes over, are passed over where they are a text, an integer, true, false or null. A member that
comes twice, data in the JSON, shared memory, an escape in a name, an exponent: all else is not of this FORM, and is for the full
parser, which gets the same bytes. There is no guessing: what is SCANNED means the same to every reader of JSON.

Free functions of addresses, nogil. `tests/kernels/test_jsonscan.py` has a twin in Python, and compares.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import FIRST, compiled
from tierstore.kernels.raw import load_u8
from tierstore.kernels.request_record import (
    AT,
    BINARY,
    BY_DEFAULT,
    COMBINER_AT,
    COMBINER_BYTES,
    DATATYPE,
    DATATYPES,
    DIMS,
    DTYPE_AT,
    DTYPE_BYTES,
    ID_AT,
    ID_BYTES,
    INPUTS,
    MOST_RANK,
    MOST_TENSORS,
    NAME_AT,
    NAME_BYTES,
    NO,
    NO_SIZE,
    OUTPUTS,
    RANK,
    SIZE,
    TIMEOUT_US,
    YES,
    begin,
    clear_row,
    get,
    put,
    row_at,
    write_structure,
)

SCANNED, NOT_OF_FORM = 0, 1
MOST_TEXT_BYTES = 1 << 16
MOST_ID_BYTES = 256
_MOST_DIGITS = 18

_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST, _QUOTE, _COLON, _COMMA, _BACKSLASH = b'{}[]":,\\'
_MINUS, _ZERO, _NINE = b"-09"
_MOST_SIZE = (1 << 31) - 1  # of a dimension


def _names(*names: str) -> tuple[np.ndarray, np.ndarray]:
    """(bytes end to end, where each begins) of a list of names."""
    text = "".join(names).encode()
    return np.frombuffer(text, np.uint8), np.cumsum([0, *(len(name) for name in names)]).astype(np.int64)


# members, by place in their list
_REQUEST, _REQUEST_FROM = _names("id", "parameters", "inputs", "outputs")
_TENSOR, _TENSOR_FROM = _names("name", "datatype", "shape", "parameters", "data")
_PARAMETER, _PARAMETER_FROM = _names(
    "binary_data_size", "binary_data", "binary_data_output", "dtype", "combiner", "timeout",
    "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "classification",
)  # fmt: skip
_DATATYPE, _DATATYPE_FROM = _names(*DATATYPES)
_WORDS, _WORDS_FROM = _names("true", "false", "null")
_TRUE, _FALSE, _NULL = range(3)

# bytes of texts: 1 in any; 2 in ids too, those of UTF-8, which are checked apart
_IN_TEXT = np.zeros(256, np.uint8)
_IN_TEXT[32:127] = 1
_IN_TEXT[[_QUOTE, _BACKSLASH]] = 0
_ESCAPED = np.zeros(256, np.uint8)
_ESCAPED[np.frombuffer(b'"\\bfnrt', np.uint8)] = 1  # those that are written back as they came


@nb.njit(inline="always")
def _skip(text, i, n):  # type: ignore[no-untyped-def]
    while i < n:
        byte = load_u8(text, i)
        if byte != 32 and byte != 10 and byte != 13 and byte != 9:
            break
        i += 1
    return i


@nb.njit
def _which(text, at, size, names, begins):  # type: ignore[no-untyped-def]
    """The place of a text in a list of names, or -1."""
    for k in range(begins.size - 1):
        if begins[k + 1] - begins[k] != size:
            continue
        same = True
        for i in range(size):
            if load_u8(text, at + i) != names[begins[k] + i]:
                same = False
                break
        if same:
            return k
    return -1


@nb.njit(inline="always")
def _text_end(text, i, n):  # type: ignore[no-untyped-def]
    """The closing quote of the text whose opening one is at `i`; -1 where it is none of the form."""
    if i >= n or load_u8(text, i) != _QUOTE:
        return -1
    i += 1
    while i < n and _IN_TEXT[load_u8(text, i)] != 0:
        i += 1
    return i if i < n and load_u8(text, i) == _QUOTE else -1


@nb.njit
def is_utf8(at, n):  # type: ignore[no-untyped-def]
    """Whether `n` bytes are UTF-8 as Unicode has it: no surrogates, nothing overlong or beyond U+10FFFF."""
    i = 0
    while i < n:
        lead = nb.int64(load_u8(at, i))
        if lead < 0x80:
            i += 1
            continue
        if lead < 0xC2 or lead > 0xF4:
            return False
        more = 1 if lead < 0xE0 else 2 if lead < 0xF0 else 3
        if i + more >= n:
            return False
        second = nb.int64(load_u8(at, i + 1))
        low = 0xA0 if lead == 0xE0 else 0x90 if lead == 0xF0 else 0x80
        high = 0x9F if lead == 0xED else 0x8F if lead == 0xF4 else 0xBF
        if second < low or second > high:
            return False
        for k in range(2, more + 1):
            if load_u8(at, i + k) & 0xC0 != 0x80:
                return False
        i += more + 1
    return True


@nb.njit
def _id_end(text, i, n):  # type: ignore[no-untyped-def]
    """As `_text_end`, of an id."""
    if i >= n or load_u8(text, i) != _QUOTE:
        return -1
    begin_at, other = i + 1, False
    i += 1
    while i < n and load_u8(text, i) != _QUOTE:
        byte = load_u8(text, i)
        if byte == _BACKSLASH:
            i += 1
            if i >= n or _ESCAPED[load_u8(text, i)] == 0:
                return -1
        elif byte < 32 or byte == 127:
            return -1
        other = other or byte > 127
        i += 1
    if i >= n or i - begin_at > MOST_ID_BYTES or (other and not is_utf8(text + begin_at, i - begin_at)):
        return -1
    return i


@nb.njit
def _number(text, i, n):  # type: ignore[no-untyped-def]
    """(the number at `i`, what follows); (-1, i) where there is none."""
    first, value = i, nb.int64(0)
    while i < n:
        digit = nb.int64(load_u8(text, i))
        if digit < _ZERO or digit > _NINE:
            break
        value = value * 10 + digit - _ZERO
        i += 1
        if i - first > _MOST_DIGITS:
            return nb.int64(-1), i
    if i == first or (load_u8(text, first) == _ZERO and i - first > 1):
        return nb.int64(-1), i
    return value, i


@nb.njit
def _word(text, i, n):  # type: ignore[no-untyped-def]
    """(true, false or null at `i`, by place; what follows), or (-1, i)."""
    for k in range(3):
        size = _WORDS_FROM[k + 1] - _WORDS_FROM[k]
        if i + size <= n and _which(text, i, size, _WORDS, _WORDS_FROM) == k:
            return k, i + size
    return -1, i


@nb.njit
def _pass_over(text, i, n):  # type: ignore[no-untyped-def]
    """What follows the value at `i`, which nobody reads; -1 where it is none of the form."""
    if i >= n:
        return -1
    if load_u8(text, i) == _QUOTE:
        end = _text_end(text, i, n)
        return -1 if end < 0 else end + 1
    which, after = _word(text, i, n)
    if which >= 0:
        return after
    if load_u8(text, i) == _MINUS:
        i += 1
        if i < n and load_u8(text, i) == _ZERO:
            return -1
    value, after = _number(text, i, n)
    return -1 if value < 0 else after


@nb.njit
def _member(text, i, n):  # type: ignore[no-untyped-def]
    """(where the name of the member at `i` begins, its size, where its value begins); the last is -1 where there is none."""
    end = _text_end(text, i, n)
    if end < 0:
        return 0, 0, -1
    after = _skip(text, end + 1, n)
    if after >= n or load_u8(text, after) != _COLON:
        return 0, 0, -1
    return i + 1, end - i - 1, _skip(text, after + 1, n)


@nb.njit(inline="always")
def _is_there(text, i, n, byte):  # type: ignore[no-untyped-def]
    return i >= 0 and i < n and load_u8(text, i) == byte


@nb.njit
def _next(text, i, n, close):  # type: ignore[no-untyped-def]
    """(what comes behind a member or an element: the place of the next one, or of what follows `close`; whether it was `close`)."""
    i = _skip(text, i, n)
    if _is_there(text, i, n, _COMMA):
        return _skip(text, i + 1, n), False
    if _is_there(text, i, n, close):
        return i + 1, True
    return -1, True


@nb.njit
def _parameters(text, i, n, row):  # type: ignore[no-untyped-def]
    """Read parameters into a row. Returns what follows, or -1."""
    which, after = _word(text, i, n)
    if which == _NULL:
        return after
    if not _is_there(text, i, n, _OPEN):
        return -1
    i = _skip(text, i + 1, n)
    if _is_there(text, i, n, _CLOSE):
        return i + 1
    seen, over = 0, False
    while not over:
        at, size, i = _member(text, i, n)
        if i < 0:
            return -1
        which = _which(text, at, size, _PARAMETER, _PARAMETER_FROM)
        if which < 0:
            i = _pass_over(text, i, n)
        elif which > 5 or seen & (1 << which):
            return -1
        elif which == 0 or which == 5:
            value, i = _number(text, i, n)
            if value < 0:
                return -1
            put(row, SIZE if which == 0 else TIMEOUT_US, value)
        elif which < 3:
            value, i = _word(text, i, n)
            if value != _TRUE and value != _FALSE:
                return -1
            put(row, BINARY if which == 1 else BY_DEFAULT, YES if value == _TRUE else NO)
        else:
            end = _text_end(text, i, n)
            if end < 0:
                return -1
            put(
                row, DTYPE_AT if which == 3 else COMBINER_AT, text + i
            )  # with its quote: an empty one is told from none
            put(row, DTYPE_BYTES if which == 3 else COMBINER_BYTES, end - i)
            i = end + 1
        if which >= 0:
            seen |= 1 << which
        if i < 0:
            return -1
        i, over = _next(text, i, n, _CLOSE)
    return i


@nb.njit
def _shape(text, i, n, row):  # type: ignore[no-untyped-def]
    if not _is_there(text, i, n, _OPEN_LIST):
        return -1
    i, rank, over = _skip(text, i + 1, n), 0, False
    while not over:
        value, i = _number(text, i, n)
        if value < 0 or value > _MOST_SIZE or rank == MOST_RANK:
            return -1
        put(row, DIMS + rank, value)
        rank += 1
        i, over = _next(text, i, n, _CLOSE_LIST)
    put(row, RANK, rank)
    return i


@nb.njit
def _tensor(text, i, n, row):  # type: ignore[no-untyped-def]
    """Read a tensor's description into a row. Returns what follows, or -1."""
    clear_row(row)
    if not _is_there(text, i, n, _OPEN):
        return -1
    i, seen, over = _skip(text, i + 1, n), 0, False
    while not over:
        at, size, i = _member(text, i, n)
        if i < 0:
            return -1
        which = _which(text, at, size, _TENSOR, _TENSOR_FROM)
        if which > 3 or (which >= 0 and seen & (1 << which)):
            return -1
        if which < 0:
            i = _pass_over(text, i, n)
        elif which == 2:
            i = _shape(text, i, n, row)
        elif which == 3:
            i = _parameters(text, i, n, row)
        else:
            end = _text_end(text, i, n)
            if end <= i + 1:
                return -1
            if which == 0:
                put(row, NAME_AT, text + i + 1)
                put(row, NAME_BYTES, end - i - 1)
            else:
                put(row, DATATYPE, 1 + _which(text, i + 1, end - i - 1, _DATATYPE, _DATATYPE_FROM))
                if get(row, DATATYPE) == 0:
                    return -1
            i = end + 1
        if which >= 0:
            seen |= 1 << which
        if i < 0:
            return -1
        i, over = _next(text, i, n, _CLOSE)
    return i if seen & 1 else -1


@nb.njit
def _tensors(text, i, n, record, kind):  # type: ignore[no-untyped-def]
    """Read a list of tensors, inputs or outputs, into rows behind those that there are. Returns what follows, or -1."""
    if kind == OUTPUTS:
        which, after = _word(text, i, n)
        if which == _NULL:
            return after
    if not _is_there(text, i, n, _OPEN_LIST):
        return -1
    i, over = _skip(text, i + 1, n), False
    if _is_there(text, i, n, _CLOSE_LIST):
        return i + 1
    while not over:
        if get(record, kind) == MOST_TENSORS:
            return -1
        number = 1 + get(record, INPUTS) + get(record, OUTPUTS)
        i = _tensor(text, i, n, row_at(record, number))
        if i < 0:
            return -1
        put(record, kind, get(record, kind) + 1)
        i, over = _next(text, i, n, _CLOSE_LIST)
    return i


@nb.njit
def _finish_inputs(record):  # type: ignore[no-untyped-def]
    """Note where the bytes of each input are. False where one is not described whole."""
    at = nb.int64(0)
    for i in range(get(record, INPUTS)):
        row = row_at(record, 1 + i)
        size = get(row, SIZE)
        if size == NO_SIZE or size > _MOST_SIZE or get(row, DATATYPE) == 0 or get(row, RANK) == 0:
            return False
        put(row, AT, at)
        at += size
    return True


@nb.njit
def scan_at(text, n, record):  # type: ignore[no-untyped-def]
    """Fill a record from `n` bytes of JSON at `text`: SCANNED, or NOT_OF_FORM, and the record means nothing."""
    begin(record, text)
    own, i = row_at(record, 0), _skip(text, 0, n)
    if n > MOST_TEXT_BYTES or not _is_there(text, i, n, _OPEN):
        return NOT_OF_FORM
    i, seen, over = _skip(text, i + 1, n), 0, False
    inputs_at = outputs_at = -1
    while not over:
        at, size, i = _member(text, i, n)
        if i < 0:
            return NOT_OF_FORM
        which = _which(text, at, size, _REQUEST, _REQUEST_FROM)
        if which >= 0 and seen & (1 << which):
            return NOT_OF_FORM
        if which < 0:
            i = _pass_over(text, i, n)
        elif which == 0:
            word, after = _word(text, i, n)
            if word == _NULL:
                i = after
            else:
                end = _id_end(text, i, n)
                put(record, ID_AT, text + i + 1)
                put(record, ID_BYTES, end - i - 1)
                i = -1 if end < 0 else end + 1
        elif which == 1:
            i = _parameters(text, i, n, own)
        elif which == 2:
            inputs_at = i
            i = _tensors(text, i, n, record, INPUTS)
        elif inputs_at < 0:  # outputs that come before the inputs: read once more behind them
            outputs_at = i
            i = _tensors(text, i, n, record, OUTPUTS)
            put(record, OUTPUTS, 0)
        else:
            i = _tensors(text, i, n, record, OUTPUTS)
        if which >= 0:
            seen |= 1 << which
        if i < 0:
            return NOT_OF_FORM
        i, over = _next(text, i, n, _CLOSE)
    if i < 0 or _skip(text, i, n) != n or inputs_at < 0:
        return NOT_OF_FORM
    if outputs_at >= 0:
        _tensors(text, outputs_at, n, record, OUTPUTS)
    return SCANNED if _finish_inputs(record) else NOT_OF_FORM


@compiled(types.int64(types.int64, types.int64, types.int64, types.int64), when=FIRST)
def scan(text: Any, n: Any, record: Any, structure: Any) -> Any:
    """Scan `n` bytes of JSON at an address, for Python: the bytes of the structure, which is written; 0 where it is not of the form."""
    if scan_at(text, n, record) != SCANNED:
        return 0
    return write_structure(record, structure)
