"""HTTP/2 frames that leave a reactor: gathered in its memory, and kept with the session where the socket does not take them.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import add_at, copy_bytes
from tierstore.kernels.records import place, text_at
from tierstore.kernels.sysio import EAGAIN, EINTR, allocate, monotonic_ns, move_bytes, release, send_pieces
from tierstore.reactor.connections import notify, set_send_deadline
from tierstore.reactor.layout import (
    FRAMES_BYTES,
    STREAM_SENT,
    connection_at,
)
from tierstore.reactor.sockets import send
from tierstore.wire.http2 import layout as http2_layout
from tierstore.wire.http2 import out as http2_out

KEPT_BYTES = 1 << 16  # of unsent frames; from here on the reactor reads nothing more from the connection


@nb.njit
def bind_frames(me, fd, s):
    """Lend a session the reactor's memory for frames, unless it has kept frames; and memory for pieces, unless TLS would copy them."""
    if s.out_kept == 0:
        s.out_at = s.piece_from = me.frames
        s.out_bytes = 0
        s.out_room = FRAMES_BYTES
        s.pieces = me.pieces if connection_at(me.conns, fd).tls == 0 else 0


@nb.njit
def _keep_frames(me, fd, s, left):
    """The address of a session's memory for `left` unsent bytes of frames and some more; 0: no memory."""
    kept = allocate(left + KEPT_BYTES)
    if kept != 0:
        s.out_kept = s.out_at = kept
        s.out_bytes = left
        s.out_room = left + KEPT_BYTES
        s.pieces = 0
        set_send_deadline(me, fd, left)
    return kept


@nb.njit
def _flush_pieces(me, fd, s):
    """`flush` for pieces."""
    row = connection_at(me.conns, fd)
    http2_out.end_part(s)
    piece, count = s.pieces, s.pieces_used
    s.pieces_used = 0
    while count > 0:
        took = send_pieces(fd, piece, count)
        if took == -EINTR:
            continue
        if took == -EAGAIN:
            break
        if took < 0:
            row.lost = 1
            return False
        while count > 0 and took >= piece.bytes:
            took -= piece.bytes
            piece = text_at(piece, 1)
            count -= 1
        if count > 0:
            piece.at += took
            piece.bytes -= took
    if count == 0:
        bind_frames(me, fd, s)
        return True
    left = nb.int64(0)
    for k in range(count):
        left += text_at(piece, k).bytes
    at = _keep_frames(me, fd, s, left)
    if at == 0:
        row.lost = 1
        return False
    for k in range(count):
        one = text_at(piece, k)
        copy_bytes(at, one.at, one.bytes)
        at += one.bytes
    return False


@nb.njit
def flush(me, fd, s):
    """Send the frames that were written. Returns True where all were sent; marks a connection that is lost."""
    if s.pieces_used > 0:
        return _flush_pieces(me, fd, s)
    row = connection_at(me.conns, fd)
    at, left, kept = s.out_at, s.out_bytes, s.out_kept
    begin = left
    while left > 0:
        took = send(me, fd, at, left, 0)
        if took > 0:
            at += took
            left -= took
        elif took == -EAGAIN:
            break
        elif took != -EINTR:
            row.lost = 1
            return False
    if left == 0:
        if kept != 0:
            release(kept)
            s.out_kept = 0
            row.deadline_ns = 0
        bind_frames(me, fd, s)
        return True
    if kept != 0 and left == begin:
        return False
    if kept != 0 and s.out_at != at:
        move_bytes(s.out_at, at, left)
        s.out_bytes = left
        set_send_deadline(me, fd, left)
        return False
    target = _keep_frames(me, fd, s, left)
    if target == 0:
        row.lost = 1
    else:
        copy_bytes(target, at, left)
    return False


@nb.njit
def push_row(me, fd, s, row):
    """`http2_out.push`, and tell Python which of its blocks were sent."""
    stream = row.id
    is_away = row.state & http2_layout.AWAY != 0
    reports, moved = http2_out.push(s, row)
    if reports > 0:
        notify(me, STREAM_SENT, fd | stream << 24, connection_at(me.conns, fd).serial, reports, 0)
    if row.id == 0:
        if is_away:
            add_at(place(me.shared, "streams_away"), -1)
    elif moved:
        set_deadline(me, row)


@nb.njit
def set_deadline(me, row):
    """Set the deadline of the first block of a stream."""
    block = row.first_out
    if block == 0:
        row.deadline_ns = 0
        return
    slowest = block.size * 1_000_000_000 // me.limits.slowest_rate
    row.deadline_ns = monotonic_ns() + me.limits.stall_ns + slowest


@nb.njit
def push_all(me, fd, s):
    """Write what waits on all streams, in turn, as far as windows, room and socket allow."""
    rows, room = s.streams, s.streams_room
    while s.waiting > 0:
        written = s.out_bytes
        for k in range(room):
            which = (s.next + k) % room
            row = http2_layout.stream_at(rows, which)
            if row.id != 0 and row.first_out != 0:
                push_row(me, fd, s, row)
                if http2_out.room_of(s) < http2_layout.FRAME_BYTES:
                    s.next = (which + 1) % room
                    break
        if s.out_bytes == written or not flush(me, fd, s):
            return
