"""Embedding bags: pooling the vectors of each bag to one vector, and checking the offsets of bags.

Free functions of arrays without state, nogil: any thread may call them.

Bag `b` is vectors `offsets[b]` up to `offsets[b + 1]`; the last bag runs to the end. Sums are taken in float32, in the order of the vectors, with
each product rounded before it is added: the answer is the same on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.errors import InvalidInput
from tierstore.kernels import FIRST, compiled
from tierstore.types import Combiner

_COMBINERS = {Combiner.SUM: 0, Combiner.MEAN: 1, Combiner.SQRTN: 2}
_INT64 = np.dtype(np.int64)
_NO_WEIGHTS = np.empty(0, np.float32)
_NO_COUNTS = np.empty(0, np.bool_)

_VECTORS = types.Array(types.float32, 2, "C", readonly=True)
_OFFSETS = types.Array(types.int64, 1, "C", readonly=True)
_WEIGHTS = types.Array(types.float32, 1, "C", readonly=True)
_COUNTS = types.Array(types.boolean, 1, "C", readonly=True)


@compiled(
    types.int64(_VECTORS, _OFFSETS, _WEIGHTS, _COUNTS, types.int64, types.float32[:, ::1]),
    error_model="numpy",
    when=FIRST,
)
def _pool(vectors: Any, offsets: Any, weights: Any, counts: Any, combiner: Any, out: Any) -> Any:
    """Pool bags. Returns -1, or the first bag that is not within the vectors. Empty `weights` or `counts` mean none."""
    n, dim = vectors.shape
    weighted, padded = len(weights) > 0, len(counts) > 0
    for bag in range(len(offsets)):
        start = offsets[bag]
        stop = offsets[bag + 1] if bag + 1 < len(offsets) else n
        if start < 0 or stop < start or stop > n:
            return bag
        pooled = out[bag]
        pooled[:] = np.float32(0)
        total = np.float32(0)  # the divisor of the combiner, before the root
        for i in range(start, stop):
            if padded and not counts[i]:
                continue
            vector = vectors[i]
            if weighted:
                weight = weights[i]
                total += weight * weight if combiner == 2 else weight
                for k in range(dim):
                    pooled[k] += weight * vector[k]
            else:
                total += np.float32(1)
                for k in range(dim):
                    pooled[k] += vector[k]
        if combiner == 0:
            continue
        if total == np.float32(0):
            pooled[:] = np.float32(0)
            continue
        divisor = np.sqrt(total) if combiner == 2 else total
        for k in range(dim):
            pooled[k] /= divisor
    return -1


@compiled(types.boolean(_OFFSETS, types.int64), when=FIRST)
def _are_starts(offsets: Any, n_keys: Any) -> Any:
    if offsets.size == 0:
        return n_keys == 0
    if offsets[0] != 0 or offsets[offsets.size - 1] > n_keys:
        return False
    falls = 0
    for bag in range(1, offsets.size):
        falls += offsets[bag] < offsets[bag - 1]
    return falls == 0


def combiner_code(combiner: Combiner) -> int:
    """The number of a combiner in kernels."""
    return _COMBINERS[combiner]


def pool_bags(
    vectors: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float32] | None,
    counts: npt.NDArray[np.bool_] | None,
    combiner: Combiner,
) -> npt.NDArray[np.float32]:
    """Pool each bag of `vectors`, float32[n, dim], to one row of the answer, float32[bags, dim].

    `offsets` int64[bags] as `check_offsets` returns them, `weights` float32[n]. A vector whose `counts`, bool[n], is False adds nothing, and neither
    does its weight. `mean` divides by the sum of weights, `sqrtn` by the root of the sum of their squares; an empty bag, or one whose divisor is
    zero, gives zeros. Raises IndexError for a bag outside of the vectors.
    """
    n, dim = vectors.shape
    out = np.empty((len(offsets), dim), np.float32)
    for name, given in (("weights", weights), ("counts", counts)):
        if given is not None and given.shape != (n,):
            raise ValueError(f"{name} pair up with the {n} vectors, got shape {list(given.shape)}")
    bad = _pool(
        vectors,
        offsets,
        _NO_WEIGHTS if weights is None else weights,
        _NO_COUNTS if counts is None else counts,
        _COMBINERS[combiner],
        out,
    )
    if bad >= 0:
        raise IndexError(f"bag {bad} starts at {offsets[bad]} and does not lie within {n} vectors")
    return out


def check_offsets(offsets: npt.ArrayLike, n_keys: int) -> npt.NDArray[np.int64]:
    """Check that `offsets` cut `n_keys` keys into bags. Returns them as contiguous int64[bags].

    Raises InvalidInput unless they are one-dimensional integers that begin at 0, do not descend and do not pass the keys. Without bags there may be
    no keys.
    """
    try:
        given = np.asarray(offsets)
    except (TypeError, ValueError) as error:  # nested lists of unequal lengths
        raise InvalidInput(f"offsets: expected int64 of shape [bags]: {error}") from error
    if given.dtype == _INT64 and given.ndim == 1 and given.flags.carray and _are_starts(given, n_keys):
        return given
    if given.ndim != 1:
        got = "None" if offsets is None else f"shape {list(given.shape)}"
        raise InvalidInput(f"offsets are one-dimensional, one start a bag; got {got}")
    if given.size == 0:
        if n_keys:
            raise InvalidInput(f"there are {n_keys} keys but no offsets: give the start of each bag, the first 0")
        return np.empty(0, np.int64)
    if given.dtype.kind not in "iu":
        raise InvalidInput(f"offsets are integers, got {given.dtype}")
    if given[0] != 0:
        raise InvalidInput(f"the first offset is 0, got {given[0]}")
    falls = np.flatnonzero(given[1:] < given[:-1])
    if falls.size:
        bag = int(falls[0]) + 1
        raise InvalidInput(
            f"offsets never decrease: bag {bag} starts at {given[bag]}, the one before it at {given[bag - 1]}"
        )
    if given[-1] > n_keys:
        bag = int(np.argmax(given > n_keys))
        raise InvalidInput(
            f"bag {bag} starts at {given[bag]}, beyond the {n_keys} keys; an end entry is not part of offsets"
        )
    return np.ascontiguousarray(given, np.int64)
