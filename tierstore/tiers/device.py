"""The door of CuPy: which GPUs there are, and their memory, streams and kernels as `device_backend` asks for them.

CuPy is imported by `find_devices` and not before; a machine without it, or without a GPU, has no device tier and is told
why. Driver errors become `DeviceError` here. Any thread may call anything; CUDA's current device, which is a thread's
own, is set around every call and left as it was. Kernels are compiled when a device's first stream is made, so while a
store opens. Nothing survives the process.

Not run on a GPU by this revision. The tests run the kernels and all logic above on the CPU, compile the kernels with
NVRTC where it is installed, and compare what is called here with what CuPy has, where that is installed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from tierstore.errors import ConfigError
from tierstore.tiers.device_backend import THREADS, Captured, DeviceError, OutOfDeviceMemory, kernel_names
from tierstore.tiers.device_compile import compile_kernels

IPC_HANDLE_BYTES = 64
NOT_INSTALLED = "extra gpu is not installed"
NO_DEVICE = "no CUDA device"
_CAPTURING = range(900, 910)  # cudaErrorStreamCapture…: the calls are refused, and the device is as well as before
_OUT_OF_MEMORY = 2
_Result = TypeVar("_Result")


def find_devices() -> tuple[int, str | None]:
    """(number of CUDA devices, why there is none)."""
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        if getattr(error, "name", None) == "cupy":
            return 0, NOT_INSTALLED
        return 0, f"CuPy cannot be imported: {' '.join(str(error).split())[:300]}"
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
            try:
                self._memory = device.cupy.cuda.Memory(nbytes)
            except device.runtime.CUDARuntimeError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                device.cupy.get_default_memory_pool().free_all_blocks()  # kept for answers to come
                self._memory = device.cupy.cuda.Memory(nbytes)
        self.address = int(self._memory.ptr)

    def free(self) -> None:
        with self.device.current():
            self._memory = None


class CudaStream:
    """A stream that does not wait for the default one."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._kernels = device.kernels()
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
            self._kernels[kernel]((-(-threads // THREADS),), (THREADS,), args, stream=self._stream)

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
        self._lock = threading.Lock()
        self._kernels: Mapping[str, Any] = {}  # once there are any; guarded by _lock

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
            if error.status in _CAPTURING:
                raise Captured(_captured(self.number)) from error
            # cudaErrorMemoryAllocation of the runtime, CUDA_ERROR_OUT_OF_MEMORY of the driver
            kind = OutOfDeviceMemory if error.status == _OUT_OF_MEMORY else DeviceError
            raise kind(f"device {self.number}: {error}") from error

    @_translated
    def kernels(self) -> Mapping[str, Any]:
        """Of this device, by name; compiled by the first who asks. DeviceError where they cannot be."""
        with self._lock:
            if not self._kernels:
                cuda = self.cupy.cuda
                module = cuda.function.Module()  # which its functions keep
                module.load(compile_kernels(cuda.nvrtc, cuda.Device(self.number).compute_capability))
                self._kernels = {name: module.get_function(name) for name in kernel_names()}
            return self._kernels

    def alloc(self, nbytes: int) -> CudaBuffer:
        return CudaBuffer(self, nbytes)

    @_translated
    def pinned(self, nbytes: int) -> np.ndarray:
        memory = self.cupy.cuda.PinnedMemory(nbytes, self.runtime.hostAllocPortable)
        return np.frombuffer(self.cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    def stream(self) -> CudaStream:
        return CudaStream(self)

    @_translated
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if self.cupy.cuda.get_current_stream().is_capturing():
            raise Captured(_captured(self.number))  # before a call that would end the caller's capture
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
            held = _bytes_from(self._address)
        if held is not None and held < nbytes:
            self.close()
            raise ConfigError(f"device {device.number}: the handle is of {held} bytes, not of {nbytes}")

    @_translated
    def read(self, at: int, data: np.ndarray) -> None:
        """Fill `data` (contiguous, in CPU memory) from byte `at` on."""
        runtime = self.device.runtime
        runtime.memcpy(data.ctypes.data, self._address + at, data.nbytes, runtime.memcpyDeviceToHost)

    @_translated
    def write(self, at: int, data: np.ndarray) -> None:
        runtime = self.device.runtime
        runtime.memcpy(self._address + at, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)
        # the other process is told over a socket, which orders nothing on the device
        runtime.streamSynchronize(self.device.cupy.cuda.Stream.null.ptr)

    @_translated
    def close(self) -> None:
        self.device.runtime.ipcCloseMemHandle(self._address)


def _captured(number: int) -> str:
    return f"device {number}: a CUDA graph is being captured, of which a look-up can be no part; ask when it is done"


def _bytes_from(address: int) -> int | None:
    """How much device memory lies from an address to the end of its allocation; None where the driver does not say.

    What lies beyond is somebody else's, ours among others.
    """
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    except (OSError, AttributeError):
        return None
    begin, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    if ask(ctypes.byref(begin), ctypes.byref(nbytes), ctypes.c_uint64(address)):
        return None
    return begin.value + nbytes.value - address


def open_ipc(handle: bytes, device: int, nbytes: int) -> IpcMemory:
    """Open a cudaIpcMemHandle_t of another process on this machine. ConfigError or DeviceError where it cannot be."""
    return IpcMemory(CudaDevice(device), handle, nbytes)
