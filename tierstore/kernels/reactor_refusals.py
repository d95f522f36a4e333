"""How a reactor refuses a prediction that would wait too long for a thread, instead of giving it to Python. See `reactor.py`.

Python says how long a call that comes now would wait (`limits/worker_pool.py`), and of which paths the requests are predictions
(`PlanIndex.learn_queued`). What is refused here costs its reading and a ready answer; by Python, which finds its caches full of
the dense part's weights, it costs thirty times as much. Kernels for the thread of one reactor.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import httphead, lookupplan
from tierstore.kernels.atomics import relaxed_i64
from tierstore.kernels.raw import load_u8, load_u64, store_u64
from tierstore.kernels.reactor_answers import find_plan, is_routed, may_answer, roll, send_answer
from tierstore.kernels.reactor_words import (
    ANSWERED,
    BEGAN_NS,
    COUNT_WORDS,
    DRAIN,
    FOR_PYTHON,
    FULL,
    FULL_REFUSALS,
    MODE,
    MOST_WAIT_NS,
    REFUSAL_NS,
    REFUSALS,
    WAIT_NS,
    shared_at,
)
from tierstore.kernels.sysio import monotonic_ns

QUEUED = -2  # TAIL_BYTES of a plan for all requests of a path
MOST_TEXT_BYTES = 8192  # of JSON that is searched for a timeout
UNTOLD = -1  # by `timeout_us`: to be told only by who parses the JSON
_PASSED = 16  # one in so many is Python's all the same: of a look-up on the same path it makes a plan, or notes that it cannot

_TIMEOUT = int.from_bytes(b'"timeout', "little")
_QUOTE, _BACKSLASH, _COLON, _COMMA, _ZERO, _NINE = 34, 92, 58, 44, 48, 57
_OBJECT, _OBJECT_END, _LIST, _LIST_END = 123, 125, 91, 93
_MOST_DIGITS = 15


@nb.njit
def _skip_blanks(text, i, n):  # type: ignore[no-untyped-def]
    while i < n and (load_u8(text, i) == 32 or (load_u8(text, i) >= 9 and load_u8(text, i) <= 13)):
        i += 1
    return i


@nb.njit
def timeout_us(text, n):  # type: ignore[no-untyped-def]
    """The microseconds that the member "timeout" of a request's parameters names, in `n` bytes of JSON; 0 where there is none, or UNTOLD.

    It is a member of an object in the outermost one; a tensor's parameters are further in.
    """
    found, members, depth, i = 0, 0, 0, 0
    while i < n:
        byte = load_u8(text, i)
        i += 1
        if byte in (_OBJECT, _LIST):
            depth += 1
        elif byte in (_OBJECT_END, _LIST_END):
            depth -= 1
        elif byte == _QUOTE:
            begin = i
            while i < n and load_u8(text, i) != _QUOTE:
                i += 2 if load_u8(text, i) == _BACKSLASH else 1
            is_it = i - begin == 7 and load_u64(text + begin - 1, 0) == nb.uint64(_TIMEOUT)
            i += 1
            if not is_it or depth > 2:
                continue
            i = _skip_blanks(text, i, n)
            members += 1
            if members > 1 or depth != 2 or i >= n or load_u8(text, i) != _COLON:
                return UNTOLD
            i = first = _skip_blanks(text, i + 1, n)
            while i < n and load_u8(text, i) >= _ZERO and load_u8(text, i) <= _NINE:
                found = found * 10 + nb.int64(load_u8(text, i)) - _ZERO
                i += 1
                if i - first > _MOST_DIGITS:
                    return UNTOLD
            end = _skip_blanks(text, i, n)
            if i == first or end >= n or (load_u8(text, end) != _COMMA and load_u8(text, end) != _OBJECT_END):
                return UNTOLD
    return found


@nb.njit
def _may_wait_ns(me, fd, at, began):  # type: ignore[no-untyped-def]
    """How long the request at `at`, whose head is in `found`, may wait, as `Waits.admit` has it. Less than 0: Python says."""
    found = me.found
    text_bytes = found[httphead.JSON_BYTES]
    if text_bytes <= 0 or text_bytes > min(found[httphead.BODY_BYTES], MOST_TEXT_BYTES):
        return -1
    own = timeout_us(at + found[httphead.HEAD_BYTES], text_bytes) * 1000
    timeout = found[httphead.TIMEOUT_MS] * 1_000_000
    if own < 0:
        return -1
    if own > 0 and (timeout == 0 or own < timeout):
        timeout = own
    most = me.limits[MOST_WAIT_NS]
    if timeout == 0:
        return most
    since = me.conns[fd, BEGAN_NS]
    remaining = timeout - (began - since if since > 0 else 0)
    return min(most, remaining >> 1) if remaining > 0 else -1


@nb.njit
def refuse(me, fd, at, last, began):  # type: ignore[no-untyped-def]
    """ANSWERED where the request at `at`, for which there is no plan, was refused; or else it is FOR_PYTHON, and nothing was done."""
    wait = relaxed_i64(shared_at(me, WAIT_NS))
    if wait == 0 or not may_answer(me, fd, at, began):
        return FOR_PYTHON
    plan, served = find_plan(me, at, at, 0, QUEUED)
    if served == 0 or is_routed(me.found, served):
        return FOR_PYTHON
    dice = roll(me)
    variant, _ = lookupplan.choose(plan, served, dice)
    may_wait = _may_wait_ns(me, fd, at, began)
    if variant == 0 or may_wait < 0 or wait <= may_wait or dice % _PASSED == 0:
        return FOR_PYTHON
    store_u64(plan, lookupplan.LAST_USED, nb.uint64(began))
    counts = me.counts + 8 * COUNT_WORDS * lookupplan.word(variant, lookupplan.COUNTS)
    for which, more in ((FULL_REFUSALS if wait == FULL else REFUSALS, 1), (REFUSAL_NS, monotonic_ns() - began)):
        store_u64(counts, which, load_u64(counts, which) + nb.uint64(more))
    send_answer(me, fd, variant, last and me.shared[MODE] == DRAIN, 0)
    return ANSWERED
