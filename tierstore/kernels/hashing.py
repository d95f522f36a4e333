"""The hash by which caches, indexes and in-memory filters place keys.

It must not change: filters in the file `changed.keys` depend on it. Pure functions; any thread may call them.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from tierstore.types import Keys

_ADD, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@nb.njit(inline="always")
def mix(key: Any) -> Any:
    """64 well mixed bits of an int64 key: the finalizer of SplitMix64 (Steele, Lea, Flood 2014), a bijection."""
    x = nb.uint64(key) + _ADD
    x = (x ^ (x >> nb.uint64(30))) * _FIRST
    x = (x ^ (x >> nb.uint64(27))) * _SECOND
    return x ^ (x >> nb.uint64(31))


def mix_all(keys: Keys) -> npt.NDArray[np.uint64]:
    """`mix` of int64 [n], by NumPy."""
    x = keys.view(np.uint64) + _ADD
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
