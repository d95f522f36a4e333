"""Bags are pooled as a plain loop would, to the last bit; offsets that cut wrongly are refused by bag."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tierstore.errors import InvalidInput
from tierstore.kernels import pool
from tierstore.types import Combiner

COMBINERS = pytest.mark.parametrize("combiner", list(Combiner))
numbers = st.floats(-1e6, 1e6, width=32)
# weights that cancel to a zero sum are likely
weight_values = st.sampled_from([0.0, 1.0, -1.0, 0.5, -0.5, 2.0]) | st.floats(-8, 8, width=32)


def pool_twin(
    vectors: np.ndarray,
    offsets: np.ndarray,
    weights: np.ndarray | None,
    counts: np.ndarray | None,
    combiner: Combiner,
) -> np.ndarray:
    out = np.zeros((len(offsets), vectors.shape[1]), np.float32)
    ends = [*offsets[1:], len(vectors)]
    for bag, (start, stop) in enumerate(zip(offsets, ends, strict=True)):
        total, squares = np.float32(0), np.float32(0)
        for i in range(start, stop):
            if counts is not None and not counts[i]:
                continue
            weight = np.float32(1) if weights is None else weights[i]
            out[bag] += weight * vectors[i]
            total += weight
            squares += weight * weight
        divisor = {Combiner.SUM: np.float32(1), Combiner.MEAN: total, Combiner.SQRTN: np.sqrt(squares)}[combiner]
        out[bag] = out[bag] / divisor if divisor != 0 else 0
    return out


@COMBINERS
@given(data=st.data())
def test_pooling_is_a_plain_loop_to_the_last_bit(combiner: Combiner, data: st.DataObject) -> None:
    vectors = data.draw(hnp.arrays(np.float32, st.tuples(st.integers(0, 20), st.integers(1, 40)), elements=numbers))
    n = len(vectors)
    cuts = data.draw(st.lists(st.integers(0, n), max_size=12))
    offsets = np.array([0, *sorted(cuts)], np.int64)
    weights = data.draw(st.none() | hnp.arrays(np.float32, n, elements=weight_values))
    counts = data.draw(st.none() | hnp.arrays(np.bool_, n))
    expected = pool_twin(vectors, offsets, weights, counts, combiner)
    for array in (vectors, offsets, weights, counts):
        if array is not None:
            array.flags.writeable = False
    assert np.array_equal(pool.pool_bags(vectors, offsets, weights, counts, combiner), expected)


@COMBINERS
@pytest.mark.parametrize("weights", [[0, 0, 0], [1, -1, 0], None])
def test_a_zero_divisor_answers_zeros(combiner: Combiner, weights: list[float] | None) -> None:
    vectors = np.ones((3, 2), np.float32)
    given = None if weights is None else np.array(weights, np.float32)
    counts = np.zeros(3, np.bool_) if weights is None else None
    out = pool.pool_bags(vectors, np.zeros(1, np.int64), given, counts, combiner)
    squares = 0 if given is None else float((given**2).sum())
    if combiner is Combiner.SQRTN and squares:
        assert np.array_equal(out, pool_twin(vectors, np.zeros(1, np.int64), given, counts, combiner))
    else:
        assert not out.any()


def test_padding_adds_nothing_not_even_nan() -> None:
    vectors = np.array([[1, 2], [np.nan, np.inf], [3, 4]], np.float32)
    weights = np.array([1, np.nan, 3], np.float32)
    out = pool.pool_bags(vectors, np.zeros(1, np.int64), weights, np.array([True, False, True]), Combiner.MEAN)
    assert out.tolist() == [[2.5, 3.5]]


@pytest.mark.parametrize("offsets", [[0, 4], [0, 2, 1], [-1, 0]])
def test_a_bag_outside_of_the_vectors_is_refused(offsets: list[int]) -> None:
    with pytest.raises(IndexError):
        pool.pool_bags(np.ones((3, 2), np.float32), np.array(offsets), None, None, Combiner.SUM)


def test_arrays_that_do_not_pair_up_are_refused() -> None:
    vectors, offsets = np.ones((3, 2), np.float32), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="weights"):
        pool.pool_bags(vectors, offsets, np.ones(2, np.float32), None, Combiner.SUM)
    with pytest.raises(ValueError, match="counts"):
        pool.pool_bags(vectors, offsets, None, np.ones(4, np.bool_), Combiner.SUM)


@pytest.mark.parametrize(
    ("offsets", "n_keys", "why"),
    [
        ([[0, 1]], 2, "one-dimensional"),
        (0, 2, "one-dimensional"),
        ([], 2, "no offsets"),
        ([0.0, 1.0], 2, "integers"),
        ([True, False], 2, "integers"),
        (["0"], 2, "integers"),
        ([1, 2], 2, "first offset is 0, got 1"),
        ([-1, 2], 2, "first offset is 0, got -1"),
        ([0, 2, 1], 2, "bag 2 starts at 1, the one before it at 2"),
        ([0, 1, 3], 2, "bag 2 starts at 3, beyond the 2 keys"),
        (np.array([0, 1 << 63], np.uint64), 2, "beyond the 2 keys"),
    ],
)
def test_offsets_that_cut_wrongly_are_refused(offsets: object, n_keys: int, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        pool.check_offsets(offsets, n_keys)


@pytest.mark.parametrize("offsets", [[0], [0, 0, 2], [0, 2, 2], np.array([0, 9, 1, 9], np.uint16)[::2]])
def test_good_offsets_come_back_as_int64(offsets: object) -> None:
    checked = pool.check_offsets(offsets, 2)
    assert checked.dtype == np.int64
    assert checked.flags.c_contiguous
    assert checked.tolist() == list(offsets)


def test_no_bags_want_no_keys() -> None:
    assert pool.check_offsets([], 0).shape == (0,)
    assert pool.pool_bags(np.empty((0, 4), np.float32), np.empty(0, np.int64), None, None, Combiner.SUM).shape == (0, 4)
