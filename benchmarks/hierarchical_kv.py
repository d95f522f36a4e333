"""HierarchicalKV as a peer of the device tier: built by `nvcc` from headers that are given by a path, and called by ctypes.

https://github.com/NVIDIA-Merlin/HierarchicalKV; nothing of it is in this repository.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_suffix(".cu")


def why_not(headers: Path | None) -> str | None:
    """Why it cannot be measured, or None."""
    if headers is None:
        return "--hkv does not say where its headers are"
    if not (headers / "merlin_hashtable.cuh").is_file():
        return f"{headers} has no merlin_hashtable.cuh"
    return None if shutil.which("nvcc") else "nvcc is not installed"


def built(headers: Path, capability: str) -> Any:
    """The library, for devices of `capability` (`90` is 9.0). Takes nvcc two minutes."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "hierarchical_kv.so"
        options = ("-O3", "-std=c++17", f"-arch=sm_{capability}", "-shared", "-Xcompiler", "-fPIC")
        subprocess.run(["nvcc", *options, f"-I{headers}", "-o", str(library), str(_SOURCE)], check=True)
        made = ctypes.CDLL(str(library))
    made.hkv_open.restype = ctypes.c_void_p
    return made


class HierarchicalKV:
    """A table that holds `rows` vectors at a load of a half at most. Arguments are addresses of the device's memory."""

    def __init__(self, library: Any, rows: int, dim: int) -> None:
        self._library = library
        capacity = 1 << (2 * rows - 1).bit_length()
        self._table = ctypes.c_void_p(library.hkv_open(ctypes.c_size_t(capacity), ctypes.c_size_t(dim)))

    def insert(self, n: int, keys: int, vectors: int) -> None:
        self._library.hkv_insert(self._table, ctypes.c_size_t(n), ctypes.c_void_p(keys), ctypes.c_void_p(vectors))

    def find(self, n: int, keys: int, vectors: int, found: int) -> None:
        """Put a look-up into the default stream."""
        self._library.hkv_find(
            self._table, ctypes.c_size_t(n), ctypes.c_void_p(keys), ctypes.c_void_p(vectors), ctypes.c_void_p(found)
        )

    def close(self) -> None:
        self._library.hkv_close(self._table)
