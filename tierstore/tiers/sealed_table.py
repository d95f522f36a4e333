"""The sealed files of one table as one: which block may hold a key, and the kernel that reads it there.

Constant; any thread may read. The tier (`sealed.py`) opens the files and closes them when nobody reads any more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore.errors import Corruption, StorageError
from tierstore.kernels import sealed as kernel
from tierstore.kernels.codec import address_of
from tierstore.tiers.readers import ReaderPool
from tierstore.tiers.sealed_file import Opened
from tierstore.types import Keys, Rows, States, Tier

_CHUNK_KEYS = 1024  # of one task: 2 ms warm
_WINDOW = 32  # blocks a task has on their way
_READ_BYTES = 4 << 20  # of a scan


class SealedTable:
    """The base files of one table, whose keys ascend from file to file."""

    def __init__(self, files: list[Opened]) -> None:
        one = files[0]
        for before, after in pairwise(files):
            if (after.row_bytes, after.block_bytes) != (one.row_bytes, one.block_bytes):
                raise Corruption(f"{after.path}: its rows are not laid out as those in {one.path}")
            if before.last_key >= int(after.fences[0]):
                raise Corruption(f"{after.path}: its keys begin before those of {before.path} end")
        self.row_bytes, self.per_block, self.block_bytes = one.row_bytes, one.per_block, one.block_bytes
        ends = np.cumsum([len(file.fences) for file in files], dtype=np.int64)
        self.fences: Keys = one.fences if len(files) == 1 else np.concatenate([file.fences for file in files])
        # in memory once: the files' own are parts of it
        self.files = [
            replace(file, fences=self.fences[end - len(file.fences) : end])
            for file, end in zip(files, ends.tolist(), strict=True)
        ]
        self._numbers = (
            ends,
            np.array([file.rows for file in files], np.int64),
            np.array([file.fd for file in files], np.int64),
        )

    def words(self, changed_at: int) -> npt.NDArray[np.int64]:
        """Where its parts lie, for kernels (`lookupplan.BASE_WORDS`); `changed_at` is where they find the filter."""
        ends, rows, fds = self._numbers
        return np.array(
            [address_of(self.fences), len(self.fences), address_of(ends), address_of(rows), address_of(fds), len(fds),
             self.per_block, self.block_bytes, changed_at],
            np.int64,
        )  # fmt: skip

    def check_row_bytes(self, row_bytes: int, keys: Keys) -> None:
        if row_bytes != self.row_bytes:
            raise Corruption(
                f"{self.files[0].path}: expected rows of {row_bytes} bytes, found {self.row_bytes}: "
                "version.json and the base do not belong together",
                keys=keys.tolist(),
            )

    def get(
        self, keys: Keys, rows: Rows, state: States, readers: ReaderPool, *, wanted: npt.NDArray[np.bool_]
    ) -> list[StorageError]:
        """Answer the `wanted` (bool [n]) of `keys` (int64 [n], ascending, distinct).

        An error, if any, names those that could not be; they and the unwanted ones stay as they were.
        """
        self.check_row_bytes(rows.shape[1], keys)
        if not len(keys):
            return []
        if rows.strides[1] != 1:  # the kernel copies whole rows
            whole, found = np.empty(rows.shape, np.uint8), np.zeros(len(keys), np.uint8)
            failures = self.get(keys, whole, found, readers, wanted=wanted)
            scatter(np.arange(len(keys)), whole, found, rows, state)
            return failures
        lost: list[tuple[int, npt.NDArray[np.int32]]] = []

        def read(start: int, stop: int) -> None:
            trouble = kernel.look_up(
                keys[start:stop], wanted[start:stop], rows[start:stop], state[start:stop],
                self.fences, self._numbers, self.per_block, self.block_bytes, _WINDOW,
            )  # fmt: skip
            if trouble is not None:
                lost.append((start, trouble))

        readers.run(len(keys), read, _CHUNK_KEYS)
        return [self._why(keys, lost)] if lost else []

    def _why(self, keys: Keys, lost: list[tuple[int, npt.NDArray[np.int32]]]) -> StorageError:
        trouble = np.zeros(len(keys), np.int32)
        for start, part in lost:
            trouble[start : start + len(part)] = part
        codes = keys[trouble != 0].tolist()
        what = int(trouble[trouble != 0][0])
        block = int(np.searchsorted(self.fences, codes[0], "right")) - 1
        number = int(np.searchsorted(self._numbers[0], block, "right"))
        block -= int(self._numbers[0][number - 1]) if number else 0
        shown = ", ".join(map(str, codes[:5])) + (", …" if len(codes) > 5 else "")
        where = f"reading {len(codes)} keys of table {self.files[0].table_id} ({shown}): {self.files[number].path}, block {block}"
        if what > 0:
            return StorageError(f"{where}: {os.strerror(what)}", keys=codes)
        words = {
            kernel.DAMAGED: "its checksum does not match",
            kernel.CUT: "the file ends before it",
            kernel.MISPLACED: "another block lies in its place",
        }
        return Corruption(f"{where}: {words[what]}", keys=codes)

    def runs(self, low: int | None, high: int | None, entries: int) -> Iterator[tuple[Opened, int, int]]:
        """(file, first block, last block + 1) of pieces that together hold every key in [low, high)."""
        at_once = max(1, min(_READ_BYTES // self.block_bytes, entries // self.per_block))
        for file in self.files:
            first = 0 if low is None else max(0, int(np.searchsorted(file.fences, low, "right")) - 1)
            last = len(file.fences) if high is None else int(np.searchsorted(file.fences, high))
            if low is not None and file.last_key < low:
                continue
            for begin in range(first, last, at_once):
                yield file, begin, min(begin + at_once, last)

    def close(self) -> None:
        for file in self.files:
            os.close(file.fd)


def scatter(where: npt.NDArray[np.int64], got: Rows, found: States, rows: Rows, state: States) -> None:
    """Put what was answered at its places; what is pending stays as it is there."""
    there = found == Tier.DISK
    rows[where[there]] = got[there]
    settled = found != Tier.PENDING
    state[where[settled]] = found[settled]
