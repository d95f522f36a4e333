"""The head of an HTTP/2 request: a decoded header list, checked as RFC 9113 (8.2, 8.3) asks, and kept with its stream as text.

    HEAD_WORDS, 8 bytes each;  <method> <path> LF  <authority> LF  { <name>:<value> LF }

No part of the text can have a line feed in it, so Python splits it at them. The fields that a reactor reads (see `wire/http1/head.py`) are in the
stream's record, by their place in the text. Trailers are checked and dropped.

Free functions of addresses, nogil.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u8, store_u8, store_u64
from tierstore.kernels.records import text_at
from tierstore.kernels.sysio import allocate, same_bytes
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http2.hpack import field_at
from tierstore.wire.http2.layout import (
    CALL,
    PREDICT,
    STREAMING,
    WHOLE,
)
from tierstore.wire.json.text import names_of, place_of

# three words: when the head came; its grpc-timeout in ms (0 without one, NO_TIMEOUT for a malformed one); 1 for a gRPC call
HEAD_WORDS = 3
NO_TIMEOUT = -1
GOOD, EXPECTS, MALFORMED, NO_MEMORY = range(4)  # EXPECTS: good, and the client waits for `100 Continue`

# names by their first index in HPACK's static table; others by their index in _NAMES, plus _OTHERS
_AUTHORITY, _METHOD, _PATH, _SCHEME, _STATUS = 1, 2, 4, 6, 8
_AUTHORIZATION, _CONTENT_ENCODING, _CONTENT_LENGTH, _CONTENT_TYPE, _EXPECT, _HOST = 23, 26, 28, 31, 35, 38
_TRANSFER_ENCODING = 57
_OTHERS = 100
_NAMES, _NAMES_FROM = names_of(
    "te", "connection", "keep-alive", "proxy-connection", "upgrade", "x-request-id", "grpc-timeout", "grpc-encoding", "origin", "traceparent",
)  # fmt: skip
_TE, _CONNECTION, _UPGRADE, _REQUEST_ID, _TIMEOUT, _GRPC_ENCODING, _ORIGIN, _TRACEPARENT = 100, 101, *range(104, 110)

_TRAILERS, _IDENTITY, _GRPC, _CONTINUE = (
    np.frombuffer(text, np.uint8) for text in (b"trailers", b"identity", b"application/grpc", b"100-continue")
)
INFER_PATH = np.frombuffer(b"/inference.GRPCInferenceService/ModelInfer", np.uint8)
PREDICT_PATH = np.frombuffer(b"/tensorflow.serving.PredictionService/Predict", np.uint8)
_COLON, _LF, _SPACE, _TAB, _SLASH, _STAR = 58, 10, 32, 9, 47, 42
_MOST_DIGITS = 18  # of lengths and timeouts
_IN_NAME = http1_head.IN_NAME.copy()
_IN_NAME[65:91] = 0  # capital letters
_PSEUDO = 5  # words: the addresses of method, path, scheme and authority; then their numbers of bytes
# units of grpc-timeout: _UNIT_OF of a unit are _UNIT_MS milliseconds
_UNITS = b"numSMH"
_UNIT_OF = np.array([1_000_000, 1_000, 1, 1, 1, 1], np.int64)
_UNIT_MS = np.array([1, 1, 1, 1_000, 60_000, 3_600_000], np.int64)
_MOST_TIMEOUT_MS = 1 << 40  # the largest timeout, so that it can be counted in nanoseconds


@nb.njit(inline="always")
def _is(at, size, wanted):
    return size == wanted.size and same_bytes(at, nb.int64(wanted.ctypes.data), size) == 1


@nb.njit
def _is_name(at, size):
    """Whether a name is a token without capital letters."""
    for i in range(size):
        if _IN_NAME[load_u8(at, i)] == 0:
            return False
    return size > 0


@nb.njit
def _is_value(at, size):
    """Whether a value has no control bytes, and no blank at either end."""
    for i in range(size):
        byte = load_u8(at, i)
        if (byte < _SPACE and byte != _TAB) or byte == 127:
            return False
    if size == 0:
        return True
    first, last = load_u8(at, 0), load_u8(at, size - 1)
    return first != _SPACE and first != _TAB and last != _SPACE and last != _TAB


@nb.njit
def _is_path(at, size):
    if size == 0 or (load_u8(at, 0) != _SLASH and not (size == 1 and load_u8(at, 0) == _STAR)):
        return False
    for i in range(size):  # noqa: SIM110 - for the compiler
        if load_u8(at, i) <= _SPACE or load_u8(at, i) >= 127:
            return False
    return True


@nb.njit
def _timeout_ms(at, size):
    """The milliseconds of a grpc-timeout, at least 1; NO_TIMEOUT if it is malformed."""
    if size < 2 or size > 9:
        return NO_TIMEOUT
    value = http1_head.read_number(at, size - 1, _MOST_DIGITS)
    if value < 0:
        return NO_TIMEOUT
    for k in range(6):
        if load_u8(at, size - 1) == _UNITS[k]:
            return min(max(value * _UNIT_MS[k] // _UNIT_OF[k], nb.int64(1)), nb.int64(_MOST_TIMEOUT_MS))
    return NO_TIMEOUT


@nb.njit
def _kind(streaming, path, path_bytes, is_grpc):
    """How a request for a path is handled: WHOLE, CALL, PREDICT or STREAMING. `streaming` has the paths of streaming methods, or is 0."""
    if not is_grpc:
        return WHOLE
    if _is(path, path_bytes, INFER_PATH):
        return CALL
    if _is(path, path_bytes, PREDICT_PATH):
        return PREDICT
    if streaming != 0:
        for k in range(streaming.count):
            other = text_at(streaming.first, k)
            if other.bytes == path_bytes and same_bytes(other.at, path, path_bytes) == 1:
                return STREAMING
    return WHOLE


@nb.njit(inline="always")
def _write(target, n, at, size, end):
    copy_bytes(target + n, at, size)
    store_u8(target, n + size, nb.uint8(end))
    return n + size + 1


@nb.njit
def read_head(row, text, fields, count, streaming, now):
    """Keep `count` decoded fields as the head of a stream. Returns GOOD, EXPECTS, MALFORMED or NO_MEMORY."""
    method = path = scheme = authority = host = nb.int64(0)
    method_bytes = path_bytes = authority_bytes = host_bytes = nb.int64(0)
    authorization = request_id = -1
    declared, timeout, unusual, is_grpc, regular = nb.int64(-1), nb.int64(0), 0, False, False
    came = GOOD
    size = 8 * HEAD_WORDS + 16
    for i in range(count):
        field = field_at(fields, i)
        name, name_bytes = text + field.name_at, field.name_bytes
        value, value_bytes = text + field.value_at, field.value_bytes
        which = field.name_is
        size += name_bytes + value_bytes + 2
        if not _is_value(value, value_bytes):
            return MALFORMED
        if name_bytes > 0 and load_u8(name, 0) == _COLON:
            if regular:
                return MALFORMED
            if which == _METHOD and method == 0 and _is_name_of_method(value, value_bytes):
                method, method_bytes = value, value_bytes
            elif which == _PATH and path == 0 and _is_path(value, value_bytes):
                path, path_bytes = value, value_bytes
            elif which == _SCHEME and scheme == 0:
                scheme = value
            elif which == _AUTHORITY and authority == 0:
                authority, authority_bytes = value, value_bytes
            else:
                return MALFORMED
            continue
        regular = True
        if not _is_name(name, name_bytes):
            return MALFORMED
        if which == 0:
            which = _OTHERS + place_of(name, 0, name_bytes, _NAMES, _NAMES_FROM)
        if which == _CONTENT_LENGTH:
            length = http1_head.read_number(value, value_bytes, _MOST_DIGITS)
            if length < 0 or (declared >= 0 and length != declared):
                return MALFORMED
            declared = length
        elif which == _CONTENT_TYPE:
            is_grpc = value_bytes >= _GRPC.size and _is(value, _GRPC.size, _GRPC)
            if is_grpc and value_bytes > _GRPC.size:
                after = load_u8(value, _GRPC.size)
                is_grpc = after == 43 or after == 59  # + ;
        elif which == _AUTHORIZATION:
            if authorization >= 0:
                unusual |= http1_head.ODD_VALUE
            authorization = i
        elif which == _EXPECT:
            if http1_head.is_word(value, value_bytes, _CONTINUE):
                came = EXPECTS
        elif which == _HOST:
            if host != 0:
                return MALFORMED  # who passes it on may have read the other one
            host, host_bytes = value, value_bytes
        elif which in (_CONTENT_ENCODING, _GRPC_ENCODING):
            if value_bytes > 0 and not _is(value, value_bytes, _IDENTITY):
                unusual |= http1_head.CODED
        elif which == _REQUEST_ID:
            unusual |= http1_head.ROUTED
            request_id = i
        elif which == _TIMEOUT:
            own = _timeout_ms(value, value_bytes)
            if own == NO_TIMEOUT:
                unusual |= http1_head.ODD_VALUE
            if timeout != NO_TIMEOUT and (own < timeout or timeout == 0):
                timeout = own
        elif which == _ORIGIN:
            unusual |= http1_head.FROM_A_PAGE
        elif which == _TRACEPARENT:
            if http1_head.is_sampled(value, value_bytes):
                unusual |= http1_head.SAMPLED
        elif which == _TE:
            if not _is(value, value_bytes, _TRAILERS):
                return MALFORMED
        elif which == _TRANSFER_ENCODING or (which >= _CONNECTION and which <= _UPGRADE):
            return MALFORMED
    if method == 0 or path == 0 or scheme == 0:
        return MALFORMED
    if authority == 0:
        authority, authority_bytes = host, host_bytes
    elif host != 0 and (host_bytes != authority_bytes or same_bytes(host, authority, host_bytes) == 0):
        return MALFORMED
    target = allocate(size + 64)
    if target == 0:
        return NO_MEMORY
    store_u64(target, 0, nb.uint64(now))
    store_u64(target, 1, nb.uint64(timeout))
    store_u64(target, 2, nb.uint64(is_grpc))
    n = _write(target, 8 * HEAD_WORDS, method, method_bytes, _SPACE)
    row.path_at = n
    row.path_bytes = path_bytes
    n = _write(target, n, path, path_bytes, _LF)
    row.host_at = n
    row.host_bytes = authority_bytes
    n = _write(target, n, authority, authority_bytes, _LF)
    row.authorization_at = 0
    row.authorization_bytes = 0
    row.request_id_bytes = 0
    for i in range(count):
        field = field_at(fields, i)
        name, name_bytes = text + field.name_at, field.name_bytes
        if load_u8(name, 0) == _COLON:
            continue
        n = _write(target, n, name, name_bytes, _COLON)
        value_bytes = field.value_bytes
        if i == authorization:
            row.authorization_at = n
            row.authorization_bytes = value_bytes
        elif i == request_id:
            row.request_id_at = n
            row.request_id_bytes = value_bytes
        n = _write(target, n, text + field.value_at, value_bytes, _LF)
    row.at = target
    row.bytes = n
    row.room = size
    row.head_bytes = n
    row.declared = declared
    row.timeout_ms = max(timeout, nb.int64(0))
    row.unusual = unusual
    row.kind = _kind(streaming, path, path_bytes, is_grpc)
    return came


@nb.njit
def _is_name_of_method(at, size):
    for i in range(size):
        if http1_head.IN_NAME[load_u8(at, i)] == 0:
            return False
    return size > 0


@nb.njit
def are_trailers(text, fields, count):
    """Whether decoded fields may be trailers: no pseudo-headers, valid names and values."""
    for i in range(count):
        field = field_at(fields, i)
        name, name_bytes = text + field.name_at, field.name_bytes
        value, value_bytes = text + field.value_at, field.value_bytes
        if not _is_name(name, name_bytes) or not _is_value(value, value_bytes):
            return False
    return True
