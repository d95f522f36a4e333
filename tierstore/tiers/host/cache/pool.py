"""Pooling of bags from the host tier's cache: rows are added as they are found, without a copy.

The stages are those of `lookup.py`: any number of threads at any time, without a lock and without the GIL. Sums equal those of `kernels/pool.py` to
the last bit.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.atomics import acquire_i64, fence_acquire, relaxed_i64, stack_bytes
from tierstore.kernels.raw import add_scaled_16, load_f32, load_u64, store_f32, store_u8
from tierstore.tiers.host.cache.layout import EPOCH, GEOMETRY
from tierstore.tiers.host.cache.lookup import (
    AHEAD,
    RING_BYTES,
    SKIP,
    answer,
    find_at_home,
    find_elsewhere,
    prefetch_lines,
)
from tierstore.tiers.host.cache.sampling import count_seen
from tierstore.types import Tier

_PENDING, _HOST = int(Tier.PENDING), int(Tier.HOST)


@nb.njit(inline="always")
def add_f32_rows(target, source, factor, dim):
    vectors = dim >> 4
    for k in range(vectors):
        add_scaled_16(target + 64 * k, source + 64 * k, factor)
    for k in range(vectors << 4, dim):
        store_f32(target, k, load_f32(target, k) + np.float32(factor * load_f32(source, k)))


@nb.njit
def close_bag(pooled, dim, combiner, total):
    """Divide the sum of a bag as its combiner requires; `total` is the sum of the weights, or of their squares."""
    if combiner == 0:
        return
    divisor = np.sqrt(total) if combiner == 2 else total
    for k in range(dim):
        store_f32(pooled, k, np.float32(0) if total == np.float32(0) else load_f32(pooled, k) / divisor)


@nb.njit
def pool_at(where, keys_at, n, state_at, starts_at, bags, weights_at, combiner, out_at, left_at, row_at):
    """Pool those of `bags` bags whose keys are all resident. Arguments named `_at` are addresses of any alignment.

    Bag b is keys [starts[b], starts[b + 1]), the last bag runs to the end; `starts` ascends from 0. A key whose state is not PENDING adds nothing.
    `weights` 0: ones; `combiner` as `pool.combiner_code`; `row` is a float32[dim] of working memory, `out` float32[bags, dim]. `left` uint8[bags],
    zeros, becomes 1 for each bag with a key that is not resident: its vector is undefined. States become HOST, ABSENT, or stay PENDING. Counts heat.
    Returns how many keys were answered with HOST, or -1, with nothing valid, if the table changed its size meanwhile.
    """
    dim = where.dim
    kind = 0, dim * 4, where.code == 0 and (dim * 4) & 63 == 0, where.default_at
    epoch = acquire_i64(where.control + 8 * EPOCH)
    geometry = acquire_i64(where.control + 8 * GEOMETRY)
    rings = stack_bytes(RING_BYTES), stack_bytes(RING_BYTES), stack_bytes(RING_BYTES)
    hits, seen, bag, total = 0, 0, -1, np.float32(0)
    pooled, next_start = out_at, 0
    for step in range(0, n + 3 * AHEAD, AHEAD):
        seen += prefetch_lines(where, geometry, keys_at, state_at, step, min(step + AHEAD, n), rings)
        begin = step - AHEAD
        if begin >= 0:
            find_at_home(where, keys_at, state_at, begin, min(step, n), rings)
        begin -= AHEAD
        if begin >= 0:
            find_elsewhere(where, keys_at, begin, min(begin + AHEAD, n), rings)
        begin -= AHEAD
        for i in range(max(begin, 0), min(begin + AHEAD, n)):
            while i >= next_start:
                if bag >= 0:
                    close_bag(pooled, dim, combiner, total)
                bag += 1
                pooled = out_at + bag * dim * 4
                next_start = nb.int64(load_u64(starts_at, bag + 1)) if bag + 1 < bags else n
                total = np.float32(0)
                for k in range(dim):
                    store_f32(pooled, k, np.float32(0))
            of_key = answer(where, geometry, epoch, keys_at, i, kind, row_at, rings)
            if of_key == SKIP:
                continue
            store_u8(state_at, i, nb.uint8(of_key))
            if of_key == _PENDING:
                store_u8(left_at, bag, nb.uint8(1))
                continue
            hits += of_key == _HOST
            factor = load_f32(weights_at, i) if weights_at != 0 else np.float32(1)
            add_f32_rows(pooled, row_at, factor, dim)
            total += factor * factor if combiner == 2 else factor
    if bag >= 0:
        close_bag(pooled, dim, combiner, total)
    for empty in range(bag + 1, bags):  # empty bags at the end
        for k in range(dim):
            store_f32(out_at + empty * dim * 4, k, np.float32(0))
    if seen != 0:
        count_seen(where.sample, seen, left_at, starts_at, bags, n)
    fence_acquire()
    return hits if relaxed_i64(where.control + 8 * EPOCH) == epoch else -1
