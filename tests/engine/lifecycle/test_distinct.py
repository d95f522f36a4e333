"""What a version is warmed with: the keys of all sources, each once, hottest first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierstore.engine.versions.hot_keys import distinct_keys

sources = st.lists(st.lists(st.integers(-20, 20), max_size=30), max_size=4)


@given(sources, st.integers(0, 60), st.sampled_from([1, 4, 8192]))
def test_keys_come_once_in_the_order_of_their_sources(lists: list[list[int]], limit: int, step: int) -> None:
    got = distinct_keys([np.array(keys, np.int64) for keys in lists], limit, step)
    assert got.tolist() == list(dict.fromkeys(key for keys in lists for key in keys))[:limit]
    assert got.dtype == np.int64
