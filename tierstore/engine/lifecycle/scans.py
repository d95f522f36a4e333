"""Kept versions that are open only because they are read as a whole, such as by `verify`.

The reader holds no lock: a thread that needs such a version otherwise closes it, and reads then raise Closed. Any
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tierstore.engine.versions.version import Version


class ScannedVersions:
    """Open versions of one model that are read as a whole, with their number of readers. One without readers is
    closed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held until a version is closed: the next to open it must find its files free
        # guarded by _lock
        self._open: dict[int, tuple[Version, int]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def acquire(self, number: int, open_: Callable[[], Version]) -> Version:
        """The version if it is open already, or the one that `open_` opens. `release` it."""
        with self._lock:
            version, readers = self._open.get(number) or (open_(), 0)
            self._open[number] = version, readers + 1
            return version

    def release(self, version: Version, *, failed: bool = False) -> None:
        """End one reader. If it `failed`, the version is closed, and other readers of it begin again."""
        with self._lock:
            current, readers = self._open.get(version.number, (None, 0))
            if current is not version:
                return  # closed
            if readers > 1 and not failed:
                self._open[version.number] = version, readers - 1
            else:
                self.close(version.number)

    def close(self, number: int) -> None:
        """Close a version, if it is here."""
        with self._lock:
            entry = self._open.pop(number, None)
            if entry is not None:
                entry[0].close()

    def close_all(self) -> None:
        with self._lock:
            for number in list(self._open):
                self.close(number)
