"""The background work of a model: folds, the closing of replaced versions, and housekeeping tasks.

It runs on threads that all models share: folds and closing on one kind, tasks on another. Each failed step is tried
again by itself, and reported by `problem` until it succeeds: look-ups go on, and the log holds what is not folded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from tierstore.engine.deltas.fold import Folder
from tierstore.engine.lifecycle.recurring import EVERY_S, RecurringTasks
from tierstore.engine.lifecycle.retiring import RetiringVersions
from tierstore.engine.serving.publisher import Publisher
from tierstore.engine.versions.version import Version
from tierstore.threads import ScheduledJob, Scheduler

MAX_BACKOFF_S = 30.0
FOLDING, CLOSING = "deltas are not folded", "what was replaced is not closed"
COMPACTING = "changed rows are not put in order"


class Housekeeping:
    """The background work of one model. `free` is called with each version that no request reads any more."""

    def __init__(
        self,
        model: str,
        folder: Folder,
        retiring: RetiringVersions,
        publisher: Publisher,
        free: Callable[[Version], None],
    ) -> None:
        # constant after construction
        self._folder, self._retiring, self._publisher, self._free = folder, retiring, publisher, free
        self.tasks = RecurringTasks(f"model {model}")
        self._job: ScheduledJob | None = None  # folds and closes
        # for the thread that runs the job
        self._backoff_s = self._retry_s = self._next_compaction_s = self._wait_s = 0.0

    @property
    def problem(self) -> str | None:
        """The work that has failed and was not done since, or None."""
        return self.tasks.problem

    @property
    def stopping(self) -> bool:
        return self.tasks.stopping

    def start(
        self,
        folding: Scheduler,
        tending: Scheduler,
        tasks: Mapping[str, Callable[[], None]],
        often: Mapping[str, float],
    ) -> None:
        """Start it. `tasks`, by the text for their failure, run every 30 s, and soon after a version was closed.

        `often`: those that run every so many seconds besides.
        """
        self.tasks.start(tending, tasks, often)
        self._job = folding.add(self._fold_and_close, EVERY_S)
        self._publisher.changed.then = self._job.wake
        self._job.wake()  # for what was published before

    def stop(self) -> None:
        """Stop it. May be called if it was never started."""
        self.tasks.stopping = True
        with self._publisher.changed:
            self._publisher.changed.notify_all()  # a task may wait for readers
        self.tasks.stop()
        if self._job is not None:
            self._job.end()

    def _fold_and_close(self) -> float:
        """Do what is due. Returns the seconds until more is due, if nothing is published meanwhile."""
        if (wait_s := self._retry_s - time.monotonic()) > 0:
            return wait_s
        closed = self.tasks.attempt(CLOSING, self._close_unread)
        folded = self.tasks.attempt(FOLDING, self._fold)
        if time.monotonic() >= self._next_compaction_s and not self.tasks.attempt(COMPACTING, self._compact):
            self._next_compaction_s = time.monotonic() + EVERY_S
        if closed and folded:
            self._backoff_s = 0.0
            return min(EVERY_S, self._wait_s)
        self._backoff_s = min(MAX_BACKOFF_S, max(0.5, self._backoff_s * 2))
        self._retry_s = time.monotonic() + self._backoff_s
        return self._backoff_s

    def _fold(self) -> None:
        self._wait_s = self._folder.fold_due()

    def _compact(self) -> None:
        self._folder.compact(lambda: self.stopping)

    def _close_unread(self) -> None:
        unread = self._retiring.unread()
        for version in unread:
            self._free(version)
            self._retiring.remove(version)
        if unread:
            self.tasks.wake()
