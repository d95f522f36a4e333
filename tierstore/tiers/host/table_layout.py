"""The layout of a host table's mapping: sizes and places of its areas. Immutable values."""

from __future__ import annotations

import mmap

import numpy as np

from tierstore.kernels.codec import address_of
from tierstore.tiers.host.cache.heat import POLICY_BYTES
from tierstore.tiers.host.cache.layout import ABSENT_BYTES, ABSENTS, CONTROL_BYTES, LINE_BYTES, LINES, WAYS, Areas
from tierstore.types import TableSpec

ALL_ROWS = 1.5  # times the bytes of all rows, so that all stay: sets fill unevenly, with a third of 56 ways spare
# halvings: a table can shrink to 1/256; further bits of a hash give a key's home line
_MAX_DEPTH = 8


class Layout:
    """The layout of a table of at most `budget_bytes`: regions of equal size, each of the same number of sets.

    With `depth` halvings undone, 2**depth regions are in use.
    """

    def __init__(self, spec: TableSpec, budget_bytes: int) -> None:
        self.row_bytes = spec.row_bytes
        self.set_bytes = sum(self.area_bytes())
        sets = max(0, (budget_bytes - CONTROL_BYTES) // self.set_bytes)
        # a deeper table can shrink further, but loses the sets that do not fill a region
        large = min(6, (sets // 64).bit_length() - 1), min(_MAX_DEPTH, (sets // 256).bit_length() - 1)
        self.max_depth = max(min(2, sets.bit_length() - 1), *large, 0)
        self.sets_per_region = sets >> self.max_depth
        self.sets = self.sets_per_region << self.max_depth
        self.size = CONTROL_BYTES + self.sets * self.set_bytes

    def area_bytes(self) -> tuple[int, ...]:
        """Bytes a set for each area; each area is halved by itself. Lines and rows begin at cache lines."""
        return LINES * LINE_BYTES, ABSENTS * ABSENT_BYTES, WAYS * self.row_bytes, POLICY_BYTES

    def cut(self, memory: mmap.mmap) -> Areas:
        """Views of the areas of a mapping of `size` bytes. They keep it alive."""
        whole = np.frombuffer(memory, np.uint8)
        parts, begin = [], 0
        for size in (CONTROL_BYTES, *(self.sets * n for n in self.area_bytes())):
            parts.append(whole[begin : begin + size])
            begin += size
        control, lines, absent, rows, policy = parts
        return Areas(
            control.view(np.int64), lines, lines.view(np.uint32), lines.view(np.int64), policy, policy.view(np.uint16),
            absent, absent.view(np.uint32), absent.view(np.int64), address_of(rows), self.row_bytes,
            self.sets_per_region,
        )  # fmt: skip


def least_budget(spec: TableSpec) -> int:
    """Bytes below which a table, once halved, may hold nothing: those of two sets."""
    return 2 * (CONTROL_BYTES + Layout(spec, 0).set_bytes)
