"""Errors of HTTP/2 sessions and streams, and limits on what a client may do too often.

Free functions of addresses, nogil.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.raw import load_i64, load_u8, store_i64
from tierstore.kernels.records import place
from tierstore.wire.http2 import layout
from tierstore.wire.http2.out import (
    row_of,
    write_goaway,
    write_reset,
)


@nb.njit(inline="always")
def read_u32(at):
    value = nb.int64(0)
    for i in range(4):
        value = value << 8 | nb.int64(load_u8(at, i))
    return value


@nb.njit
def fail(s, code):
    """End the connection with an error: write GOAWAY."""
    write_goaway(s, code)
    s.flags = s.flags | layout.BROKEN | layout.GOING
    return layout.FAILED


@nb.njit
def count_often(s, counter, most, now):
    """Count an event in `counter`, the address of `resets` or `controls`. True if there were more than `most` in this second.

    Each answered stream (`out.finish`) allows some resets, at once or later: a client whose deadlines pass while the service is busy is no flood.
    """
    second = now // 1_000_000_000
    if s.second != second:
        s.second = second
        s.resets = min(s.resets, 0)
        s.controls = 0
    store_i64(counter, 0, load_i64(counter, 0) + 1)
    return load_i64(counter, 0) > most


@nb.njit
def reset_stream(s, stream, code, now):
    """Reset a stream for an error. Returns RESET if it has a row, which is in EVENT_ROW."""
    if count_often(s, place(s, "resets"), layout.MOST_RESETS, now):
        return fail(s, layout.ENHANCE_YOUR_CALM)
    write_reset(s, stream, code)
    row = row_of(s, stream)
    s.event_row = row
    return layout.NOTHING if row == 0 else layout.RESET


@nb.njit
def control(s, now):
    return (
        fail(s, layout.ENHANCE_YOUR_CALM)
        if count_often(s, place(s, "controls"), layout.MOST_CONTROLS, now)
        else layout.NOTHING
    )


@nb.njit
def closed(s, stream, now):
    """Answer a frame for a closed stream with a reset. The client may have sent it before it heard of the reset."""
    if count_often(s, place(s, "controls"), layout.MOST_CONTROLS, now):
        return fail(s, layout.ENHANCE_YOUR_CALM)
    write_reset(s, stream, layout.STREAM_CLOSED)
    return layout.NOTHING
