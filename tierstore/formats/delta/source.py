"""The bytes of a delta that a caller names by a path or gives as they are. Any thread."""

from __future__ import annotations

import urllib.parse
from pathlib import Path
from typing import TypeAlias

from tierstore.errors import DeltaError
from tierstore.formats.regular import read_regular

DeltaSource: TypeAlias = bytes | bytearray | memoryview | str | Path


def delta_bytes(source: DeltaSource) -> bytes | memoryview:
    """The bytes of a delta, given as such or as a path or file:// URL. DeltaError if they cannot be read."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, (bytearray, memoryview)):
        return memoryview(source).cast("B")
    if not isinstance(source, (str, Path)):
        raise DeltaError(f"expected a delta's bytes, or the path of its file, got {type(source).__name__}")
    path = source
    if isinstance(source, str) and source.startswith("file://"):
        path = urllib.parse.unquote(source.removeprefix("file://"))
    try:
        return read_regular(Path(path))
    except (OSError, ValueError) as error:  # of values a NUL in the path
        raise DeltaError(f"cannot read the delta {path}: {getattr(error, 'strerror', None) or error}") from error
