"""Frames of HTTP/2 that leave a reactor: gathered in its memory, kept with the session where the socket does not accept them.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import h2out, h2words
from tierstore.kernels.atomics import add_at, copy_bytes
from tierstore.kernels.reactor_connections import notify, set_send_deadline
from tierstore.kernels.reactor_sockets import send
from tierstore.kernels.reactor_words import (
    DEADLINE_NS,
    FRAMES_BYTES,
    LOST,
    SERIAL,
    SLOWEST_RATE,
    STALL_NS,
    STREAM_SENT,
    STREAMS_AWAY,
    shared_at,
)
from tierstore.kernels.request_record import get, put
from tierstore.kernels.sysio import EAGAIN, EINTR, allocate, monotonic_ns, move_bytes, release

KEPT_BYTES = 1 << 16  # of frames that the socket does not accept; from here on nothing more is read


@nb.njit
def bind_frames(me, s):  # type: ignore[no-untyped-def]
    """Lend the reactor's memory for frames, unless some are kept."""
    if get(s, h2words.OUT_KEPT) == 0:
        put(s, h2words.OUT_AT, me.frames)
        put(s, h2words.OUT_BYTES, 0)
        put(s, h2words.OUT_ROOM, FRAMES_BYTES)


@nb.njit
def _keep_frames(me, fd, s, at, left):  # type: ignore[no-untyped-def]
    """Keep frames that the socket has not taken, with room for some more. False: no memory."""
    room = left + KEPT_BYTES
    kept = allocate(room)
    if kept == 0:
        return False
    copy_bytes(kept, at, left)
    release(get(s, h2words.OUT_KEPT))
    put(s, h2words.OUT_KEPT, kept)
    put(s, h2words.OUT_AT, kept)
    put(s, h2words.OUT_BYTES, left)
    put(s, h2words.OUT_ROOM, room)
    set_send_deadline(me, fd, left)
    return True


@nb.njit
def flush(me, fd, s):  # type: ignore[no-untyped-def]
    """Send the frames that were written. True where all have left; a connection that is lost is marked."""
    row = me.conns[fd]
    at, left, kept = get(s, h2words.OUT_AT), get(s, h2words.OUT_BYTES), get(s, h2words.OUT_KEPT)
    begin = left
    while left > 0:
        took = send(me, fd, at, left, 0)
        if took > 0:
            at += took
            left -= took
        elif took == -EAGAIN:
            break
        elif took != -EINTR:
            row[LOST] = 1
            return False
    if left == 0:
        put(s, h2words.OUT_BYTES, 0)
        if kept != 0:
            release(kept)
            put(s, h2words.OUT_KEPT, 0)
            bind_frames(me, s)
            row[DEADLINE_NS] = 0
        return True
    if kept != 0 and left == begin:
        return False
    if kept != 0 and get(s, h2words.OUT_AT) != at:
        move_bytes(get(s, h2words.OUT_AT), at, left)
        put(s, h2words.OUT_BYTES, left)
        set_send_deadline(me, fd, left)
        return False
    if not _keep_frames(me, fd, s, at, left):
        row[LOST] = 1
    return False


@nb.njit
def push_row(me, fd, s, row):  # type: ignore[no-untyped-def]
    """`h2out.push`, and Python hears what it waits to hear."""
    stream = get(row, h2words.ID)
    is_away = get(row, h2words.STATE) & h2words.AWAY != 0
    reports, moved = h2out.push(s, row)
    if reports > 0:
        notify(me, STREAM_SENT, fd | stream << 24, me.conns[fd, SERIAL], reports, 0)
    if get(row, h2words.ID) == 0:
        if is_away:
            add_at(shared_at(me, STREAMS_AWAY), -1)
    elif moved:
        set_deadline(me, row)


@nb.njit
def set_deadline(me, row):  # type: ignore[no-untyped-def]
    """Until when the first block of a stream must have left."""
    block = get(row, h2words.FIRST_OUT)
    if block == 0:
        put(row, h2words.DEADLINE_NS, 0)
        return
    slowest = get(block, h2words.SIZE) * 1_000_000_000 // me.limits[SLOWEST_RATE]
    put(row, h2words.DEADLINE_NS, monotonic_ns() + me.limits[STALL_NS] + slowest)


@nb.njit
def push_all(me, fd, s):  # type: ignore[no-untyped-def]
    """Write what waits on all streams, each in its turn, as far as windows, room and socket go."""
    rows, room = get(s, h2words.STREAMS_AT), get(s, h2words.STREAMS_ROOM)
    while get(s, h2words.WAITING) > 0:
        written = get(s, h2words.OUT_BYTES)
        for k in range(room):
            which = (get(s, h2words.NEXT) + k) % room
            row = rows + 8 * h2words.STREAM_WORDS * which
            if get(row, h2words.ID) != 0 and get(row, h2words.FIRST_OUT) != 0:
                push_row(me, fd, s, row)
                if h2out.room_of(s) < h2words.FRAME_BYTES:
                    put(s, h2words.NEXT, (which + 1) % room)
                    break
        if get(s, h2words.OUT_BYTES) == written or not flush(me, fd, s):
            return
