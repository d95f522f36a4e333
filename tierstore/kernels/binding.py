"""A request's sizes put into the plan of its structure: a run that `lookupplan.run` can do, and the head of its answer.

A variant says what requests of a structure have in common: which input has the keys of which look-up, what is answered
in which order, and the text of the answer in pieces, between which numbers go. `bind` checks the numbers of one request as
the full parser and planner do; what does not pass is for those, who say what is wrong. `write_head` writes the head and the
JSON of the answer, from its end to its beginning, as each length stands before what it counts.

Free functions of addresses, nogil. Layouts: int64 words.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels import lookupplan
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.httpdate import DATE_BYTES
from tierstore.kernels.jsontext import MOST_ID_BYTES, is_utf8
from tierstore.kernels.lookupplan import (
    ANSWER_BYTES,
    BAG_KEYS,
    BAGS,
    BAGS_OF_ROWS,
    CALL_WORDS,
    CALLS,
    CODES_AT,
    COLLIDING,
    COLLIDING_AT,
    FOUND_ALONE,
    FOUND_AT,
    KEY_FORM,
    KEYS,
    KEYS_AT,
    KEYS_N,
    KIND,
    MOST_BAGS,
    MOST_KEYS,
    MOST_WORK_BYTES,
    NOWHERE,
    OUT_AT,
    RUN_WORDS,
    SCRATCH,
    SCRATCH_BYTES,
    STARTS_AT,
    STRINGS,
    TABLE,
    TABLE_DIM,
    TABLE_WORDS,
    VIEW_WORDS,
    WEIGHTS_AT,
    WORK_BYTES,
)
from tierstore.kernels.raw import load_u8, load_u32, load_u64, store_u8
from tierstore.kernels.request_record import (
    AT,
    DATATYPE,
    DIMS,
    ID_AT,
    ID_BYTES,
    INPUTS,
    MOST_TENSORS,
    NO_ID,
    RANK,
    SIZE,
    WIDTHS,
    get,
    put,
    row_at,
)
from tierstore.kernels.varint import varint_bytes
from tierstore.kernels.xxh3 import hash_at

# a variant's words; COUNTS is word 6 of any variant. HEAD_AT: of an answer that is ready, a refusal say; look-ups have none
# FRAMED: whether each output has a tag and its length before its bytes, as in a message (`protowrite.py`)
HEAD_AT, HEAD_BYTES, DATE_AT, FRAMED, OUTPUTS = 1, 2, 3, 4, 5
PLANNED_CALLS, CALLS_FROM, OUTPUTS_FROM, PIECES, PIECES_FROM = range(7, 12)
# ALIGNMENT: of outputs, a power of two; SCORING_AT: of a prediction, whose outputs are rows for its graph (`scoring.py`), or 0
ALIGNMENT, SCORING_AT = 12, 13
VARIANT_WORDS = 14
# a planned call: the words of a call, filled where they are the same for all requests, then which inputs and outputs are its own
KEYS_OF, OFFSETS_OF, WEIGHTS_OF, ROWS_TO, FOUND_TO = range(CALL_WORDS, CALL_WORDS + 5)
PLANNED_WORDS = CALL_WORDS + 5
NONE = -1
# an output is a word: the bytes of an element, of a row or of one `found`
# a piece of the answer's text, and the value that comes behind it
PIECE_AT, PIECE_BYTES, PIECE_VALUE = range(3)
PIECE_WORDS = 3
# values of an output: its first two sizes, its bytes, and where they are, from the answer's data on
OUTPUT_BYTES, OUTPUT_AT = 2, 3
VALUE_WORDS = 4

_MOST_STRING_BYTES, _MOST_COLLIDING = 1 << 18, 64  # of what is read between two other requests
MOST_CALLS = MOST_TENSORS
RUN_BYTES = 8 * (RUN_WORDS + CALL_WORDS * MOST_CALLS)
# behind those of outputs: sizes that have names, bytes of scores
MOST_NAMES = 64
NAMES_FROM = VALUE_WORDS * MOST_TENSORS
SCORES_FROM = NAMES_FROM + MOST_NAMES
VALUES_BYTES = 8 * (SCORES_FROM + MOST_TENSORS)

BOUND, LARGE, WRONG = range(3)  # of `bind`: a run; one that takes long; for the full check

_STATUS = np.frombuffer(b"HTTP/1.1 200 OK\r\ndate: ", np.uint8)
_LENGTH = np.frombuffer(b"\r\ncontent-length: ", np.uint8)
_JSON_LENGTH = np.frombuffer(b"\r\ninference-header-content-length: ", np.uint8)
_TYPE = np.frombuffer(b"\r\ncontent-type: application/octet-stream", np.uint8)
_CLOSE = np.frombuffer(b"\r\nconnection: close", np.uint8)
_END = np.frombuffer(b"\r\n\r\n", np.uint8)
_ID = np.frombuffer(b',"id":"', np.uint8)
MOST_ADDED_BYTES = 512 + MOST_ID_BYTES  # to the pieces of an answer, beside the digits of values
MOST_DIGITS = 20
_QUOTE, _CLOSE_OBJECT, _ZERO = 34, 125, 48

_U64 = np.uint64


@nb.njit
def _elements(row):  # type: ignore[no-untyped-def]
    """How many elements an input has; -1 where it has more than fit, or not as many as its bytes say."""
    count, others = nb.int64(1), nb.int64(1)  # others: without sizes of 0
    for i in range(get(row, RANK)):
        size = get(row, DIMS + i)
        count *= size
        others *= max(size, nb.int64(1))
        if others > 0x7FFFFFFF:
            return nb.int64(-1)
    width = WIDTHS[get(row, DATATYPE)]
    if width > 0 and count * width != get(row, SIZE):
        return nb.int64(-1)
    return count


@nb.njit
def _is_ascii(at, n):  # type: ignore[no-untyped-def]
    bits = _U64(0)
    for i in range(n >> 3):
        bits |= load_u64(at, i)
    for i in range(n & ~7, n):
        bits |= _U64(load_u8(at, i))
    return bits & _U64(0x8080808080808080) == 0


@nb.njit
def _read_strings(at, size, n, codes, table):  # type: ignore[no-untyped-def]
    """Write the codes of `n` strings, which take `size` bytes at an address. False: they are none, or only their text can tell them apart."""
    colliding, shared, end = get(table, COLLIDING), get(table, COLLIDING_AT), at + size
    if colliding > _MOST_COLLIDING:
        return False
    lanes = np.empty(8, np.uint64)
    for i in range(n):
        if end - at < 4:
            return False
        length = nb.int64(load_u32(at, 0))
        at += 4
        if end - at < length or not (_is_ascii(at, length) or is_utf8(at, length)):
            return False
        code = nb.int64(hash_at(at, length, lanes))
        for k in range(colliding):
            if get(shared, k) == code:
                return False
        put(codes, i, code)
        at += length
    return at == end


@nb.njit
def _same_sizes(one, other):  # type: ignore[no-untyped-def]
    for i in range(get(one, RANK)):  # noqa: SIM110 - for the compiler
        if get(one, DIMS + i) != get(other, DIMS + i):
            return False
    return True


@nb.njit
def _bind_call(record, planned, call):  # type: ignore[no-untyped-def]
    """Fill a call but for where it answers. Returns how many keys it has, or -1."""
    copy_bytes(call, planned, 8 * CALL_WORDS)
    keys = row_at(record, 1 + get(planned, KEYS_OF))
    n = _elements(keys)
    put(call, KEYS_AT, get(keys, AT))
    put(call, KEYS_N, n)
    put(call, BAGS, get(keys, DIMS))
    put(call, BAG_KEYS, get(keys, DIMS + 1) if get(keys, RANK) == 2 else 1)
    put(call, STARTS_AT, NOWHERE)
    put(call, WEIGHTS_AT, NOWHERE)
    if get(planned, OFFSETS_OF) != NONE:
        offsets = row_at(record, 1 + get(planned, OFFSETS_OF))
        put(call, BAGS, get(offsets, DIMS))
        put(call, STARTS_AT, get(offsets, AT))
    if get(planned, WEIGHTS_OF) != NONE:
        weights = row_at(record, 1 + get(planned, WEIGHTS_OF))
        if not _same_sizes(keys, weights):
            return nb.int64(-1)
        put(call, WEIGHTS_AT, get(weights, AT))
    return n


@nb.njit
def bind(variant, view, record, tail, codes, most_bytes, run, values):  # type: ignore[no-untyped-def]
    """Fill a run of RUN_BYTES and the VALUES_BYTES of its answer, from the record of a request of the variant's structure.

    `tail` is where the request's binary data begins, in which its inputs lie; `codes` has room for MOST_KEYS; `most_bytes` is the setting `max_response`.
    Returns BOUND, LARGE or WRONG.
    """
    for i in range(get(record, INPUTS)):
        if _elements(row_at(record, 1 + i)) < 0:
            return WRONG
    planned, call = get(variant, CALLS_FROM), run + 8 * RUN_WORDS
    keys, bags, work, scratch, strings = nb.int64(0), nb.int64(0), nb.int64(0), nb.int64(0), nb.int64(0)
    put(run, CALLS, get(variant, PLANNED_CALLS))
    put(run, CODES_AT, codes)
    for _ in range(get(variant, PLANNED_CALLS)):
        n = _bind_call(record, planned, call)
        if n < 0:
            return WRONG
        kind, table = get(call, KIND), view + 8 * (VIEW_WORDS + TABLE_WORDS * get(call, TABLE))
        dim = get(table, TABLE_DIM)
        keys += n
        if kind == BAGS_OF_ROWS or get(planned, OFFSETS_OF) != NONE:
            bags += get(call, BAGS)
        if kind == BAGS_OF_ROWS:
            scratch = max(scratch, lookupplan.bag_scratch(call, n, dim))
        elif kind == FOUND_ALONE:
            scratch = max(scratch, 4 * n * dim)
        if kind in (BAGS_OF_ROWS, FOUND_ALONE):
            work += 4 * n * dim
        if get(call, KEY_FORM) == STRINGS:
            row = row_at(record, 1 + get(planned, KEYS_OF))
            if (
                keys > MOST_KEYS
                or get(row, SIZE) > _MOST_STRING_BYTES
                or not _read_strings(tail + get(row, AT), get(row, SIZE), n, codes + 8 * strings, table)
            ):
                return WRONG
            put(call, KEYS_AT, 8 * strings)
            strings += n
        planned += 8 * PLANNED_WORDS
        call += 8 * CALL_WORDS
    put(run, KEYS, keys)
    put(run, SCRATCH, scratch)
    put(run, WORK_BYTES, work)
    data = _place_outputs(variant, record, run, values)
    put(run, ANSWER_BYTES, data)
    if work + data > most_bytes:
        return WRONG
    if keys > MOST_KEYS or bags > MOST_BAGS or work + data > MOST_WORK_BYTES or scratch > SCRATCH_BYTES:
        return WRONG if strings > 0 else LARGE
    return BOUND


@nb.njit
def _place_outputs(variant, record, run, values):  # type: ignore[no-untyped-def]
    """Lay the outputs end to end, and note where they are and their sizes. Returns the bytes of all."""
    planned, call = get(variant, CALLS_FROM), run + 8 * RUN_WORDS
    for _ in range(get(variant, PLANNED_CALLS)):
        keys, n = row_at(record, 1 + get(planned, KEYS_OF)), get(call, KEYS_N)
        rows, found = get(planned, ROWS_TO), get(planned, FOUND_TO)
        if rows != NONE:
            value = values + 8 * VALUE_WORDS * rows
            pooled = get(call, KIND) == BAGS_OF_ROWS
            put(value, 0, get(call, BAGS) if pooled else get(keys, DIMS))
            put(value, 1, get(keys, DIMS + 1))
            put(value, OUTPUT_BYTES, (get(call, BAGS) if pooled else n) * get(get(variant, OUTPUTS_FROM), rows))
        if found != NONE:
            value = values + 8 * VALUE_WORDS * found
            put(value, 0, get(keys, DIMS))
            put(value, 1, get(keys, DIMS + 1))
            put(value, OUTPUT_BYTES, n)
        planned += 8 * PLANNED_WORDS
        call += 8 * CALL_WORDS
    at, framed, alignment = nb.int64(0), get(variant, FRAMED) != 0, get(variant, ALIGNMENT)
    for i in range(get(variant, OUTPUTS)):
        value = values + 8 * VALUE_WORDS * i
        size = get(value, OUTPUT_BYTES)
        if framed:
            at += 1 + varint_bytes(size)
        put(value, OUTPUT_AT, at)
        at += (size + alignment - 1) & -alignment
    planned, call = get(variant, CALLS_FROM), run + 8 * RUN_WORDS
    for _ in range(get(variant, PLANNED_CALLS)):
        rows, found = get(planned, ROWS_TO), get(planned, FOUND_TO)
        put(call, OUT_AT, get(values, VALUE_WORDS * rows + OUTPUT_AT) if rows != NONE else 0)
        put(call, FOUND_AT, get(values, VALUE_WORDS * found + OUTPUT_AT) if found != NONE else NOWHERE)
        planned += 8 * PLANNED_WORDS
        call += 8 * CALL_WORDS
    return at


@nb.njit(inline="always")
def _before(end, text):  # type: ignore[no-untyped-def]
    """Write a text that ends where `end` says. Returns where it begins."""
    copy_bytes(end - text.size, nb.int64(text.ctypes.data), text.size)
    return end - text.size


@nb.njit
def _digits_before(end, value):  # type: ignore[no-untyped-def]
    while True:
        end -= 1
        store_u8(end, 0, nb.uint8(_ZERO + value % 10))
        value //= 10
        if value == 0:
            return end


@nb.njit
def write_head(variant, record, values, data_bytes, closing, date, end):  # type: ignore[no-untyped-def]
    """Write an answer's head and its JSON, which end at the address `end`, where `data_bytes` follow. Returns where they begin.

    `values` are those of `bind`, `record` has the id, `date` is the address of the date. With `closing` the head ends the connection.
    """
    at = end - 1
    store_u8(at, 0, nb.uint8(_CLOSE_OBJECT))
    size = get(record, ID_BYTES)
    if size != NO_ID:
        at -= 1
        store_u8(at, 0, nb.uint8(_QUOTE))
        at -= size
        copy_bytes(at, get(record, ID_AT), size)
        at = _before(at, _ID)
    pieces = get(variant, PIECES_FROM)
    for i in range(get(variant, PIECES) - 1, -1, -1):
        piece = pieces + 8 * PIECE_WORDS * i
        if get(piece, PIECE_VALUE) != NONE:
            at = _digits_before(at, get(values, get(piece, PIECE_VALUE)))
        at -= get(piece, PIECE_BYTES)
        copy_bytes(at, get(piece, PIECE_AT), get(piece, PIECE_BYTES))
    text_bytes = end - at
    at = _before(at, _END)
    if closing:
        at = _before(at, _CLOSE)
    at = _before(at, _TYPE)
    at = _digits_before(at, text_bytes)
    at = _before(at, _JSON_LENGTH)
    at = _digits_before(at, text_bytes + data_bytes)
    at = _before(at, _LENGTH) - DATE_BYTES
    copy_bytes(at, date, DATE_BYTES)
    return _before(at, _STATUS)
