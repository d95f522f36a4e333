"""What a load has finished, in a file beside it: a load of the same that is begun after a crash goes on from there.

    XXH3-64 of the rest of the line, 16 hex digits | a space | JSON | a line feed

The first line says which load it is, each of the others what one task made: its key and its result, in which stand names,
lengths and digests of files. Lines are not synced. A line that a crash or damage has spoilt does not count, and whoever goes
on reads what the others name before it is used.

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


class Journal:
    """Opened at `path`; what is there counts only if it is of the load that `about` describes. StorageError."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        lines = _lines(files.read_bytes(path) or b"")
        about = json.loads(json.dumps(about))
        known = lines[1:] if lines[:1] == [about] else []
        self.done: dict[str, Any] = {line["key"]: line["result"] for line in known}  # results by task, the last counts
        files.publish_bytes(path, b"".join(map(_line, [about, *known])))  # what is spoilt must not spoil what follows
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def note(self, key: str, result: dict[str, Any]) -> None:
        """A task is done."""
        self.done[key] = result
        with contextlib.suppress(OSError):  # the load goes on; one that goes on from it does the task again
            os.write(self._fd, _line({"key": key, "result": result}))

    def close(self) -> None:
        os.close(self._fd)


def _line(document: Any) -> bytes:
    text = json.dumps(document).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


def _lines(content: bytes) -> list[Any]:
    """Those that are whole."""
    pairs = (line.split(b" ", 1) for line in content.split(b"\n") if b" " in line)
    return [json.loads(text) for digest, text in pairs if xxhash.xxh3_64_hexdigest(text).encode() == digest]
