"""The protocol of Redis (RESP2) for batches of rows of equal size: requests and replies without Python.

A request is a sequence of commands on each connection; the replies come in the same order. A command asks either for a watermark (`MARK`: two numbers
of a hash) or for rows (`ROWS`: fields of a hash; a field is the 8 bytes of a code). Rows are copied from the connection's buffer to the places that
`order` gives. A reply that is an error is kept as text, and fails only its command. Any other reply that does not fit the request ends the
connection, whose state is then unknown.

No size in a reply is trusted: the size of a row is known, and a line longer than the buffer is an error.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_i64, load_u8, load_u64, store_i64, store_u8, store_u64
from tierstore.kernels.records import at, define
from tierstore.kernels.sysio import (
    EAGAIN,
    EINTR,
    READABLE,
    WRITABLE,
    clear_bytes,
    monotonic_ns,
    move_bytes,
    poll,
    receive,
    send,
)
from tierstore.types import Tier
from tierstore.wire.http1.head import read_number

SERVER = define("AskedServer", "a connection to a server of the cluster", {
    "fd": "the descriptor",
    "send_at send_bytes sent": "the address and the bytes of the request, and the bytes of it that have left",
    "buffer_at buffer_bytes received": "the address and the bytes of the buffer for replies, and the bytes that have come",
    "command end": "the number of the next command whose reply is to come, and the number behind the last one",
    "item": "the number of that reply's next element; -1: its head",
    "status": "RUNNING, DONE, CLOSED, TIMED_OUT, UNEXPECTED; or minus the error number of the system",
})  # fmt: skip
COMMAND = define("Command", "the rows or the watermark that one command asks for", {
    "kind": "MARK or ROWS",
    "tag": "the number of the command's tag",
    "start": "the place in `order` of its first row; of a watermark: 0 before rows, 1 behind them",
    "count": "the number of rows",
})  # fmt: skip
TARGETS = define("Targets", "the commands to a cluster, and the places for what they read", {
    "commands": (COMMAND, "the commands, server after server"),
    "order_at": "the address of the place of each row, in the order of the commands, int64",
    "rows_at stride": "the address of place 0, and the bytes from one place to the next",
    "row_bytes head head_bytes": "the bytes of a row; the bytes that precede it in a reply, as one number, and how many these are",
    "states_at": "the address of a byte for each place",
    "marks_at": "the address of two numbers for each tag, int64: lower and upper bound",
    "errors_at": "the address of ERROR_BYTES for each tag",
})  # fmt: skip
_server_at, _command_at, _targets_at = at(SERVER), at(COMMAND), at(TARGETS)
MARK, ROWS = 0, 1
RUNNING, DONE, CLOSED, TIMED_OUT, UNEXPECTED = range(5)

KEY_BYTES = 14  # of a field in a request
MOST_ROW_BYTES = 99_999  # so that the head of a reply fits into 8 bytes
ERROR_BYTES = 160  # of an error's text
_CR, _LF, _DOLLAR, _STAR, _MINUS = 13, 10, 36, 42, 45
_REMOTE, _ABSENT = int(Tier.REMOTE), int(Tier.ABSENT)
_KEY_HEAD = 0x0A0D3824  # "$8\r\n"
_NIL = 0x0A0D312D24  # "$-1\r\n"
_NIL_BYTES = 5
_AGAIN = -1  # result of a parser: more bytes are needed

_U64 = np.uint64
_CODES = types.Array(types.int64, 1, "C", readonly=True)
_I64S = types.int64[::1]


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
    """Write fields and rows of codes[order] to the address `at`; row i is at `rows` + i * stride."""
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


@compiled("int64(int64, int64)", inner=True)
def _line(at: Any, size: Any) -> Any:
    """The bytes of the line at `at`, without its line end; _AGAIN if the line is not complete."""
    for i in range(size - 1):
        if load_u8(at, i) == _CR and load_u8(at, i + 1) == _LF:
            return i
    return _AGAIN


@compiled("int64(int64, int64, int64, int64)", inner=True)
def _parse_mark(at: Any, size: Any, marks: Any, item: Any) -> Any:
    """Parse one of the two numbers of a watermark. Returns its bytes, _AGAIN, or -2. A missing number leaves the mark as it was.

    `marks` is the address of both bounds. A tag's first command gives the lower bound, items 0 and 1; its second the upper bound, items 2 and 3.
    """
    head = _line(at, size)
    if head == _AGAIN:
        return _AGAIN
    if load_u8(at, 0) != _DOLLAR:
        return -2
    if head == 3 and load_u8(at, 1) == _MINUS:
        return 5
    digits = read_number(at + 1, head - 1, 19)
    if digits < 1 or digits > 19:
        return -2
    if size < head + 2 + digits + 2:
        return _AGAIN
    value = read_number(at + head + 2, digits, 19)
    if value < 0:
        return -2
    if item == 0:
        store_i64(marks, 0, value)
    elif item >= 2:
        store_i64(marks, 1, max(load_i64(marks, 1), value))
    return head + 2 + digits + 2


@nb.njit
def _parse(server, targets):
    """Parse all complete elements that were received, and move the remaining bytes to the front of the buffer. Returns the new STATUS."""
    at, size = server.buffer_at, server.received
    begin = at
    end = at + size
    order, rows, stride, state = targets.order_at, targets.rows_at, targets.stride, targets.states_at
    row_bytes, head, head_bytes = targets.row_bytes, _U64(targets.head), targets.head_bytes
    mask = (_U64(1) << _U64(8 * head_bytes)) - _U64(1) if head_bytes < 8 else ~_U64(0)
    whole = head_bytes + row_bytes + 2
    status = RUNNING
    while True:
        if server.command == server.end:
            status = DONE if at == end else UNEXPECTED
            break
        command = _command_at(targets.commands, server.command)
        tag, count = command.tag, command.count
        if server.item < 0:
            line = _line(at, end - at)
            if line == _AGAIN:
                break
            first = load_u8(at, 0)
            if first == _MINUS:
                kept = min(line - 1, ERROR_BYTES)
                error = targets.errors_at + ERROR_BYTES * tag
                clear_bytes(error, ERROR_BYTES)
                copy_bytes(error, at + 1, kept)
                server.command += 1
            elif first == _STAR and read_number(at + 1, line - 1, 19) == count:
                server.item = 0
            else:
                status = UNEXPECTED
                break
            at += line + 2
            continue
        if command.kind == ROWS:
            i = server.item
            start = command.start
            while i < count and end - at >= whole and load_u64(at, 0) & mask == head:
                place = load_i64(order, start + i)
                copy_bytes(rows + place * stride, at + head_bytes, row_bytes)
                store_u8(state + place, 0, _REMOTE)
                at += whole
                i += 1
            server.item = i
            if i < count:
                if end - at < _NIL_BYTES:
                    break
                if load_u64(at, 0) & _U64(0xFFFFFFFFFF) == _U64(_NIL):
                    store_u8(state + load_i64(order, start + i), 0, _ABSENT)
                    at += _NIL_BYTES
                    server.item += 1
                elif end - at >= head_bytes and load_u64(at, 0) & mask != head:
                    status = UNEXPECTED
                    break
                else:
                    break
        else:
            used = _parse_mark(at, end - at, targets.marks_at + 16 * tag, server.item + 2 * command.start)
            if used == _AGAIN:
                break
            if used < 0:
                status = UNEXPECTED
                break
            at += used
            server.item += 1
        if server.item == count:
            server.item = -1
            server.command += 1
    if at > begin and at < end:
        move_bytes(begin, at, end - at)
    server.received = end - at
    return UNEXPECTED if status == RUNNING and server.received == server.buffer_bytes else status


@compiled(types.void(types.int64, types.int64), when=LAST)
def parse(server: Any, targets: Any) -> Any:
    """Parse the buffer of one connection whose bytes were received another way, such as TLS. Arguments are addresses of records."""
    connection = _server_at(server)
    connection.status = _parse(connection, _targets_at(targets))


@compiled("boolean(int64)", inner=True)
def _must_wait(result: Any) -> Any:
    return result == -EAGAIN or result == -EINTR


@compiled(types.void(types.int64, _I64S, types.int64, types.int64), when=LAST)
def exchange(servers: Any, polled: Any, deadline_ns: Any, targets: Any) -> Any:
    """Send all requests and read all replies, on all connections at once, until the deadline (of `time.monotonic_ns`).

    `servers` is the address of a SERVER for each entry of `polled`, int64 [servers], which is working memory; `targets` that of the TARGETS. The
    result of each connection is in its `status`.
    """
    while True:
        running = 0
        progress = False
        for c in range(len(polled)):
            server = _server_at(servers, c)
            if server.status != RUNNING:
                continue
            if server.sent < server.send_bytes:
                sent = send(server.fd, server.send_at + server.sent, server.send_bytes - server.sent, 0)
                if sent >= 0:
                    server.sent += sent
                    progress = True
                elif not _must_wait(sent):
                    server.status = sent
                    continue
            got = receive(server.fd, server.buffer_at + server.received, server.buffer_bytes - server.received)
            if got == 0:
                server.status = CLOSED
            elif got > 0:
                server.received += got
                server.status = _parse(server, _targets_at(targets))
                progress = True
            elif not _must_wait(got):
                server.status = got
            if server.status == RUNNING:
                wanted = READABLE | (WRITABLE if server.sent < server.send_bytes else 0)
                polled[running] = server.fd | (wanted << 32)
                running += 1
        if running == 0:
            return
        if not progress:
            remaining_ms = (deadline_ns - monotonic_ns() + 999_999) // 1_000_000
            if remaining_ms <= 0:
                for c in range(len(polled)):
                    if _server_at(servers, c).status == RUNNING:
                        _server_at(servers, c).status = TIMED_OUT
                return
            poll(nb.int64(polled.ctypes.data), running, min(remaining_ms, 1_000_000))
