"""What `tiers/device/cupy_device.py` uses of CuPy, over the stand-in device, so that the file itself is run without a GPU.

Names, parameters and their order are CuPy's; `test_device_cupy.py` compares them with the real ones where CuPy is
installed. Calls that need CUDA's current device to be the right one fail where it is not.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.tiers.cuda_shim import compile
from tests.tiers.cuda_shim.backend import ShimBuffer, ShimDevice, ShimEvent, ShimStream, adopted
from tests.tiers.cuda_shim.functions import CONTEXT
from tierstore.tiers.device.backend import DeviceError
from tierstore.tiers.device.backend import OutOfDeviceMemory as _Full


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError {status}")


class CUDADriverError(CUDARuntimeError):
    pass


class NVRTCError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class CupyStandIn:
    """The module `cupy`, of a machine with one device.

    `capturing`: the caller's stream captures a CUDA graph. `refused`: the error that every wait raises, if any.
    """

    def __init__(self, device: ShimDevice) -> None:
        self.device, self.capturing, self.refused = device, False, 0
        self.pool: list[ShimBuffer] = []  # memory of answers that are gone
        self._current = threading.local()
        self._streams: dict[int, ShimStream] = {}
        cupy = self

        class Device:
            def __init__(self, device: int | None = None) -> None:
                self.id = cupy.device_id if device is None else device
                self.compute_capability = "90"

            def __enter__(self) -> Device:
                cupy._stack.append(self.id)
                return self

            def __exit__(self, *args: object) -> None:
                cupy._stack.pop()

        class Stream:
            null: Any = None

            def __init__(
                self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
            ) -> None:
                cupy._check()
                made = device.stream()
                self.ptr = 0 if null else id(made)
                cupy._streams[self.ptr] = made
                if null:
                    device.default_stream = made

            @classmethod
            def from_external(cls, obj: Any) -> Stream:
                cupy._check()
                stream = cls.__new__(cls)
                stream.ptr = obj.__cuda_stream__()[1]
                assert stream.ptr in cupy._streams
                return stream

            def __cuda_stream__(self) -> tuple[int, int]:
                return 0, self.ptr

            def __enter__(self) -> Stream:
                cupy._callers.append(self)
                return self

            def __exit__(self, *args: object) -> None:
                cupy._callers.pop()

            def synchronize(self) -> None:
                runtime.streamSynchronize(self.ptr)

            def is_capturing(self) -> bool:
                return cupy.capturing

        class Event:
            def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
                cupy._check()
                self.of = ShimEvent(cupy._streams[0], 0) if 0 in cupy._streams else None
                self.ptr = device.handle(self.of)

        class Memory:
            def __init__(self, size: int) -> None:
                cupy._check()
                try:
                    self._buffer: ShimBuffer = device.alloc(size)
                except _Full as error:
                    raise CUDARuntimeError(2) from error
                self.ptr, self.size = self._buffer.address, size

        class PinnedMemory:
            def __init__(self, size: int, flags: int = 0) -> None:
                cupy._check()
                self.array = device.pinned(size)
                self.ptr, self.size = self.array.ctypes.data, size

        class Runtime:
            memcpyDeviceToHost = 2
            hostAllocPortable = 1
            CUDARuntimeError = CUDARuntimeError

            @staticmethod
            def getDeviceCount() -> int:
                return 1

            @staticmethod
            def getDevice() -> int:
                return cupy.device_id

            @staticmethod
            def setDevice(device: int) -> None:
                cupy._stack[:] = [] if device < 0 else [device]

            @staticmethod
            def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
                cupy._check()
                assert kind == 2
                cupy._streams[stream]._add(lambda: device.move(dst, src, size))

            @staticmethod
            def memcpy(dst: int, src: int, size: int, kind: int) -> None:
                cupy._check()
                device.move(dst, src, size)

            @staticmethod
            def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
                cupy._check()
                cupy._streams[stream]._add(lambda: compile.fill(ptr, value, size))

            @staticmethod
            def streamSynchronize(stream: int) -> None:
                cupy._waited(cupy._streams[stream].synchronize)

            @staticmethod
            def deviceSynchronize() -> None:
                cupy._waited(device.synchronize)

        class Function:
            def __init__(self, module: Module, funcname: str) -> None:
                assert hasattr(compile.library(), f"launch_{funcname}")
                self.ptr = device.functions.kernels[funcname]

        class Module:
            def load(self, cubin: bytes) -> None:
                cupy._check()
                assert cubin == b"code"

            def get_function(self, name: str) -> Function:
                return Function(self, name)

        runtime = Runtime()
        self.cuda = SimpleNamespace(
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=CUDADriverError, ctxGetCurrent=lambda: CONTEXT),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            function=SimpleNamespace(Module=Module, Function=Function),
            nvrtc=NvrtcStandIn(),
            Device=Device, Stream=Stream, Event=Event, Memory=Memory, PinnedMemory=PinnedMemory,
            PinnedMemoryPointer=lambda mem, offset: mem.array[offset:],
            get_current_stream=lambda device_id=-1: cupy._callers[-1] if cupy._callers else Stream.null,
        )  # fmt: skip
        with Device(0):
            Stream.null = Stream(null=True)

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=self.pool.clear)

    @property
    def _stack(self) -> list[int]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        stack: list[int] = self._current.stack
        return stack

    @property
    def _callers(self) -> list[Any]:
        """Streams of the thread's program, the current one last."""
        if not hasattr(self._current, "callers"):
            self._current.callers = []
        callers: list[Any] = self._current.callers
        return callers

    @property
    def device_id(self) -> int:
        return self._stack[-1] if self._stack else -1

    def _check(self) -> None:
        assert self.device_id == self.device.number, "CUDA's current device is another one"

    def _waited(self, wait: Any) -> None:
        self._check()
        if self.refused:
            raise CUDARuntimeError(self.refused)
        try:
            wait()
        except DeviceError as error:
            raise CUDARuntimeError(719) from error

    def empty(self, shape: tuple[int, ...], dtype: Any = float, order: str = "C") -> Any:
        self._check()
        return self._array(self.device.empty(shape, dtype))

    def from_dlpack(self, array: Any) -> Any:
        self._check()
        return self._array(array.__dlpack__(), array.__dlpack_device__()[1])

    def asarray(self, a: Any) -> Any:
        self._check()
        return self._array(adopted(a))

    def ascontiguousarray(self, a: Any) -> Any:
        return a if a.flags.c_contiguous else self._array(np.ascontiguousarray(a.get()))

    def _array(self, array: np.ndarray, number: int = 0) -> Any:
        return SimpleNamespace(
            data=SimpleNamespace(ptr=array.ctypes.data), dtype=array.dtype, shape=array.shape, get=lambda: array,
            flags=SimpleNamespace(c_contiguous=array.flags.c_contiguous), strides=array.strides,
            device=SimpleNamespace(id=number), __cuda_array_interface__=array.__array_interface__,
        )  # fmt: skip


class NvrtcStandIn:
    NVRTCError = NVRTCError
    refused = False

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 80, 90

    def createProgram(self, src: str, name: str, headers: Any, include_names: Any) -> int:
        return 1

    def compileProgram(self, prog: int, options: tuple[str, ...]) -> None:
        self.options = options
        if self.refused:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getCUBIN(self, prog: int) -> bytes:
        return b"code"

    def getPTX(self, prog: int) -> bytes:
        return b"text"

    def getProgramLog(self, prog: int) -> str:
        return "kernels.cu(3): error"

    def destroyProgram(self, prog: int) -> None:
        pass
