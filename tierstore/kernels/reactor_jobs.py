"""What a reactor leaves to the readers of cold rows, and takes back from them; and how an answer is counted. See `reactor.py`.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import binding, coldread, httphead, lookupplan, rates, reactor_access
from tierstore.kernels.atomics import add_at, copy_bytes, release_i64
from tierstore.kernels.raw import load_u64, store_u64
from tierstore.kernels.reactor_connections import end, hold, notify, set_send_deadline
from tierstore.kernels.reactor_words import (
    ANNOUNCED,
    ANSWERS,
    BOUNDS,
    BUCKETS_FROM,
    BUSY,
    CLOSES,
    COUNT_WORDS,
    DATE_S,
    FLAGS,
    HEAD_ROOM,
    IN_AT,
    INFER_NS,
    INFLIGHT,
    INPUT_NS,
    JOB,
    LAST_MS,
    LOST,
    MADE_A_JOB,
    NEEDED,
    OUT_AT,
    OUT_BASE,
    OUT_BYTES,
    OUTPUT_NS,
    PIECES,
    PREDICTION,
    QUEUED,
    REASONS_FROM,
    REQUEST,
    ROWS_ON_DISK,
    SENDING,
    SERIAL,
    STATE,
    SUCCESS_NS,
    SUCCESSES,
    TABLE_COUNT_WORDS,
    shared_at,
)
from tierstore.kernels.sysio import allocate, monotonic_ns, release, write


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
def make_job(me, fd, plan, variant, view, closing, probed, began, planned):  # type: ignore[no-untyped-def]
    """Leave the request whose run is at `me.bound` to the readers, theirs once its bytes have their place.

    `probed`: memory has answered what it holds, and they add what is on disk; else they do all of it. Returns MADE_A_JOB or a reason.
    """
    if me.free_jobs[0] == 0:
        return BUSY
    data, keys = lookupplan.word(me.bound, lookupplan.ANSWER_BYTES), lookupplan.word(me.bound, lookupplan.KEYS)
    end = me.answer + HEAD_ROOM
    begin = binding.write_head(variant, me.record, me.values, data, closing, me.date, end)
    head, found = end - begin, me.found
    run_bytes = 8 * (lookupplan.RUN_WORDS + lookupplan.CALL_WORDS * lookupplan.word(me.bound, lookupplan.CALLS))
    states = head + data
    run = (states + keys + 7) & ~7
    codes = run + run_bytes
    block = allocate(codes + (8 * keys if probed else 0))
    if block == 0:
        return BUSY
    copy_bytes(block, begin, head + (data if probed else 0))
    copy_bytes(block + run, me.bound, run_bytes)
    if probed:
        copy_bytes(block + states, me.states, keys)
        copy_bytes(block + codes, me.codes, 8 * keys)
        store_u64(block + run, lookupplan.CODES_AT, nb.uint64(block + codes))
    add_at(shared_at(me, INFLIGHT), head + data)
    number = me.free_jobs[me.free_jobs[0]]
    me.free_jobs[0] -= 1
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    for which, value in (
        (coldread.FD, fd), (coldread.SERIAL, me.conns[fd, SERIAL]), (coldread.VARIANT, variant), (coldread.VIEW, view),
        (coldread.BLOCK, block), (coldread.HEAD_BYTES, head), (coldread.DATA_BYTES, data), (coldread.STATES, block + states),
        (coldread.RUN, block + run), (coldread.PROBED, 1 if probed else 0),
        (coldread.REACTOR, me.number), (coldread.BEGAN_NS, began), (coldread.PLANNED_NS, planned),
        (coldread.TAIL, found[httphead.HEAD_BYTES] + found[httphead.JSON_BYTES]),
        (coldread.KEYS, keys), (coldread.HELD_BYTES, head + data), (coldread.SCORING, 0),
    ):  # fmt: skip
        store_u64(job, which, nb.uint64(value))
    give_away(me, fd, plan, number, closing)
    return MADE_A_JOB


@nb.njit
def give_away(me, fd, plan, number, closing):  # type: ignore[no-untyped-def]
    """Note in a job who asks and what holds its view, and in the connection which job it waits for."""
    found, job = me.found, me.jobs + 8 * coldread.JOB_WORDS * number
    store_u64(job, coldread.CALLER_RATES, nb.uint64(reactor_access.bucket_of(found[httphead.CALLER])))
    store_u64(job, coldread.MODEL_RATES, nb.uint64(lookupplan.word(plan, lookupplan.RATES_AT)))
    store_u64(job, coldread.BODY_BYTES, nb.uint64(found[httphead.BODY_BYTES]))
    release_i64(job + 8 * coldread.ANNOUNCED, me.lines[me.number, ANNOUNCED])  # before the reactor's own is cleared
    me.conns[fd, JOB] = number + 1
    if closing:
        me.conns[fd, FLAGS] |= CLOSES


@nb.njit
def submit(me, fd):  # type: ignore[no-untyped-def]
    """Give a connection's job to those who do it. Its request stays where it is until they are done."""
    row = me.conns[fd]
    number = row[JOB] - 1
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    store_u64(job, coldread.TAIL, nb.uint64(row[IN_AT] + lookupplan.word(job, coldread.TAIL)))
    at = me.date + 64
    store_u64(at, 0, nb.uint64(number))
    predicts = lookupplan.word(job, coldread.SCORING) != 0
    if predicts:
        add_at(shared_at(me, QUEUED), 1)
    if write(me.prediction_outbox if predicts else me.job_outbox, at, 8) != 8:  # there is room for all of them
        if predicts:
            add_at(shared_at(me, QUEUED), -1)
        store_u64(job, coldread.OUTCOME, nb.uint64(coldread.FOR_PYTHON))
        finish_job(me, number)


@nb.njit
def _give_back(job):  # type: ignore[no-untyped-def]
    """Give back what a request has drawn of its rates: Python charges it."""
    keys = lookupplan.word(job, coldread.KEYS)
    size, began = lookupplan.word(job, coldread.BODY_BYTES), lookupplan.word(job, coldread.BEGAN_NS)
    rates.draw_at(lookupplan.word(job, coldread.CALLER_RATES), began, -1, -keys, -size)
    rates.draw_at(lookupplan.word(job, coldread.MODEL_RATES), began, -1, -keys, -size)


@nb.njit
def finish_job(me, number):  # type: ignore[no-untyped-def]
    """A job that is done. Returns its connection if there is an answer to be sent, or -1."""
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    fd, variant = lookupplan.word(job, coldread.FD), lookupplan.word(job, coldread.VARIANT)
    row = me.conns[fd]
    block, size = (
        lookupplan.word(job, coldread.BLOCK),
        lookupplan.word(job, coldread.HEAD_BYTES) + lookupplan.word(job, coldread.DATA_BYTES),
    )
    answered = lookupplan.word(job, coldread.OUTCOME) == coldread.DONE
    predicted, held = lookupplan.word(job, coldread.SCORING) != 0, lookupplan.word(job, coldread.HELD_BYTES)
    if answered and not predicted:  # of a prediction the keys are counted, and Python counts the answer
        began, planned = lookupplan.word(job, coldread.BEGAN_NS), lookupplan.word(job, coldread.PLANNED_NS)
        tail, states = lookupplan.word(job, coldread.TAIL), lookupplan.word(job, coldread.STATES)
        run = lookupplan.word(job, coldread.RUN)
        lookupplan.count_keys(run, tail, states, me.table_counts, TABLE_COUNT_WORDS)
        now = monotonic_ns()
        count(me, variant, began, planned, now, now)
    if answered:
        me.lines[me.number, ANSWERS] += 1
    else:
        _give_back(job)
    release_i64(job + 8 * coldread.ANNOUNCED, 0)
    me.free_jobs[0] += 1
    me.free_jobs[me.free_jobs[0]] = number
    row[JOB] = 0
    if not answered:
        hold(me, fd, 0)  # Python counts it
        release(block)
        add_at(shared_at(me, INFLIGHT), -held)
        why = PREDICTION if predicted else ROWS_ON_DISK
        me.lines[me.number, REASONS_FROM + why] += 1
        if row[LOST] != 0 or not notify(me, REQUEST, fd, row[SERIAL] | (why << 32), row[IN_AT], row[NEEDED]):
            end(me, fd, True)
        return -1
    add_at(shared_at(me, INFLIGHT), size - held)
    row[OUT_BASE], row[OUT_AT], row[OUT_BYTES], row[PIECES], row[STATE] = block, block, size, 0, SENDING
    if row[LOST] != 0:
        end(me, fd, True)
        return -1
    set_send_deadline(me, fd, size)
    return fd


@nb.njit
def drop_job(me, fd):  # type: ignore[no-untyped-def]
    """Take a job back that nobody was given: its request cannot be kept."""
    row = me.conns[fd]
    number = row[JOB] - 1
    row[JOB] = 0
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    release(lookupplan.word(job, coldread.BLOCK))
    add_at(shared_at(me, INFLIGHT), -lookupplan.word(job, coldread.HELD_BYTES))
    release_i64(job + 8 * coldread.ANNOUNCED, 0)
    me.free_jobs[0] += 1
    me.free_jobs[me.free_jobs[0]] = number
