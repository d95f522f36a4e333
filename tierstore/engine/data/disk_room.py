"""Room on disk for a model: the quota of its delta log, and the least free space to keep.

Any thread. Both are checked before something is written, so that the store's own needs (folds, records, the audit)
find room.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from tierstore.errors import DiskFull
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory
from tierstore.sizes import size_text

MOST_RESERVED = 0.02  # of a file system
_COUNT_AGAIN_S = 10.0  # the log is pruned meanwhile
_LOOK_AGAIN_S = 0.5


class DiskRoom:
    """Room on disk for one model.

    `log_bytes`: the most of its delta log, None for no limit; `reserve`: bytes to keep free.
    """

    def __init__(self, where: ModelDirectory, log_bytes: int | None, reserve: int) -> None:
        self._where, self._log_bytes, self._reserve = where, log_bytes, reserve
        self._lock = threading.Lock()
        # guarded by _lock
        self._logged = 0
        self._counted_s = -_COUNT_AGAIN_S
        self._looked_s = 0.0

    def check_delta(self, nbytes: int) -> None:
        """DiskFull if the log has no room for a delta of `nbytes`. A delta that passes is counted."""
        self.check_free("a delta", nbytes)
        if self._log_bytes is None:
            return
        with self._lock:
            now_s = time.monotonic()
            full = self._logged + nbytes > self._log_bytes
            if now_s - self._counted_s >= (_LOOK_AGAIN_S if full else _COUNT_AGAIN_S):
                self._logged, self._counted_s = files.tree_bytes(self._where.log), now_s
            if self._logged + nbytes > self._log_bytes:
                held, quota = size_text(self._logged), size_text(self._log_bytes)
                raise DiskFull(
                    f"the delta log holds {held}, and its quota is {quota} (log_bytes): no room for "
                    f"{size_text(nbytes)} more. It is pruned once versions hold its deltas and log_retention_s is over"
                )
            self._logged += nbytes

    def check_free(self, what: str, nbytes: int = 0) -> None:
        """DiskFull if `nbytes` more would leave too little free space."""
        root = self._where.root if self._where.root.exists() else self._where.root.parent
        check_free(root, self._reserve, what, nbytes)

    def check_now_and_then(self, what: str) -> None:
        """`check_free`, at most twice a second: for work that writes all the time."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = now_s
            self.check_free(what)


def check_free(root: Path, reserve: int, what: str, nbytes: int) -> None:
    """DiskFull if `nbytes` more would leave less than `reserve` free on the file system of `root`."""
    if not reserve:
        return
    there = _free_and_floor(root, reserve)
    if there is not None and there[0] - nbytes < there[1]:
        raise DiskFull(f"no room for {what}: {_kept(*there)}, so the disk is full; free some space and try again")


def free_beyond(root: Path, reserve: int) -> int | None:
    """Bytes that are free on the file system of `root` beyond the reserve; None if that cannot be read."""
    there = _free_and_floor(root, reserve)
    return None if there is None else max(0, there[0] - there[1])


def floor_of(root: Path, reserve: int) -> int:
    """Bytes that must stay free on the file system of `root`; 0 if that cannot be read."""
    there = _free_and_floor(root, reserve)
    return 0 if there is None else there[1]


def _kept(free: int, floor: int) -> str:
    return f"{size_text(free)} are free, and {size_text(floor)} are kept in reserve (disk_reserve)"


def disk_status(root: Path, reserve: int) -> dict[str, Any]:
    """`free` bytes of the file system of `root`, the `reserve` of them, and the `problem` if only the reserve is
    left.
    """
    free, floor = _free_and_floor(root, reserve) or (None, 0)
    full = free is not None and reserve and free < floor
    problem = f"{root}: {_kept(free, floor)}: deltas and loads are refused" if full and free is not None else None
    return {"free": free, "reserve": floor, "problem": problem}


def _free_and_floor(root: Path, reserve: int) -> tuple[int, int] | None:
    """(free bytes, bytes that must stay free); None if that cannot be read: the write itself will report the error."""
    try:
        stat = os.statvfs(root)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize, int(min(reserve, MOST_RESERVED * stat.f_blocks * stat.f_frsize))
