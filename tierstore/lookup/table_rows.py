"""Rows of a table that memory holds under a view: its overlays are asked first, then its host tier.

Every look-up takes this step, whether Python, a reactor or another node makes it. Padding keys are answered before it; keys that it leaves PENDING
are read from disk after it. A table is the address of a TABLE record (`plans.py`); the caller keeps alive what that points to. Any thread, without
the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import FIRST, SOON, compiled
from tierstore.kernels.codec import AS_STORED
from tierstore.kernels.overlay_index import answer_at, overlay_at
from tierstore.kernels.raw import load_f32, load_i64, load_u8, store_f16, store_u8
from tierstore.kernels.records import at, define
from tierstore.kernels.sysio import allocate, clear_bytes, release
from tierstore.lookup.plans import TABLE, table_at
from tierstore.tiers.host.cache.layout import KEYS
from tierstore.tiers.host.cache.lookup import lookup_at, values_of
from tierstore.tiers.host.cache.pool import add_f32_rows, close_bag, pool_at
from tierstore.types import Tier

PART = define("Part", "the look-up of one feature among several that are answered into one buffer", {
    "table": (TABLE, "the table that the feature reads"),
    "out_code": "the dtype of the answer. 0: float32, 1: float16",
    "padded padding": "1 if the feature has a padding key, and the code of that key",
    "place": "the number of the feature's place in the buffer",
})  # fmt: skip
_part_at = at(PART)
ROWS, AT = range(2)  # of `places`: the number of rows, and where they begin in the buffer
NOT_POOLED = -1  # result of `pool` in place of a count

_PENDING, _HOST, _ABSENT = int(Tier.PENDING), int(Tier.HOST), int(Tier.ABSENT)
_STATES, _ANSWER = (types.Array(types.uint8, dimensions, "C") for dimensions in (1, 2))
_FLOATS = types.Array(types.float32, 2, "C")
_WEIGHTS = types.Array(types.float32, 1, "C", readonly=True)
_PLACES = types.Array(types.int64, 2, "C")


@nb.njit
def probe(table, keys, n, state, out_code, out):
    """Answer the PENDING keys that memory holds: rows to `out`. Returns how many of them the host tier answered.

    For ABSENT keys, a row requested AS_STORED is undefined.
    """
    dim = table.dim
    default = table.half_default_at if out_code == 1 else out if out_code == AS_STORED else table.default_at
    overlays, row_bytes = table.overlays_at, table.row_bytes if out_code == AS_STORED else dim * (4 >> out_code)
    for i in range(table.overlays):
        answer_at(overlay_at(load_i64(overlays, i)), out_code, dim, default, out, row_bytes, keys, n, state)
    host = table.host
    if host == 0:
        return 0
    return lookup_at(values_of(host), keys, n, state, out_code, out, default)


@nb.njit
def set_padding(padding, keys, n, state, out, row_bytes):
    """Answer padding keys: zeros, as absent. Returns their number."""
    padded = 0
    for i in range(n):
        if load_i64(keys, i) == padding:
            store_u8(state, i, nb.uint8(_ABSENT))
            if out != 0:
                clear_bytes(out + i * row_bytes, row_bytes)
            padded += 1
    return padded


@nb.njit
def is_cold(state, n):
    """Whether some key must be read from disk."""
    for i in range(n):  # noqa: SIM110 - for the compiler
        if load_u8(state, i) == _PENDING:
            return True
    return False


@compiled(types.int64(_STATES, types.Array(types.int64, 1, "C")), when=FIRST)
def count_states(state: Any, counts: Any) -> Any:
    """Add the number of keys in each state to `counts` int64[len(Tier)]. Returns how many the host tier has answered."""
    before = counts[_HOST]
    for i in range(state.size):
        if state[i] < counts.size:
            counts[state[i]] += 1
    return counts[_HOST] - before


@compiled(types.int64(types.int64, KEYS, _STATES, types.int64, types.int64, types.int64, _ANSWER), when=FIRST)
def lookup(table: Any, keys: Any, state: Any, out_code: Any, padded: Any, padding: Any, out: Any) -> Any:
    """`probe` of arrays, after padding keys (equal to `padding`, if `padded`) are answered. `out`: the bytes of the rows.

    Returns -1, with nothing done, if the sizes do not fit.
    """
    table, n = table_at(table), keys.size
    row_bytes = table.row_bytes if out_code == AS_STORED else table.dim * (4 >> out_code)
    if state.size != n or out.shape[0] != n or out.shape[1] != row_bytes:
        return -1
    keys_at, state_at, out_at = nb.int64(keys.ctypes.data), nb.int64(state.ctypes.data), nb.int64(out.ctypes.data)
    if padded != 0:
        set_padding(padding, keys_at, n, state_at, out_at, row_bytes)
    return probe(table, keys_at, n, state_at, out_code, out_at)


@compiled(types.int64(types.int64, KEYS, _STATES, types.int64, types.int64, _FLOATS), when=FIRST)
def lookup_float32(table: Any, keys: Any, state: Any, padded: Any, padding: Any, out: Any) -> Any:
    """`lookup` into float32[n, dim], the usual case, without a view of its bytes."""
    table, n = table_at(table), keys.size
    if state.size != n or out.shape[0] != n or out.shape[1] != table.dim:
        return -1
    keys_at, state_at, out_at = nb.int64(keys.ctypes.data), nb.int64(state.ctypes.data), nb.int64(out.ctypes.data)
    if padded != 0:
        set_padding(padding, keys_at, n, state_at, out_at, table.dim * 4)
    return probe(table, keys_at, n, state_at, 0, out_at)


@compiled(types.int64(types.int64, types.int64, _PLACES, KEYS, _STATES, _STATES), when=SOON)
def gather(parts: Any, count: Any, places: Any, keys: Any, state: Any, out: Any) -> Any:
    """`lookup` for `count` parts at address `parts`, whose keys are end to end; `places` are int64[places, 2]. Returns as `lookup`."""
    n = nb.int64(0)
    for p in range(count):
        part = _part_at(parts, p)
        rows, at = places[part.place, ROWS], places[part.place, AT]
        if rows < 0 or at < 0 or at + rows * part.table.dim * (4 >> part.out_code) > out.size:
            return -1
        n += rows
    if n != keys.size or n != state.size:
        return -1
    key, state_at, hits = nb.int64(keys.ctypes.data), nb.int64(state.ctypes.data), nb.int64(0)
    for p in range(count):
        part = _part_at(parts, p)
        table, code, rows = part.table, part.out_code, places[part.place, ROWS]
        target = nb.int64(out.ctypes.data) + places[part.place, AT]
        if part.padded != 0:
            set_padding(part.padding, key, rows, state_at, target, table.dim * (4 >> code))
        hits += probe(table, key, rows, state_at, code, target)
        key += 8 * rows
        state_at += rows
    return hits


@nb.njit
def pool_rows(rows, keys, n, padded, padding, starts, bags, weights, combiner, dim, out):
    """Pool `n` rows (float32[n, dim] at `rows`) as `pool.pool_bags` does; padding keys count for nothing."""
    for bag in range(bags):
        begin = load_i64(starts, bag)
        end = load_i64(starts, bag + 1) if bag + 1 < bags else n
        pooled = out + bag * dim * 4
        clear_bytes(pooled, dim * 4)
        total = nb.float32(0)
        for i in range(begin, end):
            if padded != 0 and load_i64(keys, i) == padding:
                continue
            factor = load_f32(weights, i) if weights != 0 else nb.float32(1)
            add_f32_rows(pooled, rows + i * dim * 4, factor, dim)
            total += factor * factor if combiner == 2 else factor
        close_bag(pooled, dim, combiner, total)


@nb.njit
def store_half(values, count, out):
    for k in range(count):
        store_f16(out, k, load_f32(values, k))


@nb.njit(inline="always")
def aligned(at):
    return (at + 63) & ~63


@nb.njit(inline="always")
def _bag_places(bags, dim, scratch):
    """Addresses in scratch memory of one row and of pooled bags, behind the marks of bags; and their end."""
    row = aligned(scratch + bags)
    pooled = aligned(row + 4 * dim)
    return row, pooled, aligned(pooled + 4 * dim * bags)


@nb.njit
def bag_scratch(bags, dim):
    """Bytes of scratch memory that `pool_found` takes, a multiple of 64."""
    return _bag_places(bags, dim, 0)[2]


@nb.njit
def pool_found(table, keys, n, state, padded, padding, starts, bags, weights, combiner, out_code, out, scratch):
    """Pool the bags whose keys are all in the host tier, row by row as they are found. All of `state` is PENDING.

    Returns how many keys it answered; bags with a key that is still PENDING have no answer. Returns NOT_POOLED, with no answer and undefined states,
    where rows of deltas lie over the table or the host tier is changing its size.
    """
    dim = table.dim
    row, apart, _ = _bag_places(bags, dim, scratch)
    pooled = apart if out_code == 1 else out
    if table.overlays != 0 or table.host == 0:
        return NOT_POOLED
    if padded != 0:
        set_padding(padding, keys, n, state, 0, 0)
    clear_bytes(scratch, bags)
    hits = pool_at(values_of(table.host), keys, n, state, starts, bags, weights, combiner, pooled, scratch, row)
    if hits >= 0 and out_code == 1:
        store_half(pooled, bags * dim, out)
    return hits


@compiled(
    types.int64(types.int64, KEYS, _STATES, types.int64, types.int64, KEYS, _WEIGHTS, types.int64, types.int64, _ANSWER)
)
def pool(
    table: Any, keys: Any, state: Any, padded: Any, padding: Any, starts: Any, weights: Any, combiner: Any,
    out_code: Any, out: Any,
) -> Any:  # fmt: skip
    """`pool_found` of arrays. Bag b has keys [starts[b], starts[b + 1]), the last bag runs to the end; `starts` ascends from 0.

    `weights` float32[n], or empty for ones; `combiner` as `pool.combiner_code`; `state`: zeros. NOT_POOLED also where sizes do not fit or working
    memory is lacking.
    """
    table, n, bags = table_at(table), keys.size, starts.size
    fits = out.shape[0] == bags and out.shape[1] == table.dim * (4 >> out_code) and state.size == n
    if not fits or (weights.size > 0 and weights.size != n) or (bags == 0 and n > 0):
        return NOT_POOLED
    scratch = allocate(bag_scratch(bags, table.dim) + 64)
    if scratch == 0:
        return NOT_POOLED
    came = pool_found(
        table, nb.int64(keys.ctypes.data), n, nb.int64(state.ctypes.data), padded, padding,
        nb.int64(starts.ctypes.data), bags, nb.int64(weights.ctypes.data) if weights.size > 0 else 0, combiner,
        out_code, nb.int64(out.ctypes.data), aligned(scratch),
    )  # fmt: skip
    release(scratch)
    return came
