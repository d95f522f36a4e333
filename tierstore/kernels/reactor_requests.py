"""How a reactor reads requests from a connection and goes on with answers that did not leave at once. See `reactor.py`.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import h2core, httphead
from tierstore.kernels.atomics import acquire_i64, copy_bytes, fence_all, release_i64
from tierstore.kernels.h2words import PREFACE, SESSION_BYTES
from tierstore.kernels.raw import call_at, load_u8
from tierstore.kernels.reactor_answers import answer, answer_rows
from tierstore.kernels.reactor_connections import (
    end,
    has_room,
    hold,
    let_go_of_answer,
    notify,
    send_on,
    wait_for_turn,
    yield_to_requests,
)
from tierstore.kernels.reactor_jobs import drop_job, submit
from tierstore.kernels.reactor_sockets import receive
from tierstore.kernels.reactor_words import (
    ANNOUNCED,
    ANSWERED,
    ARRIVAL_NS,
    AWAY,
    BEGAN_NS,
    BUFFER_BYTES,
    BUSY,
    CLOSES,
    DEADLINE_NS,
    ENDED,
    FINISH,
    FLAGS,
    FRAMES,
    FREE,
    GENERATION_AT,
    HEADER,
    HELD,
    HTTP2,
    IDLE_NS,
    IN_AT,
    IN_BYTES,
    IN_ROOM,
    JOB,
    LARGE_TURN,
    LOST,
    MAY_READ,
    MODE,
    MOST_BODY,
    MOST_MESSAGE,
    NEEDED,
    OTHER,
    PIPELINED,
    READING,
    REASON,
    REASONS_FROM,
    REQUEST,
    SENDING,
    SERIAL,
    SESSION,
    SIZE,
    STATE,
    STREAMING_PATHS,
    line_at,
)
from tierstore.kernels.sysio import (
    EAGAIN,
    EINTR,
    allocate,
    monotonic_ns,
    move_bytes,
    release,
)


@nb.njit
def _preface(at, size):  # type: ignore[no-untyped-def]
    """How many bytes of the preface of HTTP/2 begin the `size` bytes at `at`; 0 where they are something else."""
    size = min(size, PREFACE.size)
    for i in range(size):
        if load_u8(at, i) != PREFACE[i]:
            return 0
    return size


@nb.njit
def _begin_http2(me, fd):  # type: ignore[no-untyped-def]
    """A connection's preface has come. False: no memory."""
    s = allocate(SESSION_BYTES)
    if s == 0:
        return False
    row = me.conns[fd]
    h2core.begin_session(s, me.limits[MOST_MESSAGE], me.shared[STREAMING_PATHS])
    row[SESSION], row[STATE], row[NEEDED], row[DEADLINE_NS] = s, HTTP2, 0, 0
    return True


@nb.njit
def _request(me, fd, at, size):  # type: ignore[no-untyped-def]
    """Deal with the request that the `size` bytes at `at` begin with. Returns how many bytes are done with; 0: more must come first.

    The state tells what became of it: AWAY, a whole request for Python; HTTP2, it was a preface; FREE, the connection itself is to be handed
    over, and what is returned is minus the reason; else it was answered, or is not all there.
    """
    row, found, limits = me.conns[fd], me.found, me.limits
    began = monotonic_ns()
    preface = _preface(at, size)
    if preface > 0:
        if preface == PREFACE.size and not _begin_http2(me, fd):
            row[LOST] = 1
        return PREFACE.size if preface == PREFACE.size else 0
    form = httphead.parse_at(at, size, found)
    if form == httphead.CUT and size < httphead.MOST_HEAD_BYTES:
        return 0
    if form == httphead.FOREIGN:
        row[STATE] = FREE
        return -(HEADER if httphead.is_ours(at, size) else OTHER)
    if (
        form != httphead.PLAIN
        or found[httphead.HEAD_BYTES] > httphead.MOST_HEAD_BYTES
        or found[httphead.BODY_BYTES] > limits[MOST_BODY]
    ):
        row[STATE] = FREE
        return -SIZE
    whole = found[httphead.HEAD_BYTES] + found[httphead.BODY_BYTES]
    if size < whole:
        row[NEEDED] = whole
        return 0
    row[NEEDED] = 0
    line = line_at(me, me.number, ANNOUNCED)
    release_i64(line, acquire_i64(me.shared[GENERATION_AT]))
    fence_all()
    if found[httphead.KIND] == httphead.ROWS:
        came = answer_rows(me, fd, at, whole, size == whole, began)
    else:
        came = answer(me, fd, at, whole, size == whole, began)
    release_i64(line, 0)
    if came != ANSWERED:
        row[STATE], row[NEEDED] = AWAY, whole
        if came >= 0:
            me.lines[me.number, REASONS_FROM + came] += 1
            row[REASON] = came
            if found[httphead.CLOSING] != 0:
                row[FLAGS] |= CLOSES
        return 0
    row[BEGAN_NS] = 0
    return whole


@nb.njit
def _keep(me, fd, base, at, left):  # type: ignore[no-untyped-def]
    """Keep `left` bytes that begin at `base + at`, with room for the request that they begin. False: no memory."""
    row = me.conns[fd]
    if left == 0:
        release(row[IN_AT])
        row[IN_AT] = row[IN_BYTES] = 0
        hold(me, fd, 0)
        return True
    room = max(row[NEEDED], left, 4096 if row[NEEDED] == 0 else 0)
    if row[NEEDED] == 0 and left * 2 > room:
        room = min(2 * room, max(left, httphead.MOST_HEAD_BYTES))
    if base == row[IN_AT] and row[IN_ROOM] >= room:
        if at > 0:
            move_bytes(base, base + at, left)
    else:
        kept = allocate(room + 64)
        if kept == 0:
            return False
        copy_bytes(kept, base + at, left)
        release(row[IN_AT])
        row[IN_AT], row[IN_ROOM] = kept, room
    row[IN_BYTES] = left
    hold(me, fd, left if row[IN_ROOM] > BUFFER_BYTES else 0)
    return True


@nb.njit
def read_requests(me, fd, now):  # type: ignore[no-untyped-def]
    """Read what has come, and answer the requests that are whole. The connection may be closed afterwards."""
    row = me.conns[fd]
    answered = came = 0
    while True:
        if row[IN_AT] != 0:
            base, room, have = row[IN_AT], row[IN_ROOM], row[IN_BYTES]
        else:
            base, room, have = me.buffer, nb.int64(BUFFER_BYTES), nb.int64(0)
        if row[FLAGS] & MAY_READ and have < room:
            wanted = min(room - have, LARGE_TURN)
            got = receive(me, fd, base + have, wanted)
            if got == -EINTR:
                continue
            if got < 0 and got != -EAGAIN:
                end(me, fd, False)
                return
            if got == 0:
                row[FLAGS] |= ENDED
            if got <= 0 or (got < wanted and row[FLAGS] & ENDED == 0):  # the end itself comes after the last bytes
                row[FLAGS] &= ~MAY_READ
            have += max(got, 0)
            came += max(got, 0)
        at = used = 0
        while at < have and row[STATE] == READING and have - at >= row[NEEDED] and row[FLAGS] & CLOSES == 0:
            if answered == PIPELINED:
                break
            used = _request(me, fd, base + at, have - at)
            if row[LOST] != 0:
                end(me, fd, True)
                return
            if used <= 0:
                break
            at += used
            answered += 1
        left = have - at
        if (row[IN_AT] != 0 or left > 0) and not _keep(me, fd, base, at, left):
            if row[JOB] != 0:
                drop_job(me, fd)
            end(me, fd, True)
            return
        if row[STATE] == READING:
            if row[FLAGS] & CLOSES:
                end(me, fd, False)
                return
            if answered == PIPELINED and left > 0:
                wait_for_turn(me, fd)
                return
            if left == 0:
                row[DEADLINE_NS] = now + me.limits[IDLE_NS]
            elif row[BEGAN_NS] == 0:
                row[BEGAN_NS] = now
                row[DEADLINE_NS] = now + me.limits[ARRIVAL_NS]
            if row[HELD] > 0 and not has_room(me, 0):  # for Python to say so, or to wait
                yield_to_requests(me, fd, BUSY)
                return
            if came >= LARGE_TURN and row[FLAGS] & MAY_READ:
                wait_for_turn(me, fd)
                return
            if row[FLAGS] & MAY_READ == 0:
                if row[FLAGS] & ENDED or (left == 0 and me.shared[MODE] >= FINISH):
                    end(me, fd, False)
                return
        elif row[STATE] == AWAY:
            row[DEADLINE_NS] = 0
            if row[JOB] != 0:
                submit(me, fd)
                return
            hold(me, fd, 0)  # Python counts it
            if not notify(me, REQUEST, fd, row[SERIAL] | (row[REASON] << 32), row[IN_AT], row[NEEDED]):
                end(me, fd, True)
            return
        elif row[STATE] == SENDING:
            return
        elif row[STATE] == HTTP2:
            call_at(me.http2, me.at, FRAMES, fd, now, 0, 0)
            return
        else:
            yield_to_requests(me, fd, -used)
            return


@nb.njit
def continue_sending(me, fd, now):  # type: ignore[no-untyped-def]
    """Send more of an answer. True if the connection is to be read now."""
    row = me.conns[fd]
    if not send_on(me, fd):
        if row[LOST] != 0:
            end(me, fd, True)
        return False
    let_go_of_answer(me, fd)
    if row[NEEDED] > 0:  # the request that it answers is still there
        left = row[IN_BYTES] - row[NEEDED]
        done = row[NEEDED]
        row[NEEDED] = 0
        _keep(me, fd, row[IN_AT], done, left)
    row[BEGAN_NS] = 0
    if row[FLAGS] & CLOSES:
        end(me, fd, False)
        return False
    row[STATE] = READING
    row[DEADLINE_NS] = now + me.limits[IDLE_NS]
    return True
