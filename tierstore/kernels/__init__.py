"""Numba kernels: arrays and scalars in, arrays out.

numba keeps compiled kernels on disk and looks only at a kernel's own source file to tell whether one is out of date
(its modification time, since 0.68 its content), though kernels inline helpers from other files of this folder. So the
stamp by which it tells carries the content of all of them: after an edit, or an upgrade, to any of them every kernel
is compiled anew, instead of running with the old helper inside.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from numba.core import caching

_FOLDER = Path(__file__).parent


def digest(folder: Path) -> bytes:
    """Of all Python sources in `folder`."""
    whole = hashlib.sha256()
    for source in sorted(folder.glob("*.py")):
        content = source.read_bytes()
        whole.update(f"{source.name} {len(content)}\n".encode() + content)
    return whole.digest()


def _stamped(locator: Any, folder: Path) -> Any:
    """A locator as numba's own `locator`, for what lies in `folder` alone."""

    class Stamped(locator):  # type: ignore[misc]
        def get_source_stamp(self) -> Any:
            return super().get_source_stamp(), stamp

        @classmethod
        def from_function(cls, py_func: Any, py_file: str) -> Any:
            return super().from_function(py_func, py_file) if Path(py_file).parent == folder else None

    stamp = digest(folder)
    return Stamped


def stamp_caches(folder: Path) -> None:
    """From now on compiled functions of `folder` are out of date when any source there has changed."""
    places = caching.CacheImpl._locator_classes
    own = (caching.UserProvidedCacheLocator, caching.InTreeCacheLocator, caching.UserWideCacheLocator)
    places[:0] = [_stamped(locator, folder) for locator in own]


stamp_caches(_FOLDER)
