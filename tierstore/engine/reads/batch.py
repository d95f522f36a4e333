"""One look-up request: keys of one feature, checked and encoded, with the part of a view that answers them.

A `KeyBatch` is immutable. The view makes it, once; from there it goes down: `lookup.py` or `device.py`, the
cascade, the tiers, the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.data.overlay import OverlayTable
from tierstore.errors import InvalidInput
from tierstore.kernels.codec import all_finite
from tierstore.tiers.device.lookup import KeysThere, Pooling
from tierstore.types import Combiner, FeatureSpec, Keys, Vectors

_ANSWER_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
_COMBINERS = {combiner.value: combiner for combiner in Combiner}


@dataclass(slots=True, eq=False)  # not frozen, nor a named tuple: making one would take three times as long
class KeyBatch:
    """What is looked up, and where. Not changed once it is made.

    The view must be held for as long as the look-up takes.
    """

    table: Cascade
    overlays: Sequence[OverlayTable]  # the view's of that table, newest first
    seq: int  # the view's
    codes: Keys  # int64[n]; none where `there` has them
    padding: np.ndarray | None  # bool[n]: keys that count for nothing, and are answered with zeros
    bags: Pooling | None  # how rows are pooled; None: they are not
    dtype: np.dtype[Any]  # of the answer
    out: Vectors | None = None  # where the answer goes, as the caller gave it; None: into a new array
    there: KeysThere | None = None  # codes in the device's memory, for an answer there, without overlays and padding

    @property
    def skipped(self) -> int:
        """How many keys are not looked up."""
        return 0 if self.padding is None else int(np.count_nonzero(self.padding))

    def answer_array(self) -> Vectors:
        """The array for the answer: [n, dim], or [bags, dim]. InvalidInput where `out` does not fit."""
        n, out = len(self.codes) if self.bags is None else len(self.bags.offsets), self.out
        shape = n, self.table.spec.dim
        return np.empty(shape, self.dtype) if out is None else answer_array(shape, self.dtype, out)

    def rows_at(self, positions: np.ndarray, rows: Vectors) -> KeyBatch:
        """The look-up of the keys at some positions, unpooled, into `rows` [len(positions), dim]."""
        padding = None if self.padding is None else self.padding[positions]
        return replace(self, codes=self.codes[positions], padding=padding, bags=None, dtype=rows.dtype, out=rows)


def answer_dtype(name: str) -> np.dtype[Any]:
    """The dtype of an answer by its name. InvalidInput for another one."""
    wanted = _ANSWER_DTYPES.get(name) if isinstance(name, str) else None
    if wanted is None:
        raise InvalidInput(f"dtype {name!r} is not known: answers are 'float32' or 'float16'")
    return wanted


def answer_array(shape: tuple[int, int], dtype: np.dtype[Any], out: Vectors | None) -> Vectors:
    """`out`, or a new array where it is None. InvalidInput where it does not fit."""
    if out is None:
        return np.empty(shape, dtype)
    flags = out.flags
    if out.shape != shape or out.dtype != dtype or not flags.c_contiguous or not flags.writeable:
        raise InvalidInput(
            f"out: expected a writable C-contiguous {dtype} array of shape {shape}, got {out.dtype} of shape "
            f"{out.shape}"
        )
    return out


def checked_weights(weights: Any, n: int) -> np.ndarray:
    """`weights` as float32[n]. InvalidInput."""
    try:
        array = np.ascontiguousarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"weights: expected {n} numbers: {error}") from error
    if array.shape != (n,):
        raise InvalidInput(f"weights: expected one a key, shape ({n},), got {array.shape}")
    if not all_finite(array):
        raise InvalidInput(f"weights: the one at {int(np.flatnonzero(~np.isfinite(array))[0])} is NaN or infinite")
    return array


def combiner_of(feature: FeatureSpec, name: str | None) -> Combiner:
    """The combiner of that name; for None the feature's own. InvalidInput where there is none."""
    if name is None:
        if feature.combiner is None:
            raise InvalidInput(
                f"feature {feature.name!r} has no combiner of its own; name one: combiner='sum', 'mean' or 'sqrtn'"
            )
        return feature.combiner
    combiner = _COMBINERS.get(name) if isinstance(name, str) else None
    if combiner is None:
        raise InvalidInput(f"combiner {name!r} is not known: use 'sum', 'mean' or 'sqrtn'")
    return combiner
