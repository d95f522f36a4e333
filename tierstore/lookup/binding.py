"""Binding: the sizes of one request put into the plan of its structure, as a run for `by_plan.run` and the head of its answer.

A variant holds what all requests of a structure share: which input has the keys of which look-up, the order of the answer, and the answer's text in
pieces, with numbers between them. `bind` checks the numbers of one request as the full parser and planner do; a request that fails goes to the full
parser, which reports the fault. `write_head` writes the head and the JSON backwards, because each length stands before what it counts.

Free functions of records and addresses, nogil.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import call_at, load_i64, load_u8, load_u32, load_u64, store_i64, store_u8
from tierstore.kernels.trainer_hashes import OF_INTEGERS, OF_ONE
from tierstore.kernels.xxh3 import hash_at
from tierstore.lookup import by_plan, plans, tensor_answer
from tierstore.lookup.answer_values import value_at
from tierstore.lookup.by_plan import MOST_BAGS, MOST_KEYS, MOST_WORK_BYTES, SCRATCH_BYTES, any_negative, first_call
from tierstore.lookup.plans import (
    AS_TRAINED,
    BAGS_OF_ROWS,
    CALL_BYTES,
    FOUND_ALONE,
    HASHED,
    MOD_SIGNED,
    NO_NEGATIVE,
    NOT_HASHED,
    NOWHERE,
    SEEDED,
    STRINGS,
    TENSORS_FRAMED,
    UNFRAMED,
    piece_at,
    planned_at,
    run_call_at,
    table_at,
)
from tierstore.wire.http1.date import DATE_BYTES
from tierstore.wire.json.text import MOST_ID_BYTES, is_utf8
from tierstore.wire.protobuf.varint import varint_bytes
from tierstore.wire.request_record import (
    MOST_TENSORS,
    NO_ID,
    WIDTHS,
    row_at,
)

NONE = -1

_MOST_STRING_BYTES, _MOST_COLLIDING = 1 << 18, 64  # limits on strings that are read in one turn
MOST_CALLS = MOST_TENSORS
RUN_BYTES = plans.RUN_BYTES + CALL_BYTES * MOST_CALLS
BOUND, LARGE, WRONG = range(3)  # results of `bind`: a run; a run that takes long; a request for the full parser

_STATUS = np.frombuffer(b"HTTP/1.1 200 OK\r\ndate: ", np.uint8)
_LENGTH = np.frombuffer(b"\r\ncontent-length: ", np.uint8)
_JSON_LENGTH = np.frombuffer(b"\r\ninference-header-content-length: ", np.uint8)
_TYPE = np.frombuffer(b"\r\ncontent-type: application/octet-stream", np.uint8)
_JSON_TYPE = np.frombuffer(b"\r\ncontent-type: application/json", np.uint8)
_CLOSE = np.frombuffer(b"\r\nconnection: close", np.uint8)
_END = np.frombuffer(b"\r\n\r\n", np.uint8)
ID = np.frombuffer(b',"id":"', np.uint8)
MOST_ADDED_BYTES = 512 + MOST_ID_BYTES  # the most bytes that an answer adds to its pieces, without the digits of values
MOST_DIGITS = 20
QUOTE, CLOSE_OBJECT, _ZERO = 34, 125, 48

_U64 = np.uint64


@nb.njit
def _elements(row):
    """The number of elements of an input; -1 where it is above the limit, or does not fit the number of bytes."""
    count, others = nb.int64(1), nb.int64(1)  # others: the product without dimensions of 0
    for i in range(row.rank):
        size = row.dims[i]
        count *= size
        others *= max(size, nb.int64(1))
        if others > 0x7FFFFFFF:
            return nb.int64(-1)
    width = WIDTHS[row.datatype]
    if width > 0 and count * width != row.size:
        return nb.int64(-1)
    return count


@nb.njit
def _is_ascii(at, n):
    bits = _U64(0)
    for i in range(n >> 3):
        bits |= load_u64(at, i)
    for i in range(n & ~7, n):
        bits |= _U64(load_u8(at, i))
    return bits & _U64(0x8080808080808080) == 0


@nb.njit
def _read_strings(at, size, n, codes, planned, table):
    """Write the codes of `n` strings, `size` bytes at an address; AS_TRAINED: the row numbers. False: malformed, or some string must be told apart by its text."""
    colliding, shared, end = table.colliding, table.colliding_at, at + size
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
        if planned.hash == AS_TRAINED:
            code = call_at(planned.bits, planned.mod, OF_ONE, at, length, 0, 0)
            if code < 0:
                return False
        else:
            code = nb.int64(hash_at(at, length, lanes))
        for k in range(colliding):
            if load_i64(shared, k) == code:
                return False
        store_i64(codes, i, code)
        at += length
    return at == end


@nb.njit
def _hash_codes(codes, n, planned):
    """Replace codes by row numbers, as `formats/key_hash.py` does."""
    how, mod, lanes = planned.hash, planned.mod, np.empty(8, np.uint64)
    for i in range(n):
        code = load_i64(codes, i)
        if how == SEEDED:
            store_i64(codes, i, code ^ planned.bits)
            code = nb.int64(hash_at(codes + 8 * i, 8, lanes))
        row = code % mod if how == MOD_SIGNED else nb.int64(_U64(code) % _U64(mod))
        store_i64(codes, i, row)


@nb.njit
def _make_codes(call, planned, row, tail, codes, table):
    """Write the codes of a call whose keys are strings or hashed, read from an input of the request. False: the full parser must check it."""
    n = call.keys_n
    if call.key_form == STRINGS:
        if row.size > _MOST_STRING_BYTES or not _read_strings(tail + row.at, row.size, n, codes, planned, table):
            return False
    else:
        if call.key_form == NO_NEGATIVE and any_negative(tail + row.at, n):
            return False
        copy_bytes(codes, tail + row.at, 8 * n)
        call.key_form = HASHED
        if planned.hash == AS_TRAINED:
            return call_at(planned.bits, planned.mod, OF_INTEGERS, codes, 0, n, codes) < 0
    if planned.hash != NOT_HASHED and planned.hash != AS_TRAINED:
        _hash_codes(codes, n, planned)
    return True


@nb.njit
def _same_sizes(one, other):
    for i in range(one.rank):  # noqa: SIM110 - for the compiler
        if one.dims[i] != other.dims[i]:
            return False
    return True


@nb.njit
def _bind_call(record, planned, call):
    """Fill a call, except where it writes its answer. Returns its number of keys, or -1."""
    copy_bytes(call, planned, CALL_BYTES)
    keys = row_at(record, 1 + planned.keys_of)
    n = _elements(keys)
    call.keys_at = keys.at
    call.keys_n = n
    call.bags = keys.dims[0]
    call.bag_keys = keys.dims[1] if keys.rank == 2 else 1
    call.starts_at = NOWHERE
    call.weights_at = NOWHERE
    if planned.offsets_of != NONE:
        offsets = row_at(record, 1 + planned.offsets_of)
        call.bags = offsets.dims[0]
        call.starts_at = offsets.at
    if planned.weights_of != NONE:
        weights = row_at(record, 1 + planned.weights_of)
        if not _same_sizes(keys, weights):
            return nb.int64(-1)
        call.weights_at = weights.at
    return n


@nb.njit
def bind(variant, view, record, tail, codes, most_bytes, run, values):
    """Fill a run (RUN_BYTES) and the values of its answer from the record of a request of the variant's structure.

    `tail` is where the request's binary data (its inputs) begins; `codes` has room for MOST_KEYS; `most_bytes` is the setting `max_response`. Returns
    BOUND, LARGE or WRONG.
    """
    for i in range(record.inputs):
        if _elements(row_at(record, 1 + i)) < 0:
            return WRONG
    planned, call = variant.calls, first_call(run)
    keys, bags, work, scratch, made = nb.int64(0), nb.int64(0), nb.int64(0), nb.int64(0), nb.int64(0)
    run.calls = variant.planned_calls
    run.codes_at = codes
    run.window = 0
    for _ in range(variant.planned_calls):
        n = _bind_call(record, planned, call)
        if n < 0:
            return WRONG
        kind, table = call.kind, table_at(view.tables, call.table)
        dim = table.dim
        keys += n
        if kind == BAGS_OF_ROWS or planned.offsets_of != NONE:
            bags += call.bags
        if kind == BAGS_OF_ROWS:
            scratch = max(scratch, by_plan.bag_scratch(call, n, dim))
        elif kind == FOUND_ALONE:
            scratch = max(scratch, 4 * n * dim)
        if kind in (BAGS_OF_ROWS, FOUND_ALONE):
            work += 4 * n * dim
        if call.key_form == STRINGS or planned.hash != NOT_HASHED:
            row = row_at(record, 1 + planned.keys_of)
            if keys > MOST_KEYS or not _make_codes(call, planned, row, tail, codes + 8 * made, table):
                return WRONG
            call.keys_at = 8 * made
            made += n
        planned = planned_at(planned, 1)
        call = run_call_at(call, 1)
    run.keys = keys
    run.scratch = scratch
    run.work_bytes = work
    data = _place_outputs(variant, record, run, values)
    run.answer_bytes = data
    if work + data > most_bytes:
        return WRONG
    if keys > MOST_KEYS or bags > MOST_BAGS or work + data > MOST_WORK_BYTES or scratch > SCRATCH_BYTES:
        return WRONG if made > 0 else LARGE
    return BOUND


@nb.njit
def _place_outputs(variant, record, run, values):
    """Lay the outputs end to end, and note their places and sizes. Returns their total bytes."""
    planned, call = variant.calls, first_call(run)
    for _ in range(variant.planned_calls):
        keys, n = row_at(record, 1 + planned.keys_of), call.keys_n
        rows, found = planned.rows_to, planned.found_to
        if rows != NONE:
            value = value_at(values, rows)
            pooled = call.kind == BAGS_OF_ROWS
            value.first = call.bags if pooled else keys.dims[0]
            value.second = keys.dims[1]
            value.bytes = (call.bags if pooled else n) * load_i64(variant.output_bytes, rows)
        if found != NONE:
            value = value_at(values, found)
            value.first, value.second = keys.dims[0], keys.dims[1]
            value.bytes = n
        planned = planned_at(planned, 1)
        call = run_call_at(call, 1)
    at, alignment = nb.int64(0), variant.alignment
    framed = variant.framed if variant.scoring == 0 else UNFRAMED  # rows for a graph are not part of the answer
    for i in range(variant.outputs):
        value = value_at(values, i)
        size = value.bytes
        if framed != UNFRAMED:
            at += tensor_answer.frame_bytes(variant, values, i) if framed == TENSORS_FRAMED else 1 + varint_bytes(size)
        value.at = at
        at += (size + alignment - 1) & -alignment
    if framed == TENSORS_FRAMED:
        at += tensor_answer.ending_bytes(variant)
    planned, call = variant.calls, first_call(run)
    for _ in range(variant.planned_calls):
        rows, found = planned.rows_to, planned.found_to
        call.out_at = value_at(values, rows).at if rows != NONE else 0
        call.found_at = value_at(values, found).at if found != NONE else NOWHERE
        planned = planned_at(planned, 1)
        call = run_call_at(call, 1)
    return at


@nb.njit(inline="always")
def _before(end, text):
    """Write a text that ends at the address `end`. Returns where it begins."""
    copy_bytes(end - text.size, nb.int64(text.ctypes.data), text.size)
    return end - text.size


@nb.njit
def _digits_before(end, value):
    while True:
        end -= 1
        store_u8(end, 0, nb.uint8(_ZERO + value % 10))
        value //= 10
        if value == 0:
            return end


@nb.njit
def head_before(at, text_bytes, data_bytes, closing, date):
    """Write the head of an answer backwards from the address `at`, where its body begins: `text_bytes` of JSON. Returns where the head begins.

    `data_bytes`: the bytes of the binary data behind the JSON; NONE: there can be none. `date`, `closing`: as for `write_head`.
    """
    at = _before(at, _END)
    if closing:
        at = _before(at, _CLOSE)
    if data_bytes == NONE:
        at = _before(at, _JSON_TYPE)
        at = _digits_before(at, text_bytes)
    else:
        at = _before(at, _TYPE)
        at = _digits_before(at, text_bytes)
        at = _before(at, _JSON_LENGTH)
        at = _digits_before(at, text_bytes + data_bytes)
    at = _before(at, _LENGTH) - DATE_BYTES
    copy_bytes(at, date, DATE_BYTES)
    return _before(at, _STATUS)


@nb.njit
def write_head(variant, record, values, data_bytes, closing, date, end):
    """Write an answer's head and JSON backwards from the address `end`, where `data_bytes` of data follow. Returns where the head begins.

    `values` come from `bind`, `record` has the id, `date` is the address of the date. With `closing` the head says that the connection ends.
    """
    at = end - 1
    store_u8(at, 0, nb.uint8(CLOSE_OBJECT))
    size = record.id_bytes
    if size != NO_ID:
        at -= 1
        store_u8(at, 0, nb.uint8(QUOTE))
        at -= size
        copy_bytes(at, record.id_at, size)
        at = _before(at, ID)
    pieces = variant.texts
    for i in range(variant.pieces - 1, -1, -1):
        piece = piece_at(pieces, i)
        if piece.value != NONE:
            at = _digits_before(at, load_i64(values, piece.value))
        at -= piece.bytes
        copy_bytes(at, piece.at, piece.bytes)
    return head_before(at, end - at, data_bytes, closing, date)
