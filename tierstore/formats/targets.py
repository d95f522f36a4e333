"""Shared targets of several machines: a directory that all of them see, or objects below a URL.

A file appears there whole and durable under its name, or not at all; of two that are written under one name, one is
there. Any thread may use a target.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from tierstore.errors import SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.buckets import Bucket
from tierstore.formats.names import is_scratch
from tierstore.formats.objects import is_url
from tierstore.formats.patience import QUICK_PATIENCE_S, until_done
from tierstore.formats.snapshot.reader import local_path
from tierstore.formats.uploads import upload_tree

T = TypeVar("T")


class Target(Protocol):
    """Names are relative, with slashes. All calls raise StorageError."""

    def names(self) -> list[str]:
        """The names of all files, in order."""

    def read(self, name: str) -> bytes | None:
        """A small file; None where it is not there."""

    def move_in(self, directory: Path, *, last: str) -> None:
        """Move all files below a local directory in, under the names that they have there; the
        one named `last` at the end.
        """

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


def target_at(place: str) -> Target:
    """The target at a URL, a `file://` URL or a path.

    MissingExtra where the library for the storage is not installed.
    """
    return _Objects(place.rstrip("/")) if is_url(place) else _Directory(local_path(place).absolute())


class _Directory:
    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> list[str]:
        found = [path.relative_to(self._root) for path in self._root.rglob("*") if path.is_file()]
        return sorted(path.as_posix() for path in found if not is_scratch(path.name))

    def read(self, name: str) -> bytes | None:
        return files.read_bytes(self._root / name)

    def move_in(self, directory: Path, *, last: str) -> None:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path != directory / last:
                self._move(path, path.relative_to(directory))
        self._move(directory / last, Path(last))

    def _move(self, path: Path, name: Path) -> None:
        """Between file systems a rename is none, so the file is copied; nobody sees half of it."""
        where = self._root / name
        where.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "rb") as source, files.publish(where) as out:
            shutil.copyfileobj(source, out, 1 << 20)
        os.unlink(path)

    def remove(self, name: str) -> None:
        files.remove_file(self._root / name)


class _Objects:
    def __init__(self, url: str) -> None:
        self._url = url
        self._bucket = Bucket(url)

    def names(self) -> list[str]:
        return sorted(self._tried("cannot be listed", lambda: self._bucket.find()))

    def read(self, name: str) -> bytes | None:
        key = self._bucket.key_of(name)
        try:
            return self._tried(
                f"{name} cannot be read", lambda: bytes(self._bucket.read(key, 0, self._bucket.size(key)))
            )
        except FileNotFoundError:
            return None

    def move_in(self, directory: Path, *, last: str) -> None:
        upload_tree(directory, self._url, last)

    def remove(self, name: str) -> None:
        self._tried(f"{name} cannot be removed", lambda: self._bucket.remove(self._bucket.key_of(name)))

    def _tried(self, what: str, attempt: Callable[[], T]) -> T:
        try:
            return until_done(f"{self._url}: {what}", lambda _: attempt(), patience_s=QUICK_PATIENCE_S)
        except (PermissionError, SnapshotError) as error:
            raise StorageError(f"{self._url}: {what}: {error}") from error
