"""How a reactor answers a request: by its plan from memory, or with a job for the readers of cold rows. See `reactor.py`.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels import coldread, front_rows, httphead, lookupplan
from tierstore.kernels.atomics import acquire_i64, add_at, copy_bytes, release_i64
from tierstore.kernels.httpdate import DATE_BYTES
from tierstore.kernels.raw import call_at, load_u8, load_u64, store_u8, store_u64
from tierstore.kernels.reactor_connections import end, notify, send_first, set_send_deadline
from tierstore.kernels.reactor_words import (
    ALLOWED_AT,
    ALLOWED_FRONTS_AT,
    ANNOUNCED,
    ANSWERED,
    ANSWERS,
    BEGAN_NS,
    BOUNDS,
    BUCKETS_FROM,
    CLOSES,
    COUNT_WORDS,
    DATE_S,
    DICE,
    DRAIN,
    FINISH,
    FLAGS,
    FOR_PYTHON,
    HANDED,
    HEAD_ROOM,
    IN_AT,
    INFER_NS,
    INFLIGHT,
    INPUT_NS,
    JOB,
    LAST_MS,
    LOST,
    MADE_A_JOB,
    MODE,
    MODELS_AT,
    MOST_INFLIGHT,
    NEEDED,
    OTHER_INFLIGHT,
    OUT_AT,
    OUT_BASE,
    OUT_BYTES,
    OUTPUT_NS,
    PIECES,
    PLAN_SLOTS,
    PLANS_AT,
    REQUEST,
    SENDING,
    SERIAL,
    STATE,
    SUCCESS_NS,
    SUCCESSES,
    TABLE_COUNT_WORDS,
    shared_at,
)
from tierstore.kernels.sysio import (
    allocate,
    monotonic_ns,
    move_bytes,
    release,
    same_bytes,
    write,
)

_CLOSE = np.frombuffer(b"connection: close\r\n", np.uint8)

# --- requests


@nb.njit
def is_allowed(me, at, found):  # type: ignore[no-untyped-def]
    """Whether the headers Host and Authorization of the request at `at` have passed the check of access before.

    Requests for rows have a table of their own: what fronts may ask, not everybody may who may look up. A table has a number, and so many times (address, bytes) of a Host and of an Authorization; one of no bytes
    stands for any. What is secret is compared in a time that does not depend on it.
    """
    which = ALLOWED_FRONTS_AT if found[httphead.KIND] == httphead.ROWS else ALLOWED_AT
    pairs = acquire_i64(shared_at(me, which))
    host, host_bytes = at + found[httphead.HOST_AT], found[httphead.HOST_BYTES]
    token, token_bytes = at + found[httphead.AUTHORIZATION_AT], found[httphead.AUTHORIZATION_BYTES]
    for i in range(nb.int64(load_u64(pairs, 0))):
        pair = pairs + 8 * (1 + 4 * i)
        if nb.int64(load_u64(pair, 1)) != host_bytes or same_bytes(nb.int64(load_u64(pair, 0)), host, host_bytes) == 0:
            continue
        expected = nb.int64(load_u64(pair, 3))
        if expected == 0:
            return True
        if expected == token_bytes:
            there = nb.int64(load_u64(pair, 2))
            other = nb.uint8(0)
            for k in range(expected):
                other |= load_u8(there, k) ^ load_u8(token, k)
            if other == 0:
                return True
    return False


@nb.njit
def roll(me):  # type: ignore[no-untyped-def]
    """32 random bits (xorshift64, Marsaglia 2003)."""
    x = nb.uint64(me.lines[me.number, DICE])
    x ^= x << nb.uint64(13)
    x ^= x >> nb.uint64(7)
    x ^= x << nb.uint64(17)
    me.lines[me.number, DICE] = nb.int64(x)
    return nb.int64(x >> nb.uint64(32))


@nb.njit
def count(me, variant, began, planned, ran, sent):  # type: ignore[no-untyped-def]
    at = me.counts + 8 * COUNT_WORDS * lookupplan.word(variant, lookupplan.COUNTS)
    took = sent - began
    bucket, beyond = 0, BOUNDS.size
    while bucket < beyond:
        middle = (bucket + beyond) >> 1
        if took > BOUNDS[middle]:
            bucket = middle + 1
        else:
            beyond = middle
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
def make_job(me, fd, variant, view, began, planned):  # type: ignore[no-untyped-def]
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
    add_at(shared_at(me, INFLIGHT), head + data)
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
def submit(me, fd):  # type: ignore[no-untyped-def]
    """Give a connection's job to the readers. Its request stays where it is until they are done."""
    row = me.conns[fd]
    number = row[JOB] - 1
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    store_u64(job, coldread.TAIL, nb.uint64(row[IN_AT] + lookupplan.word(job, coldread.TAIL)))
    at = me.date + 64
    store_u64(at, 0, nb.uint64(number))
    if write(me.job_outbox, at, 8) != 8:  # there is room for all of them
        store_u64(job, coldread.OUTCOME, nb.uint64(coldread.FOR_PYTHON))
        finish_job(me, number)


@nb.njit
def finish_job(me, number):  # type: ignore[no-untyped-def]
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
        count(me, variant, began, planned, now, now)
        me.lines[me.number, ANSWERS] += 1
    release_i64(job + 8 * coldread.ANNOUNCED, 0)
    me.free_jobs[0] += 1
    me.free_jobs[me.free_jobs[0]] = number
    row[JOB] = 0
    if not answered:
        release(block)
        add_at(shared_at(me, INFLIGHT), -size)
        me.lines[me.number, HANDED] += 1
        if row[LOST] != 0 or not notify(me, REQUEST, fd, row[SERIAL], row[IN_AT], row[NEEDED]):
            end(me, fd, True)
        return -1
    row[OUT_BASE], row[OUT_AT], row[OUT_BYTES], row[PIECES], row[STATE] = block, block, size, 0, SENDING
    if row[LOST] != 0:
        end(me, fd, True)
        return -1
    set_send_deadline(me, fd, size)
    return fd


@nb.njit
def _add_close(variant, head):  # type: ignore[no-untyped-def]
    """Add the header that ends a connection to the `head` of an answer, behind its date. What is before it moves forward."""
    before = lookupplan.word(variant, lookupplan.DATE_AT) + DATE_BYTES + 2
    move_bytes(head - _CLOSE.size, head, before)
    for i in range(_CLOSE.size):
        store_u8(head - _CLOSE.size + before, i, _CLOSE[i])


@nb.njit
def may_answer(me, fd, at, began):  # type: ignore[no-untyped-def]
    """Whether the request at `at`, whose head is in `found`, may be answered here, as far as its head and the time say."""
    found = me.found
    if found[httphead.UNUSUAL] & ~httphead.ROUTED != 0 or me.shared[MODE] >= FINISH:
        return False
    timeout_ns = found[httphead.TIMEOUT_MS] * 1_000_000
    if timeout_ns > 0 and me.conns[fd, BEGAN_NS] > 0 and began - me.conns[fd, BEGAN_NS] >= timeout_ns:
        return False
    return is_allowed(me, at, found)


@nb.njit
def _has_room(me, size):  # type: ignore[no-untyped-def]
    """Whether so many bytes more may be held."""
    held = acquire_i64(shared_at(me, INFLIGHT)) + acquire_i64(shared_at(me, OTHER_INFLIGHT))
    return held + size <= me.limits[MOST_INFLIGHT]


@nb.njit
def send_answer(me, fd, variant, closing, data):  # type: ignore[no-untyped-def]
    """Send the `data` bytes of an answer, behind its head, which is written before them."""
    before = lookupplan.word(variant, lookupplan.HEAD_BYTES)
    target = me.answer + HEAD_ROOM - before
    lookupplan.copy_head(variant, me.date, target)
    if me.found[httphead.KIND] == httphead.ROWS:
        front_rows.write_digits(target + lookupplan.word(variant, front_rows.DIGITS_AT), data)
    if closing:
        _add_close(variant, target)
        target -= _CLOSE.size
        before += _CLOSE.size
        me.conns[fd, FLAGS] |= CLOSES
    me.lines[me.number, ANSWERS] += 1
    send_first(me, fd, target, before + data)


@nb.njit
def find_plan(me, at, text, text_bytes, tail_bytes):  # type: ignore[no-untyped-def]
    """(plan, what its model serves) of the request at `at`, whose head is in `found`; the second is 0 where there is none."""
    plan = lookupplan.find_plan(
        acquire_i64(shared_at(me, PLANS_AT)), me.shared[PLAN_SLOTS], at + me.found[httphead.PATH_AT],
        me.found[httphead.PATH_BYTES], text, text_bytes, tail_bytes,
    )  # fmt: skip
    if plan == 0:
        return 0, 0
    return plan, acquire_i64(acquire_i64(shared_at(me, MODELS_AT)) + 8 * lookupplan.word(plan, lookupplan.MODEL))


@nb.njit
def is_routed(found, served):  # type: ignore[no-untyped-def]
    """Whether the request's id says who answers: it has one, and there is a canary."""
    return found[httphead.UNUSUAL] & httphead.ROUTED != 0 and lookupplan.word(served, lookupplan.CANARY) != 0


@nb.njit
def answer(me, fd, at, whole, last, began):  # type: ignore[no-untyped-def]
    """Answer the look-up of `whole` bytes at `at`, whose head is in `found`, if a plan is known. `last`: nothing came behind it.

    Returns ANSWERED; MADE_A_JOB where rows must be read, then the connection's row has its number; or else nothing was
    done, and the request is one FOR_PYTHON.
    """
    found = me.found
    head = found[httphead.HEAD_BYTES]
    text_bytes = found[httphead.JSON_BYTES]
    tail_bytes = found[httphead.BODY_BYTES] - text_bytes
    if text_bytes <= 0 or tail_bytes < 0 or not may_answer(me, fd, at, began):
        return FOR_PYTHON
    plan, served = find_plan(me, at, at + head, text_bytes, tail_bytes)
    if served == 0 or is_routed(found, served):
        return FOR_PYTHON
    variant, view = lookupplan.choose(plan, served, roll(me))
    if variant == 0:
        return FOR_PYTHON
    data = lookupplan.word(variant, lookupplan.ANSWER_BYTES)
    if not _has_room(me, data + whole):
        return FOR_PYTHON
    planned = monotonic_ns()
    tail = at + head + text_bytes
    came = call_at(me.run, variant, view, tail, me.answer + HEAD_ROOM, me.states, me.scratch)
    closing = last and me.shared[MODE] == DRAIN
    if came == lookupplan.COLD and not closing:
        return make_job(me, fd, variant, view, began, planned)
    if came != lookupplan.ANSWERED:
        return FOR_PYTHON
    ran = monotonic_ns()
    store_u64(plan, lookupplan.LAST_USED, nb.uint64(began))
    lookupplan.count_keys(variant, tail, me.states, me.table_counts, TABLE_COUNT_WORDS)
    count(me, variant, began, planned, ran, monotonic_ns())  # before it leaves: who has the answer finds it counted
    send_answer(me, fd, variant, closing, data)
    return ANSWERED


@nb.njit
def answer_rows(me, fd, at, whole, last, began):  # type: ignore[no-untyped-def]
    """As `answer`, of a front's request for rows (`front_rows.py`). Where memory lacks one, it is FOR_PYTHON."""
    found = me.found
    body, size = at + found[httphead.HEAD_BYTES], found[httphead.BODY_BYTES]
    n = (size - front_rows.REQUEST_HEAD_BYTES) >> 3
    if n < 0 or size & 7 != 0 or n > lookupplan.MOST_KEYS or not may_answer(me, fd, at, began):
        return FOR_PYTHON
    plan, served = find_plan(me, at, body, front_rows.LINE_BYTES, front_rows.ANY_SIZE)
    if served == 0:
        return FOR_PYTHON
    variant, view = lookupplan.choose(plan, served, 0)
    if variant == 0:
        return FOR_PYTHON
    table = view + 8 * (lookupplan.VIEW_WORDS + lookupplan.TABLE_WORDS * lookupplan.word(variant, front_rows.TABLE))
    room = front_rows.rows_begin(n) + n * lookupplan.word(table, lookupplan.ROW_BYTES)
    if room > lookupplan.MOST_WORK_BYTES or not _has_room(me, room + whole):
        return FOR_PYTHON
    planned = monotonic_ns()
    data = call_at(me.run_rows, variant, view, body, size, me.answer + HEAD_ROOM, me.scratch)
    if data == front_rows.CANNOT:
        return FOR_PYTHON
    ran = monotonic_ns()
    store_u64(plan, lookupplan.LAST_USED, nb.uint64(began))
    counts = me.table_counts + 8 * TABLE_COUNT_WORDS * lookupplan.word(variant, front_rows.TABLE_COUNTS)
    front_rows.count_codes(n, me.scratch, counts)
    count(me, variant, began, planned, ran, monotonic_ns())
    send_answer(me, fd, variant, last and me.shared[MODE] == DRAIN, data)
    return ANSWERED


@nb.njit
def drop_job(me, fd):  # type: ignore[no-untyped-def]
    """Take a job back that no reader was given: its request cannot be kept."""
    row = me.conns[fd]
    number = row[JOB] - 1
    row[JOB] = 0
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    size = lookupplan.word(job, coldread.HEAD_BYTES) + lookupplan.word(job, coldread.DATA_BYTES)
    release(lookupplan.word(job, coldread.BLOCK))
    add_at(shared_at(me, INFLIGHT), -size)
    release_i64(job + 8 * coldread.ANNOUNCED, 0)
    me.free_jobs[0] += 1
    me.free_jobs[me.free_jobs[0]] = number
