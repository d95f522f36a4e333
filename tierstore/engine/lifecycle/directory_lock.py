"""The lock of a data directory, for one process at a time: an flock on the file LOCK, which the kernel drops with the
process. A forked child closes its copy of the descriptor at once, which leaves the lock to its parent.

Until the process closes the directory, LOCK names the process, for people who look, and its own inode. So a directory
that was copied while open can be recognized: its LOCK names another inode. (On overlayfs with layers on two file
systems a directory gets another inode at each mount, and a file that was written keeps its own.) If the process serves
the directory, LOCK names the URL too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from tierstore.errors import Locked, StorageError

_MOST_BYTES = 512  # of LOCK
_OWN = "file:"  # before the inode of LOCK itself
_held: set[int] = set()  # descriptors of locked files of this process; added and removed in one step each


def lock(path: Path) -> int:
    """Lock the file `path`. Returns its descriptor, for `unlock`. Locked if it is locked already, StorageError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"cannot use {path.parent} as a data directory: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        try:
            raise Locked(_why(path, descriptor), url=_url_in(descriptor)) from None
        finally:
            os.close(descriptor)
    with contextlib.suppress(OSError):  # a full disk must not keep the store from opening
        original = _original_in(descriptor) or f"{_OWN}{os.fstat(descriptor).st_ino}"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {original}".encode(), 0)
    _held.add(descriptor)
    return descriptor


def announce(path: Path, url: str) -> None:
    """Write the URL of the service into the locked file at `path`, for those who find it locked."""
    with contextlib.suppress(OSError):  # a full disk must not keep the store from serving
        words = [*path.read_bytes().split()[:2], url.encode()]
        with path.open("r+b") as file:
            file.write(b" ".join(words))


def _url_in(descriptor: int) -> str | None:
    words = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").split()
    return words[2] if len(words) == 3 else None


def is_copy(path: Path, descriptor: int) -> bool:
    """Whether the directory of the LOCK at `path`, locked as `descriptor`, was copied from one that a process had
    open.
    """
    original = _original_in(descriptor)
    if original is None:
        return False
    own = original.startswith(_OWN)
    here = os.fstat(descriptor) if own else os.stat(path.parent)
    return int(original.removeprefix(_OWN)) != here.st_ino


def _original_in(descriptor: int) -> str | None:
    """The inode in a LOCK: its own, or of an earlier release that of its directory, which is digits alone. None if the
    directory was closed, or a release before that wrote the file.
    """
    words = os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").split()
    is_one = len(words) in (2, 3) and words[1].removeprefix(_OWN).isdecimal() and words[1].isascii()
    return words[1] if is_one else None


def _why(path: Path, descriptor: int) -> str:
    # not by process number: in two containers both are 1
    here = os.fstat(descriptor)
    if any(os.path.samestat(here, os.fstat(one)) for one in tuple(_held)):
        return f"{path.parent} is open in this process already: use the store that has it open, or close that first"
    pid = (os.pread(descriptor, 64, 0).decode(errors="replace").split() or [""])[0]
    where = f"{path.parent} is open in another process{f' (pid {pid})' if pid else ''}"
    if url := _url_in(descriptor):
        return f"{where}, which serves it: talk to it with --url {url}"
    return f"{where}; if that is a service, talk to it with --url"


def unlock(descriptor: int, *, whole: bool = True) -> None:
    """Unlock the directory; if it is `whole` it no longer counts as a copy."""
    _held.discard(descriptor)
    with contextlib.suppress(OSError):
        if whole:
            os.ftruncate(descriptor, 0)
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that is being forked may have it open too for a moment
    os.close(descriptor)


def _close_in_child() -> None:
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)
