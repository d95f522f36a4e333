"""A device that is CPU memory: the kernels' own source, and streams that put off everything until somebody waits.

A stream does nothing before `synchronize` (of itself or of one that waits for it), and then exactly what was put in, in
order, as late as a real device may. So code that forgets to wait, or reuses memory too early, fails here every time.
Where the CPU watches memory without asking the device, the device does what it can by itself, unless it is `still`.
Device memory is filled with noise where it is new and where it was freed. Any thread may call anything.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tiers.cuda_shim import compile
from tests.tiers.cuda_shim.functions import CONTEXT, Functions
from tierstore.errors import InvalidInput
from tierstore.tiers.device.backend import DeviceError, OutOfDeviceMemory
from tierstore.tiers.device.driver import Driver, Queue
from tierstore.tiers.device.driver_calls import NOBODY

_NOISE = 0xA5
_PATIENCE_S = 60.0
FELL = "the device fell off the bus"


class ShimBuffer:
    def __init__(self, device: ShimDevice, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self._whole = np.full(nbytes + 256, _NOISE, np.uint8)
        self.address = -(-self._whole.ctypes.data // 256) * 256
        self._freed = False

    def free(self) -> None:
        assert not self._freed, "device memory is freed twice"
        self._freed = True
        self._whole[:] = _NOISE
        with self._device.lock:
            self._device.used -= self.nbytes

    def __del__(self) -> None:
        if not self._freed:
            self.free()


class ShimEvent:
    def __init__(self, stream: ShimStream, number: int) -> None:
        self.stream, self.number = stream, number


class ShimStream:
    """`put` counts what was put in, `done` what was run; both guarded by the device's lock."""

    def __init__(self, device: ShimDevice) -> None:
        self._device = device
        self._early = len(device._streams) > device.early_from  # but for the default stream
        self._work: deque[tuple[Callable[[], None], Callable[[bool], bool]]] = deque()
        self.put = self.done = 0
        self._kept: deque[np.ndarray] = deque(maxlen=64)  # what tests upload and let go
        device._streams.append(self)
        self.handle, self._held = id(self), [ShimEvent(self, 0), ShimEvent(self, 0)]
        self.events = (device.handle(self._held[0]), device.handle(self._held[1]))
        self._queue = Queue(device.driver(), self.handle, self.events)

    def _add(self, work: Callable[[], None], ready: Callable[[bool], bool] = lambda patient: True) -> None:
        """`ready` does what the work waits for, or, if it is not patient, as much of it as can be done now."""
        with self._device.lock:
            if self._device.in_line:
                ready = self._device.after_all(ready)
            self._work.append((work, ready))
            self.put += 1
            self._device.latest = ShimEvent(self, self.put)
            if self._early:
                self.run_to(self.put, patient=False)

    def upload(self, to: int, data: np.ndarray) -> None:
        assert data.flags.c_contiguous
        self._kept.append(data)
        self._queue.upload(to, data)

    def download(self, data: np.ndarray, at: int) -> None:
        assert data.flags.c_contiguous
        self._add(lambda: self._device.move(data.ctypes.data, at, data.nbytes))

    def clear(self, at: int, nbytes: int) -> None:
        self._add(lambda: compile.fill(at, 0, nbytes))

    def launch(self, kernel: str, threads: int, *args: Any) -> None:
        self._queue.launch(kernel, threads, args)

    def wait_for_word(self, at: int, scratch: np.ndarray) -> None:
        self._queue.wait(at, scratch)

    def record(self) -> ShimEvent:
        with self._device.lock:
            return ShimEvent(self, self.put)

    def wait(self, event: ShimEvent) -> None:
        self._add(lambda: None, lambda patient: event.stream.run_to(event.number, patient))

    def wait_for_caller(self) -> None:
        """Of the caller's streams, the one that `in_stream` names."""
        self._queue.follow(self._device.callers())

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, id(self)

    def run_to(self, number: int, patient: bool = True) -> bool:
        """Do so many of the things that were put in. False if one of them must wait for the CPU, which takes patience."""
        while self.done < number:
            first = self._work[0]
            if not first[1](patient):
                return False
            if self._work and self._work[0] is first:  # otherwise it was done for a stream that waits for this one
                self.done += 1
                self._work.popleft()[0]()
        return True

    def synchronize(self) -> None:
        with self._device.lock:
            if self._device.broken:
                raise DeviceError(FELL)
            self.run_to(self.put)


class ShimDevice:
    """A `Backend` of `total` bytes. `launched` counts kernels that were run; set `broken` and every wait fails."""

    def __init__(self, total: int = 1 << 30, number: int = 0, early_from: int = 1 << 30) -> None:
        """Streams from the `early_from`th on do everything at once instead, without waiting for what they are not told to."""
        if (reason := compile.missing()) is not None:
            pytest.skip(reason)
        self.lock = threading.RLock()
        self.total, self.number, self.early_from = total, number, early_from
        self.used = 0
        self.broken = self.still = False
        self.in_line = False  # all streams share one queue of the hardware
        self.latest: ShimEvent | None = None
        self.launched: dict[str, int] = {}
        self.locked, self.lockable = 0, 1 << 40  # bytes of the CPU's memory that kernels read, and at most
        self.moved = [0, 0]  # copies, their bytes
        self._caller = threading.local()
        self._pool: deque[np.ndarray] = deque(maxlen=64)  # which keeps the memory of answers that are let go
        self._streams: list[ShimStream] = []
        self._events: dict[int, ShimEvent] = {}
        self.functions = Functions(self)
        self._driver = Driver(number, self.functions.addresses, CONTEXT, self.functions.kernels, lambda _: FELL)
        self.default_stream: Any = ShimStream(self)

    def stream_of(self, handle: int) -> ShimStream:
        if not handle:
            return self.default_stream
        return next(one for one in self._streams if id(one) == handle)

    def event_of(self, handle: int) -> ShimEvent:
        return self._events[handle]

    def move(self, to: int, source: int, nbytes: int) -> None:
        self.moved[0] += 1
        self.moved[1] += nbytes
        compile.move(to, source, nbytes)

    def after_all(self, ready: Callable[[bool], bool]) -> Callable[[bool], bool]:
        """`ready`, once everything is done that was put in before, in any stream."""
        before = self.latest
        return lambda patient: (before is None or before.stream.run_to(before.number, patient)) and ready(patient)

    def reached(self, word: Any, value: int, patient: bool) -> bool:
        """Whether a word has reached a value. One that is patient waits for the CPU, while no other call of the driver gets on."""
        until = time.monotonic() + _PATIENCE_S
        while word.value - value < 0 and patient:
            assert time.monotonic() < until, "a stream waits for a word that nobody writes"
            time.sleep(0.0005)
        return bool(word.value - value >= 0)

    def go_on(self) -> None:
        """What a device does by itself. Nothing while a thread is in a call of the driver: it would not wait for the caller."""
        if self.still or self.broken or not self.lock.acquire(blocking=False):
            return
        try:
            for stream in list(self._streams):
                stream.run_to(stream.put, patient=False)
        finally:
            self.lock.release()

    def alloc(self, nbytes: int) -> ShimBuffer:
        with self.lock:
            if self.used + nbytes > self.total:
                raise OutOfDeviceMemory(f"{nbytes} bytes were asked for, {self.total - self.used} are left")
            self.used += nbytes
        return ShimBuffer(self, nbytes)

    def pinned(self, nbytes: int) -> np.ndarray:
        whole = np.full(nbytes + 256, _NOISE, np.uint8)
        begin = -whole.ctypes.data % 256
        return whole[begin : begin + nbytes]

    def driver(self) -> Driver:
        return self._driver

    def callers(self) -> tuple[int, int]:
        return getattr(self._caller, "stream", 0), NOBODY

    def register(self, at: int, nbytes: int) -> int:
        return self._driver.register(at, nbytes)

    def unregister(self, at: int) -> None:
        self._driver.unregister(at)

    def stream(self) -> ShimStream:
        return ShimStream(self)

    def handle(self, thing: Any) -> int:
        """By which the driver's functions name an event. It lives as long as the device."""
        self._events[id(thing)] = thing
        return id(thing)

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = self.pinned(nbytes)
        self._pool.append(memory)
        return memory.view(dtype).reshape(shape)

    @contextmanager
    def in_stream(self, stream: Any) -> Iterator[None]:
        self._caller.stream = stream.__cuda_stream__()[1]
        try:
            yield
        finally:
            self._caller.stream = 0

    def adopt(self, array: Any, *, in_place: bool = False) -> np.ndarray:
        mine = array if isinstance(array, np.ndarray) else adopted(array)  # of an earlier `adopt`
        if in_place and not mine.flags.c_contiguous:
            raise InvalidInput("expected a C-contiguous array")
        return np.ascontiguousarray(mine)

    def check_capture(self) -> None:
        pass

    def address_of(self, array: Any) -> int:
        address: int = array.ctypes.data
        return address


class OnGpu:
    """An array as other libraries have it on a GPU: by its address alone, in memory that the stand-in takes for a GPU's."""

    def __init__(self, array: np.ndarray) -> None:
        self.held = array
        self.__cuda_array_interface__ = array.__array_interface__


def adopted(array: Any) -> np.ndarray:
    """The memory of an array that says its address."""
    return np.asarray(SimpleNamespace(__array_interface__=array.__cuda_array_interface__))
