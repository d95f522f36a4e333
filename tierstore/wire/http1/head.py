"""The head of an HTTP/1 request, in the form that a reactor answers without the interpreter.

A pure function of bytes; any thread. It reads a part of RFC 9112 and decides: is this the head of a POST for a look-up or for a front's rows, and
where does the request end? A head is PLAIN only if every line has a known form and there is one `Content-Length`, of digits. Any other head is
FOREIGN: `frame.py` finds its end, and Python answers. A head that is too short to decide is CUT. Nothing is guessed: a PLAIN head means the same to
every server.

    request line    POST <path> HTTP/1.1       path: /v2/models/…/infer, /v1/models/…:predict or /upstream/m…/rows of [A-Za-z0-9_./:-]
                                               HTTP/1.0 too, whose connections end with the answer
    each header     <name>:<value>             name: a token; value: printable, with blanks before it
    end of a line   CR LF

Headers that no rule of this service reads may have any value (`MEANT` lists the others): proxies, meshes and tracers add what they like. A header
that is read comes once, with a value of ASCII without a blank behind it.

tests/wire/test_http1_head.py compares `parse` with a parser in Python.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.raw import load_u8
from tierstore.kernels.records import at, define
from tierstore.wire.callers import TOKEN

PLAIN, CUT, FOREIGN = 0, 1, 2

HEAD = define("Head", "the head of a request, as `parse` finds it; offsets count from the request's first byte", {
    "head_bytes": "the bytes of the head",
    "path_at path_bytes": "the offset and the bytes of the path",
    "body_bytes": "the bytes of the body", "json_bytes": "the bytes of the JSON at the beginning of the body, or NONE",
    "host_at host_bytes": "the offset and the bytes of the header Host",
    "timeout_ms": "the lowest timeout among the headers; 0: none", "unusual": "bits: the reasons for which reactors do not answer it",
    "authorization_at authorization_bytes": "the offset and the bytes of the header Authorization", "kind": "INFER, PREDICT or ROWS, by the path",
    "closing": "1: the connection ends with the answer",
    "expects": "1: the client waits until it is told to send its body", "size": "the bytes of the request that are there, without the framing of chunks",
    "caller": (TOKEN, "the caller's token, which the check of access sets (`wire/callers.py`)"),
})  # fmt: skip
head_at = at(HEAD)
INFER, PREDICT, ROWS = range(3)  # values of `kind`
NONE = -1  # `json_bytes` without Inference-Header-Content-Length

MOST_HEAD_BYTES = 8192
_MOST_DIGITS = 9  # of lengths
_MOST_NUMBER = (1 << 63) - 1
_TRACEPARENT = 55  # bytes: version, trace, span, flags

_U64 = np.uint64


def _hash(name: str) -> int:
    value = 0xCBF29CE484222325  # FNV-1a, 64 bits
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFF_FFFF_FFFF_FFFF
    return value


# Headers that are read. Each may come once.
READ = (
    "host", "content-length", "connection", "inference-header-content-length", "accept-encoding", "x-request-id", "authorization",
    "x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms", "origin", "content-encoding", "upgrade", "traceparent",
)  # fmt: skip
# Headers that change what a request means, in a way that only the full server handles.
FOREIGN_NAMES = ("transfer-encoding", "expect")
MEANT = (*READ, *FOREIGN_NAMES)
_ORIGIN = READ.index("origin")
# Bits of `unusual`: why a reactor leaves a PLAIN head to Python.
ROUTED = 1  # has a request id, which decides whether the canary answers
CODED = 2  # its body is compressed, or its answer must be
ODD_VALUE = 4  # a value that the full check refuses
FROM_A_PAGE = 8  # sent by a browser for a web page: the access check decides whether the page's origin may
SAMPLED = 16  # its trace is recorded: Python answers where this service reports traces

_NAMES = np.array([_hash(name) for name in MEANT], np.uint64)
assert len(set(_NAMES.tolist())) == len(_NAMES)
# a hash table with open addressing: the hash of a name, and the name's number
_SLOTS = 64
_SLOT_NAMES, _SLOT_NUMBERS = np.zeros(_SLOTS, np.uint64), np.full(_SLOTS, -1, np.int64)
for _place, _name in enumerate(_NAMES.tolist()):
    _slot = _name & (_SLOTS - 1)
    while _SLOT_NUMBERS[_slot] >= 0:
        _slot = (_slot + 1) & (_SLOTS - 1)
    _SLOT_NAMES[_slot], _SLOT_NUMBERS[_slot] = _name, _place
_FOREIGN_FROM = len(READ)
TRANSFER_ENCODING, EXPECT = (MEANT.index(name) for name in FOREIGN_NAMES)
# the spelling of names: another name with an equal hash is not taken for one of them
_SPELLED = np.frombuffer("".join(MEANT).encode(), np.uint8)
_SPELLED_FROM = np.cumsum([0, *(len(name) for name in MEANT)])


def _table(text: str) -> np.ndarray:
    flags = np.zeros(256, np.uint8)
    flags[np.frombuffer(text.encode(), np.uint8)] = 1
    return flags


_ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_IN_PATH = _table(_ALPHANUMERIC + "_./:-")
IN_NAME = _table(_ALPHANUMERIC + "!#$%&'*+-.^_`|~")
_OPENINGS = np.frombuffer(b"POST /v2/models/POST /v1/models/POST /upstream/m", np.uint8)  # by `kind`
_OPENING_BYTES = 16
_VERSION = np.frombuffer(b" HTTP/1.", np.uint8)
_INFER_ENDS = np.frombuffer(b"/infer", np.uint8)
_PREDICT_ENDS = np.frombuffer(b":predict", np.uint8)
_ROWS_ENDS = np.frombuffer(b"/rows", np.uint8)
# options of Connection; the last two belong to an upgrade to HTTP/2, which is ignored
_OPTIONS = [np.frombuffer(text, np.uint8) for text in (b"close", b"keep-alive", b"te", b"upgrade", b"http2-settings")]
_CLOSE, _KEEP_ALIVE, _TE, _UPGRADE, _HTTP2_SETTINGS = _OPTIONS
_H2C, _IDENTITY = (np.frombuffer(text, np.uint8) for text in (b"h2c", b"identity"))
_SPACE, _TAB, _CR, _LF, _COLON, _ZERO, _COMMA, _SEMICOLON, _STAR = 32, 9, 13, 10, 58, 48, 44, 59, 42


@nb.njit(inline="always")
def _starts_with(at, n, wanted, begin, size):
    """Whether the `n` bytes at `at` have the wanted bytes from `begin` on: PLAIN, FOREIGN, or CUT where they are too few to tell."""
    for i in range(min(n, size)):
        if load_u8(at, i) != wanted[begin + i]:
            return FOREIGN
    return PLAIN if n >= size else CUT


@nb.njit(inline="always")
def read_number(at, size, most_digits):
    """The number in `size` digits, or -1. With 19 digits the caller makes sure that it is below 2⁶³."""
    if size < 1 or size > most_digits:
        return nb.int64(-1)
    value = nb.int64(0)
    for i in range(size):
        digit = nb.int64(load_u8(at, i)) - _ZERO
        if digit < 0 or digit > 9 or (i == 18 and value > (_MOST_NUMBER - digit) // 10):
            return nb.int64(-1)
        value = value * 10 + digit
    return value


@nb.njit
def read_version(at, n, begin, found):
    """Read the end of a request line, from `begin` on. Returns the bytes of the line with CR LF, or minus CUT or FOREIGN."""
    after = _starts_with(at + begin, n - begin, _VERSION, 0, _VERSION.size)
    if after != PLAIN:
        return -after
    line = begin + _VERSION.size + 3
    for i in range(3):
        if line - 3 + i >= n:
            return -CUT
        byte = load_u8(at, line - 3 + i)
        if byte != (_CR if i == 1 else _LF if i == 2 else _ZERO) and (i > 0 or byte != _ZERO + 1):
            return -FOREIGN
    found.closing = 1 if load_u8(at, line - 3) == _ZERO else 0
    return line


@nb.njit
def _path(at, n, found):
    """The bytes of the request line with CR LF; or minus CUT or FOREIGN."""
    kind, opening = INFER, _starts_with(at, n, _OPENINGS, 0, _OPENING_BYTES)
    while opening == FOREIGN and kind < ROWS:
        kind += 1
        opening = _starts_with(at, n, _OPENINGS, kind * _OPENING_BYTES, _OPENING_BYTES)
    if opening != PLAIN:
        return -opening
    end = _OPENING_BYTES
    while end < n and _IN_PATH[load_u8(at, end)] != 0:
        end += 1
    if end == n:
        return -CUT
    line = read_version(at, n, end, found)
    if line <= 0:
        return line
    ending = _INFER_ENDS if kind == INFER else _PREDICT_ENDS if kind == PREDICT else _ROWS_ENDS
    if (
        end - ending.size <= _OPENING_BYTES
        or _starts_with(at + end - ending.size, ending.size, ending, 0, ending.size) != PLAIN
    ):
        return -FOREIGN
    found.path_at, found.path_bytes, found.kind = 5, end - 5, kind
    return line


@nb.njit(inline="always")
def _is_spelled(number, at, size):
    """Whether the `size` bytes at `at`, all of IN_NAME, are the header name with this number, in any case."""
    spelled = _SPELLED_FROM[number]
    if _SPELLED_FROM[number + 1] - spelled != size:
        return False
    for i in range(size):  # noqa: SIM110 - for the compiler
        if load_u8(at, i) | nb.uint8(32) != _SPELLED[spelled + i]:
            return False
    return True


@nb.njit(inline="always")
def _is_text(byte):
    return (byte >= _SPACE and byte != 127) or byte == _TAB


@nb.njit(inline="always")
def _is_blank(byte):
    return byte in (_SPACE, _TAB)


@nb.njit
def _is_plain(at, begin, end):
    """Whether a value is ASCII without tabs and does not end with a blank."""
    for i in range(begin, end):
        if load_u8(at, i) > 126 or load_u8(at, i) == _TAB:
            return False
    return end == begin or load_u8(at, end - 1) != _SPACE


UNREAD = 1 << 20  # the number of a header that nothing reads


@nb.njit
def read_line(at, n, begin):
    """The line at `begin`: (header's number, where its value begins, where the value ends, where the line ends). The number is -CUT, or -FOREIGN for no header."""
    hashed = _U64(0xCBF29CE484222325)
    i = begin
    while i < n:
        byte = load_u8(at, i)
        if IN_NAME[byte] == 0:
            break
        if byte >= 65 and byte <= 90:
            byte |= nb.uint8(32)
        hashed = _U64((hashed ^ _U64(byte)) * _U64(0x100000001B3))
        i += 1
    if i == n:
        return -CUT, 0, 0, 0
    if load_u8(at, i) != _COLON or i == begin:
        return -FOREIGN, 0, 0, 0
    name_bytes = i - begin
    i += 1
    while i < n and _is_blank(load_u8(at, i)):
        i += 1
    value = i
    while i < n and _is_text(load_u8(at, i)):
        i += 1
    if i + 1 >= n:
        return (-CUT, 0, 0, 0) if i == n or load_u8(at, i) == _CR else (-FOREIGN, 0, 0, 0)
    if load_u8(at, i) != _CR or load_u8(at, i + 1) != _LF:
        return -FOREIGN, 0, 0, 0
    slot = nb.int64(hashed & _U64(_SLOTS - 1))
    while _SLOT_NUMBERS[slot] >= 0:
        number = _SLOT_NUMBERS[slot]
        if _SLOT_NAMES[slot] == hashed and _is_spelled(number, at + begin, name_bytes):
            return number, value, i, i + 2
        slot = (slot + 1) & (_SLOTS - 1)
    return UNREAD, value, i, i + 2


@nb.njit
def is_word(at, size, word):
    """Whether `size` bytes at an address are `word` (in small letters), in any case."""
    if size != word.size:
        return False
    for k in range(size):
        byte = load_u8(at, k)
        if byte >= 65 and byte <= 90:
            byte |= nb.uint8(32)
        if byte != word[k]:
            return False
    return True


@nb.njit
def options(at, size):
    """What Connection says. Bit 0: close; bit 1: an unknown option."""
    says, i = 0, 0
    while i <= size:
        while i < size and load_u8(at, i) == _SPACE:
            i += 1
        begin = i
        while i < size and load_u8(at, i) != _COMMA:
            i += 1
        end = i
        while end > begin and load_u8(at, end - 1) == _SPACE:
            end -= 1
        word, length = at + begin, end - begin
        if is_word(word, length, _CLOSE):
            says |= 1
        elif not (
            is_word(word, length, _KEEP_ALIVE)
            or is_word(word, length, _TE)
            or is_word(word, length, _UPGRADE)
            or is_word(word, length, _HTTP2_SETTINGS)
        ):
            says |= 2
        i += 1
    return says


@nb.njit
def is_sampled(at, size):
    """Whether a `traceparent` asks for its trace to be recorded: the lowest bit of its flags, the last two of 55 bytes (W3C Trace Context, 3.2.2)."""
    if size < _TRACEPARENT:
        return False
    digit = load_u8(at, _TRACEPARENT - 1)
    return ((digit ^ (digit >> 6)) & 1) != 0  # for `a` to `f` the lowest bit is inverted: a is 10, and its code 97


@nb.njit
def _may_be_refused(at, size):
    """Whether Accept-Encoding may refuse an uncompressed answer: it gives weights for `identity` or for all codings."""
    weighed = named = False
    for i in range(size):
        byte = load_u8(at, i)
        weighed = weighed or byte == _SEMICOLON
        named = named or byte == _STAR or (size - i >= _IDENTITY.size and is_word(at + i, _IDENTITY.size, _IDENTITY))
    return weighed and named


@nb.njit
def is_ours(at, n):
    """Whether `n` bytes at an address begin as a request that a reactor may answer."""
    for kind in range(ROWS + 1):
        if _starts_with(at, n, _OPENINGS, kind * _OPENING_BYTES, _OPENING_BYTES) == PLAIN:
            return True
    return False


@nb.njit
def parse_at(at, n, found):
    """Parse the head at address `at` of `n` bytes: PLAIN, with `found` filled; CUT; or FOREIGN."""
    i = _path(at, n, found)
    if i <= 0:
        return -i
    found.body_bytes, found.json_bytes, found.host_bytes, found.timeout_ms, found.unusual = -1, NONE, 0, 0, 0
    found.authorization_at = found.authorization_bytes = 0
    seen = 0
    while True:
        if i < n and load_u8(at, i) == _CR:
            if i + 1 == n:
                return CUT
            if load_u8(at, i + 1) != _LF or found.body_bytes < 0 or seen & 1 == 0:
                return FOREIGN
            found.head_bytes = i + 2
            return PLAIN
        number, value, end, i = read_line(at, n, i)
        if number < 0:
            return -number
        if number == UNREAD:
            continue
        if number >= _FOREIGN_FROM or seen & (1 << number) or not _is_plain(at, value, end):
            return FOREIGN
        seen |= 1 << number
        size = end - value
        if number == 0:  # host
            found.host_at, found.host_bytes = value, size
        elif number == 1:  # content-length
            found.body_bytes = read_number(at + value, size, _MOST_DIGITS)
            if found.body_bytes < 0:
                return FOREIGN
        elif number == 2:  # connection
            says = options(at + value, size)
            if says > 1:
                return FOREIGN
            found.closing |= says
        elif number == 3:  # inference-header-content-length
            found.json_bytes = read_number(at + value, size, _MOST_DIGITS)
            if found.json_bytes < 0:
                found.unusual |= ODD_VALUE
        elif number == 4:  # accept-encoding
            if _may_be_refused(at + value, size):
                found.unusual |= CODED
        elif number == 5:  # x-request-id
            found.unusual |= ROUTED
        elif number == 6:  # authorization
            found.authorization_at, found.authorization_bytes = value, size
        elif number == _ORIGIN:
            found.unusual |= FROM_A_PAGE
        elif number == 10:  # content-encoding
            if size > 0 and not is_word(at + value, size, _IDENTITY):
                found.unusual |= CODED
        elif number == 11:  # upgrade
            if not is_word(at + value, size, _H2C):
                return FOREIGN
        elif number == 12:  # traceparent
            if is_sampled(at + value, size):
                found.unusual |= SAMPLED
        else:  # a timeout
            timeout = read_number(at + value, size, _MOST_DIGITS)
            if timeout < 0:
                found.unusual |= ODD_VALUE
            elif timeout > 0 and (found.timeout_ms == 0 or timeout < found.timeout_ms):
                found.timeout_ms = timeout
