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

from tierstore.kernels import LAST, compiled_c, h2core, h2out, h2words, httphead
from tierstore.kernels.atomics import acquire_i64, add_at, copy_bytes, fence_all, release_i64
from tierstore.kernels.raw import call_at, load_u8
from tierstore.kernels.reactor_connections import end, has_room, hold, notify, set_send_deadline, wait_for_turn
from tierstore.kernels.reactor_words import (
    ANNOUNCED,
    ANSWER_AT,
    ANSWER_BYTES,
    ANSWERED,
    ARRIVAL_NS,
    BUFFER_BYTES,
    DEADLINE_NS,
    DESCRIPTION,
    DRAIN,
    ENDED,
    FINISH,
    FLAGS,
    FRAMES,
    FRAMES_BYTES,
    GENERATION_AT,
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
    OTHER,
    REASONS_FROM,
    SERIAL,
    SESSION,
    SINCE_NS,
    SIZE,
    SLOWEST_RATE,
    STALL_NS,
    STATE,
    STREAM_BLOCK,
    STREAM_DATA,
    STREAM_LOST,
    STREAM_OPENED,
    STREAM_REQUEST,
    STREAM_RESET,
    STREAM_SENT,
    STREAM_SHIFT,
    STREAMS_AWAY,
    here_at,
    line_at,
    shared_at,
)
from tierstore.kernels.request_record import get, put
from tierstore.kernels.sysio import EAGAIN, EINTR, allocate, monotonic_ns, move_bytes, receive, release, send

GATHERED_BYTES = 1 << 16  # frames that leave before more are written
HELD_FROM = 1 << 14  # bytes of a connection that count
KEPT_BYTES = 1 << 16  # of frames that the socket does not take; from here on nothing more is read
_TURN_STREAMS = 64  # that are begun before others have their turn
MOST_AWAY = 2048  # streams of all connections that Python has: each has a few messages in its pipe at most


# --- the buffer of frames


@nb.njit
def _lend(me, s):  # type: ignore[no-untyped-def]
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
def _leave(me, fd, s):  # type: ignore[no-untyped-def]
    """Send the frames that were written. True where all have left; a connection that is lost is marked."""
    row = me.conns[fd]
    at, left, kept = get(s, h2words.OUT_AT), get(s, h2words.OUT_BYTES), get(s, h2words.OUT_KEPT)
    begin = left
    while left > 0:
        took = send(fd, at, left, 0)
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
            _lend(me, s)
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
def _push_row(me, fd, s, row):  # type: ignore[no-untyped-def]
    """`h2out.push`, and Python hears what it waits to hear."""
    stream = get(row, h2words.ID)
    is_away = get(row, h2words.STATE) & h2words.AWAY != 0
    tells, moved = h2out.push(s, row)
    if tells > 0:
        notify(me, STREAM_SENT, fd | stream << 24, me.conns[fd, SERIAL], tells, 0)
    if get(row, h2words.ID) == 0:
        if is_away:
            add_at(shared_at(me, STREAMS_AWAY), -1)
    elif moved:
        _set_deadline(me, row)


@nb.njit
def _set_deadline(me, row):  # type: ignore[no-untyped-def]
    """Until when the first block of a stream must have left."""
    block = get(row, h2words.FIRST_OUT)
    if block == 0:
        put(row, h2words.DEADLINE_NS, 0)
        return
    slowest = get(block, h2words.SIZE) * 1_000_000_000 // me.limits[SLOWEST_RATE]
    put(row, h2words.DEADLINE_NS, monotonic_ns() + me.limits[STALL_NS] + slowest)


@nb.njit
def _push_all(me, fd, s):  # type: ignore[no-untyped-def]
    """Write what waits on all streams, each in its turn, as far as windows, room and socket go."""
    rows, room = get(s, h2words.STREAMS_AT), get(s, h2words.STREAMS_ROOM)
    while get(s, h2words.WAITING) > 0:
        written = get(s, h2words.OUT_BYTES)
        for k in range(room):
            which = (get(s, h2words.NEXT) + k) % room
            row = rows + 8 * h2words.STREAM_WORDS * which
            if get(row, h2words.ID) != 0 and get(row, h2words.FIRST_OUT) != 0:
                _push_row(me, fd, s, row)
                if h2out.room_of(s) < h2words.FRAME_BYTES:
                    put(s, h2words.NEXT, (which + 1) % room)
                    break
        if get(s, h2words.OUT_BYTES) == written or not _leave(me, fd, s):
            return


# --- to Python


@nb.njit
def _is_full(me):  # type: ignore[no-untyped-def]
    return acquire_i64(shared_at(me, STREAMS_AWAY)) >= MOST_AWAY


@nb.njit
def _refuse(me, s, row):  # type: ignore[no-untyped-def]
    """A request that was not begun, and may be sent again."""
    h2out.write_reset(s, get(row, h2words.ID), h2words.REFUSED_STREAM)
    h2out.close_row(s, row)


@nb.njit
def _give(me, fd, s, row, kind, reason):  # type: ignore[no-untyped-def]
    """Give a stream's head, and the body behind it, to Python, which frees them."""
    me.lines[me.number, REASONS_FROM + reason] += 1
    at, size, head = get(row, h2words.AT), get(row, h2words.BYTES), get(row, h2words.HEAD_BYTES)
    fd_stream = fd | get(row, h2words.ID) << 24
    if _is_full(me) or not notify(me, kind, fd_stream, me.conns[fd, SERIAL] | reason << 32, at, head | size << 20):
        _refuse(me, s, row)
        return
    add_at(shared_at(me, STREAMS_AWAY), 1)
    h2out.hold(s, -size)
    put(row, h2words.AT, 0)
    put(row, h2words.BYTES, 0)
    put(row, h2words.HEAD_BYTES, 0)
    put(row, h2words.ROOM, 0)
    put(row, h2words.DEADLINE_NS, 0)
    put(row, h2words.STATE, get(row, h2words.STATE) | h2words.AWAY)


@nb.njit
def _tell_came(me, fd, s, row):  # type: ignore[no-untyped-def]
    """Give Python what has come of a stream, and its end, unless it has not taken what came before."""
    state = get(row, h2words.STATE)
    ended = 1 if state & h2words.ENDED else 0
    if state & h2words.TOLD or (get(row, h2words.BYTES) == 0 and (not ended or state & h2words.END_TOLD)):
        return
    at, size = get(row, h2words.AT), get(row, h2words.BYTES)
    fd_stream = fd | get(row, h2words.ID) << 24
    if not notify(me, STREAM_DATA, fd_stream, me.conns[fd, SERIAL] | ended << 32, at, size):
        return  # with what comes next, or when Python has taken something
    h2out.hold(s, -size)
    put(row, h2words.AT, 0)
    put(row, h2words.BYTES, 0)
    put(row, h2words.ROOM, 0)
    put(row, h2words.STATE, state | h2words.TOLD | (h2words.END_TOLD if ended else 0))


@nb.njit
def _lose(me, fd, s, row):  # type: ignore[no-untyped-def]
    """A stream was reset, by its client or for its error."""
    if get(row, h2words.STATE) & h2words.AWAY:
        add_at(shared_at(me, STREAMS_AWAY), -1)
        if not notify(me, STREAM_LOST, fd | get(row, h2words.ID) << 24, me.conns[fd, SERIAL], 0, 0):
            me.conns[fd, LOST] = 1
    h2out.close_row(s, row)


# --- events


@nb.njit
def _call(me, fd, row, body, size, now):  # type: ignore[no-untyped-def]
    """Answer the call whose body is `size` bytes: ANSWERED, and `call` says where its message is; or why it is for Python."""
    if size < h2out.PREFIX or load_u8(body, 0) != 0 or h2core.read_u32(body + 1) != size - h2out.PREFIX:
        return DESCRIPTION
    found, began = me.found, monotonic_ns()
    for there, here in (
        (httphead.HOST_AT, h2words.HOST_AT), (httphead.HOST_BYTES, h2words.HOST_BYTES),
        (httphead.AUTHORIZATION_AT, h2words.AUTHORIZATION_AT), (httphead.AUTHORIZATION_BYTES, h2words.AUTHORIZATION_BYTES),
        (httphead.TIMEOUT_MS, h2words.TIMEOUT_MS), (httphead.UNUSUAL, h2words.UNUSUAL), (httphead.PATH_AT, h2words.PATH_AT),
        (httphead.PATH_BYTES, h2words.PATH_BYTES),
    ):  # fmt: skip
        found[there] = get(row, here)
    found[httphead.HEAD_BYTES] = found[httphead.CLOSING] = 0
    found[httphead.BODY_BYTES], found[httphead.JSON_BYTES] = size - h2out.PREFIX, httphead.NONE
    found[httphead.KIND] = httphead.INFER
    since = get(row, h2words.BEGAN_NS)
    me.call[SINCE_NS] = since if since < now else 0  # 0: it came with what came last
    line = line_at(me, me.number, ANNOUNCED)
    release_i64(line, acquire_i64(me.shared[GENERATION_AT]))
    fence_all()
    came = call_at(me.run_call, me.at, fd, get(row, h2words.AT), body + h2out.PREFIX, size - h2out.PREFIX, began)
    release_i64(line, 0)
    return came


@nb.njit
def _on_request(me, fd, s, row, body, size, now):  # type: ignore[no-untyped-def]
    """Answer a whole request, or give it to Python."""
    if get(row, h2words.STATE) & h2words.TOO_LARGE:
        _give(me, fd, s, row, STREAM_REQUEST, SIZE)
        return
    reason = OTHER
    if get(row, h2words.KIND) == h2words.CALL:
        reason = _call(me, fd, row, body, size, now)
        if reason == ANSWERED:
            request_id = get(row, h2words.AT) + get(row, h2words.REQUEST_ID_AT)
            if not h2out.answer_call(
                s, row, me.call[ANSWER_AT], me.call[ANSWER_BYTES], request_id, get(row, h2words.REQUEST_ID_BYTES)
            ):
                h2out.write_reset(s, get(row, h2words.ID), h2words.ENHANCE_YOUR_CALM)
                h2out.close_row(s, row)
            elif get(row, h2words.FIRST_OUT) != 0:
                h2out.drop_request(s, row)
                _set_deadline(me, row)
                _push_row(me, fd, s, row)
            return
    if get(row, h2words.BYTES) == get(row, h2words.HEAD_BYTES) and not h2core.keep_body(s, row, body, size, -1):
        _refuse(me, s, row)
        return
    _give(me, fd, s, row, STREAM_REQUEST, reason)


@nb.njit
def _on_event(me, fd, s, event, now):  # type: ignore[no-untyped-def]
    """Do what a step asks for."""
    row, at, size = get(s, h2words.EVENT_ROW), get(s, h2words.EVENT_AT), get(s, h2words.EVENT_BYTES)
    if event == h2words.REQUEST:
        _on_request(me, fd, s, row, at, size, now)
    elif event == h2words.RESET:
        _lose(me, fd, s, row)
    elif event == h2words.SENDABLE:
        if row == 0:
            _push_all(me, fd, s)
        else:
            _push_row(me, fd, s, row)
    elif event == h2words.OPENED:
        stream = get(row, h2words.ID)
        _give(me, fd, s, row, STREAM_OPENED, OTHER)
        if get(row, h2words.ID) == stream:
            _tell_came(me, fd, s, row)
    elif event == h2words.CAME:
        if not h2core.keep_body(s, row, at, size, -1):
            h2out.write_reset(s, get(row, h2words.ID), h2words.ENHANCE_YOUR_CALM)
            _lose(me, fd, s, row)
        else:
            _tell_came(me, fd, s, row)
    if me.shared[MODE] >= DRAIN and event in (h2words.REQUEST, h2words.OPENED):
        h2core.go_away(s)


@nb.njit
def _shed(me, fd, s):  # type: ignore[no-untyped-def]
    """Reset streams whose requests are arriving, or wait for Python: there is no room for them."""
    row = get(s, h2words.STREAMS_AT)
    for _ in range(get(s, h2words.STREAMS_ROOM)):
        state = get(row, h2words.STATE)
        arrives = state & (h2words.ENDED | h2words.AWAY) == 0 or (
            state & h2words.AWAY != 0 and get(row, h2words.BYTES) > 0
        )
        if get(row, h2words.ID) != 0 and arrives:
            if h2out.room_of(s) < h2words.CONTROL_ROOM:
                return
            h2out.write_reset(s, get(row, h2words.ID), h2words.ENHANCE_YOUR_CALM)
            _lose(me, fd, s, row)
        row += 8 * h2words.STREAM_WORDS


# --- connections


@nb.njit
def _settle(me, fd, s, now):  # type: ignore[no-untyped-def]
    """Let what was written leave, and set what a connection holds and how long it may wait. It may be closed afterwards."""
    row = me.conns[fd]
    if row[LOST] == 0 and _leave(me, fd, s) and get(s, h2words.WAITING) > 0:
        _push_all(me, fd, s)
        _leave(me, fd, s)
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
        _shed(me, fd, s)
        _leave(me, fd, s)
    if get(s, h2words.OUT_KEPT) == 0:
        row[DEADLINE_NS] = 0 if get(s, h2words.OPEN) > 0 else now + me.limits[IDLE_NS]


@nb.njit
def _read_frames(me, fd, now):  # type: ignore[no-untyped-def]
    """Read what has come, and do what it asks for. The connection may be closed afterwards."""
    row = me.conns[fd]
    s, base, have, came = row[SESSION], me.buffer, nb.int64(0), 0
    _lend(me, s)
    if not get(s, h2words.FLAGS) & h2words.GREETED:
        put(s, h2words.FLAGS, get(s, h2words.FLAGS) | h2words.GREETED)
        h2core.write_settings(s)
    if row[IN_AT] != 0:
        have = row[IN_BYTES]
        copy_bytes(base, row[IN_AT], have)
        release(row[IN_AT])
        row[IN_AT] = row[IN_BYTES] = 0
    begun, gone, any_taken = get(s, h2words.BEGUN), False, False
    while True:
        if get(s, h2words.OUT_KEPT) != 0:
            _leave(me, fd, s)
        is_paused = get(s, h2words.OUT_KEPT) != 0 and get(s, h2words.OUT_BYTES) >= KEPT_BYTES
        if row[FLAGS] & MAY_READ and not is_paused and have < BUFFER_BYTES:
            got = receive(fd, base + have, BUFFER_BYTES - have)
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
            if get(s, h2words.BEGUN) - begun >= _TURN_STREAMS:
                waits = True
                break
            used, event = h2core.step(s, base + at, have - at, me.headers, now)
            if used == 0:
                if h2out.room_of(s) >= h2words.CONTROL_ROOM or not _leave(me, fd, s):
                    break
                continue
            at += used
            any_taken = True
            if event == h2words.FAILED:
                _leave(me, fd, s)
                end(me, fd, False)
                return
            if event != h2words.NOTHING:
                _on_event(me, fd, s, event, now)
            if get(s, h2words.OUT_BYTES) >= GATHERED_BYTES and get(s, h2words.OUT_KEPT) == 0:
                _leave(me, fd, s)
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
        _leave(me, fd, s)
        end(me, fd, False)
        return
    is_cut = have > 0 or get(s, h2words.BLOCK_STREAM) != 0
    if not is_cut:
        put(s, h2words.CUT_NS, 0)
    elif get(s, h2words.CUT_NS) == 0 or (any_taken and get(s, h2words.BLOCK_STREAM) == 0):
        put(s, h2words.CUT_NS, now)
    if have > 0:
        kept = allocate(have)
        if kept == 0:
            end(me, fd, True)
            return
        copy_bytes(kept, base, have)
        row[IN_AT], row[IN_BYTES], row[IN_ROOM] = kept, have, have
    _settle(me, fd, s, now)


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
    _lend(me, s)
    if kind == STREAM_BLOCK:
        add_at(shared_at(me, INFLIGHT), -size)  # it is the session's from here on
        is_first = get(row, h2words.FIRST_OUT) == 0
        h2out.queue(s, row, value)
        if is_first:
            _set_deadline(me, row)
            _push_row(me, fd, s, row)
    elif kind == STREAM_RESET:
        if h2out.room_of(s) >= h2words.CONTROL_ROOM:
            h2out.write_reset(s, stream, value)
        add_at(shared_at(me, STREAMS_AWAY), -1)
        h2out.close_row(s, row)
    else:
        if size != 0:
            put(row, h2words.STATE, get(row, h2words.STATE) & ~h2words.TOLD)
            _tell_came(me, fd, s, row)
        if value > 0 and h2out.room_of(s) >= h2words.CONTROL_ROOM and not get(row, h2words.STATE) & h2words.ENDED:
            h2core.give_credit(s, row, value)
    _settle(me, fd, s, now)


@nb.njit
def _sweep(me, fd, now, stall):  # type: ignore[no-untyped-def]
    """Reset streams that are late, and end a connection that is late or idle, or has nothing to be answered at the end."""
    conn = me.conns[fd]
    s, row, limits = conn[SESSION], get(conn[SESSION], h2words.STREAMS_AT), me.limits
    is_kept = get(s, h2words.OUT_KEPT) != 0
    cut = get(s, h2words.CUT_NS)
    if (is_kept and (now > conn[DEADLINE_NS] or now - conn[MOVED_NS] > stall)) or (
        cut != 0 and now - cut > limits[ARRIVAL_NS]
    ):
        end(me, fd, True)
        return
    _lend(me, s)
    for _ in range(get(s, h2words.STREAMS_ROOM)):
        if h2out.room_of(s) < h2words.CONTROL_ROOM:
            break
        if get(row, h2words.ID) != 0:
            until, state = get(row, h2words.DEADLINE_NS), get(row, h2words.STATE)
            if until != 0:
                is_late = now > until - limits[STALL_NS] + stall
            else:
                is_late = (
                    state & (h2words.ENDED | h2words.AWAY) == 0
                    and now - get(row, h2words.BEGAN_NS) > limits[ARRIVAL_NS]
                )
            if is_late:
                h2out.write_reset(s, get(row, h2words.ID), h2words.ENHANCE_YOUR_CALM)
                _lose(me, fd, s, row)
        row += 8 * h2words.STREAM_WORDS
    is_idle = get(s, h2words.OPEN) == 0 and not is_kept and conn[DEADLINE_NS] != 0 and now > conn[DEADLINE_NS]
    if (is_idle or me.shared[MODE] >= FINISH) and h2out.room_of(s) >= h2words.CONTROL_ROOM:
        h2core.go_away(s)
    until = conn[DEADLINE_NS]
    _settle(me, fd, s, now)
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
