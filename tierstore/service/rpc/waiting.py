"""Calls that wait for their clients: for a message to arrive, or for an answer to be read.

A call that waits for its message needs no thread, but counts against the bound of its pool; an idle stream has a thread. So
a client that only opens calls could use up either. Where room is needed, the call that has waited longest makes it
(`Waiting.make_room`), if it has waited for EVICTED_AFTER_S; and all have deadlines, which a thread looks after.

Any thread may call anything. Whoever removes a call from a `Waiting` may end its wait, and nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from tierstore.service.limits import slow_clients

C = TypeVar("C")

EVICTED_AFTER_S = 1.0


class Waiting(Generic[C]):
    """Calls with their deadlines (`time.monotonic`), in the order in which they began to wait. `end` ends one that is removed.

    Without a lock: each operation is one of a dictionary.
    """

    def __init__(self, end: Callable[[C], None]) -> None:
        self._end = end
        self._since: dict[C, tuple[float, float]] = {}  # since when, until when
        self._most_s = float("inf")

    def __len__(self) -> int:
        return len(self._since)

    def add(self, call: C, seconds: float) -> None:
        """A call waits from now on, for so long at most."""
        now = time.monotonic()
        self._since[call] = now, now + seconds

    def remove(self, call: C) -> bool:
        """A call does not wait any more. False where it was removed before."""
        return self._since.pop(call, None) is not None

    def make_room(self) -> bool:
        """End the call that has waited longest, if it has waited long."""
        for call, (since, _) in self._since.copy().items():
            if time.monotonic() - since < EVICTED_AFTER_S:
                return False
            if self.remove(call):
                self._end(call)
                return True
        return False

    def end_late(self, now: float) -> None:
        """End the calls whose deadline has passed."""
        for call, (since, until) in self._since.copy().items():
            if now >= min(until, since + self._most_s) and self.remove(call):
                self._end(call)

    def hurry(self) -> None:
        """From now on a call waits for EVICTED_AFTER_S at most; those that have waited longer end at once."""
        self._most_s = EVICTED_AFTER_S
        self.end_late(time.monotonic())

    def end_all(self) -> None:
        """End all of them."""
        self.end_late(float("inf"))


class DeadlineThread(threading.Thread):
    """Ends the calls of `kinds` that are late, until `close`."""

    def __init__(self, kinds: Iterable[Waiting[C]]) -> None:
        super().__init__(name="tierstore-grpc-deadlines", daemon=True)
        self._kinds = tuple(kinds)
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.wait(slow_clients.CHECK_S):
            for waiting in self._kinds:
                waiting.end_late(time.monotonic())

    def close(self) -> None:
        self._closed.set()
