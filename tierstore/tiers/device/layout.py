"""The places of a table's sets in device memory, for the CPU; `cuda/layout.cuh` has the same for kernels.

Immutable values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.kernels.hashing import mix_all
from tierstore.tiers.device.backend import TABLE
from tierstore.types import Keys, TableSpec

WAYS = 15
LINE_BYTES = 128
ABSENT_BYTES = 32
ABSENT_WAYS = 3
MAX_DEPTH = 6  # halvings: a table can shrink to 1/64; it has one segment more than halvings
COUNTER_BYTES = 64  # totals int64[4] of `write.cu`, then uint32[2] of `say_done`
READERS_AT = 32
MAX_HEAT = 3
HEAT_AT = 20
_WAY = np.arange(WAYS, dtype=np.uint64)


class DeviceLayout:
    """The number of sets of a table of `budget_bytes`, and the size of its segments."""

    def __init__(self, spec: TableSpec, budget_bytes: int) -> None:
        self.spec = spec
        self.stride = -(-spec.row_bytes // 16) * 16
        self.set_bytes = LINE_BYTES + ABSENT_BYTES + WAYS * self.stride
        self.control_bytes = COUNTER_BYTES + -(-spec.dim * 4 // 16) * 16  # counters, default vector
        sets = max(0, (budget_bytes - self.control_bytes) // self.set_bytes)
        # a deeper table can shrink further, but loses the sets that do not fill a region
        self.max_depth = max(min(2, sets.bit_length() - 1), min(MAX_DEPTH, (sets // 64).bit_length() - 1), 0)
        self.sets_per_region = sets >> self.max_depth

    def segment_sets(self, segment: int) -> int:
        return self.sets_per_region << max(0, segment - 1)

    def segment_bytes(self, segment: int) -> int:
        return self.segment_sets(segment) * self.set_bytes

    def sets(self, depth: int) -> int:
        return self.sets_per_region << depth

    def bytes_at(self, depth: int) -> int:
        """Bytes of the table when 2**depth regions are in use."""
        return self.control_bytes + self.sets(depth) * self.set_bytes

    def table(self, segments: list[int], fallback: int, depth: int) -> np.ndarray:
        """`struct Table`, TABLE[1], for kernels; `segments` and `fallback` are addresses."""
        table = np.zeros(1, TABLE)
        table["segments"][0, : len(segments)] = segments
        for name, value in (
            ("sets_per_region", self.sets_per_region), ("fallback", fallback), ("depth", depth),
            ("row_bytes", self.spec.row_bytes), ("stride", self.stride), ("dim", self.spec.dim),
            ("code", self.spec.dtype.code),
        ):  # fmt: skip
            table[name] = value
        return table

    def set_of(self, key: int, depth: int) -> int:
        """The set of a key."""
        hashed = int(mix_all(np.array([key], np.int64))[0])
        return (hashed & (1 << depth) - 1) * self.sets_per_region + ((hashed >> 32) * self.sets_per_region >> 32)


def occupied_keys(lines: npt.NDArray[np.uint64]) -> tuple[Keys, npt.NDArray[np.uint8]]:
    """(keys, heat) of the occupied ways in lines uint64[sets, 16]."""
    heads = lines[:, :1]
    occupied = ((heads >> _WAY) & np.uint64(1)).astype(np.bool_)
    heat = (heads >> (_WAY * np.uint64(2) + np.uint64(HEAT_AT))) & np.uint64(3)
    return lines[:, 1:][occupied].view(np.int64), heat[occupied].astype(np.uint8)
