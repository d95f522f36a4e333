"""What leaves on an HTTP/2 session: frames written to its buffer, and blocks that wait for their stream's turn and the peer's windows.

The buffer (OUT_AT, OUT_BYTES, OUT_ROOM) is lent by whoever moves bytes to the peer. A frame is in it whole or not at all, so what was
written leaves in its order; what the windows or the room do not take stays a block of its stream, and `push` goes on with it.

Free functions of addresses, nogil; the thread of the session.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels import h2words, hpack
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import store_u8
from tierstore.kernels.request_record import get, put
from tierstore.kernels.sysio import allocate, clear_bytes, release

_STARTS = np.frombuffer(b"\x88\x0f\x10\x10application/grpc", np.uint8)  # :status 200, content-type
_GOOD = np.frombuffer(b"\x00\x0bgrpc-status\x010", np.uint8)
_REQUEST_ID = np.frombuffer(b"x-request-id", np.uint8)
PREFIX = 5  # of a message of gRPC: whether it is compressed, its length


@nb.njit(inline="always")
def write_u32(at, value):  # type: ignore[no-untyped-def]
    for i in range(4):
        store_u8(at, i, nb.uint8(value >> (24 - 8 * i) & 255))


@nb.njit(inline="always")
def write_frame_head(at, size, kind, flags, stream):  # type: ignore[no-untyped-def]
    store_u8(at, 0, nb.uint8(size >> 16 & 255))
    store_u8(at, 1, nb.uint8(size >> 8 & 255))
    store_u8(at, 2, nb.uint8(size & 255))
    store_u8(at, 3, nb.uint8(kind))
    store_u8(at, 4, nb.uint8(flags))
    write_u32(at + 5, stream)


@nb.njit(inline="always")
def room_of(s):  # type: ignore[no-untyped-def]
    """How many bytes more the buffer takes."""
    return get(s, h2words.OUT_ROOM) - get(s, h2words.OUT_BYTES)


@nb.njit(inline="always")
def room_of_data(s):  # type: ignore[no-untyped-def]
    """As `room_of`, without what is kept for frames of control."""
    return room_of(s) - h2words.CONTROL_ROOM


@nb.njit(inline="always")
def _end_of(s):  # type: ignore[no-untyped-def]
    return get(s, h2words.OUT_AT) + get(s, h2words.OUT_BYTES)


@nb.njit(inline="always")
def _add(s, size):  # type: ignore[no-untyped-def]
    put(s, h2words.OUT_BYTES, get(s, h2words.OUT_BYTES) + size)


@nb.njit
def write_control(s, kind, flags, stream, size):  # type: ignore[no-untyped-def]
    """Write the head of a small frame; its `size` bytes are the caller's to write at what is returned."""
    at = _end_of(s)
    write_frame_head(at, size, kind, flags, stream)
    _add(s, h2words.FRAME_HEAD + size)
    return at + h2words.FRAME_HEAD


@nb.njit
def write_reset(s, stream, code):  # type: ignore[no-untyped-def]
    write_u32(write_control(s, h2words.RST_STREAM, 0, stream, 4), code)


@nb.njit
def write_credit(s, stream, size):  # type: ignore[no-untyped-def]
    write_u32(write_control(s, h2words.WINDOW_UPDATE, 0, stream, 4), size)


@nb.njit
def write_goaway(s, code):  # type: ignore[no-untyped-def]
    at = write_control(s, h2words.GOAWAY, 0, 0, 8)
    write_u32(at, get(s, h2words.NEWEST))
    write_u32(at + 4, code)


# --- streams


@nb.njit
def row_of(s, stream):  # type: ignore[no-untyped-def]
    """The address of an open stream, or 0."""
    row, left = get(s, h2words.STREAMS_AT), get(s, h2words.OPEN)
    for _ in range(get(s, h2words.STREAMS_ROOM)):
        if left == 0:
            break
        if get(row, h2words.ID) != 0:
            if get(row, h2words.ID) == stream:
                return row
            left -= 1
        row += 8 * h2words.STREAM_WORDS
    return nb.int64(0)


@nb.njit
def new_row(s, stream):  # type: ignore[no-untyped-def]
    """The address of a free row, which is the stream's from now on; 0: no memory. Rows may move."""
    room = get(s, h2words.STREAMS_ROOM)
    if get(s, h2words.OPEN) == room:
        more = max(2 * room, h2words.FIRST_ROOM)
        rows = allocate(8 * h2words.STREAM_WORDS * more)
        if rows == 0:
            return nb.int64(0)
        copy_bytes(rows, get(s, h2words.STREAMS_AT), 8 * h2words.STREAM_WORDS * room)
        clear_bytes(rows + 8 * h2words.STREAM_WORDS * room, 8 * h2words.STREAM_WORDS * (more - room))
        release(get(s, h2words.STREAMS_AT))
        put(s, h2words.STREAMS_AT, rows)
        put(s, h2words.STREAMS_ROOM, more)
    row = get(s, h2words.STREAMS_AT)
    while get(row, h2words.ID) != 0:
        row += 8 * h2words.STREAM_WORDS
    clear_bytes(row, 8 * h2words.STREAM_WORDS)
    put(row, h2words.ID, stream)
    put(s, h2words.OPEN, get(s, h2words.OPEN) + 1)
    return row


@nb.njit
def hold(s, size):  # type: ignore[no-untyped-def]
    put(s, h2words.HELD, get(s, h2words.HELD) + size)


@nb.njit
def drop_request(s, row):  # type: ignore[no-untyped-def]
    """Let go of what has come of a stream's request."""
    hold(s, -get(row, h2words.BYTES))
    release(get(row, h2words.AT))
    put(row, h2words.AT, 0)
    put(row, h2words.BYTES, 0)


@nb.njit
def close_row(s, row):  # type: ignore[no-untyped-def]
    """A stream is closed: nothing of it comes or leaves any more."""
    drop_request(s, row)
    block = get(row, h2words.FIRST_OUT)
    if block != 0:
        put(s, h2words.WAITING, get(s, h2words.WAITING) - 1)
    while block != 0:
        following = get(block, h2words.NEXT_BLOCK)
        hold(s, -get(block, h2words.SIZE))
        release(block)
        block = following
    put(row, h2words.FIRST_OUT, 0)
    put(row, h2words.ID, 0)
    put(s, h2words.OPEN, get(s, h2words.OPEN) - 1)


@nb.njit
def free_rows(s):  # type: ignore[no-untyped-def]
    """Close all streams, and free their table."""
    row = get(s, h2words.STREAMS_AT)
    for _ in range(get(s, h2words.STREAMS_ROOM)):
        if get(row, h2words.ID) != 0:
            close_row(s, row)
        row += 8 * h2words.STREAM_WORDS
    release(get(s, h2words.STREAMS_AT))
    put(s, h2words.STREAMS_AT, 0)
    put(s, h2words.STREAMS_ROOM, 0)


# --- answers


@nb.njit(inline="always")
def block_bytes(headers, data, trailers):  # type: ignore[no-untyped-def]
    return 8 * h2words.QUEUED_WORDS + headers + data + trailers


@nb.njit
def begin_block(block, ends, headers, data, trailers):  # type: ignore[no-untyped-def]
    """Write the words of a block. Returns where its bytes go: headers, data, trailers, end to end."""
    put(block, h2words.NEXT_BLOCK, 0)
    put(block, h2words.BLOCK_ENDS, ends)
    put(block, h2words.HEADER_BYTES, headers)
    put(block, h2words.DATA_BYTES, data)
    put(block, h2words.TRAILER_BYTES, trailers)
    put(block, h2words.HEADERS_DONE, 0)
    put(block, h2words.DATA_DONE, 0)
    put(block, h2words.SIZE, block_bytes(headers, data, trailers))
    return block + 8 * h2words.QUEUED_WORDS


@nb.njit
def queue(s, row, block):  # type: ignore[no-untyped-def]
    """Let a block be the last to leave on a stream, which owns it from now on."""
    if get(row, h2words.FIRST_OUT) == 0:
        put(row, h2words.FIRST_OUT, block)
        put(s, h2words.WAITING, get(s, h2words.WAITING) + 1)
    else:
        put(get(row, h2words.LAST_OUT), h2words.NEXT_BLOCK, block)
    put(row, h2words.LAST_OUT, block)
    hold(s, get(block, h2words.SIZE))
    if get(block, h2words.BLOCK_ENDS) & h2words.ENDS:
        put(row, h2words.STATE, get(row, h2words.STATE) | h2words.FINAL)


@nb.njit
def _headers_room(s, size):  # type: ignore[no-untyped-def]
    """Bytes that a header block takes with the heads of its frames."""
    return size + 1 + h2words.FRAME_HEAD * (1 + (size + 1) // get(s, h2words.PEER_FRAME))


@nb.njit
def write_headers(s, stream, at, size, flags):  # type: ignore[no-untyped-def]
    """Write a header block as HEADERS and, where a frame does not take it, CONTINUATION. There is room.

    The first one after the peer's table has become smaller says that no table is used (RFC 7541, 4.2), which is so from the first on.
    """
    kind, most, before = h2words.HEADERS, get(s, h2words.PEER_FRAME), 0
    if get(s, h2words.FLAGS) & h2words.TABLE_SHRUNK:
        put(s, h2words.FLAGS, (get(s, h2words.FLAGS) & ~h2words.TABLE_SHRUNK) | h2words.NO_TABLE)
        before = 1
    while True:
        part = min(size, most - before)
        last = part == size
        begin = _end_of(s)
        write_frame_head(
            begin,
            before + part,
            kind,
            (flags if kind == h2words.HEADERS else 0) | (h2words.END_HEADERS if last else 0),
            stream,
        )
        if before == 1:
            store_u8(begin, h2words.FRAME_HEAD, nb.uint8(hpack.NO_TABLE))
        copy_bytes(begin + h2words.FRAME_HEAD + before, at, part)
        _add(s, h2words.FRAME_HEAD + before + part)
        if last:
            return
        at += part
        size -= part
        kind, before = h2words.CONTINUATION, 0


@nb.njit(inline="always")
def _write_data(s, row, at, size, flags):  # type: ignore[no-untyped-def]
    begin = _end_of(s)
    write_frame_head(begin, size, h2words.DATA, flags, get(row, h2words.ID))
    copy_bytes(begin + h2words.FRAME_HEAD, at, size)
    _add(s, h2words.FRAME_HEAD + size)
    put(row, h2words.WINDOW, get(row, h2words.WINDOW) - size)
    put(s, h2words.SEND_WINDOW, get(s, h2words.SEND_WINDOW) - size)


@nb.njit
def _push_block(s, row, block):  # type: ignore[no-untyped-def]
    """Write what there is room for of a block. True once all of it was written."""
    ends, data, trailers = (
        get(block, h2words.BLOCK_ENDS) & h2words.ENDS,
        get(block, h2words.DATA_BYTES),
        get(block, h2words.TRAILER_BYTES),
    )
    headers, at = get(block, h2words.HEADER_BYTES), block + 8 * h2words.QUEUED_WORDS
    if headers > 0 and get(block, h2words.HEADERS_DONE) == 0:
        if room_of_data(s) < _headers_room(s, headers):
            return False
        write_headers(s, get(row, h2words.ID), at, headers, h2words.END_STREAM if ends and data + trailers == 0 else 0)
        put(block, h2words.HEADERS_DONE, 1)
    at += headers
    done = get(block, h2words.DATA_DONE)
    while done < data:
        part = min(data - done, min(get(s, h2words.PEER_FRAME), nb.int64(h2words.FRAME_BYTES)))
        part = min(
            part, min(min(get(row, h2words.WINDOW), get(s, h2words.SEND_WINDOW)), room_of_data(s) - h2words.FRAME_HEAD)
        )
        if part <= 0:
            return False
        last = done + part == data and ends and trailers == 0
        _write_data(s, row, at + done, part, h2words.END_STREAM if last else 0)
        done += part
        put(block, h2words.DATA_DONE, done)
    if trailers > 0:
        if room_of_data(s) < _headers_room(s, trailers):
            return False
        write_headers(s, get(row, h2words.ID), at + data, trailers, h2words.END_STREAM if ends else 0)
    elif ends and headers + data == 0:  # an end alone
        if room_of_data(s) < h2words.FRAME_HEAD:
            return False
        write_control(s, h2words.DATA, h2words.END_STREAM, get(row, h2words.ID), 0)
    return True


@nb.njit
def push(s, row):  # type: ignore[no-untyped-def]
    """Write what waits on a stream, as far as windows and room go. Returns (blocks that are done and tell so, whether any was done).

    A stream whose end was written is closed; the client's part of it too, if it has not ended that itself.
    """
    reports, moved = 0, False
    while get(row, h2words.FIRST_OUT) != 0:
        block = get(row, h2words.FIRST_OUT)
        if room_of_data(s) < 0 or not _push_block(s, row, block):
            return reports, moved
        moved = True
        if get(block, h2words.BLOCK_ENDS) & h2words.REPORTS:
            reports += 1
        put(row, h2words.FIRST_OUT, get(block, h2words.NEXT_BLOCK))
        if get(row, h2words.FIRST_OUT) == 0:
            put(s, h2words.WAITING, get(s, h2words.WAITING) - 1)
        hold(s, -get(block, h2words.SIZE))
        release(block)
    if get(row, h2words.STATE) & h2words.FINAL:
        finish(s, row)
    return reports, moved


@nb.njit
def finish(s, row):  # type: ignore[no-untyped-def]
    """Close a stream whose answer was written to its end."""
    if not get(row, h2words.STATE) & h2words.ENDED:
        write_reset(s, get(row, h2words.ID), h2words.NO_ERROR)  # the remainder of the request is not wanted
    close_row(s, row)


@nb.njit
def trailers_bytes(request_id_bytes):  # type: ignore[no-untyped-def]
    """The most bytes that the trailers of a call that went well take."""
    return _GOOD.size + (_REQUEST_ID.size + request_id_bytes + hpack.MOST_ADDED if request_id_bytes > 0 else 0)


@nb.njit
def write_trailers(target, request_id, request_id_bytes):  # type: ignore[no-untyped-def]
    """Write grpc-status 0, and the request's id where it has one. Returns the bytes written."""
    copy_bytes(target, nb.int64(_GOOD.ctypes.data), _GOOD.size)
    if request_id_bytes == 0:
        return _GOOD.size
    name = nb.int64(_REQUEST_ID.ctypes.data)
    return _GOOD.size + hpack.encode_field(target + _GOOD.size, name, _REQUEST_ID.size, request_id, request_id_bytes)


@nb.njit
def answer_call(s, row, message, size, request_id, request_id_bytes):  # type: ignore[no-untyped-def]
    """Answer a call with a message: at once where windows and room allow, else as a block. False: no memory."""
    data, stream = PREFIX + size, get(row, h2words.ID)
    most = min(get(s, h2words.PEER_FRAME), nb.int64(h2words.FRAME_BYTES))
    needed = data + h2words.FRAME_HEAD * (3 + data // most) + 1 + _STARTS.size + trailers_bytes(request_id_bytes)
    if (
        get(row, h2words.FIRST_OUT) == 0
        and data <= get(row, h2words.WINDOW)
        and data <= get(s, h2words.SEND_WINDOW)
        and needed <= room_of_data(s)
        and trailers_bytes(request_id_bytes) <= most
    ):
        write_headers(s, stream, nb.int64(_STARTS.ctypes.data), _STARTS.size, 0)
        first = min(data, most)
        begin = _end_of(s)
        write_frame_head(begin, first, h2words.DATA, 0, stream)
        store_u8(begin, h2words.FRAME_HEAD, nb.uint8(0))
        write_u32(begin + h2words.FRAME_HEAD + 1, size)
        copy_bytes(begin + h2words.FRAME_HEAD + PREFIX, message, first - PREFIX)
        _add(s, h2words.FRAME_HEAD + first)
        put(row, h2words.WINDOW, get(row, h2words.WINDOW) - first)
        put(s, h2words.SEND_WINDOW, get(s, h2words.SEND_WINDOW) - first)
        done = first - PREFIX
        while done < size:
            part = min(size - done, most)
            _write_data(s, row, message + done, part, 0)
            done += part
        begin = _end_of(s)
        trailers = write_trailers(begin + h2words.FRAME_HEAD, request_id, request_id_bytes)
        write_frame_head(begin, trailers, h2words.HEADERS, h2words.END_HEADERS | h2words.END_STREAM, stream)
        _add(s, h2words.FRAME_HEAD + trailers)
        finish(s, row)
        return True
    block = allocate(block_bytes(_STARTS.size, data, trailers_bytes(request_id_bytes)))
    if block == 0:
        return False
    at = block + 8 * h2words.QUEUED_WORDS
    copy_bytes(at, nb.int64(_STARTS.ctypes.data), _STARTS.size)
    store_u8(at, _STARTS.size, nb.uint8(0))
    write_u32(at + _STARTS.size + 1, size)
    copy_bytes(at + _STARTS.size + PREFIX, message, size)
    trailers = write_trailers(at + _STARTS.size + data, request_id, request_id_bytes)
    begin_block(block, h2words.ENDS, _STARTS.size, data, trailers)
    queue(s, row, block)
    return True
