"""HTTP/2 (RFC 9113) of a server without a socket: bytes in at an address, changes of streams, bytes out into a buffer.

`step` takes one frame. What it comes to is for the caller, who answers requests (`h2out.py`) and moves bytes: a reactor between this and a
socket, the event loop between this and TLS. Frames of control are answered here. An error of a stream resets it; an error of the
connection writes GOAWAY, and the session is BROKEN: nothing more is read.

    frame ──► step ──► REQUEST    whole, in one piece: `event_row` is the stream, `event_at` and `event_bytes` the body
                       OPENED     of a method that streams: its headers have come
                       CAME       bytes of it, at `event_at`; ENDED of its `state` says whether they are the last
                       RESET      by the client, or for its error: the caller closes the row
                       SENDABLE   the peer's windows are larger: `push` what waits, of `event_row` or of all
                       FAILED     after what is in the buffer the connection ends

Each bound is named in `h2words.py`. Free functions of addresses, nogil; one thread at a time for a session.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import h2words, hpack
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.h2errors import control, count_often, fail, read_u32, reset_stream
from tierstore.kernels.h2out import (
    free_rows,
    room_of,
    row_of,
    write_control,
    write_credit,
    write_goaway,
    write_u32,
)
from tierstore.kernels.h2request import MOST_ID, on_continuation, on_data, on_headers
from tierstore.kernels.raw import load_u8, store_u8
from tierstore.kernels.records import place
from tierstore.kernels.sysio import clear_bytes, release

_PRIORITY_BYTES = 5


@nb.njit(inline="always")
def _u16(at):  # type: ignore[no-untyped-def]
    return nb.int64(load_u8(at, 0)) << 8 | nb.int64(load_u8(at, 1))


# --- the beginning and the end


@nb.njit
def begin_session(address, most_body, streaming):  # type: ignore[no-untyped-def]
    """Begin a session in SESSION_BYTES at an address: the preface has come, no frame yet. The buffer is to be lent."""
    s = h2words.session_at(address)
    clear_bytes(s, h2words.SESSION_HEAD_BYTES)
    hpack.begin_table(h2words.session_at(s, 1))
    s.send_window = h2words.FIRST_WINDOW
    s.initial = h2words.FIRST_WINDOW
    s.peer_frame = h2words.FRAME_BYTES
    s.receive_window = h2words.CONNECTION_WINDOW
    s.most_body = most_body
    s.streaming_at = streaming


@nb.njit
def write_settings(s):  # type: ignore[no-untyped-def]
    """What this side announces. The buffer has CONTROL_ROOM."""
    at = write_control(s, h2words.SETTINGS, 0, 0, 18)
    for which, value in (
        (h2words.MAX_CONCURRENT_STREAMS, h2words.MOST_STREAMS), (h2words.INITIAL_WINDOW_SIZE, h2words.STREAM_WINDOW), (h2words.MAX_HEADER_LIST_SIZE, h2words.MOST_LIST_BYTES),
    ):  # fmt: skip
        store_u8(at, 0, nb.uint8(0))
        store_u8(at, 1, nb.uint8(which))
        write_u32(at + 2, value)
        at += 6
    write_credit(s, 0, h2words.CONNECTION_WINDOW - h2words.FIRST_WINDOW)


@nb.njit
def end_session(s):  # type: ignore[no-untyped-def]
    """Free what a session holds, but for itself and the buffer that it was lent."""
    free_rows(s)
    release(s.block_at)
    s.block_at = 0


@nb.njit
def go_away(s):  # type: ignore[no-untyped-def]
    """Begin no more streams: those that have begun are answered. The buffer has CONTROL_ROOM."""
    if not s.flags & h2words.GOING:
        s.flags |= h2words.GOING
        write_goaway(s, 0)


# --- frames


@nb.njit
def _on_settings(s, at, size, flags, stream, now):  # type: ignore[no-untyped-def]
    if stream != 0:
        return fail(s, h2words.PROTOCOL_ERROR)
    if flags & h2words.ACK:
        return fail(s, h2words.FRAME_SIZE_ERROR) if size != 0 else control(s, now)
    if size % 6 != 0:
        return fail(s, h2words.FRAME_SIZE_ERROR)
    window = nb.int64(-1)
    for i in range(size // 6):
        which, value = _u16(at + 6 * i), read_u32(at + 6 * i + 2)
        if which == h2words.ENABLE_PUSH and value > 1:
            return fail(s, h2words.PROTOCOL_ERROR)
        if which == h2words.MAX_FRAME_SIZE:
            if value < h2words.FRAME_BYTES or value >= 1 << 24:
                return fail(s, h2words.PROTOCOL_ERROR)
            s.peer_frame = value
        elif which == h2words.INITIAL_WINDOW_SIZE:
            if value > h2words.MOST_WINDOW:
                return fail(s, h2words.FLOW_CONTROL_ERROR)
            window = value
        elif which == h2words.HEADER_TABLE_SIZE and value < hpack.CAPACITY and not s.flags & h2words.NO_TABLE:
            s.flags |= h2words.TABLE_SHRUNK
    if window >= 0:  # the last of them holds
        more, row = window - s.initial, s.streams
        for _ in range(s.streams_room):
            if row.id != 0:
                row.window += more
                if row.window > h2words.MOST_WINDOW:
                    return fail(s, h2words.FLOW_CONTROL_ERROR)
            row = h2words.stream_at(row, 1)
        s.initial = window
    s.flags |= h2words.HAS_SETTINGS
    write_control(s, h2words.SETTINGS, h2words.ACK, 0, 0)
    if count_often(s, place(s, "controls"), h2words.MOST_CONTROLS, now):
        return fail(s, h2words.ENHANCE_YOUR_CALM)
    s.event_row = 0
    return h2words.SENDABLE if s.waiting > 0 else h2words.NOTHING


@nb.njit
def _on_credit(s, at, size, stream, now):  # type: ignore[no-untyped-def]
    if size != 4:
        return fail(s, h2words.FRAME_SIZE_ERROR)
    more = read_u32(at) & h2words.MOST_WINDOW
    if stream == 0:
        if more == 0:
            return fail(s, h2words.PROTOCOL_ERROR)
        s.send_window += more
        if s.send_window > h2words.MOST_WINDOW:
            return fail(s, h2words.FLOW_CONTROL_ERROR)
        s.event_row = 0
        return h2words.SENDABLE if s.waiting > 0 else h2words.NOTHING
    row = row_of(s, stream)
    if row == 0:
        if stream > s.newest and not s.flags & h2words.GOING:
            return fail(s, h2words.PROTOCOL_ERROR)
        return control(s, now)
    if more == 0:
        return reset_stream(s, stream, h2words.PROTOCOL_ERROR, now)
    row.window += more
    if row.window > h2words.MOST_WINDOW:
        return reset_stream(s, stream, h2words.FLOW_CONTROL_ERROR, now)
    s.event_row = row
    return h2words.SENDABLE if s.waiting > 0 else h2words.NOTHING


@nb.njit
def _on_reset(s, size, stream, now):  # type: ignore[no-untyped-def]
    if size != 4:
        return fail(s, h2words.FRAME_SIZE_ERROR)
    if stream == 0 or (stream > s.newest and not s.flags & h2words.GOING):
        return fail(s, h2words.PROTOCOL_ERROR)
    if count_often(s, place(s, "resets"), h2words.MOST_RESETS, now):
        return fail(s, h2words.ENHANCE_YOUR_CALM)
    row = row_of(s, stream)
    s.event_row = row
    return h2words.NOTHING if row == 0 else h2words.RESET


@nb.njit
def _on_ping(s, at, size, flags, stream, now):  # type: ignore[no-untyped-def]
    if stream != 0:
        return fail(s, h2words.PROTOCOL_ERROR)
    if size != 8:
        return fail(s, h2words.FRAME_SIZE_ERROR)
    if not flags & h2words.ACK:
        copy_bytes(write_control(s, h2words.PING, h2words.ACK, 0, 8), at, 8)
    return control(s, now)


@nb.njit
def _on_frame(s, kind, at, size, flags, stream, work, now):  # type: ignore[no-untyped-def]
    if kind == h2words.DATA:
        return on_data(s, at, size, flags, stream, now)
    if kind == h2words.HEADERS:
        return on_headers(s, at, size, flags, stream, work, now)
    if kind == h2words.WINDOW_UPDATE:
        return _on_credit(s, at, size, stream, now)
    if kind == h2words.SETTINGS:
        return _on_settings(s, at, size, flags, stream, now)
    if kind == h2words.PING:
        return _on_ping(s, at, size, flags, stream, now)
    if kind == h2words.RST_STREAM:
        return _on_reset(s, size, stream, now)
    if kind == h2words.CONTINUATION:
        return on_continuation(s, at, size, flags, stream, work, now)
    if kind == h2words.PRIORITY:
        if stream == 0:
            return fail(s, h2words.PROTOCOL_ERROR)
        if size != _PRIORITY_BYTES:
            return reset_stream(s, stream, h2words.FRAME_SIZE_ERROR, now)
        if read_u32(at) & MOST_ID == stream:
            return reset_stream(s, stream, h2words.PROTOCOL_ERROR, now)
    if kind == h2words.PUSH_PROMISE:
        return fail(s, h2words.PROTOCOL_ERROR)
    if kind == h2words.GOAWAY:
        if stream != 0:
            return fail(s, h2words.PROTOCOL_ERROR)
        if size < 8:
            return fail(s, h2words.FRAME_SIZE_ERROR)
    return control(s, now)  # of types that nobody knows too


@nb.njit
def step(s, at, n, work, now):  # type: ignore[no-untyped-def]
    """Take the frame that the `n` bytes at `at` begin with. Returns (its bytes, what it comes to).

    No bytes: more must come first, or the buffer has no CONTROL_ROOM. `work`: WORK_BYTES. Of a frame that is too large the head is enough.
    """
    if n < h2words.FRAME_HEAD or room_of(s) < h2words.CONTROL_ROOM:
        return 0, h2words.NOTHING
    size = nb.int64(load_u8(at, 0)) << 16 | nb.int64(load_u8(at, 1)) << 8 | nb.int64(load_u8(at, 2))
    kind, flags, stream = nb.int64(load_u8(at, 3)), nb.int64(load_u8(at, 4)), read_u32(at + 5) & MOST_ID
    if size > h2words.FRAME_BYTES:
        return n, fail(s, h2words.FRAME_SIZE_ERROR)
    if not s.flags & h2words.HAS_SETTINGS and (kind != h2words.SETTINGS or flags & h2words.ACK):
        return n, fail(s, h2words.PROTOCOL_ERROR)
    if s.block_stream != 0 and (kind != h2words.CONTINUATION or stream != s.block_stream):
        return n, fail(s, h2words.PROTOCOL_ERROR)
    if n < h2words.FRAME_HEAD + size:
        return 0, h2words.NOTHING
    return h2words.FRAME_HEAD + size, _on_frame(s, kind, at + h2words.FRAME_HEAD, size, flags, stream, work, now)
