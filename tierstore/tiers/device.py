"""The door of CuPy: which GPUs there are, and their memory, streams and kernels as `device_backend` asks for them.

CuPy is imported by `find_devices` and not before; a machine without it, or without a GPU, has no device tier and is told
why. Driver errors become `DeviceError` here. Any thread may call anything; CUDA's current device, which is a thread's
own, is set around every call and left as it was. Kernels are compiled by NVRTC at the first launch, and kept by CuPy
in its cache on disk. Nothing else survives the process.

Not run on a GPU by this revision: the kernels and all logic above are run on the CPU by the tests, this file is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from tierstore.errors import ConfigError
from tierstore.tiers.device_backend import THREADS, DeviceError, OutOfDeviceMemory, kernel_source

IPC_HANDLE_BYTES = 64
NOT_INSTALLED = "extra gpu is not installed"
NO_DEVICE = "no CUDA device"
_Result = TypeVar("_Result")


def find_devices() -> tuple[int, str | None]:
    """(number of CUDA devices, why there is none)."""
    try:
        cupy = import_module("cupy")
    except ImportError:
        return 0, NOT_INSTALLED
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # noqa: BLE001 - a driver that is too old or not there raises what it likes
        return 0, f"{NO_DEVICE}: {error}"
    return count, None if count else NO_DEVICE


def _translated(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Run a method with its device current, and its errors as ours."""

    @wraps(method)
    def run(self: Any, *args: Any) -> _Result:
        with self.device.current():
            return method(self, *args)

    return run


class CudaBuffer:
    """Memory by cudaMalloc: what is freed is the driver's again, so that the budget is what others see."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        with device.current():
            self._memory = device.cupy.cuda.Memory(nbytes)
        self.address = int(self._memory.ptr)

    def free(self) -> None:
        with self.device.current():
            self._memory = None


class CudaStream:
    """A stream that does not wait for the default one."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        with device.current():
            self._stream = device.cupy.cuda.Stream(non_blocking=True)

    @_translated
    def upload(self, to: int, data: np.ndarray) -> None:
        self._copy(to, data.ctypes.data, data.nbytes, self.device.runtime.memcpyHostToDevice)

    @_translated
    def download(self, data: np.ndarray, at: int) -> None:
        self._copy(data.ctypes.data, at, data.nbytes, self.device.runtime.memcpyDeviceToHost)

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            self.device.runtime.memcpyAsync(to, source, nbytes, kind, self._stream.ptr)

    @_translated
    def clear(self, at: int, nbytes: int) -> None:
        if nbytes:
            self.device.runtime.memsetAsync(at, 0, nbytes, self._stream.ptr)

    @_translated
    def launch(self, kernel: str, threads: int, *args: Any) -> None:
        if threads > 0:
            with self._stream:
                self.device.kernel(kernel)((-(-threads // THREADS),), (THREADS,), args)

    @_translated
    def record(self) -> Any:
        event = self.device.cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event

    @_translated
    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    @_translated
    def wait_for_caller(self) -> None:
        streams = self.device.cupy.cuda
        for stream in (streams.get_current_stream(), streams.Stream.null):
            event = streams.Event(disable_timing=True)
            event.record(stream)
            self._stream.wait_event(event)

    @_translated
    def synchronize(self) -> None:
        self._stream.synchronize()


class CudaDevice:
    """One GPU. A `Backend`."""

    def __init__(self, number: int) -> None:
        count, why = find_devices()
        if number >= count:
            raise ConfigError(f"there is no CUDA device {number}: {why or f'there are {count}'}")
        self.number = number
        self.cupy = import_module("cupy")
        self.runtime = self.cupy.cuda.runtime
        self._module = self.cupy.RawModule(code=kernel_source(), options=("-std=c++17",))

    @property
    def device(self) -> CudaDevice:
        return self

    @contextmanager
    def current(self) -> Iterator[None]:
        cuda = self.cupy.cuda
        try:
            with cuda.Device(self.number):
                yield
        except cuda.memory.OutOfMemoryError as error:
            raise OutOfDeviceMemory(f"device {self.number}: {error}") from error
        except (self.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
            kind = OutOfDeviceMemory if "MemoryAllocation" in str(error) else DeviceError
            raise kind(f"device {self.number}: {error}") from error
        except cuda.compiler.CompileException as error:
            raise DeviceError(f"device {self.number}: the kernels cannot be compiled: {error}") from error

    def kernel(self, name: str) -> Any:
        return self._module.get_function(name)

    def alloc(self, nbytes: int) -> CudaBuffer:
        return CudaBuffer(self, nbytes)

    @_translated
    def pinned(self, nbytes: int) -> np.ndarray:
        memory = self.cupy.cuda.PinnedMemory(nbytes)
        return np.frombuffer(self.cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def stream(self) -> CudaStream:
        return CudaStream(self)

    @_translated
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.cupy.empty(shape, dtype)

    def address_of(self, array: Any) -> int:
        return int(array.data.ptr)

    @_translated
    def synchronize(self) -> None:
        self.runtime.deviceSynchronize()


class IpcMemory:
    """Device memory of another process, of which we read and write the first `nbytes`."""

    def __init__(self, device: CudaDevice, handle: bytes, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        with device.current():
            self._address = int(device.runtime.ipcOpenMemHandle(handle))

    @_translated
    def read(self, at: int, data: np.ndarray) -> None:
        """Fill `data` (contiguous, in CPU memory) from byte `at` on."""
        runtime = self.device.runtime
        runtime.memcpy(data.ctypes.data, self._address + at, data.nbytes, runtime.memcpyDeviceToHost)

    @_translated
    def write(self, at: int, data: np.ndarray) -> None:
        runtime = self.device.runtime
        runtime.memcpy(self._address + at, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()  # the other process is told over a socket, which orders nothing on the device

    @_translated
    def close(self) -> None:
        self.device.runtime.ipcCloseMemHandle(self._address)


def open_ipc(handle: bytes, device: int, nbytes: int) -> IpcMemory:
    """Open a cudaIpcMemHandle_t of another process on this machine. ConfigError or DeviceError where it cannot be."""
    return IpcMemory(CudaDevice(device), handle, nbytes)
