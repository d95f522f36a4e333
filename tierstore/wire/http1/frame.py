"""Framing of any HTTP/1 request (RFC 9112): where it ends, so that Python gets it whole, with its body free of chunk lines.

`head.py` reads requests that a reactor answers itself. This module reads what every request says: where head and body end, whether the connection
goes on, and whether the client waits for `100 Continue`. A request with more than one possible reading is BAD: two lengths, a length beside chunks, a
coding other than chunks, a folded line, or a line without CR. `Upgrade` is ignored (RFC 9110, 7.8).

Free functions of addresses, nogil.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.raw import load_u8
from tierstore.kernels.sysio import move_bytes
from tierstore.wire.http1.head import (
    CUT,
    EXPECT,
    FOREIGN,
    IN_NAME,
    PLAIN,
    TRANSFER_ENCODING,
    is_word,
    options,
    read_line,
    read_number,
    read_version,
)

GOOD, BAD = PLAIN, FOREIGN  # results, beside CUT
CHUNKED = -2  # in place of a body's length
MOST_HEAD_BYTES = 1 << 16
DONE, MORE, MALFORMED, LARGE = range(4)  # results of `decode`
SIZE_LINE, AFTER_DATA, TRAILERS = -1, -2, -3  # in place of the bytes left of a chunk: what comes next
_MOST_DIGITS = 18
_MOST_HEX_DIGITS = 12
_SPACE, _TAB, _CR, _LF, _SEMICOLON = 32, 9, 13, 10, 59
_CHUNKED, _CONTINUE = (np.frombuffer(text, np.uint8) for text in (b"chunked", b"100-continue"))


@nb.njit
def _request_line(at, n, found):
    """The bytes of the request line with CR LF; or minus CUT or BAD."""
    i = 0
    while i < n and IN_NAME[load_u8(at, i)] != 0:
        i += 1
    if i == n:
        return -CUT
    if i == 0 or load_u8(at, i) != _SPACE:
        return -BAD
    i += 1
    begin = i
    while i < n and load_u8(at, i) > _SPACE and load_u8(at, i) < 127:
        i += 1
    if i == n:
        return -CUT
    return read_version(at, n, i, found) if i > begin else -BAD


@nb.njit
def frame_at(at, n, found):
    """Frame the `n` bytes at address `at`: GOOD, with `found` filled (bytes of head and body, what ends); CUT; or BAD."""
    i = _request_line(at, n, found)
    if i <= 0:
        return -i
    length, coded, found.expects, is_old = nb.int64(-1), False, 0, found.closing != 0
    while True:
        if i < n and load_u8(at, i) == _CR:
            if i + 1 == n:
                return CUT
            if load_u8(at, i + 1) != _LF or (coded and (length >= 0 or is_old)):
                return BAD
            break
        number, value, end, i = read_line(at, n, i)
        if number < 0:
            return -number
        while end > value and (load_u8(at, end - 1) == _SPACE or load_u8(at, end - 1) == _TAB):
            end -= 1
        size = end - value
        if number == 1:  # content-length
            if length >= 0:
                return BAD
            length = read_number(at + value, size, _MOST_DIGITS)
            if length < 0:
                return BAD
        elif number == 2:  # connection
            found.closing |= options(at + value, size) & 1
        elif number == TRANSFER_ENCODING:
            if coded or not is_word(at + value, size, _CHUNKED):
                return BAD
            coded = True
        elif number == EXPECT and not is_old and is_word(at + value, size, _CONTINUE):
            found.expects = 1
    found.head_bytes = i + 2
    found.body_bytes = CHUNKED if coded else max(length, nb.int64(0))
    return GOOD


@nb.njit
def _hex(byte):
    if byte >= 48 and byte <= 57:
        return nb.int64(byte) - 48
    byte |= nb.uint8(32)
    return nb.int64(byte) - 87 if byte >= 97 and byte <= 102 else nb.int64(-1)


@nb.njit
def _line_end(at, begin, n):
    """The place of a line's CR LF; -1: it has not come yet; -2: there is a control byte in the line."""
    for i in range(begin, n):
        byte = load_u8(at, i)
        if byte == _CR:
            if i + 1 == n:
                return -1
            return i if load_u8(at, i + 1) == _LF else -2
        if (byte < _SPACE and byte != _TAB) or byte == 127:
            return -2
    return -1


@nb.njit
def _chunk_size(at, begin, end):
    """The size in a chunk's first line, or -1; an extension behind it is ignored."""
    value, i = nb.int64(0), begin
    while i < end and _hex(load_u8(at, i)) >= 0:
        value = value * 16 + _hex(load_u8(at, i))
        i += 1
    if i == begin or i - begin > _MOST_HEX_DIGITS:
        return nb.int64(-1)
    while i < end and (load_u8(at, i) == _SPACE or load_u8(at, i) == _TAB):
        i += 1
    return value if i == end or load_u8(at, i) == _SEMICOLON else nb.int64(-1)


@nb.njit
def decode(row, at, size, most):
    """Remove chunk lines from the `size` bytes at an address, so that a request's body is one piece behind its head.

    The bytes before `row.chunks_at` are done. Returns (DONE, MORE, MALFORMED, or LARGE for a body above `most`; the number of bytes now).
    """
    end, left, came = row.chunks_at, row.chunk_left, MORE
    raw, head = end, row.chunks_head
    while came == MORE:
        if left > 0:
            part = min(left, size - raw)
            if raw > end and part > 0:
                move_bytes(at + end, at + raw, part)
            end += part
            raw += part
            left -= part
            if left > 0:
                break
            left, row.beside = nb.int64(AFTER_DATA), 0
        if left == AFTER_DATA:
            if size - raw < 2:
                break
            if load_u8(at, raw) != _CR or load_u8(at, raw + 1) != _LF:
                came = MALFORMED
                break
            raw += 2
            left = nb.int64(SIZE_LINE)
        line = _line_end(at, raw, size)
        if line == -2 or (row.beside + size - raw > MOST_HEAD_BYTES and line == -1):
            came = MALFORMED
            break
        if line == -1:
            break
        row.beside += line + 2 - raw
        if row.beside > MOST_HEAD_BYTES:
            came = MALFORMED
            break
        if left == SIZE_LINE:
            left = _chunk_size(at, raw, line)
            if left < 0:
                came = MALFORMED
            elif end - head + left > most:
                came = LARGE
            elif left == 0:
                left = nb.int64(TRAILERS)
        elif line == raw:
            came = DONE
        raw = line + 2
    if raw > end and size > raw:
        move_bytes(at + end, at + raw, size - raw)
    row.chunks_at, row.chunk_left = end, left
    return came, size - (raw - end)
