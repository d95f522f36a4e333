"""The head of an HTTP/1.1 request, in the one form that is answered without the interpreter.

A pure function of bytes; any thread. It knows a small part of RFC 9112 and decides one question: is this the head of
a plain POST to a look-up, or for a front's rows, and where does the request end? Only a head of which every line has a known form, with one
`Content-Length` of digits alone, is PLAIN. All else is FOREIGN and is for the full server, which gets the bytes as
they came. What cannot be told yet is CUT. There is no guessing: a head that is PLAIN means the same to every server.

    request line    POST <path> HTTP/1.1       path: /v2/models/…/infer, /v1/models/…:predict or /upstream/m…/rows of [A-Za-z0-9_./:-]
    each header     <name>: <value>            name: one of those below; value: printable ASCII, no space at its end
    end of a line   CR LF

`parse` is compared with a parser in Python by tests/kernels/test_httphead.py.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.raw import load_u8

PLAIN, CUT, FOREIGN = 0, 1, 2

# what `parse` finds, int64 words; offsets count from the request's first byte
(
    HEAD_BYTES, PATH_AT, PATH_BYTES, BODY_BYTES, JSON_BYTES, HOST_AT, HOST_BYTES, TIMEOUT_MS, UNUSUAL, AUTHORIZATION_AT,
    AUTHORIZATION_BYTES, KIND,
) = range(12)  # fmt: skip
FOUND_WORDS = 12
INFER, PREDICT, ROWS = range(3)  # of KIND, by the path
NONE = -1  # JSON_BYTES without Inference-Header-Content-Length

MOST_HEAD_BYTES = 8192
_MOST_DIGITS = 9  # of lengths

_U64 = np.uint64


def _hash(name: str) -> int:
    value = 0xCBF29CE484222325  # FNV-1a, 64 bits
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFF_FFFF_FFFF_FFFF
    return value


# Headers that change nothing about a look-up's answer.
IGNORED = (
    "accept", "accept-language", "b3", "baggage", "cache-control", "content-type", "cookie", "dnt", "forwarded", "from",
    "keep-alive", "pragma", "priority", "referer", "traceparent", "tracestate", "uber-trace-id", "user-agent", "via",
    "x-amzn-trace-id", "x-b3-flags", "x-b3-parentspanid", "x-b3-sampled", "x-b3-spanid", "x-b3-traceid",
    "x-cloud-trace-context", "x-datadog-parent-id", "x-datadog-sampling-priority", "x-datadog-trace-id",
    "x-envoy-attempt-count", "x-envoy-decorator-operation", "x-envoy-external-address", "x-envoy-internal",
    "x-envoy-original-path", "x-forwarded-client-cert", "x-forwarded-for", "x-forwarded-host", "x-forwarded-port",
    "x-forwarded-proto", "x-real-ip",
)  # fmt: skip
# Headers that are read. Of each there may be one.
HOST, CONTENT_LENGTH, CONNECTION, JSON_LENGTH, ACCEPT_ENCODING, REQUEST_ID, AUTHORIZATION, TIMEOUT, ENVOY_TIMEOUT = READ = (
    "host", "content-length", "connection", "inference-header-content-length", "accept-encoding", "x-request-id", "authorization",
    "x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms",
)  # fmt: skip
# why a PLAIN head is not for the short way; bits of UNUSUAL
ROUTED = 1  # has a request id, by which a canary's share is dealt
CODED = 2  # may wish for a coded answer
ODD_VALUE = 4  # a value that the full check refuses

_NAMES = np.array([_hash(name) for name in (*READ, *IGNORED)], np.uint64)
assert len(set(_NAMES.tolist())) == len(_NAMES)
# open addressing: a name's hash, and its number
_SLOTS = 256
_SLOT_NAMES, _SLOT_NUMBERS = np.zeros(_SLOTS, np.uint64), np.full(_SLOTS, -1, np.int64)
for _place, _name in enumerate(_NAMES.tolist()):
    _slot = _name & (_SLOTS - 1)
    while _SLOT_NUMBERS[_slot] >= 0:
        _slot = (_slot + 1) & (_SLOTS - 1)
    _SLOT_NAMES[_slot], _SLOT_NUMBERS[_slot] = _name, _place
_IGNORED_FROM = len(READ)
# how they are spelled, so that no name made to have the hash of another passes for it
_SPELLED = np.frombuffer("".join((*READ, *IGNORED)).encode(), np.uint8)
_SPELLED_FROM = np.cumsum([0, *(len(name) for name in (*READ, *IGNORED))])


def _table(text: str) -> np.ndarray:
    flags = np.zeros(256, np.uint8)
    flags[np.frombuffer(text.encode(), np.uint8)] = 1
    return flags


_ALPHANUMERIC = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_IN_PATH = _table(_ALPHANUMERIC + "_./:-")
_IN_NAME = _table(_ALPHANUMERIC + "-_")
_OPENINGS = np.frombuffer(b"POST /v2/models/POST /v1/models/POST /upstream/m", np.uint8)  # by KIND
_OPENING_BYTES = 16
_VERSION = np.frombuffer(b" HTTP/1.1\r\n", np.uint8)
_INFER_ENDS = np.frombuffer(b"/infer", np.uint8)
_PREDICT_ENDS = np.frombuffer(b":predict", np.uint8)
_ROWS_ENDS = np.frombuffer(b"/rows", np.uint8)
_KEEP_ALIVE = np.frombuffer(b"keep-alive", np.uint8)
_SPACE, _CR, _LF, _COLON, _ZERO, _NINE = 32, 13, 10, 58, 48, 57


@nb.njit(inline="always")
def _starts_with(at, n, wanted, begin, size):  # type: ignore[no-untyped-def]
    """PLAIN, FOREIGN, or CUT where `n` bytes are too few to tell."""
    for i in range(min(n, size)):
        if load_u8(at, i) != wanted[begin + i]:
            return FOREIGN
    return PLAIN if n >= size else CUT


@nb.njit(inline="always")
def _number(at, size):  # type: ignore[no-untyped-def]
    """The number that `size` bytes spell, or -1."""
    if size < 1 or size > _MOST_DIGITS:
        return -1
    value = 0
    for i in range(size):
        digit = nb.int64(load_u8(at, i))
        if digit < _ZERO or digit > _NINE:
            return -1
        value = value * 10 + digit - _ZERO
    return value


@nb.njit
def _path(at, n, found):  # type: ignore[no-untyped-def]
    """The request line: its bytes with CR LF, or minus what it is instead."""
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
    after = _starts_with(at + end, n - end, _VERSION, 0, _VERSION.size)
    if after != PLAIN:
        return -after
    ending = _INFER_ENDS if kind == INFER else _PREDICT_ENDS if kind == PREDICT else _ROWS_ENDS
    if (
        end - ending.size <= _OPENING_BYTES
        or _starts_with(at + end - ending.size, ending.size, ending, 0, ending.size) != PLAIN
    ):
        return -FOREIGN
    found[PATH_AT], found[PATH_BYTES], found[KIND] = 5, end - 5, kind
    return end + _VERSION.size


@nb.njit(inline="always")
def _is_spelled(number, at, size):  # type: ignore[no-untyped-def]
    """Whether the name of `size` bytes of _IN_NAME at an address is the one of a number, in any case."""
    spelled = _SPELLED_FROM[number]
    if _SPELLED_FROM[number + 1] - spelled != size:
        return False
    for i in range(size):  # noqa: SIM110 - for the compiler
        if load_u8(at, i) | nb.uint8(32) != _SPELLED[spelled + i]:
            return False
    return True


@nb.njit
def _line(at, n, begin):  # type: ignore[no-untyped-def]
    """(header's number, where its value begins, where it ends) of the line at `begin`; the number may be -CUT or -FOREIGN."""
    hashed = _U64(0xCBF29CE484222325)
    i = begin
    while i < n:
        byte = load_u8(at, i)
        if _IN_NAME[byte] == 0:
            break
        if byte >= 65 and byte <= 90:
            byte |= nb.uint8(32)
        hashed = _U64((hashed ^ _U64(byte)) * _U64(0x100000001B3))
        i += 1
    if i == n:
        return -CUT, 0, 0
    if load_u8(at, i) != _COLON or i == begin:
        return -FOREIGN, 0, 0
    name_bytes = i - begin
    i += 1
    while i < n and load_u8(at, i) == _SPACE:
        i += 1
    value = i
    while i < n and load_u8(at, i) >= _SPACE and load_u8(at, i) < 127:
        i += 1
    if i + 1 >= n:
        return (-CUT, 0, 0) if i == n or load_u8(at, i) == _CR else (-FOREIGN, 0, 0)
    if load_u8(at, i) != _CR or load_u8(at, i + 1) != _LF or (i > value and load_u8(at, i - 1) == _SPACE):
        return -FOREIGN, 0, 0
    slot = nb.int64(hashed & _U64(_SLOTS - 1))
    while _SLOT_NUMBERS[slot] >= 0:
        if _SLOT_NAMES[slot] == hashed and _is_spelled(_SLOT_NUMBERS[slot], at + begin, name_bytes):
            return _SLOT_NUMBERS[slot], value, i
        slot = (slot + 1) & (_SLOTS - 1)
    return -FOREIGN, 0, 0


@nb.njit
def parse_at(at, n, found):  # type: ignore[no-untyped-def]
    """What the `n` bytes at address `at` begin with: PLAIN, and `found` says the rest; CUT; or FOREIGN."""
    i = _path(at, n, found)
    if i <= 0:
        return -i
    found[BODY_BYTES], found[JSON_BYTES], found[HOST_BYTES], found[TIMEOUT_MS], found[UNUSUAL] = -1, NONE, 0, 0, 0
    found[AUTHORIZATION_AT] = found[AUTHORIZATION_BYTES] = 0
    seen = 0
    while True:
        if i < n and load_u8(at, i) == _CR:
            if i + 1 == n:
                return CUT
            if load_u8(at, i + 1) != _LF or found[BODY_BYTES] < 0 or seen & 1 == 0:
                return FOREIGN
            found[HEAD_BYTES] = i + 2
            return PLAIN
        number, value, end = _line(at, n, i)
        if number < 0:
            return -number
        i = end + 2
        if number >= _IGNORED_FROM:
            continue
        if seen & (1 << number):
            return FOREIGN
        seen |= 1 << number
        size = end - value
        if number == 0:  # host
            found[HOST_AT], found[HOST_BYTES] = value, size
        elif number == 1:  # content-length
            found[BODY_BYTES] = _number(at + value, size)
            if found[BODY_BYTES] < 0:
                return FOREIGN
        elif number == 2:  # connection
            if size != _KEEP_ALIVE.size:
                return FOREIGN
            for k in range(size):
                if load_u8(at, value + k) | nb.uint8(32) != _KEEP_ALIVE[k]:
                    return FOREIGN
        elif number == 3:  # inference-header-content-length
            found[JSON_BYTES] = _number(at + value, size)
            if found[JSON_BYTES] < 0:
                found[UNUSUAL] |= ODD_VALUE
        elif number == 4:  # accept-encoding: only one that names a single coding is a wish
            if size > 0 and size < 10:
                found[UNUSUAL] |= CODED
        elif number == 5:  # x-request-id
            found[UNUSUAL] |= ROUTED
        elif number == 6:  # authorization
            found[AUTHORIZATION_AT], found[AUTHORIZATION_BYTES] = value, size
        else:  # a timeout
            timeout = _number(at + value, size)
            if timeout < 0:
                found[UNUSUAL] |= ODD_VALUE
            elif timeout > 0 and (found[TIMEOUT_MS] == 0 or timeout < found[TIMEOUT_MS]):
                found[TIMEOUT_MS] = timeout


@compiled(types.int64(types.int64, types.int64, types.int64[::1]), when=LAST)
def parse(at: Any, n: Any, found: Any) -> Any:
    """What the `n` bytes at address `at` begin with: PLAIN, CUT or FOREIGN. `found`, int64[FOUND_WORDS], says the rest."""
    return parse_at(at, n, found)
