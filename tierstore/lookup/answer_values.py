"""The values of an answer: the numbers that differ between the requests of a structure, and that its text names by their places.

Records, and free functions of them, nogil; the memory belongs to the caller.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tierstore.kernels.raw import load_i64
from tierstore.kernels.records import at, define, place
from tierstore.wire.request_record import MOST_TENSORS

MOST_NAMES = 64
OUTPUT = define("OutputValues", "the sizes of one output of an answer", {
    "first second": "the first two sizes of the output's shape",
    "bytes at": "the bytes of the output, and their offset in the answer's data",
})  # fmt: skip
VALUES = define("Values", "the numbers that an answer's text needs; a piece names one by its place, counted in words", {
    "named": ((np.int64, (MOST_NAMES,)), "the values of named sizes, of predictions"),
    "outputs": ((OUTPUT.dtype, (MOST_TENSORS,)), "the sizes of each output; of a prediction first those of its rows, later those of its scores"),
})  # fmt: skip
values_at, _output_at = at(VALUES), at(OUTPUT)


@nb.njit(inline="always")
def value_at(values, number):
    """The sizes of an output."""
    return _output_at(place(values_at(values), "outputs"), number)


@nb.njit
def values_bytes(outputs):
    """The bytes of an answer's values, of which that many outputs are in use."""
    return place(value_at(0, outputs), "first")


@nb.njit
def size_of(values, piece, axis):
    """A size of the output that follows a piece."""
    size = piece.sizes[axis]
    return size if size >= 0 else load_i64(values, ~size)
