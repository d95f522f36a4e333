"""Look-ups by plan: the look-ups of one request, run over a view's tiers straight into the answer.

Python makes plans and views as records (`plans.py`); this module reads them by address, and writes only the answer, its states and the caller's
scratch memory. Any thread, without the interpreter lock; the caller keeps alive what the records point to.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import HTTP, compiled_c
from tierstore.kernels.raw import load_i64, load_u8, load_u32, load_u64, store_u8, store_u64
from tierstore.kernels.sysio import clear_bytes
from tierstore.lookup import table_rows
from tierstore.lookup.plans import (
    BAGS_OF_ROWS,
    CALL_BYTES,
    CHECKED,
    FOUND_ALONE,
    NO_NEGATIVE,
    RUN_BYTES,
    STRINGS,
    run_at,
    run_call_at,
    table_at,
    view_at,
)
from tierstore.lookup.table_rows import aligned, is_cold, pool_found, pool_rows, probe, set_padding, store_half
from tierstore.types import Tier

# results of a run
ANSWERED, COLD, DOUBTFUL, ELSEWHERE = range(4)  # ELSEWHERE: a COLD run whose rows compiled readers cannot reach

MOST_KEYS = 16384
MOST_BAGS = 16384
MOST_WORK_BYTES = 4 << 20  # bytes of rows, including rows that are only pooled
SCRATCH_BYTES = 16 * MOST_BAGS + 3 * MOST_WORK_BYTES + (1 << 16)

_PENDING, _HOST, _ABSENT = int(Tier.PENDING), int(Tier.HOST), int(Tier.ABSENT)
_U64 = np.uint64
_INFINITE = 0x7F800000


@nb.njit
def first_call(run):
    return run_call_at(run_at(run, 1))


@nb.njit
def run_bytes(run):
    """The size of a run with its calls."""
    return RUN_BYTES + CALL_BYTES * run.calls


@nb.njit
def any_negative(keys, n):
    signs = nb.int64(0)
    for i in range(n):
        signs |= load_i64(keys, i)
    return signs < 0


@nb.njit
def pending(run, states):
    """The number of keys of a run that must be read from disk."""
    call, count, n = first_call(run), 0, 0
    for _ in range(run.calls):
        n += call.keys_n if call.kind != CHECKED else 0
        call = run_call_at(call, 1)
    for i in range(n):
        count += load_u8(states, i) == _PENDING
    return count


@nb.njit
def _are_finite(weights, n):
    for i in range(n):  # noqa: SIM110 - for the compiler
        if nb.int64(load_u32(weights, i) & _U64(0x7FFFFFFF)) >= _INFINITE:
            return False
    return True


@nb.njit
def _check_bags(starts, bags, weights, n):
    """Whether starts and weights pass the full parser's checks."""
    if bags == 0:
        return n == 0
    if load_i64(starts, 0) != 0 or load_i64(starts, bags - 1) > n:
        return False
    for bag in range(1, bags):
        if load_i64(starts, bag) < load_i64(starts, bag - 1):
            return False
    return weights == 0 or _are_finite(weights, n)


@nb.njit(inline="always")
def _starts(call, tail, scratch):
    """The address of the starts of a call's bags: in the request, or computed into scratch memory."""
    if call.starts_at >= 0:
        return tail + call.starts_at
    for bag in range(call.bags):
        store_u64(scratch, bag, _U64(bag * call.bag_keys))
    return scratch


@nb.njit(inline="always")
def _bag_places(call, n, dim, scratch):
    """The addresses in scratch memory of all rows of a call and of its pooled bags, behind its starts and the memory of `pool_found`; and their end."""
    rows = aligned(scratch + 8 * call.bags) + table_rows.bag_scratch(call.bags, dim)
    pooled = aligned(rows + 4 * dim * n)
    return rows, pooled, pooled + 4 * dim * call.bags


@nb.njit
def bag_scratch(call, n, dim):
    """Bytes of scratch memory for a call of bags."""
    return _bag_places(call, n, dim, 0)[2] + 64


@nb.njit
def _run_bags(call, table, keys, n, state, tail, out, scratch):
    """Run a call of kind BAGS_OF_ROWS. Returns the result for the run."""
    dim, bags, combiner, code = table.dim, call.bags, call.combiner, call.out_code
    weights = 0 if call.weights_at < 0 else tail + call.weights_at
    starts = _starts(call, tail, scratch)
    if not _check_bags(starts, bags, weights, n):
        return DOUBTFUL
    padded, padding, behind = call.padded, call.padding, aligned(scratch + 8 * bags)
    if pool_found(table, keys, n, state, padded, padding, starts, bags, weights, combiner, code, out, behind) >= 0:
        call.pooled = 1
        return COLD if is_cold(state, n) else ANSWERED
    rows, apart, _ = _bag_places(call, n, dim, scratch)
    pooled = apart if code == 1 else out
    clear_bytes(state, n)
    if padded != 0:
        set_padding(padding, keys, n, state, 0, 0)
    probe(table, keys, n, state, 0, rows)
    if is_cold(state, n):
        return COLD
    pool_rows(rows, keys, n, padded, padding, starts, bags, weights, combiner, dim, pooled)
    if code == 1:
        store_half(pooled, bags * dim, out)
    return ANSWERED


@nb.njit(inline="always")
def keys_of(run, call, tail):
    """The address of a call's keys, or of the codes made from them."""
    return call.keys_at + (run.codes_at if call.key_form >= STRINGS else tail)


@nb.njit
def _are_checked(call, n, tail):
    """Whether offsets and weights that pool no bag pass the full parser's checks."""
    weights = 0 if call.weights_at < 0 else tail + call.weights_at
    if call.starts_at >= 0:
        return _check_bags(tail + call.starts_at, call.bags, weights, n)
    return weights == 0 or _are_finite(weights, n)


@nb.njit
def _run(run, view, tail, answer, states, scratch):
    call, state = first_call(run), states
    clear_bytes(states, run.keys)
    outcome = ANSWERED
    for _ in range(run.calls):
        table = table_at(view.tables, call.table)
        n, kind = call.keys_n, call.kind
        keys = keys_of(run, call, tail)
        out = answer + call.out_at
        if kind != BAGS_OF_ROWS and not _are_checked(call, n, tail):
            return DOUBTFUL
        if kind == CHECKED:
            call = run_call_at(call, 1)
            continue
        if call.key_form == NO_NEGATIVE and any_negative(keys, n):
            return DOUBTFUL
        if kind == BAGS_OF_ROWS:
            came = _run_bags(call, table, keys, n, state, tail, out, scratch)
            if came == DOUBTFUL:
                return DOUBTFUL
            if came == COLD:
                outcome = COLD
        else:
            code = call.out_code
            if kind == FOUND_ALONE:
                out = scratch
            padded = 0
            if call.padded != 0:
                padded = set_padding(call.padding, keys, n, state, out, table.dim * (4 >> code))
            if probe(table, keys, n, state, code, out) + padded < n and is_cold(state, n):
                outcome = COLD
        if call.found_at >= 0:
            found = answer + call.found_at
            for i in range(n):
                store_u8(found, i, nb.uint8(load_u8(state, i) != _ABSENT))
        state += n
        call = run_call_at(call, 1)
    return outcome


@compiled_c(types.int64(*[types.int64] * 6), when=HTTP)
def run(run: Any, view: Any, tail: Any, answer: Any, states: Any, scratch: Any) -> Any:
    """Answer all calls of a run under a view: ANSWERED, COLD (some rows must be read from disk) or DOUBTFUL (the full parser must check).

    Addresses: `tail`, the request's binary data; `answer`, the answer's data, which is filled; `states`, a byte for each key, set to where it was
    answered; `scratch`, the run's SCRATCH bytes of working memory. The answer is complete only for ANSWERED.
    """
    return _run(run_at(run), view_at(view), tail, answer, states, scratch)


@nb.njit
def count_keys(run, tail, states, counts, row_words):
    """Count for each table which tier answered its keys: `row_words` int64 a table, from address `counts` on."""
    call, state = first_call(run), states
    for _ in range(run.calls):
        if call.kind != CHECKED:
            n, row = call.keys_n, counts + 8 * row_words * call.table_counts
            padded, padding, keys = call.padded, call.padding, keys_of(run, call, tail)
            host = 0
            for i in range(n):
                host += load_u8(state, i) == _HOST
            if host < n:
                for i in range(n):
                    tier = nb.int64(load_u8(state, i))
                    if tier != _HOST and not (padded != 0 and load_i64(keys, i) == padding):
                        store_u64(row, tier, load_u64(row, tier) + _U64(1))
            store_u64(row, _HOST, load_u64(row, _HOST) + _U64(host))
            state += n
        call = run_call_at(call, 1)
