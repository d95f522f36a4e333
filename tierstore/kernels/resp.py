"""The protocol of Redis (RESP2) for batches of rows of one size: requests written, sent, received and parsed without Python.

A request is a sequence of commands on each of some connections; the replies come in the same order. A command asks either for
a watermark (`MARK`: two numbers of a hash) or for rows (`ROWS`: fields of a hash, each 8 bytes of code). Rows go straight
from the connection's buffer to their place; `order` says which. A reply that is an error is kept as text and fails its command
alone. Whatever else does not fit what was requested ends the connection: its state is not known any more.

Nothing here reads a reply's size from the wire and trusts it: a row's size is known, and a line longer than the buffer is an error.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u8, load_u64, store_u8, store_u64
from tierstore.kernels.sysio import EAGAIN, EINTR, READABLE, WRITABLE, monotonic_ns, move_bytes, poll, receive, send
from tierstore.types import Tier

# words of a connection, int64
FD, SEND_AT, SEND_BYTES, SENT, BUFFER_AT, BUFFER_BYTES, RECEIVED, COMMAND, END, ITEM, STATUS = range(11)
CONNECTION_WORDS = 12
# words of a command: what it asks for, the number of its tag, and of rows: which of `order`, and how many
KIND, TAG, START, COUNT = range(4)
COMMAND_WORDS = 4
MARK, ROWS = 0, 1
# STATUS: one of these, or minus the number of an error of the system
RUNNING, DONE, CLOSED, TIMED_OUT, UNEXPECTED = range(5)

KEY_BYTES = 14  # of a field in a request
MOST_ROW_BYTES = 99_999  # a reply's head then fits into 8 bytes
ERROR_BYTES = 160  # kept of an error's text
_CR, _LF, _DOLLAR, _STAR, _MINUS = 13, 10, 36, 42, 45
_REMOTE, _ABSENT = int(Tier.REMOTE), int(Tier.ABSENT)
_KEY_HEAD = 0x0A0D3824  # "$8\r\n"
_NIL = 0x0A0D312D24  # "$-1\r\n"
_NIL_BYTES = 5
_MOST = (1 << 63) - 1  # of a number
_AGAIN = -1  # of a parser: more bytes are needed

_U64 = np.uint64
_CODES = types.Array(types.int64, 1, "C", readonly=True)
_I64S = types.int64[::1]
_I64S2 = types.int64[:, ::1]
_U8S2 = types.uint8[:, ::1]


@compiled(types.void(_CODES, _CODES, types.int64), when=LAST)
def encode_keys(codes: Any, order: Any, at: Any) -> Any:
    """Write the fields of codes[order], KEY_BYTES each, to the address `at`."""
    head = nb.int64(_KEY_HEAD)
    for i in range(len(order)):
        store_u64(at, 0, nb.uint64(head))
        store_u64(at + 4, 0, nb.uint64(codes[order[i]]))
        store_u8(at + 12, 0, _CR)
        store_u8(at + 13, 0, _LF)
        at += KEY_BYTES


@compiled(
    types.void(_CODES, _CODES, types.int64, types.int64, types.int64, types.uint64, types.int64, types.int64), when=LAST
)
def encode_rows(
    codes: Any, order: Any, rows: Any, stride: Any, row_bytes: Any, head: Any, head_bytes: Any, at: Any
) -> Any:
    """Write fields and rows of codes[order] to the address `at`; row i lies at `rows` + i * stride."""
    for i in range(len(order)):
        store_u64(at, 0, nb.uint64(_KEY_HEAD))
        store_u64(at + 4, 0, nb.uint64(codes[order[i]]))
        store_u8(at + 12, 0, _CR)
        store_u8(at + 13, 0, _LF)
        for b in range(head_bytes):
            store_u8(at + KEY_BYTES + b, 0, (head >> _U64(8 * b)) & _U64(255))
        at += KEY_BYTES + head_bytes
        copy_bytes(at, rows + order[i] * stride, row_bytes)
        store_u8(at + row_bytes, 0, _CR)
        store_u8(at + row_bytes + 1, 0, _LF)
        at += row_bytes + 2


@compiled(types.int64(_CODES, _CODES, _I64S), when=LAST)
def match_sorted(ours: Any, theirs: Any, where: Any) -> Any:
    """where[i]: the place of ours[i] in `theirs`, unless it is not there. Both ascending. Returns how many are there."""
    j = found = 0
    for i in range(len(ours)):
        while j < len(theirs) and theirs[j] < ours[i]:
            j += 1
        if j == len(theirs):
            break
        if theirs[j] == ours[i]:
            where[i] = j
            found += 1
    return found


@compiled("int64(int64, int64)", inner=True)
def _line(at: Any, size: Any) -> Any:
    """The bytes of the line at `at`, without its end; _AGAIN if there is no end."""
    for i in range(size - 1):
        if load_u8(at, i) == _CR and load_u8(at, i + 1) == _LF:
            return i
    return _AGAIN


@compiled("int64(int64, int64)", inner=True)
def _number(at: Any, size: Any) -> Any:
    """A whole number of 1 to 19 digits, below 2⁶³; -2 where it is none."""
    if size < 1 or size > 19:
        return -2
    value = nb.int64(0)
    for i in range(size):
        digit = nb.int64(load_u8(at, i)) - 48
        if digit < 0 or digit > 9 or value > (_MOST - digit) // 10:
            return -2
        value = value * 10 + digit
    return value


@compiled("int64(int64, int64, int64[:, ::1], int64, int64)", inner=True)
def _parse_mark(at: Any, size: Any, marks: Any, tag: Any, item: Any) -> Any:
    """One of the two numbers of a watermark: its bytes, _AGAIN, or -2. A missing one stays as it was.

    The first command of a tag gives a lower bound, items 0 and 1 of it; the second an upper one, items 2 and 3.
    """
    head = _line(at, size)
    if head == _AGAIN:
        return _AGAIN
    if load_u8(at, 0) != _DOLLAR:
        return -2
    if head == 3 and load_u8(at, 1) == _MINUS:
        return 5
    digits = _number(at + 1, head - 1)
    if digits < 1 or digits > 19:
        return -2
    if size < head + 2 + digits + 2:
        return _AGAIN
    value = _number(at + head + 2, digits)
    if value < 0:
        return -2
    if item == 0:
        marks[tag, 0] = value
    elif item >= 2:
        marks[tag, 1] = max(marks[tag, 1], value)
    return head + 2 + digits + 2


@compiled(
    types.int64(
        _I64S, _I64S2, _CODES, types.int64, types.int64, types.int64, types.uint64, types.int64, types.int64,
        _I64S2, _U8S2,
    ),
    inner=True,
)  # fmt: skip
def _parse(
    words: Any, commands: Any, order: Any, rows: Any, stride: Any, row_bytes: Any, head: Any, head_bytes: Any,
    state: Any, marks: Any, errors: Any,
) -> Any:  # fmt: skip
    """Read all whole elements that were received; the others move to the buffer's beginning. The STATUS from now on."""
    at, size = words[BUFFER_AT], words[RECEIVED]
    begin = at
    end = at + size
    mask = (_U64(1) << _U64(8 * head_bytes)) - _U64(1) if head_bytes < 8 else ~_U64(0)
    whole = head_bytes + row_bytes + 2
    status = RUNNING
    while True:
        if words[COMMAND] == words[END]:
            status = DONE if at == end else UNEXPECTED
            break
        command = words[COMMAND]
        tag, kind = commands[command, TAG], commands[command, KIND]
        count = commands[command, COUNT]
        if words[ITEM] < 0:
            line = _line(at, end - at)
            if line == _AGAIN:
                break
            first = load_u8(at, 0)
            if first == _MINUS:
                kept = min(line - 1, ERROR_BYTES)
                errors[tag, :] = 0
                for i in range(kept):
                    errors[tag, i] = load_u8(at + 1, i)
                words[COMMAND] += 1
            elif first == _STAR and _number(at + 1, line - 1) == count:
                words[ITEM] = 0
            else:
                status = UNEXPECTED
                break
            at += line + 2
            continue
        if kind == ROWS:
            i = words[ITEM]
            start = commands[command, START]
            while i < count and end - at >= whole and load_u64(at, 0) & mask == head:
                place = order[start + i]
                copy_bytes(rows + place * stride, at + head_bytes, row_bytes)
                store_u8(state + place, 0, _REMOTE)
                at += whole
                i += 1
            words[ITEM] = i
            if i < count:
                if end - at < _NIL_BYTES:
                    break
                if load_u64(at, 0) & _U64(0xFFFFFFFFFF) == _U64(_NIL):
                    store_u8(state + order[start + i], 0, _ABSENT)
                    at += _NIL_BYTES
                    words[ITEM] += 1
                elif end - at >= head_bytes and load_u64(at, 0) & mask != head:
                    status = UNEXPECTED
                    break
                else:
                    break
        else:
            used = _parse_mark(at, end - at, marks, tag, words[ITEM] + 2 * commands[command, START])
            if used == _AGAIN:
                break
            if used < 0:
                status = UNEXPECTED
                break
            at += used
            words[ITEM] += 1
        if words[ITEM] == count:
            words[ITEM] = -1
            words[COMMAND] += 1
    if at > begin and at < end:
        move_bytes(begin, at, end - at)
    words[RECEIVED] = end - at
    return UNEXPECTED if status == RUNNING and words[RECEIVED] == words[BUFFER_BYTES] else status


_OUTPUT = (_I64S2, _CODES, types.int64, types.int64, types.int64, types.uint64, types.int64, types.int64, _I64S2, _U8S2)


@compiled(types.void(_I64S2, types.int64, *_OUTPUT), when=LAST)
def parse(
    connections: Any, which: Any, commands: Any, order: Any, rows: Any, stride: Any, row_bytes: Any, head: Any,
    head_bytes: Any, state: Any, marks: Any, errors: Any,
) -> Any:  # fmt: skip
    """Read what one connection's buffer has; for connections whose bytes come another way, such as through TLS."""
    words = connections[which]
    words[STATUS] = _parse(words, commands, order, rows, stride, row_bytes, head, head_bytes, state, marks, errors)


@compiled("boolean(int64)", inner=True)
def _must_wait(result: Any) -> Any:
    return result == -EAGAIN or result == -EINTR


@compiled(types.void(_I64S2, _I64S, types.int64, *_OUTPUT), when=LAST)
def exchange(
    connections: Any, polled: Any, deadline_ns: Any, commands: Any, order: Any, rows: Any, stride: Any, row_bytes: Any,
    head: Any, head_bytes: Any, state: Any, marks: Any, errors: Any,
) -> Any:  # fmt: skip
    """Send all requests and read all replies, on all connections at once, until the deadline (of `time.monotonic_ns`).

    `polled` int64 [connections] is working memory. STATUS says of each connection how it went.
    """
    while True:
        running = 0
        progress = False
        for c in range(len(connections)):
            words = connections[c]
            if words[STATUS] != RUNNING:
                continue
            if words[SENT] < words[SEND_BYTES]:
                sent = send(words[FD], words[SEND_AT] + words[SENT], words[SEND_BYTES] - words[SENT], 0)
                if sent >= 0:
                    words[SENT] += sent
                    progress = True
                elif not _must_wait(sent):
                    words[STATUS] = sent
                    continue
            got = receive(words[FD], words[BUFFER_AT] + words[RECEIVED], words[BUFFER_BYTES] - words[RECEIVED])
            if got == 0:
                words[STATUS] = CLOSED
            elif got > 0:
                words[RECEIVED] += got
                words[STATUS] = _parse(
                    words, commands, order, rows, stride, row_bytes, head, head_bytes, state, marks, errors
                )
                progress = True
            elif not _must_wait(got):
                words[STATUS] = got
            if words[STATUS] == RUNNING:
                wanted = READABLE | (WRITABLE if words[SENT] < words[SEND_BYTES] else 0)
                polled[running] = words[FD] | (wanted << 32)
                running += 1
        if running == 0:
            return
        if not progress:
            remaining_ms = (deadline_ns - monotonic_ns() + 999_999) // 1_000_000
            if remaining_ms <= 0:
                for c in range(len(connections)):
                    if connections[c, STATUS] == RUNNING:
                        connections[c, STATUS] = TIMED_OUT
                return
            poll(nb.int64(polled.ctypes.data), running, min(remaining_ms, 1_000_000))
