"""What look-ups note, and the hit rates at other sizes that trials make of it, against caches of these sizes that got every look-up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import access_traces, cache_policy, policy_models
from tests.counts import few_or_many, with_large_counts
from tests.tiers.host_rows import pool
from tierstore.tiers.host.access_sample import ALL, AccessSample
from tierstore.tiers.host.cache_trials import SCALES, CacheTrials, Point
from tierstore.tiers.host.table import HostTable
from tierstore.types import Combiner, Keys, Tier

UNIVERSE, ACCESSES, ROWS = 100_000, 2_000_000, 6_000


def a_table(rows: int, sample: AccessSample) -> HostTable:
    budget = cache_policy.table_for(rows).budget_bytes
    return HostTable(cache_policy.SPEC, budget, default_vector=np.zeros(1, np.float32), sample=sample)


def predicted(keys: Keys, rows: int, every: int = 20) -> list[Point]:
    """The curve after look-ups of `keys` in a cache of `rows` rows, sampled as a store does it, every so many batches."""
    sample = AccessSample()
    table = a_table(rows, sample)
    trials = CacheTrials(table.capacity_rows)
    sample.collect(trials.bound)
    for begin in range(0, len(keys), every * cache_policy.BATCH):
        cache_policy.drive(table, keys[begin : begin + every * cache_policy.BATCH])
        taken = sample.collect(trials.bound)
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


def zipf(exponent: float, drift: float = 0.0) -> Keys:
    return access_traces.draw(access_traces.zipf_weights(UNIVERSE, exponent), ACCESSES, drift=drift)


TRACES = {
    "zipf 0.8": lambda: zipf(0.8),
    "zipf 1.0": lambda: zipf(1.0),
    "zipf 1.2": lambda: zipf(1.2),
    "drift": lambda: zipf(1.0, 0.1),
    "ads": lambda: access_traces.draw(access_traces.meta_weights(UNIVERSE), ACCESSES),
    "scan": lambda: scanned(zipf(1.0)),
}


@pytest.mark.parametrize(
    "trace",
    [
        "scan",
        pytest.param("zipf 0.8", marks=pytest.mark.thorough),
        pytest.param("drift", marks=pytest.mark.thorough),
        *(
            pytest.param(name, marks=[pytest.mark.thorough, with_large_counts])
            for name in ("zipf 1.0", "zipf 1.2", "ads")
        ),
    ],
)
def test_a_third_of_the_keys_says_what_caches_of_other_sizes_do(trace: str) -> None:
    """Within 2 points of caches that got all look-ups; a quarter of the size, within 3. A textbook cache, wholly apart, within 5."""
    keys = TRACES[trace]()
    curve = predicted(keys, ROWS)
    assert [point.scale for point in curve] == list(SCALES)
    for point in curve:
        assert point.hit_rate is not None
        assert point.hit_rate == pytest.approx(of_cache(keys, point.rows), abs=0.03 if point.scale < 0.5 else 0.02), (
            point
        )
        missed = policy_models.s3fifo(keys, 2 * UNIVERSE, point.rows)[len(keys) // 2 :].mean()
        assert point.hit_rate == pytest.approx(1 - float(missed), abs=0.05), point


def test_a_cache_without_look_ups_says_nothing_and_a_large_enough_one_misses_nothing() -> None:
    trials = CacheTrials(100_000)
    assert [point.hit_rate for point in trials.curve()] == [None] * len(SCALES)
    few = np.arange(100, dtype=np.int64)
    for _ in range(3000):
        trials.add(few, 100)
    assert [point.hit_rate for point in trials.curve()] == [1.0] * len(SCALES)
    trials.close()


# --- what is noted


def hashed(keys: Keys) -> np.ndarray:
    """SplitMix64's finalizer, from its definition."""
    mask, out = (1 << 64) - 1, []
    for key in keys.tolist():
        x = (key + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        out.append(x ^ x >> 31)
    return np.array(out, np.uint64)


@given(
    keys=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=200),
    bound=st.integers(0, ALL),
    most=st.integers(0, 60),
    answered=st.integers(0, 10),
)
@settings(max_examples=few_or_many(50, 200))
def test_keys_below_the_bound_are_noted_until_it_is_full(keys: list[int], bound: int, most: int, answered: int) -> None:
    """Those that a tier before has answered are neither noted nor counted."""
    sample = AccessSample()
    table = a_table(500, sample)
    wanted, state = np.array(keys, np.int64), np.zeros(len(keys), np.uint8)
    state[:answered] = Tier.OVERLAY
    sample.collect(bound, most)
    table.lookup(wanted, np.empty((len(keys), 1), np.float32), state)
    taken = sample.collect(0)
    asked = wanted[answered:]
    below = asked[hashed(asked) < np.uint64(bound)]
    assert taken.keys.tolist() == below[:most].tolist()
    if len(below) <= most:
        assert taken.seen == (len(asked) if bound else 0)
    table.lookup(wanted, np.empty((len(keys), 1), np.float32), np.zeros(len(keys), np.uint8))
    assert sample.collect(0) == (pytest.approx([]), 0), "nothing is noted where there is no bound"
    table.close()


def test_keys_of_bags_that_are_looked_up_again_are_counted_once() -> None:
    sample = AccessSample()
    table = a_table(5_000, sample)
    keys = np.arange(40, dtype=np.int64)
    table.insert(keys[:30], np.zeros((30, cache_policy.SPEC.row_bytes), np.uint8), 0)
    sample.collect(ALL)
    state = np.zeros(40, np.uint8)
    starts = np.array([0, 10, 25, 35])
    pool(table, keys, starts, None, Combiner.SUM, np.empty((4, 1), np.float32), state)
    assert sample.collect(0).seen == 25
    table.close()


def test_look_ups_of_a_busy_table_are_noted_no_more() -> None:
    sample = AccessSample()
    table = a_table(500, sample)
    keys = np.arange(100, dtype=np.int64)

    def look_up() -> None:
        table.lookup(keys, np.empty((100, 1), np.float32), np.zeros(100, np.uint8))

    sample.collect(ALL)
    look_up()
    sample.end_if_busy(100)
    look_up()
    sample.end_if_busy(100)
    look_up()
    assert sample.collect(ALL).seen == 200
    look_up()
    assert sample.collect(0).seen == 100, "until the next turn"
    table.close()


def test_keys_that_do_not_exist_are_told_apart() -> None:
    table = a_table(500, AccessSample())
    table.insert_absent(np.array([3, 5]), 0)
    assert table.absent_among(np.array([2, 3, 4, 5])).tolist() == [False, True, False, True]
    table.close()
    assert table.absent_among(np.array([3])).tolist() == [False]
