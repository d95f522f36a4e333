"""Partitions of codes beside NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tierstore.kernels import partitions

COUNTS = [1, 2, 3, 7, 64, 1000]


def twin(codes: np.ndarray, count: int) -> np.ndarray:
    x = codes.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(33))) % np.uint64(count)).astype(np.int64)


def codes_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 1000)


@pytest.mark.parametrize("count", COUNTS)
def test_the_partition_of_a_code(count: int) -> None:
    codes = codes_of(count)
    np.testing.assert_array_equal(partitions.partitions_of(codes, count), twin(codes, count))


@pytest.mark.parametrize("count", COUNTS)
def test_groups_are_the_partitions_of_keys(count: int) -> None:
    codes, wanted = codes_of(count), np.arange(0, 1000, 3)
    order, starts = np.empty(len(wanted), np.int64), np.empty(count + 1, np.int64)
    partitions.group(codes, wanted, np.arange(count), order, starts)
    of = twin(codes, count)
    assert starts[0] == 0
    assert starts[-1] == len(wanted)
    for partition in range(count):
        there = order[starts[partition] : starts[partition + 1]].tolist()
        assert there == [place for place in wanted if of[place] == partition]


@pytest.mark.parametrize("count", COUNTS)
def test_which_codes_are_own(count: int) -> None:
    codes, is_own = codes_of(count), np.random.default_rng(count).random(count) < 0.5
    np.testing.assert_array_equal(partitions.are_own(codes, is_own), is_own[twin(codes, count)])


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=few_or_many(20, 60))
def test_places_by_the_node_to_ask(keys: int, nodes: int, count: int) -> None:
    rng = np.random.default_rng([keys, nodes, count])
    codes, node_of = rng.integers(-(1 << 63), (1 << 63) - 1, 300), rng.integers(-1, nodes, count)
    places = np.sort(rng.permutation(300)[:keys])
    order, starts = np.empty(keys, np.int64), np.empty(nodes + 1, np.int64)
    partitions.group(codes, places, node_of, order, starts)
    of = node_of[twin(codes[places], count)]
    assert starts[0] == 0
    for node in range(nodes):
        assert order[starts[node] : starts[node + 1]].tolist() == places[of == node].tolist()
    assert order[starts[nodes] :].tolist() == places[of < 0].tolist()


@given(st.sets(st.integers(-20, 20)), st.sets(st.integers(-20, 20)))
def test_places_of_keys_in_other_keys(ours: Any, theirs: Any) -> None:
    one, other = np.array(sorted(ours), np.int64), np.array(sorted(theirs), np.int64)
    where = np.full(len(one), -1, np.int64)
    assert partitions.match_sorted(one, other, where) == len(ours & theirs)
    for key, place in zip(one, where, strict=True):
        assert (other[place] == key) if key in theirs else place == -1
