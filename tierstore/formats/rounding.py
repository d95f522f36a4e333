"""Rounding errors of storage dtypes: how far numbers are off once they are read.

A `Rounding` belongs to one thread at a time.
"""

from __future__ import annotations

import numpy as np

from tierstore.kernels.codec import BadRow, decode, encode
from tierstore.types import StorageDtype, Vectors

_NUMBERS = 1 << 16  # at once, so that all of it stays in the processor's caches


class Rounding:
    """How far the numbers of a table, as they are stored, are from those that were added.

    Attributes: `largest`, of any number, and `numbers`, how many there were.
    """

    def __init__(self, dtype: StorageDtype) -> None:
        self._dtype = dtype
        self.largest, self.numbers, self._sum = 0.0, 0, 0.0

    @property
    def mean(self) -> float:
        """The mean over all numbers."""
        return self._sum / max(1, self.numbers)

    def add(self, vectors: Vectors) -> int | None:
        """Count vectors [n, dim]. Returns the first row that the dtype cannot hold (those before count), or None."""
        if self._dtype is StorageDtype.FLOAT32 or self._dtype == vectors.dtype.name:
            self.numbers += vectors.size
            return None
        step = max(1, _NUMBERS // vectors.shape[1])
        for start in range(0, len(vectors), step):
            part = vectors[start : start + step]
            off = np.empty(part.shape, np.float32)
            try:
                decode(encode(part, self._dtype), self._dtype, off)
            except BadRow as error:
                return start + error.row
            np.abs(np.subtract(off, part, out=off), out=off)
            self.largest = max(self.largest, float(off.max()))
            self._sum += float(off.sum(dtype=np.float64))
            self.numbers += off.size
        return None
