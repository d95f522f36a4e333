"""The file of the cache on SSD: segments of equal size, each of which belongs to one table at a time, or is free.

Any thread may read; one thread reserves, writes and frees segments. The file has no name, so that nothing is left of it after the process, however
that ends. Errors of the disk switch the cache off for good: `problem` says why, and the file's bytes are freed.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from tierstore.errors import StorageError
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.ssd import index as ssd_index
from tierstore.types import Keys, Rows, States

log = logging.getLogger(__name__)

_SEGMENTS = 1024  # the fewest segments, unless they would get smaller than a look-up's rows
_LARGEST, _SMALLEST = 1 << 20, 1 << 16
_CHUNK = 512  # keys that one thread reads
_WINDOW = 32  # slots that it reads at a time

Bytes = npt.NDArray[np.uint8]


class CacheFile:
    """The file. It has at most `budget_bytes`.

    `check_room` raises StorageError if the file system has no room for so many more bytes.
    """

    def __init__(
        self, directory: Path, budget_bytes: int, readers: ReaderPool, check_room: Callable[[int], None]
    ) -> None:
        # constant after construction
        self.budget_bytes, self._readers, self._check_room = budget_bytes, readers, check_room
        self.segment_bytes = max(_SMALLEST, min(_LARGEST, budget_bytes // _SEGMENTS // 4096 * 4096))
        self.segments = budget_bytes // self.segment_bytes
        # guarded by _lock
        self._lock = threading.Lock()
        self.problem: str | None = None
        # of the thread that writes
        self._used_ever = 0  # segments that have ever been in use
        self._free: list[int] = []
        self._file: IO[bytes] | None = None
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - it is open until `close`
            self._fd = self._file.fileno()
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            self.switch_off(error)

    @property
    def bytes_in_use(self) -> int:
        return (self._used_ever - len(self._free)) * self.segment_bytes

    @property
    def has_room(self) -> bool:
        """Whether a segment is free."""
        return self._used_ever < self.segments or bool(self._free)

    def reserve(self) -> int | None:
        """A free segment, None if there is none. StorageError if the disk is full."""
        if self._free:
            return self._free.pop()
        if self._used_ever == self.segments:
            return None
        self._check_room(self.segment_bytes)
        self._used_ever += 1
        return self._used_ever - 1

    def free(self, segment: int) -> None:
        self._free.append(segment)

    def write(self, segment: int, start: int, data: Bytes) -> None:
        """Write `data` from byte `start` of a segment on. OSError."""
        left, at = data.reshape(-1).data, segment * self.segment_bytes + start
        while left:
            written = os.pwrite(self._fd, left, at)
            left, at = left[written:], at + written

    def read_segment(self, segment: int, size: int) -> Bytes:
        """The first `size` bytes of a segment. OSError."""
        data = os.pread(self._fd, size, segment * self.segment_bytes)
        if len(data) < size:
            raise OSError(f"expected {size} bytes of segment {segment}, got {len(data)}")
        return np.frombuffer(data, np.uint8)

    def read(self, layout: npt.NDArray[np.int64], slots: Keys, keys: Keys, rows: Rows, state: States) -> None:
        """`index.read`, on several threads. Keys that the disk cannot read stay as they are."""

        def work(begin: int, end: int) -> None:
            buffer, part = np.empty(int(layout[2]), np.uint8), slice(begin, end)
            wrong = ssd_index.read(
                self._fd, slots[part], keys[part], rows[part].ctypes.data, rows.strides[0], rows.shape[1], state[part],
                layout, buffer.ctypes.data, _WINDOW,
            )  # fmt: skip
            if wrong:
                self.switch_off(OSError(wrong, os.strerror(wrong)))

        self._readers.run(len(keys), work, _CHUNK)

    def switch_off(self, error: Exception) -> None:
        """Hold nothing from now on."""
        with self._lock:
            if self.problem is not None:
                return
            self.problem = f"the cache on SSD is off until the next start: {str(error) or type(error).__name__}"
        log.error("%s", self.problem, exc_info=not isinstance(error, (OSError, StorageError)))
        self.shrink()

    def shrink(self) -> None:
        """Free the file's bytes; reads find nothing then."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)

    def close(self) -> None:
        """Close the file. No thread may be reading."""
        if self._file is not None:
            self._file.close()
