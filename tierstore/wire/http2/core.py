"""The server's side of HTTP/2 (RFC 9113) without a socket: bytes in at an address, changes of streams, bytes out into a buffer.

`step` reads one frame. The caller acts on the result: it answers requests (`out.py`) and moves bytes. Callers are the reactor, between this and a
socket, and the event loop, between this and TLS. Control frames are answered here. An error of a stream resets the stream; an error of the connection
writes GOAWAY, and the session is BROKEN: nothing more is read.

    frame ──► step ──► REQUEST    a whole request: `event_row` is the stream, `event_at` and `event_bytes` the body
                       OPENED     the headers of a streaming method have come
                       CAME       bytes of a streaming method's request, at `event_at`; ENDED of its `state`: they are the last
                       RESET      a stream was reset by the client or for an error: the caller closes the row
                       SENDABLE   the peer's windows are larger: `push` what waits on `event_row`, or on all streams
                       FAILED     the connection ends after the bytes that are in the buffer

All bounds are named in `layout.py`. Free functions of addresses, nogil; one thread at a time for a session.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u8, store_u8
from tierstore.kernels.records import place
from tierstore.kernels.sysio import clear_bytes, release
from tierstore.wire.http2 import hpack, layout
from tierstore.wire.http2.errors import control, count_often, fail, read_u32, reset_stream
from tierstore.wire.http2.out import (
    free_rows,
    room_of,
    row_of,
    write_control,
    write_credit,
    write_goaway,
    write_u32,
)
from tierstore.wire.http2.request import MOST_ID, on_continuation, on_data, on_headers

_PRIORITY_BYTES = 5


@nb.njit(inline="always")
def _u16(at):
    return nb.int64(load_u8(at, 0)) << 8 | nb.int64(load_u8(at, 1))


# --- the beginning and the end


@nb.njit
def begin_session(address, most_body, streaming):
    """Begin a session in SESSION_BYTES at an address, after the preface and before any frame. The caller lends it a buffer."""
    s = layout.session_at(address)
    clear_bytes(s, layout.SESSION_HEAD_BYTES)
    hpack.begin_table(layout.session_at(s, 1))
    s.send_window = layout.FIRST_WINDOW
    s.initial = layout.FIRST_WINDOW
    s.peer_frame = layout.FRAME_BYTES
    s.receive_window = layout.CONNECTION_WINDOW
    s.most_body = most_body
    s.streaming_at = streaming


@nb.njit
def write_settings(s):
    """Write this side's SETTINGS. The buffer has CONTROL_ROOM."""
    at = write_control(s, layout.SETTINGS, 0, 0, 18)
    for which, value in (
        (layout.MAX_CONCURRENT_STREAMS, layout.MOST_STREAMS), (layout.INITIAL_WINDOW_SIZE, layout.STREAM_WINDOW), (layout.MAX_HEADER_LIST_SIZE, layout.MOST_LIST_BYTES),
    ):  # fmt: skip
        store_u8(at, 0, nb.uint8(0))
        store_u8(at, 1, nb.uint8(which))
        write_u32(at + 2, value)
        at += 6
    write_credit(s, 0, layout.CONNECTION_WINDOW - layout.FIRST_WINDOW)


@nb.njit
def end_session(s):
    """Free the memory that a session holds, except the session itself and the buffer that it was lent."""
    free_rows(s)
    release(s.block_at)
    s.block_at = 0


@nb.njit
def go_away(s):
    """Announce that no more streams begin; streams that have begun are answered. The buffer has CONTROL_ROOM."""
    if not s.flags & layout.GOING:
        s.flags |= layout.GOING
        write_goaway(s, 0)


# --- frames


@nb.njit
def _on_settings(s, at, size, flags, stream, now):
    if stream != 0:
        return fail(s, layout.PROTOCOL_ERROR)
    if flags & layout.ACK:
        return fail(s, layout.FRAME_SIZE_ERROR) if size != 0 else control(s, now)
    if size % 6 != 0:
        return fail(s, layout.FRAME_SIZE_ERROR)
    window = nb.int64(-1)
    for i in range(size // 6):
        which, value = _u16(at + 6 * i), read_u32(at + 6 * i + 2)
        if which == layout.ENABLE_PUSH and value > 1:
            return fail(s, layout.PROTOCOL_ERROR)
        if which == layout.MAX_FRAME_SIZE:
            if value < layout.FRAME_BYTES or value >= 1 << 24:
                return fail(s, layout.PROTOCOL_ERROR)
            s.peer_frame = value
        elif which == layout.INITIAL_WINDOW_SIZE:
            if value > layout.MOST_WINDOW:
                return fail(s, layout.FLOW_CONTROL_ERROR)
            window = value
        elif which == layout.HEADER_TABLE_SIZE and value < hpack.CAPACITY and not s.flags & layout.NO_TABLE:
            s.flags |= layout.TABLE_SHRUNK
    if window >= 0:  # if a setting comes twice, the last one counts
        more, row = window - s.initial, s.streams
        for _ in range(s.streams_room):
            if row.id != 0:
                row.window += more
                if row.window > layout.MOST_WINDOW:
                    return fail(s, layout.FLOW_CONTROL_ERROR)
            row = layout.stream_at(row, 1)
        s.initial = window
    s.flags |= layout.HAS_SETTINGS
    write_control(s, layout.SETTINGS, layout.ACK, 0, 0)
    if count_often(s, place(s, "controls"), layout.MOST_CONTROLS, now):
        return fail(s, layout.ENHANCE_YOUR_CALM)
    s.event_row = 0
    return layout.SENDABLE if s.waiting > 0 else layout.NOTHING


@nb.njit
def _on_credit(s, at, size, stream, now):
    if size != 4:
        return fail(s, layout.FRAME_SIZE_ERROR)
    more = read_u32(at) & layout.MOST_WINDOW
    if stream == 0:
        if more == 0:
            return fail(s, layout.PROTOCOL_ERROR)
        s.send_window += more
        if s.send_window > layout.MOST_WINDOW:
            return fail(s, layout.FLOW_CONTROL_ERROR)
        s.event_row = 0
        return layout.SENDABLE if s.waiting > 0 else layout.NOTHING
    row = row_of(s, stream)
    if row == 0:
        if stream > s.newest and not s.flags & layout.GOING:
            return fail(s, layout.PROTOCOL_ERROR)
        return control(s, now)
    if more == 0:
        return reset_stream(s, stream, layout.PROTOCOL_ERROR, now)
    row.window += more
    if row.window > layout.MOST_WINDOW:
        return reset_stream(s, stream, layout.FLOW_CONTROL_ERROR, now)
    s.event_row = row
    return layout.SENDABLE if s.waiting > 0 else layout.NOTHING


@nb.njit
def _on_reset(s, size, stream, now):
    if size != 4:
        return fail(s, layout.FRAME_SIZE_ERROR)
    if stream == 0 or (stream > s.newest and not s.flags & layout.GOING):
        return fail(s, layout.PROTOCOL_ERROR)
    if count_often(s, place(s, "resets"), layout.MOST_RESETS, now):
        return fail(s, layout.ENHANCE_YOUR_CALM)
    row = row_of(s, stream)
    s.event_row = row
    return layout.NOTHING if row == 0 else layout.RESET


@nb.njit
def _on_ping(s, at, size, flags, stream, now):
    if stream != 0:
        return fail(s, layout.PROTOCOL_ERROR)
    if size != 8:
        return fail(s, layout.FRAME_SIZE_ERROR)
    if not flags & layout.ACK:
        copy_bytes(write_control(s, layout.PING, layout.ACK, 0, 8), at, 8)
    return control(s, now)


@nb.njit
def _on_frame(s, kind, at, size, flags, stream, work, now):
    if kind == layout.DATA:
        return on_data(s, at, size, flags, stream, now)
    if kind == layout.HEADERS:
        return on_headers(s, at, size, flags, stream, work, now)
    if kind == layout.WINDOW_UPDATE:
        return _on_credit(s, at, size, stream, now)
    if kind == layout.SETTINGS:
        return _on_settings(s, at, size, flags, stream, now)
    if kind == layout.PING:
        return _on_ping(s, at, size, flags, stream, now)
    if kind == layout.RST_STREAM:
        return _on_reset(s, size, stream, now)
    if kind == layout.CONTINUATION:
        return on_continuation(s, at, size, flags, stream, work, now)
    if kind == layout.PRIORITY:
        if stream == 0:
            return fail(s, layout.PROTOCOL_ERROR)
        if size != _PRIORITY_BYTES:
            return reset_stream(s, stream, layout.FRAME_SIZE_ERROR, now)
        if read_u32(at) & MOST_ID == stream:
            return reset_stream(s, stream, layout.PROTOCOL_ERROR, now)
    if kind == layout.PUSH_PROMISE:
        return fail(s, layout.PROTOCOL_ERROR)
    if kind == layout.GOAWAY:
        if stream != 0:
            return fail(s, layout.PROTOCOL_ERROR)
        if size < 8:
            return fail(s, layout.FRAME_SIZE_ERROR)
    return control(s, now)  # frames of unknown types too


@nb.njit
def step(s, at, n, work, now):
    """Read the frame at the beginning of the `n` bytes at `at`. Returns (bytes of the frame, result).

    0 bytes: more must come first, or the buffer has no CONTROL_ROOM. `work`: WORK_BYTES. For a frame that is too large, its head suffices.
    """
    if n < layout.FRAME_HEAD or room_of(s) < layout.CONTROL_ROOM:
        return 0, layout.NOTHING
    size = nb.int64(load_u8(at, 0)) << 16 | nb.int64(load_u8(at, 1)) << 8 | nb.int64(load_u8(at, 2))
    kind, flags, stream = nb.int64(load_u8(at, 3)), nb.int64(load_u8(at, 4)), read_u32(at + 5) & MOST_ID
    if size > layout.FRAME_BYTES:
        return n, fail(s, layout.FRAME_SIZE_ERROR)
    if not s.flags & layout.HAS_SETTINGS and (kind != layout.SETTINGS or flags & layout.ACK):
        return n, fail(s, layout.PROTOCOL_ERROR)
    if s.block_stream != 0 and (kind != layout.CONTINUATION or stream != s.block_stream):
        return n, fail(s, layout.PROTOCOL_ERROR)
    if n < layout.FRAME_HEAD + size:
        return 0, layout.NOTHING
    return layout.FRAME_HEAD + size, _on_frame(s, kind, at + layout.FRAME_HEAD, size, flags, stream, work, now)
