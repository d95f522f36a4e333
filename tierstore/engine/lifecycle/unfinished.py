"""Leftovers of loads that were broken off and can go on.

Their directories have a journal and no record. The catalogue lists them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.formats.names import BUILD, LOADING, VersionDirectory


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The leftovers of one load. `since_s`: when it last made progress, seconds since 1970."""

    where: VersionDirectory
    bytes: int
    since_s: float

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.since_s)


def find_unfinished(where: VersionDirectory) -> Unfinished | None:
    """The leftovers that another load can go on from; None if there are none. StorageError."""
    try:
        since_s = where.journal.stat().st_mtime
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot look for {where.journal}: {error.strerror or error}") from error
    return Unfinished(where, files.tree_bytes(where.root), since_s)


def clear_for(where: VersionDirectory, identity: str) -> None:
    """Prepare a version's directory for a load of the snapshot `identity`: leftovers of such a load stay.
    StorageError.
    """
    if files.read_bytes(where.loading) == identity.encode() and not files.exists(where.record):
        for path in _others(where.root):
            files.remove_leftover(path)
    else:
        files.remove_tree(where.root)
    files.make_dir(where.root)
    files.publish_bytes(where.loading, identity.encode())


def finish_load(where: VersionDirectory) -> None:
    """Remove the leftovers, once the version was loaded or switched to."""
    if where.loading.exists():
        with contextlib.suppress(StorageError):
            files.remove_file(where.loading)


def _others(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.name not in (BUILD, LOADING)]
