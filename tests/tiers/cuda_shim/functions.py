"""The functions of a GPU's driver that compiled code calls by address, over the stand-in device.

Each takes the interpreter for itself, as compiled code does not hold it. One that raises fails the test that runs.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.tiers.cuda_shim import compile
from tierstore.tiers.device.backend import THREADS, DeviceError, kernel_names

CONTEXT = 77
LOST = 719
_INVALID_HANDLE, _NOT_READY, NOT_SUPPORTED = 400, 600, 801
_WORD, _UINT = ctypes.c_uint64, ctypes.c_uint32
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int32, _WORD, *[_UINT] * 7, _WORD, _WORD, _WORD)
CALL = ctypes.CFUNCTYPE(ctypes.c_int32, _WORD, _WORD, _WORD, _WORD)


_SLEEPS: list[Any] = []  # which are called by threads that outlive a device


def _sleep(device: Callable[[], Any], *_: int) -> int:
    """Time passes, in which a device goes on by itself."""
    if (found := device()) is not None:
        found.go_on()
        del found
    time.sleep(0.0001)
    return 0


class Functions:
    """`addresses`, in the order of `FUNCTIONS` and with the C library's two; `kernels`, their handles by name.

    `refused`: the error that a question how a stream is gives, after it has done all its work. `refused_in_streams`: an
    error of the functions by which a stream waits for a word, and writes one.
    """

    def __init__(self, device: Any) -> None:
        self._device, self.refused, self.refused_in_streams = device, 0, (0, 0)
        self._sizes: dict[int, int] = {}  # of ranges that are registered, in bytes
        self._thread = threading.local()  # depth: contexts that are pushed; relaxed: its mode of captures
        self.kernels = {name: 1 + number for number, name in enumerate(kernel_names())}
        self._names = {handle: name for name, handle in self.kernels.items()}
        four = (
            self._copy, self._record, self._wait, self._query, self._push, self._pop, self._mode, self._register,
            self._unregister, self._mapped, self._copy, self._wait_value, self._write_value,
        )  # fmt: skip
        _SLEEPS.append(CALL(partial(_sleep, weakref.ref(device))))
        self._held = [LAUNCH(self._launch), *map(CALL, four), ctypes.CDLL(None).sched_yield, _SLEEPS[-1]]
        self.addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._held]

    def _launch(self, kernel: int, *rest: int) -> int:
        *sizes, shared, stream, arguments, extra = rest
        assert sizes == [sizes[0], 1, 1, THREADS, 1, 1]
        assert sizes[0] > 0
        assert shared == extra == 0
        self._check()
        name, held = self._names[kernel], compile.arguments(self._names[kernel], arguments)

        def run() -> None:
            self._device.launched[name] = self._device.launched.get(name, 0) + 1
            compile.launch(name, sizes[0], held)

        self._device.stream_of(stream)._add(run)
        return 0

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        self._check()
        self._device.stream_of(stream)._add(lambda: self._device.move(to, source, nbytes))
        return 0

    def _record(self, event: int, stream: int, *_: int) -> int:
        self._check()
        try:
            recorded = self._device.stream_of(stream).record()
        except StopIteration:  # of another device
            return _INVALID_HANDLE
        of = self._device.event_of(event)
        of.stream, of.number = recorded.stream, recorded.number
        return 0

    def _wait(self, stream: int, event: int, flags: int, _: int) -> int:
        self._check()
        assert flags == 0
        of = self._device.event_of(event)
        self._device.stream_of(stream).wait(type(of)(of.stream, of.number))  # as it is recorded now
        return 0

    def _wait_value(self, stream: int, at: int, value: int, flags: int) -> int:
        """Holds later work of the stream back until the word has reached the value; only the device's work, or a store by the CPU, changes it."""
        self._check()
        assert flags == at % 4 == 0
        if self.refused_in_streams[0]:
            return self.refused_in_streams[0]
        word = ctypes.c_int32.from_address(at)
        self._device.stream_of(stream)._add(lambda: None, lambda patient: self._device.reached(word, value, patient))
        return 0

    def _write_value(self, stream: int, at: int, value: int, flags: int) -> int:
        self._check()
        assert flags == at % 4 == 0
        if self.refused_in_streams[1]:
            return self.refused_in_streams[1]
        word = ctypes.c_int32.from_address(at)

        def write() -> None:
            word.value = value

        self._device.stream_of(stream)._add(write)
        return 0

    def _query(self, stream: int, *_: int) -> int:
        """Whoever asks waits: all work is done, as late as it may be."""
        self._check()
        assert self._thread.relaxed, "the capture of another thread would end"
        try:
            self._device.stream_of(stream).synchronize()
        except DeviceError:
            return LOST
        return self.refused

    def _register(self, at: int, nbytes: int, flags: int, _: int) -> int:
        self._check()
        assert flags == 3
        if self._device.locked + nbytes > self._device.lockable:
            return 2
        self._device.locked += nbytes
        self._sizes[at] = nbytes
        compile.register(at, nbytes)
        return 0

    def _unregister(self, at: int, *_: int) -> int:
        self._check()
        compile.register(at, None)
        self._device.locked -= self._sizes.pop(at)
        return 0

    def _mapped(self, there: int, at: int, *_: int) -> int:
        self._check()
        assert at in self._sizes
        ctypes.c_uint64.from_address(there).value = at
        return 0

    def _push(self, context: int, *_: int) -> int:
        assert context == CONTEXT
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        return 0

    def _pop(self, context: int, *_: int) -> int:
        self._check()
        ctypes.c_uint64.from_address(context).value = CONTEXT
        self._thread.depth -= 1
        return 0

    def _mode(self, mode: int, *_: int) -> int:
        wanted = ctypes.c_uint32.from_address(mode)
        before = 2 if getattr(self._thread, "relaxed", False) else 0
        self._thread.relaxed, wanted.value = wanted.value == 2, before
        return 0

    def _check(self) -> None:
        assert getattr(self._thread, "depth", 0) == 1, "there is no current context"
