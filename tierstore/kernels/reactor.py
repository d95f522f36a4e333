"""The reactor: a compiled loop that owns plain HTTP connections and answers look-ups whose rows are in memory.

It runs in threads of its own and never takes the interpreter lock. Of HTTP it knows what `httphead` says; of look-ups
what `lookupplan` says. Rows that memory lacks are read by other threads (`coldread`), which complete the answer. Whatever
else comes is handed to Python with its bytes, through a pipe: a whole request (`REQUEST`), whose answer comes back, or
the connection itself (`CONNECTION`), which may come back later.

A connection is a row of `conns`, found by its descriptor. It belongs to one reactor for life, and only that one writes
its row; Python reads LOST, and the bytes of a request that it was given. Its states:

                    accept
                      │
                      ▼    memory has the rows, and the socket takes not all of the answer
        ┌─────────► READING ────────────────────────────────────────────────► SENDING ─┐
        │             │  │                                                      ▲      │
        │             │  └─ for a reader, or for Python ─► AWAY ─► answered ────┘      │ all has left
        │             ▼                                                                │
        │   FREE (closed, or handed over)                                              │
        └──────────────────────────────────────────────────────────────────────────────┘

An answer that leaves at once never enters SENDING, and bytes of a request that is answered at once are never stored: an
idle connection holds no memory. One connection is read again only when its answer has left, so a client that does not
read is not served more.

Time: a request has one to arrive whole, an answer to leave, and a connection between them. Bytes: a head is bounded by
`httphead`, a body and an answer by the limits; answers that wait to leave count in INFLIGHT, which is shared with Python's
own count. The words are in `reactor_words`, connections in `reactor_connections`, answers in `reactor_answers`.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import httphead
from tierstore.kernels.atomics import acquire_i64, add_at, copy_bytes, fence_all, relaxed_i64, release_i64
from tierstore.kernels.httpdate import write_date_at
from tierstore.kernels.raw import load_u32, load_u64
from tierstore.kernels.reactor_answers import answer, drop_job, submit, take_back
from tierstore.kernels.reactor_connections import (
    accept_new,
    allow_to_leave,
    end,
    hand_over,
    let_go_of_answer,
    send_on,
    take_in,
    tell,
)
from tierstore.kernels.reactor_words import (
    AGAIN_WORDS,
    ANNOUNCED,
    ANSWERED,
    ARRIVAL_NS,
    AWAY,
    BEGAN_NS,
    BLOCK,
    BUFFER_BYTES,
    CLOSES,
    COME_BACK,
    DATE_S,
    DEADLINE_NS,
    DROP,
    ENDED,
    EPOLL,
    EVENTS,
    FLAGS,
    FREE,
    GENERATION_AT,
    HANDED,
    HERE,
    HIGHEST,
    IDLE_NS,
    IN_AT,
    IN_BYTES,
    IN_ROOM,
    INFLIGHT,
    JOB,
    LISTENER,
    LOST,
    MAY_READ,
    MESSAGE_WORDS,
    MESSAGES,
    MODE,
    MOST_BODY,
    NEEDED,
    NEXT_SWEEP_NS,
    OTHER_OPEN,
    OUT_AT,
    OUT_BASE,
    OUT_BYTES,
    OWNER,
    PAUSED,
    PIECES,
    PIECES_AT,
    PIPELINED,
    READING,
    REQUEST,
    RUN,
    SENDING,
    SERIAL,
    SERIALS,
    STATE,
    STOP,
    SWEEP_NS,
    TURNS,
    WAKE,
    line_at,
    shared_at,
)
from tierstore.kernels.sysio import (
    EAGAIN,
    EINTR,
    EPOLL_ADD,
    EPOLL_DEL,
    EVENT_BYTES,
    EVENT_DATA,
    EXCLUSIVE,
    FAILED,
    HALF_CLOSED,
    HUNG_UP,
    READABLE,
    WRITABLE,
    allocate,
    close,
    epoll_set,
    epoll_wait,
    monotonic_ns,
    move_bytes,
    read,
    receive,
    release,
    wall_ns,
)


@nb.njit
def _request(me, fd, at, size):  # type: ignore[no-untyped-def]
    """Deal with what the `size` bytes at `at` begin with. Returns how many are done with; 0: the rest must come first.

    The state tells what became of it: AWAY, a whole request for Python; FREE, the connection itself is to be handed
    over; else it was answered, or is not all there.
    """
    row, found, limits = me.conns[fd], me.found, me.limits
    began = monotonic_ns()
    form = httphead.parse_at(at, size, found)
    if form == httphead.CUT and size < httphead.MOST_HEAD_BYTES:
        return 0
    if (
        form != httphead.PLAIN
        or found[httphead.HEAD_BYTES] > httphead.MOST_HEAD_BYTES
        or found[httphead.BODY_BYTES] > limits[MOST_BODY]
    ):
        row[STATE] = FREE
        return 0
    whole = found[httphead.HEAD_BYTES] + found[httphead.BODY_BYTES]
    if size < whole:
        row[NEEDED] = whole
        return 0
    row[NEEDED] = 0
    line = line_at(me, me.number, ANNOUNCED)
    release_i64(line, acquire_i64(me.shared[GENERATION_AT]))
    fence_all()
    came = answer(me, fd, at, whole, began)
    release_i64(line, 0)
    if came != ANSWERED:
        row[STATE], row[NEEDED] = AWAY, whole
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
    return True


@nb.njit
def _read(me, fd, now):  # type: ignore[no-untyped-def]
    """Take what has come, and answer what is whole. The connection may be gone afterwards."""
    row = me.conns[fd]
    answered = 0
    while True:
        if row[IN_AT] != 0:
            base, room, have = row[IN_AT], row[IN_ROOM], row[IN_BYTES]
        else:
            base, room, have = me.buffer, nb.int64(BUFFER_BYTES), nb.int64(0)
        if row[FLAGS] & MAY_READ and have < room:
            got = receive(fd, base + have, room - have)
            if got == -EINTR:
                continue
            if got < 0 and got != -EAGAIN:
                end(me, fd, False)
                return
            if got == 0:
                row[FLAGS] |= ENDED
            if got <= 0 or (got < room - have and row[FLAGS] & ENDED == 0):  # the end itself comes after the last bytes
                row[FLAGS] &= ~MAY_READ
            have += max(got, 0)
        at = 0
        while at < have and row[STATE] == READING and have - at >= row[NEEDED]:
            if answered == PIPELINED:
                break
            used = _request(me, fd, base + at, have - at)
            if row[LOST] != 0:
                end(me, fd, True)
                return
            if used == 0:
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
            if answered == PIPELINED and left > 0:
                if me.again[0] < AGAIN_WORDS:
                    me.again[0] += 1
                    me.again[me.again[0]] = fd
                    return
                answered = 0
                continue
            if left == 0:
                row[DEADLINE_NS] = now + me.limits[IDLE_NS]
            elif row[BEGAN_NS] == 0:
                row[BEGAN_NS] = now
                row[DEADLINE_NS] = now + me.limits[ARRIVAL_NS]
            if row[FLAGS] & MAY_READ == 0:
                if row[FLAGS] & ENDED or (left == 0 and me.shared[MODE] != RUN):
                    end(me, fd, False)
                return
        elif row[STATE] == AWAY:
            row[DEADLINE_NS] = 0
            if row[JOB] != 0:
                submit(me, fd)
                return
            me.lines[me.number, HANDED] += 1
            if not tell(me, REQUEST, fd, row[SERIAL], row[IN_AT], row[NEEDED]):
                end(me, fd, True)
            return
        elif row[STATE] == SENDING:
            return
        else:
            hand_over(me, fd)
            return


@nb.njit
def _go_on_sending(me, fd, now):  # type: ignore[no-untyped-def]
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


# --- events


@nb.njit
def _on_connection(me, fd, mask, now):  # type: ignore[no-untyped-def]
    """Note what an event says. True if the connection is to be read now."""
    row = me.conns[fd]
    state = row[STATE]
    if mask & (READABLE | HALF_CLOSED | FAILED | HUNG_UP):
        row[FLAGS] |= MAY_READ
    if mask & HALF_CLOSED:
        row[FLAGS] |= ENDED
    if state == READING:
        return row[FLAGS] & MAY_READ != 0
    if state == AWAY:
        if mask & (HALF_CLOSED | FAILED | HUNG_UP):
            row[LOST] = 1
        return False
    if mask & (FAILED | HUNG_UP):
        end(me, fd, True)
        return False
    return mask & WRITABLE != 0 and _go_on_sending(me, fd, now)


@nb.njit
def _on_message(me, at, now):  # type: ignore[no-untyped-def]
    """One of Python's: (kind and descriptor, serial and flags, address, count). Returns a connection to be read, or -1."""
    kind = nb.int64(load_u64(at, 0) & nb.uint64(255))
    fd = nb.int64(load_u64(at, 0) >> nb.uint64(8))
    serial = nb.int64(load_u64(at, 1))
    if kind == COME_BACK:
        if not take_in(me, fd, now):
            close(fd)
        add_at(shared_at(me, OTHER_OPEN), -1)
        return -1
    row = me.conns[fd]
    value, size = nb.int64(load_u64(at, 2)), nb.int64(load_u64(at, 3))
    if kind == WAKE or row[STATE] != AWAY or row[SERIAL] != serial & SERIALS:
        if kind == BLOCK:
            release(value)
            add_at(shared_at(me, INFLIGHT), -size)
        return -1
    if kind == DROP:
        end(me, fd, True)
        return -1
    row[STATE] = SENDING
    if kind == BLOCK:
        row[OUT_BASE], row[OUT_AT], row[OUT_BYTES], row[PIECES] = value, value, size, 0
    else:
        row[PIECES_AT], row[PIECES] = value, size & 0xFFFF
        row[OUT_AT], row[OUT_BYTES] = nb.int64(load_u64(value, 0)), nb.int64(load_u64(value, 1))
        size >>= 16
    if serial > SERIALS:
        row[FLAGS] |= CLOSES
    if row[LOST] != 0:
        end(me, fd, True)
        return -1
    allow_to_leave(me, fd, size)
    return fd if _go_on_sending(me, fd, now) else -1


@nb.njit
def _sweep(me, now):  # type: ignore[no-untyped-def]
    """End connections that are late, and those that are idle once no more is to be begun. Try to accept again."""
    finishing = me.shared[MODE] != RUN
    if me.lines[me.number, PAUSED] != 0 and not finishing:
        me.lines[me.number, PAUSED] = 0
        epoll_set(me.lines[me.number, EPOLL], EPOLL_ADD, me.listener, READABLE | EXCLUSIVE, LISTENER)
    for fd in range(relaxed_i64(shared_at(me, HIGHEST)) + 1):
        row = me.conns[fd]
        if row[STATE] == FREE or row[OWNER] != me.number:
            continue
        if finishing and row[STATE] == READING and row[IN_BYTES] == 0:
            end(me, fd, False)
        elif row[DEADLINE_NS] != 0 and now > row[DEADLINE_NS]:
            end(me, fd, row[STATE] == SENDING)


@nb.njit(types.void(HERE), nogil=True, cache=True)
def serve(me: Any) -> Any:
    """Serve until MODE is STOP."""
    line = me.lines[me.number]
    mode = RUN
    while True:
        line[TURNS] += 1
        turn = epoll_wait(line[EPOLL], me.events, EVENTS, 0 if me.again[0] > 0 else 500)
        now = monotonic_ns()
        seconds = wall_ns() // 1_000_000_000
        if seconds != line[DATE_S]:
            line[DATE_S] = seconds
            write_date_at(seconds, me.date)
        if relaxed_i64(shared_at(me, MODE)) != mode:
            mode = relaxed_i64(shared_at(me, MODE))
            if mode == STOP:
                return
            epoll_set(line[EPOLL], EPOLL_DEL, me.listener, 0, 0)
            line[NEXT_SWEEP_NS] = 0
        more = me.again[0]
        if more > 0:
            me.again[1 + AGAIN_WORDS : 1 + AGAIN_WORDS + more] = me.again[1 : 1 + more]
            me.again[0] = 0
        for i in range(turn):
            event = me.events + EVENT_BYTES * i
            mask = nb.int64(load_u32(event, 0))
            fd = nb.int64(load_u32(event + EVENT_DATA, 0))
            serial = nb.int64(load_u32(event + EVENT_DATA, 1))
            if serial <= SERIALS:
                there = me.conns[fd, SERIAL] == serial and me.conns[fd, STATE] != FREE
                if there and _on_connection(me, fd, mask, now):
                    _read(me, fd, now)
            elif fd == 0:
                accept_new(me, now)
            elif fd == 2:
                got = read(me.job_inbox, me.messages, MESSAGES * 8)
                for k in range(max(got, 0) // 8):
                    fd = take_back(me, nb.int64(load_u64(me.messages, k)))
                    if fd >= 0 and _go_on_sending(me, fd, now):
                        _read(me, fd, now)
            else:
                got = read(me.inbox, me.messages, MESSAGES * 8 * MESSAGE_WORDS)
                for k in range(max(got, 0) // (8 * MESSAGE_WORDS)):
                    fd = _on_message(me, me.messages + 8 * MESSAGE_WORDS * k, now)
                    if fd >= 0:
                        _read(me, fd, now)
        for i in range(more):
            fd = me.again[1 + AGAIN_WORDS + i]
            if me.conns[fd, STATE] == READING and me.conns[fd, OWNER] == me.number:
                _read(me, fd, now)
        if now >= line[NEXT_SWEEP_NS]:
            line[NEXT_SWEEP_NS] = now + SWEEP_NS
            _sweep(me, now)


@nb.njit("int64(int64, int64, int64, int64)", nogil=True, cache=True)
def watch(epoll: Any, fd: Any, mask: Any, data: Any) -> Any:
    """Have an epoll tell of events of `mask` on `fd`, with `data`. Returns 0, or minus the error number."""
    return epoll_set(epoll, EPOLL_ADD, fd, mask, data)
