"""Synthetic streams of keys: Zipf with and without a drifting hot set, and the reuse pattern of production ads models.

Keys are 0..universe-1. Deterministic for a seed. One thread.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

Trace = npt.NDArray[np.int64]

# embedding_bag/2021/locality_stats.txt of github.com/facebookresearch/dlrm_datasets, set fbgemm_t856_bs65536:
# 887,017,990 accesses to 128,435,723 keys, by how often a key is asked for (low < times <= high)
META_ACCESSES, META_KEYS = 887_017_990, 128_435_723
META_ACCESS_SHARES = (
    0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019,
)  # fmt: skip
META_KEY_SHARES = (0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005)  # further classes are below a rounding step


def zipf_weights(universe: int, alpha: float) -> npt.NDArray[np.float64]:
    """Popularity of rank 0, 1, …"""
    return 1.0 / np.arange(1, universe + 1, dtype=np.float64) ** alpha


def meta_weights(universe: int) -> npt.NDArray[np.float64]:
    """Popularities of `universe` keys in the proportions of the published classes; log-uniform within a class."""
    accesses = np.array(META_ACCESS_SHARES) * META_ACCESSES
    times = np.array([1.4 * 2.0**i / 2 for i in range(len(accesses))])  # a class's mean, where nothing better is known
    known = len(META_KEY_SHARES)
    times[:known] = accesses[:known] / (np.array(META_KEY_SHARES) * META_KEYS)
    counts = np.maximum(1, np.round(accesses / times / META_KEYS * universe)).astype(np.int64)
    counts[0] += universe - counts.sum()
    parts = []
    for i, (count, mean) in enumerate(zip(counts, times, strict=True)):
        spread = np.ones(1) if i < 2 else 2.0 ** (np.arange(count) / count)
        part = np.full(count, mean) * spread / spread.mean()
        parts.append(part * (META_ACCESS_SHARES[i] / part.sum()))
    return np.concatenate(parts[::-1])


@nb.njit(cache=True)
def _alias_table(weights):  # type: ignore[no-untyped-def]
    """Walker's alias method (1977), in Vose's form: constant time a draw."""
    n = weights.size
    scaled = weights * (n / weights.sum())
    alias = np.arange(n)
    small, large = np.empty(n, np.int64), np.empty(n, np.int64)
    smalls = larges = 0
    for i in range(n):
        if scaled[i] < 1.0:
            small[smalls] = i
            smalls += 1
        else:
            large[larges] = i
            larges += 1
    while smalls > 0 and larges > 0:
        smalls -= 1
        i, j = small[smalls], large[larges - 1]
        alias[i] = j
        scaled[j] -= 1.0 - scaled[i]
        if scaled[j] < 1.0:
            larges -= 1
            small[smalls] = j
            smalls += 1
    for k in range(larges):
        scaled[large[k]] = 1.0
    for k in range(smalls):
        scaled[small[k]] = 1.0
    return scaled, alias


@nb.njit(cache=True)
def _draw(rng, threshold, alias, key_of_rank, n, swaps):  # type: ignore[no-untyped-def]
    """`swaps` pairs of ranks an access change their keys, so that hot keys cool down and cold ones become hot."""
    universe = alias.size
    keys = np.empty(n, np.int64)
    due = 0.0
    for i in range(n):
        rank = nb.int64(rng.random() * universe)
        if rng.random() >= threshold[rank]:
            rank = alias[rank]
        keys[i] = key_of_rank[rank]
        due += swaps
        while due >= 1.0:
            due -= 1.0
            a, b = nb.int64(rng.random() * universe), nb.int64(rng.random() * universe)
            key_of_rank[a], key_of_rank[b] = key_of_rank[b], key_of_rank[a]
    return keys


def draw(weights: npt.NDArray[np.float64], n: int, *, drift: float = 0.0, seed: int = 1) -> Trace:
    """n accesses. `drift`: the share of keys that change their rank while as many accesses pass as there are keys."""
    threshold, alias = _alias_table(weights)
    rng = np.random.default_rng(seed)
    key_of_rank = rng.permutation(len(weights))
    return _draw(rng, threshold, alias, key_of_rank, n, drift / 2)
