"""XXH3-64 of bytes that come in pieces and in any order, such as an object that is read in ranges.

The hash adds up each KiB by itself, to a sixteenth of its size, before it takes it up in turn. So a piece that comes
early is added up at once, and what waits for the bytes before it are the sums. Any thread.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.kernels.xxh3 import BLOCK, add_sums, hash_end, started, sum_blocks

_BEFORE = 64  # bytes before the last block: its last stripe may begin there

Bytes = npt.NDArray[np.uint8]


class ScatteredDigest:
    """The digest of `size` bytes that are added in any order, each once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks = max(0, size - 1) // BLOCK  # all but the last, whole or not
        self._tail = np.zeros(size - self._tail_at, np.uint8)
        # guarded by _lock
        self._acc, self._added = started(), 0  # blocks
        self._sums: dict[int, npt.NDArray[np.uint64]] = {}  # by the first block, of those that cannot be added yet
        self._cut: dict[int, tuple[Bytes, int]] = {}  # blocks of which some bytes came, and how many
        self._lock = threading.Lock()

    @property
    def _tail_at(self) -> int:
        return max(0, self._blocks * BLOCK - _BEFORE)

    def add(self, begin: int, at: int, piece: bytes) -> None:
        """The bytes from `begin` + `at` on: from `at` on, of a file that begins at `begin`."""
        data = np.frombuffer(piece, np.uint8)
        at += begin
        end = at + len(data)
        if end > self._tail_at:
            first = max(at, self._tail_at)
            self._tail[first - self._tail_at : end - self._tail_at] = data[first - at :]
        first, last = -(-at // BLOCK), min(end // BLOCK, self._blocks)  # whole ones
        sums = sum_blocks(data[first * BLOCK - at : last * BLOCK - at]) if first < last else None
        with self._lock:
            if sums is not None:
                self._sums[first] = sums
            if first > last:  # all of it lies in one block
                self._stitch(last, at, data)
            else:
                self._stitch(first - 1, at, data[: first * BLOCK - at])
                self._stitch(last, last * BLOCK, data[last * BLOCK - at :])
            while (ready := self._sums.pop(self._added, None)) is not None:
                add_sums(ready, self._acc)
                self._added += len(ready)

    def hexdigest(self) -> str:
        """16 hex digits, once all bytes were added."""
        if not self._blocks:
            return xxhash.xxh3_64_hexdigest(self._tail.data)
        assert self._added == self._blocks
        return f"{hash_end(self._tail, self._size, self._acc.copy()):016x}"

    def _stitch(self, block: int, at: int, data: Bytes) -> None:
        """A part of a block."""
        if not len(data) or block >= self._blocks:
            return
        content, filled = self._cut.pop(block) if block in self._cut else (np.empty(BLOCK, np.uint8), 0)
        content[at - block * BLOCK : at - block * BLOCK + len(data)] = data
        if filled + len(data) < BLOCK:
            self._cut[block] = content, filled + len(data)
        else:
            self._sums[block] = sum_blocks(content)
