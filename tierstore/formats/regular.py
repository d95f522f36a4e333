"""Reading files that users name: only regular files, and only up to a size that makes sense.

A pipe, a socket, a device or a directory is refused at once, where `open` could wait for a writer, or reading would
never end. Any thread. Errors are OSError and say which kind of file it is.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from tierstore.formats.objects import Location, ObjectPath, size_of

MAX_DOCUMENT_BYTES = 64 << 20  # of a manifest: some 400,000 shards

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_regular(path: str | Location) -> BufferedReader:
    """Open a file, or an object, for reading."""
    if isinstance(path, ObjectPath):
        return path.open()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _refused("a socket or a device", path) from error
        raise
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise _refused(_KINDS.get(stat.S_IFMT(mode), "something else"), path)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: str | Location, limit: int | None = None) -> bytes:
    """All of a file, or an object, that has at most `limit` bytes."""
    with open_regular(path) as file:
        if limit is None:
            return file.read()
        size = size_of(path) if isinstance(path, ObjectPath) else os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
        if max(size, len(data)) > limit:
            raise OSError(errno.EFBIG, f"has {max(size, len(data)):,} bytes, at most {limit:,} are read", str(path))
        return data


def check_directory(path: Path) -> None:
    """Raise for a directory that has anything but regular files and directories in it: a
    library that opens them would wait.
    """
    with os.scandir(path) as entries:
        for entry in entries:
            if not entry.is_file() and not entry.is_dir() and os.path.exists(entry.path):
                raise _refused(_KINDS.get(stat.S_IFMT(entry.stat().st_mode), "something else"), entry.path)


def _refused(found: str, path: str | Path) -> OSError:
    return OSError(errno.EINVAL, f"expected a regular file, found {found}", str(path))
