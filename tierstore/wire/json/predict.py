"""The scanner of predict requests in TensorFlow Serving's JSON: JSON in, a record out (`wire/request_record.py`).

    request      { "signature_name": text, "output_filter": [text, …], "inputs": columns }    in any order
                 { …, "instances": rows }
    columns      { text: list, … } or a list: of an input each, flat or nested
    rows         [ { text: value, … }, … ]: every row has the same names in the same order; or the list of the only input's values
    value        an element, or a list, flat or nested

The JSON says neither datatypes nor shapes. So `fill` finds names and depths, and passes over elements: that is the structure. `read` then reads them
with the datatypes of the plan. Inputs are in the order of their names. Where lists in rows have different lengths they are a bag each, flat,
and an input <name>.offsets follows. An input without a name has an empty one.

Unknown members are skipped as `scan.py` skips them, and other JSON is not of this FORM: base64, escapes in names, rows of different names or depths,
bags with weights that differ in length, offsets in rows.

Free functions of addresses, nogil. `tests/wire/test_json_predict.py` compares with a twin in Python.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import HTTP, compiled_c
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_i64, load_u8, store_i64
from tierstore.kernels.sysio import same_bytes
from tierstore.wire.json.elements import GROWTH, element_at, elements_at, pass_lists
from tierstore.wire.json.scan import MOST_TEXT_BYTES, scan_with
from tierstore.wire.json.text import (
    BACKSLASH,
    CLOSE,
    CLOSE_LIST,
    COMMA,
    NULL,
    OPEN,
    OPEN_LIST,
    QUOTE,
    is_there,
    member_at,
    names_of,
    next_at,
    pass_over,
    place_of,
    skip_blanks,
    text_end,
    word_at,
)
from tierstore.wire.request_record import (
    DATATYPES,
    MOST_RANK,
    MOST_TENSORS,
    NOT_OF_FORM,
    SCANNED,
    WIDTHS,
    begin,
    clear_row,
    record_at,
    row_at,
    sort_inputs,
)

_REQUEST, _REQUEST_FROM = names_of("signature_name", "output_filter", "inputs", "instances")
_OFFSETS = np.frombuffer(b".offsets", np.uint8)
_POINT = ord(".")
_INT64, _BYTES = 1 + DATATYPES.index("INT64"), 1 + DATATYPES.index("BYTES")
COLUMNS, ROWS = 1, 2  # of the own row's `by_default`
# kinds of an input's elements: lists at its place; in each row's object, of one size; the same, as bags; lists at its place, as bags; the starts of bags
_LISTS, _IN_ROWS, _BAGS_IN_ROWS, _BAGS, _STARTS = range(5)


@nb.njit
def _add(record):
    """The row of one more input; 0: there is no room."""
    if record.inputs == MOST_TENSORS:
        return row_at(record, 0)
    record.inputs += 1
    row = row_at(record, record.inputs)
    clear_row(row)
    return row


@nb.njit
def _column(text, i, n, row):
    """Note the lists at `i` as an input's elements. Returns what follows, or -1."""
    depth, _, after = pass_lists(text, i, n)
    row.rank, row.value_at, row.value_bytes, row.value_kind = depth, text + i, after - i, _LISTS
    return nb.int64(-1) if depth > MOST_RANK else after


@nb.njit
def _columns(text, i, n, record):
    """Read `inputs`. Returns what follows, or -1."""
    if is_there(text, i, n, OPEN_LIST):
        return _column(text, i, n, _add(record))
    if not is_there(text, i, n, OPEN):
        return nb.int64(-1)
    i, over = skip_blanks(text, i + 1, n), False
    while not over:
        at, size, i = member_at(text, i, n)
        if i < 0 or size == 0 or record.inputs == MOST_TENSORS:
            return nb.int64(-1)
        row = _add(record)
        row.name_at, row.name_bytes = text + at, size
        i = _column(text, i, n, row)
        if i < 0:
            return i
        i, over = next_at(text, i, n, CLOSE)
    return i


@nb.njit
def _pass_value(text, i, n):
    """Skip an element or lists. Returns (depth, entries, what follows or -1); an element has a depth of 0."""
    if is_there(text, i, n, OPEN_LIST):
        return pass_lists(text, i, n)
    if is_there(text, i, n, QUOTE):
        i += 1
        while i < n and load_u8(text, i) != QUOTE:
            if load_u8(text, i) < 32 or load_u8(text, i) == BACKSLASH:
                return 0, nb.int64(0), nb.int64(-1)
            i += 1
        return 0, nb.int64(1), i + 1 if i < n else nb.int64(-1)
    first = i
    while i < n:
        byte = load_u8(text, i)
        if byte <= 32 or byte in (COMMA, CLOSE, CLOSE_LIST, OPEN, QUOTE):
            break
        i += 1
    return 0, nb.int64(1), i if i > first else nb.int64(-1)


@nb.njit
def _note_value(row, number, depth, entries, size):
    """Note the value of row `number`: the depth, how many entries it has, and its bytes. False: it does not go with those before."""
    if number == 0:
        row.rank, row.dims[1] = 1 + depth, entries
    elif row.rank != 1 + depth:
        return False
    if row.dims[1] != entries:
        if depth != 1:
            return False
        row.value_kind = _BAGS_IN_ROWS
    row.size += size + 1
    row.at += entries
    return True


@nb.njit
def _objects(text, i, n, record):
    """Read `instances` that are objects, from the first one on. Returns what follows, or -1."""
    own, number, all_over = row_at(record, 0), 0, False
    own.value_at, own.value_bytes = text + i, n - i
    while not all_over:
        if not is_there(text, i, n, OPEN):
            return nb.int64(-1)
        i, k, over = skip_blanks(text, i + 1, n), 0, False
        while not over:
            at, size, i = member_at(text, i, n)
            if i < 0 or size == 0:
                return nb.int64(-1)
            if number == 0:
                if record.inputs == MOST_TENSORS:
                    return nb.int64(-1)
                row = _add(record)
                row.name_at, row.name_bytes, row.value_kind, row.value_bytes, row.size = text + at, size, _IN_ROWS, k, 0
            elif k == record.inputs:
                return nb.int64(-1)
            row = row_at(record, 1 + k)
            if row.name_bytes != size or same_bytes(row.name_at, text + at, size) == 0:
                return nb.int64(-1)
            depth, entries, after = _pass_value(text, i, n)
            if after < 0 or depth >= MOST_RANK or not _note_value(row, number, depth, entries, after - i):
                return nb.int64(-1)
            k += 1
            i, over = next_at(text, after, n, CLOSE)
        if i < 0 or k != record.inputs:
            return nb.int64(-1)
        number += 1
        i, all_over = next_at(text, i, n, CLOSE_LIST)
    own.dims[0] = number
    return i


@nb.njit
def _bags(text, i, n, record):
    """Read `instances` that are lists, of the only input. Returns what follows, or -1."""
    own, row, first = row_at(record, 0), _add(record), i
    number, over = 0, False
    row.value_kind, row.size = _LISTS, 0
    i = skip_blanks(text, i + 1, n)
    while not over:
        if not is_there(text, i, n, OPEN_LIST):
            return nb.int64(-1)
        depth, entries, after = pass_lists(text, i, n)
        if after < 0 or depth >= MOST_RANK or not _note_value(row, number, depth, entries, after - i):
            return nb.int64(-1)
        number += 1
        i, over = next_at(text, after, n, CLOSE_LIST)
    own.dims[0] = number
    row.value_at, row.value_bytes = text + first, i - first
    if row.value_kind != _LISTS:
        row.value_kind = _BAGS
    return i


@nb.njit
def _rows(text, i, n, record):
    """Read `instances`. Returns what follows, or -1."""
    if not is_there(text, i, n, OPEN_LIST):
        return nb.int64(-1)
    first = skip_blanks(text, i + 1, n)
    if is_there(text, first, n, CLOSE_LIST):
        return nb.int64(-1)
    if is_there(text, first, n, OPEN):
        return _objects(text, first, n, record)
    if is_there(text, first, n, OPEN_LIST):
        return _bags(text, i, n, record)
    return _column(text, i, n, _add(record))


@nb.njit
def _filter(text, i, n, record):
    """Read the names of outputs. False for another form."""
    if not is_there(text, i, n, OPEN_LIST):
        return False
    i, over = skip_blanks(text, i + 1, n), False
    if is_there(text, i, n, CLOSE_LIST):
        return True
    while not over:
        end = text_end(text, i, n)
        if end <= i + 1 or record.outputs == MOST_TENSORS:
            return False
        row = row_at(record, 1 + record.inputs + record.outputs)
        clear_row(row)
        row.name_at, row.name_bytes = text + i + 1, end - i - 1
        record.outputs += 1
        i, over = next_at(text, end + 1, n, CLOSE_LIST)
    return i >= 0


@nb.njit
def _add_starts(record, data):
    """Add an input <name>.offsets for each input of bags; its name is written to the address `data`. False for names that have another meaning in rows."""
    inputs = record.inputs
    for k in range(inputs):
        row = row_at(record, 1 + k)
        bags, dotted = row.value_kind in (_BAGS, _BAGS_IN_ROWS), False
        for i in range(row.name_bytes):
            dotted = dotted or load_u8(row.name_at, i) == _POINT
        if dotted and (bags or _ends_as_offsets(row)):
            return False
        if not bags:
            continue
        if record.inputs == MOST_TENSORS:
            return False
        starts = _add(record)
        size = row.name_bytes
        copy_bytes(data, row.name_at, size)
        copy_bytes(data + size, nb.int64(_OFFSETS.ctypes.data), _OFFSETS.size)
        starts.name_at, starts.name_bytes = data, size + _OFFSETS.size
        starts.value_kind, row.rank, starts.rank = _STARTS, 1, 1
        data += starts.name_bytes
    return True


@nb.njit
def _ends_as_offsets(row):
    skipped = row.name_bytes - _OFFSETS.size
    return skipped >= 0 and same_bytes(row.name_at + skipped, nb.int64(_OFFSETS.ctypes.data), _OFFSETS.size) != 0


@nb.njit
def _note_places(record):
    """Note where sorting has put the input of each member, and the starts of bags, whose names begin with that of the bags and come later."""
    for k in range(record.inputs):
        row = row_at(record, 1 + k)
        if row.value_kind in (_IN_ROWS, _BAGS_IN_ROWS):
            record.columns[row.value_bytes] = k
        if row.value_kind in (_BAGS, _BAGS_IN_ROWS):
            row.starts = k + 1
            while not _is_starts(row_at(record, 1 + row.starts), row):
                row.starts += 1


@nb.njit
def _is_starts(starts, row):
    """Whether a row is that of the starts of another row's bags."""
    size = row.name_bytes
    return (
        starts.value_kind == _STARTS
        and starts.name_bytes == size + _OFFSETS.size
        and same_bytes(starts.name_at, row.name_at, size) != 0
    )


@nb.njit
def _scan(text, n, record, data):
    begin(record)
    own, i = row_at(record, 0), skip_blanks(text, 0, n)
    if n > MOST_TEXT_BYTES or not is_there(text, i, n, OPEN):
        return NOT_OF_FORM
    i, seen, over, filter_at = skip_blanks(text, i + 1, n), 0, False, nb.int64(-1)
    while not over:
        at, size, i = member_at(text, i, n)
        if i < 0:
            return NOT_OF_FORM
        which = place_of(text, at, size, _REQUEST, _REQUEST_FROM)
        if which >= 0 and seen & (1 << which):
            return NOT_OF_FORM
        word, _ = word_at(text, i, n)
        if which < 0 or (which < 2 and word == NULL):
            i = pass_over(text, i, n)
        elif which == 0:
            end = text_end(text, i, n)
            own.version_at, own.version_bytes = text + i, end - i
            i = nb.int64(-1) if end < 0 else nb.int64(end + 1)
        elif which == 1:
            filter_at = i
            _, _, i = pass_lists(text, i, n)
        else:
            own.by_default = COLUMNS if which == 2 else ROWS
            i = _columns(text, i, n, record) if which == 2 else _rows(text, i, n, record)
        if which >= 0:
            seen |= 1 << which
        if i < 0:
            return NOT_OF_FORM
        i, over = next_at(text, i, n, CLOSE)
    if i < 0 or skip_blanks(text, i, n) != n or seen & 12 == 0 or seen & 12 == 12:
        return NOT_OF_FORM
    if own.by_default == ROWS and not _add_starts(record, data):
        return NOT_OF_FORM
    if not sort_inputs(record):
        return NOT_OF_FORM
    _note_places(record)
    if filter_at >= 0 and not _filter(text, filter_at, n, record):
        return NOT_OF_FORM
    record.decoded = record.inputs
    return SCANNED


# --- elements, once their datatypes are known


@nb.njit
def _read_lists(row, datatype, data, record):
    """Read an input's lists to the address `data`. Returns where they end, or 0."""
    n = row.value_bytes
    i, end = elements_at(row.value_at, 0, n, datatype, data, record)
    if i != n or record.depth != row.rank:
        return nb.int64(0)
    for k in range(row.rank):
        row.dims[k] = record.sizes[k]
    return end


@nb.njit
def _place_starts(record, row, data):
    """Make room for the starts of an input's bags at the address `data`. Returns what follows."""
    starts, bags = row_at(record, 1 + row.starts), row_at(record, 0).dims[0]
    starts.datatype, starts.value_at, starts.size, starts.dims[0] = _INT64, data, 8 * bags, bags
    row.dims[0], row.dims[1] = 0, 0
    return data + 8 * bags


@nb.njit
def _read_bag(text, i, n, target, record, row, number):
    """Read the bag of row `number`, a flat list, to the address `target`. Returns (what follows or -1, where it ends)."""
    i, target = elements_at(text, i, n, row.datatype, target, record)
    if i < 0 or record.depth != 1:
        return nb.int64(-1), target
    store_i64(row_at(record, 1 + row.starts).value_at, number, row.dims[0])
    row.dims[0] += record.sizes[0]
    return i, target


@nb.njit
def _read_bags(record, row, data):
    """`_read_lists` of lists of different lengths."""
    text, n = row.value_at, row.value_bytes
    i, over, number = skip_blanks(text, 1, n), False, 0
    while not over:
        i, data = _read_bag(text, i, n, data, record, row, number)
        if i < 0:
            return nb.int64(0)
        number += 1
        i, over = next_at(text, i, n, CLOSE_LIST)
    return data


@nb.njit
def _read_value(text, i, n, target, record, row, number):
    """Read the value of row `number` for an input to the address `target`. Returns (what follows or -1, where it ends)."""
    if row.value_kind == _BAGS_IN_ROWS:
        return _read_bag(text, i, n, target, record, row, number)
    if row.rank == 1:
        return element_at(text, i, n, row.datatype, target)
    i, target = elements_at(text, i, n, row.datatype, target, record)
    if i < 0 or record.depth != row.rank - 1:
        return nb.int64(-1), target
    for axis in range(1, row.rank):
        if number == 0:
            row.dims[axis] = record.sizes[axis - 1]
        elif row.dims[axis] != record.sizes[axis - 1]:
            return nb.int64(-1), target
    return i, target


@nb.njit
def _read_objects(record, inputs):
    """Read all rows, each element to its input's `value_at`, which then is behind it. False for another form."""
    own = row_at(record, 0)
    text, n, rows, i = own.value_at, own.value_bytes, own.dims[0], nb.int64(0)
    for number in range(rows):
        i = skip_blanks(text, i + 1, n)
        for member in range(inputs):
            _, _, i = member_at(text, i, n)
            row = row_at(record, 1 + record.columns[member])
            i, row.value_at = _read_value(text, i, n, row.value_at, record, row, number)
            if i >= 0:
                i, _ = next_at(text, i, n, CLOSE)
            if i < 0:
                return False
        i, _ = next_at(text, i, n, CLOSE_LIST)
    return True


@nb.njit
def _read(datatypes, record, data):
    begins, rows, members = data, row_at(record, 0).dims[0], 0
    for k in range(record.inputs):
        row = row_at(record, 1 + k)
        kind, datatype = row.value_kind, load_i64(datatypes, k)
        if kind == _STARTS:
            continue
        row.datatype = datatype
        if kind in (_BAGS, _BAGS_IN_ROWS):
            data = _place_starts(record, row, data)
        row.at = data - begins if kind in (_LISTS, _BAGS) else row.at
        if kind == _LISTS:
            data = _read_lists(row, datatype, data, record)
        elif kind == _BAGS:
            data = _read_bags(record, row, data)
        else:  # read below, to here
            members += 1
            room = GROWTH * row.size
            if datatype != _BYTES and row.rank <= 2:
                room = min(room, WIDTHS[datatype] * row.at)  # which counts commas: some of them may be of no element
            row.at, row.value_at = data - begins, data
            data += room
            if kind == _IN_ROWS:
                row.dims[0] = rows
        if data == 0:
            return False
        row.size = data - begins - row.at
    if members > 0:
        if not _read_objects(record, members):
            return False
        for k in range(record.inputs):
            row = row_at(record, 1 + k)
            if row.value_kind in (_IN_ROWS, _BAGS_IN_ROWS):
                row.size = row.value_at - begins - row.at
    for k in range(record.inputs):
        row = row_at(record, 1 + k)
        if row.value_kind == _STARTS:
            row.at = row.value_at - begins
    record.data_bytes = data - begins
    return True


@compiled_c(types.int64(*[types.int64] * 6), when=HTTP)
def fill(text: Any, n: Any, record: Any, data: Any, _a: Any, _b: Any) -> Any:
    """Fill a record from `n` bytes of JSON at `text`, except for datatypes, sizes and elements. Up to GROWTH times as many bytes at `data` are written to.

    Returns SCANNED, or NOT_OF_FORM with the record undefined.
    """
    return _scan(text, n, record_at(record), data)


@compiled_c(types.int64(*[types.int64] * 6), when=HTTP)
def read(datatypes: Any, record: Any, data: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """Read the elements of the record's inputs to the address `data`. `datatypes`: the address of the number of each input's datatype.

    Returns 1; or 0 where they are not of the form.
    """
    return 1 if _read(datatypes, record_at(record), data) else 0


def scan(text: int, n: int, record: int, data: int, structure: int) -> int:
    """`fill` for Python, and the structure, MOST_STRUCTURE_BYTES. Returns its bytes; 0 where the JSON is not of the form."""
    return int(scan_with(fill.address, text, n, record, data, structure))
