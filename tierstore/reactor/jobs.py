"""Jobs: requests that a reactor gives to the readers of cold rows and takes back; and how an answer is counted. See `loop.py`.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import rates
from tierstore.kernels.atomics import add_at, copy_bytes, release_i64
from tierstore.kernels.raw import call_at
from tierstore.kernels.records import place
from tierstore.kernels.sysio import allocate, monotonic_ns, release, write
from tierstore.lookup import answer_values, binding, by_plan, cold_reads, json_answer, plans
from tierstore.reactor.connections import end, has_room, hold, notify, set_send_deadline
from tierstore.reactor.layout import (
    BOUNDS,
    CLOSES,
    HEAD_ROOM,
    PREDICTION,
    READ_HERE,
    REQUEST,
    ROWS_ON_DISK,
    SENDING,
    TABLE_COUNT_WORDS,
    connection_at,
    version_counts_at,
)
from tierstore.wire import callers


@nb.njit
def count(me, variant, began, planned, ran, sent):
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
def acquire_job(me):
    """(number, job) of a free job. The caller knows that there is one."""
    me.free_jobs.count -= 1
    number = me.free_jobs.numbers[me.free_jobs.count]
    job = cold_reads.job_at(me.jobs, number)
    job.stream = job.request = job.request_bytes = job.lost = job.own_data = job.values = job.text_at = 0
    return number, job


@nb.njit
def _free_job(me, number):
    me.free_jobs.numbers[me.free_jobs.count] = number
    me.free_jobs.count += 1


@nb.njit
def read_cached(me, view, tail, data):
    """Read rows that memory lacks for the run at `me.bound` into `data`, if they are few and in the page cache.

    Returns `by_plan.ANSWERED`, COLD, or ELSEWHERE, where the compiled readers cannot reach some rows.
    """
    if by_plan.pending(me.bound, me.states) > READ_HERE:
        return by_plan.COLD
    came = call_at(me.finish, me.readers, me.bound, view, tail, data, me.states)
    if came == cold_reads.DONE:
        return by_plan.ANSWERED
    return by_plan.COLD if came == cold_reads.LEFT else by_plan.ELSEWHERE


@nb.njit
def _values_bytes(variant):
    return answer_values.values_bytes(variant.outputs if variant.scoring == 0 else variant.scoring.scores)


@nb.njit
def kept_bytes(me, variant):
    """The bytes of what `keep` keeps, from a multiple of 8 on."""
    size = nb.int64(0)
    if me.record.decoded != 0:
        size += (me.record.data_bytes + 7) & ~7
    if variant.as_json != 0:
        size += _values_bytes(variant) + max(me.record.id_bytes, nb.int64(0))
    return size


@nb.njit
def as_json_bytes(me, variant):
    """The most bytes that an answer with the values at `me.values` takes once more as JSON."""
    return json_answer.most_bytes(variant, me.values) if variant.as_json != 0 else nb.int64(0)


@nb.njit
def keep(me, variant, job, at):
    """Keep for a job what lies in the reactor's own memory: data that were written apart, and what an answer in JSON needs."""
    record = me.record
    if record.decoded != 0:
        job.own_data = at
        copy_bytes(at, me.data, record.data_bytes)
        at += (record.data_bytes + 7) & ~7
    if variant.as_json != 0:
        size = _values_bytes(variant)
        job.values, job.id_at, job.id_bytes = at, at + size, record.id_bytes
        copy_bytes(at, me.values, size)
        if record.id_bytes > 0:
            copy_bytes(at + size, record.id_at, record.id_bytes)


@nb.njit
def make_job(me, fd, plan, variant, view, begin, probed, began, planned):
    """Make a job for the readers from the run at `me.bound`. The bytes of the answer before its data are at `begin`.

    `probed`: memory has answered what it holds, and readers add what is on disk; otherwise readers do all look-ups. Returns the job's number, or -1:
    there is no room. The caller sets the job's `tail`.
    """
    if me.free_jobs.count == 0:
        return nb.int64(-1)
    data, keys = me.bound.answer_bytes, me.bound.keys
    head = me.answer + HEAD_ROOM - begin
    run_bytes = by_plan.run_bytes(me.bound)
    states = head + data
    run = (states + keys + 7) & ~7
    codes = run + run_bytes
    # an answer in JSON may be long though its run, which may have codes, is short
    keeps_codes = probed or (variant.as_json != 0 and keys <= by_plan.MOST_KEYS)
    more, kept = codes + (8 * keys if keeps_codes else 0), kept_bytes(me, variant)
    held = head + data + kept + as_json_bytes(me, variant)
    if held > head + data and not has_room(me, held):
        return nb.int64(-1)
    block = allocate(more + kept)
    if block == 0:
        return nb.int64(-1)
    copy_bytes(block, begin, head + (data if probed else 0))
    copy_bytes(block + run, me.bound, run_bytes)
    if probed:
        copy_bytes(block + states, me.states, keys)
    copy_bytes(block + codes, me.codes, more - codes)
    plans.run_at(block + run).codes_at = block + codes
    add_at(place(me.shared, "inflight"), held)
    number, job = acquire_job(me)
    keep(me, variant, job, block + more)
    job.fd, job.serial, job.reactor = fd, connection_at(me.conns, fd).serial, me.number
    job.variant, job.of_view, job.run = variant, view, block + run
    job.block, job.head_bytes, job.data_bytes, job.held_bytes = block, head, data, held
    job.rows, job.cold = block + head, 1
    job.states, job.keys = block + states, keys
    job.probed, job.scoring, job.began_ns, job.planned_ns = 1 if probed else 0, 0, began, planned
    give_away(me, plan, number)
    return number


@nb.njit
def give_away(me, plan, number):
    """Note a job's caller, and what keeps its view alive."""
    found, job = me.found, cold_reads.job_at(me.jobs, number)
    job.caller_rates = callers.bucket_of(found.caller)
    job.model_rates = plan.rates_at
    job.body_bytes = found.body_bytes
    release_i64(place(job, "announced"), me.line.announced)  # before the reactor clears its own announcement


@nb.njit
def await_job(me, fd, number, closing):
    """Note in an HTTP/1.1 connection which job it waits for. The job is handed out once the request's bytes have their place."""
    connection_at(me.conns, fd).job = number + 1
    if closing:
        connection_at(me.conns, fd).flags |= CLOSES


@nb.njit
def hand_out(me, number):
    """Give a job to the readers, or to the threads that run graphs. False if neither took it: the job is over, and Python gets the request."""
    job, message = cold_reads.job_at(me.jobs, number), me.message
    message.what = number
    if job.cold == 0:
        given = cold_reads.queue(job, number, me.prediction_outbox, place(me.shared, "queued"))
    else:
        given = write(me.job_outbox, message, 8) == 8
    if not given:  # their pipe has room for all jobs
        job.outcome = cold_reads.FOR_PYTHON
    return given


@nb.njit
def submit(me, fd):
    """Hand out a connection's job. Its request stays in place until the job is done."""
    row = connection_at(me.conns, fd)
    number = row.job - 1
    job = cold_reads.job_at(me.jobs, number)
    job.tail = job.own_data if job.own_data != 0 else row.in_at + job.tail
    if not hand_out(me, number):
        finish_job(me, number)


@nb.njit
def _give_back(job):
    """Give back what a request was charged, because Python charges it again."""
    keys = job.keys
    size, began = job.body_bytes, job.began_ns
    rates.draw_at(job.caller_rates, began, -1, -keys, -size)
    rates.draw_at(job.model_rates, began, -1, -keys, -size)


@nb.njit
def end_job(me, number):
    """Count a finished job, or give back its charge; free its number but not its memory. Returns whether it has an answer."""
    job = cold_reads.job_at(me.jobs, number)
    answered = job.outcome == cold_reads.DONE
    if answered and job.cold != 0:
        by_plan.count_keys(job.run, job.tail, job.states, me.table_counts, TABLE_COUNT_WORDS)
    if answered and job.scoring == 0:  # Python counts the answer of a prediction
        now = monotonic_ns()
        count(me, job.variant, job.began_ns, job.planned_ns, now, now)
    if answered:
        me.line.answers += 1
    else:
        _give_back(job)
    release_i64(place(job, "announced"), 0)
    _free_job(me, number)
    return answered


@nb.njit
def reason_of(job):
    """The reason why Python must answer the request of a job without an answer."""
    return PREDICTION if job.outcome == cold_reads.RETURNED else ROWS_ON_DISK


@nb.njit
def _text_of(me, job, closing):
    """(the block of a job's answer in JSON, where the answer begins in it, its bytes), and free the job's own block."""
    release(job.block)
    text = job.text_at + json_answer.HEAD_ROOM
    begin = binding.head_before(text, job.text_bytes, binding.NONE, closing, me.date)
    return job.text_at, begin, text + job.text_bytes - begin


@nb.njit
def finish_job(me, number):
    """Take back a finished HTTP/1.1 job. Returns its connection if there is an answer to send, or -1."""
    job = cold_reads.job_at(me.jobs, number)
    unwritten = job.outcome == cold_reads.DONE and job.values != 0 and job.text_at == 0
    if unwritten and not cold_reads.write_answer(job, me.write):  # before the job lets go of its variant
        job.outcome = cold_reads.FOR_PYTHON
    answered = end_job(me, number)
    fd, block, size, held = job.fd, job.block, job.head_bytes + job.data_bytes, job.held_bytes
    row, begin = connection_at(me.conns, fd), block
    row.job = 0
    if not answered:
        hold(me, fd, 0)  # Python counts it
        release(block)
        add_at(place(me.shared, "inflight"), -held)
        why = reason_of(job)
        me.line.reasons[why] += 1
        if row.lost != 0 or not notify(me, REQUEST, fd, row.serial | (why << 32), row.in_at, row.needed):
            end(me, fd, True)
        return -1
    if job.values != 0:
        block, begin, size = _text_of(me, job, row.flags & CLOSES != 0)
    add_at(place(me.shared, "inflight"), begin + size - block - held)
    row.out_base, row.out_at, row.out_bytes, row.pieces, row.state = block, begin, size, 0, SENDING
    if row.lost != 0:
        end(me, fd, True)
        return -1
    set_send_deadline(me, fd, size)
    return fd


@nb.njit
def drop_job(me, number):
    """Take back a job that was not handed out, because its request cannot be kept."""
    job = cold_reads.job_at(me.jobs, number)
    release(job.block)
    add_at(place(me.shared, "inflight"), -job.held_bytes)
    release_i64(place(job, "announced"), 0)
    _free_job(me, number)
