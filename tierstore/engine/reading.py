"""Kept versions that are open only because somebody reads them as a whole, such as `verify`.

Who reads holds no lock: whoever needs such a version otherwise takes it away, and what is read then raises Closed. Any thread.
Nothing here survives a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tierstore.engine.resting import RestingVersion
from tierstore.engine.version import Version


class ReadVersions:
    """Those of one model, by number, with how many read them. What nobody reads any more comes to rest."""

    def __init__(self, resting: RestingVersion) -> None:
        self._resting = resting
        self._lock = threading.RLock()  # held until a version is closed: who opens it next must find its files free
        # guarded by _lock
        self._held: dict[int, tuple[Version, int]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def enter(self, number: int, open_: Callable[[], Version]) -> Version:
        """The version that is read already, or what `open_` opens. `leave` it."""
        with self._lock:
            version, readers = self._held.get(number) or (open_(), 0)
            self._held[number] = version, readers + 1
            return version

    def leave(self, version: Version, *, failed: bool = False) -> None:
        """End of one reader. Where it `failed`, nothing of the version rests, and others that read it begin anew."""
        with self._lock:
            held, readers = self._held.get(version.number, (None, 0))
            if held is not version:
                return  # taken away
            if failed:
                self.take_away(version.number)
            elif readers > 1:
                self._held[version.number] = version, readers - 1
            else:
                del self._held[version.number]
                self._resting.leave(version)

    def take_away(self, number: int) -> None:
        """Close a version, if it is here."""
        with self._lock:
            held = self._held.pop(number, None)
            if held is not None:
                held[0].close()

    def end(self) -> None:
        """Close all."""
        with self._lock:
            for number in list(self._held):
                self.take_away(number)
