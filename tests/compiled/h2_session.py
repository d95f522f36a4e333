"""A session of HTTP/2 for Python, without a reactor: what `wire/http2/core.py` and `wire/http2/out.py` do, one call at a time.

One thread at a time for a session; addresses are the caller's to keep.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.sysio import allocate, release
from tierstore.wire.http2 import layout as http2_layout
from tierstore.wire.http2.calls import answer_call
from tierstore.wire.http2.core import begin_session, end_session, step, write_settings
from tierstore.wire.http2.out import (
    begin_block,
    block_bytes,
    close_row,
    push,
    queue,
    row_of,
    write_reset,
)
from tierstore.wire.http2.request import give_credit


@compiled(types.int64(types.int64, types.int64), when=LAST)
def begin(most_body: Any, streaming: Any) -> Any:
    """The address of a new session, or 0. `streaming`: the address of a table of paths, or 0."""
    s = allocate(http2_layout.SESSION_BYTES)
    if s != 0:
        begin_session(s, most_body, streaming)
    return s


@compiled(types.void(types.int64, types.int64, types.int64), when=LAST)
def bind_frames(s: Any, at: Any, room: Any) -> Any:
    """Lend a session an empty buffer for frames; the first time SETTINGS are written there."""
    s = http2_layout.session_at(s)
    s.out_at = at
    s.out_bytes = 0
    s.out_room = room
    if not s.flags & http2_layout.GREETED:
        s.flags |= http2_layout.GREETED
        write_settings(s)


@compiled(types.UniTuple(types.int64, 2)(*[types.int64] * 5), when=LAST)
def advance(s: Any, at: Any, n: Any, work: Any, now: Any) -> Any:
    """`step`."""
    s = http2_layout.session_at(s)
    return step(s, at, n, work, now)


@compiled("int64(int64, int64, int64[:, ::1], int64, int64, int64, int64)", when=LAST)
def respond(s: Any, stream: Any, places: Any, headers: Any, data: Any, trailers: Any, ends: Any) -> Any:
    """Let a copy of the bytes at `places` (address, size), a header block, data and trailers, leave on a stream. Returns 0 where it is gone."""
    s = http2_layout.session_at(s)
    row = row_of(s, stream)
    block = nb.int64(0) if row == 0 else allocate(block_bytes(headers, data, trailers))
    if block == 0:
        return 0
    at = begin_block(block, ends, headers, data, trailers)
    for i in range(places.shape[0]):
        copy_bytes(at, places[i, 0], places[i, 1])
        at += places[i, 1]
    queue(s, row, block)
    return 1


@compiled(types.int64(*[types.int64] * 4), when=LAST)
def respond_to_call(s: Any, stream: Any, message: Any, size: Any) -> Any:
    """Answer a call of gRPC with a message. Returns 0 where its stream is gone."""
    s = http2_layout.session_at(s)
    row = row_of(s, stream)
    return 1 if row != 0 and answer_call(s, row, message, size, 0, 0) else 0


@compiled("int64(int64, int64[:, ::1])", when=LAST)
def push_all(s: Any, reported: Any) -> Any:
    """Write what waits on all streams, as far as windows and room go.

    Returns of how many streams a block has left that tells so: `told` has (stream, how many) of each.
    """
    s = http2_layout.session_at(s)
    row, count = s.streams, 0
    for _ in range(s.streams_room):
        if row.id != 0 and row.first_out != 0:
            stream = row.id
            reports, _ = push(s, row)
            if reports > 0:
                reported[count, 0], reported[count, 1] = stream, reports
                count += 1
        row = http2_layout.stream_at(row, 1)
    return count


@compiled(types.void(types.int64, types.int64, types.int64), when=LAST)
def close_stream(s: Any, stream: Any, code: Any) -> Any:
    """Close a stream; reset it, too, with a `code` of 0 or more. The buffer has CONTROL_ROOM."""
    s = http2_layout.session_at(s)
    row = row_of(s, stream)
    if row != 0:
        if code >= 0:
            write_reset(s, stream, code)
        close_row(s, row)


@compiled(types.void(types.int64, types.int64, types.int64), when=LAST)
def consume(s: Any, stream: Any, size: Any) -> Any:
    """Let the client of a stream send so many bytes more. The buffer has CONTROL_ROOM."""
    s = http2_layout.session_at(s)
    row = row_of(s, stream)
    if row != 0 and not row.state & http2_layout.ENDED:
        give_credit(s, row, size)


@compiled(types.void(types.int64), when=LAST)
def free(s: Any) -> Any:
    """Free a session, but for the buffer that it was lent."""
    s = http2_layout.session_at(s)
    end_session(s)
    release(s)
