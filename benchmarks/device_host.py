"""What a look-up on the device costs the CPU, without a GPU: `python -m benchmarks.device_host [--tiny] [--json FILE]`.

The driver is one whose kernels take no time and find every key on the device. So all is measured but the GPU, NVIDIA's
driver, and CuPy, which makes the arrays of answers (they are NumPy's here). `Model.lookup` and `lookup_bags` are called
as programs call them, in one thread:

    waited    the answer is complete at the return
    streamed  the answer is complete in the order of the caller's stream
    bags      of 16 keys, waited for
    changed   as `waited`, while a delta that has changed a hundredth of the rows is not folded yet
    in cpu    of the same store, answer in CPU memory
    host      of a store without a device tier, answer in CPU memory
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numba as nb
import numpy as np
from numba import types

import tierstore
from benchmarks import report
from benchmarks.machine import describe
from benchmarks.options import parser_of
from tierstore.config import load_settings
from tierstore.kernels.raw import load_i64, store_i64, store_u8
from tierstore.tiers.device import driver_calls, gpu
from tierstore.tiers.device.backend import kernel_names
from tierstore.tiers.device.driver import FUNCTIONS, Driver, Queue
from tierstore.tiers.device.reports import WHOLE
from tierstore.types import Tier

DIM, BAG = 64, 16
SIZES = 64, 1024, 4096
KERNELS = {name: number for number, name in enumerate(kernel_names())}
READERS = KERNELS["look_up"], KERNELS["pool"]
STATES, KEYS, REPORTS = 4, 5, (16, 23)  # places among the arguments of these kernels (`cuda/lookup.cu`)
DEVICE = int(Tier.DEVICE)


@nb.cfunc(types.int64(*[types.int64] * 11), nogil=True)  # type: ignore[untyped-decorator]
def launch(
    kernel: Any, _1: Any, _2: Any, _3: Any, _4: Any, _5: Any, _6: Any, _7: Any, _8: Any, arguments: Any, _9: Any
) -> Any:
    """cuLaunchKernel of a kernel that reads: every key was found on the device."""
    for number in range(len(READERS)):
        if kernel == READERS[number]:
            states, keys = load_i64(load_i64(arguments, STATES), 0), load_i64(load_i64(arguments, KEYS), 0)
            for i in range(keys):
                store_u8(states, i, DEVICE)
            store_i64(load_i64(load_i64(arguments, REPORTS[number]), 0), 0, WHOLE)
    return 0


@nb.cfunc(types.int64(*[types.int64] * 4), nogil=True)  # type: ignore[untyped-decorator]
def write_value(_1: Any, at: Any, value: Any, _2: Any) -> Any:
    store_i64(at, 0, value)
    return 0


@nb.cfunc(types.int64(*[types.int64] * 4), nogil=True)  # type: ignore[untyped-decorator]
def nothing(_1: Any, _2: Any, _3: Any, _4: Any) -> Any:
    return 0


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._held = nbytes, np.zeros(nbytes + 256, np.uint8)
        self.address = -(-self._held.ctypes.data // 256) * 256

    def free(self) -> None:
        del self._held


class Stream:
    """Of a device whose work is done when it is put in."""

    def __init__(self, device: Device) -> None:
        self.handle, self.events = id(self), (1, 2)
        self._queue = Queue(device.driver(), self.handle, self.events)

    def upload(self, to: int, data: np.ndarray) -> None:
        ctypes.memmove(to, data.ctypes.data, data.nbytes)

    def download(self, data: np.ndarray, at: int) -> None:
        ctypes.memmove(data.ctypes.data, at, data.nbytes)

    def clear(self, at: int, nbytes: int) -> None:
        ctypes.memset(at, 0, nbytes)

    def launch(self, kernel: str, threads: int, *args: Any) -> None:
        """A kernel that writes: it reports that it did nothing."""
        self._queue.launch(kernel, threads, args)
        ctypes.c_uint64.from_address(args[-1]).value = WHOLE

    def wait_for_caller(self) -> None:
        pass

    def wait_for_word(self, at: int, scratch: np.ndarray) -> None:
        self._queue.wait(at, scratch)

    def synchronize(self) -> None:
        pass


class Device:
    """A `Backend`."""

    number = 0

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        places = dict.fromkeys(FUNCTIONS, nothing.address) | {
            FUNCTIONS[driver_calls.LAUNCH]: launch.address, FUNCTIONS[driver_calls.WRITE_VALUE]: write_value.address
        }  # fmt: skip
        waits = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (libc.sched_yield, libc.usleep)]
        self._driver = Driver(0, [*places.values(), *waits], 1, KERNELS, str)
        self._callers = 0, driver_calls.NOBODY

    def alloc(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def register(self, at: int, nbytes: int) -> int:
        return at

    def unregister(self, at: int) -> None:
        pass

    def stream(self) -> Stream:
        return Stream(self)

    def driver(self) -> Driver:
        return self._driver

    def callers(self) -> tuple[int, int]:
        return self._callers

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def in_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def adopt(self, array: Any, *, in_place: bool = False) -> Any:
        return array

    def check_capture(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def address_of(self, array: Any) -> int:
        address: int = array.ctypes.data
        return address


def spent_us(call: Callable[[], Any], rounds: int, calls: int) -> float:
    """Of one call, the least of all rounds: what is more is other programs'."""
    least = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        least = min(least, time.perf_counter() - began)
    return least / calls * 1e6


def measure(rows: int, rounds: int, calls: int) -> list[dict[str, Any]]:
    results, rng = [], np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stores:
        with tierstore.SnapshotWriter(Path(work) / "snapshot", model="m", version=1) as writer:
            table = writer.table("t", dim=DIM)
            table.write(np.arange(rows), rng.standard_normal((rows, DIM)).astype(np.float32))
            writer.feature("f", table="t", combiner="sum")

        def opened(budget: str) -> Any:
            settings = load_settings(
                data=Path(work) / f"data-{budget}", host_budget="256MiB", device_budget=budget, fold_grace_s=3600
            )
            store = tierstore.Store(settings)
            stores.callback(store.close)
            store.load_snapshot(Path(work) / "snapshot")
            store.model("m").lookup("f", np.arange(rows))  # into the host tier
            return store

        with mock.patch.object(gpu, "find_backend", return_value=(Device(), None)):
            store = opened("512MiB")
        model, host = store.model("m"), opened("0").model("m")

        def measured(ways: dict[str, Callable[[np.ndarray], Any]]) -> None:
            for size in SIZES:
                keys = rng.integers(0, rows, size)
                for way, ask in ways.items():
                    spent = spent_us(lambda ask=ask, keys=keys: ask(keys), rounds, calls)  # type: ignore[misc]
                    results.append({"asked": way, "keys": size, "us": spent})

        starts = {size: np.arange(0, size, BAG) for size in SIZES}
        measured(
            {
                "waited": lambda keys: model.lookup("f", keys, device="gpu"),
                "streamed": lambda keys: model.lookup("f", keys, stream=0),
                "bags": lambda keys: model.lookup_bags("f", keys, starts[len(keys)], device="gpu"),
                "in cpu": lambda keys: model.lookup("f", keys),
                "host": lambda keys: host.lookup("f", keys),
            }
        )
        with tierstore.DeltaWriter(delta := io.BytesIO(), model="m", seq=1) as changes:
            changes.upsert("t", np.arange(0, rows, 100), rng.standard_normal((rows // 100, DIM)).astype(np.float32))
        store.apply_delta(delta.getvalue())
        measured({"changed": lambda keys: model.lookup("f", keys, device="gpu")})
    return results


def main() -> None:
    options = parser_of(__file__, __doc__, "tiny").parse_args()
    size = {"rows": 5000, "rounds": 2, "calls": 20} if options.tiny else {"rows": 200_000, "rounds": 21, "calls": 2000}
    document = {"benchmark": "device_host", "machine": describe(), "results": measure(**size)}
    report.write(options.json, document)
    print(report.markdown(document))


if __name__ == "__main__":
    main()
