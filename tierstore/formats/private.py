"""Files that nobody but their owner, and root, may read. Any thread."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_private(fd: int, path: Path) -> None:
    """Keep others out of the new, open file that is to be `path`, or to lie beside it: mode 0600.

    Its owner is that of the file at `path`, so that root may change what a service reads; where there is none yet, root
    gives it to the owner of the directory. A mode of `path` that lets in a group, and no others, is kept: somebody has
    meant it. OSError where the owner cannot be kept: better no change than one that the service cannot read.
    """
    os.fchmod(fd, 0o600)
    try:
        like = os.stat(path)
    except FileNotFoundError:
        if os.geteuid() == 0:
            directory = os.stat(path.parent)
            os.fchown(fd, directory.st_uid, directory.st_gid)
        return
    own = os.fstat(fd)
    if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
        os.fchown(fd, like.st_uid, like.st_gid)
    if not like.st_mode & 0o007:
        os.fchmod(fd, stat.S_IMODE(like.st_mode))
