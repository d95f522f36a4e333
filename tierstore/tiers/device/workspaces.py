"""A device's workspaces: fixed memory in which look-ups and writers stage what is uploaded and downloaded.

A workspace is a piece of device memory, as much page-locked CPU memory (its staging buffer), and a stream for
copies. Their number and size are fixed, so staging memory is bounded: larger requests are cut into chunks,
and a thread that finds all workspaces in use waits for one. Any thread may use one.

ANSWERING of them are for answers that stay on the device. A thread that holds one of those may wait for a read
of the disk. A thread that holds one of the others waits for nothing but its kernel, so few are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from tierstore.tiers.device import round_trip
from tierstore.tiers.device.backend import Backend, Buffer, DeviceError, DeviceStream
from tierstore.tiers.device.layout import READERS_AT
from tierstore.tiers.device.round_trip import ALIGN as ALIGN
from tierstore.tiers.device.round_trip import COPIED_FROM

DONE_BYTES = 8  # what a kernel says when it is done (`say_done`): uint32[2]
WRITTEN_BYTES = DONE_BYTES + 32  # and one that writes to a table: then int64[4], its totals
NOTHING = 0  # an argument of a kernel, for an array that is not there
ANSWERING = 8  # as many look-ups are under way at once
WRITING = 4  # as many threads stage what is written
WORKSPACES = ANSWERING + WRITING
WORKSPACE_BYTES = 32 << 20  # 65,536 keys with rows of 400 bytes
_SHARE = 16  # workspaces together use at most one part in so many of the budget


class Reading(NamedTuple):
    """What a kernel that reads is launched with; held until it has run, as the default vector is in `control`."""

    stream: DeviceStream
    table: np.ndarray  # `TABLE`
    control: Buffer

    @property
    def counters(self) -> int:
        """Where kernels that read count, an argument of theirs."""
        return self.control.address + READERS_AT


class Workspace:
    """One workspace, held by one thread within a `with`. Parts are at the same offsets on the device and in `staging`.

    `frame` int64[FRAME_WORDS] is `round_trip.py`'s. `idle`: where it is put when it is held no more.
    """

    def __init__(self, backend: Backend, nbytes: int, idle: SimpleQueue[Workspace]) -> None:
        self.nbytes, self._backend, self._idle = nbytes, backend, idle
        self._buffer: Buffer = backend.alloc(nbytes)
        self._pinned = backend.pinned(nbytes)
        self._pinned_at = int(self._pinned.ctypes.data)
        self._scratch = np.zeros(2, np.int64)  # of whoever waits
        self.stream: DeviceStream = backend.stream()
        self._held: Reading | None = None  # by the kernel under way
        self.is_free = True  # no kernel or copy of an earlier user can still be using it
        self.frame = np.zeros(round_trip.FRAME_WORDS, np.int64)
        self.frame[: round_trip.JOB] = self._pinned_at, self._buffer.address, *self.stream.events
        self.job = self.frame[round_trip.JOB : round_trip.AT]
        idle.put(self)

    def __enter__(self) -> Workspace:
        try:
            self._wait_until_free()
        except BaseException:
            self._idle.put(self)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            # work in streams may still use it, and the next user's work does not wait for that
            self.is_free = False
            with suppress(DeviceError):
                self._wait_until_free()
        self._idle.put(self)

    def _wait_until_free(self) -> None:
        """Wait for all work that may use it. DeviceError where the driver refuses: then the next user waits."""
        if not self.is_free:
            self._backend.synchronize()
            self.is_free = True

    def cut(self, *sizes: int) -> list[int]:
        """Offsets of parts of these sizes, one after another. ValueError where they do not fit."""
        offsets, at = [], 0
        for size in sizes:
            offsets.append(at)
            at += -(-size // ALIGN) * ALIGN
        if at > self.nbytes:
            raise ValueError(f"a workspace of {self.nbytes} bytes cannot hold {at}")
        return offsets

    def at(self, offset: int) -> int:
        """The device address of an offset, as an argument of kernels."""
        return self._buffer.address + offset

    def here(self, offset: int) -> int:
        """The address of an offset of its page-locked CPU memory, which kernels reach too."""
        return self._pinned_at + offset

    def send(self, stream: DeviceStream, begin: int, end: int) -> Callable[[int], int]:
        """Have [begin, end) read by the next kernel of `stream`: gives the addresses of its offsets.

        A kernel reads little straight from page-locked memory, in less time than a copy takes to begin.
        """
        if end - begin < COPIED_FROM:
            return self.here
        stream.upload(self.at(begin), self._pinned[begin:end])
        return self.at

    def launch(self, reading: Reading, done_at: int, kernel: str, threads: int, *args: Any) -> None:
        """Run a kernel, which says at offset `done_at` that it is done."""
        self.staging(done_at, 2, np.uint32)[:] = 0
        self._held = reading
        reading.stream.launch(kernel, threads, *args, reading.counters, self.here(done_at))

    def wait(self, done_at: int) -> int:
        """Wait for that kernel. Returns how many keys it has listed. DeviceError where it has failed."""
        assert self._held is not None
        self._held.stream.wait_for_word(self.here(done_at), self._scratch)
        self._held = None
        return int(self.staging(done_at, 2, np.uint32)[1])

    def staging(self, offset: int, count: int, dtype: type | np.dtype = np.uint8) -> np.ndarray:
        """`count` elements of its page-locked CPU memory."""
        nbytes = count * np.dtype(dtype).itemsize
        return self._pinned[offset : offset + nbytes].view(dtype)

    def free(self) -> None:
        self._buffer.free()


class DeviceMemory:
    """A device and its workspaces. They are part of `budget_bytes`; the remainder is for tables."""

    def __init__(self, backend: Backend, budget_bytes: int) -> None:
        self.backend, self.driver = backend, backend.driver()
        self.workspace_bytes = min(WORKSPACE_BYTES, budget_bytes // _SHARE // WORKSPACES // ALIGN * ALIGN)
        self.table_bytes = budget_bytes - WORKSPACES * self.workspace_bytes
        self._idle: dict[bool, SimpleQueue[Workspace]] = {True: SimpleQueue(), False: SimpleQueue()}
        self._all = [
            Workspace(backend, self.workspace_bytes, self._idle[number < ANSWERING]) for number in range(WORKSPACES)
        ]

    def workspace(self, *, answers: bool = False) -> Workspace:
        """Take one for a `with`, with `answers` one of those for that. Waits while all of its kind are in use."""
        return self._idle[answers].get()

    @property
    def held(self) -> int:
        """Workspaces that are in use now."""
        return WORKSPACES - sum(idle.qsize() for idle in self._idle.values())

    def close(self) -> None:
        """Free them. None may be in use."""
        for workspace in self._all:
            workspace.free()
