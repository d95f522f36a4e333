"""How a reactor answers a request: by its plan from memory, or with a job for the readers of cold rows. See `reactor.py`.

Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels import (
    binding,
    front_rows,
    httphead,
    jsonscan,
    lookupplan,
    plansearch,
    rates,
    reactor_access,
    request_record,
)
from tierstore.kernels.atomics import acquire_i64, copy_bytes
from tierstore.kernels.httpdate import DATE_BYTES
from tierstore.kernels.raw import call_at, load_u64, store_u8, store_u64
from tierstore.kernels.reactor_connections import has_room, send_first
from tierstore.kernels.reactor_jobs import count, make_job
from tierstore.kernels.reactor_predictions import expected_ns, make_prediction, timeout_of
from tierstore.kernels.reactor_words import (
    ACCESS,
    ALLOWED_AT,
    ANSWERED,
    ANSWERS,
    BEGAN_NS,
    BUSY,
    CALLER_AT,
    CALLER_BYTES,
    CANARY,
    CLOSES,
    COUNT_WORDS,
    DESCRIPTION,
    DICE,
    DRAIN,
    ENDING,
    FINISH,
    FLAGS,
    FULL,
    FULL_REFUSALS,
    HEAD_ROOM,
    HEADER,
    HELD,
    MADE_A_JOB,
    MODE,
    MODELS_AT,
    MOST_ANSWER,
    MOST_WAIT_NS,
    NO_PLAN,
    PLANS_AT,
    PREDICTION,
    REFUSAL_NS,
    REFUSALS,
    ROWS_ON_DISK,
    SIZE,
    TABLE_COUNT_WORDS,
    TRACED,
    TRACES,
    VALUES,
    shared_at,
)
from tierstore.kernels.sysio import (
    monotonic_ns,
    move_bytes,
)

_CLOSE = np.frombuffer(b"connection: close\r\n", np.uint8)
_MOST_TIMEOUT_US = 1 << 50

# --- requests


@nb.njit
def _has_access(me, fd, at):  # type: ignore[no-untyped-def]
    """Whether the caller of the request at `at`, whose head is in `found`, is known here and may ask; `found` has who it is then."""
    table, found = acquire_i64(shared_at(me, ALLOWED_AT)), me.found
    if not reactor_access.is_own_host(table, at + found[httphead.HOST_AT], found[httphead.HOST_BYTES]):
        return False
    token, size = at + found[httphead.AUTHORIZATION_AT], found[httphead.AUTHORIZATION_BYTES]
    if found[httphead.AUTHORIZATION_AT] == 0:
        token, size = me.conns[fd, CALLER_AT], me.conns[fd, CALLER_BYTES]
    caller = found[httphead.CALLER] = reactor_access.caller_of(table, token, size)
    if caller == reactor_access.NOBODY:
        return False
    fronts = found[httphead.KIND] == httphead.ROWS
    return caller == reactor_access.EVERYBODY or not fronts or lookupplan.word(caller, reactor_access.MAY_FRONT) != 0


@nb.njit
def _may_draw(me, plan, now):  # type: ignore[no-untyped-def]
    """Whether the caller of a request, whose plan is known, may ask of its model, and neither has used up its rates."""
    caller = me.found[httphead.CALLER]
    return (
        reactor_access.may_look_up(caller, lookupplan.word(plan, lookupplan.MODEL))
        and rates.empty_at(reactor_access.bucket_of(caller), now) == rates.FREE
        and rates.empty_at(lookupplan.word(plan, lookupplan.RATES_AT), now) == rates.FREE
    )


@nb.njit
def _draw(me, plan, now, keys):  # type: ignore[no-untyped-def]
    """Charge a request with so many keys."""
    size = me.found[httphead.BODY_BYTES]
    rates.draw_at(reactor_access.bucket_of(me.found[httphead.CALLER]), now, 1, keys, size)
    rates.draw_at(lookupplan.word(plan, lookupplan.RATES_AT), now, 1, keys, size)


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
def _add_close(variant, head):  # type: ignore[no-untyped-def]
    """Add the header that ends a connection to the `head` of an answer, behind its date. What is before it moves forward."""
    before = lookupplan.word(variant, binding.DATE_AT) + DATE_BYTES + 2
    move_bytes(head - _CLOSE.size, head, before)
    for i in range(_CLOSE.size):
        store_u8(head - _CLOSE.size + before, i, _CLOSE[i])


MAY, LONG = -1, -2  # of `why_not`, `plan_for` and `bind_plan`, beside reasons


@nb.njit
def why_not(me, fd, at, since, began):  # type: ignore[no-untyped-def]
    """Why the request at `at`, whose head is in `found`, may not be answered here, as far as its head and the time say; or MAY.

    `since` is when its first bytes came; 0: all came at once.
    """
    found = me.found
    if found[httphead.UNUSUAL] & ~(httphead.ROUTED | httphead.SAMPLED) != 0:
        return HEADER
    if found[httphead.UNUSUAL] & httphead.SAMPLED != 0 and me.limits[TRACES] != 0:
        return TRACED
    if me.shared[MODE] >= FINISH:
        return ENDING
    if _is_late(since, found[httphead.TIMEOUT_MS] * 1_000_000, began):
        return BUSY
    return MAY if _has_access(me, fd, at) else ACCESS


@nb.njit
def _is_late(since, timeout_ns, began):  # type: ignore[no-untyped-def]
    """Whether a request that came in parts has taken its time already. 0: it has any."""
    return timeout_ns > 0 and since > 0 and began - since >= timeout_ns


@nb.njit
def _is_closing(me, last):  # type: ignore[no-untyped-def]
    """Whether the answer ends its connection."""
    return me.found[httphead.CLOSING] != 0 or (last and me.shared[MODE] == DRAIN)


@nb.njit
def _send_ready(me, fd, variant, closing, data):  # type: ignore[no-untyped-def]
    """Send the `data` bytes of an answer whose head is ready, and is written before them."""
    before = lookupplan.word(variant, binding.HEAD_BYTES)
    target = me.answer + HEAD_ROOM - before
    copy_bytes(target, lookupplan.word(variant, binding.HEAD_AT), before)
    copy_bytes(target + lookupplan.word(variant, binding.DATE_AT), me.date, DATE_BYTES)
    if me.found[httphead.KIND] == httphead.ROWS:
        front_rows.write_digits(target + lookupplan.word(variant, front_rows.DIGITS_AT), data)
    if closing:
        _add_close(variant, target)
        target -= _CLOSE.size
        before += _CLOSE.size
    _send(me, fd, target, before + data, closing)


@nb.njit
def _send(me, fd, at, size, closing):  # type: ignore[no-untyped-def]
    if closing:
        me.conns[fd, FLAGS] |= CLOSES
    me.lines[me.number, ANSWERS] += 1
    send_first(me, fd, at, size)


@nb.njit
def _find(me, path, path_bytes, structure, structure_bytes, form):  # type: ignore[no-untyped-def]
    """(plan, what its model serves) of a request by its path and structure; the second is 0 where there is none."""
    plan = plansearch.find_plan(me.shared[PLANS_AT], path, path_bytes, structure, structure_bytes, form)
    if plan == 0:
        return 0, 0
    return plan, acquire_i64(acquire_i64(shared_at(me, MODELS_AT)) + 8 * lookupplan.word(plan, lookupplan.MODEL))


@nb.njit
def _may_wait_ns(me, fd, began):  # type: ignore[no-untyped-def]
    """How long the request, whose head is in `found` and whose description in the record, may wait, as `Waits.admit` has it.

    Less than 0: Python says.
    """
    if request_record.get(request_record.row_at(me.record, 0), request_record.TIMEOUT_US) > _MOST_TIMEOUT_US:
        return -1
    timeout, most = timeout_of(me), me.limits[MOST_WAIT_NS]
    if timeout == 0:
        return most
    since = me.conns[fd, BEGAN_NS]
    remaining = timeout - (began - since if since > 0 else 0)
    return min(most, remaining >> 1) if remaining > 0 else -1


@nb.njit
def _refuse(me, fd, plan, variant, last, began):  # type: ignore[no-untyped-def]
    """ANSWERED where a prediction would wait too long for a thread and was refused; else PREDICTION.

    What is refused here costs its reading and a ready
    answer; by Python, which finds its caches full of the dense part's weights, it costs thirty times as much.
    """
    wait, may_wait = expected_ns(me), _may_wait_ns(me, fd, began)
    if wait == 0 or may_wait < 0 or wait <= may_wait:
        return PREDICTION
    counts = me.counts + 8 * COUNT_WORDS * lookupplan.word(variant, lookupplan.COUNTS)
    for which, more in ((FULL_REFUSALS if wait == FULL else REFUSALS, 1), (REFUSAL_NS, monotonic_ns() - began)):
        store_u64(counts, which, load_u64(counts, which) + nb.uint64(more))
    _draw(me, plan, began, 0)
    _send_ready(me, fd, variant, _is_closing(me, last), 0)
    return ANSWERED


@nb.njit
def plan_for(me, path, path_bytes, form, began):  # type: ignore[no-untyped-def]
    """(why, plan, variant, view) of the request whose description is in the record; `path` is what it asks of.

    Why: MAY, or a reason why it is for Python.
    """
    structure_bytes = request_record.write_structure(me.record, me.structure)
    if structure_bytes == 0:
        return DESCRIPTION, 0, 0, 0
    plan, served = _find(me, path, path_bytes, me.structure, structure_bytes, form)
    if served == 0:
        return NO_PLAN, 0, 0, 0
    if not _may_draw(me, plan, began):
        return ACCESS, 0, 0, 0
    if me.found[httphead.UNUSUAL] & httphead.ROUTED != 0 and lookupplan.word(served, lookupplan.CANARY) != 0:
        return CANARY, 0, 0, 0  # its id says which version answers
    variant, view = plansearch.choose(plan, served, roll(me))
    if variant == 0:
        return NO_PLAN, 0, 0, 0
    store_u64(plan, lookupplan.LAST_USED, nb.uint64(began))
    return MAY, plan, variant, view


@nb.njit
def bind_plan(me, variant, view, tail, since, more, began):  # type: ignore[no-untyped-def]
    """Put the request whose description is in the record, and whose data begin at `tail`, into its plan: a run in `me.bound`.

    `since` as for `why_not`; `more` are bytes of it that are not counted as held. Returns MAY; LONG, which takes long; or a reason.
    """
    timeout_us = request_record.get(request_record.row_at(me.record, 0), request_record.TIMEOUT_US)
    if timeout_us > _MOST_TIMEOUT_US or _is_late(since, timeout_us * 1000, began):
        return BUSY
    bound = binding.bind(variant, view, me.record, tail, me.codes, me.limits[MOST_ANSWER], me.bound, me.values)
    if bound == binding.WRONG:
        return VALUES
    if not has_room(me, lookupplan.word(me.bound, lookupplan.ANSWER_BYTES) + more):
        return BUSY
    return MAY if bound == binding.BOUND else LONG


@nb.njit
def look_up(me, plan, variant, view, tail, began, planned):  # type: ignore[no-untyped-def]
    """Do the run in `me.bound`: its rows are where the answer's data belong, and it is charged and counted. Returns what comes of it, as the run does."""
    came = call_at(me.run, me.bound, view, tail, me.answer + HEAD_ROOM, me.states, me.scratch)
    if came == lookupplan.ANSWERED:
        _draw(me, plan, began, lookupplan.word(me.bound, lookupplan.KEYS))
        ran = monotonic_ns()
        lookupplan.count_keys(me.bound, tail, me.states, me.table_counts, TABLE_COUNT_WORDS)
        count(me, variant, began, planned, ran, monotonic_ns())  # before it leaves: who has the answer finds it counted
    return came


@nb.njit
def answer(me, fd, at, whole, last, began):  # type: ignore[no-untyped-def]
    """Answer the request of `whole` bytes at `at`, whose head is in `found`, if a plan is known. `last`: nothing came behind it.

    Returns ANSWERED; MADE_A_JOB where readers go on, then the connection's row has its number; or else nothing was
    done, and the reason why the request is for Python.
    """
    found, since = me.found, me.conns[fd, BEGAN_NS]
    text, text_bytes = at + found[httphead.HEAD_BYTES], found[httphead.JSON_BYTES]
    tail, tail_bytes = text + text_bytes, found[httphead.BODY_BYTES] - text_bytes
    if text_bytes <= 0 or tail_bytes < 0:
        return DESCRIPTION
    why = why_not(me, fd, at, since, began)
    if why != MAY:
        return why
    if jsonscan.scan_at(text, text_bytes, me.record) != request_record.SCANNED:
        return DESCRIPTION
    if request_record.get(me.record, request_record.DATA_BYTES) != tail_bytes:
        return VALUES
    path, path_bytes = at + found[httphead.PATH_AT], found[httphead.PATH_BYTES]
    why, plan, variant, view = plan_for(me, path, path_bytes, lookupplan.TENSORS, began)
    if why != MAY:
        return why
    predicts = lookupplan.word(variant, binding.HEAD_AT) != 0
    if predicts:
        came = _refuse(me, fd, plan, variant, last, began)
        if came == ANSWERED or lookupplan.word(variant, binding.SCORING_AT) == 0:
            return came
    why = bind_plan(me, variant, view, tail, since, whole - me.conns[fd, HELD], began)
    if why >= 0:
        return why
    planned, closing = monotonic_ns(), _is_closing(me, last)
    keys = lookupplan.word(me.bound, lookupplan.KEYS)
    if predicts:
        made = PREDICTION
        if why == MAY:
            made = make_prediction(me, fd, plan, variant, view, tail, closing, timeout_of(me), began)
        if made == MADE_A_JOB:
            _draw(me, plan, began, keys)
        return made
    came = lookupplan.COLD
    if why == MAY:
        came = look_up(me, plan, variant, view, tail, began, planned)
    if came == lookupplan.COLD:
        made = make_job(me, fd, plan, variant, view, closing, why == MAY, began, planned)
        if made == MADE_A_JOB:
            _draw(me, plan, began, keys)
        return made
    if came != lookupplan.ANSWERED:
        return VALUES
    data, end = lookupplan.word(me.bound, lookupplan.ANSWER_BYTES), me.answer + HEAD_ROOM
    begin = binding.write_head(variant, me.record, me.values, data, closing, me.date, end)
    _send(me, fd, begin, end + data - begin, closing)
    return ANSWERED


@nb.njit
def answer_rows(me, fd, at, whole, last, began):  # type: ignore[no-untyped-def]
    """As `answer`, of a front's request for rows (`front_rows.py`). Where memory lacks one, it is for Python."""
    found = me.found
    body, size = at + found[httphead.HEAD_BYTES], found[httphead.BODY_BYTES]
    n = (size - front_rows.REQUEST_HEAD_BYTES) >> 3
    if n < 0 or size & 7 != 0 or n > lookupplan.MOST_KEYS:
        return SIZE
    why = why_not(me, fd, at, me.conns[fd, BEGAN_NS], began)
    if why != MAY:
        return why
    path, path_bytes = at + found[httphead.PATH_AT], found[httphead.PATH_BYTES]
    plan, served = _find(me, path, path_bytes, body, front_rows.LINE_BYTES, lookupplan.STORED_ROWS)
    if served == 0:
        return NO_PLAN
    if not _may_draw(me, plan, began):
        return ACCESS
    variant, view = plansearch.choose(plan, served, 0)
    if variant == 0:
        return NO_PLAN
    table = view + 8 * (lookupplan.VIEW_WORDS + lookupplan.TABLE_WORDS * lookupplan.word(variant, front_rows.TABLE))
    room = front_rows.rows_begin(n) + n * lookupplan.word(table, lookupplan.ROW_BYTES)
    if room > lookupplan.MOST_WORK_BYTES:
        return SIZE
    if not has_room(me, room + whole):
        return BUSY
    planned = monotonic_ns()
    data = call_at(me.run_rows, variant, view, body, size, me.answer + HEAD_ROOM, me.scratch)
    if data == front_rows.CANNOT:
        return ROWS_ON_DISK
    ran = monotonic_ns()
    _draw(me, plan, began, n)
    store_u64(plan, lookupplan.LAST_USED, nb.uint64(began))
    counts = me.table_counts + 8 * TABLE_COUNT_WORDS * lookupplan.word(variant, front_rows.TABLE_COUNTS)
    front_rows.count_codes(n, me.scratch, counts)
    count(me, variant, began, planned, ran, monotonic_ns())
    _send_ready(me, fd, variant, _is_closing(me, last), data)
    return ANSWERED
