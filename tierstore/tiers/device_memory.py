"""A device's workspaces: fixed memory in which look-ups and writers stage what goes up and comes down.

A workspace is a piece of device memory, as much page-locked CPU memory, and a stream for the copies between them. There
is a fixed number of them, all of one size, so that what is staged never adds up to more: larger requests are cut into
chunks, and who finds all of them taken waits for one. Any thread may take one.

Half of them are for answers that stay on the device: who holds one of those may ask tiers below, other devices among
them, and so take one of the other half. Who holds one of the other half waits for nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from tierstore.tiers.device_backend import Backend, Buffer, DeviceError, Stream

ALIGN = 16  # the widest access of a kernel
WORKSPACES = 4
WORKSPACE_BYTES = 8 << 20
_SHARE = 16  # of the budget that workspaces may take together: one part in this many


class Workspace:
    """One of them, held by one thread. Parts lie at the same offsets on both sides."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffer: Buffer = backend.alloc(nbytes)
        self._pinned = backend.pinned(nbytes)
        self.stream: Stream = backend.stream()
        self.settled = True  # nothing that was put into streams can still use it, but for its holder's own

    def cut(self, *sizes: int) -> list[int]:
        """Offsets of parts of these sizes, one after another. ValueError where they do not fit."""
        offsets, at = [], 0
        for size in sizes:
            offsets.append(at)
            at += -(-size // ALIGN) * ALIGN
        if at > self.nbytes:
            raise ValueError(f"a workspace of {self.nbytes} bytes cannot hold {at}")
        return offsets

    def at(self, offset: int) -> np.uint64:
        """The device address of an offset, as kernels take it."""
        return np.uint64(self._buffer.address + offset)

    def host(self, offset: int, count: int, dtype: type | np.dtype = np.uint8) -> np.ndarray:
        """`count` elements of the CPU side."""
        nbytes = count * np.dtype(dtype).itemsize
        return self._pinned[offset : offset + nbytes].view(dtype)

    def upload(self, begin: int, end: int) -> None:
        """Put a copy of [begin, end) up into the stream."""
        self.stream.upload(int(self.at(begin)), self._pinned[begin:end])

    def download(self, begin: int, end: int) -> None:
        self.stream.download(self._pinned[begin:end], int(self.at(begin)))

    def free(self) -> None:
        self._buffer.free()


class DeviceMemory:
    """A device and its workspaces, which are taken off `budget_bytes`; what is left is for tables."""

    def __init__(self, backend: Backend, budget_bytes: int) -> None:
        self.backend = backend
        self.workspace_bytes = min(WORKSPACE_BYTES, budget_bytes // _SHARE // WORKSPACES // ALIGN * ALIGN)
        self.table_bytes = budget_bytes - WORKSPACES * self.workspace_bytes
        # guarded by _changed
        self._changed = threading.Condition()
        self._all = [Workspace(backend, self.workspace_bytes) for _ in range(WORKSPACES)]
        self._idle = {True: self._all[: WORKSPACES // 2], False: self._all[WORKSPACES // 2 :]}

    @contextmanager
    def workspace(self, *, answers: bool = False) -> Iterator[Workspace]:
        """Hold one for the length of the block, with `answers` one of that half; waits while all of it are taken."""
        idle = self._idle[answers]
        with self._changed:
            self._changed.wait_for(lambda: bool(idle))
            held = idle.pop()
        try:
            self._settle(held)
            yield held
        except BaseException:
            # what was put into streams may still use it, and whoever takes it next is not behind that
            held.settled = False
            with suppress(DeviceError):
                self._settle(held)
            raise
        finally:
            with self._changed:
                idle.append(held)
                self._changed.notify_all()

    def _settle(self, held: Workspace) -> None:
        """Wait for all that may use it. DeviceError where the driver refuses: then it is for the next one to wait."""
        if not held.settled:
            self.backend.synchronize()
            held.settled = True

    @property
    def taken(self) -> int:
        """Workspaces that are held now."""
        return WORKSPACES - sum(map(len, self._idle.values()))

    def close(self) -> None:
        """Free them; nobody may hold one."""
        for workspace in self._all:
            workspace.free()
