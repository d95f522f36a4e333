"""The keys of a table that deltas may have changed: a growing Bloom filter, so that other keys are not read from RocksDB.

One writer at a time adds; any thread reads. `changed_keys_file.py` keeps what was added on disk. An added key is always found. About one in a hundred
other keys is found too, and costs a look-up in RocksDB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import address_of
from tierstore.tiers.disk import bloom
from tierstore.types import Keys

BITS_A_KEY = 12
SMALLEST = 1 << 14  # keys of the first layer


@dataclass(slots=True)
class _Layer:
    words: bloom.Filter
    capacity: int
    held: int = 0


class ChangedKeys:
    """The changed keys of one table. Layers double in size, so their number stays small."""

    def __init__(self) -> None:
        # replaced as a whole by the writer, so that readers need no lock
        self._layers: tuple[_Layer, ...] = ()
        # for kernels: the address of the number of layers, followed by the address and the number of words of each layer; or 0
        self.place = np.zeros(1, np.int64)
        self._published: list[npt.NDArray[np.int64]] = []  # kept, because kernels may still read them; they are few

    def add(self, keys: Keys) -> Keys:
        """Add `keys` (int64 [n]). Readers that begin after the return find them.

        Returns the keys that were not found before.
        """
        keys = np.ascontiguousarray(keys)
        found = self.maybe_changed(keys)
        new = keys if found is None else keys[~found]  # the others are found already, by chance or not
        self.put(new)
        return new

    def put(self, new: Keys) -> None:
        """`add` for keys that are not found yet. The same keys in the same order give the same filter, bit by bit."""
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
            self._publish()

    def _publish(self) -> None:
        """Publish the layers to kernels."""
        places = [(address_of(layer.words), len(layer.words)) for layer in self._layers]
        words = np.array([len(places), *(word for place in places for word in place)], np.int64)
        self._published.append(words)
        self.place[0] = address_of(words)

    def maybe_changed(self, keys: Keys) -> npt.NDArray[np.bool_] | None:
        """Which of `keys` (int64 [n]) may have been added: bool [n], or None if none of them was."""
        found, answer = 0, np.zeros(len(keys), np.bool_)
        for layer in self._layers:
            found += bloom.may_hold(layer.words, keys, answer)
        return answer if found else None

    @property
    def keys(self) -> int:
        return sum(layer.held for layer in self._layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.words.nbytes for layer in self._layers)
