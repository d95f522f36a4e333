"""HTTP/2 requests as they arrive: header blocks, bodies, trailers, and the windows of their senders.

Results are returned through `core.step`. Free functions of addresses, nogil.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import load_u8
from tierstore.kernels.records import place
from tierstore.kernels.sysio import allocate, release
from tierstore.wire.http2 import head as http2_head
from tierstore.wire.http2 import hpack, layout
from tierstore.wire.http2.errors import closed, count_often, fail, read_u32, reset_stream
from tierstore.wire.http2.out import (
    hold,
    new_row,
    row_of,
    write_credit,
    write_headers,
)

_LIST_TOO_LARGE = np.frombuffer(b"\x08\x03431", np.uint8)  # :status 431 as a literal: the header list is too large
_CONTINUE = np.frombuffer(b"\x08\x03100", np.uint8)
_PRIORITY_BYTES = 5
MOST_ID = (1 << 31) - 1


@nb.njit
def _ended(s, row, now):
    """Note that the client has sent all of a request."""
    row.state |= layout.ENDED
    if row.declared > 0:
        return reset_stream(s, row.id, layout.PROTOCOL_ERROR, now)
    s.event_row = row
    if row.state & layout.TOO_LARGE:
        return layout.NOTHING  # Python has it already
    if row.kind == layout.STREAMING:
        s.event_bytes = 0
        return layout.CAME
    return layout.REQUEST


@nb.njit
def _too_large(s, row):
    """Drop a body above the limit. Python refuses its request."""
    row.state |= layout.TOO_LARGE
    hold(s, row.head_bytes - row.bytes)
    row.bytes = row.head_bytes
    s.event_row = row
    s.event_at = row.at
    s.event_bytes = 0
    return layout.REQUEST


@nb.njit
def _on_block(s, at, size, stream, flags, work, now):
    """Read a whole header block: the head of a new stream, or the trailers of an open one."""
    fields, text = work, work + layout.FIELDS_BYTES
    count = hpack.decode(layout.session_at(s, 1), at, size, text, layout.MOST_LIST_BYTES, fields, layout.MOST_FIELDS)
    if count == hpack.COMPRESSION:
        return fail(s, layout.COMPRESSION_ERROR)
    row = row_of(s, stream)
    if row != 0:
        if row.state & layout.ENDED:
            return reset_stream(s, stream, layout.STREAM_CLOSED, now)
        if not flags & layout.END_STREAM or count < 0 or not http2_head.are_trailers(text, fields, count):
            return reset_stream(s, stream, layout.PROTOCOL_ERROR, now)
        s.event_at = row.at + row.head_bytes
        s.event_bytes = row.bytes - row.head_bytes
        return _ended(s, row, now)
    if stream <= s.newest:
        if flags & layout.END_STREAM and count >= 0 and http2_head.are_trailers(text, fields, count):
            return closed(s, stream, now)  # the client sent them before it heard of the reset or the answer
        return fail(s, layout.STREAM_CLOSED)
    if s.flags & layout.GOING:
        return reset_stream(s, stream, layout.REFUSED_STREAM, now)
    s.newest = stream
    s.started += 1
    if s.open >= layout.MOST_STREAMS:
        return reset_stream(s, stream, layout.REFUSED_STREAM, now)
    if count < 0:
        write_headers(s, stream, nb.int64(_LIST_TOO_LARGE.ctypes.data), _LIST_TOO_LARGE.size, layout.END_STREAM)
        return layout.NOTHING if flags & layout.END_STREAM else reset_stream(s, stream, 0, now)
    row = new_row(s, stream)
    if row == 0:
        return reset_stream(s, stream, layout.REFUSED_STREAM, now)
    came = http2_head.read_head(row, text, fields, count, s.streaming_at, now)
    if came not in (http2_head.GOOD, http2_head.EXPECTS):
        return reset_stream(
            s, stream, layout.PROTOCOL_ERROR if came == http2_head.MALFORMED else layout.REFUSED_STREAM, now
        )
    hold(s, row.bytes)
    row.window = s.initial
    row.receive = layout.STREAM_WINDOW
    row.began_ns = now
    s.event_row = row
    s.event_at = row.at + row.head_bytes
    s.event_bytes = 0
    if row.declared > s.most_body and row.kind != layout.STREAMING and not flags & layout.END_STREAM:
        return _too_large(s, row)
    if came == http2_head.EXPECTS and not flags & layout.END_STREAM:
        write_headers(s, stream, nb.int64(_CONTINUE.ctypes.data), _CONTINUE.size, 0)
    if row.kind == layout.STREAMING:
        if flags & layout.END_STREAM:
            row.state = layout.ENDED
            if row.declared > 0:
                return reset_stream(s, stream, layout.PROTOCOL_ERROR, now)
        return layout.OPENED
    return _ended(s, row, now) if flags & layout.END_STREAM else layout.NOTHING


@nb.njit
def _moved(at, have, size):
    """Move a block to a new one of `size` bytes with its first `have` bytes, and free the old one. 0: no memory, and nothing has changed."""
    kept = allocate(size)
    if kept != 0:
        copy_bytes(kept, at, have)
        release(at)
    return kept


@nb.njit
def _keep_part(s, at, size):
    """Keep a part of a header block. False: it is too large, or there is no memory."""
    have = s.block_bytes
    if have + size > layout.MOST_BLOCK_BYTES:
        return False
    if have + size > s.block_room:
        room = max(2 * s.block_room, have + size)
        kept = _moved(s.block_at, have, room)
        if kept == 0:
            return False
        s.block_at, s.block_room = kept, room
    copy_bytes(s.block_at + have, at, size)
    s.block_bytes = have + size
    return True


@nb.njit
def on_headers(s, at, size, flags, stream, work, now):
    if stream & 1 == 0:
        return fail(s, layout.PROTOCOL_ERROR)
    pad = 0
    if flags & layout.PADDED:
        if size < 1:
            return fail(s, layout.FRAME_SIZE_ERROR)
        pad = nb.int64(load_u8(at, 0))
        at += 1
        size -= 1
    depends = nb.int64(-1)
    if flags & layout.HAS_PRIORITY:
        if size < _PRIORITY_BYTES:
            return fail(s, layout.FRAME_SIZE_ERROR)
        depends = read_u32(at) & MOST_ID
        at += _PRIORITY_BYTES
        size -= _PRIORITY_BYTES
    if pad > size:
        return fail(s, layout.PROTOCOL_ERROR)
    size -= pad
    if depends == stream:
        return fail(s, layout.PROTOCOL_ERROR)
    if flags & layout.END_HEADERS:
        return _on_block(s, at, size, stream, flags, work, now)
    s.block_stream = stream
    s.block_flags = flags
    s.block_frames = 0
    s.block_bytes = 0
    return layout.NOTHING if _keep_part(s, at, size) else fail(s, layout.ENHANCE_YOUR_CALM)


@nb.njit
def on_continuation(s, at, size, flags, stream, work, now):
    if s.block_stream == 0:
        return fail(s, layout.PROTOCOL_ERROR)
    s.block_frames += 1
    if s.block_frames > layout.MOST_CONTINUATIONS or not _keep_part(s, at, size):
        return fail(s, layout.ENHANCE_YOUR_CALM)
    if not flags & layout.END_HEADERS:
        return layout.NOTHING
    s.block_stream = 0
    came = _on_block(s, s.block_at, s.block_bytes, stream, s.block_flags, work, now)
    release(s.block_at)
    s.block_at = 0
    s.block_room = 0
    return came


@nb.njit
def keep_body(s, row, at, size, expected):
    """Keep bytes of a request behind those before. `expected`: how many come with them, or -1. False: no memory."""
    have = row.bytes
    if have + size > row.room:
        room = max(have + size, min(2 * have, have + expected) if expected > size else 2 * have)
        if expected > size:
            room = max(room, min(have + expected, have + 16 * layout.FRAME_BYTES))
        kept = _moved(row.at, have, room + 64)
        if kept == 0:
            return False
        row.at, row.room = kept, room
    copy_bytes(row.at + have, at, size)
    row.bytes = have + size
    hold(s, size)
    return True


@nb.njit
def _expected(row, at, size):
    """How many bytes of a body are still to come, if the client says so; or -1."""
    if row.declared >= 0:
        return size + row.declared
    if row.bytes == row.head_bytes and size >= 5 and load_u8(at, 0) == 0:
        return 5 + read_u32(at + 1)
    return nb.int64(-1)


@nb.njit
def on_data(s, at, size, flags, stream, now):
    if stream == 0:
        return fail(s, layout.PROTOCOL_ERROR)
    pad, whole = 0, size
    if flags & layout.PADDED:
        if size < 1:
            return fail(s, layout.FRAME_SIZE_ERROR)
        pad = nb.int64(load_u8(at, 0)) + 1
        if pad > size:
            return fail(s, layout.PROTOCOL_ERROR)
        at += 1
        size -= pad
    s.receive_window -= whole
    if s.receive_window < 0:
        return fail(s, layout.FLOW_CONTROL_ERROR)
    s.eaten += whole
    if s.eaten >= layout.CREDIT_BYTES:
        write_credit(s, 0, s.eaten)
        s.receive_window += s.eaten
        s.eaten = 0
    row = row_of(s, stream)
    if row == 0:
        if stream > s.newest and not s.flags & layout.GOING:
            return fail(s, layout.PROTOCOL_ERROR)
        return closed(s, stream, now)
    state = row.state
    if state & layout.ENDED:
        return reset_stream(s, stream, layout.STREAM_CLOSED, now)
    row.receive -= whole
    if row.receive < 0:
        return reset_stream(s, stream, layout.FLOW_CONTROL_ERROR, now)
    declared = row.declared
    if declared >= 0:
        if size > declared:
            return reset_stream(s, stream, layout.PROTOCOL_ERROR, now)
        row.declared = declared - size
    ends = flags & layout.END_STREAM != 0
    if size == 0 and not ends and count_often(s, place(s, "controls"), layout.MOST_CONTROLS, now):
        return fail(s, layout.ENHANCE_YOUR_CALM)
    if not ends:
        give_credit(s, row, whole if row.kind != layout.STREAMING else whole - size)
    s.event_row = row
    s.event_at = at
    s.event_bytes = size
    if state & layout.TOO_LARGE:
        return _ended(s, row, now) if ends else layout.NOTHING
    if row.kind == layout.STREAMING:
        if ends:
            row.state = state | layout.ENDED
            if row.declared > 0:
                return reset_stream(s, stream, layout.PROTOCOL_ERROR, now)
        return layout.CAME
    if row.bytes - row.head_bytes + size > s.most_body + 5:
        if ends:
            row.state = state | layout.ENDED
        return _too_large(s, row)
    if ends and row.bytes == row.head_bytes:
        return _ended(s, row, now)
    if not keep_body(s, row, at, size, _expected(row, at, size)):
        return reset_stream(s, stream, layout.ENHANCE_YOUR_CALM, now)
    if not ends:
        return layout.NOTHING
    s.event_at = row.at + row.head_bytes
    s.event_bytes = row.bytes - row.head_bytes
    return _ended(s, row, now)


@nb.njit
def give_credit(s, row, size):
    """Let a client send `size` more bytes on a stream. The buffer has CONTROL_ROOM."""
    row.credit += size
    if row.credit >= layout.STREAM_WINDOW // 2:
        write_credit(s, row.id, row.credit)
        row.receive += row.credit
        row.credit = 0
