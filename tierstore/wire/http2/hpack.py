"""HPACK (RFC 7541), the compression of HTTP/2 header fields, without the interpreter.

`decode` reads one header block with the table of its connection. `encode_field` writes fields that every decoder can read at any time: this side's
encoder has no dynamic table, so a block that is written once fits every connection, and the size of the peer's table never matters.

What a peer sends is bounded. An integer has at most five continuation bytes, nothing is written beyond the caller's room, and a block that expands to
more than MOST_UNFOLDED bytes is an error of the connection, so small blocks cannot cost much work.

Free functions of addresses, nogil; the thread of the connection calls them. tests/wire/test_hpack.py compares them with the package `hpack`.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u8, load_u32, store_u8
from tierstore.kernels.records import at, define, place
from tierstore.wire.json.text import names_of, place_of

FIELD = define("HeaderField", "a header field that `hpack.decode` found", {
    "name_at name_bytes value_at value_bytes": "the offsets of name and value from `text`, and their bytes",
    "name_is": "the first place in the static table (1 to 61) with that name, or 0",
})  # fmt: skip
field_at = at(FIELD)

# results of `decode` in place of a count: malformed HPACK, which ends the connection; a list beyond the caller's room
COMPRESSION, TOO_LARGE = -1, -2

CAPACITY = 4096  # bytes of a table, counted as RFC 7541 does: the default of SETTINGS_HEADER_TABLE_SIZE
LEAST_ROOM = CAPACITY  # of `text`: new table entries are decoded there first
MOST_UNFOLDED = 1 << 20  # bytes of names and values in a block
MOST_ADDED = 16  # bytes of an encoded field beside its name and value
NO_TABLE = 0x20  # in front of a block's first field: sets the size of the table to 0

_OVERHEAD = 32  # of an entry, by RFC 7541
_ENTRIES = CAPACITY // _OVERHEAD
TABLE = define("HeaderTable", "the dynamic table of one peer's encoder (HPACK)", {
    "count size": "the number of entries, and their bytes as RFC 7541 counts them",
    "limit": "the most bytes that the entries may have",
    "newest": "the place of the newest entry",
    "end": "the offset in the ring at which the next entry begins",
    "entries": (
        (np.int64, (_ENTRIES,)),
        "the offset of each entry in the ring; from bits 16, 32 and 48 on the bytes of its name and of its value, and its `name_is`",
    ),
    "ring": ((np.uint8, (CAPACITY,)), "the names and values, end to end"),
})  # fmt: skip
table_at = at(TABLE)
_NAME_SHIFT, _VALUE_SHIFT, _IS_SHIFT, _PART = 16, 32, 48, 0xFFFF

# RFC 7541, appendix A: the static table, from index 1 on
_STATIC = (
    ":authority|:method GET|:method POST|:path /|:path /index.html|:scheme http|:scheme https|:status 200|:status 204|"
    ":status 206|:status 304|:status 400|:status 404|:status 500|accept-charset|accept-encoding gzip, deflate|"
    "accept-language|accept-ranges|accept|access-control-allow-origin|age|allow|authorization|cache-control|"
    "content-disposition|content-encoding|content-language|content-length|content-location|content-range|content-type|"
    "cookie|date|etag|expect|expires|from|host|if-match|if-modified-since|if-none-match|if-range|if-unmodified-since|"
    "last-modified|link|location|max-forwards|proxy-authenticate|proxy-authorization|range|referer|refresh|retry-after|"
    "server|set-cookie|strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate"
)
STATIC = tuple((name, value) for name, _, value in (entry.partition(" ") for entry in _STATIC.split("|")))
_STATIC_COUNT = len(STATIC)
_NAMES, _NAMES_FROM = names_of(*(name for name, _ in STATIC))
_FIELDS, _FIELDS_FROM = names_of(*(name + value for name, value in STATIC))
_FIRST = np.array([0] + [1 + [one for one, _ in STATIC].index(name) for name, _ in STATIC], np.int64)

# RFC 7541, appendix B: the bits of each byte's code, EOS last. Codes count up in the order of length, then byte
_CODE_BITS = """
13 23 28 28 28 28 28 28 28 24 30 28 28 30 28 28 28 28 28 28 28 28 30 28 28 28 28 28 28 28 28 28
 6 10 10 12 13  6  8 11 10 10  8 11  8  6  6  6  5  5  5  6  6  6  6  6  6  6  7  8 15  6 12 10
13  6  7  7  7  7  7  7  7  7  7  7  7  7  7  7  7  7  7  7  7  7  7  7  8  7  8 13 19 13 14  6
15  5  6  5  6  5  6  6  6  5  7  7  6  6  6  5  6  7  6  5  5  6  7  7  7  7  7 15 11 14 13 28
20 22 20 20 22 22 22 23 22 23 23 23 23 23 24 23 24 24 22 23 24 23 23 23 23 21 22 23 22 23 23 24
22 21 20 22 22 23 23 21 23 22 22 24 21 22 23 23 21 21 22 21 23 22 23 23 20 22 22 22 23 22 22 23
26 26 20 19 22 23 22 25 26 26 26 27 27 26 24 25 19 21 26 27 27 26 27 24 21 21 26 26 28 27 27 27
20 24 20 21 22 21 21 23 22 22 25 25 24 24 26 23 26 27 26 26 27 27 27 27 27 28 27 27 27 27 27 26
30
"""
_EOS = 256
# a step of four bits in the tree of codes: the next place, the byte that is complete, and flags
_BYTE_SHIFT, _IS_BYTE, _IS_WRONG, _MAY_END = 8, 1 << 16, 1 << 17, 1 << 18


def _steps() -> np.ndarray:
    """For each place in the tree, where the next four bits lead: uint32[places * 16]; place 0 is the root."""
    bits = [int(word) for word in _CODE_BITS.split()]
    tree = [[-1, -1]]  # where a bit leads: a place; numbers above all places are bytes
    code, length = 0, 0
    for byte in sorted(range(_EOS + 1), key=lambda one: (bits[one], one)):
        code, length = code << bits[byte] - length, bits[byte]
        place = 0
        for bit in range(length - 1, 0, -1):
            branch = tree[place]
            if branch[code >> bit & 1] < 0:
                branch[code >> bit & 1] = len(tree)
                tree.append([-1, -1])
            place = branch[code >> bit & 1]
        tree[place][code & 1] = _EOS + byte
        code += 1
    ends, place = [0], 0  # padding is the beginning of EOS, shorter than a byte
    for _ in range(7):
        place = tree[place][1]
        ends.append(place)
    steps = np.zeros(16 * len(tree), np.uint32)
    for start in range(len(tree)):
        for four in range(16):
            place, found = start, 0
            for bit in (8, 4, 2, 1):
                place = tree[place][bool(four & bit)]
                if place >= _EOS:
                    found |= _IS_WRONG if place == 2 * _EOS else _IS_BYTE | (place - _EOS) << _BYTE_SHIFT
                    place = 0
            steps[16 * start + four] = place | found | (_MAY_END if place in ends else 0)
    return steps


_STEPS = _steps()


@nb.njit(inline="always")
def _static_at(index):
    """(address, bytes of the name, bytes of the value) of an entry of the static table."""
    at = nb.int64(_FIELDS.ctypes.data) + _FIELDS_FROM[index - 1]
    name_bytes = _NAMES_FROM[index] - _NAMES_FROM[index - 1]
    return at, name_bytes, _FIELDS_FROM[index] - _FIELDS_FROM[index - 1] - name_bytes


@nb.njit(inline="always")
def _entry_at(table, index):
    """The word of an entry of the dynamic table; index 0 is the newest."""
    return table.entries[(table.newest - index) % _ENTRIES]


@nb.njit
def _read_ring(table, entry, target, size):
    """Copy the first `size` bytes of an entry to an address."""
    at = entry & _PART
    first = min(size, CAPACITY - at)
    copy_bytes(target, place(table, "ring") + at, first)
    copy_bytes(target + first, place(table, "ring"), size - first)


@nb.njit
def _shrink(table, limit):
    """Evict the oldest entries until the table has at most `limit` bytes."""
    while table.count > 0 and table.size > limit:
        entry = _entry_at(table, table.count - 1)
        table.count -= 1
        size = _OVERHEAD + (entry >> _NAME_SHIFT & _PART) + (entry >> _VALUE_SHIFT & _PART)
        table.size -= size


@nb.njit
def _insert(table, at, name_bytes, value_bytes, name_is):
    """Insert the name and the value at `at`, end to end, as the newest entry. An entry that is too large empties the table."""
    size, limit = name_bytes + value_bytes, table.limit
    _shrink(table, limit - size - _OVERHEAD)
    if size + _OVERHEAD > limit:
        return
    end, newest = table.end, (table.newest + 1) % _ENTRIES
    entry = end | name_bytes << _NAME_SHIFT | value_bytes << _VALUE_SHIFT | name_is << _IS_SHIFT
    table.entries[newest] = entry
    first = min(size, CAPACITY - end)
    copy_bytes(place(table, "ring") + end, at, first)
    copy_bytes(place(table, "ring"), at + first, size - first)
    table.newest = newest
    table.end = (end + size) % CAPACITY
    table.count += 1
    table.size = table.size + size + _OVERHEAD


@nb.njit(inline="always")
def _integer(at, i, size, mask):
    """(an integer whose prefix is the bits of `mask`, what follows); -1 where it is cut off or too long."""
    if i >= size:
        return -1, i
    value = nb.int64(load_u8(at, i)) & mask
    i += 1
    if value < mask:
        return value, i
    for shift in range(0, 35, 7):
        if i >= size:
            return -1, i
        byte = nb.int64(load_u8(at, i))
        i += 1
        value += (byte & 127) << shift
        if byte < 128:
            return value, i
    return -1, i


@nb.njit
def _huffman(at, size, target, room):
    """Decode `size` bytes of Huffman code. Returns the decoded length, or -1; writes as many bytes as there is room for."""
    steps = nb.int64(_STEPS.ctypes.data)
    place, seen, step, n = 0, 0, nb.int64(_MAY_END), 0
    for i in range(size):
        byte = nb.int64(load_u8(at, i))
        for four in (byte >> 4, byte & 15):
            step = nb.int64(load_u32(steps, 16 * place + four))
            place = step & 255
            seen |= step
            if step & _IS_BYTE:
                if n < room:
                    store_u8(target, n, nb.uint8(step >> _BYTE_SHIFT & 255))
                n += 1
    return -1 if seen & _IS_WRONG or not step & _MAY_END else n


@nb.njit
def _string(at, i, size, target, room):
    """(length of a string, or -1; what follows). If it is longer than `room`, the bytes at `target` are undefined."""
    if i >= size:
        return -1, i
    is_huffman = load_u8(at, i) & nb.uint8(128)
    length, i = _integer(at, i, size, 127)
    if length < 0 or length > size - i:
        return -1, i
    if is_huffman:
        return _huffman(at + i, length, target, room), i + length
    if length <= room:
        copy_bytes(target, at + i, length)
    return length, i + length


@nb.njit
def _literal(table, at, i, size, mask, target, room):
    """A literal field: (bytes of the name, bytes of the value, NAME_IS, what follows); -1 where it is malformed.

    Name and value are written end to end, if there is room for both.
    """
    index, i = _integer(at, i, size, mask)
    count = table.count
    if index < 0 or index > _STATIC_COUNT + count:
        return -1, 0, 0, i
    if index == 0:
        name_bytes, i = _string(at, i, size, target, room)
        if name_bytes < 0:
            return -1, 0, 0, i
        name_is = 0 if name_bytes > room else 1 + place_of(target, 0, name_bytes, _NAMES, _NAMES_FROM)
    elif index <= _STATIC_COUNT:
        source, name_bytes, _ = _static_at(index)
        name_is = _FIRST[index]
        if name_bytes <= room:
            copy_bytes(target, source, name_bytes)
    else:
        entry = _entry_at(table, index - _STATIC_COUNT - 1)
        name_bytes, name_is = entry >> _NAME_SHIFT & _PART, entry >> _IS_SHIFT
        if name_bytes <= room:
            _read_ring(table, entry, target, name_bytes)
    value_bytes, i = _string(at, i, size, target + name_bytes, max(0, room - name_bytes))
    if value_bytes < 0:
        return -1, 0, 0, i
    return name_bytes, value_bytes, name_is, i


@nb.njit
def _indexed(table, index, target, room):
    """An indexed field: (bytes of the name, bytes of the value, NAME_IS), written end to end if there is room; -1 for an unknown index."""
    if index <= 0 or index > _STATIC_COUNT + table.count:
        return -1, 0, 0
    if index <= _STATIC_COUNT:
        source, name_bytes, value_bytes = _static_at(index)
        if name_bytes + value_bytes <= room:
            copy_bytes(target, source, name_bytes + value_bytes)
        return name_bytes, value_bytes, _FIRST[index]
    entry = _entry_at(table, index - _STATIC_COUNT - 1)
    name_bytes, value_bytes = entry >> _NAME_SHIFT & _PART, entry >> _VALUE_SHIFT & _PART
    if name_bytes + value_bytes <= room:
        _read_ring(table, entry, target, name_bytes + value_bytes)
    return name_bytes, value_bytes, entry >> _IS_SHIFT


@compiled(types.void(types.int64), when=LAST)
def begin_table(table: Any) -> Any:
    """Initialise TABLE_BYTES at an address, a multiple of 8, as the empty table of a new connection."""
    table = table_at(table)
    table.count = table.size = table.newest = table.end = 0
    table.limit = CAPACITY


@compiled(types.int64(*[types.int64] * 7), when=LAST)
def decode(table: Any, at: Any, size: Any, text: Any, text_room: Any, fields: Any, most_fields: Any) -> Any:
    """Decode a header block of `size` bytes. Returns the number of fields, COMPRESSION or TOO_LARGE.

    Names and values are written to `text`, of `text_room` bytes, at least LEAST_ROOM; `fields` has `most_fields` FIELDs. After TOO_LARGE both are
    undefined, but the table is in step with the peer's encoder.
    """
    table = table_at(table)
    i, count, used, unfolded, is_over = 0, 0, 0, 0, False
    begin, may_resize = 0, True
    while i < size:
        begin = i
        first = nb.int64(load_u8(at, i))
        if first & 0xE0 == 0x20:
            limit, i = _integer(at, i, size, 31)
            if limit < 0 or limit > CAPACITY or not may_resize:
                return COMPRESSION
            table.limit = limit
            _shrink(table, limit)
            continue
        may_resize = False
        if count == most_fields and not is_over:
            is_over, used = True, 0
        target, room = text + used, text_room - used
        if first & 0x80:
            index, i = _integer(at, i, size, 127)
            name_bytes, value_bytes, name_is = _indexed(table, index, target, 0 if is_over else room)
        else:
            mask = 63 if first & 0x40 else 15
            name_bytes, value_bytes, name_is, i = _literal(table, at, i, size, mask, target, room)
        if name_bytes < 0:
            return COMPRESSION
        if name_bytes + value_bytes > room and not is_over:
            is_over, used, i = True, 0, begin  # start again at the front of `text`, where every table entry fits
            continue
        unfolded += name_bytes + value_bytes
        if unfolded > MOST_UNFOLDED:
            return COMPRESSION
        if first & 0xC0 == 0x40:
            _insert(table, target, name_bytes, value_bytes, name_is)
        if is_over:
            continue
        row = field_at(fields, count)
        row.name_at = used
        row.name_bytes = name_bytes
        row.value_at = used + name_bytes
        row.value_bytes = value_bytes
        row.name_is = name_is
        used += name_bytes + value_bytes
        count += 1
    return TOO_LARGE if is_over else count


@nb.njit(inline="always")
def _write_integer(target, first, mask, value):
    """Write an integer behind the bits of `first`. Returns the bytes written."""
    if value < mask:
        store_u8(target, 0, nb.uint8(first | value))
        return 1
    store_u8(target, 0, nb.uint8(first | mask))
    value -= mask
    n = 1
    while value > 127:
        store_u8(target, n, nb.uint8(value & 127 | 128))
        value >>= 7
        n += 1
    store_u8(target, n, nb.uint8(value))
    return n + 1


@compiled(types.int64(*[types.int64] * 5), when=LAST)
def encode_field(target: Any, name: Any, name_bytes: Any, value: Any, value_bytes: Any) -> Any:
    """Write a field (name in small letters) that enters no table. Returns the bytes written, at most MOST_ADDED more than name and value."""
    index = 1 + place_of(name, 0, name_bytes, _NAMES, _NAMES_FROM)
    n = _write_integer(target, 0, 15, index)
    if index == 0:
        n += _write_integer(target + n, 0, 127, name_bytes)
        copy_bytes(target + n, name, name_bytes)
        n += name_bytes
    n += _write_integer(target + n, 0, 127, value_bytes)
    copy_bytes(target + n, value, value_bytes)
    return n + value_bytes
