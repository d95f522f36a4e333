"""Float32 as text and back, by the writer and the reader of JSON."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import stack_bytes
from tierstore.kernels.raw import load_u32, store_f32
from tierstore.wire.json.numbers import float_at, write_float32

# the one float32, beside its negative, whose fewest digits are read as another one: the double nearest to 7.038531e-26 lies in the middle between two
READ_OTHERWISE = 0x15AE43FD
_U64 = np.uint64


@compiled(types.int64(types.int64, types.int64, types.int64), when=LAST)
def misread(first: Any, last: Any, step: Any) -> Any:
    """How many of the finite float32 with the bits from `first` to `last`, in steps, are not read back as themselves; but for READ_OTHERWISE."""
    text, word, wrong = stack_bytes(64), stack_bytes(8), nb.int64(0)
    for number in range(first, last, step):
        bits = _U64(number)
        if bits & _U64(0x7FFFFFFF) >= _U64(0x7F800000) or bits & _U64(0x7FFFFFFF) == _U64(READ_OTHERWISE):
            continue
        size = write_float32(text, bits) - text
        value, end = float_at(text, 0, size)
        store_f32(word, 0, nb.float32(value))
        wrong += end != size or _U64(load_u32(word, 0)) != bits
    return wrong
