"""Leftovers of loads that were broken off and can go on.

Their directories have a journal and no record. The catalogue lists them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.formats.names import BUILD, VersionDirectory


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


def clear_for(where: VersionDirectory) -> None:
    """Prepare a version's directory for a load. What one that was broken off has built stays: its journal says whether
    it is of the same snapshot. StorageError.
    """
    if where.root.is_dir() and not files.exists(where.record):
        for path in where.root.iterdir():
            if path.name != BUILD:
                files.remove_leftover(path)
    else:
        files.remove_tree(where.root)
    files.make_dir(where.root)
