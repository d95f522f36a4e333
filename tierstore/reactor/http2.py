"""HTTP/2 connections of a reactor: between sockets and `wire/http2/core.py`, and between streams and Python. See `loop.py`.

A connection speaks HTTP/2 from its preface to its end. Frames are gathered in the reactor's memory and sent with one system call where possible. The
session keeps what the socket does not take; while it keeps much, the reactor reads nothing more from the connection. So a client that does not read,
or that holds its windows back, costs no more than the bounds allow.

The reactor answers a whole ModelInfer call where a plan allows it. Python gets any other request as a block that Python frees: head and body; for a
streaming method then one block of data at a time, its end, and its loss. Answers come back as blocks (`wire/http2/out.py`).

Kernels for the thread of one reactor.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import LAST, compiled_c
from tierstore.kernels.atomics import add_at, copy_bytes
from tierstore.kernels.records import place
from tierstore.kernels.sysio import EAGAIN, EINTR, allocate, move_bytes, release
from tierstore.lookup.cold_reads import job_at
from tierstore.reactor.connections import (
    end,
    end_after_answer,
    has_room,
    hold,
    wait_for_turn,
)
from tierstore.reactor.frames import KEPT_BYTES, bind_frames, flush, push_all, push_row, set_deadline
from tierstore.reactor.layout import (
    BUFFER_BYTES,
    ENDED,
    FINISH,
    FRAMES,
    HTTP2,
    JOB_ENDED,
    LARGE_TURN,
    MAY_READ,
    MESSAGE,
    STREAM_BLOCK,
    STREAM_RESET,
    STREAM_SHIFT,
    connection_at,
    message_at,
    reactor_at,
)
from tierstore.reactor.sockets import receive
from tierstore.reactor.streams import lose, on_event, on_job, report_data, shed
from tierstore.wire.http2 import core as http2_core
from tierstore.wire.http2 import layout as http2_layout
from tierstore.wire.http2 import out as http2_out
from tierstore.wire.http2.request import give_credit

GATHERED_BYTES = 1 << 16  # of frames, sent before more are written
HELD_FROM = 1 << 14  # a connection that holds fewer bytes is not counted
_TURN_STREAMS = 64  # streams begun before other connections have their turn


@nb.njit
def _finish_turn(me, fd, s, now):
    """Send what was written; note what a connection holds and its deadline. The connection may be closed afterwards."""
    row = connection_at(me.conns, fd)
    if row.lost == 0 and flush(me, fd, s) and s.waiting > 0:
        push_all(me, fd, s)
        flush(me, fd, s)
    if row.lost != 0:
        end(me, fd, True)
        return
    has_left = s.out_kept == 0
    if has_left and s.open == 0 and s.flags & http2_layout.GOING:
        end_after_answer(me, fd, now)
        return
    held = s.held + row.in_bytes + (0 if has_left else s.out_bytes)
    hold(me, fd, held if held > HELD_FROM else 0)
    if held > BUFFER_BYTES and not has_room(me, 0):
        shed(me, fd, s)
        flush(me, fd, s)
    if s.out_kept == 0:
        row.deadline_ns = 0 if s.open > 0 else now + me.limits.idle_ns


@nb.njit
def _read_frames(me, fd, now):
    """Read what has come and act on it. The connection may be closed afterwards."""
    row = connection_at(me.conns, fd)
    s, base, have, came = row.session, me.buffer, nb.int64(0), 0
    bind_frames(me, fd, s)
    if not s.flags & http2_layout.GREETED:
        s.flags |= http2_layout.GREETED
        http2_core.write_settings(s)
    if row.in_at != 0:
        have = row.in_bytes
        copy_bytes(base, row.in_at, have)
        release(row.in_at)
        row.in_at = row.in_bytes = 0
    started, gone, moved = s.started, False, False
    while True:
        if s.out_kept != 0:
            flush(me, fd, s)
        is_paused = s.out_kept != 0 and s.out_bytes >= KEPT_BYTES
        if row.flags & MAY_READ and not is_paused and have < BUFFER_BYTES:
            got = receive(me, fd, base + have, BUFFER_BYTES - have)
            if got == -EINTR:
                continue
            if got < 0 and got != -EAGAIN:
                end(me, fd, False)
                return
            gone = gone or got == 0
            if got <= 0 or (got < BUFFER_BYTES - have and row.flags & ENDED == 0):
                row.flags &= ~MAY_READ
            have += max(got, 0)
            came += max(got, 0)
        at, waits = 0, False
        while row.lost == 0:
            if s.started - started >= _TURN_STREAMS:
                waits = True
                break
            used, event = http2_core.step(s, base + at, have - at, me.headers, now)
            if used == 0:
                if http2_out.room_of(s) >= http2_layout.CONTROL_ROOM or not flush(me, fd, s):
                    break
                continue
            at += used
            moved = True
            if event == http2_layout.FAILED:
                flush(me, fd, s)
                end_after_answer(me, fd, now)
                return
            if event != http2_layout.NOTHING:
                on_event(me, fd, s, event, now)
            if s.out_bytes >= GATHERED_BYTES and s.out_kept == 0:
                flush(me, fd, s)
        have -= at
        if at > 0 and have > 0:
            move_bytes(base, base + at, have)
        if row.lost != 0:
            end(me, fd, True)
            return
        if waits or (came >= LARGE_TURN and row.flags & MAY_READ):
            wait_for_turn(me, fd)
            break
        if row.flags & MAY_READ == 0 or have == BUFFER_BYTES or is_paused:
            break
    if gone:  # nothing more is read from it
        flush(me, fd, s)
        end(me, fd, False)
        return
    is_cut = have > 0 or s.block_stream != 0
    if not is_cut:
        s.cut_ns = 0
    elif s.cut_ns == 0 or (moved and s.block_stream == 0):
        s.cut_ns = now
    if have > 0:
        kept = allocate(have)
        if kept == 0:
            end(me, fd, True)
            return
        copy_bytes(kept, base, have)
        row.in_at, row.in_bytes, row.in_room = kept, have, have
    _finish_turn(me, fd, s, now)


@nb.njit
def _on_message(me, fd, message, now):
    """Do what a message of Python asks for a stream, which may have closed. The connection may be closed afterwards."""
    what, serial, value, size = message.what, message.serial, message.value, message.more
    kind, stream = what & 255, what >> STREAM_SHIFT
    conn = connection_at(me.conns, fd)
    s = conn.session if conn.state == HTTP2 and conn.serial == serial else 0
    row = http2_layout.stream_at(0) if s == 0 else http2_out.row_of(s, stream)
    states = http2_layout.AWAY
    if kind == STREAM_BLOCK:  # when the service ends, Python answers requests of jobs too
        states |= http2_layout.HAS_JOB
    if row == 0 or not row.state & states:
        if kind == STREAM_BLOCK:
            release(value)
            add_at(place(me.shared, "inflight"), -size)
        return
    bind_frames(me, fd, s)
    if kind == STREAM_BLOCK:
        add_at(place(me.shared, "inflight"), -size)  # from here on the session counts it
        is_first = row.first_out == 0
        http2_out.queue(s, row, value)
        if is_first:
            set_deadline(me, row)
            push_row(me, fd, s, row)
    elif kind == STREAM_RESET:
        if http2_out.room_of(s) >= http2_layout.CONTROL_ROOM:
            http2_out.write_reset(s, stream, value)
        add_at(place(me.shared, "streams_away"), -1)
        http2_out.close_row(s, row)
    else:
        if size != 0:
            row.state &= ~http2_layout.DELIVERING
            report_data(me, fd, s, row)
        if value > 0 and http2_out.room_of(s) >= http2_layout.CONTROL_ROOM and not row.state & http2_layout.ENDED:
            give_credit(s, row, value)
    _finish_turn(me, fd, s, now)


@nb.njit
def _on_job(me, fd, number, now):
    """Take back a finished job; its stream may have closed. The connection may be closed afterwards."""
    job, conn = job_at(me.jobs, number), connection_at(me.conns, fd)
    s = conn.session if conn.state == HTTP2 and conn.serial == job.serial else 0
    row = http2_layout.stream_at(0) if s == 0 else http2_out.row_of(s, job.stream)
    if row == 0:
        on_job(me, fd, s, row, number)
        return
    bind_frames(me, fd, s)
    on_job(me, fd, s, row, number)
    _finish_turn(me, fd, s, now)


@nb.njit
def _sweep(me, fd, now, stall):
    """Reset late streams. End a connection that is late or idle, or that has no request when the service ends."""
    conn = connection_at(me.conns, fd)
    s, row, limits = conn.session, conn.session.streams, me.limits
    is_kept = s.out_kept != 0
    cut, finishing = s.cut_ns, me.shared.mode >= FINISH
    if finishing and is_kept and conn.deadline_ns > now + limits.finish_ns:
        conn.deadline_ns = now + limits.finish_ns
    if (is_kept and (now > conn.deadline_ns or now - conn.moved_ns > stall)) or (
        cut != 0 and now - cut > limits.arrival_ns
    ):
        end(me, fd, True)
        return
    bind_frames(me, fd, s)
    for _ in range(s.streams_room):
        if http2_out.room_of(s) < http2_layout.CONTROL_ROOM:
            break
        if row.id != 0:
            until, state = row.deadline_ns, row.state
            arrives = state & (http2_layout.ENDED | http2_layout.AWAY) == 0
            if until != 0:
                if not finishing:
                    until -= limits.stall_ns - stall
                elif until > now + limits.finish_ns:
                    row.deadline_ns = until = now + limits.finish_ns
                is_late = now > until
            else:
                if arrives and finishing and row.seen == 0:
                    row.seen = now + limits.finish_ns  # the time by which it must have arrived
                is_late = arrives and (now - row.began_ns > limits.arrival_ns or (finishing and now > row.seen))
            if is_late:
                # a request that has not arrived was not begun: its client may send it again, elsewhere
                why = http2_layout.REFUSED_STREAM if arrives and finishing else http2_layout.ENHANCE_YOUR_CALM
                http2_out.write_reset(s, row.id, why)
                lose(me, fd, s, row)
        row = http2_layout.stream_at(row, 1)
    is_idle = s.open == 0 and not is_kept and conn.deadline_ns != 0 and now > conn.deadline_ns
    if (is_idle or finishing) and http2_out.room_of(s) >= http2_layout.CONTROL_ROOM:
        http2_core.go_away(s)
    until = conn.deadline_ns
    _finish_turn(me, fd, s, now)
    if conn.state == HTTP2 and conn.session == s and s.open == 0 and until != 0:
        conn.deadline_ns = until  # nothing has come


@compiled_c(types.int64(*[types.int64] * 6), when=LAST)
def run(at: Any, what: Any, fd: Any, now: Any, more: Any, _: Any) -> Any:
    """Serve an HTTP/2 connection of the reactor whose record is at address `at`; compiled separately.

    FRAMES: read what has come; MESSAGE: act on Python's message at `more`; JOB_ENDED: take the job `more` back; SWEEP: end what is late, where `more`
    is how long an answer may not move.
    """
    me = reactor_at(at)
    if what == FRAMES:
        _read_frames(me, fd, now)
    elif what == MESSAGE:
        _on_message(me, fd, message_at(more), now)
    elif what == JOB_ENDED:
        _on_job(me, fd, more, now)
    else:
        _sweep(me, fd, now, more)
    return 0
