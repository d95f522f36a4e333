"""How a reactor serves connections of HTTP/2: between sockets and `h2core.py`, and between streams and Python. See `reactor.py`.

A connection is of HTTP/2 from its preface on, for life. What its frames write is gathered in the reactor's memory and leaves with one
system call where it can; what the socket does not take is kept with the session, and as long as much is kept nothing more is read. So
neither a client that does not read nor one that holds its windows back costs more than the bounds say.

A whole call of ModelInfer is answered here where a plan allows. Any other request is Python's: its head and body, in a block that Python
frees; then what comes of a method that streams, one block at a time, its end, and its loss. Answers come back as blocks (`h2out.py`).

Kernels for the thread of one reactor.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import LAST, compiled_c, h2core, h2out, h2words
from tierstore.kernels.atomics import add_at, copy_bytes
from tierstore.kernels.h2request import give_credit
from tierstore.kernels.reactor_connections import end, has_room, hold, wait_for_turn
from tierstore.kernels.reactor_frames import KEPT_BYTES, bind_frames, flush, push_all, push_row, set_deadline
from tierstore.kernels.reactor_sockets import receive
from tierstore.kernels.reactor_streams import lose, on_event, report_data, shed
from tierstore.kernels.reactor_words import (
    ARRIVAL_NS,
    BUFFER_BYTES,
    DEADLINE_NS,
    ENDED,
    FINISH,
    FINISH_NS,
    FLAGS,
    FRAMES,
    HTTP2,
    IDLE_NS,
    IN_AT,
    IN_BYTES,
    IN_ROOM,
    INFLIGHT,
    LARGE_TURN,
    LOST,
    MAY_READ,
    MESSAGE,
    MODE,
    MOVED_NS,
    SERIAL,
    SESSION,
    STALL_NS,
    STATE,
    STREAM_BLOCK,
    STREAM_RESET,
    STREAM_SHIFT,
    STREAMS_AWAY,
    here_at,
    shared_at,
)
from tierstore.kernels.request_record import get, put
from tierstore.kernels.sysio import EAGAIN, EINTR, allocate, move_bytes, release

GATHERED_BYTES = 1 << 16  # frames that leave before more are written
HELD_FROM = 1 << 14  # bytes of a connection that count
_TURN_STREAMS = 64  # that are begun before others have their turn


@nb.njit
def _finish_turn(me, fd, s, now):  # type: ignore[no-untyped-def]
    """Let what was written leave, and set what a connection holds and how long it may wait. It may be closed afterwards."""
    row = me.conns[fd]
    if row[LOST] == 0 and flush(me, fd, s) and get(s, h2words.WAITING) > 0:
        push_all(me, fd, s)
        flush(me, fd, s)
    if row[LOST] != 0:
        end(me, fd, True)
        return
    has_left = get(s, h2words.OUT_KEPT) == 0
    if has_left and get(s, h2words.OPEN) == 0 and get(s, h2words.FLAGS) & h2words.GOING:
        end(me, fd, False)
        return
    held = get(s, h2words.HELD) + row[IN_BYTES] + (0 if has_left else get(s, h2words.OUT_BYTES))
    hold(me, fd, held if held > HELD_FROM else 0)
    if held > BUFFER_BYTES and not has_room(me, 0):
        shed(me, fd, s)
        flush(me, fd, s)
    if get(s, h2words.OUT_KEPT) == 0:
        row[DEADLINE_NS] = 0 if get(s, h2words.OPEN) > 0 else now + me.limits[IDLE_NS]


@nb.njit
def _read_frames(me, fd, now):  # type: ignore[no-untyped-def]
    """Read what has come, and do what it asks for. The connection may be closed afterwards."""
    row = me.conns[fd]
    s, base, have, came = row[SESSION], me.buffer, nb.int64(0), 0
    bind_frames(me, s)
    if not get(s, h2words.FLAGS) & h2words.GREETED:
        put(s, h2words.FLAGS, get(s, h2words.FLAGS) | h2words.GREETED)
        h2core.write_settings(s)
    if row[IN_AT] != 0:
        have = row[IN_BYTES]
        copy_bytes(base, row[IN_AT], have)
        release(row[IN_AT])
        row[IN_AT] = row[IN_BYTES] = 0
    started, gone, moved = get(s, h2words.STARTED), False, False
    while True:
        if get(s, h2words.OUT_KEPT) != 0:
            flush(me, fd, s)
        is_paused = get(s, h2words.OUT_KEPT) != 0 and get(s, h2words.OUT_BYTES) >= KEPT_BYTES
        if row[FLAGS] & MAY_READ and not is_paused and have < BUFFER_BYTES:
            got = receive(me, fd, base + have, BUFFER_BYTES - have)
            if got == -EINTR:
                continue
            if got < 0 and got != -EAGAIN:
                end(me, fd, False)
                return
            gone = gone or got == 0
            if got <= 0 or (got < BUFFER_BYTES - have and row[FLAGS] & ENDED == 0):
                row[FLAGS] &= ~MAY_READ
            have += max(got, 0)
            came += max(got, 0)
        at, waits = 0, False
        while row[LOST] == 0:
            if get(s, h2words.STARTED) - started >= _TURN_STREAMS:
                waits = True
                break
            used, event = h2core.step(s, base + at, have - at, me.headers, now)
            if used == 0:
                if h2out.room_of(s) >= h2words.CONTROL_ROOM or not flush(me, fd, s):
                    break
                continue
            at += used
            moved = True
            if event == h2words.FAILED:
                flush(me, fd, s)
                end(me, fd, False)
                return
            if event != h2words.NOTHING:
                on_event(me, fd, s, event, now)
            if get(s, h2words.OUT_BYTES) >= GATHERED_BYTES and get(s, h2words.OUT_KEPT) == 0:
                flush(me, fd, s)
        have -= at
        if at > 0 and have > 0:
            move_bytes(base, base + at, have)
        if row[LOST] != 0:
            end(me, fd, True)
            return
        if waits or (came >= LARGE_TURN and row[FLAGS] & MAY_READ):
            wait_for_turn(me, fd)
            break
        if row[FLAGS] & MAY_READ == 0 or have == BUFFER_BYTES or is_paused:
            break
    if gone:  # nothing is read of it any more
        flush(me, fd, s)
        end(me, fd, False)
        return
    is_cut = have > 0 or get(s, h2words.BLOCK_STREAM) != 0
    if not is_cut:
        put(s, h2words.CUT_NS, 0)
    elif get(s, h2words.CUT_NS) == 0 or (moved and get(s, h2words.BLOCK_STREAM) == 0):
        put(s, h2words.CUT_NS, now)
    if have > 0:
        kept = allocate(have)
        if kept == 0:
            end(me, fd, True)
            return
        copy_bytes(kept, base, have)
        row[IN_AT], row[IN_BYTES], row[IN_ROOM] = kept, have, have
    _finish_turn(me, fd, s, now)


@nb.njit
def _on_message(me, fd, at, now):  # type: ignore[no-untyped-def]
    """One of Python's messages for a stream, which may be there no more. The connection may be closed afterwards."""
    what, serial, value, size = get(at, 0), get(at, 1), get(at, 2), get(at, 3)
    kind, stream = what & 255, what >> STREAM_SHIFT
    conn = me.conns[fd]
    s = conn[SESSION] if conn[STATE] == HTTP2 and conn[SERIAL] == serial else 0
    row = 0 if s == 0 else h2out.row_of(s, stream)
    if row == 0 or not get(row, h2words.STATE) & h2words.AWAY:
        if kind == STREAM_BLOCK:
            release(value)
            add_at(shared_at(me, INFLIGHT), -size)
        return
    bind_frames(me, s)
    if kind == STREAM_BLOCK:
        add_at(shared_at(me, INFLIGHT), -size)  # it is the session's from here on
        is_first = get(row, h2words.FIRST_OUT) == 0
        h2out.queue(s, row, value)
        if is_first:
            set_deadline(me, row)
            push_row(me, fd, s, row)
    elif kind == STREAM_RESET:
        if h2out.room_of(s) >= h2words.CONTROL_ROOM:
            h2out.write_reset(s, stream, value)
        add_at(shared_at(me, STREAMS_AWAY), -1)
        h2out.close_row(s, row)
    else:
        if size != 0:
            put(row, h2words.STATE, get(row, h2words.STATE) & ~h2words.DELIVERING)
            report_data(me, fd, s, row)
        if value > 0 and h2out.room_of(s) >= h2words.CONTROL_ROOM and not get(row, h2words.STATE) & h2words.ENDED:
            give_credit(s, row, value)
    _finish_turn(me, fd, s, now)


@nb.njit
def _sweep(me, fd, now, stall):  # type: ignore[no-untyped-def]
    """Reset streams that are late, and end a connection that is late or idle, or has nothing to be answered at the end."""
    conn = me.conns[fd]
    s, row, limits = conn[SESSION], get(conn[SESSION], h2words.STREAMS_AT), me.limits
    is_kept = get(s, h2words.OUT_KEPT) != 0
    cut, finishing = get(s, h2words.CUT_NS), me.shared[MODE] >= FINISH
    if (is_kept and (now > conn[DEADLINE_NS] or now - conn[MOVED_NS] > stall)) or (
        cut != 0 and now - cut > limits[ARRIVAL_NS]
    ):
        end(me, fd, True)
        return
    bind_frames(me, s)
    for _ in range(get(s, h2words.STREAMS_ROOM)):
        if h2out.room_of(s) < h2words.CONTROL_ROOM:
            break
        if get(row, h2words.ID) != 0:
            until, state = get(row, h2words.DEADLINE_NS), get(row, h2words.STATE)
            arrives = state & (h2words.ENDED | h2words.AWAY) == 0
            if until != 0:
                is_late = now > until - limits[STALL_NS] + stall
            else:
                if arrives and finishing and get(row, h2words.SEEN) == 0:
                    put(row, h2words.SEEN, now + limits[FINISH_NS])  # until when it may arrive
                is_late = arrives and (
                    now - get(row, h2words.BEGAN_NS) > limits[ARRIVAL_NS]
                    or (finishing and now > get(row, h2words.SEEN))
                )
            if is_late:
                # what has not arrived was not begun: at the end it may be sent again, elsewhere
                why = h2words.REFUSED_STREAM if arrives and finishing else h2words.ENHANCE_YOUR_CALM
                h2out.write_reset(s, get(row, h2words.ID), why)
                lose(me, fd, s, row)
        row += 8 * h2words.STREAM_WORDS
    is_idle = get(s, h2words.OPEN) == 0 and not is_kept and conn[DEADLINE_NS] != 0 and now > conn[DEADLINE_NS]
    if (is_idle or finishing) and h2out.room_of(s) >= h2words.CONTROL_ROOM:
        h2core.go_away(s)
    until = conn[DEADLINE_NS]
    _finish_turn(me, fd, s, now)
    if conn[STATE] == HTTP2 and conn[SESSION] == s and get(s, h2words.OPEN) == 0 and until != 0:
        conn[DEADLINE_NS] = until  # nothing has come


@compiled_c(types.int64(*[types.int64] * 6), when=LAST)
def run(at: Any, what: Any, fd: Any, now: Any, more: Any, _: Any) -> Any:
    """Serve a connection of HTTP/2 of the reactor whose Here is at an address, which is compiled apart.

    FRAMES: read what has come; MESSAGE: take Python's at `more`; SWEEP: end what is late, `more`: how long nothing may leave.
    """
    me = here_at(at)
    if what == FRAMES:
        _read_frames(me, fd, now)
    elif what == MESSAGE:
        _on_message(me, fd, more, now)
    else:
        _sweep(me, fd, now, more)
    return 0
