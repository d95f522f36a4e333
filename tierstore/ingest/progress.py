"""A load's progress, reported to its caller; and its end where it is cancelled. For the thread of the load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tierstore.errors import LoadCancelled
from tierstore.types import Progress, ProgressFn

_REPORT_EVERY_S = 0.06


class ProgressReporter:
    """Calls `progress` at the start and the end of each phase, and in between at most every 0.06 s."""

    def __init__(self, progress: ProgressFn | None, cancelled: threading.Event | None) -> None:
        self._progress: Callable[[Progress], None] = progress or (lambda _: None)
        self._cancelled = cancelled
        self._phase = ""
        self._done = self._total = 0
        self._waits_for: str | None = None
        self._next = 0.0

    def begin_phase(self, name: str, total: int, done: int = 0) -> None:
        """The phase before has ended. `total` rows are to be done, `done` of them are done already."""
        self.end_phase()
        self._phase, self._done, self._total = name, done, total
        self._report()

    def add(self, rows: int) -> None:
        """`rows` more are done. Raises LoadCancelled once `cancelled` is set."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise LoadCancelled("the load was cancelled")
        self._done += rows
        if rows:
            self._waits_for = None
        if time.monotonic() >= self._next:
            self._report()

    def wait_for(self, what: str) -> None:
        """Something does not come; it is tried again. Until rows are done."""
        self._waits_for = what
        self._report()

    def end_phase(self) -> None:
        if self._phase:
            self._report()

    def _report(self) -> None:
        self._next = time.monotonic() + _REPORT_EVERY_S
        self._progress(Progress(self._phase, self._done, self._total, self._waits_for))
