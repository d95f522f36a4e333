"""Numba kernels: arrays and scalars in, arrays out.

numba keeps compiled kernels on disk and looks only at a kernel's own source file to tell whether one is out of date
(its modification time, since 0.68 its content), though kernels inline helpers from other files of this folder. So the
stamp by which it tells carries the content of all of them: after an edit, or an upgrade, to any of them every kernel
is compiled anew, instead of running with the old helper inside.

Where they are kept is chosen here too: the first directory that can be written, or that holds all of them for this
machine and version and then need not be. `ahead.py` compiles them before they are asked for.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching
from numba.core.registry import cpu_target

from tierstore.errors import StorageError

_FOLDER = Path(__file__).parent
KERNELS = "kernels"  # within a data directory
_CACHE_VARIABLE = "NUMBA_CACHE_DIR"
_data: list[Path] = []  # the data directory, which takes them where nothing else can be written


def sources_digest(folder: Path) -> bytes:
    """Of all Python sources in `folder`."""
    whole = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        content = source.read_bytes()
        whole.update(f"{source.name} {len(content)}\n".encode() + content)
    return whole.digest()


def _mark(folder: Path) -> str:
    """The name of the file that says: all kernels of these sources are here, for this numba and this processor."""
    machine = repr((numba.__version__, cpu_target.target_context.codegen().magic_tuple()))
    return f"complete-{hashlib.sha256(sources_digest(folder) + machine.encode()).hexdigest()[:32]}"


def _places(folder: Path) -> Iterator[Path]:
    """Directories for the kernels of `folder`, the best first."""
    name = f"{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    if named := os.environ.get(_CACHE_VARIABLE):
        yield Path(named).absolute() / name
    yield folder / "__pycache__"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home) / "tierstore" / name
    for data in _data[-1:]:
        yield data / KERNELS / name
    yield Path(tempfile.gettempdir()) / f"tierstore-{os.getuid()}" / name


def _is_ours(place: Path) -> bool:
    """Whether `place` and the directory above it are ours or root's, and no others' to write to: what lies there is run."""
    with suppress(OSError):
        stats = [part.stat() for part in (place, place.parent)]
        return all(stat.st_uid in (0, os.getuid()) and not stat.st_mode & 0o002 for stat in stats)
    return False


def _can_write(place: Path) -> bool:
    with suppress(OSError):
        place.mkdir(mode=0o755, parents=True, exist_ok=True)  # others may read what root has compiled
        tempfile.TemporaryFile(dir=place).close()
        return True
    return False


def use_data(data: Path) -> None:
    """Have kernels kept in this data directory if nothing else can be written. Before any of them is imported."""
    _data.append(data.absolute())
    if directory().is_relative_to(_data[-1] / KERNELS):
        os.environ[_CACHE_VARIABLE] = str(_data[-1] / KERNELS)  # processes that this one starts look there as well


@lru_cache
def directory(folder: Path = _FOLDER) -> Path:
    """Where the compiled kernels of `folder` are kept. Raises StorageError where no directory will do."""
    mark = _mark(folder)
    places: list[Path] = []
    with suppress(FileNotFoundError):  # of the directory for temporary files: there is none
        places += _places(folder)
    for place in places:
        if (place / mark).exists() and _is_ours(place):
            return place
    for place in places:
        if _can_write(place) and _is_ours(place):
            return place
    raise StorageError(
        f"compiled kernels need a directory that can be written, such as {', '.join(map(str, places[:3]))}; "
        "name one in the variable NUMBA_CACHE_DIR"
    )


def is_complete() -> bool:
    """Whether all kernels are compiled, for this machine and version."""
    return (directory() / _mark(_FOLDER)).exists()


def set_complete() -> None:
    """Say so, from now on. What said so of other versions or machines goes: their kernels were replaced."""
    for old in directory().glob("complete-*"):
        old.unlink(missing_ok=True)
    (directory() / _mark(_FOLDER)).touch()


def stamp_caches(folder: Path) -> None:
    """From now on compiled functions of `folder` are kept in its `directory`, until any source there changes."""

    class Stamped(caching._CacheLocator):  # type: ignore[misc]
        def __init__(self, py_func: Any) -> None:
            self._line = py_func.__code__.co_firstlineno

        def get_cache_path(self) -> str:
            return str(directory(folder))

        def ensure_cache_path(self) -> None:
            directory(folder)

        def get_source_stamp(self) -> Any:
            return stamp

        def get_disambiguator(self) -> str:
            return str(self._line)

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            return cls(py_func) if Path(py_file).parent == folder else None

    stamp = sources_digest(folder)
    caching.CacheImpl._locator_classes.insert(0, Stamped)


stamp_caches(_FOLDER)
