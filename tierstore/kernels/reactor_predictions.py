"""How a reactor begins a prediction: it looks all rows up into a block, and leaves the graph to a thread of Python. See `reactor.py`.

The block has the head of the answer, room for the scores behind it, and then what `scoring.write_table` writes, and the rows. The
thread reads its inputs there, writes the scores, and gives the job back as readers of cold rows do. Where it cannot, the
request is Python's.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import binding, coldread, httphead, lookupplan, request_record, scoring
from tierstore.kernels.atomics import add_at, copy_bytes, relaxed_i64
from tierstore.kernels.raw import call_at, store_u64
from tierstore.kernels.reactor_connections import has_room
from tierstore.kernels.reactor_jobs import give_away
from tierstore.kernels.reactor_words import (
    BEGAN_NS,
    BUSY,
    CALL_NS,
    FULL,
    HEAD_ROOM,
    HELD,
    INFLIGHT,
    KEPT_JOBS,
    MADE_A_JOB,
    MOST_ANSWER,
    OTHER_QUEUED,
    POOL_QUEUE,
    POOL_THREADS,
    PREDICTION,
    QUEUED,
    SERIAL,
    TABLE_COUNT_WORDS,
    VALUES,
    shared_at,
)
from tierstore.kernels.sysio import allocate, monotonic_ns, release


@nb.njit
def expected_ns(me):  # type: ignore[no-untyped-def]
    """How long a prediction that comes now would wait for a thread, as `Waits.expected_s` has it; or FULL."""
    queued, threads = (
        relaxed_i64(shared_at(me, QUEUED)) + relaxed_i64(shared_at(me, OTHER_QUEUED)),
        me.limits[POOL_THREADS],
    )
    if queued >= threads + me.limits[POOL_QUEUE]:
        return nb.int64(FULL)
    if queued < threads:
        return nb.int64(0)
    return (2 * (queued - threads) + 1) * relaxed_i64(shared_at(me, CALL_NS)) // (2 * threads)


@nb.njit
def make_prediction(me, fd, plan, variant, view, tail, closing, timeout_ns, began):  # type: ignore[no-untyped-def]
    """Begin the prediction whose run is at `me.bound`; `timeout_ns` is the time that it has from its first byte on, or 0.

    Returns MADE_A_JOB, then `reactor_jobs.submit` gives it to the threads; or a reason, and nothing was done.
    """
    if me.prediction_outbox < 0:
        return PREDICTION
    if me.free_jobs[0] <= KEPT_JOBS:
        return BUSY
    wanted, run = lookupplan.word(variant, binding.SCORING_AT), me.bound
    data = scoring.bind(wanted, me.record, me.values)
    answered, keys = lookupplan.word(run, lookupplan.ANSWER_BYTES), lookupplan.word(run, lookupplan.KEYS)
    work = lookupplan.word(run, lookupplan.WORK_BYTES) + answered
    if lookupplan.word(wanted, scoring.HALF) != 0:
        work += answered
    if data < 0 or data + work > me.limits[MOST_ANSWER]:
        return VALUES
    end = me.answer + HEAD_ROOM
    begin = binding.write_head(variant, me.record, me.values, data, closing, me.date, end)
    head = end - begin
    more = scoring.table_bytes(wanted, me.record)
    size = head + data + 63 + more + answered
    if not has_room(me, size + me.found[httphead.HEAD_BYTES] + me.found[httphead.BODY_BYTES] - me.conns[fd, HELD]):
        return BUSY
    block = allocate(size)
    if block == 0:
        return BUSY
    table = (block + head + data + 63) & ~63
    rows, planned = table + more, monotonic_ns()
    came = call_at(me.run, run, view, tail, rows, me.states, me.scratch)
    if came != lookupplan.ANSWERED:
        release(block)
        return PREDICTION if came == lookupplan.COLD else VALUES
    lookupplan.count_keys(run, tail, me.states, me.table_counts, TABLE_COUNT_WORDS)
    copy_bytes(block, begin, head)
    scoring.write_table(wanted, me.record, run, tail, me.values, rows, block + head, table)
    add_at(shared_at(me, INFLIGHT), size)
    number = me.free_jobs[me.free_jobs[0]]
    me.free_jobs[0] -= 1
    job = me.jobs + 8 * coldread.JOB_WORDS * number
    since = me.conns[fd, BEGAN_NS] if me.conns[fd, BEGAN_NS] > 0 else began
    for which, value in (
        (coldread.FD, fd), (coldread.SERIAL, me.conns[fd, SERIAL]), (coldread.VARIANT, variant), (coldread.REACTOR, me.number),
        (coldread.BLOCK, block), (coldread.HEAD_BYTES, head), (coldread.DATA_BYTES, data), (coldread.HELD_BYTES, size),
        (coldread.TABLE, table), (coldread.KEYS, keys), (coldread.SCORING, lookupplan.word(wanted, scoring.NUMBER)),
        (coldread.BEGAN_NS, began), (coldread.PLANNED_NS, planned), (coldread.QUEUED_NS, monotonic_ns()),
        (coldread.ARRIVED_NS, since), (coldread.DEADLINE_NS, since + timeout_ns if timeout_ns > 0 else 0),
        (coldread.OUTCOME, coldread.FOR_PYTHON),
    ):  # fmt: skip
        store_u64(job, which, nb.uint64(value))
    give_away(me, fd, plan, number, closing)
    return MADE_A_JOB


@nb.njit
def timeout_of(me):  # type: ignore[no-untyped-def]
    """The earliest timeout of the request whose head is in `found` and whose description in the record, in ns; 0: it has none."""
    timeout = me.found[httphead.TIMEOUT_MS] * 1_000_000
    own = request_record.get(request_record.row_at(me.record, 0), request_record.TIMEOUT_US) * 1000
    return own if own > 0 and (timeout == 0 or own < timeout) else timeout
