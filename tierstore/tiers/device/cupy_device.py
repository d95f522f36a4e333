"""GPUs through CuPy: finds them, and implements `backend.py`. The only module that imports CuPy.

CuPy is imported at the first `find_devices`, not earlier. A machine without CuPy, or without a GPU, has no device tier, and the reason is reported.
Driver errors become `DeviceError` here. Any thread may call anything; CUDA's current device, which is a setting of each thread, is set around every
call and restored. Kernels are compiled when a device's first stream is made, while a store opens. Look-ups and kernels use the driver's own functions
(`driver.py`). Nothing survives the process.

On a machine without a GPU, the tests run the kernels and all code above them on the CPU, compile the kernels with NVRTC if it is installed, and
compare the calls made here with CuPy's signatures if CuPy is installed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from tierstore.errors import ConfigError, InvalidInput
from tierstore.tiers.device.backend import Captured, DeviceError, OutOfDeviceMemory, kernel_names
from tierstore.tiers.device.compile import compile_kernels
from tierstore.tiers.device.driver import (
    CAPTURING,
    FUNCTIONS,
    INVALID_HANDLE,
    OUT_OF_MEMORY,
    Driver,
    Queue,
    captured,
    not_a_stream,
)
from tierstore.tiers.device.driver_calls import NOBODY

NOT_INSTALLED = "extra gpu is not installed"
NO_DEVICE = "no CUDA device"
_Result = TypeVar("_Result")


def find_devices() -> tuple[int, str | None]:
    """(number of CUDA devices, the reason if there are none)."""
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        if getattr(error, "name", None) == "cupy":
            return 0, NOT_INSTALLED
        return 0, f"CuPy cannot be imported: {' '.join(str(error).split())[:300]}"
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # noqa: BLE001 - a driver that is missing or too old may raise anything
        return 0, f"{NO_DEVICE}: {error}"
    return count, None if count else NO_DEVICE


def driver_addresses() -> list[int]:
    """Addresses of the functions that `driver_calls.py` calls, 0 for one that an old driver lacks. A driver must be present."""
    cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
    functions = [*(getattr(cuda, name, None) for name in FUNCTIONS), libc.sched_yield, libc.usleep]
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0 for function in functions]


def _translated(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wrap a method: run it with its device as the current one, and translate its errors."""

    @wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> _Result:
        with self.device.current():
            return method(self, *args, **options)

    return run


class _Current:
    """The context manager of `CudaDevice.current`. CuPy's own `Device` takes ten times as long."""

    __slots__ = ("_before", "_device")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before = self._device.runtime.getDevice()
        if self._before != self._device.number:
            self._device.runtime.setDevice(self._device.number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._before != self._device.number:
            self._device.runtime.setDevice(self._before)
        if error is not None and (ours := self._device.translated(error)) is not None:
            raise ours from error


class CudaBuffer:
    """Memory from cudaMalloc: freed memory goes back to the driver, so that other programs see what the budget says."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        with device.current():
            try:
                self._memory = device.cupy.cuda.Memory(nbytes)
            except device.runtime.CUDARuntimeError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                device.cupy.get_default_memory_pool().free_all_blocks()  # memory that CuPy keeps for later arrays
                self._memory = device.cupy.cuda.Memory(nbytes)
        self.address = int(self._memory.ptr)

    def free(self) -> None:
        with self.device.current():
            self._memory = None


class CudaStream:
    """A stream that does not wait for the default stream."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        driver = device.driver()
        cuda = device.cupy.cuda
        with device.current():
            self._stream = cuda.Stream(non_blocking=True)
            self._events = [cuda.Event(disable_timing=True) for _ in range(2)]
        self.handle, self.events = int(self._stream.ptr), (int(self._events[0].ptr), int(self._events[1].ptr))
        self._queue = Queue(driver, self.handle, self.events)

    def upload(self, to: int, data: np.ndarray) -> None:
        self._queue.upload(to, data)

    @_translated
    def download(self, data: np.ndarray, at: int) -> None:
        runtime = self.device.runtime
        if data.nbytes:
            runtime.memcpyAsync(data.ctypes.data, at, data.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr)

    @_translated
    def clear(self, at: int, nbytes: int) -> None:
        if nbytes:
            self.device.runtime.memsetAsync(at, 0, nbytes, self._stream.ptr)

    def launch(self, kernel: str, threads: int, *args: Any) -> None:
        self._queue.launch(kernel, threads, args)

    def wait_for_caller(self) -> None:
        self._queue.follow(self.device.callers())

    def wait_for_word(self, at: int, scratch: np.ndarray) -> None:
        self._queue.wait(at, scratch)

    @_translated
    def synchronize(self) -> None:
        self._stream.synchronize()


class CudaDevice:
    """One GPU, as a `Backend`."""

    def __init__(self, number: int) -> None:
        count, why = find_devices()
        if number >= count:
            raise ConfigError(f"there is no CUDA device {number}: {why or f'there are {count}'}")
        self.number = number
        self.cupy = import_module("cupy")
        self.runtime = self.cupy.cuda.runtime
        self._lock = threading.Lock()
        self._driver: Driver | None = None  # made at first use; guarded by _lock

    @property
    def device(self) -> CudaDevice:
        return self

    def current(self) -> _Current:
        """Make it the current device of this thread in the block, and translate errors."""
        return _Current(self)

    def translated(self, error: BaseException) -> DeviceError | InvalidInput | None:
        """Our error for an error of the driver; None for other errors."""
        cuda = self.cupy.cuda
        if isinstance(error, cuda.memory.OutOfMemoryError):
            return OutOfDeviceMemory(f"device {self.number}: {error}")
        if not isinstance(error, (self.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)):
            return None
        if error.status in CAPTURING:
            return Captured(captured(self.number))
        if error.status == INVALID_HANDLE:
            return InvalidInput(not_a_stream(self.number))
        # cudaErrorMemoryAllocation of the runtime, CUDA_ERROR_OUT_OF_MEMORY of the driver
        kind = OutOfDeviceMemory if error.status == OUT_OF_MEMORY else DeviceError
        return kind(f"device {self.number}: {error}")

    @_translated
    def driver(self) -> Driver:
        """This device's kernels, compiled at the first call, and the driver functions to launch them. DeviceError if that fails."""
        with self._lock:
            if self._driver is None:
                cuda = self.cupy.cuda
                self._module = cuda.function.Module()  # kept, because the kernels are in it
                self._module.load(compile_kernels(cuda.nvrtc, cuda.Device(self.number).compute_capability))
                kernels = {name: int(self._module.get_function(name).ptr) for name in kernel_names()}
                context = int(cuda.driver.ctxGetCurrent())
                self._driver = Driver(
                    self.number, driver_addresses(), context, kernels,
                    lambda status: str(cuda.driver.CUDADriverError(status)),
                )  # fmt: skip
            return self._driver

    def alloc(self, nbytes: int) -> CudaBuffer:
        return CudaBuffer(self, nbytes)

    @_translated
    def pinned(self, nbytes: int) -> np.ndarray:
        memory = self.cupy.cuda.PinnedMemory(nbytes, self.runtime.hostAllocPortable)
        return np.frombuffer(self.cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def callers(self) -> tuple[int, int]:
        current = int(self.cupy.cuda.get_current_stream(self.number).ptr)
        return (current, 0) if current else (0, NOBODY)  # the default stream too

    def register(self, at: int, nbytes: int) -> int:
        return self.driver().register(at, nbytes)

    def unregister(self, at: int) -> None:
        self.driver().unregister(at)

    def stream(self) -> CudaStream:
        return CudaStream(self)

    @_translated
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        self.check_capture()
        return self.cupy.empty(shape, dtype)

    @contextmanager
    def in_stream(self, stream: Any) -> Iterator[None]:
        with self.current(), self.cupy.cuda.Stream.from_external(stream):
            yield

    @_translated
    def adopt(self, array: Any, *, in_place: bool = False) -> Any:
        self.check_capture()
        cupy = self.cupy
        try:
            # DLPack makes this stream wait for the stream that writes the array
            mine = cupy.from_dlpack(array) if hasattr(array, "__dlpack__") else cupy.asarray(array)
        except (BufferError, TypeError, ValueError) as error:
            raise InvalidInput(f"expected a dense array in the memory of GPU {self.number}: {error}") from error
        if mine.device.id != self.number:
            raise InvalidInput(f"expected an array in the memory of GPU {self.number}, got one on GPU {mine.device.id}")
        if in_place and not mine.flags.c_contiguous:
            raise InvalidInput(
                f"expected a C-contiguous array, got one of shape {mine.shape} with strides {mine.strides}"
            )
        return cupy.ascontiguousarray(mine)

    def check_capture(self) -> None:
        if self.cupy.cuda.get_current_stream().is_capturing():
            raise Captured(captured(self.number))

    def address_of(self, array: Any) -> int:
        return int(array.data.ptr)

    @_translated
    def synchronize(self) -> None:
        self.runtime.deviceSynchronize()
