"""The headers by which reactors answer look-ups: values of Host and Authorization that have passed the check of access before.

For the event loop. Reactors read what is published, without a lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.kernels import reactor_words as kernel
from tierstore.kernels.codec import address_of

MOST = 64  # pairs; what is beyond is for Python to check


class Allowed:
    """Publishes its table in the words that reactors share."""

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self._words = words
        self._pairs: dict[tuple[bytes, bytes], tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]] = {}
        self._published: list[object] = []  # what a reactor may still be reading; few and small
        self._publish([0])

    def add(self, host: bytes, authorization: bytes) -> None:
        """Answer look-ups with these values; an empty `authorization` stands for any, or none."""
        if (host, authorization) in self._pairs or len(self._pairs) >= MOST:
            return
        pair = np.array([*host], np.uint8), np.array([*authorization], np.uint8)
        self._pairs[host, authorization] = pair
        self._published.append(pair)
        arrays = [array for each in self._pairs.values() for array in each]
        self._publish([len(self._pairs), *(word for array in arrays for word in (address_of(array), len(array)))])

    def clear(self) -> None:
        """Answer no look-ups until `add` is called again: tokens have changed."""
        self._pairs.clear()
        self._publish([0])

    def _publish(self, words: list[int]) -> None:
        table = np.array(words, np.int64)
        self._published.append(table)
        self._words[kernel.ALLOWED_AT] = address_of(table)
