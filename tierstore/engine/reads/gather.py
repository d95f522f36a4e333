"""Look-ups of several features in one step, for the dense part: rows go into the buffer that its session reads.

Rows that memory lacks are read from disk feature by feature. The view is held until a look-up is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import kernels
from tierstore.engine.data.table_view import DTYPES
from tierstore.engine.reads.feature_view import FeatureView
from tierstore.kernels.codec import address_of
from tierstore.lookup import table_rows as kernel
from tierstore.predict.binding import Bindings
from tierstore.types import Keys, Tier

_PENDING = np.uint8(Tier.PENDING)


class Gathering:
    """The look-up of some features in one step under one view. Immutable; any thread."""

    __slots__ = ("_features", "_parts", "_where", "bindings")

    def __init__(self, bindings: Bindings, features: Sequence[FeatureView]) -> None:
        """`bindings`: of the dense part whose buffer has places for the `features`."""
        self.bindings = bindings
        order = list(bindings.features)
        self._features = []  # with the code of its answer, and its place
        for feature in features:
            name = feature.spec.name
            self._features.append((feature, int(bindings.features[name].dtype == "float16"), order.index(name)))
        parts = [
            (feature.rows.address, code, feature.padding is not None, feature.padding or 0, place)
            for feature, code, place in self._features
        ]
        self._parts = np.array(parts, kernel.PART.dtype)
        self._where = address_of(self._parts), len(parts)

    def begin(self, keys: Sequence[Any], places: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8]) -> GatheredRows:
        """Start a look-up of the keys of each feature; `places` of `memory` are as in `Run.places`. Raises
        InvalidInput.
        """
        codes = [feature.codes(of) for of, (feature, _, _) in zip(keys, self._features, strict=True)]
        return GatheredRows(self, np.concatenate(codes) if len(codes) > 1 else codes[0], places, memory)


def can_gather(feature: FeatureView) -> bool:
    """Whether its rows can be looked up in one step with others."""
    return feature.rows.table.host is not None and not kernels.awaited


class GatheredRows:
    """A look-up under way, with the keys in memory answered. One thread at a time."""

    __slots__ = ("_codes", "_gathering", "_hits", "_memory", "_places", "_state")

    def __init__(
        self, gathering: Gathering, codes: Keys, places: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8]
    ) -> None:
        self._gathering, self._codes, self._places, self._memory = gathering, codes, places, memory
        self._state = np.zeros(len(codes), np.uint8)
        self._hits = int(kernel.gather(*gathering._where, places, codes, self._state, memory))
        if self._hits < 0:
            raise AssertionError("keys and places differ in size")

    @property
    def pending(self) -> bool:
        """Whether some rows must come from the disk tier."""
        return self._hits < len(self._codes) and bool((self._state == _PENDING).any())

    def finish(self) -> None:
        """Read what is pending, and count. Call it once."""
        whole, begin, places = self._hits == len(self._codes), 0, self._places.tolist()
        for feature, code, place in self._gathering._features:
            n, at = places[place]
            codes, state = self._codes[begin : begin + n], self._state[begin : begin + n]
            table = feature.rows.table
            if whole:
                table.counts.add_host(n)
            else:
                rows = np.ndarray((n, table.spec.dim), DTYPES[code], self._memory, at)
                feature.rows.finish(codes, rows, state, feature.padding)
            begin += n
