"""Builds the kernels for the CPU, once a run of the tests, and calls them by name."""

from __future__ import annotations

import ctypes
import functools
import mmap
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tierstore.tiers.device.backend import THREADS, kernel_names, kernel_source

SHIM = Path(__file__).with_name("shim.h")
_FLAGS = ("-x", "c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-w")
# A GPU faults where 16 bytes are read from an address that is no multiple of 16, and shifts as it likes: here both end
# the process. The runtime library of the sanitizer is not needed for that.
_CHECKS = (
    "-fsanitize=alignment,shift,signed-integer-overflow,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
)


def missing() -> str | None:
    """Why the kernels cannot be run here, or None."""
    if shutil.which("g++") is None:
        return "g++ is not installed: the kernels cannot be compiled for the CPU"
    return None


@functools.cache
def library() -> ctypes.CDLL:
    source = kernel_source()
    entries = "\n".join(
        f"static void run_{name}(void** args) {{ shim_call({name}, args); }}\n"
        f'extern "C" void launch_{name}(unsigned blocks, unsigned threads, void** args) '
        f"{{ shim_launch(run_{name}, blocks, threads, args); }}\n"
        f'extern "C" unsigned sizes_{name}(unsigned* sizes) {{ return shim_sizes({name}, sizes); }}'
        for name in kernel_names()
    )
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernels.so"
        whole = f'#include "{SHIM}"\n{source}\n{entries}\n'
        done = subprocess.run(
            ["g++", *_FLAGS, *_CHECKS, "-o", str(built), "-"], input=whole, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(built))


_registered: dict[int, int] = {}  # by where they begin, the bytes of ranges that may be read over the bus
_lists: list[np.ndarray] = []  # kept: a kernel may be at an older one
_registering = threading.Lock()


def register(at: int, nbytes: int | None) -> None:
    """Let kernels read a range over the bus; with None no more."""
    with _registering:
        if nbytes is None:
            del _registered[at]
        else:
            assert at % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
            assert not any(begin < at + nbytes and at < begin + size for begin, size in _registered.items())
            _registered[at] = nbytes
        _lists.append(np.array([*((at, at + size) for at, size in _registered.items()), (0, 0)], np.uint64))
        library().shim_register(ctypes.c_void_p(_lists[-1].ctypes.data))


def paused_before(load: int, kernel: threading.Thread, meanwhile: Callable[[], None]) -> bool:
    """Start a thread that runs a kernel, and do something before its load over the bus of that number. Whether it had so many."""
    before, paused, go_on = (
        kind.in_dll(library(), f"shim_{name}")
        for kind, name in ((ctypes.c_long, "pause_before"), (ctypes.c_int, "paused"), (ctypes.c_int, "go_on"))
    )
    before.value = load
    kernel.start()
    while not paused.value and kernel.is_alive():
        kernel.join(0.0005)
    was_paused = bool(paused.value)
    if was_paused:
        meanwhile()
        go_on.value = 1
    kernel.join()
    before.value = 0
    return was_paused


def move(to: int, source: int, nbytes: int) -> None:
    """Copy between addresses; a copy of nothing may name any."""
    if nbytes:
        ctypes.memmove(to, source, nbytes)


def fill(at: int, value: int, nbytes: int) -> None:
    if nbytes:
        ctypes.memset(at, value, nbytes)


def arguments(name: str, pointers: int) -> list[np.ndarray]:
    """A kernel's arguments as they are now, bytes; `pointers`: the address of as many addresses."""
    sizes = (ctypes.c_uint * 32)()
    count = getattr(library(), f"sizes_{name}")(sizes)
    addresses = (ctypes.c_uint64 * count).from_address(pointers)
    return [
        np.frombuffer(ctypes.string_at(at, size), np.uint8).copy() for at, size in zip(addresses, sizes, strict=False)
    ]


def launch(name: str, blocks: int, args: list[np.ndarray]) -> None:
    """Run a kernel to its end."""
    pointers = (ctypes.c_void_p * len(args))(*[arg.ctypes.data for arg in args])
    getattr(library(), f"launch_{name}")(blocks, THREADS, pointers)
