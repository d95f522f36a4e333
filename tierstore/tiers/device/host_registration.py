"""The host tier's memory as kernels of one device table read it: registered with the driver as long as its layout stays.

`open` locks a few GB a second, so a background thread calls it. Launch arguments change while the table's `order` is held, and `close` waits for the
last kernel that reads. Any thread may call; nothing survives the process.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import numpy as np

from tierstore.kernels.codec import address_of
from tierstore.tiers.device import round_trip
from tierstore.tiers.device.backend import HOST, NO_HOST, Backend, DeviceError, DeviceStream
from tierstore.tiers.device.order import Order
from tierstore.tiers.host.memory import HostMemory
from tierstore.tiers.host.table import HostTable

NOT_YET = "the host tier has not answered yet"


class HostRegistration:
    """The registration of one host tier. `problem` says why kernels do not read it; None if they do."""

    def __init__(self, backend: Backend, stream: DeviceStream, order: Order) -> None:
        # constant after construction
        self._backend, self._stream, self._order = backend, stream, order
        # guarded by _changing, which is taken after the host table's locks
        self._changing = threading.Lock()
        self.problem: str | None = NOT_YET
        self._registered: list[int] = []
        # guarded by _order
        self._of: HostTable | None = None  # the host tier that was tried last
        self._words = NO_HOST

    def _read(self, host: HostTable | None, words: np.ndarray) -> None:
        """Launch kernels from now on with this host tier, by `HOST` [1]."""
        with self._order:
            self._of, self._words = host, words  # kept alive while kernels are launched with its address
            self._order.words[round_trip.HOST] = words.ctypes.data
            self._order.words[round_trip.HOST_OF] = 0 if host is None else id(host)

    def open(self, host: HostTable) -> None:
        """Let kernels read this host tier. Does nothing if it was tried before with the same size."""
        if self._of is not host:
            host.open_to(lambda memory: self._open(host, memory), lambda: self._stop(host))

    def _open(self, host: HostTable, memory: HostMemory) -> None:
        with self._changing:
            self._close()  # the host tier before
            words = self._register(memory)
            self._read(host, words)

    def _register(self, memory: HostMemory) -> np.ndarray:
        there: dict[tuple[int, int], int] = {}
        try:
            for begin, end in memory.ranges_in_use():
                there[begin, end] = self._backend.register(begin, end - begin)
                self._registered.append(begin)
        except DeviceError as error:
            self._close()
            self.problem = f"its memory cannot be registered: {error}"
            return NO_HOST
        self.problem = None
        return _words(memory, there)

    def _stop(self, host: HostTable) -> None:
        with self._changing:
            if self._of is host:
                self._close()

    def close(self) -> None:
        """Let kernels read no host tier, until the next `open`."""
        with self._changing:
            self._close()

    def _close(self) -> None:
        self._read(None, NO_HOST)
        with suppress(DeviceError):  # then the device is not used again
            self._stream.synchronize()
        while self._registered:
            with suppress(DeviceError):
                self._backend.unregister(self._registered.pop())
        self.problem = NOT_YET


def _words(memory: HostMemory, there: dict[tuple[int, int], int]) -> np.ndarray:
    """`HOST` for memory with some ranges at other addresses for kernels."""
    areas, (depth, cursor) = memory.areas, memory.shape
    words = np.zeros(1, HOST)
    for name, at in ("lines", address_of(areas.lines)), ("absent", address_of(areas.absent)), ("rows", areas.rows):
        words[name] = next(to + at - begin for (begin, end), to in there.items() if begin <= at < end)
    words["sets_per_region"], words["row_bytes"] = areas.sets_per_region, areas.row_bytes
    words["depth"], words["cursor"] = depth, cursor
    return words
