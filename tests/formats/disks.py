"""File systems for tests: one that fails the Nth operation, one that can lose power."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from tierstore.formats.files import FileSystem


class FailingDisk(FileSystem):
    """Raises an I/O error instead of doing operation number `fail_at` (from 0), and goes on afterwards."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.operations = 0

    def _count(self) -> None:
        self.operations += 1
        if self.operations - 1 == self.fail_at:
            raise OSError(errno.EIO, "injected failure")

    def create(self, path: Path) -> BinaryIO:
        self._count()
        return super().create(path)

    def fsync(self, file: BinaryIO) -> None:
        self._count()
        super().fsync(file)

    def fsync_dir(self, path: Path) -> None:
        self._count()
        super().fsync_dir(path)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self._count()
        super().link(old, new)

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def rmtree(self, path: Path) -> None:
        self._count()
        super().rmtree(path)


class ForgetfulDisk(FileSystem):
    """Remembers what was made durable below `root`; `lose_power` takes the rest away.

    A file's content is durable as of its last fsync (before that it is empty), a name as of the last
    fsync of its directory: the strictest reading of POSIX.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._content: dict[int, bytes] = {}  # by inode
        self._names: dict[Path, dict[str, int]] = {}  # directory -> name -> inode

    def fsync(self, file: BinaryIO) -> None:
        super().fsync(file)
        self._content[os.fstat(file.fileno()).st_ino] = Path(file.name).read_bytes()

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}

    def lose_power(self) -> None:
        """Leave on disk what was durable and nothing else."""
        tree = self._durable(self._root, {path: path.stat().st_ino for path in self._root.rglob("*") if path.is_dir()})
        shutil.rmtree(self._root)
        self._root.mkdir()
        for path, content in tree.items():
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

    def _durable(self, directory: Path, directories: dict[Path, int]) -> dict[Path, bytes | None]:
        tree: dict[Path, bytes | None] = {}
        for name, inode in self._names.get(directory, {}).items():
            path = directory / name
            if directories.get(path) == inode:
                tree[path] = None
                tree |= self._durable(path, directories)
            else:
                tree[path] = self._content.get(inode, b"")
        return tree
