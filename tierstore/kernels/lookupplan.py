"""Look-ups by plan: what requests of one structure ask for, as numbers, run over a view's tiers straight into an answer.

Plans and views are int64 words made in Python (`service/reactor/plan_index.py`, `engine/native.py`); here they are read by
address, and nothing is written but the answer, its states and the caller's scratch memory. Any thread, without the
interpreter lock; the caller sees to it that what the words point to stays.

    served     the view of the active version, the canary's, the canary's share in 1/2^32, and which labels there are; 0: no view
    view       the token, the seq, how many tables; then TABLE_WORDS for each
    plan       a path and a structure, the model, and a variant for each of two versions that may be served
    variant    the token of the views that it fits, and how such requests are answered: `binding.py`
    run        one request, bound by a variant and its own sizes: RUN_WORDS, then CALL_WORDS for each look-up

A token stands for one version with one dense part: a plan's variant is good for a view if their tokens are the same.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled_c
from tierstore.kernels.host_cache.lookup import lookup_at, values_at
from tierstore.kernels.host_cache.pool import add_f32_rows, close_bag, pool_at
from tierstore.kernels.overlay_index import answer_at
from tierstore.kernels.raw import load_f32, load_u8, load_u32, load_u64, store_f16, store_u8, store_u64
from tierstore.kernels.sysio import clear_bytes
from tierstore.types import Tier

# served
ACTIVE, CANARY, SHARE, LABELS = range(4)
SHARE_UNIT = 1 << 32

# view
VIEW_TOKEN, VIEW_SEQ, VIEW_TABLES = range(3)
VIEW_WORDS = 3
(
    HOST_AT, OVERLAYS, OVERLAYS_AT, DEFAULT_AT, HALF_DEFAULT_AT, TABLE_DIM, CODE, ROW_BYTES, TABLE_ID, BASE_AT, OWN_AT, PARTITIONS,
    COLLIDING, COLLIDING_AT,
) = range(14)  # fmt: skip
# HOST_AT 0: no host tier; BASE_AT 0: no sealed base; OWN_AT 0: it has every key, else bool[PARTITIONS]; COLLIDING: how many hashes
# are shared by keys, at COLLIDING_AT
TABLE_WORDS = 14

# a sealed base: its block index and files, as `sealed.look_up` has them, and where the filter of changed keys is told
FENCES_AT, FENCES, PART_STARTS_AT, PARTS, ENDS_AT, ROWS_AT, FDS_AT, FILES, PER_BLOCK, BLOCK_BYTES, CHANGED_AT = range(
    11
)
BASE_WORDS = 11

# plan
(
    PATH_AT, PATH_BYTES, STRUCTURE_AT, STRUCTURE_BYTES, FORM, MODEL, RATES_AT, WANTED, LABELLED, VARIANT, OTHER_VARIANT, LAST_USED,
) = range(12)  # fmt: skip
PLAN_WORDS = 12
# of FORM: by path and structure of an inference request; by a front's line; by a message's model and structure
TENSORS, STORED_ROWS, MESSAGE = range(3)
# of WANTED: the active version or the canary as the share says; that of a variant; the active one; the canary; that of a
# variant, as long as the labels are LABELLED
ANY_VERSION, ONE_VERSION, STABLE, ONLY_CANARY, BY_LABEL = range(5)
# the index: sets of entries, a hash and the address of a plan; an entry without an address is free
SETS, WAYS = 512, 8

# variant: the first word, and COUNTS, of all kinds
TOKEN, COUNTS = 0, 6

# run
ANSWER_BYTES, CALLS, KEYS, CODES_AT, SCRATCH, WORK_BYTES = range(6)  # WORK_BYTES: of rows, beside those of the answer
RUN_WORDS = 8
(
    TABLE, KEYS_AT, KEYS_N, KIND, OUT_AT, OUT_CODE, FOUND_AT, COMBINER, STARTS_AT, BAGS, BAG_KEYS, WEIGHTS_AT, PADDED, PADDING,
    TABLE_COUNTS, KEY_FORM,
) = range(16)  # fmt: skip
CALL_WORDS = 16
ROWS, BAGS_OF_ROWS, FOUND_ALONE, CHECKED = range(4)  # of KIND; CHECKED: nothing is asked of it
# of KEY_FORM: as the table has them; in the other integer type, where those below 0 are of one alone; strings, their codes at CODES_AT
AS_CODES, NO_NEGATIVE, STRINGS = range(3)
NOWHERE = -1  # of FOUND_AT, STARTS_AT, WEIGHTS_AT

# what comes of a run
ANSWERED, COLD, DOUBTFUL = 0, 1, 2

MOST_KEYS = 16384
MOST_BAGS = 16384
MOST_WORK_BYTES = 4 << 20  # of rows, those included that are only pooled
SCRATCH_BYTES = 16 * MOST_BAGS + 3 * MOST_WORK_BYTES + (1 << 16)

_PENDING, _HOST, _ABSENT = int(Tier.PENDING), int(Tier.HOST), int(Tier.ABSENT)
_U64 = np.uint64
_INFINITE = 0x7F800000


@nb.njit(inline="always")
def word(at, i):  # type: ignore[no-untyped-def]
    """The int64 at an address, counted in words."""
    return nb.int64(load_u64(at, i))


@nb.njit
def _probe(table, keys, n, state, out_code, out):  # type: ignore[no-untyped-def]
    """Answer what memory holds of `n` keys: rows to `out`. Returns how many the host tier answered."""
    dim = word(table, TABLE_DIM)
    default = word(table, HALF_DEFAULT_AT if out_code == 1 else DEFAULT_AT)
    overlays = word(table, OVERLAYS_AT)
    for i in range(word(table, OVERLAYS)):
        answer_at(word(overlays, i), out_code, dim, default, out, keys, n, state)
    host = word(table, HOST_AT)
    if host == 0:
        return 0
    return lookup_at(values_at(host), keys, n, state, out_code, out, default)


@nb.njit
def _set_padding(call, keys, n, state, out, row_bytes):  # type: ignore[no-untyped-def]
    """Answer padding keys: zeros, as absent. Returns how many there are."""
    padding, padded = word(call, PADDING), 0
    for i in range(n):
        if word(keys, i) == padding:
            store_u8(state, i, nb.uint8(_ABSENT))
            if out != 0:
                clear_bytes(out + i * row_bytes, row_bytes)
            padded += 1
    return padded


@nb.njit
def _any_negative(keys, n):  # type: ignore[no-untyped-def]
    signs = nb.int64(0)
    for i in range(n):
        signs |= word(keys, i)
    return signs < 0


@nb.njit
def is_cold(state, n):  # type: ignore[no-untyped-def]
    """Whether a key is left for the disk."""
    for i in range(n):  # noqa: SIM110 - for the compiler
        if load_u8(state, i) == _PENDING:
            return True
    return False


@nb.njit
def _pool_rows(call, rows, keys, n, starts, bags, weights, dim, out):  # type: ignore[no-untyped-def]
    """Pool `n` rows (float32[n, dim] at `rows`) as `pool.pool_bags` does; padding keys count for nothing."""
    combiner, padded, padding = word(call, COMBINER), word(call, PADDED), word(call, PADDING)
    for bag in range(bags):
        begin = word(starts, bag)
        end = word(starts, bag + 1) if bag + 1 < bags else n
        pooled = out + bag * dim * 4
        clear_bytes(pooled, dim * 4)
        total = np.float32(0)
        for i in range(begin, end):
            if padded != 0 and word(keys, i) == padding:
                continue
            factor = load_f32(weights, i) if weights != 0 else np.float32(1)
            add_f32_rows(pooled, rows + i * dim * 4, factor, dim)
            total += factor * factor if combiner == 2 else factor
        close_bag(pooled, dim, combiner, total)


@nb.njit
def _are_finite(weights, n):  # type: ignore[no-untyped-def]
    for i in range(n):  # noqa: SIM110 - for the compiler
        if nb.int64(load_u32(weights, i) & _U64(0x7FFFFFFF)) >= _INFINITE:
            return False
    return True


@nb.njit
def _check_bags(starts, bags, weights, n):  # type: ignore[no-untyped-def]
    """Whether starts and weights are as the full check wants them."""
    if bags == 0:
        return n == 0
    if word(starts, 0) != 0 or word(starts, bags - 1) > n:
        return False
    for bag in range(1, bags):
        if word(starts, bag) < word(starts, bag - 1):
            return False
    return weights == 0 or _are_finite(weights, n)


@nb.njit(inline="always")
def _aligned(at):  # type: ignore[no-untyped-def]
    return (at + 63) & ~63


@nb.njit(inline="always")
def _bag_places(call, n, dim, scratch):  # type: ignore[no-untyped-def]
    """Where a call's starts, marks of bags, one row, and all rows lie in scratch memory; and where that ends."""
    bags = word(call, BAGS)
    left = scratch + 8 * bags
    row = _aligned(left + bags)
    rows = _aligned(row + 4 * dim)
    pooled = _aligned(rows + 4 * dim * n)
    return left, row, rows, pooled, pooled + 4 * dim * bags


@nb.njit
def bag_scratch(call, n, dim):  # type: ignore[no-untyped-def]
    """Bytes of scratch memory that a call of bags takes."""
    return _bag_places(call, n, dim, 0)[4] + 64


@nb.njit(inline="always")
def _starts(call, tail, scratch):  # type: ignore[no-untyped-def]
    """Where the starts of a call's bags are: in the request, or made in scratch memory."""
    if word(call, STARTS_AT) >= 0:
        return tail + word(call, STARTS_AT)
    for bag in range(word(call, BAGS)):
        store_u64(scratch, bag, _U64(bag * word(call, BAG_KEYS)))
    return scratch


@nb.njit
def probe_for_bags(call, table, keys, n, state, tail, scratch):  # type: ignore[no-untyped-def]
    """Look up what memory holds of the keys of a call's bags as rows, float32[n, dim]. Returns their address."""
    dim = word(table, TABLE_DIM)
    rows = _bag_places(call, n, dim, scratch)[2]
    clear_bytes(state, n)
    if word(call, PADDED) != 0:
        _set_padding(call, keys, n, state, rows, 4 * dim)
    _probe(table, keys, n, state, 0, rows)
    return rows


@nb.njit
def pool_probed(call, table, keys, n, tail, rows, out, scratch):  # type: ignore[no-untyped-def]
    """Pool rows that are all there to `out`, in the dtype that is asked for."""
    dim, bags = word(table, TABLE_DIM), word(call, BAGS)
    weights = 0 if word(call, WEIGHTS_AT) < 0 else tail + word(call, WEIGHTS_AT)
    pooled = _bag_places(call, n, dim, scratch)[3] if word(call, OUT_CODE) == 1 else out
    _pool_rows(call, rows, keys, n, _starts(call, tail, scratch), bags, weights, dim, pooled)
    if pooled != out:
        _store_half(pooled, bags * dim, out)


@nb.njit
def _store_half(values, count, out):  # type: ignore[no-untyped-def]
    for k in range(count):
        store_f16(out, k, load_f32(values, k))


@nb.njit
def _run_bags(call, table, keys, n, state, tail, out, scratch):  # type: ignore[no-untyped-def]
    """A call of kind BAGS_OF_ROWS. Returns what comes of it."""
    dim, bags = word(table, TABLE_DIM), word(call, BAGS)
    weights = 0 if word(call, WEIGHTS_AT) < 0 else tail + word(call, WEIGHTS_AT)
    starts = _starts(call, tail, scratch)
    if not _check_bags(starts, bags, weights, n):
        return DOUBTFUL
    left, row, _, apart, _ = _bag_places(call, n, dim, scratch)
    pooled = apart if word(call, OUT_CODE) == 1 else out
    hits = -1
    if word(table, OVERLAYS) == 0 and word(table, HOST_AT) != 0:
        if word(call, PADDED) != 0:
            _set_padding(call, keys, n, state, 0, 0)
        clear_bytes(left, bags)
        host, combiner = values_at(word(table, HOST_AT)), word(call, COMBINER)
        hits = pool_at(host, keys, n, state, starts, bags, weights, combiner, pooled, left, row)
    if hits >= 0:
        if is_cold(state, n):
            return COLD
        if pooled != out:
            _store_half(pooled, bags * dim, out)
        return ANSWERED
    # rows of deltas lie over the table, or it changed its size just now
    rows = probe_for_bags(call, table, keys, n, state, tail, scratch)
    if is_cold(state, n):
        return COLD
    pool_probed(call, table, keys, n, tail, rows, out, scratch)
    return ANSWERED


@nb.njit(inline="always")
def keys_of(run, call, tail):  # type: ignore[no-untyped-def]
    """Where the keys of a call are, or the codes of its strings."""
    return word(call, KEYS_AT) + (word(run, CODES_AT) if word(call, KEY_FORM) == STRINGS else tail)


@nb.njit
def _are_checked(call, n, tail):  # type: ignore[no-untyped-def]
    """Whether offsets and weights that no bag is made by are as the full check wants them."""
    weights = 0 if word(call, WEIGHTS_AT) < 0 else tail + word(call, WEIGHTS_AT)
    if word(call, STARTS_AT) >= 0:
        return _check_bags(tail + word(call, STARTS_AT), word(call, BAGS), weights, n)
    return weights == 0 or _are_finite(weights, n)


@nb.njit
def run_at(run, view, tail, answer, states, scratch):  # type: ignore[no-untyped-def]
    call, state = run + 8 * RUN_WORDS, states
    clear_bytes(states, word(run, KEYS))
    outcome = ANSWERED
    for _ in range(word(run, CALLS)):
        table = view + 8 * (VIEW_WORDS + TABLE_WORDS * word(call, TABLE))
        n, kind = word(call, KEYS_N), word(call, KIND)
        keys = keys_of(run, call, tail)
        out = answer + word(call, OUT_AT)
        if kind != BAGS_OF_ROWS and not _are_checked(call, n, tail):
            return DOUBTFUL
        if kind == CHECKED:
            call += 8 * CALL_WORDS
            continue
        if word(call, KEY_FORM) == NO_NEGATIVE and _any_negative(keys, n):
            return DOUBTFUL
        if kind == BAGS_OF_ROWS:
            came = _run_bags(call, table, keys, n, state, tail, out, scratch)
            if came == DOUBTFUL:
                return DOUBTFUL
            if came == COLD:
                outcome = COLD
        else:
            code = word(call, OUT_CODE)
            if kind == FOUND_ALONE:
                out = scratch
            padded = 0
            if word(call, PADDED) != 0:
                padded = _set_padding(call, keys, n, state, out, word(table, TABLE_DIM) * (4 >> code))
            if _probe(table, keys, n, state, code, out) + padded < n and is_cold(state, n):
                outcome = COLD
        if word(call, FOUND_AT) >= 0:
            found = answer + word(call, FOUND_AT)
            for i in range(n):
                store_u8(found, i, nb.uint8(load_u8(state, i) != _ABSENT))
        state += n
        call += 8 * CALL_WORDS
    return outcome


@compiled_c(types.int64(*[types.int64] * 6), when=LAST)
def run(run: Any, view: Any, tail: Any, answer: Any, states: Any, scratch: Any) -> Any:
    """Answer all calls of a run under a view: ANSWERED, COLD where rows are left for the disk, or DOUBTFUL.

    `tail` is the address of the request's binary data, `answer` that of the answer's, which is filled, `states` of a
    byte for each key, which tell afterwards where it was answered; `scratch` of the run's SCRATCH bytes to work in. Only where
    it is ANSWERED all is there; a DOUBTFUL request is one for the full check.
    """
    return run_at(run, view, tail, answer, states, scratch)


@nb.njit
def count_keys(run, tail, states, counts, row_words):  # type: ignore[no-untyped-def]
    """Add to the tables' counts, `row_words` int64 each at address `counts`, where the keys were answered."""
    call, state = run + 8 * RUN_WORDS, states
    for _ in range(word(run, CALLS)):
        if word(call, KIND) != CHECKED:
            n, row = word(call, KEYS_N), counts + 8 * row_words * word(call, TABLE_COUNTS)
            padded, padding, keys = word(call, PADDED), word(call, PADDING), keys_of(run, call, tail)
            host = 0
            for i in range(n):
                host += load_u8(state, i) == _HOST
            if host < n:
                for i in range(n):
                    tier = nb.int64(load_u8(state, i))
                    if tier != _HOST and not (padded != 0 and word(keys, i) == padding):
                        store_u64(row, tier, load_u64(row, tier) + _U64(1))
            store_u64(row, _HOST, load_u64(row, _HOST) + _U64(host))
            state += n
        call += 8 * CALL_WORDS
