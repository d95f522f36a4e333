"""Work for a GPU's streams without the interpreter, by the driver's own functions (`driver_calls.py`).

A look-up is one `launch` and one `wait`: it calls no CuPy, uses no event, copies and allocates nothing. Any thread may call; two threads that put
work into one stream must agree on its order. Nothing survives the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tierstore.errors import InvalidInput
from tierstore.tiers.device import driver_calls
from tierstore.tiers.device.backend import THREADS, Captured, DeviceError, DriverCalls, OutOfDeviceMemory

CAPTURING = range(900, 910)  # CUDA_ERROR_STREAM_CAPTURE_…: the call is refused, and the device goes on working
OUT_OF_MEMORY, INVALID_HANDLE = 2, 400
# in the order of `driver_calls.py`; then sched_yield and usleep of the C library, then the context
FUNCTIONS = (
    "cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuStreamWaitEvent", "cuStreamQuery",
    "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode", "cuMemHostRegister_v2",
    "cuMemHostUnregister", "cuMemHostGetDevicePointer_v2", "cuMemcpyDtoHAsync_v2", "cuStreamWaitValue32_v2",
    "cuStreamWriteValue32_v2",
)  # fmt: skip
_MOST_ARGUMENTS = 24
_FOR_KERNELS = 3  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP


class Driver:
    """The driver's functions and kernels for one device. Constant after construction.

    `addresses`: of FUNCTIONS and of the two C library functions. `kernels`: their handles. `describe`: the text of an error.
    """

    def __init__(
        self,
        number: int,
        addresses: Sequence[int],
        context: int,
        kernels: Mapping[str, int],
        describe: Callable[[int], str],
    ) -> None:
        self.number, self.kernels, self._describe = number, kernels, describe
        self.calls = np.array([*addresses, context], np.int64)

    def call(self, which: int, *args: int) -> None:
        """Call one of the functions, by its number in `driver_calls.py`, with at most four arguments."""
        one, two, three, four = (*args, 0, 0, 0)[:4]
        self.check(driver_calls.call(self.calls, which, one, two, three, four, np.zeros(2, np.int64)))

    def register(self, at: int, nbytes: int) -> int:
        """As `Backend.register`."""
        there = np.zeros(1, np.int64)
        self.call(driver_calls.REGISTER, at, nbytes, _FOR_KERNELS)
        try:
            self.call(driver_calls.MAPPED, there.ctypes.data, at)
        except DeviceError:
            self.unregister(at)
            raise
        return int(there[0])

    def unregister(self, at: int) -> None:
        """As `Backend.unregister`."""
        self.call(driver_calls.UNREGISTER, at)

    def check(self, status: int) -> None:
        """Raise our error for an error status of the driver. InvalidInput: the caller's stream is none."""
        if status == 0:
            return
        if status in CAPTURING:
            raise Captured(captured(self.number))
        if status == INVALID_HANDLE:  # no other handle can be
            raise InvalidInput(not_a_stream(self.number))
        kind = OutOfDeviceMemory if status == OUT_OF_MEMORY else DeviceError
        said = "a kernel has ended and did not say so" if status == driver_calls.UNSAID else self._describe(status)
        raise kind(f"device {self.number}: {said}")


class Queue:
    """A stream, by its handle. Kernel arguments are in memory of its own, which the driver reads at each launch.

    `events`: handles of at least as many events as `follow` gets streams.
    """

    def __init__(self, driver: DriverCalls, stream: int, events: Sequence[int]) -> None:
        self._driver, self._calls, self._stream = driver, driver.calls, stream
        self._events = np.array(events, np.int64)
        self._cells = np.zeros(_MOST_ARGUMENTS, np.int64)
        begin = int(self._cells.ctypes.data)
        self._places = np.arange(begin, begin + self._cells.nbytes, 8)
        self._arguments = self._places.copy()
        self._arguments_at = int(self._arguments.ctypes.data)
        self._popped = np.zeros(2, np.int64)

    def launch(self, kernel: str, threads: int, args: Sequence[Any]) -> None:
        """As `DeviceStream.launch`."""
        if threads <= 0:
            return
        cells, arguments = self._cells, self._arguments
        arguments[:] = self._places
        for at, value in enumerate(args):
            if isinstance(value, np.ndarray):
                arguments[at] = value.ctypes.data
            else:
                cells[at] = value
        self._driver.check(
            driver_calls.launch(
                self._calls, self._driver.kernels[kernel], -(-threads // THREADS), THREADS, self._stream,
                self._arguments_at, self._popped,
            )
        )  # fmt: skip

    def upload(self, to: int, data: np.ndarray) -> None:
        """As `DeviceStream.upload`."""
        if data.nbytes:
            self._driver.call(driver_calls.COPY, to, data.ctypes.data, data.nbytes, self._stream)

    def follow(self, streams: Sequence[int]) -> None:
        """Make later work wait for the work in other streams; NOBODY is skipped."""
        self._driver.check(
            driver_calls.follow(self._calls, self._stream, np.array(streams, np.int64), self._events, self._popped)
        )

    def wait(self, at: int, scratch: np.ndarray) -> None:
        """As `DeviceStream.wait_for_word`."""
        self._driver.check(driver_calls.wait(self._calls, at, self._stream, scratch))


def not_a_stream(number: int) -> str:
    """The error text for a caller whose stream the driver does not know."""
    return f"stream: expected one of GPU {number}; this is one of another GPU, or it was destroyed"


def captured(number: int) -> str:
    """The error text for a caller that captures a CUDA graph."""
    return (
        f"device {number}: a CUDA graph is being captured, and a look-up cannot be part of it; look up after the "
        "capture"
    )
