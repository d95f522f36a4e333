"""The hit rate at other sizes, as trials with sampled look-ups say it, against caches of these sizes that got all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import access_traces, cache_policy, policy_models
from tierstore.kernels.hashing import mix_all
from tierstore.tiers.host.sample import ALL, AccessSample
from tierstore.tiers.host.table import HostTable
from tierstore.tiers.host.trials import SCALES, CacheTrials, Point
from tierstore.types import Keys, Tier

UNIVERSE, ACCESSES, ROWS = 100_000, 3_000_000, 6_000
SET_ROWS = 56


def a_table(rows: int, sample: AccessSample) -> HostTable:
    size = cache_policy.table_for(rows).budget_bytes
    return HostTable(cache_policy.SPEC, size, default_vector=np.zeros(1, np.float32), sample=sample)


def predicted(keys: Keys, rows: int, every: int = 20) -> list[Point]:
    """The curve after look-ups of `keys` in a cache of `rows` rows, sampled as a store does it, every so many batches."""
    sample = AccessSample()
    table = a_table(rows, sample)
    trials = CacheTrials(table.capacity_rows)
    sample.take(trials.bound)
    for begin in range(0, len(keys), every * cache_policy.BATCH):
        cache_policy.drive(table, keys[begin : begin + every * cache_policy.BATCH])
        taken = sample.take(trials.bound)
        trials.add(taken.keys, taken.seen)
    curve = trials.curve()
    trials.close()
    table.close()
    return curve


def of_cache(keys: Keys, rows: int) -> float:
    """The hit rate of a cache of so many rows in the second half of the look-ups."""
    table = cache_policy.table_for(rows)
    misses = cache_policy.drive(table, keys)
    table.close()
    half = len(misses) // 2
    return 1 - float(misses[half:].sum()) / (len(misses) - half) / cache_policy.BATCH


def scanned(keys: Keys) -> Keys:
    """Every third look-up is of the next key of a scan that goes round beside them."""
    mixed = keys.copy()
    mixed[::3] = UNIVERSE + np.arange(len(mixed[::3])) % (UNIVERSE // 2)
    return mixed


TRACES = {
    "zipf 0.8": lambda: access_traces.draw(access_traces.zipf_weights(UNIVERSE, 0.8), ACCESSES),
    "zipf 1.0": lambda: access_traces.draw(access_traces.zipf_weights(UNIVERSE, 1.0), ACCESSES),
    "zipf 1.2": lambda: access_traces.draw(access_traces.zipf_weights(UNIVERSE, 1.2), ACCESSES),
    "drift": lambda: access_traces.draw(access_traces.zipf_weights(UNIVERSE, 1.0), ACCESSES, drift=0.1),
    "ads": lambda: access_traces.draw(access_traces.meta_weights(UNIVERSE), ACCESSES),
    "scan": lambda: scanned(access_traces.draw(access_traces.zipf_weights(UNIVERSE, 1.0), ACCESSES)),
}


@pytest.mark.parametrize("trace", TRACES)
def test_a_third_of_the_keys_says_what_caches_of_other_sizes_do(trace: str) -> None:
    """Within 2 points, from a quarter of the rows to four times as many; and a textbook cache, wholly apart, agrees within 4."""
    keys = TRACES[trace]()
    curve = predicted(keys, ROWS)
    assert [point.scale for point in curve] == list(SCALES)
    for point in curve:
        assert point.hit_rate is not None
        assert point.hit_rate == pytest.approx(of_cache(keys, point.rows), abs=0.02), point
        missed = policy_models.s3fifo(keys, 2 * UNIVERSE, point.rows)[len(keys) // 2 :].mean()
        assert point.hit_rate == pytest.approx(1 - float(missed), abs=0.04), point
