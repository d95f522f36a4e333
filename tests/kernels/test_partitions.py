"""Partitions of codes beside NumPy."""

from __future__ import annotations

import numpy as np
import pytest

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
    partitions.group(codes, wanted, order, starts)
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
