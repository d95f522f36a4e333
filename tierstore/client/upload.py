"""A snapshot that is sent, to a service that cannot read its directory. Functions of the file system; any thread."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import SnapshotError

SCHEME = "upload:"
PIECE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class SentFile:
    """A file of the snapshot: its `name` within it, parts between slashes, and `size` in bytes."""

    name: str
    path: Path
    size: int

    def piece(self, offset: int, length: int) -> bytes:
        """So many bytes from an offset, or what is left. SnapshotError where the file is no longer what it was."""
        try:
            with open(self.path, "rb") as file:
                file.seek(offset)
                block = file.read(min(length, self.size - offset))
        except OSError as error:
            raise SnapshotError(f"cannot read {self.path}, which is being sent: {error}") from error
        if len(block) != min(length, self.size - offset):
            raise SnapshotError(f"{self.path} has become shorter while it was sent: run the command again")
        return block


@dataclass(frozen=True, slots=True)
class SentSnapshot:
    """What is sent. The same files, unchanged since, have the same `id`, so what came before is not sent again."""

    id: str
    files: tuple[SentFile, ...]


def files_to_send(source: str | Path, model: str) -> SentSnapshot | None:
    """All files of a snapshot or built version in a directory here, but those whose names begin with a dot.

    None for what is neither.
    """
    root = Path(str(source).removeprefix("file://"))
    if not any((root / manifest).is_file() for manifest in ("snapshot.json", "built.json")):
        return None
    listed, known = [], [model]
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(".") for part in parts):
            stat = path.stat()
            listed.append(SentFile("/".join(parts), path, stat.st_size))
            known.append(f"{'/'.join(parts)} {stat.st_size} {stat.st_mtime_ns}")
    return SentSnapshot(hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32], tuple(listed))
