"""What a reactor leaves to the readers of cold rows, and takes back from them; and how an answer is counted. See `reactor.py`.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import binding, coldread, lookupplan, plan_records, rates, reactor_access
from tierstore.kernels.atomics import add_at, copy_bytes, release_i64
from tierstore.kernels.reactor_connections import end, hold, notify, set_send_deadline
from tierstore.kernels.reactor_words import (
    BOUNDS,
    BUSY,
    CLOSES,
    HEAD_ROOM,
    MADE_A_JOB,
    PREDICTION,
    REQUEST,
    ROWS_ON_DISK,
    SENDING,
    TABLE_COUNT_WORDS,
    connection_at,
    version_counts_at,
)
from tierstore.kernels.records import place
from tierstore.kernels.sysio import allocate, monotonic_ns, release, write


@nb.njit
def count(me, variant, began, planned, ran, sent):  # type: ignore[no-untyped-def]
    at = version_counts_at(me.counts, variant.counts)
    took = sent - began
    bucket, beyond = 0, BOUNDS.size
    while bucket < beyond:
        middle = (bucket + beyond) >> 1
        if took > BOUNDS[middle]:
            bucket = middle + 1
        else:
            beyond = middle
    at.successes += 1
    at.success_ns += took
    at.input_ns += planned - began
    at.infer_ns += ran - planned
    at.output_ns += sent - ran
    at.buckets[bucket] += 1
    at.last_ms = me.line.date_s * 1000


@nb.njit
def acquire_job(me):  # type: ignore[no-untyped-def]
    """(the number of a job that is free, the job). There is one."""
    me.free_jobs.count -= 1
    number = me.free_jobs.numbers[me.free_jobs.count]
    return number, coldread.job_at(me.jobs, number)


@nb.njit
def _free_job(me, number):  # type: ignore[no-untyped-def]
    me.free_jobs.numbers[me.free_jobs.count] = number
    me.free_jobs.count += 1


@nb.njit
def make_job(me, fd, plan, variant, view, closing, probed, began, planned):  # type: ignore[no-untyped-def]
    """Leave the request whose run is at `me.bound` to the readers, theirs once its bytes have their place.

    `probed`: memory has answered what it holds, and they add what is on disk; else they do all of it. Returns MADE_A_JOB or a reason.
    """
    if me.free_jobs.count == 0:
        return BUSY
    data, keys = me.bound.answer_bytes, me.bound.keys
    end = me.answer + HEAD_ROOM
    begin = binding.write_head(variant, me.record, me.values, data, closing, me.date, end)
    head, found = end - begin, me.found
    run_bytes = lookupplan.run_bytes(me.bound)
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
        plan_records.run_at(block + run).codes_at = block + codes
    add_at(place(me.shared, "inflight"), head + data)
    number, job = acquire_job(me)
    job.fd, job.serial, job.reactor = fd, connection_at(me.conns, fd).serial, me.number
    job.variant, job.of_view, job.run = variant, view, block + run
    job.block, job.head_bytes, job.data_bytes, job.held_bytes = block, head, data, head + data
    job.states, job.keys, job.tail = block + states, keys, found.head_bytes + found.json_bytes
    job.probed, job.scoring, job.began_ns, job.planned_ns = 1 if probed else 0, 0, began, planned
    give_away(me, fd, plan, number, closing)
    return MADE_A_JOB


@nb.njit
def give_away(me, fd, plan, number, closing):  # type: ignore[no-untyped-def]
    """Note in a job who asks and what holds its view, and in the connection which job it waits for."""
    found, job = me.found, coldread.job_at(me.jobs, number)
    job.caller_rates = reactor_access.bucket_of(found.caller)
    job.model_rates = plan.rates_at
    job.body_bytes = found.body_bytes
    release_i64(place(job, "announced"), me.line.announced)  # before the reactor's own is cleared
    connection_at(me.conns, fd).job = number + 1
    if closing:
        connection_at(me.conns, fd).flags |= CLOSES


@nb.njit
def submit(me, fd):  # type: ignore[no-untyped-def]
    """Give a connection's job to those who do it. Its request stays where it is until they are done."""
    row = connection_at(me.conns, fd)
    number = row.job - 1
    job = coldread.job_at(me.jobs, number)
    job.tail = row.in_at + job.tail
    message = me.message
    message.what = number
    predicts = job.scoring != 0
    if predicts:
        add_at(place(me.shared, "queued"), 1)
    if write(me.prediction_outbox if predicts else me.job_outbox, message, 8) != 8:  # there is room for all of them
        if predicts:
            add_at(place(me.shared, "queued"), -1)
        job.outcome = coldread.FOR_PYTHON
        finish_job(me, number)


@nb.njit
def _give_back(job):  # type: ignore[no-untyped-def]
    """Give back what a request has drawn of its rates: Python charges it."""
    keys = job.keys
    size, began = job.body_bytes, job.began_ns
    rates.draw_at(job.caller_rates, began, -1, -keys, -size)
    rates.draw_at(job.model_rates, began, -1, -keys, -size)


@nb.njit
def finish_job(me, number):  # type: ignore[no-untyped-def]
    """A job that is done. Returns its connection if there is an answer to be sent, or -1."""
    job = coldread.job_at(me.jobs, number)
    fd, variant = job.fd, job.variant
    row = connection_at(me.conns, fd)
    block, size = (
        job.block,
        job.head_bytes + job.data_bytes,
    )
    answered = job.outcome == coldread.DONE
    predicted, held = job.scoring != 0, job.held_bytes
    if answered and not predicted:  # of a prediction the keys are counted, and Python counts the answer
        began, planned = job.began_ns, job.planned_ns
        tail, states = job.tail, job.states
        run = job.run
        lookupplan.count_keys(run, tail, states, me.table_counts, TABLE_COUNT_WORDS)
        now = monotonic_ns()
        count(me, variant, began, planned, now, now)
    if answered:
        me.line.answers += 1
    else:
        _give_back(job)
    release_i64(place(job, "announced"), 0)
    _free_job(me, number)
    row.job = 0
    if not answered:
        hold(me, fd, 0)  # Python counts it
        release(block)
        add_at(place(me.shared, "inflight"), -held)
        why = PREDICTION if predicted else ROWS_ON_DISK
        me.line.reasons[why] += 1
        if row.lost != 0 or not notify(me, REQUEST, fd, row.serial | (why << 32), row.in_at, row.needed):
            end(me, fd, True)
        return -1
    add_at(place(me.shared, "inflight"), size - held)
    row.out_base, row.out_at, row.out_bytes, row.pieces, row.state = block, block, size, 0, SENDING
    if row.lost != 0:
        end(me, fd, True)
        return -1
    set_send_deadline(me, fd, size)
    return fd


@nb.njit
def drop_job(me, fd):  # type: ignore[no-untyped-def]
    """Take a job back that nobody was given: its request cannot be kept."""
    row = connection_at(me.conns, fd)
    number = row.job - 1
    row.job = 0
    job = coldread.job_at(me.jobs, number)
    release(job.block)
    add_at(place(me.shared, "inflight"), -job.held_bytes)
    release_i64(place(job, "announced"), 0)
    _free_job(me, number)
