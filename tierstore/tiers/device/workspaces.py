"""A device's workspaces: fixed memory in which look-ups and writers stage uploads and downloads.

A workspace is a piece of device memory, as much page-locked CPU memory (its staging buffer), and a stream for copies. Number and size are fixed, so
staging memory is bounded: larger requests are cut into chunks, and a thread that finds all workspaces in use waits for one. Any thread may use one.

ANSWERING of them are for answers that stay on the device; a thread with one of these may wait for a disk read. A thread with one of the others waits
only for its kernel, or, to upload an answer of the CPU, for the caller's stream, so few are enough.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from tierstore.tiers.device import reports, round_trip
from tierstore.tiers.device.backend import Backend, Buffer, DeviceError, DeviceStream
from tierstore.tiers.device.driver_calls import WAIT_VALUE, WRITE_VALUE
from tierstore.tiers.device.later import Finisher
from tierstore.tiers.device.layout import READERS_AT
from tierstore.tiers.device.round_trip import ALIGN as ALIGN

DONE_BYTES = 8  # a kernel's report that it is done (`say_done`): uint32[2]
WRITTEN_BYTES = DONE_BYTES + 32  # the report of a kernel that writes: then int64[4], the totals
NOTHING = 0  # a kernel argument for an absent array
ANSWERING = 8  # look-ups under way at once
WRITING = 4  # threads that stage writes at once
WORKSPACES = ANSWERING + WRITING
WORKSPACE_BYTES = 32 << 20  # 65,536 keys with rows of 400 bytes
_JOB = Struct(f"{round_trip.JOB_WORDS}q")
_SHARE = 16  # workspaces use at most this part of the budget: one in so many


class Launching(NamedTuple):
    """Arguments for launching a kernel, kept until it has run."""

    stream: DeviceStream
    table: np.ndarray  # `TABLE`
    control: Buffer

    @property
    def counters(self) -> int:
        """The address where kernels that read count, as a kernel argument."""
        return self.control.address + READERS_AT


class Workspace:
    """One workspace, used by one thread in a `with`. Parts have the same offsets on the device and in `staging`.

    `frame` int64[FRAME_WORDS] is for `round_trip.py`. `number`: its place among those that return to the queue `idle`.
    """

    def __init__(self, backend: Backend, nbytes: int, idle: SimpleQueue[Workspace]) -> None:
        self.nbytes, self._backend, self._idle, self.number = nbytes, backend, idle, idle.qsize()
        self._buffer: Buffer = backend.alloc(nbytes)
        self._pinned = backend.pinned(nbytes)
        self._pinned_at = int(self._pinned.ctypes.data)
        self._scratch = np.zeros(2, np.int64)  # for waits
        self.stream: DeviceStream = backend.stream()
        self._held: Launching | None = None  # for the kernel under way
        self.is_free = True  # no kernel or copy of an earlier user can still use it
        self.rests = False  # no work in streams uses it, though it is in a `with`
        self._left = False  # to work that goes on after the `with`
        self.frame = np.zeros(round_trip.FRAME_WORDS, np.int64)
        self.frame[: round_trip.JOB] = self._pinned_at, self._buffer.address, *self.stream.events
        self._job = self.frame[round_trip.JOB : round_trip.AT].data
        idle.put(self)

    def __enter__(self) -> Workspace:
        self._left = self.rests = False
        try:
            self._wait_until_free()
        except BaseException:
            self._idle.put(self)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None and not self.rests:
            self.abandon()
        elif not self._left:
            self.give_back()

    def set_job(self, *words: int) -> None:
        """The request of a look-up: JOB_WORDS."""
        _JOB.pack_into(self._job, 0, *words)

    def leave(self) -> None:
        """In the `with`: keep it in use after that, until `give_back` or another `with`."""
        self._left = True

    def give_back(self) -> None:
        self._left = False
        self._idle.put(self)

    def abandon(self) -> None:
        """Give it back once no work in streams can use it any more: the next user's work does not wait for that."""
        self.is_free = False
        with suppress(DeviceError):
            self._wait_until_free()
        self.give_back()

    def _wait_until_free(self) -> None:
        """Wait for all work that may use it. If the driver refuses (DeviceError), the next user waits."""
        if not self.is_free:
            self._backend.synchronize()
            self.is_free = True

    def cut(self, *sizes: int) -> list[int]:
        """Offsets of parts of these sizes, one after another. ValueError if they do not fit."""
        offsets, at = [], 0
        for size in sizes:
            offsets.append(at)
            at += -(-size // ALIGN) * ALIGN
        if at > self.nbytes:
            raise ValueError(f"a workspace of {self.nbytes} bytes cannot hold {at}")
        return offsets

    def at(self, offset: int) -> int:
        """The device address of an offset, as a kernel argument."""
        return self._buffer.address + offset

    def part(self, at: int, count: int, dtype: type | np.dtype = np.uint8) -> np.ndarray:
        """`staging` of the part whose offset is word `at` of `frame`."""
        return self.staging(int(self.frame[at]), count, dtype)

    def here(self, offset: int) -> int:
        """The address of an offset in its page-locked CPU memory, which kernels reach too."""
        return self._pinned_at + offset

    def launch(self, view: Launching, done_at: int, kernel: str, threads: int, *args: Any) -> None:
        """Run a kernel that reports at offset `done_at` when it is done."""
        self.staging(done_at, 2, np.uint32)[:] = 0
        self._held = view
        view.stream.launch(kernel, threads, *args, view.counters, self.here(done_at))

    def wait(self, done_at: int) -> int:
        """Wait for that kernel. Returns how many keys it has listed. DeviceError if it has failed."""
        assert self._held is not None
        self._held.stream.wait_for_word(self.here(done_at), self._scratch)
        self._held = None
        return int(self.staging(done_at, 2, np.uint32)[1])

    def staging(self, offset: int, count: int, dtype: type | np.dtype = np.uint8) -> np.ndarray:
        """`count` elements of its page-locked CPU memory."""
        nbytes = count * np.dtype(dtype).itemsize
        return self._pinned[offset : offset + nbytes].view(dtype)

    def waits_in_streams(self) -> bool:
        """Whether the driver lets a stream wait for a word in memory, and write one: tried out."""
        driver, words = self._backend.driver(), self.staging(0, 4, np.uint32)
        if not driver.calls[WAIT_VALUE] or not driver.calls[WRITE_VALUE]:
            return False
        words[:] = reports.WHOLE, 0, 0, 0
        try:
            driver.call(WAIT_VALUE, self.stream.handle, self.here(0), reports.WHOLE)
            driver.call(WRITE_VALUE, self.stream.handle, self.here(reports.OVER), 1)
            self.stream.synchronize()
        except DeviceError:
            return False
        return bool(words[2])

    def free(self) -> None:
        """Free its memory. It is in use only if the device has failed."""
        if self._left:
            self.is_free = False
            with suppress(DeviceError):
                self._wait_until_free()
        self._buffer.free()


class DeviceMemory:
    """A device and its workspaces, which are part of `budget_bytes`; tables get the remainder.

    `finisher`: of look-ups that nobody waits for; None if the driver cannot put them off.
    """

    def __init__(self, backend: Backend, budget_bytes: int) -> None:
        self.backend, self.driver = backend, backend.driver()
        self.workspace_bytes = min(WORKSPACE_BYTES, budget_bytes // _SHARE // WORKSPACES // ALIGN * ALIGN)
        self.table_bytes = budget_bytes - WORKSPACES * self.workspace_bytes
        self._idle: dict[bool, SimpleQueue[Workspace]] = {True: SimpleQueue(), False: SimpleQueue()}
        self._all = [
            Workspace(backend, self.workspace_bytes, self._idle[number < ANSWERING]) for number in range(WORKSPACES)
        ]
        self.finisher = Finisher(self.driver.calls, ANSWERING) if self._all[0].waits_in_streams() else None

    def workspace(self, *, answers: bool = False) -> Workspace:
        """A workspace for a `with`; with `answers`, one for answers on the device. Waits while all of that kind are in use."""
        idle = self._idle[answers]
        if answers and self.finisher is not None and not idle.qsize():
            self.finisher.end_some()
        return idle.get()

    def free_workspace(self) -> Workspace | None:
        """`workspace(answers=True)` if there is one now."""
        try:
            return self._idle[True].get_nowait()
        except Empty:
            return None

    @property
    def held(self) -> int:
        """The number of workspaces in use."""
        return WORKSPACES - sum(idle.qsize() for idle in self._idle.values())

    def close(self) -> None:
        """Free the workspaces, after the look-ups that nobody waits for."""
        if self.finisher is not None:
            self.finisher.close()
        for workspace in self._all:
            workspace.free()
