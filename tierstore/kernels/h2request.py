"""Requests as they come over HTTP/2: header blocks, bodies, trailers, and the windows of those who send them.

What comes of a frame is what `h2core.step` returns. Free functions of addresses, nogil.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import h2head, h2words, hpack
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.h2errors import closed, count_often, fail, read_u32, reset_stream
from tierstore.kernels.h2out import (
    hold,
    new_row,
    row_of,
    write_credit,
    write_headers,
)
from tierstore.kernels.raw import load_u8, store_u8
from tierstore.kernels.request_record import get, put
from tierstore.kernels.sysio import allocate, release

_LIST_TOO_LARGE = (0x08, 3, 52, 51, 49)  # :status 431, literal, for a header list that is too large
_PRIORITY_BYTES = 5
MOST_ID = (1 << 31) - 1


@nb.njit
def _ended(s, row, now):  # type: ignore[no-untyped-def]
    """The client has sent all of a request."""
    put(row, h2words.STATE, get(row, h2words.STATE) | h2words.ENDED)
    if get(row, h2words.DECLARED) > 0:
        return reset_stream(s, get(row, h2words.ID), h2words.PROTOCOL_ERROR, now)
    put(s, h2words.EVENT_ROW, row)
    if get(row, h2words.STATE) & h2words.TOO_LARGE:
        return h2words.NOTHING  # it is Python's already
    if get(row, h2words.KIND) == h2words.STREAMING:
        put(s, h2words.EVENT_BYTES, 0)
        return h2words.CAME
    return h2words.REQUEST


@nb.njit
def _too_large(s, row):  # type: ignore[no-untyped-def]
    """A body beyond the limit is dropped; its request is for Python to refuse."""
    put(row, h2words.STATE, get(row, h2words.STATE) | h2words.TOO_LARGE)
    hold(s, get(row, h2words.HEAD_BYTES) - get(row, h2words.BYTES))
    put(row, h2words.BYTES, get(row, h2words.HEAD_BYTES))
    put(s, h2words.EVENT_ROW, row)
    put(s, h2words.EVENT_AT, get(row, h2words.AT))
    put(s, h2words.EVENT_BYTES, 0)
    return h2words.REQUEST


@nb.njit
def _on_block(s, at, size, stream, flags, work, now):  # type: ignore[no-untyped-def]
    """A header block is there: of a new stream, or the trailers of an open one."""
    fields, text = work, work + h2words.FIELDS_BYTES
    count = hpack.decode(
        s + 8 * h2words.SESSION_WORDS, at, size, text, h2words.MOST_LIST_BYTES, fields, h2words.MOST_FIELDS
    )
    if count == hpack.COMPRESSION:
        return fail(s, h2words.COMPRESSION_ERROR)
    row = row_of(s, stream)
    if row != 0:
        if get(row, h2words.STATE) & h2words.ENDED:
            return reset_stream(s, stream, h2words.STREAM_CLOSED, now)
        if not flags & h2words.END_STREAM or count < 0 or not h2head.are_trailers(text, fields, count):
            return reset_stream(s, stream, h2words.PROTOCOL_ERROR, now)
        put(s, h2words.EVENT_AT, get(row, h2words.AT) + get(row, h2words.HEAD_BYTES))
        put(s, h2words.EVENT_BYTES, get(row, h2words.BYTES) - get(row, h2words.HEAD_BYTES))
        return _ended(s, row, now)
    if stream <= get(s, h2words.NEWEST):
        if flags & h2words.END_STREAM and count >= 0 and h2head.are_trailers(text, fields, count):
            return closed(s, stream, now)  # they were under way when the stream was reset or answered
        return fail(s, h2words.STREAM_CLOSED)
    if get(s, h2words.FLAGS) & h2words.GOING:
        return reset_stream(s, stream, h2words.REFUSED_STREAM, now)
    put(s, h2words.NEWEST, stream)
    put(s, h2words.STARTED, get(s, h2words.STARTED) + 1)
    if get(s, h2words.OPEN) >= h2words.MOST_STREAMS:
        return reset_stream(s, stream, h2words.REFUSED_STREAM, now)
    if count < 0:
        for i, byte in enumerate(_LIST_TOO_LARGE):
            store_u8(work, i, nb.uint8(byte))
        write_headers(s, stream, work, len(_LIST_TOO_LARGE), h2words.END_STREAM)
        return h2words.NOTHING if flags & h2words.END_STREAM else reset_stream(s, stream, 0, now)
    row = new_row(s, stream)
    if row == 0:
        return reset_stream(s, stream, h2words.REFUSED_STREAM, now)
    came = h2head.read_head(row, text, fields, count, get(s, h2words.STREAMING_AT), now)
    if came != h2head.GOOD:
        return reset_stream(
            s, stream, h2words.PROTOCOL_ERROR if came == h2head.MALFORMED else h2words.REFUSED_STREAM, now
        )
    hold(s, get(row, h2words.BYTES))
    put(row, h2words.WINDOW, get(s, h2words.INITIAL))
    put(row, h2words.RECEIVE, h2words.STREAM_WINDOW)
    put(row, h2words.BEGAN_NS, now)
    put(s, h2words.EVENT_ROW, row)
    put(s, h2words.EVENT_AT, get(row, h2words.AT) + get(row, h2words.HEAD_BYTES))
    put(s, h2words.EVENT_BYTES, 0)
    if get(row, h2words.KIND) == h2words.STREAMING:
        if flags & h2words.END_STREAM:
            put(row, h2words.STATE, h2words.ENDED)
            if get(row, h2words.DECLARED) > 0:
                return reset_stream(s, stream, h2words.PROTOCOL_ERROR, now)
        return h2words.OPENED
    if flags & h2words.END_STREAM:
        return _ended(s, row, now)
    if get(row, h2words.DECLARED) > get(s, h2words.MOST_BODY):
        return _too_large(s, row)
    return h2words.NOTHING


@nb.njit
def _move(words, which, have, size):  # type: ignore[no-untyped-def]
    """Move `have` bytes, whose address is the word `which`, to a block of `size`. False: no memory, and they are where they were."""
    kept = allocate(size)
    if kept == 0:
        return False
    copy_bytes(kept, get(words, which), have)
    release(get(words, which))
    put(words, which, kept)
    return True


@nb.njit
def _keep_part(s, at, size):  # type: ignore[no-untyped-def]
    """Keep a part of a header block whose remainder is to come. False: it is too large, or there is no memory."""
    have = get(s, h2words.BLOCK_BYTES)
    if have + size > h2words.MOST_BLOCK_BYTES:
        return False
    if have + size > get(s, h2words.BLOCK_ROOM):
        room = max(2 * get(s, h2words.BLOCK_ROOM), have + size)
        if not _move(s, h2words.BLOCK_AT, have, room):
            return False
        put(s, h2words.BLOCK_ROOM, room)
    copy_bytes(get(s, h2words.BLOCK_AT) + have, at, size)
    put(s, h2words.BLOCK_BYTES, have + size)
    return True


@nb.njit
def on_headers(s, at, size, flags, stream, work, now):  # type: ignore[no-untyped-def]
    if stream & 1 == 0:
        return fail(s, h2words.PROTOCOL_ERROR)
    pad = 0
    if flags & h2words.PADDED:
        if size < 1:
            return fail(s, h2words.FRAME_SIZE_ERROR)
        pad = nb.int64(load_u8(at, 0))
        at += 1
        size -= 1
    depends = nb.int64(-1)
    if flags & h2words.HAS_PRIORITY:
        if size < _PRIORITY_BYTES:
            return fail(s, h2words.FRAME_SIZE_ERROR)
        depends = read_u32(at) & MOST_ID
        at += _PRIORITY_BYTES
        size -= _PRIORITY_BYTES
    if pad > size:
        return fail(s, h2words.PROTOCOL_ERROR)
    size -= pad
    if depends == stream:
        return fail(s, h2words.PROTOCOL_ERROR)
    if flags & h2words.END_HEADERS:
        return _on_block(s, at, size, stream, flags, work, now)
    put(s, h2words.BLOCK_STREAM, stream)
    put(s, h2words.BLOCK_FLAGS, flags)
    put(s, h2words.BLOCK_FRAMES, 0)
    put(s, h2words.BLOCK_BYTES, 0)
    return h2words.NOTHING if _keep_part(s, at, size) else fail(s, h2words.ENHANCE_YOUR_CALM)


@nb.njit
def on_continuation(s, at, size, flags, stream, work, now):  # type: ignore[no-untyped-def]
    if get(s, h2words.BLOCK_STREAM) == 0:
        return fail(s, h2words.PROTOCOL_ERROR)
    put(s, h2words.BLOCK_FRAMES, get(s, h2words.BLOCK_FRAMES) + 1)
    if get(s, h2words.BLOCK_FRAMES) > h2words.MOST_CONTINUATIONS or not _keep_part(s, at, size):
        return fail(s, h2words.ENHANCE_YOUR_CALM)
    if not flags & h2words.END_HEADERS:
        return h2words.NOTHING
    put(s, h2words.BLOCK_STREAM, 0)
    came = _on_block(
        s, get(s, h2words.BLOCK_AT), get(s, h2words.BLOCK_BYTES), stream, get(s, h2words.BLOCK_FLAGS), work, now
    )
    release(get(s, h2words.BLOCK_AT))
    put(s, h2words.BLOCK_AT, 0)
    put(s, h2words.BLOCK_ROOM, 0)
    return came


@nb.njit
def keep_body(s, row, at, size, expected):  # type: ignore[no-untyped-def]
    """Keep bytes of a request behind those that have come; `expected`: so many come with them, or -1. False: no memory."""
    have = get(row, h2words.BYTES)
    if have + size > get(row, h2words.ROOM):
        room = max(have + size, min(2 * have, have + expected) if expected > size else 2 * have)
        if expected > size:
            room = max(room, min(have + expected, have + 16 * h2words.FRAME_BYTES))
        if not _move(row, h2words.AT, have, room + 64):
            return False
        put(row, h2words.ROOM, room)
    copy_bytes(get(row, h2words.AT) + have, at, size)
    put(row, h2words.BYTES, have + size)
    hold(s, size)
    return True


@nb.njit
def _expected(row, at, size):  # type: ignore[no-untyped-def]
    """How many bytes of a body come from here on, as far as the client says so; or -1."""
    if get(row, h2words.DECLARED) >= 0:
        return size + get(row, h2words.DECLARED)
    if get(row, h2words.BYTES) == get(row, h2words.HEAD_BYTES) and size >= 5 and load_u8(at, 0) == 0:
        return 5 + read_u32(at + 1)
    return nb.int64(-1)


@nb.njit
def on_data(s, at, size, flags, stream, now):  # type: ignore[no-untyped-def]
    if stream == 0:
        return fail(s, h2words.PROTOCOL_ERROR)
    pad, whole = 0, size
    if flags & h2words.PADDED:
        if size < 1:
            return fail(s, h2words.FRAME_SIZE_ERROR)
        pad = nb.int64(load_u8(at, 0)) + 1
        if pad > size:
            return fail(s, h2words.PROTOCOL_ERROR)
        at += 1
        size -= pad
    put(s, h2words.RECEIVE_WINDOW, get(s, h2words.RECEIVE_WINDOW) - whole)
    if get(s, h2words.RECEIVE_WINDOW) < 0:
        return fail(s, h2words.FLOW_CONTROL_ERROR)
    put(s, h2words.EATEN, get(s, h2words.EATEN) + whole)
    if get(s, h2words.EATEN) >= h2words.CREDIT_BYTES:
        write_credit(s, 0, get(s, h2words.EATEN))
        put(s, h2words.RECEIVE_WINDOW, get(s, h2words.RECEIVE_WINDOW) + get(s, h2words.EATEN))
        put(s, h2words.EATEN, 0)
    row = row_of(s, stream)
    if row == 0:
        if stream > get(s, h2words.NEWEST) and not get(s, h2words.FLAGS) & h2words.GOING:
            return fail(s, h2words.PROTOCOL_ERROR)
        return closed(s, stream, now)
    state = get(row, h2words.STATE)
    if state & h2words.ENDED:
        return reset_stream(s, stream, h2words.STREAM_CLOSED, now)
    put(row, h2words.RECEIVE, get(row, h2words.RECEIVE) - whole)
    if get(row, h2words.RECEIVE) < 0:
        return reset_stream(s, stream, h2words.FLOW_CONTROL_ERROR, now)
    declared = get(row, h2words.DECLARED)
    if declared >= 0:
        if size > declared:
            return reset_stream(s, stream, h2words.PROTOCOL_ERROR, now)
        put(row, h2words.DECLARED, declared - size)
    ends = flags & h2words.END_STREAM != 0
    if size == 0 and not ends and count_often(s, h2words.CONTROLS, h2words.MOST_CONTROLS, now):
        return fail(s, h2words.ENHANCE_YOUR_CALM)
    if not ends:
        give_credit(s, row, whole if get(row, h2words.KIND) != h2words.STREAMING else whole - size)
    put(s, h2words.EVENT_ROW, row)
    put(s, h2words.EVENT_AT, at)
    put(s, h2words.EVENT_BYTES, size)
    if state & h2words.TOO_LARGE:
        return _ended(s, row, now) if ends else h2words.NOTHING
    if get(row, h2words.KIND) == h2words.STREAMING:
        if ends:
            put(row, h2words.STATE, state | h2words.ENDED)
            if get(row, h2words.DECLARED) > 0:
                return reset_stream(s, stream, h2words.PROTOCOL_ERROR, now)
        return h2words.CAME
    if get(row, h2words.BYTES) - get(row, h2words.HEAD_BYTES) + size > get(s, h2words.MOST_BODY) + 5:
        if ends:
            put(row, h2words.STATE, state | h2words.ENDED)
        return _too_large(s, row)
    if ends and get(row, h2words.BYTES) == get(row, h2words.HEAD_BYTES):
        return _ended(s, row, now)
    if not keep_body(s, row, at, size, _expected(row, at, size)):
        return reset_stream(s, stream, h2words.ENHANCE_YOUR_CALM, now)
    if not ends:
        return h2words.NOTHING
    put(s, h2words.EVENT_AT, get(row, h2words.AT) + get(row, h2words.HEAD_BYTES))
    put(s, h2words.EVENT_BYTES, get(row, h2words.BYTES) - get(row, h2words.HEAD_BYTES))
    return _ended(s, row, now)


@nb.njit
def give_credit(s, row, size):  # type: ignore[no-untyped-def]
    """Let a client send so many bytes more on a stream. The buffer has CONTROL_ROOM."""
    put(row, h2words.CREDIT, get(row, h2words.CREDIT) + size)
    if get(row, h2words.CREDIT) >= h2words.STREAM_WINDOW // 2:
        write_credit(s, get(row, h2words.ID), get(row, h2words.CREDIT))
        put(row, h2words.RECEIVE, get(row, h2words.RECEIVE) + get(row, h2words.CREDIT))
        put(row, h2words.CREDIT, 0)
