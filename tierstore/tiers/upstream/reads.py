"""Reads of rows from upstream nodes, without Python: all sockets at once, and answers copied to their places.

Free functions of arrays and addresses, nogil; any thread. `tiers/upstream/wire.py` describes requests and answers. From HTTP only the status,
Content-Length and `Connection: close` are read; no size in an answer is trusted.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u8, load_u64, store_u8
from tierstore.kernels.records import at, define
from tierstore.kernels.sysio import EAGAIN, EINTR, READABLE, WRITABLE, monotonic_ns, poll, receive, send
from tierstore.tiers.upstream.layout import ABSENT, ANSWER_HEAD_BYTES, FOREIGN, THERE, rows_begin
from tierstore.types import Tier
from tierstore.wire.http1.head import read_number

NODE = define("AskedNode", "a connection to a node that is asked for rows", {
    "fd": "the descriptor",
    "send_at send_bytes sent": "the address and the bytes of the request, and the bytes of it that have left",
    "buffer_at buffer_bytes received": "the address and the bytes of the buffer for the answer, and the bytes that have come",
    "http_status body_at body_bytes": "the status of the answer, and the place and the bytes of its body, once `body_bytes` is not -1",
    "closes": "1: the node ends the connection after the answer",
    "status": "RUNNING, DONE, CLOSED, TIMED_OUT, UNEXPECTED; or minus the error number of the system",
})  # fmt: skip
_node_at = at(NODE)
RUNNING, DONE, CLOSED, TIMED_OUT, UNEXPECTED = range(5)
MALFORMED = -1  # result of `scatter`

_REMOTE, _ABSENT = int(Tier.REMOTE), int(Tier.ABSENT)
_LENGTH = np.frombuffer(b"content-length:", np.uint8)
_CONNECTION = np.frombuffer(b"connection: close", np.uint8)
_VERSION = np.frombuffer(b"http/1.", np.uint8)
_STATUS_AT = 9  # behind "HTTP/1.1 "
_CR, _LF, _SPACE = 13, 10, 32

_I64S = types.int64[::1]


@nb.njit
def _begins(at, size, text):
    """Whether the `size` bytes at an address begin with `text`, in any case."""
    if size < text.size:
        return False
    for i in range(text.size):
        byte = load_u8(at, i)
        if (byte | 32 if byte >= 65 and byte <= 90 else byte) != text[i]:
            return False
    return True


@nb.njit
def _digits(at, size):
    """The number in 1 to 18 digits, ignoring spaces in front; -1 if it is malformed."""
    while size > 0 and load_u8(at, 0) == _SPACE:
        at += 1
        size -= 1
    return read_number(at, size, 18)


@nb.njit
def _read_head(node):
    """Read the head of an answer if it is complete. Returns the new STATUS."""
    at, size = node.buffer_at, node.received
    line, status, length = 0, -1, -1
    node.closes = 0
    for i in range(size - 1):
        if load_u8(at, i) != _CR or load_u8(at, i + 1) != _LF:
            continue
        if status < 0:
            status = _digits(at + _STATUS_AT, 3) if _begins(at, i, _VERSION) else -1
            if status < 0 or i < _STATUS_AT + 3:
                return UNEXPECTED
        elif i == line:
            if length < 0 or i + 2 + length > node.buffer_bytes:
                return UNEXPECTED
            node.http_status, node.body_at, node.body_bytes = status, i + 2, length
            return RUNNING
        elif _begins(at + line, i - line, _LENGTH):
            length = _digits(at + line + _LENGTH.size, i - line - _LENGTH.size)
        elif _begins(at + line, i - line, _CONNECTION):
            node.closes = 1
        line = i + 2
    return UNEXPECTED if size == node.buffer_bytes else RUNNING


@nb.njit
def _read(node):
    """Receive available bytes of an answer. Returns the new STATUS."""
    got = receive(node.fd, node.buffer_at + node.received, node.buffer_bytes - node.received)
    if got <= 0:
        return CLOSED if got == 0 else RUNNING if got == -EAGAIN or got == -EINTR else got
    node.received += got
    status = _read_head(node) if node.body_bytes < 0 else RUNNING
    if status != RUNNING or node.body_bytes < 0:
        return status
    missing = node.body_at + node.body_bytes - node.received
    return RUNNING if missing > 0 else DONE if missing == 0 else UNEXPECTED


@compiled(types.void(types.int64, _I64S, types.int64), when=LAST)
def exchange(nodes: Any, polled: Any, deadline_ns: Any) -> Any:
    """Send all requests and read all answers, on all connections at once, until the deadline (of `time.monotonic_ns`).

    `nodes` is the address of a NODE for each entry of `polled`, int64 [nodes], which is working memory. The result of each is in its `status`; if
    that is DONE, the other fields have its answer.
    """
    polled[:] = 0
    while True:
        running = 0
        for c in range(len(polled)):
            node = _node_at(nodes, c)
            if node.status == RUNNING and node.sent < node.send_bytes:
                sent = send(node.fd, node.send_at + node.sent, node.send_bytes - node.sent, 0)
                if sent >= 0:
                    node.sent += sent
                elif sent != -EAGAIN and sent != -EINTR:
                    node.status = sent
            if node.status == RUNNING and polled[c] >> 48 != 0:  # the events that `poll` returned
                node.status = _read(node)
            if node.status == RUNNING:
                wanted = READABLE | (WRITABLE if node.sent < node.send_bytes else 0)
                polled[c] = node.fd | (wanted << 32)
                running += 1
            else:
                polled[c] = 0xFFFFFFFF  # no descriptor
        if running == 0:
            return
        remaining_ms = (deadline_ns - monotonic_ns() + 999_999) // 1_000_000
        if remaining_ms <= 0:
            for c in range(len(polled)):
                if _node_at(nodes, c).status == RUNNING:
                    _node_at(nodes, c).status = TIMED_OUT
            return
        poll(nb.int64(polled.ctypes.data), len(polled), min(remaining_ms, 1_000_000))


@compiled(
    types.int64(types.int64, types.int64, _I64S, types.int64, types.int64, types.int64, types.int64, _I64S), when=LAST
)
def scatter(body: Any, size: Any, places: Any, rows: Any, stride: Any, row_bytes: Any, state: Any, seq: Any) -> Any:
    """Store the answer of `size` bytes at `body`: rows and states at `places`, and its seq.

    `rows` and `state` are addresses, row i is at `rows` + i * stride. Returns the number of codes that the node does not own, whose places are then
    the first of `places`; or MALFORMED, with nothing stored, if the answer does not fit these codes and rows.
    """
    n = len(places)
    begin = rows_begin(n)
    if size < begin or nb.int64(load_u64(body, 1)) != n:
        return MALFORMED
    states, there = body + ANSWER_HEAD_BYTES, 0
    for i in range(n):
        of = load_u8(states, i)
        if of < THERE or of > FOREIGN:
            return MALFORMED
        there += of == THERE
    if size != begin + there * row_bytes:
        return MALFORMED
    seq[0] = nb.int64(load_u64(body, 0))
    row, foreign = body + begin, 0
    for i in range(n):
        place, of = places[i], load_u8(states, i)
        if of == THERE:
            copy_bytes(rows + place * stride, row, row_bytes)
            row += row_bytes
            store_u8(state, place, nb.uint8(_REMOTE))
        elif of == ABSENT:
            store_u8(state, place, nb.uint8(_ABSENT))
        else:
            places[foreign] = place
            foreign += 1
    return foreign
