"""A disk without room, as the store meets it: its own file operations, and RocksDB's opening for writing and writing of files."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import rocksdict

from tierstore.formats import files
from tierstore.formats.files import FileSystem
from tierstore.tiers.disk import database, sst

NO_SPACE = "IO error: No space left on device: While appending to file: OPTIONS-000017.dbtmp"


class FullDisk(FileSystem):
    """Full while `full` is true. Names can be changed and taken away then, and nothing can be written."""

    def __init__(self) -> None:
        self.full = False

    def create(self, path: Path) -> BinaryIO:
        self._write()
        return super().create(path)

    def mkdir(self, path: Path) -> None:
        self._write()
        super().mkdir(path)

    def _write(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_rocksdb(self, *args: Any, access_type: str, **options: Any) -> Any:
        if self.full and access_type == "read_write":
            self._no_space(args[0])
        return rocksdict.Rdict(*args, access_type=getattr(rocksdict.AccessType, access_type)(), **options)

    def new_writer(self, *args: Any) -> Any:
        return SimpleNamespace(open=self._no_space) if self.full else rocksdict.SstFileWriter(*args)

    def _no_space(self, path: str) -> None:
        raise Exception(NO_SPACE)


@contextmanager
def full_disk() -> Iterator[FullDisk]:
    """Within the block, a disk that can be full."""
    full = FullDisk()
    access = SimpleNamespace(read_only=lambda: "read_only", read_write=lambda: "read_write")
    with files.use(full), pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "rocksdict", _with(Rdict=full.open_rocksdb, AccessType=access))
        patch.setattr(sst, "rocksdict", _with(SstFileWriter=full.new_writer))
        yield full


def _with(**replaced: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(rocksdict), **replaced})
