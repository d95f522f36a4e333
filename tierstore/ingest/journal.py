"""The journal of a load, a file in its directory: after a crash, another load of the same snapshot goes on from there.

    XXH3-64 of the JSON, 16 hex digits | a space | JSON | a line feed

The first line identifies the load. Each other line says what one task made: its key and its result, with names, lengths and
digests of files. Lines are not synced. A line that a crash has damaged does not count. Files that the other lines name are
read and checked before they are used.

One thread at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import xxhash

from tierstore.formats import files


def about(path: Path) -> Any:
    """What identifies the load of the journal at `path`; None where there is none. Raises StorageError."""
    return next(iter(_lines(files.read_bytes(path) or b"")), None)


class Journal:
    """Opened at `path`. An existing file counts only if it is of the load that `about` describes. Raises StorageError."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        lines = _lines(files.read_bytes(path) or b"")
        about = json.loads(json.dumps(about))
        kept = lines[1:] if lines[:1] == [about] else []
        self.done: dict[str, Any] = {
            line["key"]: line["result"] for line in kept
        }  # results by the task's key; the last line counts
        files.publish_bytes(path, b"".join(map(_line, [about, *kept])))  # without damaged lines
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def note(self, key: str, result: dict[str, Any]) -> None:
        """Record the result of a task."""
        self.done[key] = result
        with contextlib.suppress(OSError):  # a load that goes on from it does the task again
            os.write(self._fd, _line({"key": key, "result": result}))

    def close(self) -> None:
        os.close(self._fd)


def _line(document: Any) -> bytes:
    text = json.dumps(document).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


def _lines(content: bytes) -> list[Any]:
    """The documents of whole lines."""
    pairs = (line.split(b" ", 1) for line in content.split(b"\n") if b" " in line)
    return [json.loads(text) for digest, text in pairs if xxhash.xxh3_64_hexdigest(text).encode() == digest]
