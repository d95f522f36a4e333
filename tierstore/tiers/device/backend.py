"""The protocol of a GPU for the device tier: memory, streams that copy and launch, and the kernels' source.

Two classes implement it: `CudaDevice` over CuPy, and a stand-in of the tests that runs the same kernels on the CPU. Work in a stream is done in order
and later: a download is complete only after `synchronize`, and memory that is uploaded must not change until then. Any thread may call anything; two
threads that put work into one stream must agree on its order. Nothing survives the process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib import resources
from typing import Any, Protocol

import numpy as np

from tierstore.errors import StorageError
from tierstore.tiers.device.round_trip import TEAM as TEAM
from tierstore.tiers.device.round_trip import THREADS as THREADS
from tierstore.tiers.device.round_trip import WARP as WARP

_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged of DLPack
_PARTS = ("words.cuh", "layout.cuh", "codec.cuh", "host.cuh", "codes.cu", "lookup.cu", "write.cu")

# `struct Table` of layout.cuh
TABLE = np.dtype(
    [
        ("segments", np.uint64, 7), ("sets_per_region", np.uint64), ("fallback", np.uint64), ("depth", np.uint32),
        ("row_bytes", np.uint32), ("stride", np.uint32), ("dim", np.uint32), ("code", np.uint32), ("unused", np.uint32),
    ]
)  # fmt: skip

# `struct Host` of host.cuh
HOST = np.dtype(
    [
        ("lines", np.uint64), ("absent", np.uint64), ("rows", np.uint64), ("sets_per_region", np.uint64),
        ("cursor", np.uint64), ("depth", np.uint32), ("row_bytes", np.uint32),
    ]
)  # fmt: skip
NO_HOST = np.zeros(1, HOST)


class DeviceError(StorageError):
    """The device, or its driver, failed."""


class OutOfDeviceMemory(DeviceError):
    """The device has not enough free memory."""


class Captured(DeviceError):
    """A CUDA graph is being captured, so the driver refuses the call. The device goes on working."""


class Buffer(Protocol):
    """Device memory, 256-byte aligned. Freed by `free`, or with the last reference."""

    address: int
    nbytes: int

    def free(self) -> None: ...


class DeviceStream(Protocol):
    """A queue of work. `handle`, `events`: the driver's handles for it, and for two events of its own."""

    handle: int
    events: tuple[int, int]

    def upload(self, to: int, data: np.ndarray) -> None:
        """Copy contiguous pinned memory to address `to`."""

    def download(self, data: np.ndarray, at: int) -> None:
        """Copy from address `at` into contiguous pinned memory."""

    def clear(self, at: int, nbytes: int) -> None:
        """Fill with zeros."""

    def launch(self, kernel: str, threads: int, *args: Any) -> None:
        """Run a kernel with at least so many threads. `args`: integers, and `TABLE` and `HOST` arrays [1]."""

    def wait_for_caller(self) -> None:
        """Make later work wait for the work in the streams of the calling thread's program.

        An answer may reuse the memory of an array that was freed while the program's kernels were still reading it.
        """

    def wait_for_word(self, at: int, scratch: np.ndarray) -> None:
        """Wait until a kernel of this stream has written to a uint32 of pinned memory, which was 0.

        DeviceError if all work in the stream has ended without that, or has failed. `scratch`: int64[2], working memory.
        """

    def synchronize(self) -> None:
        """Wait until all work so far is done. DeviceError if any of it has failed."""


class DriverCalls(Protocol):
    """The driver for compiled look-ups: the addresses of its functions, and the kernels by name."""

    calls: np.ndarray
    kernels: Mapping[str, int]

    def call(self, which: int, *args: int) -> None:
        """Call one of the functions, by its number in `driver_calls.py`."""

    def check(self, status: int) -> None:
        """Raise our error for an error status of the driver."""


class Backend(Protocol):
    """One device."""

    number: int

    def alloc(self, nbytes: int) -> Buffer:
        """Uninitialised memory. OutOfDeviceMemory if there is none."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """uint8[nbytes] of page-locked CPU memory, freed with its last reference."""

    def register(self, at: int, nbytes: int) -> int:
        """Lock whole pages of CPU memory so that kernels can read them. Returns their address for kernels."""

    def unregister(self, at: int) -> None:
        """Undo `register`. No kernel may still be reading the memory."""

    def stream(self) -> DeviceStream: ...

    def driver(self) -> DriverCalls:
        """The driver's functions and kernels, made at the first call."""

    def callers(self) -> tuple[int, int]:
        """Handles of the streams in which the calling thread's program works; NOBODY if there is no second one."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array on the device for an answer; it belongs to the caller.

        OutOfDeviceMemory if there is no room, Captured while the calling thread captures a CUDA graph.
        """

    def in_stream(self, stream: Any) -> AbstractContextManager[None]:
        """In the block the calling thread's program works in `stream`, which has `__cuda_stream__`."""

    def adopt(self, array: Any, *, in_place: bool = False) -> Any:
        """An array of any library, C-contiguous on this device, as it is after the work in the caller's stream; a copy if need be.

        InvalidInput if it is elsewhere or no array, or would be copied though it is to be used `in_place`; Captured as by `empty`.
        """

    def check_capture(self) -> None:
        """Captured if the caller's stream is being captured, so that the calls that follow would end the capture."""

    def synchronize(self) -> None:
        """Wait for everything in every stream."""

    def address_of(self, array: Any) -> int:
        """The device address of an array from `empty` or `adopt`."""


def is_gpu_array(values: Any) -> bool:
    """Whether a value is an array in GPU memory, of any library."""
    if type(values) is np.ndarray or type(values) is list:
        return False
    # asked first, as PyTorch makes a dictionary for each question about the other
    if (device := getattr(values, "__dlpack_device__", None)) is not None:
        return device()[0] in _CUDA
    return hasattr(values, "__cuda_array_interface__")


@cache
def kernel_names() -> tuple[str, ...]:
    return tuple(re.findall(r"__global__ void (\w+)\(", kernel_source()))


@cache
def kernel_source() -> str:
    """The kernels, as one file of CUDA C++ that includes nothing."""
    folder = resources.files("tierstore.tiers.device") / "cuda"
    texts = [(folder / part).read_text(encoding="utf-8") for part in _PARTS]
    return "\n".join(text.replace("#pragma once\n", "") for text in texts)
