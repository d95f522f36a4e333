"""Begins predictions in a reactor: it looks the rows up into a block, on which a thread of Python runs the graph. See `loop.py`.

The block has, in order: the head of the answer, room for the scores, what `scoring.write_table` writes, the rows, and what cold reads need where rows
are left to them. For a table with a device tier it has the keys in place of rows, and the thread looks them up. The thread reads its inputs from the
block, writes the scores into it, and gives the job back as a cold reader does; if it cannot, Python answers the request. Protocols differ in the head
and in the bytes between scores, which the caller writes.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import add_at, copy_bytes, relaxed_i64
from tierstore.kernels.raw import call_at
from tierstore.kernels.records import place
from tierstore.kernels.sysio import allocate, monotonic_ns, release
from tierstore.lookup import by_plan, cold_reads, plans, scoring
from tierstore.reactor.connections import has_room
from tierstore.reactor.jobs import acquire_job, as_json_bytes, give_away, keep, kept_bytes, read_cached
from tierstore.reactor.layout import (
    BUSY,
    FULL,
    HEAD_ROOM,
    KEPT_JOBS,
    MADE_A_JOB,
    PREDICTION,
    ROWS_ON_DISK,
    TABLE_COUNT_WORDS,
    VALUES,
    connection_at,
)
from tierstore.wire import request_record


@nb.njit
def expected_ns(me):
    """How long a prediction that comes now would wait for a thread, by the rule of `Waits.expected_s`; or FULL."""
    queued, threads = (
        relaxed_i64(place(me.shared, "queued")) + relaxed_i64(place(me.shared, "other_queued")),
        me.limits.pool_threads,
    )
    if queued >= threads + me.limits.pool_queue:
        return nb.int64(FULL)
    if queued < threads:
        return nb.int64(0)
    return (2 * (queued - threads) + 1) * relaxed_i64(place(me.shared, "call_ns")) // (2 * threads)


@nb.njit
def bind_scores(me, variant):
    """Check the sizes of the prediction whose run is at `me.bound`. Returns the bytes of the answer's data, or -1: Python must check."""
    run = me.bound
    data = scoring.bind(variant, me.record, me.values)
    work = run.work_bytes + run.answer_bytes
    if variant.scoring.half != 0:
        work += run.answer_bytes
    return data if data >= 0 and data + work <= me.limits.most_answer else nb.int64(-1)


@nb.njit
def make_prediction(me, fd, plan, variant, view, tail, short, begin, data, of_request, since, timeout_ns, began):
    """Begin the prediction whose run is at `me.bound`. The bytes of its answer before its `data` bytes are at `begin`, HEAD_ROOM at most.

    `of_request`: bytes of the request that are not counted as held; `since`: when its first bytes came, 0: all came at once; `timeout_ns`: its time from
    then on, or 0. If memory lacks rows, or it is not `short`, cold readers complete the block before the graph runs. Returns (MADE_A_JOB, the job's
    number), with the job not handed out yet; or (a reason, -1), with nothing done.
    """
    if me.prediction_outbox < 0:
        return PREDICTION, nb.int64(-1)
    if me.free_jobs.count <= KEPT_JOBS:
        return BUSY, nb.int64(-1)
    wanted, run = variant.scoring, me.bound
    apart, keys = wanted.apart != 0, run.keys
    answered = nb.int64(0) if apart else run.answer_bytes
    head = me.answer + HEAD_ROOM - begin
    table_bytes, run_bytes = scoring.table_bytes(wanted, me.record), by_plan.run_bytes(run)
    more = kept_bytes(me, variant)
    size = head + data + 63 + table_bytes + answered + 7 + run_bytes + 9 * keys + 7 + more
    held = size + as_json_bytes(me, variant)
    if not has_room(me, held + of_request):
        return BUSY, nb.int64(-1)
    block = allocate(size)
    if block == 0:
        return BUSY, nb.int64(-1)
    table = (block + head + data + 63) & ~63
    rows, planned = table + table_bytes, monotonic_ns()
    came = by_plan.ANSWERED if apart else by_plan.COLD
    if short and not apart:
        came = call_at(me.run, run, view, tail, rows, me.states, me.scratch)
        if came == by_plan.COLD:
            came = read_cached(me, view, tail, rows)
    cold = came == by_plan.COLD
    if not cold and came != by_plan.ANSWERED:
        release(block)
        return ROWS_ON_DISK if came == by_plan.ELSEWHERE else VALUES, nb.int64(-1)
    if not cold and not apart:
        by_plan.count_keys(run, tail, me.states, me.table_counts, TABLE_COUNT_WORDS)
    copy_bytes(block, begin, head)
    scoring.write_table(wanted, me.record, run, tail, me.values, rows, block + head, table)
    add_at(place(me.shared, "inflight"), held)
    number, job = acquire_job(me)
    arrived = since if since > 0 else began
    job.fd, job.serial, job.reactor, job.variant = fd, connection_at(me.conns, fd).serial, me.number, variant
    job.block, job.head_bytes, job.data_bytes, job.held_bytes = block, head, data, held
    job.table, job.keys, job.scoring = table, keys, wanted.number
    job.rows, job.cold, job.of_view = rows, 1 if cold else 0, view
    keep(me, variant, job, block + ((size - more) & ~7))
    if cold:
        kept = (rows + answered + 7) & ~7
        job.run, job.states, job.probed = kept, kept + run_bytes + 8 * keys, 1 if short else 0
        copy_bytes(kept, run, run_bytes)
        copy_bytes(kept + run_bytes, me.codes, 8 * keys if short else 0)
        copy_bytes(job.states, me.states, keys)
        plans.run_at(kept).codes_at = kept + run_bytes
    job.began_ns, job.planned_ns = began, planned
    job.arrived_ns, job.deadline_ns = arrived, arrived + timeout_ns if timeout_ns > 0 else 0
    job.outcome, job.queued_ns = cold_reads.FOR_PYTHON, 0  # `queue` sets the time
    give_away(me, plan, number)
    return MADE_A_JOB, number


@nb.njit
def timeout_of(me):
    """The earliest timeout, in ns, of the request whose head is in `found` and whose description is in the record; 0: none."""
    timeout = me.found.timeout_ms * 1_000_000
    own = request_record.row_at(me.record, 0).timeout_us * 1000
    return own if own > 0 and (timeout == 0 or own < timeout) else timeout
