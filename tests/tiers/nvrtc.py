"""NVIDIA's run-time compiler, which needs no GPU, under the names that `cupy.cuda.nvrtc` has; where it is installed.

`pip install nvidia-cuda-nvrtc-cu12` is enough. It is no dependency of the tests: 85 MiB for what `nvcc` says as well.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from pathlib import Path
from typing import Any


class NVRTCError(RuntimeError):
    pass


@functools.cache
def library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = [str(path) for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*[0-9]")]
    named = ctypes.util.find_library("nvrtc")
    for path in (*sorted(found, key=len), *([named] if named else [])):
        try:
            for builtins in Path(path).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # which it looks for by name, and not in its own folder
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


class Nvrtc:
    NVRTCError = NVRTCError

    def __init__(self, library: ctypes.CDLL, *more: str) -> None:
        """`more`: options beside those that are asked for."""
        self._library, self._more = library, more

    def _call(self, name: str, *args: Any) -> None:
        if status := getattr(self._library, name)(*args):
            raise NVRTCError(f"{name} returned {status}")

    def _bytes(self, name: str, prog: int) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{name}Size", ctypes.c_void_p(prog), ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{name}", ctypes.c_void_p(prog), text)
        return text.raw

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> tuple[int, ...]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        return tuple(archs)

    def createProgram(self, src: str, name: str, headers: Any, include_names: Any) -> int:
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), src.encode(), name.encode(), 0, None, None)
        assert program.value is not None
        return program.value

    def compileProgram(self, prog: int, options: tuple[str, ...]) -> None:
        every = [option.encode() for option in (*options, *self._more)]
        self._call("nvrtcCompileProgram", ctypes.c_void_p(prog), len(every), (ctypes.c_char_p * len(every))(*every))
        self.log = self.getProgramLog(prog)

    def getCUBIN(self, prog: int) -> bytes:
        return self._bytes("CUBIN", prog)

    def getPTX(self, prog: int) -> bytes:
        return self._bytes("PTX", prog)

    def getProgramLog(self, prog: int) -> str:
        return self._bytes("ProgramLog", prog).rstrip(b"\0").decode()

    def destroyProgram(self, prog: int) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(prog)))
