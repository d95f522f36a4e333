"""The sealed files of one table: finds the block that may hold a key, and lets a kernel read it there.

Any thread may read. The tier (`sealed.py`) opens the files, and closes them when nobody reads them any more. In between their descriptors may be
closed; `awake` opens them again. Kernels find descriptors in memory; a compiled reader that finds -1 leaves its keys to Python.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import open_files
from tierstore.errors import Corruption, StorageError
from tierstore.formats.keys import partition_of
from tierstore.kernels.codec import address_of
from tierstore.tiers.disk import sealed_blocks as kernel
from tierstore.tiers.disk.layout import BASE
from tierstore.tiers.disk.sealed_file import Opened, open_again
from tierstore.types import Keys, Rows, States, Tier

_READ_BYTES = 4 << 20  # of a scan


class SealedTable:
    """The base files of one table, whose keys ascend from file to file.

    With `parts`, each file has keys of one partition of so many, files are in the order of partitions, and keys ascend within each.
    """

    def __init__(self, files: list[Opened], parts: int = 1) -> None:
        one, of = files[0], [_partition_of_all(file, parts) for file in files]
        for (before, part), (after, next_part) in pairwise(zip(files, of, strict=True)):
            if (after.row_bytes, after.block_bytes) != (one.row_bytes, one.block_bytes):
                raise Corruption(f"{after.path}: its rows are not laid out as those in {one.path}")
            if next_part < part or (next_part == part and before.last_key >= int(after.first_keys[0])):
                raise Corruption(f"{after.path}: its keys begin before those of {before.path} end")
        self.parts = parts
        self.row_bytes, self.per_block, self.block_bytes = one.row_bytes, one.per_block, one.block_bytes
        ends = np.cumsum([len(file.first_keys) for file in files], dtype=np.int64)
        self.first_keys: Keys = (
            one.first_keys if len(files) == 1 else np.concatenate([file.first_keys for file in files])
        )
        # in memory once: the arrays of files are parts of it
        self.files = [
            replace(file, first_keys=self.first_keys[end - len(file.first_keys) : end])
            for file, end in zip(files, ends.tolist(), strict=True)
        ]
        blocks = np.bincount(of, [len(file.first_keys) for file in files], parts).astype(np.int64)
        self.part_starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks)])
        self._numbers = ends, np.array([file.rows for file in files], np.int64)
        self._descriptors = np.array([file.fd for file in files], np.int64)  # of `files`
        self._opening = threading.Lock()
        self._is_awake = True  # guarded by _opening; read without it

    def words(self, changed_at: int) -> npt.NDArray[Any]:
        """The addresses of its parts, for kernels; `changed_at` is the filter's."""
        (ends, rows), fds = self._numbers, self._descriptors
        return BASE.make(
            fences_at=address_of(self.first_keys), fences=len(self.first_keys),
            part_starts_at=address_of(self.part_starts), parts=self.parts,
            ends_at=address_of(ends), rows_at=address_of(rows), fds_at=address_of(fds), files=len(fds),
            per_block=self.per_block, block_bytes=self.block_bytes, changed_at=changed_at,
        )  # fmt: skip

    def check_row_bytes(self, row_bytes: int, keys: Keys) -> None:
        if row_bytes != self.row_bytes:
            raise Corruption(
                f"{self.files[0].path}: expected rows of {row_bytes} bytes, found {self.row_bytes}: "
                "version.json and the base do not belong together",
                keys=keys.tolist(),
            )

    def why(self, keys: Keys, lost: list[tuple[int, npt.NDArray[np.int32]]]) -> StorageError:
        """The error for failed blocks. `lost`: a place in `keys`, and `trouble` of `sealed_rows.read` from there on."""
        trouble = np.zeros(len(keys), np.int32)
        for start, wrong in lost:
            trouble[start : start + len(wrong)] = wrong
        codes = keys[trouble != 0].tolist()
        what = int(trouble[trouble != 0][0])
        part = int(partition_of(np.array(codes[:1]), self.parts)[0])
        begin, end = self.part_starts[part : part + 2]
        block = int(begin + np.searchsorted(self.first_keys[begin:end], codes[0], "right")) - 1
        number = int(np.searchsorted(self._numbers[0], block, "right"))
        block -= int(self._numbers[0][number - 1]) if number else 0
        shown = ", ".join(map(str, codes[:5])) + (", …" if len(codes) > 5 else "")
        where = (
            f"reading {len(codes)} keys of table {self.files[0].table_id} ({shown}): {self.files[number].path}, "
            f"block {block}"
        )
        if what > 0:
            return StorageError(f"{where}: {os.strerror(what)}", keys=codes)
        words = {
            kernel.DAMAGED: "its checksum does not match",
            kernel.CUT: "the file ends before it",
            kernel.MISPLACED: "another block lies in its place",
        }
        return Corruption(f"{where}: {words[what]}", keys=codes)

    def runs(self, low: int | None, high: int | None, entries: int, part: int) -> Iterator[tuple[Opened, int, int]]:
        """(file, first block, last block + 1) of pieces that together hold every key of a part in [low, high), ascending."""
        at_once = max(1, min(_READ_BYTES // self.block_bytes, entries // self.per_block))
        begin, end = self.part_starts[part : part + 2]
        those = np.searchsorted(self._numbers[0], (begin, end), "right")
        for file in self.files[slice(*those.tolist())]:
            first = 0 if low is None else max(0, int(np.searchsorted(file.first_keys, low, "right")) - 1)
            last = len(file.first_keys) if high is None else int(np.searchsorted(file.first_keys, high))
            if low is not None and file.last_key < low:
                continue
            for begin in range(first, last, at_once):
                yield file, begin, min(begin + at_once, last)

    def awake(self) -> None:
        """Open all files, until `close_idle_files`. Corruption if one is not the file that it was, StorageError."""
        if not self._is_awake:
            with self._opening:
                open_files.allow(len(self.files))
                for number, file in enumerate(self.files):
                    if file.fd < 0:
                        self._descriptors[number] = file.fd = open_again(file)
                self._is_awake = True

    def close_idle_files(self) -> list[int]:
        """Give up all descriptors. Returns them, to be closed once no compiled reader has them any more.

        No thread of Python may be reading meanwhile.
        """
        with self._opening:
            self._is_awake = False
            descriptors = [file.fd for file in self.files if file.fd >= 0]
            self._descriptors[:] = -1
            for file in self.files:
                file.fd = -1
            return descriptors

    def close(self) -> None:
        close_all(self.close_idle_files())


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _partition_of_all(file: Opened, parts: int) -> int:
    """The partition of all keys of a file. Corruption if they are in several."""
    of = partition_of(file.first_keys, parts)
    if (of != of[0]).any():
        raise Corruption(f"{file.path}: its keys are in several partitions of {parts}")
    return int(of[0])


def scatter(where: npt.NDArray[np.int64], got: Rows, found: States, rows: Rows, state: States) -> None:
    """Copy answered rows and states to their positions; pending ones stay as they are."""
    there = found == Tier.DISK
    rows[where[there]] = got[there]
    answered = found != Tier.PENDING
    state[where[answered]] = found[answered]
