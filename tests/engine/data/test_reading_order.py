"""Hot keys in pieces: every key once, a range of keys in each, and no more of them in memory than is said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.engine.data import reading_order

BOUNDS = np.iinfo(np.int64)


@given(st.lists(st.integers(BOUNDS.min, BOUNDS.max) | st.integers(-3, 3), max_size=40), st.integers(1, 50))
def test_a_stretch_comes_whole_in_ranges_of_keys(keys: list[int], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_order, "PIECE", piece)
        got = list(reading_order.pieces(np.array(keys, np.int64), np.sort))
    assert np.concatenate(got).tolist() == sorted(keys)


@pytest.mark.parametrize("saved_by", ["hash", "key"])
def test_pieces_of_a_long_stretch_are_about_as_long_as_said(monkeypatch: pytest.MonkeyPatch, saved_by: str) -> None:
    monkeypatch.setattr(reading_order, "PIECE", 10_000)
    keys = np.arange(200_000) * 3
    if saved_by == "hash":
        np.random.default_rng(1).shuffle(keys)
    got = list(reading_order.pieces(keys, np.sort))
    np.testing.assert_array_equal(np.concatenate(got), np.sort(keys))
    assert max(map(len, got)) < 12_000
