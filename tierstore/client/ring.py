"""Memory that a client shares with a service on the same host: one object of POSIX shared memory, cut into slots.

A slot is leased for one request and its answer, and comes back when the last array that lies in it is gone, so nothing
overwrites what a caller still holds. A slot that the service may still write to (its request was given up) is never used
again; a ring that has lost half of them is `worn`, to be replaced by another. All of it is reserved when it is made: where there is no room, that is an error then and no fault later. The name is
random and goes as soon as the service has opened it, so a crash leaves nothing behind.

Any thread may lease; a slot comes back on whatever thread lets go of it last. After a fork the child leases nothing.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SLOTS = 4
SLOT_BYTES = 8 << 20
ALIGNMENT = 64
_DIRECTORY = Path("/dev/shm")


class Ring:
    """OSError where the memory cannot be had."""

    def __init__(self) -> None:
        # constant after construction
        self.name = f"ts-client-{secrets.token_hex(8)}"  # of the object, and of the region at the service
        self.nbytes = SLOTS * SLOT_BYTES
        self._path = _DIRECTORY / self.name
        self._process = os.getpid()
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.nbytes)
            self._memory = mmap.mmap(descriptor, self.nbytes)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self.lost = 0  # slots that are never leased again; two threads that lose one may count one
        self._free = deque(range(SLOTS))  # appended to and popped from, both atomic: the collector may free at any time

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def inherited(self) -> bool:
        """Whether it is another process's, of which this one was forked."""
        return self._process != os.getpid()

    @property
    def worn(self) -> bool:
        """Whether so many slots are lost that it is time for another ring."""
        return 2 * self.lost >= SLOTS

    def unlink(self) -> None:
        """Remove the name; who has it open goes on using the memory."""
        self._path.unlink(missing_ok=True)

    def lease(self) -> Lease | None:
        """A slot; None if all are in use."""
        if self.inherited:
            return None
        try:
            slot = self._free.popleft()
        except IndexError:
            return None
        space: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, SLOT_BYTES, slot * SLOT_BYTES)
        return Lease(self, slot * SLOT_BYTES, space, weakref.finalize(space, self._free.append, slot))


class Lease:
    """One slot, for one request. Dropped, the slot comes back once no array lies in it."""

    def __init__(self, ring: Ring, begin: int, space: npt.NDArray[np.uint8], back: Any) -> None:
        self._ring, self._begin, self._space, self._back = ring, begin, space, back
        back.atexit = False
        self._at = 0

    def take(self, nbytes: int) -> tuple[dict[str, Any], npt.NDArray[np.uint8]] | None:
        """The next `nbytes` of the slot: the protocol's parameters that name them, and themselves. None if it is full."""
        at = self._at
        if at + nbytes > SLOT_BYTES:
            return None
        self._at = at + (-(-nbytes // ALIGNMENT) * ALIGNMENT)
        span = {
            "shared_memory_region": self._ring.name,
            "shared_memory_offset": self._begin + at,
            "shared_memory_byte_size": nbytes,
        }
        return span, self._space[at : at + nbytes]

    def lose(self) -> None:
        """Never lease this slot again: the service may write to it at any time."""
        if self._back.detach() is not None:
            self._ring.lost += 1
