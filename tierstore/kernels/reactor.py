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

Time: a request has one to arrive whole, an answer to leave, and a connection between them. Bytes: a head is bounded by `httphead`, a body and an answer by LIMITS; answers that
wait to leave count in INFLIGHT, which is shared with Python's own count.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels import coldread, httphead, lookupplan
from tierstore.kernels.atomics import acquire_i64, add_at, copy_bytes, fence_all, raise_at, relaxed_i64, release_i64
from tierstore.kernels.httpdate import write_date_at
from tierstore.kernels.raw import call_at, load_u32, load_u64, store_u64
from tierstore.kernels.sysio import (
    EAGAIN,
    EDGE,
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
    accept,
    allocate,
    close,
    drop_on_close,
    epoll_set,
    epoll_wait,
    monotonic_ns,
    move_bytes,
    read,
    receive,
    release,
    same_bytes,
    send,
    send_at_once,
    wall_ns,
    write,
)

# a connection's row
FREE, READING, AWAY, SENDING = range(4)
(
    STATE, SERIAL, OWNER, IN_AT, IN_ROOM, IN_BYTES, NEEDED, OUT_AT, OUT_BYTES, OUT_BASE, PIECES_AT, PIECES, DEADLINE_NS,
    FLAGS, LOST, BEGAN_NS, JOB,
) = range(17)  # fmt: skip
CONNECTION_WORDS = 24
# of FLAGS: bytes may be waiting in the socket; no request is read after this answer; the client sends nothing more
MAY_READ, CLOSES, ENDED = 1, 2, 4

# words of `shared`, a cache line each, as some are written often
(
    MODE, GENERATION_AT, PLANS_AT, PLAN_SLOTS, MODELS_AT, INFLIGHT, OTHER_INFLIGHT, OPEN, OTHER_OPEN, HIGHEST, HOSTS_AT,
    ANY_HOST,
) = range(0, 12 * 8, 8)  # fmt: skip
SHARED_WORDS = 12 * 8
RUN, FINISH, STOP = range(3)  # of MODE: answer; answer what has begun, then close; end now

# words of `limits`
(
    MOST_CONNECTIONS, MOST_BODY, MOST_ANSWER, MOST_INFLIGHT, IDLE_NS, ARRIVAL_NS, STALL_NS, SLOWEST_RATE, REACTORS,
    MOST_DESCRIPTORS,
) = range(10)  # fmt: skip
LIMIT_WORDS = 10

# words of a reactor's line in `lines`
ANNOUNCED, LOAD, EPOLL, ANSWERS, HANDED, TURNS, NEXT_SWEEP_NS, DATE_S, PAUSED, DICE = range(10)
LINE_WORDS = 16

# messages to Python and back: MESSAGE_WORDS int64 each, the first is kind + fd * 256
REQUEST, CONNECTION, REFUSED, SENT = range(4)
ANSWER, COME_BACK, DROP, WAKE = range(4)
MESSAGE_WORDS = 4

# a version's counts, int64 words; then the buckets of its latencies
SUCCESSES, SUCCESS_NS, INPUT_NS, INFER_NS, OUTPUT_NS, LAST_MS = range(6)
BUCKETS_FROM = 6
BOUNDS_NS = (100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000, 100_000_000,
             250_000_000, 500_000_000, 1_000_000_000, 2_500_000_000, 5_000_000_000, 10_000_000_000)  # fmt: skip
COUNT_WORDS = BUCKETS_FROM + len(BOUNDS_NS) + 1
TABLE_COUNT_WORDS = 8  # one a tier

# what comes of a request
ANSWERED, MADE_A_JOB, FOR_PYTHON = range(3)

EVENTS = 256  # of one turn
ACCEPTED = 64  # connections of one turn
PIPELINED = 16  # requests of one connection, before others have their turn
JOBS = 256  # of one reactor, that readers are at or have before them
AGAIN_WORDS = 1024  # connections that have their next turn at once
MESSAGES = 64  # of Python, of one turn
LISTENER, INBOX, JOB_INBOX = (k - (1 << 32) for k in range(3))  # the data of their events: no serial is so high
BUFFER_BYTES = 1 << 17
HEAD_ROOM = 4096  # before the answer's data
SWEEP_NS = 1_000_000_000

_SERIALS = 0x7FFFFFFF
_BOUNDS = np.array(BOUNDS_NS, np.int64)
_INTEREST = READABLE | WRITABLE | HALF_CLOSED | EDGE


class Here(NamedTuple):
    """What one reactor works with. Addresses are of memory that Python keeps while the reactor runs."""

    number: int
    listener: int  # descriptors
    inbox: int
    outbox: int
    shared: npt.NDArray[np.int64]
    limits: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]  # [reactors, LINE_WORDS]
    conns: npt.NDArray[np.int64]  # [descriptors, CONNECTION_WORDS]
    found: npt.NDArray[np.int64]  # what a head says
    again: npt.NDArray[np.int64]  # connections that have more to be answered
    free_jobs: npt.NDArray[np.int64]  # how many, and which
    job_outbox: int  # descriptors of pipes: jobs for readers, and those that they are done with
    job_inbox: int
    jobs: int  # addresses: of all reactors' jobs
    run: int  # of `lookupplan.run`
    counts: int  # of versions' counts
    table_counts: int
    events: int
    messages: int
    buffer: int  # BUFFER_BYTES of what comes
    answer: int  # HEAD_ROOM and the largest answer, aligned
    states: int  # a byte a key
    scratch: int
    date: int  # 29 bytes of today's date, and a message


_WORDS, _ROWS = types.int64[::1], types.int64[:, ::1]
HERE = types.NamedTuple(
    (*[types.int64] * 4, _WORDS, _WORDS, _ROWS, _ROWS, _WORDS, _WORDS, _WORDS, *[types.int64] * 13),
    Here,
)


@nb.njit(inline="always")
def _shared_at(me, which):  # type: ignore[no-untyped-def]
    return nb.int64(me.shared.ctypes.data) + 8 * which


@nb.njit(inline="always")
def _line_at(me, reactor, which):  # type: ignore[no-untyped-def]
    return nb.int64(me.lines.ctypes.data) + 8 * (reactor * LINE_WORDS + which)


# --- to Python


@nb.njit
def _tell(me, kind, fd, serial, value, more):  # type: ignore[no-untyped-def]
    """Write a message to Python's pipe, which has room for one from every connection."""
    at = me.date + 64
    store_u64(at, 0, nb.uint64(kind + 256 * fd))
    store_u64(at, 1, nb.uint64(serial))
    store_u64(at, 2, nb.uint64(value))
    store_u64(at, 3, nb.uint64(more))
    return write(me.outbox, at, 8 * MESSAGE_WORDS) == 8 * MESSAGE_WORDS


# --- connections


@nb.njit
def _forget(me, fd):  # type: ignore[no-untyped-def]
    """A connection's row is free from here on; its descriptor and its bytes are somebody else's."""
    row = me.conns[fd]
    row[STATE] = FREE
    row[SERIAL] = (row[SERIAL] + 1) & _SERIALS
    row[IN_AT] = row[IN_BYTES] = row[OUT_AT] = row[OUT_BYTES] = row[OUT_BASE] = row[PIECES] = 0
    add_at(_shared_at(me, OPEN), -1)
    add_at(_line_at(me, me.number, LOAD), -1)


@nb.njit
def _let_go_of_answer(me, fd):  # type: ignore[no-untyped-def]
    """The answer has left, or nobody wants it."""
    row = me.conns[fd]
    if row[PIECES] > 0:
        _tell(me, SENT, fd, row[SERIAL], 0, 0)
    elif row[OUT_BASE] != 0:
        release(row[OUT_BASE])
        add_at(_shared_at(me, INFLIGHT), -(row[OUT_AT] + row[OUT_BYTES] - row[OUT_BASE]))
    row[OUT_AT] = row[OUT_BYTES] = row[OUT_BASE] = row[PIECES] = 0


@nb.njit
def _close(me, fd, abort):  # type: ignore[no-untyped-def]
    """End a connection. With `abort` it is reset, and what it has not taken is dropped."""
    row = me.conns[fd]
    _let_go_of_answer(me, fd)
    release(row[IN_AT])
    if abort:
        drop_on_close(fd)
    _forget(me, fd)
    close(fd)


@nb.njit
def _hand_over(me, fd):  # type: ignore[no-untyped-def]
    """Give a connection to Python, with its bytes, which Python frees."""
    row = me.conns[fd]
    epoll_set(me.lines[me.number, EPOLL], EPOLL_DEL, fd, 0, 0)
    at, size, serial = row[IN_AT], row[IN_BYTES], row[SERIAL]
    add_at(_shared_at(me, OTHER_OPEN), 1)  # before it is counted out here: there are never fewer than there are
    _forget(me, fd)
    me.lines[me.number, HANDED] += 1
    if not _tell(me, CONNECTION, fd, serial, at, size):
        release(at)
        close(fd)
        add_at(_shared_at(me, OTHER_OPEN), -1)


@nb.njit
def _take_in(me, fd, now):  # type: ignore[no-untyped-def]
    """Begin to serve a connection, on the reactor that has the fewest. False where there is no row for it."""
    if fd >= me.limits[MOST_DESCRIPTORS]:
        return False
    owner = me.number
    for other in range(me.limits[REACTORS]):
        if relaxed_i64(_line_at(me, other, LOAD)) < relaxed_i64(_line_at(me, owner, LOAD)):
            owner = other
    row = me.conns[fd]
    row[OWNER], row[FLAGS], row[LOST] = owner, 0, 0
    row[NEEDED] = row[BEGAN_NS] = row[JOB] = 0
    row[DEADLINE_NS] = now + me.limits[IDLE_NS]
    # last: the reactor that owned the row before may be looking at it just now, to end those that are late
    release_i64(nb.int64(row.ctypes.data) + 8 * STATE, READING)
    raise_at(_shared_at(me, HIGHEST), fd)
    add_at(_line_at(me, owner, LOAD), 1)
    add_at(_shared_at(me, OPEN), 1)
    data = fd | (row[SERIAL] << 32)
    if epoll_set(me.lines[owner, EPOLL], EPOLL_ADD, fd, _INTEREST, data) == 0:
        return True
    add_at(_line_at(me, owner, LOAD), -1)
    add_at(_shared_at(me, OPEN), -1)
    row[STATE] = FREE
    return False


@nb.njit
def _accept(me, now):  # type: ignore[no-untyped-def]
    for _ in range(ACCEPTED):
        fd = accept(me.listener)
        if fd == -EINTR:
            continue
        if fd < 0:
            if fd != -EAGAIN:  # no descriptors left, say: the listener would be told of again at once, for ever
                epoll_set(me.lines[me.number, EPOLL], EPOLL_DEL, me.listener, 0, 0)
                me.lines[me.number, PAUSED] = 1
            return
        send_at_once(fd)
        there = acquire_i64(_shared_at(me, OPEN)) + acquire_i64(_shared_at(me, OTHER_OPEN))
        if there >= me.limits[MOST_CONNECTIONS]:
            if not _tell(me, REFUSED, fd, 0, 0, 0):
                close(fd)
        elif not _take_in(me, fd, now):
            close(fd)


# --- requests


@nb.njit
def _knows_host(me, at, size):  # type: ignore[no-untyped-def]
    """Whether the value of Host has passed the guard before: a number, and so many times (address, bytes)."""
    if me.shared[ANY_HOST] != 0:
        return size > 0
    hosts = acquire_i64(_shared_at(me, HOSTS_AT))
    for i in range(nb.int64(load_u64(hosts, 0))):
        there = nb.int64(load_u64(hosts, 1 + 2 * i))
        if nb.int64(load_u64(hosts, 2 + 2 * i)) == size and same_bytes(there, at, size) != 0:
            return True
    return False


@nb.njit
def _roll(me):  # type: ignore[no-untyped-def]
    """32 random bits (xorshift64, Marsaglia 2003)."""
    x = nb.uint64(me.lines[me.number, DICE])
    x ^= x << nb.uint64(13)
    x ^= x >> nb.uint64(7)
    x ^= x << nb.uint64(17)
    me.lines[me.number, DICE] = nb.int64(x)
    return nb.int64(x >> nb.uint64(32))


@nb.njit
def _count(me, variant, began, planned, ran, sent):  # type: ignore[no-untyped-def]
    at = me.counts + 8 * COUNT_WORDS * lookupplan.word(variant, lookupplan.COUNTS)
    took = sent - began
    bucket = 0
    while bucket < _BOUNDS.size and took > _BOUNDS[bucket]:
        bucket += 1
    for which, more in (
        (SUCCESSES, 1),
        (SUCCESS_NS, took),
        (INPUT_NS, planned - began),
        (INFER_NS, ran - planned),
        (OUTPUT_NS, sent - ran),
        (BUCKETS_FROM + bucket, 1),
    ):
        store_u64(at, which, load_u64(at, which) + nb.uint64(more))
    store_u64(at, LAST_MS, nb.uint64(me.lines[me.number, DATE_S] * 1000))


@nb.njit
def _make_job(me, fd, variant, view, began, planned):  # type: ignore[no-untyped-def]
    """Leave an answer that lacks rows to the readers. It is theirs once the request's bytes have their place."""
    if me.free_jobs[0] == 0:
        return FOR_PYTHON
    head, data = lookupplan.word(variant, lookupplan.HEAD_BYTES), lookupplan.word(variant, lookupplan.ANSWER_BYTES)
    keys = lookupplan.word(variant, lookupplan.KEYS)
    block = allocate(head + data + keys)
    if block == 0:
        return FOR_PYTHON
    copy_bytes(block + head, me.answer + HEAD_ROOM, data)
    copy_bytes(block + head + data, me.states, keys)
    add_at(_shared_at(me, INFLIGHT), head + data)
    number = me.free_jobs[me.free_jobs[0]]
    me.free_jobs[0] -= 1
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    found = me.found
    for which, value in (
        (coldread.FD, fd), (coldread.SERIAL, me.conns[fd, SERIAL]), (coldread.VARIANT, variant), (coldread.VIEW, view),
        (coldread.BLOCK, block), (coldread.HEAD_BYTES, head), (coldread.DATA_BYTES, data),
        (coldread.STATES, block + head + data), (coldread.REACTOR, me.number), (coldread.BEGAN_NS, began),
        (coldread.PLANNED_NS, planned), (coldread.TAIL, found[httphead.HEAD_BYTES] + found[httphead.JSON_BYTES]),
    ):  # fmt: skip
        store_u64(job, which, nb.uint64(value))
    release_i64(job + 8 * coldread.ANNOUNCED, me.lines[me.number, ANNOUNCED])  # before the reactor's own is cleared
    me.conns[fd, JOB] = number + 1
    return MADE_A_JOB


@nb.njit
def _submit(me, fd):  # type: ignore[no-untyped-def]
    """Give a connection's job to the readers. Its request stays where it is until they are done."""
    row = me.conns[fd]
    number = row[JOB] - 1
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    store_u64(job, coldread.TAIL, nb.uint64(row[IN_AT] + lookupplan.word(job, coldread.TAIL)))
    at = me.date + 64
    store_u64(at, 0, nb.uint64(number))
    if write(me.job_outbox, at, 8) != 8:  # there is room for all of them
        store_u64(job, coldread.OUTCOME, nb.uint64(coldread.FOR_PYTHON))
        _take_back(me, number)


@nb.njit
def _take_back(me, number):  # type: ignore[no-untyped-def]
    """A job that readers are done with. Returns its connection if there is an answer to be sent, or -1."""
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    fd, variant = lookupplan.word(job, coldread.FD), lookupplan.word(job, coldread.VARIANT)
    row = me.conns[fd]
    block, size = (
        lookupplan.word(job, coldread.BLOCK),
        lookupplan.word(job, coldread.HEAD_BYTES) + lookupplan.word(job, coldread.DATA_BYTES),
    )
    answered = lookupplan.word(job, coldread.OUTCOME) == coldread.DONE
    if answered:
        began, planned = lookupplan.word(job, coldread.BEGAN_NS), lookupplan.word(job, coldread.PLANNED_NS)
        tail, states = lookupplan.word(job, coldread.TAIL), lookupplan.word(job, coldread.STATES)
        lookupplan.copy_head(variant, me.date, block)
        lookupplan.count_keys(variant, tail, states, me.table_counts, TABLE_COUNT_WORDS)
        now = monotonic_ns()
        _count(me, variant, began, planned, now, now)
        me.lines[me.number, ANSWERS] += 1
    release_i64(job + 8 * coldread.ANNOUNCED, 0)
    me.free_jobs[0] += 1
    me.free_jobs[me.free_jobs[0]] = number
    row[JOB] = 0
    if not answered:
        release(block)
        add_at(_shared_at(me, INFLIGHT), -size)
        me.lines[me.number, HANDED] += 1
        if row[LOST] != 0 or not _tell(me, REQUEST, fd, row[SERIAL], row[IN_AT], row[NEEDED]):
            _close(me, fd, True)
        return -1
    row[OUT_BASE], row[OUT_AT], row[OUT_BYTES], row[PIECES], row[STATE] = block, block, size, 0, SENDING
    if row[LOST] != 0:
        _close(me, fd, True)
        return -1
    _allow_to_leave(me, fd, size)
    return fd


@nb.njit
def _answer(me, fd, at, whole, began):  # type: ignore[no-untyped-def]
    """Answer the look-up of `whole` bytes at `at`, whose head is in `found`, if a plan is known.

    Returns ANSWERED; MADE_A_JOB where rows must be read, then the connection's row has its number; or else nothing was
    done, and the request is one FOR_PYTHON.
    """
    found = me.found
    head = found[httphead.HEAD_BYTES]
    text_bytes = found[httphead.JSON_BYTES]
    tail_bytes = found[httphead.BODY_BYTES] - text_bytes
    if text_bytes <= 0 or tail_bytes < 0 or found[httphead.UNUSUAL] & ~httphead.ROUTED != 0 or me.shared[MODE] != RUN:
        return FOR_PYTHON
    timeout_ns = found[httphead.TIMEOUT_MS] * 1_000_000
    if timeout_ns > 0 and me.conns[fd, BEGAN_NS] > 0 and began - me.conns[fd, BEGAN_NS] >= timeout_ns:
        return FOR_PYTHON
    if not _knows_host(me, at + found[httphead.HOST_AT], found[httphead.HOST_BYTES]):
        return FOR_PYTHON
    plan = lookupplan.find_plan(
        acquire_i64(_shared_at(me, PLANS_AT)), me.shared[PLAN_SLOTS], at + found[httphead.PATH_AT],
        found[httphead.PATH_BYTES], at + head, text_bytes, tail_bytes,
    )  # fmt: skip
    if plan == 0:
        return FOR_PYTHON
    served = acquire_i64(acquire_i64(_shared_at(me, MODELS_AT)) + 8 * lookupplan.word(plan, lookupplan.MODEL))
    if served == 0:
        return FOR_PYTHON
    if found[httphead.UNUSUAL] & httphead.ROUTED != 0 and lookupplan.word(served, lookupplan.CANARY) != 0:
        return FOR_PYTHON
    variant, view = lookupplan.choose(plan, served, _roll(me))
    if variant == 0:
        return FOR_PYTHON
    data = lookupplan.word(variant, lookupplan.ANSWER_BYTES)
    held = acquire_i64(_shared_at(me, INFLIGHT)) + acquire_i64(_shared_at(me, OTHER_INFLIGHT))
    if held + data + whole > me.limits[MOST_INFLIGHT]:
        return FOR_PYTHON
    planned = monotonic_ns()
    tail = at + head + text_bytes
    came = call_at(me.run, variant, view, tail, me.answer + HEAD_ROOM, me.states, me.scratch)
    if came == lookupplan.COLD:
        return _make_job(me, fd, variant, view, began, planned)
    if came != lookupplan.ANSWERED:
        return FOR_PYTHON
    ran = monotonic_ns()
    store_u64(plan, lookupplan.LAST_USED, nb.uint64(began))
    before = lookupplan.word(variant, lookupplan.HEAD_BYTES)
    target = me.answer + HEAD_ROOM - before
    lookupplan.copy_head(variant, me.date, target)
    lookupplan.count_keys(variant, tail, me.states, me.table_counts, TABLE_COUNT_WORDS)
    _count(me, variant, began, planned, ran, monotonic_ns())  # before it leaves: who has the answer finds it counted
    me.lines[me.number, ANSWERS] += 1
    _send_first(me, fd, target, before + data)
    return ANSWERED


@nb.njit
def _send_first(me, fd, at, size):  # type: ignore[no-untyped-def]
    """Send an answer out of the reactor's own memory; what the socket does not take is kept."""
    row = me.conns[fd]
    sent = 0
    while sent < size:
        took = send(fd, at + sent, size - sent, 0)
        if took > 0:
            sent += took
        elif took == -EAGAIN:
            break
        elif took != -EINTR:
            row[LOST] = 1
            return
    if sent == size:
        return
    left = size - sent
    kept = allocate(left)
    if kept == 0:
        row[LOST] = 1
        return
    copy_bytes(kept, at + sent, left)
    add_at(_shared_at(me, INFLIGHT), left)
    row[OUT_BASE], row[OUT_AT], row[OUT_BYTES], row[PIECES], row[STATE] = kept, kept, left, 0, SENDING
    _allow_to_leave(me, fd, left)


@nb.njit
def _allow_to_leave(me, fd, size):  # type: ignore[no-untyped-def]
    """Until when an answer must have left: so long without any rate, and the time that it takes at the slowest."""
    slowest = size * 1_000_000_000 // me.limits[SLOWEST_RATE]
    me.conns[fd, DEADLINE_NS] = monotonic_ns() + me.limits[STALL_NS] + slowest


@nb.njit
def _send_on(me, fd):  # type: ignore[no-untyped-def]
    """Go on with an answer. True once all of it has left; a connection that is lost is marked."""
    row = me.conns[fd]
    while True:
        while row[OUT_BYTES] > 0:
            took = send(fd, row[OUT_AT], row[OUT_BYTES], 1 if row[PIECES] > 1 else 0)
            if took > 0:
                row[OUT_AT] += took
                row[OUT_BYTES] -= took
            elif took == -EAGAIN:
                return False
            elif took != -EINTR:
                row[LOST] = 1
                return False
        if row[PIECES] <= 1:
            return True
        row[PIECES] -= 1
        row[PIECES_AT] += 16
        row[OUT_AT] = nb.int64(load_u64(row[PIECES_AT], 0))
        row[OUT_BYTES] = nb.int64(load_u64(row[PIECES_AT], 1))


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
    line = _line_at(me, me.number, ANNOUNCED)
    release_i64(line, acquire_i64(me.shared[GENERATION_AT]))
    fence_all()
    came = _answer(me, fd, at, whole, began)
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
                _close(me, fd, False)
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
                _close(me, fd, True)
                return
            if used == 0:
                break
            at += used
            answered += 1
        left = have - at
        if (row[IN_AT] != 0 or left > 0) and not _keep(me, fd, base, at, left):
            _close(me, fd, True)
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
                    _close(me, fd, False)
                return
        elif row[STATE] == AWAY:
            row[DEADLINE_NS] = 0
            if row[JOB] != 0:
                _submit(me, fd)
                return
            me.lines[me.number, HANDED] += 1
            if not _tell(me, REQUEST, fd, row[SERIAL], row[IN_AT], row[NEEDED]):
                _close(me, fd, True)
            return
        elif row[STATE] == SENDING:
            return
        else:
            _hand_over(me, fd)
            return


@nb.njit
def _go_on_sending(me, fd, now):  # type: ignore[no-untyped-def]
    """Send more of an answer. True if the connection is to be read now."""
    row = me.conns[fd]
    if not _send_on(me, fd):
        if row[LOST] != 0:
            _close(me, fd, True)
        return False
    _let_go_of_answer(me, fd)
    if row[NEEDED] > 0:  # the request that it answers is still there
        left = row[IN_BYTES] - row[NEEDED]
        done = row[NEEDED]
        row[NEEDED] = 0
        _keep(me, fd, row[IN_AT], done, left)
    row[BEGAN_NS] = 0
    if row[FLAGS] & CLOSES:
        _close(me, fd, False)
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
        _close(me, fd, True)
        return False
    return mask & WRITABLE != 0 and _go_on_sending(me, fd, now)


@nb.njit
def _on_message(me, at, now):  # type: ignore[no-untyped-def]
    """One of Python's: (kind and descriptor, serial and flags, address, count). Returns a connection to be read, or -1."""
    kind = nb.int64(load_u64(at, 0) & nb.uint64(255))
    fd = nb.int64(load_u64(at, 0) >> nb.uint64(8))
    serial = nb.int64(load_u64(at, 1))
    if kind == COME_BACK:
        if not _take_in(me, fd, now):
            close(fd)
        add_at(_shared_at(me, OTHER_OPEN), -1)
        return -1
    row = me.conns[fd]
    if kind == WAKE or row[STATE] != AWAY or row[SERIAL] != serial & _SERIALS:
        return -1
    if kind == DROP:
        _close(me, fd, True)
        return -1
    size = nb.int64(load_u64(at, 3))
    row[PIECES_AT], row[PIECES], row[STATE] = nb.int64(load_u64(at, 2)), size & 0xFFFF, SENDING
    row[OUT_AT] = nb.int64(load_u64(row[PIECES_AT], 0))
    row[OUT_BYTES] = nb.int64(load_u64(row[PIECES_AT], 1))
    if serial > _SERIALS:
        row[FLAGS] |= CLOSES
    if row[LOST] != 0:
        _close(me, fd, True)
        return -1
    _allow_to_leave(me, fd, size >> 16)
    return fd if _go_on_sending(me, fd, now) else -1


@nb.njit
def _sweep(me, now):  # type: ignore[no-untyped-def]
    """End connections that are late, and those that are idle once no more is to be begun. Try to accept again."""
    finishing = me.shared[MODE] != RUN
    if me.lines[me.number, PAUSED] != 0 and not finishing:
        me.lines[me.number, PAUSED] = 0
        epoll_set(me.lines[me.number, EPOLL], EPOLL_ADD, me.listener, READABLE | EXCLUSIVE, LISTENER)
    for fd in range(relaxed_i64(_shared_at(me, HIGHEST)) + 1):
        row = me.conns[fd]
        if row[STATE] == FREE or row[OWNER] != me.number:
            continue
        if finishing and row[STATE] == READING and row[IN_BYTES] == 0:
            _close(me, fd, False)
        elif row[DEADLINE_NS] != 0 and now > row[DEADLINE_NS]:
            _close(me, fd, row[STATE] == SENDING)


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
        if relaxed_i64(_shared_at(me, MODE)) != mode:
            mode = relaxed_i64(_shared_at(me, MODE))
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
            if serial <= _SERIALS:
                there = me.conns[fd, SERIAL] == serial and me.conns[fd, STATE] != FREE
                if there and _on_connection(me, fd, mask, now):
                    _read(me, fd, now)
            elif fd == 0:
                _accept(me, now)
            elif fd == 2:
                got = read(me.job_inbox, me.messages, MESSAGES * 8)
                for k in range(max(got, 0) // 8):
                    fd = _take_back(me, nb.int64(load_u64(me.messages, k)))
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
