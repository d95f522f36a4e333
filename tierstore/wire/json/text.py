"""Parsers for the parts of JSON in requests, in a closed grammar: texts, numbers, members and separators.

Each function gets the address of a text, a place in it and its length, and returns what follows; or -1, or a value of -1, for another form, which the
full parser must read. Free functions of addresses, nogil; nothing is written.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.raw import load_u8

MOST_ID_BYTES = 256
_MOST_DIGITS = 18

OPEN, CLOSE, OPEN_LIST, CLOSE_LIST, QUOTE, _COLON, COMMA, BACKSLASH = b'{}[]":,\\'
_MINUS, _ZERO, _NINE = b"-09"


def names_of(*names: str) -> tuple[np.ndarray, np.ndarray]:
    """(bytes end to end, where each begins) of a list of names."""
    text = "".join(names).encode()
    return np.frombuffer(text, np.uint8), np.cumsum([0, *(len(name) for name in names)]).astype(np.int64)


_WORDS, _WORDS_FROM = names_of("true", "false", "null")
TRUE, FALSE, NULL = range(3)

# bytes of texts: 1 allowed in all texts; 2 allowed in ids only (UTF-8, which is checked separately)
_IN_TEXT = np.zeros(256, np.uint8)
_IN_TEXT[32:127] = 1
_IN_TEXT[[QUOTE, BACKSLASH]] = 0
_ESCAPED = np.zeros(256, np.uint8)
_ESCAPED[np.frombuffer(b'"\\bfnrt', np.uint8)] = 1  # escapes that are written back unchanged


@nb.njit(inline="always")
def skip_blanks(text, i, n):
    while i < n:
        byte = load_u8(text, i)
        if byte != 32 and byte != 10 and byte != 13 and byte != 9:
            break
        i += 1
    return i


@nb.njit
def place_of(text, at, size, names, begins):
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
def text_end(text, i, n):
    """The closing quote of the text whose opening quote is at `i`; -1 for another form."""
    if i >= n or load_u8(text, i) != QUOTE:
        return -1
    i += 1
    while i < n and _IN_TEXT[load_u8(text, i)] != 0:
        i += 1
    return i if i < n and load_u8(text, i) == QUOTE else -1


@nb.njit
def is_utf8(at, n):
    """Whether `n` bytes are valid UTF-8: no surrogates, no overlong forms, nothing beyond U+10FFFF."""
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
def id_end(text, i, n):
    """`text_end` for an id."""
    if i >= n or load_u8(text, i) != QUOTE:
        return -1
    begin_at, other = i + 1, False
    i += 1
    while i < n and load_u8(text, i) != QUOTE:
        byte = load_u8(text, i)
        if byte == BACKSLASH:
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
def number_at(text, i, n):
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
def word_at(text, i, n):
    """(the place of true, false or null at `i` in their list, what follows), or (-1, i)."""
    for k in range(3):
        size = _WORDS_FROM[k + 1] - _WORDS_FROM[k]
        if i + size <= n and place_of(text, i, size, _WORDS, _WORDS_FROM) == k:
            return k, i + size
    return -1, i


@nb.njit
def pass_over(text, i, n):
    """Skip the value at `i`. Returns what follows; -1 for another form."""
    if i >= n:
        return -1
    if load_u8(text, i) == QUOTE:
        end = text_end(text, i, n)
        return -1 if end < 0 else end + 1
    which, after = word_at(text, i, n)
    if which >= 0:
        return after
    if load_u8(text, i) == _MINUS:
        i += 1
        if i < n and load_u8(text, i) == _ZERO:
            return -1
    value, after = number_at(text, i, n)
    return -1 if value < 0 else after


@nb.njit
def member_at(text, i, n):
    """(where the name of the member at `i` begins, its size, where its value begins); the last is -1 where there is none."""
    end = text_end(text, i, n)
    if end < 0:
        return 0, 0, -1
    after = skip_blanks(text, end + 1, n)
    if after >= n or load_u8(text, after) != _COLON:
        return 0, 0, -1
    return i + 1, end - i - 1, skip_blanks(text, after + 1, n)


@nb.njit(inline="always")
def is_there(text, i, n, byte):
    return i >= 0 and i < n and load_u8(text, i) == byte


@nb.njit
def next_at(text, i, n, close):
    """Read the separator behind a member or element: (the place of the next one, or of what follows `close`; whether it was `close`)."""
    i = skip_blanks(text, i, n)
    if is_there(text, i, n, COMMA):
        return skip_blanks(text, i + 1, n), False
    if is_there(text, i, n, close):
        return i + 1, True
    return -1, True
