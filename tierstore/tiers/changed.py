"""Which keys of a table deltas may have changed: a Bloom filter that grows, so that the others need not be asked for.

One writer at a time adds; any thread asks. `changed_file.py` keeps what was added on disk. A key that was added is never
denied; about one in a hundred that were not is not denied either, and costs a look-up of RocksDB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.kernels import bloom
from tierstore.kernels.codec import address_of
from tierstore.types import Keys

BITS_A_KEY = 12
SMALLEST = 1 << 14  # keys of a first layer


@dataclass(slots=True)
class _Layer:
    words: bloom.Filter
    capacity: int
    held: int = 0


class ChangedKeys:
    """Of one table. Layers double in size, so their number stays small."""

    def __init__(self) -> None:
        # replaced whole by the writer, so that readers need no lock
        self._layers: tuple[_Layer, ...] = ()
        # for kernels: the address of how many layers there are, and of where the words of each are and how many; or 0
        self.place = np.zeros(1, np.int64)
        self._told: list[npt.NDArray[np.int64]] = []  # all of them are kept: they are few and small

    def add(self, keys: Keys) -> Keys:
        """Put `keys` (int64 [n]) in. Whoever begins to ask after this has returned finds them. Returns those that were denied."""
        keys = np.ascontiguousarray(keys)
        perhaps = self.perhaps(keys)
        new = keys if perhaps is None else keys[~perhaps]  # what is there, or seems to be, is not denied anyway
        self.put(new)
        return new

    def put(self, new: Keys) -> None:
        """`add`, for keys that are denied: in the same order they give the same filter to the bit."""
        layers = self._layers
        if layers and (room := layers[-1].capacity - layers[-1].held) > 0:
            part, new = new[:room], new[room:]
            bloom.add(layers[-1].words, part)
            layers[-1].held += len(part)
        if len(new):
            capacity = max(SMALLEST, len(new), 2 * layers[-1].capacity if layers else 0)
            layer = _Layer(bloom.empty(capacity, BITS_A_KEY), capacity, len(new))
            bloom.add(layer.words, new)
            self._layers = (*layers, layer)
            self._tell()

    def _tell(self) -> None:
        """Have kernels find the layers that there are."""
        places = [(address_of(layer.words), len(layer.words)) for layer in self._layers]
        words = np.array([len(places), *(word for place in places for word in place)], np.int64)
        self._told.append(words)
        self.place[0] = address_of(words)

    def perhaps(self, keys: Keys) -> npt.NDArray[np.bool_] | None:
        """Which of `keys` (int64 [n]) may have been added: bool [n], or None if none was."""
        found, answer = 0, np.zeros(len(keys), np.bool_)
        for layer in self._layers:
            found += bloom.ask(layer.words, keys, answer)
        return answer if found else None

    @property
    def keys(self) -> int:
        return sum(layer.held for layer in self._layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.words.nbytes for layer in self._layers)
