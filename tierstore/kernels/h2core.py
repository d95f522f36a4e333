"""HTTP/2 (RFC 9113) of a server without a socket: bytes in at an address, changes of streams, bytes out into a buffer.

`step` takes one frame. What it comes to is for the caller, who answers requests (`h2out.py`) and moves bytes: a reactor between this and a
socket, the event loop between this and TLS. Frames of control are answered here. An error of a stream resets it; an error of the
connection writes GOAWAY, and the session is BROKEN: nothing more is read.

    frame ──► step ──► REQUEST    whole, in one piece: EVENT_ROW is the stream, EVENT_AT and EVENT_BYTES the body
                       OPENED     of a method that streams: its headers have come
                       CAME       bytes of it, at EVENT_AT; ENDED of STATE says whether they are the last
                       RESET      by the client, or for its error: the caller closes the row
                       SENDABLE   the peer's windows are larger: `push` what waits, of EVENT_ROW or of all
                       FAILED     after what is in the buffer the connection ends

Each bound is named in `h2words.py`. Free functions of addresses, nogil; one thread at a time for a session.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import LAST, compiled, h2head, hpack
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.h2out import (
    answer_call,
    begin_block,
    block_bytes,
    close_row,
    drop_request,
    free_rows,
    hold,
    new_row,
    push,
    queue,
    room_of,
    row_of,
    write_control,
    write_credit,
    write_goaway,
    write_headers,
    write_reset,
    write_u32,
)
from tierstore.kernels.h2words import (
    ACK,
    AT,
    BEGAN_NS,
    BEGUN,
    BLOCK_AT,
    BLOCK_BYTES,
    BLOCK_FLAGS,
    BLOCK_FRAMES,
    BLOCK_ROOM,
    BLOCK_STREAM,
    BROKEN,
    BYTES,
    CAME,
    COMPRESSION_ERROR,
    CONNECTION_WINDOW,
    CONTINUATION,
    CONTROL_ROOM,
    CONTROLS,
    CREDIT,
    CREDIT_BYTES,
    DATA,
    DECLARED,
    EATEN,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    ENDED,
    ENHANCE_YOUR_CALM,
    EVENT_AT,
    EVENT_BYTES,
    EVENT_ROW,
    FAILED,
    FIELDS_BYTES,
    FIRST_OUT,
    FIRST_WINDOW,
    FLAGS,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES,
    FRAME_HEAD,
    FRAME_SIZE_ERROR,
    GOAWAY,
    GOING,
    GREETED,
    HAS_PRIORITY,
    HEAD_BYTES,
    HEADERS,
    ID,
    INITIAL,
    INITIAL_WINDOW_SIZE,
    KIND,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MOST_BLOCK_BYTES,
    MOST_BODY,
    MOST_CONTINUATIONS,
    MOST_CONTROLS,
    MOST_FIELDS,
    MOST_LIST_BYTES,
    MOST_RESETS,
    MOST_STREAMS,
    MOST_WINDOW,
    NEWEST,
    NOTHING,
    OPEN,
    OPENED,
    OUT_AT,
    OUT_BYTES,
    OUT_ROOM,
    PADDED,
    PEER_FRAME,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RECEIVE,
    RECEIVE_WINDOW,
    REFUSED_STREAM,
    REQUEST,
    RESET,
    RESETS,
    ROOM,
    RST_STREAM,
    SECOND,
    SEND_WINDOW,
    SENDABLE,
    SESSION_BYTES,
    SESSION_WORDS,
    SETTINGS,
    SETTLED,
    STATE,
    STREAM_CLOSED,
    STREAM_WINDOW,
    STREAM_WORDS,
    STREAMING,
    STREAMING_AT,
    STREAMS_AT,
    STREAMS_ROOM,
    TOO_LARGE,
    WAITING,
    WINDOW,
    WINDOW_UPDATE,
)
from tierstore.kernels.raw import load_u8, store_u8
from tierstore.kernels.request_record import get, put
from tierstore.kernels.sysio import allocate, clear_bytes, release

_PRIORITY_BYTES = 5
_MOST_ID = (1 << 31) - 1
# :status 431, literal, for a header list that is too large
_LIST_TOO_LARGE = (0x08, 3, 52, 51, 49)


@nb.njit(inline="always")
def read_u32(at):  # type: ignore[no-untyped-def]
    value = nb.int64(0)
    for i in range(4):
        value = value << 8 | nb.int64(load_u8(at, i))
    return value


@nb.njit(inline="always")
def _u16(at):  # type: ignore[no-untyped-def]
    return nb.int64(load_u8(at, 0)) << 8 | nb.int64(load_u8(at, 1))


# --- the beginning and the end


@nb.njit
def begin_session(s, most_body, streaming):  # type: ignore[no-untyped-def]
    """Begin a session in SESSION_BYTES at an address: the preface has come, no frame yet. The buffer is to be lent."""
    clear_bytes(s, 8 * SESSION_WORDS)
    hpack.begin_table(s + 8 * SESSION_WORDS)
    put(s, SEND_WINDOW, FIRST_WINDOW)
    put(s, INITIAL, FIRST_WINDOW)
    put(s, PEER_FRAME, FRAME_BYTES)
    put(s, RECEIVE_WINDOW, CONNECTION_WINDOW)
    put(s, MOST_BODY, most_body)
    put(s, STREAMING_AT, streaming)


@nb.njit
def write_settings(s):  # type: ignore[no-untyped-def]
    """What this side announces. The buffer has CONTROL_ROOM."""
    at = write_control(s, SETTINGS, 0, 0, 18)
    for which, value in (
        (MAX_CONCURRENT_STREAMS, MOST_STREAMS), (INITIAL_WINDOW_SIZE, STREAM_WINDOW), (MAX_HEADER_LIST_SIZE, MOST_LIST_BYTES),
    ):  # fmt: skip
        store_u8(at, 0, nb.uint8(0))
        store_u8(at, 1, nb.uint8(which))
        write_u32(at + 2, value)
        at += 6
    write_credit(s, 0, CONNECTION_WINDOW - FIRST_WINDOW)


@nb.njit
def end_session(s):  # type: ignore[no-untyped-def]
    """Free what a session holds, but for itself and the buffer that it was lent."""
    free_rows(s)
    release(get(s, BLOCK_AT))
    put(s, BLOCK_AT, 0)


@nb.njit
def go_away(s):  # type: ignore[no-untyped-def]
    """Begin no more streams: those that have begun are answered. The buffer has CONTROL_ROOM."""
    if not get(s, FLAGS) & GOING:
        put(s, FLAGS, get(s, FLAGS) | GOING)
        write_goaway(s, 0)


# --- errors


@nb.njit
def _fail(s, code):  # type: ignore[no-untyped-def]
    """An error of the connection."""
    write_goaway(s, code)
    put(s, FLAGS, get(s, FLAGS) | BROKEN | GOING)
    return FAILED


@nb.njit
def _count(s, which, most, now):  # type: ignore[no-untyped-def]
    """Count what a client may not do without end. True where it has done so too often in this second."""
    second = now // 1_000_000_000
    if get(s, SECOND) != second:
        put(s, SECOND, second)
        put(s, RESETS, 0)
        put(s, CONTROLS, 0)
    put(s, which, get(s, which) + 1)
    return get(s, which) > most


@nb.njit
def _reset(s, stream, code, now):  # type: ignore[no-untyped-def]
    """An error of a stream. Returns RESET where it has a row, in EVENT_ROW."""
    if _count(s, RESETS, MOST_RESETS, now):
        return _fail(s, ENHANCE_YOUR_CALM)
    write_reset(s, stream, code)
    row = row_of(s, stream)
    put(s, EVENT_ROW, row)
    return NOTHING if row == 0 else RESET


@nb.njit
def _control(s, now):  # type: ignore[no-untyped-def]
    return _fail(s, ENHANCE_YOUR_CALM) if _count(s, CONTROLS, MOST_CONTROLS, now) else NOTHING


# --- frames


@nb.njit
def _ended(s, row, now):  # type: ignore[no-untyped-def]
    """The client has sent all of a request."""
    put(row, STATE, get(row, STATE) | ENDED)
    if get(row, DECLARED) > 0:
        return _reset(s, get(row, ID), PROTOCOL_ERROR, now)
    put(s, EVENT_ROW, row)
    if get(row, STATE) & TOO_LARGE:
        return NOTHING  # it is Python's already
    if get(row, KIND) == STREAMING:
        put(s, EVENT_BYTES, 0)
        return CAME
    return REQUEST


@nb.njit
def _too_large(s, row):  # type: ignore[no-untyped-def]
    """A body beyond the limit is dropped; its request is for Python to refuse."""
    put(row, STATE, get(row, STATE) | TOO_LARGE)
    hold(s, get(row, HEAD_BYTES) - get(row, BYTES))
    put(row, BYTES, get(row, HEAD_BYTES))
    put(s, EVENT_ROW, row)
    put(s, EVENT_AT, get(row, AT))
    put(s, EVENT_BYTES, 0)
    return REQUEST


@nb.njit
def _on_block(s, at, size, stream, flags, work, now):  # type: ignore[no-untyped-def]
    """A header block is there: of a new stream, or the trailers of an open one."""
    fields, text = work, work + FIELDS_BYTES
    count = hpack.decode(s + 8 * SESSION_WORDS, at, size, text, MOST_LIST_BYTES, fields, MOST_FIELDS)
    if count == hpack.COMPRESSION:
        return _fail(s, COMPRESSION_ERROR)
    row = row_of(s, stream)
    if row != 0:
        if get(row, STATE) & ENDED:
            return _reset(s, stream, STREAM_CLOSED, now)
        if not flags & END_STREAM or count < 0 or not h2head.are_trailers(text, fields, count):
            return _reset(s, stream, PROTOCOL_ERROR, now)
        put(s, EVENT_AT, get(row, AT) + get(row, HEAD_BYTES))
        put(s, EVENT_BYTES, get(row, BYTES) - get(row, HEAD_BYTES))
        return _ended(s, row, now)
    if stream <= get(s, NEWEST):
        if flags & END_STREAM and count >= 0 and h2head.are_trailers(text, fields, count):
            return _closed(s, stream, now)  # they were under way when the stream was reset or answered
        return _fail(s, STREAM_CLOSED)
    if get(s, FLAGS) & GOING:
        return _reset(s, stream, REFUSED_STREAM, now)
    put(s, NEWEST, stream)
    put(s, BEGUN, get(s, BEGUN) + 1)
    if get(s, OPEN) >= MOST_STREAMS:
        return _reset(s, stream, REFUSED_STREAM, now)
    if count < 0:
        for i, byte in enumerate(_LIST_TOO_LARGE):
            store_u8(work, i, nb.uint8(byte))
        write_headers(s, stream, work, len(_LIST_TOO_LARGE), END_STREAM)
        return NOTHING if flags & END_STREAM else _reset(s, stream, 0, now)
    row = new_row(s, stream)
    if row == 0:
        return _reset(s, stream, REFUSED_STREAM, now)
    came = h2head.read_head(row, text, fields, count, get(s, STREAMING_AT), now)
    if came != h2head.GOOD:
        return _reset(s, stream, PROTOCOL_ERROR if came == h2head.MALFORMED else REFUSED_STREAM, now)
    hold(s, get(row, BYTES))
    put(row, WINDOW, get(s, INITIAL))
    put(row, RECEIVE, STREAM_WINDOW)
    put(row, BEGAN_NS, now)
    put(s, EVENT_ROW, row)
    put(s, EVENT_AT, get(row, AT) + get(row, HEAD_BYTES))
    put(s, EVENT_BYTES, 0)
    if get(row, KIND) == STREAMING:
        if flags & END_STREAM:
            put(row, STATE, ENDED)
        return OPENED
    if flags & END_STREAM:
        return _ended(s, row, now)
    if get(row, DECLARED) > get(s, MOST_BODY):
        return _too_large(s, row)
    return NOTHING


@nb.njit
def _keep_part(s, at, size):  # type: ignore[no-untyped-def]
    """Keep a part of a header block whose remainder is to come. False: it is too large, or there is no memory."""
    have = get(s, BLOCK_BYTES)
    if have + size > MOST_BLOCK_BYTES:
        return False
    if have + size > get(s, BLOCK_ROOM):
        room = max(2 * get(s, BLOCK_ROOM), have + size)
        kept = allocate(room)
        if kept == 0:
            return False
        copy_bytes(kept, get(s, BLOCK_AT), have)
        release(get(s, BLOCK_AT))
        put(s, BLOCK_AT, kept)
        put(s, BLOCK_ROOM, room)
    copy_bytes(get(s, BLOCK_AT) + have, at, size)
    put(s, BLOCK_BYTES, have + size)
    return True


@nb.njit
def _on_headers(s, at, size, flags, stream, work, now):  # type: ignore[no-untyped-def]
    if stream & 1 == 0:
        return _fail(s, PROTOCOL_ERROR)
    pad = 0
    if flags & PADDED:
        if size < 1:
            return _fail(s, FRAME_SIZE_ERROR)
        pad = nb.int64(load_u8(at, 0))
        at += 1
        size -= 1
    depends = nb.int64(-1)
    if flags & HAS_PRIORITY:
        if size < _PRIORITY_BYTES:
            return _fail(s, FRAME_SIZE_ERROR)
        depends = read_u32(at) & _MOST_ID
        at += _PRIORITY_BYTES
        size -= _PRIORITY_BYTES
    if pad > size:
        return _fail(s, PROTOCOL_ERROR)
    size -= pad
    if depends == stream:
        return _fail(s, PROTOCOL_ERROR)
    if flags & END_HEADERS:
        return _on_block(s, at, size, stream, flags, work, now)
    put(s, BLOCK_STREAM, stream)
    put(s, BLOCK_FLAGS, flags)
    put(s, BLOCK_FRAMES, 0)
    put(s, BLOCK_BYTES, 0)
    return NOTHING if _keep_part(s, at, size) else _fail(s, ENHANCE_YOUR_CALM)


@nb.njit
def _on_continuation(s, at, size, flags, stream, work, now):  # type: ignore[no-untyped-def]
    if get(s, BLOCK_STREAM) == 0:
        return _fail(s, PROTOCOL_ERROR)
    put(s, BLOCK_FRAMES, get(s, BLOCK_FRAMES) + 1)
    if get(s, BLOCK_FRAMES) > MOST_CONTINUATIONS or not _keep_part(s, at, size):
        return _fail(s, ENHANCE_YOUR_CALM)
    if not flags & END_HEADERS:
        return NOTHING
    put(s, BLOCK_STREAM, 0)
    came = _on_block(s, get(s, BLOCK_AT), get(s, BLOCK_BYTES), stream, get(s, BLOCK_FLAGS), work, now)
    release(get(s, BLOCK_AT))
    put(s, BLOCK_AT, 0)
    put(s, BLOCK_ROOM, 0)
    return came


@nb.njit
def keep_body(s, row, at, size, expected):  # type: ignore[no-untyped-def]
    """Keep bytes of a request behind those that have come; `expected`: so many come with them, or -1. False: no memory."""
    have = get(row, BYTES)
    if have + size > get(row, ROOM):
        room = max(have + size, min(2 * have, have + expected) if expected > size else 2 * have)
        if expected > size:
            room = max(room, min(have + expected, have + 16 * FRAME_BYTES))
        kept = allocate(room + 64)
        if kept == 0:
            return False
        copy_bytes(kept, get(row, AT), have)
        release(get(row, AT))
        put(row, AT, kept)
        put(row, ROOM, room)
    copy_bytes(get(row, AT) + have, at, size)
    put(row, BYTES, have + size)
    hold(s, size)
    return True


@nb.njit
def _expected(row, at, size):  # type: ignore[no-untyped-def]
    """How many bytes of a body come from here on, as far as the client says so; or -1."""
    if get(row, DECLARED) >= 0:
        return size + get(row, DECLARED)
    if get(row, BYTES) == get(row, HEAD_BYTES) and size >= 5 and load_u8(at, 0) == 0:
        return 5 + read_u32(at + 1)
    return nb.int64(-1)


@nb.njit
def _on_data(s, at, size, flags, stream, now):  # type: ignore[no-untyped-def]
    if stream == 0:
        return _fail(s, PROTOCOL_ERROR)
    pad, whole = 0, size
    if flags & PADDED:
        if size < 1:
            return _fail(s, FRAME_SIZE_ERROR)
        pad = nb.int64(load_u8(at, 0)) + 1
        if pad > size:
            return _fail(s, PROTOCOL_ERROR)
        at += 1
        size -= pad
    put(s, RECEIVE_WINDOW, get(s, RECEIVE_WINDOW) - whole)
    if get(s, RECEIVE_WINDOW) < 0:
        return _fail(s, FLOW_CONTROL_ERROR)
    put(s, EATEN, get(s, EATEN) + whole)
    if get(s, EATEN) >= CREDIT_BYTES:
        write_credit(s, 0, get(s, EATEN))
        put(s, RECEIVE_WINDOW, get(s, RECEIVE_WINDOW) + get(s, EATEN))
        put(s, EATEN, 0)
    row = row_of(s, stream)
    if row == 0:
        if stream > get(s, NEWEST) and not get(s, FLAGS) & GOING:
            return _fail(s, PROTOCOL_ERROR)
        return _closed(s, stream, now)
    state = get(row, STATE)
    if state & ENDED:
        return _reset(s, stream, STREAM_CLOSED, now)
    put(row, RECEIVE, get(row, RECEIVE) - whole)
    if get(row, RECEIVE) < 0:
        return _reset(s, stream, FLOW_CONTROL_ERROR, now)
    declared = get(row, DECLARED)
    if declared >= 0:
        if size > declared:
            return _reset(s, stream, PROTOCOL_ERROR, now)
        put(row, DECLARED, declared - size)
    ends = flags & END_STREAM != 0
    if size == 0 and not ends and _count(s, CONTROLS, MOST_CONTROLS, now):
        return _fail(s, ENHANCE_YOUR_CALM)
    if not ends:
        give_credit(s, row, whole if get(row, KIND) != STREAMING else whole - size)
    put(s, EVENT_ROW, row)
    put(s, EVENT_AT, at)
    put(s, EVENT_BYTES, size)
    if state & TOO_LARGE:
        return _ended(s, row, now) if ends else NOTHING
    if get(row, KIND) == STREAMING:
        if ends:
            put(row, STATE, state | ENDED)
            if get(row, DECLARED) > 0:
                return _reset(s, stream, PROTOCOL_ERROR, now)
        return CAME
    if get(row, BYTES) - get(row, HEAD_BYTES) + size > get(s, MOST_BODY) + 5:
        if ends:
            put(row, STATE, state | ENDED)
        return _too_large(s, row)
    if ends and get(row, BYTES) == get(row, HEAD_BYTES):
        return _ended(s, row, now)
    if not keep_body(s, row, at, size, _expected(row, at, size)):
        return _reset(s, stream, ENHANCE_YOUR_CALM, now)
    if not ends:
        return NOTHING
    put(s, EVENT_AT, get(row, AT) + get(row, HEAD_BYTES))
    put(s, EVENT_BYTES, get(row, BYTES) - get(row, HEAD_BYTES))
    return _ended(s, row, now)


@nb.njit
def _closed(s, stream, now):  # type: ignore[no-untyped-def]
    """A frame for a stream that is closed, which may have been under way when it was reset here."""
    if _count(s, CONTROLS, MOST_CONTROLS, now):
        return _fail(s, ENHANCE_YOUR_CALM)
    write_reset(s, stream, STREAM_CLOSED)
    return NOTHING


@nb.njit
def give_credit(s, row, size):  # type: ignore[no-untyped-def]
    """Let a client send so many bytes more on a stream. The buffer has CONTROL_ROOM."""
    put(row, CREDIT, get(row, CREDIT) + size)
    if get(row, CREDIT) >= STREAM_WINDOW // 2:
        write_credit(s, get(row, ID), get(row, CREDIT))
        put(row, RECEIVE, get(row, RECEIVE) + get(row, CREDIT))
        put(row, CREDIT, 0)


@nb.njit
def _on_settings(s, at, size, flags, stream, now):  # type: ignore[no-untyped-def]
    if stream != 0:
        return _fail(s, PROTOCOL_ERROR)
    if flags & ACK:
        return _fail(s, FRAME_SIZE_ERROR) if size != 0 else _control(s, now)
    if size % 6 != 0:
        return _fail(s, FRAME_SIZE_ERROR)
    window = nb.int64(-1)
    for i in range(size // 6):
        which, value = _u16(at + 6 * i), read_u32(at + 6 * i + 2)
        if which == ENABLE_PUSH and value > 1:
            return _fail(s, PROTOCOL_ERROR)
        if which == MAX_FRAME_SIZE:
            if value < FRAME_BYTES or value >= 1 << 24:
                return _fail(s, PROTOCOL_ERROR)
            put(s, PEER_FRAME, value)
        elif which == INITIAL_WINDOW_SIZE:
            if value > MOST_WINDOW:
                return _fail(s, FLOW_CONTROL_ERROR)
            window = value
    if window >= 0:  # the last of them holds
        more, row = window - get(s, INITIAL), get(s, STREAMS_AT)
        for _ in range(get(s, STREAMS_ROOM)):
            if get(row, ID) != 0:
                put(row, WINDOW, get(row, WINDOW) + more)
                if get(row, WINDOW) > MOST_WINDOW:
                    return _fail(s, FLOW_CONTROL_ERROR)
            row += 8 * STREAM_WORDS
        put(s, INITIAL, window)
    put(s, FLAGS, get(s, FLAGS) | SETTLED)
    write_control(s, SETTINGS, ACK, 0, 0)
    if _count(s, CONTROLS, MOST_CONTROLS, now):
        return _fail(s, ENHANCE_YOUR_CALM)
    put(s, EVENT_ROW, 0)
    return SENDABLE if get(s, WAITING) > 0 else NOTHING


@nb.njit
def _on_credit(s, at, size, stream, now):  # type: ignore[no-untyped-def]
    if size != 4:
        return _fail(s, FRAME_SIZE_ERROR)
    more = read_u32(at) & MOST_WINDOW
    if stream == 0:
        if more == 0:
            return _fail(s, PROTOCOL_ERROR)
        put(s, SEND_WINDOW, get(s, SEND_WINDOW) + more)
        if get(s, SEND_WINDOW) > MOST_WINDOW:
            return _fail(s, FLOW_CONTROL_ERROR)
        put(s, EVENT_ROW, 0)
        return SENDABLE if get(s, WAITING) > 0 else NOTHING
    row = row_of(s, stream)
    if row == 0:
        if stream > get(s, NEWEST) and not get(s, FLAGS) & GOING:
            return _fail(s, PROTOCOL_ERROR)
        return _control(s, now)
    if more == 0:
        return _reset(s, stream, PROTOCOL_ERROR, now)
    put(row, WINDOW, get(row, WINDOW) + more)
    if get(row, WINDOW) > MOST_WINDOW:
        return _reset(s, stream, FLOW_CONTROL_ERROR, now)
    put(s, EVENT_ROW, row)
    return SENDABLE if get(s, WAITING) > 0 else NOTHING


@nb.njit
def _on_reset(s, size, stream, now):  # type: ignore[no-untyped-def]
    if size != 4:
        return _fail(s, FRAME_SIZE_ERROR)
    if stream == 0 or (stream > get(s, NEWEST) and not get(s, FLAGS) & GOING):
        return _fail(s, PROTOCOL_ERROR)
    if _count(s, RESETS, MOST_RESETS, now):
        return _fail(s, ENHANCE_YOUR_CALM)
    row = row_of(s, stream)
    put(s, EVENT_ROW, row)
    return NOTHING if row == 0 else RESET


@nb.njit
def _on_ping(s, at, size, flags, stream, now):  # type: ignore[no-untyped-def]
    if stream != 0:
        return _fail(s, PROTOCOL_ERROR)
    if size != 8:
        return _fail(s, FRAME_SIZE_ERROR)
    if not flags & ACK:
        copy_bytes(write_control(s, PING, ACK, 0, 8), at, 8)
    return _control(s, now)


@nb.njit
def _on_frame(s, kind, at, size, flags, stream, work, now):  # type: ignore[no-untyped-def]
    if kind == DATA:
        return _on_data(s, at, size, flags, stream, now)
    if kind == HEADERS:
        return _on_headers(s, at, size, flags, stream, work, now)
    if kind == WINDOW_UPDATE:
        return _on_credit(s, at, size, stream, now)
    if kind == SETTINGS:
        return _on_settings(s, at, size, flags, stream, now)
    if kind == PING:
        return _on_ping(s, at, size, flags, stream, now)
    if kind == RST_STREAM:
        return _on_reset(s, size, stream, now)
    if kind == CONTINUATION:
        return _on_continuation(s, at, size, flags, stream, work, now)
    if kind == PRIORITY:
        if stream == 0:
            return _fail(s, PROTOCOL_ERROR)
        if size != _PRIORITY_BYTES:
            return _reset(s, stream, FRAME_SIZE_ERROR, now)
        if read_u32(at) & _MOST_ID == stream:
            return _reset(s, stream, PROTOCOL_ERROR, now)
    if kind == PUSH_PROMISE:
        return _fail(s, PROTOCOL_ERROR)
    if kind == GOAWAY:
        if stream != 0:
            return _fail(s, PROTOCOL_ERROR)
        if size < 8:
            return _fail(s, FRAME_SIZE_ERROR)
    return _control(s, now)  # of types that nobody knows too


@nb.njit
def step(s, at, n, work, now):  # type: ignore[no-untyped-def]
    """Take the frame that the `n` bytes at `at` begin with. Returns (its bytes, what it comes to).

    No bytes: more must come first, or the buffer has no CONTROL_ROOM. `work`: WORK_BYTES. Of a frame that is too large the head is enough.
    """
    if n < FRAME_HEAD or room_of(s) < CONTROL_ROOM:
        return 0, NOTHING
    size = nb.int64(load_u8(at, 0)) << 16 | nb.int64(load_u8(at, 1)) << 8 | nb.int64(load_u8(at, 2))
    kind, flags, stream = nb.int64(load_u8(at, 3)), nb.int64(load_u8(at, 4)), read_u32(at + 5) & _MOST_ID
    if size > FRAME_BYTES:
        return n, _fail(s, FRAME_SIZE_ERROR)
    if not get(s, FLAGS) & SETTLED and (kind != SETTINGS or flags & ACK):
        return n, _fail(s, PROTOCOL_ERROR)
    if get(s, BLOCK_STREAM) != 0 and (kind != CONTINUATION or stream != get(s, BLOCK_STREAM)):
        return n, _fail(s, PROTOCOL_ERROR)
    if n < FRAME_HEAD + size:
        return 0, NOTHING
    return FRAME_HEAD + size, _on_frame(s, kind, at + FRAME_HEAD, size, flags, stream, work, now)


# --- for Python: a session without a reactor


@compiled(types.int64(types.int64, types.int64), when=LAST)
def begin(most_body: Any, streaming: Any) -> Any:
    """The address of a new session, or 0. `streaming`: the address of a table of paths, or 0."""
    s = allocate(SESSION_BYTES)
    if s != 0:
        begin_session(s, most_body, streaming)
    return s


@compiled(types.void(types.int64, types.int64, types.int64), when=LAST)
def lend(s: Any, at: Any, room: Any) -> Any:
    """Lend a session an empty buffer for frames; the first time SETTINGS are written there."""
    put(s, OUT_AT, at)
    put(s, OUT_BYTES, 0)
    put(s, OUT_ROOM, room)
    if not get(s, FLAGS) & GREETED:
        put(s, FLAGS, get(s, FLAGS) | GREETED)
        write_settings(s)


@compiled(types.UniTuple(types.int64, 2)(*[types.int64] * 5), when=LAST)
def take(s: Any, at: Any, n: Any, work: Any, now: Any) -> Any:
    """`step`."""
    return step(s, at, n, work, now)


@compiled("int64(int64, int64, int64[:, ::1], int64, int64, int64, int64)", when=LAST)
def respond(s: Any, stream: Any, places: Any, headers: Any, data: Any, trailers: Any, ends: Any) -> Any:
    """Let a copy of the bytes at `places` (address, size), a header block, data and trailers, leave on a stream. Returns 0 where it is gone."""
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
    row = row_of(s, stream)
    return 1 if row != 0 and answer_call(s, row, message, size, 0, 0) else 0


@compiled("int64(int64, int64[:, ::1])", when=LAST)
def push_all(s: Any, told: Any) -> Any:
    """Write what waits on all streams, as far as windows and room go.

    Returns of how many streams a block has left that tells so: `told` has (stream, how many) of each.
    """
    row, count = get(s, STREAMS_AT), 0
    for _ in range(get(s, STREAMS_ROOM)):
        if get(row, ID) != 0 and get(row, FIRST_OUT) != 0:
            stream = get(row, ID)
            tells, _ = push(s, row)
            if tells > 0:
                told[count, 0], told[count, 1] = stream, tells
                count += 1
        row += 8 * STREAM_WORDS
    return count


@compiled(types.void(types.int64, types.int64, types.int64), when=LAST)
def close_stream(s: Any, stream: Any, code: Any) -> Any:
    """Close a stream; reset it, too, with a `code` of 0 or more. The buffer has CONTROL_ROOM."""
    row = row_of(s, stream)
    if row != 0:
        if code >= 0:
            write_reset(s, stream, code)
        close_row(s, row)


@compiled(types.void(types.int64, types.int64, types.int64), when=LAST)
def consume(s: Any, stream: Any, size: Any) -> Any:
    """Let the client of a stream send so many bytes more. The buffer has CONTROL_ROOM."""
    row = row_of(s, stream)
    if row != 0 and not get(row, STATE) & ENDED:
        give_credit(s, row, size)


@compiled(types.void(types.int64, types.int64), when=LAST)
def forget_request(s: Any, stream: Any) -> Any:
    """Let go of a stream's head and body: somebody has them."""
    row = row_of(s, stream)
    if row != 0:
        drop_request(s, row)
        put(row, HEAD_BYTES, 0)
        put(row, ROOM, 0)


@compiled(types.int64(types.int64), when=LAST)
def say_goodbye(s: Any) -> Any:
    """Begin no more streams. Returns how many are open."""
    go_away(s)
    return get(s, OPEN)


@compiled(types.void(types.int64), when=LAST)
def free(s: Any) -> Any:
    """Free a session, but for the buffer that it was lent."""
    end_session(s)
    release(s)
