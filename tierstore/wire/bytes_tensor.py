"""The wire form of string tensors: each element follows its length (u32, little-endian). Splitting and joining.

Functions of arrays: no shared state, nogil; any thread may call them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels import compiled

_BYTES = types.Array(types.uint8, 1, "C", readonly=True, aligned=True)


@compiled(types.int64(_BYTES, types.Array(types.uint8, 1, "C"), types.Array(types.int64, 1, "C")))
def _split(wire, data, offsets):
    """Split the elements. Returns the number of wire bytes used, or -1 - i where element i runs past the end."""
    size = len(wire)
    at = filled = np.int64(0)
    offsets[0] = 0
    count = len(offsets) - 1
    for i in range(count):
        if size - at < 4:
            return -1 - i
        length = (
            np.int64(wire[at])
            | np.int64(wire[at + 1]) << 8
            | np.int64(wire[at + 2]) << 16
            | np.int64(wire[at + 3]) << 24
        )
        at += 4
        # leave room for the prefixes of the elements that follow: `data` has none for them
        if size - at < length + 4 * (count - 1 - i):
            return -1 - i
        for k in range(length):
            data[filled + k] = wire[at + k]
        at += length
        filled += length
        offsets[i + 1] = filled
    return at


@compiled(
    types.void(_BYTES, types.Array(types.int64, 1, "C", readonly=True), types.Array(types.uint8, 1, "C")),
)
def _join(data, offsets, wire):
    at = np.int64(0)
    for i in range(len(offsets) - 1):
        length = offsets[i + 1] - offsets[i]
        for k in range(4):
            wire[at + k] = (length >> (8 * k)) & 255
        at += 4
        for k in range(length):
            wire[at + k] = data[offsets[i] + k]
        at += length


def join_prefixed(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """The wire form of elements that are end to end in `data`: element i is `data[offsets[i]:offsets[i + 1]]`, below 2^32 bytes.

    data uint8[bytes], offsets int64[n + 1], ascending; read-only or not.
    """
    data, offsets = data.view(), offsets.view()
    data.flags.writeable = offsets.flags.writeable = False
    wire = np.empty(int(offsets[-1] - offsets[0]) + 4 * (len(offsets) - 1), np.uint8)
    _join(data, offsets, wire)
    return wire


def split_prefixed(wire: npt.NDArray[np.uint8], count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Split `count` length-prefixed elements: (data uint8[bytes], offsets int64[count + 1]), with the elements end to end in `data`.

    wire uint8[bytes], contiguous, read-only or not. Raises ValueError unless the elements fill `wire` exactly.
    """
    if count * 4 > len(wire):
        raise ValueError(f"{count} elements need at least {count * 4} bytes, got {len(wire)}")
    readonly = wire.view()
    readonly.flags.writeable = False
    data = np.empty(len(wire) - 4 * count, np.uint8)
    offsets = np.empty(count + 1, np.int64)
    used = _split(readonly, data, offsets)
    if used < 0:
        raise ValueError(f"element {-1 - used} of {count} takes more than its share of the {len(wire)} bytes")
    if used != len(wire):
        raise ValueError(f"{count} elements take {used} bytes, got {len(wire)}")
    return data, offsets
