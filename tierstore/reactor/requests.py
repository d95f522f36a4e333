"""Reads requests from a connection of a reactor, and goes on with answers that were not sent at once. See `loop.py`.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import acquire_i64, copy_bytes, fence_all, release_i64
from tierstore.kernels.raw import call_at, load_u8
from tierstore.kernels.records import place
from tierstore.kernels.sysio import (
    EAGAIN,
    EINTR,
    allocate,
    monotonic_ns,
    move_bytes,
    release,
)
from tierstore.reactor.answers import answer, answer_rows
from tierstore.reactor.connections import (
    end,
    end_after_answer,
    go_on,
    has_room,
    hold,
    let_go_of_answer,
    notify,
    send_first,
    send_on,
    wait_for_turn,
)
from tierstore.reactor.jobs import drop_job, submit
from tierstore.reactor.layout import (
    ANSWERED,
    AWAY,
    BUFFER_BYTES,
    BUSY,
    CLOSES,
    ENDED,
    FINISH,
    FRAMES,
    HEADER,
    HTTP2,
    LARGE_TURN,
    MAY_READ,
    MOST_DROPPED,
    OTHER,
    PIPELINED,
    READING,
    REQUEST,
    SENDING,
    SIZE,
    TURNED_OFF,
    connection_at,
)
from tierstore.reactor.sockets import receive
from tierstore.wire.http1 import frame as http1_frame
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http2 import core as http2_core
from tierstore.wire.http2.layout import PREFACE, SESSION_BYTES

_CR, _LF = b"\r\n"
_HEAD_TOO_LARGE, _NO_HTTP = (
    np.frombuffer(
        b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n%b"
        % (len(text), text),
        np.uint8,
    )
    for text in (b"Request head too large.", b"Invalid HTTP request received.")
)


@nb.njit
def _preface(at, size):
    """How many of the `size` bytes at `at` match the beginning of the HTTP/2 preface; 0 where they are something else."""
    size = min(size, PREFACE.size)
    for i in range(size):
        if load_u8(at, i) != PREFACE[i]:
            return 0
    return size


@nb.njit
def _begin_http2(me, fd):
    """Begin an HTTP/2 session on a connection that sent the preface. False: no memory."""
    s = allocate(SESSION_BYTES)
    if s == 0:
        return False
    row = connection_at(me.conns, fd)
    http2_core.begin_session(s, me.limits.most_message, me.shared.streaming_paths)
    row.session, row.state, row.needed, row.deadline_ns = s, HTTP2, 0, 0
    return True


@nb.njit
def _refuse(me, fd, text, size):
    """Answer bytes that are not HTTP with an error, and end the connection with it. Returns `size`: all bytes are consumed."""
    connection_at(me.conns, fd).flags |= CLOSES
    send_first(me, fd, nb.int64(text.ctypes.data), text.size)
    return size


@nb.njit
def _give(me, fd, whole, reason, closing):
    """Leave a request of `whole` bytes to Python."""
    row = connection_at(me.conns, fd)
    me.line.reasons[reason] += 1
    row.state, row.needed, row.reason = AWAY, whole, reason
    if closing:
        row.flags |= CLOSES
    return 0


@nb.njit
def _give_head(me, fd, size, whole, reason):
    """Have Python refuse the request of `whole` bytes, of which `size` have come, and drop the bytes that follow.

    With CHUNKED for `whole` its length is unknown, so the connection ends with the answer.
    """
    row, here, chunked = connection_at(me.conns, fd), size, whole == http1_frame.CHUNKED
    if not chunked:
        here = min(size, whole)
    row.to_drop, row.chunks_head = (MOST_DROPPED if chunked else whole - here), 0
    return _give(me, fd, here, reason, me.found.closing != 0 or chunked)


@nb.njit
def _reason(at, size):
    """The reason why a request whose head has an unknown form goes to Python."""
    return HEADER if http1_head.is_ours(at, size) else OTHER


@nb.njit
def _most(me, at, size):
    return me.limits.most_body if http1_head.is_ours(at, size) else me.limits.most_upload


@nb.njit
def _frame(me, fd, at, size):
    """`_request` for a request that Python gets as soon as it is whole."""
    row, found = connection_at(me.conns, fd), me.found
    form = http1_frame.frame_at(at, size, found)
    if (form == http1_head.CUT and size > http1_frame.MOST_HEAD_BYTES) or (
        form == http1_frame.GOOD and found.head_bytes > http1_frame.MOST_HEAD_BYTES
    ):
        return _refuse(me, fd, _HEAD_TOO_LARGE, size)
    if form == http1_head.CUT:
        return 0
    if form == http1_frame.BAD:
        return _refuse(me, fd, _NO_HTTP, size)
    head, body = found.head_bytes, found.body_bytes
    if body > _most(me, at, size):
        return _give_head(me, fd, size, head + body, SIZE)
    if found.expects != 0 and size == head and body != 0:
        go_on(me, fd)
    if body == http1_frame.CHUNKED:
        row.chunks_head, row.chunks_at, row.chunk_left, row.beside = head, head, http1_frame.SIZE_LINE, 0
        return _read_chunks(me, fd, at, size)
    if size < head + body:
        row.needed = head + body
        return 0
    return _give(me, fd, head + body, _reason(at, size), found.closing != 0)


@nb.njit
def _read_chunks(me, fd, at, size):
    """`_request` for a request whose body comes in chunks."""
    row, found = connection_at(me.conns, fd), me.found
    came, left = http1_frame.decode(row, at, size, _most(me, at, size))
    found.size = left
    if came == http1_frame.MORE:
        row.needed = left + max(row.chunk_left, 0) + 1
        return 0
    if came == http1_frame.MALFORMED:
        return _refuse(me, fd, _NO_HTTP, left)
    head, whole = row.chunks_head, row.chunks_at
    row.chunks_head = 0
    http1_frame.frame_at(at, head, found)  # once more, as `found` was used for other requests meanwhile
    if came == http1_frame.LARGE:
        return _give_head(me, fd, left, http1_frame.CHUNKED, SIZE)
    return _give(me, fd, whole, _reason(at, head), found.closing != 0)


@nb.njit
def _ends_head(at, begin, size):
    """Whether an empty line, which ends a head, ends in the bytes from `begin` on, of `size` at `at`."""
    for i in range(max(begin, 2), size):
        if load_u8(at, i) == _LF and load_u8(at, i - 1) == _CR and load_u8(at, i - 2) == _LF:
            return True
    return False


@nb.njit
def _request(me, fd, at, size):
    """Handle the request that begins the `size` bytes at `at`. Returns how many bytes are consumed; 0: more must come first.

    The connection's state tells the result: AWAY, Python or a reader has the request; HTTP2, it was a preface (which is no HTTP until HTTP/2 is
    compiled); otherwise it was answered, or is not complete. `found.size` is how many of the bytes remain after chunk lines were removed.
    """
    row, found, limits = connection_at(me.conns, fd), me.found, me.limits
    found.size = size
    if row.chunks_head > 0:
        return _read_chunks(me, fd, at, size)
    if load_u8(at, 0) == _CR or load_u8(at, 0) == _LF:  # an empty line before a request (RFC 9112, 2.2)
        return 1
    began = monotonic_ns()
    preface = _preface(at, size) if me.http2 != 0 and row.flags & TURNED_OFF == 0 else 0
    if preface > 0:
        if preface == PREFACE.size and not _begin_http2(me, fd):
            row.lost = 1
        return PREFACE.size if preface == PREFACE.size else 0
    form = http1_head.parse_at(at, size, found)
    if form == http1_head.CUT and size < http1_head.MOST_HEAD_BYTES:
        return 0
    if (
        form != http1_head.PLAIN
        or found.head_bytes > http1_head.MOST_HEAD_BYTES
        or found.body_bytes > limits.most_body
        or row.flags & TURNED_OFF != 0
    ):
        return _frame(me, fd, at, size)
    whole = found.head_bytes + found.body_bytes
    if size < whole:
        row.needed = whole
        return 0
    row.needed = 0
    line = place(me.line, "announced")
    release_i64(line, acquire_i64(me.shared.generation_at))
    fence_all()
    if found.kind == http1_head.ROWS:
        came = answer_rows(me, fd, at, whole, size == whole, began)
    else:
        came = answer(me, fd, at, whole, size == whole, began)
    release_i64(line, 0)
    if came != ANSWERED:
        row.state, row.needed = AWAY, whole
        if came >= 0:
            me.line.reasons[came] += 1
            row.reason = came
            if found.closing != 0:
                row.flags |= CLOSES
        return 0
    row.began_ns = 0
    return whole


@nb.njit
def _keep(me, fd, base, at, left):
    """Keep `left` bytes from `base + at` on, with room for the request that they begin. False: no memory."""
    row = connection_at(me.conns, fd)
    if left == 0:
        release(row.in_at)
        row.in_at = row.in_bytes = 0
        hold(me, fd, 0)
        return True
    room = max(row.needed, left, 4096 if row.needed == 0 else 0)
    if row.needed == 0 and left * 2 > room:
        room = min(2 * room, max(left, http1_frame.MOST_HEAD_BYTES + 1))
    elif row.chunks_head > 0:
        room = max(room, 2 * left)
    if base == row.in_at and row.in_room >= room:
        if at > 0:
            move_bytes(base, base + at, left)
    else:
        kept = allocate(room + 64)
        if kept == 0:
            return False
        copy_bytes(kept, base + at, left)
        release(row.in_at)
        row.in_at, row.in_room = kept, room
    row.in_bytes = left
    hold(me, fd, left if row.in_room > BUFFER_BYTES else 0)
    return True


@nb.njit
def _hand_on(me, fd, now):
    """Give the request at the beginning of a connection's bytes to Python."""
    row = connection_at(me.conns, fd)
    row.deadline_ns, row.moved_ns = 0, now
    hold(me, fd, 0)  # Python counts it
    if not notify(me, REQUEST, fd, row.serial | (row.reason << 32), row.in_at, row.needed):
        end(me, fd, True)


@nb.njit
def read_requests(me, fd, now):
    """Read what has come, and answer the requests that are whole. The connection may be closed afterwards."""
    row = connection_at(me.conns, fd)
    answered = came = 0
    while True:
        if row.in_at != 0:
            base, room, have = row.in_at, row.in_room, row.in_bytes
        else:
            base, room, have = me.buffer, nb.int64(BUFFER_BYTES), nb.int64(0)
        # the bytes of a head that was found to be cut: it is parsed again once its end has come, not after every byte
        parsed = have if row.began_ns != 0 and row.needed + row.chunks_head + row.to_drop == 0 else nb.int64(0)
        if row.flags & MAY_READ and have < room:
            wanted = min(room - have, LARGE_TURN)
            got = receive(me, fd, base + have, wanted)
            if got == -EINTR:
                continue
            if got < 0 and got != -EAGAIN:
                end(me, fd, False)
                return
            if got == 0:
                row.flags |= ENDED
            if got <= 0 or (got < wanted and row.flags & ENDED == 0):  # the end comes after the last bytes
                row.flags &= ~MAY_READ
            have += max(got, 0)
            came += max(got, 0)
        at, used = min(row.to_drop, have), 0
        row.to_drop -= at
        is_cut = parsed > 0 and have <= http1_frame.MOST_HEAD_BYTES and not _ends_head(base, parsed, have)
        while not is_cut and at < have and row.state == READING and have - at >= row.needed and row.flags & CLOSES == 0:
            if answered == PIPELINED:
                break
            used = _request(me, fd, base + at, have - at)
            have = at + me.found.size
            if row.lost != 0:
                end(me, fd, True)
                return
            if used <= 0:
                break
            at += used
            answered += 1
        left = have - at
        if (row.in_at != 0 or left > 0) and not _keep(me, fd, base, at, left):
            if row.job != 0:
                drop_job(me, row.job - 1)
                row.job = 0
            end(me, fd, True)
            return
        if row.state == READING:
            if row.flags & CLOSES and row.to_drop == 0:
                end_after_answer(me, fd, now)
                return
            if answered == PIPELINED and left > 0:
                wait_for_turn(me, fd)
                return
            if row.to_drop > 0:
                pass  # a body that is dropped has its own deadline
            elif left == 0:
                row.deadline_ns = now + (me.limits.idle_ns if row.flags & TURNED_OFF == 0 else me.limits.turn_off_ns)
            elif row.began_ns == 0:
                row.began_ns = now
                row.deadline_ns = now + (me.limits.arrival_ns if row.flags & TURNED_OFF == 0 else me.limits.turn_off_ns)
            if row.held > 0 and not has_room(me, 0):  # Python will refuse it for lack of room
                chunks = row.chunks_head > 0
                http1_frame.frame_at(row.in_at, left, me.found)
                whole = http1_frame.CHUNKED if chunks else me.found.head_bytes + me.found.body_bytes
                _give_head(me, fd, left, whole, BUSY)
                _hand_on(me, fd, now)
                return
            if came >= LARGE_TURN and row.flags & MAY_READ:
                wait_for_turn(me, fd)
                return
            if row.flags & MAY_READ == 0:
                if row.flags & ENDED or (left == 0 and row.to_drop == 0 and me.shared.mode >= FINISH):
                    end(me, fd, False)
                return
        elif row.state == AWAY:
            if row.job != 0:
                row.deadline_ns, row.moved_ns = 0, now
                submit(me, fd)
            else:
                _hand_on(me, fd, now)
            return
        elif row.state == SENDING:
            return
        elif row.state == HTTP2:
            call_at(me.http2, me, FRAMES, fd, now, 0, 0)
            return


@nb.njit
def continue_sending(me, fd, now):
    """Send more of an answer. Returns True if the connection can be read now."""
    row = connection_at(me.conns, fd)
    if not send_on(me, fd):
        if row.lost != 0:
            end(me, fd, True)
        return False
    let_go_of_answer(me, fd)
    if row.needed > 0:  # the answered request is still in the buffer
        left = row.in_bytes - row.needed
        done = row.needed
        row.needed = 0
        _keep(me, fd, row.in_at, done, left)
    row.began_ns = 0
    if row.flags & CLOSES:
        end_after_answer(me, fd, now)
        return False
    row.state = READING
    row.deadline_ns = now + (me.limits.arrival_ns if row.to_drop > 0 else me.limits.idle_ns)
    return True
