"""Answers requests over HTTP/1.1 in a reactor: by a plan from memory, or with a job for cold reads. See `loop.py`.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels import rates
from tierstore.kernels.atomics import acquire_i64, copy_bytes
from tierstore.kernels.raw import call_at, store_u8
from tierstore.kernels.records import place
from tierstore.kernels.sysio import (
    monotonic_ns,
    move_bytes,
)
from tierstore.lookup import binding, by_plan, front_rows, json_answer, plan_search, plans
from tierstore.lookup.cold_reads import job_at
from tierstore.reactor.connections import has_room, send_first
from tierstore.reactor.jobs import await_job, count, make_job, read_cached
from tierstore.reactor.layout import (
    ACCESS,
    ANSWERED,
    BUSY,
    CANARY,
    CLOSES,
    DESCRIPTION,
    DRAIN,
    ENDING,
    FINISH,
    FULL,
    HEAD_ROOM,
    HEADER,
    MADE_A_JOB,
    MOST_AS_JSON,
    MOST_TEXT_BYTES,
    NO_PLAN,
    PREDICTION,
    ROWS_ON_DISK,
    SIZE,
    TABLE_COUNT_WORDS,
    TRACED,
    VALUES,
    connection_at,
    version_counts_at,
)
from tierstore.reactor.predictions import bind_scores, expected_ns, make_prediction, timeout_of
from tierstore.tiers.upstream.layout import LINE_BYTES, REQUEST_HEAD_BYTES, rows_begin
from tierstore.wire import callers, request_record
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http1.date import DATE_BYTES

_CLOSE = np.frombuffer(b"connection: close\r\n", np.uint8)
_MOST_TIMEOUT_US = 1 << 50

# --- requests


@nb.njit
def _has_access(me, fd, at):
    """Whether the reactor knows the caller of the request at `at` and lets it in. The request's head is in `found`, where the caller is noted."""
    table, found = callers.allowed_at(acquire_i64(place(me.shared, "allowed_at"))), me.found
    if not callers.is_own_host(table, at + found.host_at, found.host_bytes):
        return False
    token, size = at + found.authorization_at, found.authorization_bytes
    if found.authorization_at == 0:
        token, size = connection_at(me.conns, fd).caller_at, connection_at(me.conns, fd).caller_bytes
    caller = found.caller = callers.caller_of(table, token, size)
    if caller == callers.NOBODY:
        return False
    fronts = found.kind == http1_head.ROWS
    return caller == callers.EVERYBODY or not fronts or caller.may_front != 0


@nb.njit
def _may_draw(me, plan, now):
    """Whether the caller may use the model of the plan, and neither of them is above its rates."""
    caller = me.found.caller
    return (
        callers.may_look_up(caller, plan.model)
        and rates.empty_at(callers.bucket_of(caller), now) == rates.FREE
        and rates.empty_at(plan.rates_at, now) == rates.FREE
    )


@nb.njit
def draw(me, plan, now, keys):
    """Charge the caller and the model for a request with `keys` keys."""
    size = me.found.body_bytes
    rates.draw_at(callers.bucket_of(me.found.caller), now, 1, keys, size)
    rates.draw_at(plan.rates_at, now, 1, keys, size)


@nb.njit
def roll(me):
    """32 random bits (xorshift64, Marsaglia 2003)."""
    x = nb.uint64(me.line.dice)
    x ^= x << nb.uint64(13)
    x ^= x >> nb.uint64(7)
    x ^= x << nb.uint64(17)
    me.line.dice = nb.int64(x)
    return nb.int64(x >> nb.uint64(32))


@nb.njit
def _add_close(date_at, head):
    """Add `connection: close` to the `head` of an answer, behind its date. The bytes before it move forward."""
    before = date_at + DATE_BYTES + 2
    move_bytes(head - _CLOSE.size, head, before)
    for i in range(_CLOSE.size):
        store_u8(head - _CLOSE.size + before, i, _CLOSE[i])


MAY, LONG = -1, -2  # results of `why_not`, `plan_for` and `bind_plan`, beside reasons


@nb.njit
def why_not(me, fd, at, since, began):
    """Decide from head and time whether the reactor may answer the request at `at`. Returns MAY, or the reason for leaving it to Python.

    The head is in `found`. `since` is when the request's first bytes came; 0: all came at once.
    """
    found = me.found
    if found.unusual & ~(http1_head.ROUTED | http1_head.SAMPLED) != 0:
        return HEADER
    if found.unusual & http1_head.SAMPLED != 0 and me.limits.traces != 0:
        return TRACED
    if me.shared.mode >= FINISH:
        return ENDING
    if _is_late(since, found.timeout_ms * 1_000_000, began):
        return BUSY
    return MAY if _has_access(me, fd, at) else ACCESS


@nb.njit
def _is_late(since, timeout_ns, began):
    """Whether a request that came in parts has already used up its timeout. A timeout of 0 is none."""
    return timeout_ns > 0 and since > 0 and began - since >= timeout_ns


@nb.njit
def _is_closing(me, last):
    """Whether the connection ends with this answer."""
    return me.found.closing != 0 or (last and me.shared.mode == DRAIN)


@nb.njit
def _copy_head(me, ready):
    """Copy a prepared head to where an answer's data follow, with the date. Returns its address."""
    head = me.answer + HEAD_ROOM - ready.head_bytes
    copy_bytes(head, ready.head_at, ready.head_bytes)
    copy_bytes(head + ready.date_at, me.date, DATE_BYTES)
    return head


@nb.njit
def _send_ready(me, fd, ready, closing, data):
    """Send `data` bytes of an answer, with the head in front of them that `_copy_head` has copied."""
    before = ready.head_bytes
    target = me.answer + HEAD_ROOM - before
    if closing:
        _add_close(ready.date_at, target)
        target -= _CLOSE.size
        before += _CLOSE.size
    _send(me, fd, target, before + data, closing)


@nb.njit
def _send(me, fd, at, size, closing):
    if closing:
        connection_at(me.conns, fd).flags |= CLOSES
    me.line.answers += 1
    send_first(me, fd, at, size)


@nb.njit
def _find(me, path, path_bytes, structure, structure_bytes, form):
    """The plan of a request, by path and structure, and what its model serves; the second is 0 where there is no plan."""
    plan = plan_search.find_plan(me.shared.plans_at, path, path_bytes, structure, structure_bytes, form)
    if plan == 0:
        return 0, 0
    return plan, plans.served_at(acquire_i64(acquire_i64(place(me.shared, "models_at")) + 8 * plan.model))


@nb.njit
def _may_wait_ns(me, since, began):
    """How long a request may wait, in ns, by the rule of `Waits.admit`; below 0: Python decides. Its head is in `found`, its description in the record.

    `since` as for `why_not`.
    """
    if request_record.row_at(me.record, 0).timeout_us > _MOST_TIMEOUT_US:
        return -1
    timeout, most = timeout_of(me), me.limits.most_wait_ns
    if timeout == 0:
        return most
    remaining = timeout - (began - since if since > 0 else 0)
    return min(most, remaining >> 1) if remaining > 0 else -1


@nb.njit
def is_refused(me, plan, variant, since, began):
    """Whether a prediction would wait too long for a thread. If so, it is counted as refused, and its scoring has the answer. `since` as for `why_not`.

    A refusal here costs only the reading of the request. A refusal by Python costs thirty times as much, because the dense part's weights fill the
    processor's caches.
    """
    wait, may_wait = expected_ns(me), _may_wait_ns(me, since, began)
    if wait == 0 or may_wait < 0 or wait <= may_wait:
        return False
    counts = version_counts_at(me.counts, variant.counts)
    if wait == FULL:
        counts.full_refusals += 1
    else:
        counts.refusals += 1
    counts.refusal_ns += monotonic_ns() - began
    draw(me, plan, began, 0)
    return True


@nb.njit
def plan_for(me, path, path_bytes, form, began):
    """(reason, plan, variant, view) for the request whose description is in the record; `path` names what it asks for.

    The reason is MAY, or why the request is left to Python.
    """
    structure_bytes = request_record.write_structure(me.record, me.structure)
    if structure_bytes == 0:
        return DESCRIPTION, 0, 0, 0
    plan, served = _find(me, path, path_bytes, me.structure, structure_bytes, form)
    if served == 0:
        return NO_PLAN, 0, 0, 0
    if not _may_draw(me, plan, began):
        return ACCESS, 0, 0, 0
    if me.found.unusual & http1_head.ROUTED != 0 and served.canary != 0:
        return CANARY, 0, 0, 0  # the request's id decides which version answers
    variant, view = plan_search.choose(plan, served, roll(me))
    if variant == 0:
        return NO_PLAN, 0, 0, 0
    plan.last_used = began
    return MAY, plan, plans.lookup_at(variant), view


@nb.njit
def bind_plan(me, variant, view, tail, since, more, began):
    """Bind the request (description in the record, data from `tail` on) to its plan: a run in `me.bound`.

    `since` as for `why_not`; `more`: bytes of the request that are not counted as held. Returns MAY; LONG, for a run that takes long; or a reason.
    """
    timeout_us = request_record.row_at(me.record, 0).timeout_us
    if timeout_us > _MOST_TIMEOUT_US or _is_late(since, timeout_us * 1000, began):
        return BUSY
    bound = binding.bind(variant, view, me.record, tail, me.codes, me.limits.most_answer, me.bound, me.values)
    if bound == binding.WRONG:
        return VALUES
    if not has_room(me, me.bound.answer_bytes + more):
        return BUSY
    return MAY if bound == binding.BOUND else LONG


@nb.njit
def look_up(me, plan, variant, view, tail, began, planned):
    """Do the run in `me.bound`: write its rows into the answer's data, or as JSON too, charge and count it. Returns the run's result (`by_plan.py`)."""
    data = me.answer + HEAD_ROOM
    came = call_at(me.run, me.bound, view, tail, data, me.states, me.scratch)
    if came == by_plan.COLD:
        came = read_cached(me, view, tail, data)
    if came == by_plan.ANSWERED:
        ran = monotonic_ns()
        if variant.as_json != 0:
            text, record = me.text + json_answer.HEAD_ROOM, me.record
            end = call_at(me.write, variant, me.values, record.id_at, record.id_bytes, data, text)
            if end == 0:
                return by_plan.DOUBTFUL
            me.text_bytes = end - text
        draw(me, plan, began, me.bound.keys)
        by_plan.count_keys(me.bound, tail, me.states, me.table_counts, TABLE_COUNT_WORDS)
        count(me, variant, began, planned, ran, monotonic_ns())  # before it is sent: a client finds its answer counted
    return came


@nb.njit
def answer(me, fd, at, whole, last, began):
    """Answer the request of `whole` bytes at `at`, whose head is in `found`, if it has a plan. `last`: no bytes follow it.

    Returns ANSWERED; MADE_A_JOB, where a job goes on and the connection's row has its number; or the reason for leaving the request to Python, and
    then nothing was done.
    """
    found, since = me.found, connection_at(me.conns, fd).began_ns
    text, text_bytes, typed = at + found.head_bytes, found.json_bytes, found.kind != http1_head.PREDICT
    if text_bytes == http1_head.NONE or not typed:
        text_bytes = found.body_bytes
    tail, tail_bytes = text + text_bytes, found.body_bytes - text_bytes
    if text_bytes <= 0 or tail_bytes < 0:
        return DESCRIPTION
    why = why_not(me, fd, at, since, began)
    if why != MAY:
        return why
    scan = me.scan if typed else me.scan_predict
    if call_at(scan, text, text_bytes, me.record, me.data, 0, 0) != request_record.SCANNED:
        return DESCRIPTION
    in_json = me.record.decoded != 0
    if (0 if in_json else me.record.data_bytes) != tail_bytes or (not in_json and found.json_bytes == http1_head.NONE):
        return VALUES
    if in_json:
        tail = me.data
    path, path_bytes = at + found.path_at, found.path_bytes
    why, plan, variant, view = plan_for(me, path, path_bytes, plans.TENSORS, began)
    if why != MAY:
        return why
    predicts, more = variant.scoring != 0, whole - connection_at(me.conns, fd).held
    if predicts and is_refused(me, plan, variant, since, began):
        _copy_head(me, variant.scoring)
        _send_ready(me, fd, variant.scoring, _is_closing(me, last), 0)
        return ANSWERED
    if predicts and variant.scoring.number == 0:
        return PREDICTION
    if not typed and call_at(me.read_predict, variant.datatypes, me.record, me.data, 0, 0, 0) == 0:
        return VALUES
    why = bind_plan(me, variant, view, tail, since, more, began)
    if why >= 0:
        return why
    planned, closing = monotonic_ns(), _is_closing(me, last)
    keys, as_json = me.bound.keys, variant.as_json != 0
    if as_json and not predicts:
        most = json_answer.most_bytes(variant, me.values)
        if me.bound.answer_bytes > MOST_AS_JSON or most > MOST_TEXT_BYTES:
            why = LONG
        if not has_room(me, most + more):
            return BUSY
    if predicts:
        data = bind_scores(me, variant)
        if data < 0:
            return VALUES
        if as_json and data > MOST_AS_JSON:
            return PREDICTION  # written as JSON they would keep others waiting
        begin = me.answer + HEAD_ROOM
        if not as_json:
            begin = binding.write_head(variant, me.record, me.values, data, closing, me.date, begin)
        made, number = make_prediction(
            me, fd, plan, variant, view, tail, why == MAY, begin, data, more, since, timeout_of(me), began
        )
        if made == MADE_A_JOB:
            job_at(me.jobs, number).tail = tail - at
            await_job(me, fd, number, closing)
            draw(me, plan, began, keys)
        return made
    came = by_plan.COLD
    if why == MAY:
        came = look_up(me, plan, variant, view, tail, began, planned)
    if came == by_plan.COLD:
        begin = me.answer + HEAD_ROOM
        if not as_json:
            begin = binding.write_head(variant, me.record, me.values, me.bound.answer_bytes, closing, me.date, begin)
        number = make_job(me, fd, plan, variant, view, begin, why == MAY, began, planned)
        if number < 0:
            return BUSY
        job_at(me.jobs, number).tail = tail - at
        await_job(me, fd, number, closing)
        draw(me, plan, began, keys)
        return MADE_A_JOB
    if came != by_plan.ANSWERED:
        return ROWS_ON_DISK if came == by_plan.ELSEWHERE else VALUES
    if as_json:
        text = me.text + json_answer.HEAD_ROOM
        begin = binding.head_before(text, me.text_bytes, binding.NONE, closing, me.date)
        _send(me, fd, begin, text + me.text_bytes - begin, closing)
        return ANSWERED
    data, end = me.bound.answer_bytes, me.answer + HEAD_ROOM
    begin = binding.write_head(variant, me.record, me.values, data, closing, me.date, end)
    _send(me, fd, begin, end + data - begin, closing)
    return ANSWERED


@nb.njit
def answer_rows(me, fd, at, whole, last, began):
    """Answer a front's request for rows (`lookup/front_rows.py`), as `answer` does. Where memory lacks a row, Python gets the request."""
    found = me.found
    body, size = at + found.head_bytes, found.body_bytes
    n = (size - REQUEST_HEAD_BYTES) >> 3
    if n < 0 or size & 7 != 0 or n > by_plan.MOST_KEYS:
        return SIZE
    if me.run_rows == 0:
        return NO_PLAN
    why = why_not(me, fd, at, connection_at(me.conns, fd).began_ns, began)
    if why != MAY:
        return why
    path, path_bytes = at + found.path_at, found.path_bytes
    plan, served = _find(me, path, path_bytes, body, LINE_BYTES, plans.STORED_ROWS)
    if served == 0:
        return NO_PLAN
    if not _may_draw(me, plan, began):
        return ACCESS
    chosen, view = plan_search.choose(plan, served, 0)
    if chosen == 0:
        return NO_PLAN
    variant = plans.front_rows_at(chosen)
    table = plans.table_at(view.tables, variant.table)
    room = rows_begin(n) + n * table.row_bytes
    if room > by_plan.MOST_WORK_BYTES:
        return SIZE
    if not has_room(me, room + whole):
        return BUSY
    planned = monotonic_ns()
    data = call_at(me.run_rows, variant, view, body, size, me.answer + HEAD_ROOM, me.scratch)
    if data == front_rows.CANNOT:
        return ROWS_ON_DISK
    ran = monotonic_ns()
    draw(me, plan, began, n)
    plan.last_used = began
    counts = me.table_counts + 8 * TABLE_COUNT_WORDS * variant.table_counts
    front_rows.count_codes(n, me.scratch, counts)
    count(me, variant, began, planned, ran, monotonic_ns())
    front_rows.write_digits(_copy_head(me, variant) + variant.digits_at, data)
    _send_ready(me, fd, variant, _is_closing(me, last), data)
    return ANSWERED
