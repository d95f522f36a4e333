"""The index of a delta's keys answers like a dict, for every key value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.kernels import overlay_index

INT64 = np.iinfo(np.int64)
# few distinct values, so that keys meet again, the extremes among them
keys_of_a_delta = st.lists(
    st.sampled_from([INT64.min, INT64.min + 1, INT64.max, 0, -1, 1, 256, 1 << 32, -(1 << 40)]) | st.integers(-40, 40),
    max_size=120,
)
any_keys = st.lists(st.integers(INT64.min, INT64.max), max_size=80)


def codes(keys: list[int]) -> np.ndarray:
    return np.array(keys, np.int64)


@given(keys_of_a_delta | any_keys)
def test_dedup_keeps_the_last_of_each_key_in_order_of_keys(keys: list[int]) -> None:
    last = {key: i for i, key in enumerate(keys)}
    assert overlay_index.dedup_last(codes(keys)).tolist() == [last[key] for key in sorted(last)]


@pytest.mark.parametrize("spread", [1 << 8, 1 << 20, 1 << 62])
def test_dedup_of_many_keys(spread: int) -> None:
    keys = np.random.default_rng(spread).integers(-spread, spread, 30_000)
    positions = overlay_index.dedup_last(keys)
    distinct, first_reversed = np.unique(keys[::-1], return_index=True)
    assert np.array_equal(keys[positions], distinct)
    assert np.array_equal(positions, len(keys) - 1 - first_reversed)


@given(keys_of_a_delta | any_keys, keys_of_a_delta | any_keys, st.randoms(use_true_random=False))
def test_find_answers_like_a_dict(held: list[int], asked: list[int], random: np.random.Generator) -> None:
    table = list(dict.fromkeys(held))
    rows = {key: row for row, key in enumerate(table)}
    asked = asked + held[:20]
    state = np.array([random.choice([0, 0, 3, 6]) for _ in asked], np.uint8)
    pos = np.full(len(asked), -77, np.int64)
    index = overlay_index.build(codes(table))
    found = overlay_index.find(index, codes(table), codes(asked), state, pos)
    expected = [rows.get(key, -1) if s == 0 else -77 for key, s in zip(asked, state, strict=True)]
    assert pos.tolist() == expected
    assert found == sum(row >= 0 for row in expected)


@pytest.mark.parametrize("step", [1, 2, 1 << 20, 1 << 33, 0x9E3779B97F4A7C15 - (1 << 64)])
def test_regular_keys_are_all_found_and_their_neighbours_are_not(step: int) -> None:
    with np.errstate(over="ignore"):
        keys = np.arange(-5000, 5000, dtype=np.int64) * np.int64(step)
        neighbours = keys + np.int64(step // 2 or 1 << 40)
    absent = ~np.isin(neighbours, keys)
    assert absent.any()
    index = overlay_index.build(keys)
    assert len(index) >= 2 * len(keys)
    pos = np.empty(len(keys), np.int64)
    assert overlay_index.find(index, keys, keys, np.zeros(len(keys), np.uint8), pos) == len(keys)
    assert np.array_equal(pos, np.arange(len(keys)))
    overlay_index.find(index, keys, neighbours, np.zeros(len(keys), np.uint8), pos)
    assert (pos[absent] == -1).all()


def test_read_only_arrays_are_taken_as_they_are() -> None:
    keys = np.array([5, -5], np.int64)
    state, pos = np.zeros(2, np.uint8), np.empty(2, np.int64)
    index = overlay_index.build(keys)
    for array in (keys, state, index):
        array.flags.writeable = False
    assert overlay_index.find(index, keys, keys, state, pos) == 2
    assert overlay_index.dedup_last(keys).tolist() == [1, 0]


def test_a_key_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="-9 in row 3"):
        overlay_index.build(codes([4, -9, 7, -9]))


def test_arrays_that_do_not_pair_up_are_refused() -> None:
    keys = codes([1, 2, 3])
    index = overlay_index.build(keys)
    with pytest.raises(ValueError, match="pair up"):
        overlay_index.find(index, keys, keys, np.zeros(2, np.uint8), np.empty(3, np.int64))
