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
        self._held: tuple[int, Resting] | None = None

    def leave(self, version: Version) -> None:
        """Free all memory of a version that nobody reads. If it can rest, it does so in the place of the one that did.

        Raises StorageError.
        """
        resting = version.rest()
        if resting is None:
            return
        with self._lock:
            before, self._held = self._held, (version.number, resting)
        if before is not None:
            before[1].close()

    def take(self, number: int) -> Resting | None:
        """What rests of that version, for who opens it."""
        with self._lock:
            if self._held is None or self._held[0] != number:
                return None
            (_, resting), self._held = self._held, None
            return resting

    def close(self, number: int | None = None) -> None:
        """Close what rests of that version, or whatever rests. Raises StorageError."""
        with self._lock:
            held = self._held
            if held is None or number not in (None, held[0]):
                return
            self._held = None
        held[1].close()
