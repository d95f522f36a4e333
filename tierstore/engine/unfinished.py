"""Loads that were broken off and can go on: what they have left, of one model.

Their directories have a journal and no record. Changed by whoever holds the model's write lock; any thread may read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.formats.names import BUILD, LOADING, VersionDirectory


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What one load has left. `since_s` is when it last got on, seconds since 1970."""

    where: VersionDirectory
    bytes: int
    since_s: float

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.since_s)


def find_unfinished(where: VersionDirectory) -> Unfinished | None:
    """What is there of a load that can go on; None if there is nothing of that kind. StorageError."""
    try:
        since_s = where.journal.stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot look for {where.journal}: {error.strerror or error}") from error
    return Unfinished(where, files.tree_bytes(where.root), since_s)


def clear_for(where: VersionDirectory, identity: str) -> None:
    """Make a version's directory ready for a load of the snapshot `identity`: of what is there, what such a load has left stays.

    StorageError.
    """
    if files.read_bytes(where.loading) == identity.encode() and not files.exists(where.record):
        for path in _others(where.root):
            files.remove_leftover(path)
    else:
        files.remove_tree(where.root)
    files.make_dir(where.root)
    files.publish_bytes(where.loading, identity.encode())


def _others(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name not in (BUILD, LOADING)]
