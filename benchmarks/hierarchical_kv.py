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


def why_not(given: Path | None) -> str | None:
    """Why it cannot be measured, or None. `given`: its headers, or what `build` made of them."""
    if given is None:
        return "--hkv does not say where its headers are"
    if given.suffix == ".so" and given.is_file():
        return None
    if not (given / "merlin_hashtable.cuh").is_file():
        return f"{given} has no merlin_hashtable.cuh"
    return None if shutil.which("nvcc") else "nvcc is not installed"


def build(headers: Path, capability: str, library: Path, nvcc: str = "nvcc") -> None:
    """Compile for devices of `capability` (`90` is 9.0), which takes two minutes."""
    libraries = Path(shutil.which(nvcc) or nvcc).parents[1] / "lib"  # of nvcc's wheel, which looks for them in lib64
    options = ("-O3", "-std=c++17", f"-arch=sm_{capability}", "-shared", "-Xcompiler", "-fPIC", f"-L{libraries}")
    subprocess.run([nvcc, *options, f"-I{headers}", "-o", str(library), str(_SOURCE)], check=True)


def built(given: Path, capability: str) -> Any:
    """The library, loaded; built first where `given` are the headers."""
    with tempfile.TemporaryDirectory() as folder:
        library = given if given.suffix == ".so" else Path(folder) / "hierarchical_kv.so"
        if library is not given:
            build(given, capability, library)
        made = ctypes.CDLL(str(library.absolute()))
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
