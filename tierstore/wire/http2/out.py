"""The sending side of an HTTP/2 session: frames written to a buffer, and blocks that wait for their turn and the peer's windows.

The caller that moves bytes to the peer lends the buffer. A frame is in the buffer whole or not at all, so frames are sent in the order of writing.
What windows or room do not allow stays a block of its stream, and `push` goes on with it. If room for pieces is lent too, the data of a long answer
are not copied: pieces then list what to send, in order.

Free functions of addresses, nogil; the thread of the session.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.raw import store_u8
from tierstore.kernels.records import text_at
from tierstore.kernels.sysio import allocate, clear_bytes, release
from tierstore.wire.http2 import hpack, layout


@nb.njit(inline="always")
def write_u32(at, value):
    for i in range(4):
        store_u8(at, i, nb.uint8(value >> (24 - 8 * i) & 255))


@nb.njit(inline="always")
def write_frame_head(at, size, kind, flags, stream):
    store_u8(at, 0, nb.uint8(size >> 16 & 255))
    store_u8(at, 1, nb.uint8(size >> 8 & 255))
    store_u8(at, 2, nb.uint8(size & 255))
    store_u8(at, 3, nb.uint8(kind))
    store_u8(at, 4, nb.uint8(flags))
    write_u32(at + 5, stream)


@nb.njit(inline="always")
def room_of(s):
    """The bytes left in the buffer."""
    return s.out_room - s.out_bytes


@nb.njit(inline="always")
def room_of_data(s):
    """`room_of` without the room that is reserved for control frames."""
    return room_of(s) - layout.CONTROL_ROOM


@nb.njit(inline="always")
def end_of(s):
    return s.out_at + s.out_bytes


@nb.njit(inline="always")
def wrote(s, size):
    """Count bytes that were written to the buffer."""
    s.out_bytes += size


@nb.njit
def write_control(s, kind, flags, stream, size):
    """Write the head of a small frame. Returns the address where the caller writes its `size` bytes."""
    at = end_of(s)
    write_frame_head(at, size, kind, flags, stream)
    wrote(s, layout.FRAME_HEAD + size)
    return at + layout.FRAME_HEAD


@nb.njit
def write_reset(s, stream, code):
    write_u32(write_control(s, layout.RST_STREAM, 0, stream, 4), code)


@nb.njit
def write_credit(s, stream, size):
    write_u32(write_control(s, layout.WINDOW_UPDATE, 0, stream, 4), size)


@nb.njit
def write_goaway(s, code):
    at = write_control(s, layout.GOAWAY, 0, 0, 8)
    write_u32(at, s.newest)
    write_u32(at + 4, code)


# --- streams


@nb.njit
def row_of(s, stream):
    """The address of an open stream's row, or 0."""
    row, left = s.streams, s.open
    for _ in range(s.streams_room):
        if left == 0:
            break
        if row.id != 0:
            if row.id == stream:
                return row
            left -= 1
        row = layout.stream_at(row, 1)
    return layout.stream_at(0)


@nb.njit
def new_row(s, stream):
    """The address of a new row for a stream; 0: no memory. Rows may move."""
    room = s.streams_room
    if s.open == room:
        more = max(2 * room, layout.FIRST_ROOM)
        rows = allocate(layout.STREAM_BYTES * more)
        if rows == 0:
            return layout.stream_at(0)
        copy_bytes(rows, s.streams, layout.STREAM_BYTES * room)
        clear_bytes(layout.stream_at(rows, room), layout.STREAM_BYTES * (more - room))
        release(s.streams)
        s.streams = rows
        s.streams_room = more
    row = s.streams
    while row.id != 0:
        row = layout.stream_at(row, 1)
    clear_bytes(row, layout.STREAM_BYTES)
    row.id = stream
    s.open += 1
    return row


@nb.njit
def hold(s, size):
    s.held += size


@nb.njit
def drop_request(s, row):
    """Free the bytes of a stream's request."""
    hold(s, -row.bytes)
    release(row.at)
    row.at = 0
    row.bytes = 0


@nb.njit
def close_row(s, row):
    """Close a stream: nothing more is read or sent on it."""
    drop_request(s, row)
    block = row.first_out
    if block != 0:
        s.waiting -= 1
    while block != 0:
        following = block.next_block
        hold(s, -block.size)
        release(block)
        block = following
    row.first_out = 0
    row.id = 0
    s.open -= 1


@nb.njit
def free_rows(s):
    """Close all streams, and free their table."""
    row = s.streams
    for _ in range(s.streams_room):
        if row.id != 0:
            close_row(s, row)
        row = layout.stream_at(row, 1)
    release(s.streams)
    s.streams = 0
    s.streams_room = 0


# --- answers


@nb.njit(inline="always")
def block_bytes(headers, data, trailers):
    return layout.BLOCK_BYTES + headers + data + trailers


@nb.njit
def begin_block(address, ends, headers, data, trailers):
    """Initialise a block at an address. Returns where its bytes go: headers, data, trailers, end to end."""
    block = layout.block_at(address)
    block.next_block = 0
    block.ends = ends
    block.header_bytes = headers
    block.data_bytes = data
    block.trailer_bytes = trailers
    block.headers_done = 0
    block.data_done = 0
    block.size = block_bytes(headers, data, trailers)
    return block + layout.BLOCK_BYTES


@nb.njit
def queue(s, row, address):
    """Append the block at an address to a stream, which owns the block from now on."""
    block = layout.block_at(address)
    if row.first_out == 0:
        row.first_out = block
        s.waiting += 1
    else:
        row.last_out.next_block = block
    row.last_out = block
    hold(s, block.size)
    if block.ends & layout.ENDS:
        row.state |= layout.FINAL


@nb.njit
def _headers_room(s, size):
    """Bytes that a header block takes with the heads of its frames."""
    return size + 1 + layout.FRAME_HEAD * (1 + (size + 1) // s.peer_frame)


@nb.njit
def write_headers(s, stream, at, size, flags):
    """Write a header block as HEADERS and, where it exceeds a frame, CONTINUATION. The caller has checked the room.

    After the peer has made its table smaller, the first block says that no table is used (RFC 7541, 4.2), which has been so all along.
    """
    kind, most, before = layout.HEADERS, s.peer_frame, 0
    if s.flags & layout.TABLE_SHRUNK:
        s.flags = (s.flags & ~layout.TABLE_SHRUNK) | layout.NO_TABLE
        before = 1
    while True:
        part = min(size, most - before)
        last = part == size
        begin = end_of(s)
        write_frame_head(
            begin,
            before + part,
            kind,
            (flags if kind == layout.HEADERS else 0) | (layout.END_HEADERS if last else 0),
            stream,
        )
        if before == 1:
            store_u8(begin, layout.FRAME_HEAD, nb.uint8(hpack.NO_TABLE))
        copy_bytes(begin + layout.FRAME_HEAD + before, at, part)
        wrote(s, layout.FRAME_HEAD + before + part)
        if last:
            return
        at += part
        size -= part
        kind, before = layout.CONTINUATION, 0


@nb.njit(inline="always")
def _write_data(s, row, at, size, flags):
    begin = end_of(s)
    write_frame_head(begin, size, layout.DATA, flags, row.id)
    copy_bytes(begin + layout.FRAME_HEAD, at, size)
    wrote(s, layout.FRAME_HEAD + size)
    use_windows(s, row, size)


@nb.njit(inline="always")
def use_windows(s, row, size):
    """Take `size` bytes of data from the windows."""
    row.window -= size
    s.send_window -= size


@nb.njit(inline="always")
def end_part(s):
    """Add what was written to the buffer since the last piece to the pieces."""
    part = text_at(s.pieces, s.pieces_used)
    part.at, part.bytes = s.piece_from, end_of(s) - s.piece_from
    s.piece_from = end_of(s)
    s.pieces_used += 1


@nb.njit(inline="always")
def add_piece(s, at, size):
    """Send data from where they are, behind what was written."""
    end_part(s)
    piece = text_at(s.pieces, s.pieces_used)
    piece.at, piece.bytes = at, size
    s.pieces_used += 1


@nb.njit
def _push_block(s, row, block):
    """Write as much of a block as there is room for. True once all of it was written."""
    ends, data, trailers = (
        block.ends & layout.ENDS,
        block.data_bytes,
        block.trailer_bytes,
    )
    headers, at = block.header_bytes, block + layout.BLOCK_BYTES
    if headers > 0 and block.headers_done == 0:
        if room_of_data(s) < _headers_room(s, headers):
            return False
        write_headers(s, row.id, at, headers, layout.END_STREAM if ends and data + trailers == 0 else 0)
        block.headers_done = 1
    at += headers
    done = block.data_done
    while done < data:
        part = min(data - done, min(s.peer_frame, nb.int64(layout.FRAME_BYTES)))
        part = min(part, min(min(row.window, s.send_window), room_of_data(s) - layout.FRAME_HEAD))
        if part <= 0:
            return False
        last = done + part == data and ends and trailers == 0
        _write_data(s, row, at + done, part, layout.END_STREAM if last else 0)
        done += part
        block.data_done = done
    if trailers > 0:
        if room_of_data(s) < _headers_room(s, trailers):
            return False
        write_headers(s, row.id, at + data, trailers, layout.END_STREAM if ends else 0)
    elif ends and headers + data == 0:  # only the end of the stream
        if room_of_data(s) < layout.FRAME_HEAD:
            return False
        write_control(s, layout.DATA, layout.END_STREAM, row.id, 0)
    return True


@nb.njit
def push(s, row):
    """Write what waits on a stream, as far as windows and room allow. Returns (blocks that were sent and are reported, whether any block was sent).

    A stream whose end was written is closed, and the client's side of it too if the client has not ended it.
    """
    reports, moved = 0, False
    while row.first_out != 0:
        block = row.first_out
        if room_of_data(s) < 0 or not _push_block(s, row, block):
            return reports, moved
        moved = True
        if block.ends & layout.REPORTS:
            reports += 1
        row.first_out = block.next_block
        if row.first_out == 0:
            s.waiting -= 1
        hold(s, -block.size)
        release(block)
    if row.state & layout.FINAL:
        finish(s, row)
    return reports, moved


@nb.njit
def finish(s, row):
    """Close a stream whose answer was written to its end."""
    if not row.state & layout.ENDED:
        write_reset(s, row.id, layout.NO_ERROR)  # the rest of the request is not wanted
    s.resets = max(s.resets - layout.ANSWER_RESETS, -layout.MOST_SAVED_RESETS)
    close_row(s, row)
