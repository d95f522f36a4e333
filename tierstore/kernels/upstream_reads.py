"""Rows from nodes upstream, without Python: keys by the node to ask, all sockets at once, answers into their places.

Free functions of arrays and addresses, nogil; any thread. `tiers/upstream/wire.py` describes requests and answers. Of HTTP an
answer's status, Content-Length and `Connection: close` are understood; nothing that a node says of sizes is trusted.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.front_rows import ABSENT, ANSWER_HEAD_BYTES, FOREIGN, THERE, rows_begin
from tierstore.kernels.partitions import partition_at
from tierstore.kernels.raw import load_u8, load_u64, store_u8
from tierstore.kernels.sysio import EAGAIN, EINTR, READABLE, WRITABLE, monotonic_ns, poll, receive, send
from tierstore.types import Tier

# words of a connection, int64; BODY_BYTES is -1 until the head is there, HTTP_STATUS and the words behind it are then valid
FD, SEND_AT, SEND_BYTES, SENT, BUFFER_AT, BUFFER_BYTES, RECEIVED, HTTP_STATUS, BODY_AT, BODY_BYTES, CLOSES, STATUS = (
    range(12)
)
CONNECTION_WORDS = 12
# STATUS: one of these, or minus the number of an error of the system
RUNNING, DONE, CLOSED, TIMED_OUT, UNEXPECTED = range(5)
MALFORMED = -1  # of `scatter`

_REMOTE, _ABSENT = int(Tier.REMOTE), int(Tier.ABSENT)
_LENGTH = np.frombuffer(b"content-length:", np.uint8)
_CONNECTION = np.frombuffer(b"connection: close", np.uint8)
_VERSION = np.frombuffer(b"http/1.", np.uint8)
_STATUS_AT = 9  # behind "HTTP/1.1 "
_CR, _LF, _SPACE = 13, 10, 32

_CODES = types.Array(types.int64, 1, "C", readonly=True)
_I64S, _I64S2 = types.int64[::1], types.int64[:, ::1]


@compiled(types.void(_CODES, _CODES, _CODES, _I64S, _I64S), when=LAST)
def assign(codes: Any, places: Any, node_of: Any, order: Any, starts: Any) -> Any:
    """Places by the node to ask: those of node k are order[starts[k]:starts[k + 1]], as in `places`; those of no node come last.

    `node_of` int64[partitions]: a node, or -1. `starts` int64[nodes + 2].
    """
    nodes, count = len(starts) - 2, len(node_of)
    of = np.empty(len(places), np.int64)
    starts[:] = 0
    for i in range(len(places)):
        node = node_of[partition_at(codes[places[i]], count)]
        of[i] = nodes if node < 0 else node
        starts[of[i] + 1] += 1
    for node in range(nodes + 1):
        starts[node + 1] += starts[node]
    at = starts[:-1].copy()
    for i in range(len(places)):
        order[at[of[i]]] = places[i]
        at[of[i]] += 1


@nb.njit
def _begins(at, size, text):  # type: ignore[no-untyped-def]
    """Whether the `size` bytes at an address begin with `text`, in any case."""
    if size < text.size:
        return False
    for i in range(text.size):
        byte = load_u8(at, i)
        if (byte | 32 if byte >= 65 and byte <= 90 else byte) != text[i]:
            return False
    return True


@nb.njit
def _digits(at, size):  # type: ignore[no-untyped-def]
    """The number that 1 to 18 digits spell, spaces before them aside; -1 where it is none."""
    while size > 0 and load_u8(at, 0) == _SPACE:
        at += 1
        size -= 1
    if size < 1 or size > 18:
        return -1
    value = nb.int64(0)
    for i in range(size):
        digit = nb.int64(load_u8(at, i)) - 48
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
    return value


@nb.njit
def _read_head(words):  # type: ignore[no-untyped-def]
    """Read the head of an answer, if all of it is there. The STATUS from now on."""
    at, size = words[BUFFER_AT], words[RECEIVED]
    line, status, length = 0, -1, -1
    words[CLOSES] = 0
    for i in range(size - 1):
        if load_u8(at, i) != _CR or load_u8(at, i + 1) != _LF:
            continue
        if status < 0:
            status = _digits(at + _STATUS_AT, 3) if _begins(at, i, _VERSION) else -1
            if status < 0 or i < _STATUS_AT + 3:
                return UNEXPECTED
        elif i == line:
            if length < 0 or i + 2 + length > words[BUFFER_BYTES]:
                return UNEXPECTED
            words[HTTP_STATUS], words[BODY_AT], words[BODY_BYTES] = status, i + 2, length
            return RUNNING
        elif _begins(at + line, i - line, _LENGTH):
            length = _digits(at + line + _LENGTH.size, i - line - _LENGTH.size)
        elif _begins(at + line, i - line, _CONNECTION):
            words[CLOSES] = 1
        line = i + 2
    return UNEXPECTED if size == words[BUFFER_BYTES] else RUNNING


@nb.njit
def _read(words):  # type: ignore[no-untyped-def]
    """Receive what there is of an answer. The STATUS from now on."""
    got = receive(words[FD], words[BUFFER_AT] + words[RECEIVED], words[BUFFER_BYTES] - words[RECEIVED])
    if got <= 0:
        return CLOSED if got == 0 else RUNNING if got == -EAGAIN or got == -EINTR else got
    words[RECEIVED] += got
    status = _read_head(words) if words[BODY_BYTES] < 0 else RUNNING
    if status != RUNNING or words[BODY_BYTES] < 0:
        return status
    missing = words[BODY_AT] + words[BODY_BYTES] - words[RECEIVED]
    return RUNNING if missing > 0 else DONE if missing == 0 else UNEXPECTED


@compiled(types.void(_I64S2, _I64S, types.int64), when=LAST)
def exchange(connections: Any, polled: Any, deadline_ns: Any) -> Any:
    """Send all requests and read all answers, on all connections at once, until the deadline (of `time.monotonic_ns`).

    `polled` int64 [connections] is working memory. STATUS says of each connection how it went, and where DONE, the words of
    its answer.
    """
    polled[:] = 0
    while True:
        running = 0
        for c in range(len(connections)):
            words = connections[c]
            if words[STATUS] == RUNNING and words[SENT] < words[SEND_BYTES]:
                sent = send(words[FD], words[SEND_AT] + words[SENT], words[SEND_BYTES] - words[SENT], 0)
                if sent >= 0:
                    words[SENT] += sent
                elif sent != -EAGAIN and sent != -EINTR:
                    words[STATUS] = sent
            if words[STATUS] == RUNNING and polled[c] >> 48 != 0:  # what `poll` has said of it
                words[STATUS] = _read(words)
            if words[STATUS] == RUNNING:
                wanted = READABLE | (WRITABLE if words[SENT] < words[SEND_BYTES] else 0)
                polled[c] = words[FD] | (wanted << 32)
                running += 1
            else:
                polled[c] = 0xFFFFFFFF  # no descriptor
        if running == 0:
            return
        remaining_ms = (deadline_ns - monotonic_ns() + 999_999) // 1_000_000
        if remaining_ms <= 0:
            for c in range(len(connections)):
                if connections[c, STATUS] == RUNNING:
                    connections[c, STATUS] = TIMED_OUT
            return
        poll(nb.int64(polled.ctypes.data), len(connections), min(remaining_ms, 1_000_000))


@compiled(
    types.int64(types.int64, types.int64, _I64S, types.int64, types.int64, types.int64, types.int64, _I64S), when=LAST
)
def scatter(body: Any, size: Any, places: Any, rows: Any, stride: Any, row_bytes: Any, state: Any, seq: Any) -> Any:
    """Store the answer of `size` bytes at `body`: rows and states of `places`, and its seq.

    `rows` and `state` are addresses, row i lies at `rows` + i * stride. Returns how many codes the node does not own, whose places are
    then the first of `places`; MALFORMED, and nothing is stored, where it is no answer for so many codes of such rows.
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
