"""Versions that no longer serve but are still read: each is closed once its last reader has left.

Any thread. The list is guarded by the publisher's condition, which is notified when it changes.
"""

from __future__ import annotations

from tierstore.engine.serving.publisher import Publisher
from tierstore.engine.versions.version import Version
from tierstore.errors import Conflict

DRAIN_S = 60.0  # how long a switch to a version, and closing a model, wait for requests that began before


class RetiringVersions:
    """Versions of one model that were replaced, and are closed once nobody reads them."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher, self._changed = publisher, publisher.changed
        self._versions: list[Version] = []
        self._awaited: list[int] = []  # numbers that a thread waits for

    def __len__(self) -> int:
        return len(self._versions)

    def __contains__(self, number: int) -> bool:
        return self.numbered(number) is not None

    def add(self, version: Version) -> None:
        """Note that `version` is about to stop serving."""
        with self._changed:
            if version not in self._versions:
                self._versions.append(version)
            self._changed.notify_all()

    def remove(self, version: Version) -> None:
        """Note that `version` is closed."""
        with self._changed:
            self._versions.remove(version)
            self._changed.notify_all()

    def numbered(self, number: int) -> Version | None:
        """The version with this number that is still open; the latest of several lines."""
        with self._changed:
            return next((version for version in reversed(self._versions) if version.number == number), None)

    def all(self) -> list[Version]:
        with self._changed:
            return list(self._versions)

    def unread(self) -> list[Version]:
        """The versions whose last reader has left."""
        with self._changed:
            return [version for version in self._versions if not self._publisher.reads(version)]

    def wait_closed(self, number: int, timeout_s: float) -> bool:
        """Wait until no version of that number is open any more; False if one still is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(version.number != number for version in self._versions), timeout=timeout_s
            )

    def is_awaited(self, number: int) -> bool:
        """Whether a thread waits for the version to be closed, to serve or to drop it: long work on it should end."""
        with self._changed:
            return number in self._awaited

    def await_closed(self, model: str, number: int) -> None:
        """`wait_closed`, for as long as readers may take. Conflict after that."""
        with self._changed:
            self._awaited.append(number)
            try:
                closed = self.wait_closed(number, DRAIN_S)
            finally:
                self._awaited.remove(number)
        if not closed:
            raise Conflict(
                f"version {number} of {model!r} is still read by requests that began {DRAIN_S:.0f} s ago; try again"
            )
