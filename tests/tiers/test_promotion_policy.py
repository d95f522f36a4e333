"""The promotion policy keeps up with S3-FIFO at the same number of rows; `benchmarks/cache_policy.py` has all points."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import access_traces, cache_policy, policy_models

UNIVERSE, ACCESSES = 50_000, 1_000_000


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stream",
    [cache_policy.Stream(a, d) for a, d in ((0.8, 0.0), (1.0, 0.5), (1.2, 0.1), (None, 0.0))],
    ids=lambda s: s.label,
)
@pytest.mark.parametrize("share", [0.05, 0.10])
def test_misses_stay_within_three_percent_of_s3_fifo(stream: cache_policy.Stream, share: float) -> None:
    ratios = cache_policy.measure(stream.draw(UNIVERSE, ACCESSES), UNIVERSE, share, ("s3fifo", "belady"))
    assert ratios["belady"] < ratios["tierstore"] <= cache_policy.BAR * ratios["s3fifo"]


@pytest.mark.thorough
def test_the_textbook_policies_are_told_apart() -> None:
    keys = cache_policy.Stream(1.0).draw(UNIVERSE, ACCESSES)
    misses = {name: model(keys, UNIVERSE, 2_000)[ACCESSES // 2 :].mean() for name, model in cache_policy.MODELS.items()}
    assert misses["belady"] < min(misses["w_tinylfu"], misses["s3fifo"])
    assert max(misses["w_tinylfu"], misses["s3fifo"]) < misses["lru"]


@pytest.mark.parametrize("model", cache_policy.MODELS.values())
def test_a_cache_that_holds_everything_misses_each_key_once(model: Callable[..., np.ndarray]) -> None:
    keys = np.random.default_rng(3).integers(0, 100, 5_000)
    assert model(keys, 100, 130).sum() == len(np.unique(keys))


def test_lru_and_belady_against_plain_python() -> None:
    keys = np.random.default_rng(5).zipf(1.2, 3_000) % 60
    capacity, expected = 12, 0
    used: OrderedDict[int, None] = OrderedDict()
    for key in keys.tolist():
        expected += key not in used
        used[key] = None
        used.move_to_end(key)
        if len(used) > capacity:
            used.popitem(last=False)
    assert policy_models.lru(keys, 60, capacity).sum() == expected
    resident: set[int] = set()
    optimum = 0
    following = [next((j for j in range(i + 1, len(keys)) if keys[j] == key), len(keys)) for i, key in enumerate(keys)]
    due: dict[int, int] = {}
    for i, key in enumerate(keys.tolist()):
        due[key] = following[i]
        if key not in resident:
            optimum += 1
            resident.add(key)
            if len(resident) > capacity:
                resident.remove(max(resident, key=lambda other: due[other]))
    assert policy_models.belady(keys, 60, capacity).sum() == optimum


def test_streams_are_drawn_in_the_published_proportions() -> None:
    weights = access_traces.meta_weights(1_000_000)
    assert len(weights) == 1_000_000
    ascending = np.sort(weights)
    assert ascending[:473_000].sum() / weights.sum() == pytest.approx(0.069, abs=0.005)  # asked for once
    assert ascending[-3:].sum() / weights.sum() == pytest.approx(0.019, abs=0.005)  # more than 32,768 times
    zipf = access_traces.draw(access_traces.zipf_weights(1000, 1.0), 200_000)
    counts = np.sort(np.bincount(zipf, minlength=1000))[::-1]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    drifting = access_traces.draw(access_traces.zipf_weights(1000, 1.0), 200_000, drift=0.5)
    assert np.bincount(drifting).max() < 0.5 * counts[0]
