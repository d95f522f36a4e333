"""What rests of the disk tier of a version that was left, so that to go back to it need not open RocksDB.

One version a model, the one left last: that is what a rollback goes to. Any thread. Nothing here survives a crash.
"""

from __future__ import annotations

import threading

from tierstore.engine.version import Version
from tierstore.tiers.disk import Resting


class RestingVersion:
    """At most one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # guarded by _lock
        self._held: tuple[int, Resting] | None = None
        self._ended = False

    def leave(self, version: Version) -> None:
        """Free all memory of a version that nobody reads. If it can rest, it does so in the place of the one that did."""
        resting = version.rest()
        if resting is not None:
            with self._lock:
                self._close()
                self._held = version.number, resting
                if self._ended:
                    self._close()

    def take(self, number: int) -> Resting | None:
        """What rests of that version, for who opens it. None says that it is not open, or not any more."""
        with self._lock:
            if self._held is None or self._held[0] != number:
                return None
            (_, resting), self._held = self._held, None
            return resting

    def close(self, number: int) -> None:
        """Close what rests of that version."""
        with self._lock:
            if self._held is not None and self._held[0] == number:
                self._close()

    def end(self) -> None:
        """Close whatever rests, and let nothing rest any more."""
        with self._lock:
            self._ended = True
            self._close()

    def _close(self) -> None:
        # with the lock held until it is closed: who finds nothing opens the version, and the lock on its files must be free
        held, self._held = self._held, None
        if held is not None:
            held[1].close()
