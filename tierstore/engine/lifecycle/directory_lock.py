"""One process at a time has a data directory open: an flock on the file LOCK, which the kernel drops with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from tierstore.errors import Locked, StorageError

_held: set[int] = set()  # descriptors of what this process has locked; added and removed in one step each


def lock(path: Path) -> int:
    """Lock the file `path`. Returns its descriptor, for `unlock`. Locked where it is locked already, StorageError."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"cannot use {path.parent} as a data directory: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        try:
            raise Locked(_why(path, descriptor)) from None
        finally:
            os.close(descriptor)
    with contextlib.suppress(OSError):  # only for people who look; a full disk must not keep the store from opening
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    _held.add(descriptor)
    return descriptor


def _why(path: Path, descriptor: int) -> str:
    # not by the number of the process: in two containers both are 1
    here = os.fstat(descriptor)
    if any(os.path.samestat(here, os.fstat(one)) for one in tuple(_held)):
        return f"{path.parent} is open in this process already: use the store that has it open, or close that first"
    pid = os.read(descriptor, 32).decode(errors="replace").strip()
    where = f"{path.parent} is open in another process{f' (pid {pid})' if pid else ''}"
    return f"{where}; if that is a service, talk to it with --url"


def unlock(descriptor: int) -> None:
    _held.discard(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that this one forked has the lock open too, and may live on
    os.close(descriptor)
