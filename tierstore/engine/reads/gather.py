"""Look-ups of several features in one step, for the dense part: their rows go into the buffer that its session reads.

What memory lacks is read from disk feature by feature, as `lookup.py` does it. The view is held
until a look-up is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import kernels
from tierstore.engine.data.cascade import Cascade
from tierstore.engine.data.overlay import OverlayTable
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.keys import feature_codes
from tierstore.kernels.codec import address_of
from tierstore.lookup import gather as kernel
from tierstore.predict.binding import Bindings
from tierstore.types import FeatureSpec, Keys, Tier

_PENDING = np.uint8(Tier.PENDING)
_DTYPES = np.dtype(np.float32), np.dtype(np.float16)  # by the code of an answer


class GatherSource:
    """Where the rows of one feature come from under a view, and to which place of a buffer they go.

    `code`: 0 for float32, 1 for float16. `padding`: the code of its padding key, if it has one.
    """

    def __init__(
        self,
        feature: FeatureSpec,
        table: Cascade,
        overlays: Sequence[OverlayTable],
        colliding: CollidingKeys | None,
        code: int,
        padding: int | None,
        place: int,
    ) -> None:
        self.feature, self.table = feature, table
        self.colliding, self.code, self.padding, self.place = colliding, code, padding, place
        self.overlays = overlays  # kept, as what the words name is theirs
        self.default = np.ascontiguousarray(table.default, _DTYPES[code])
        self.overlay_words = np.array([address_of(overlay.words) for overlay in overlays], np.int64)


class Gathering:
    """How rows of some features are looked up in one step under one view. Immutable; any thread.

    It keeps the memory that the kernel reads, also that of host tiers which are closed
    meanwhile: they answer nothing then.
    """

    __slots__ = ("_areas", "_calls", "_seq", "_sources", "bindings")

    def __init__(self, bindings: Bindings, sources: Sequence[GatherSource], seq: int) -> None:
        """`bindings` are those of the dense part whose buffer the places of `sources` are in."""
        self.bindings, self._sources, self._seq = bindings, sources, seq
        calls, self._areas = [], []
        for source in sources:
            host = source.table.host
            areas = None if host is None else host.areas
            self._areas.append(areas)
            calls.append(
                (
                    0 if host is None or areas is None else host.words_at, len(source.overlays),
                    address_of(source.overlay_words),
                    address_of(source.default), source.table.spec.dim, source.code,
                    source.padding is not None, source.padding or 0, source.place,
                )
            )  # fmt: skip
        self._calls = np.array(calls, kernel.CALL.dtype)

    def begin(self, keys: Sequence[Any], places: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8]) -> GatheredRows:
        """Start a look-up of the keys of each feature; `places` of `memory` are as `Run.places` has them.

        Raises InvalidInput.
        """
        codes = [
            feature_codes(of, source.feature, source.table.spec, source.colliding)
            for of, source in zip(keys, self._sources, strict=True)
        ]
        return self.begin_codes(np.concatenate(codes) if len(codes) > 1 else codes[0], places, memory)

    def begin_codes(self, codes: Keys, places: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8]) -> GatheredRows:
        """`begin`, with the codes of all keys, feature after feature."""
        return GatheredRows(self, codes, places, memory)


def can_gather(table: Cascade) -> bool:
    """Whether a table's rows can be looked up in one step with others: not where a device tier answers first."""
    return table.device is None and table.host is not None and not kernels.awaited


class GatheredRows:
    """A look-up under way: what memory holds is answered. One thread at a time."""

    __slots__ = ("_gathering", "_hits", "_keys", "_memory", "_places", "_state")

    def __init__(
        self, gathering: Gathering, keys: Keys, places: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8]
    ) -> None:
        self._gathering, self._keys, self._places, self._memory = gathering, keys, places, memory
        self._state = np.empty(len(keys), np.uint8)
        self._hits = int(
            kernel.gather(address_of(gathering._calls), len(gathering._calls), places, keys, self._state, memory)
        )
        if self._hits < 0:
            raise AssertionError("keys and places differ in size")

    @property
    def pending(self) -> bool:
        """Whether there are rows that only the disk tier can answer."""
        return self._hits < len(self._keys) and bool((self._state == _PENDING).any())

    def finish(self) -> None:
        """Read what is pending, and count. To be called once."""
        whole, begin, places = self._hits == len(self._keys), 0, self._places.tolist()
        for source in self._gathering._sources:
            n, at = places[source.place]
            table = source.table
            if whole and table.offer is None:
                table.counts.add_host(n)
            elif whole:
                table.count_from_host(self._keys[begin : begin + n])
            else:
                self._finish(source, slice(begin, begin + n), at)
            begin += n

    def _finish(self, source: GatherSource, part: slice, at: int) -> None:
        keys, state, table = self._keys[part], self._state[part], source.table
        rows = np.ndarray((len(keys), table.spec.dim), _DTYPES[source.code], self._memory, at)
        skipped = 0 if source.padding is None else int(np.count_nonzero(keys == source.padding))
        table.finish(self._gathering._seq, keys, np.flatnonzero(state == _PENDING), rows, state, skipped)
