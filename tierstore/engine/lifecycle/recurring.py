"""Background work that runs every 30 s, or more often where that is asked for, and soon after it is woken.

Each failed task is tried again by itself, and reported by `problem` until it succeeds. Any thread may call anything.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial

from tierstore.engine.events.changes import REQUESTER
from tierstore.threads import ScheduledJob, Scheduler

log = logging.getLogger(__name__)

EVERY_S = 30.0


class RecurringTasks:
    """Tasks by the text for their failure, of `whose`: a model, or the store."""

    def __init__(self, whose: str) -> None:
        self._whose = whose  # constant after construction
        self._running = threading.Lock()
        self._reporting = threading.Lock()
        self._problems: dict[str, str] = {}  # replaced as a whole, guarded by _reporting
        # for the thread that starts and stops
        self._tasks: Mapping[str, Callable[[], None]] = {}
        self._job: ScheduledJob | None = None
        self._often: list[ScheduledJob] = []
        self.stopping = False

    @property
    def problem(self) -> str | None:
        """The work that has failed and was not done since, or None."""
        return "; ".join(f"{what}: {why}" for what, why in self._problems.items()) or None

    def start(
        self, scheduler: Scheduler, tasks: Mapping[str, Callable[[], None]], often: Mapping[str, float] | None = None
    ) -> None:
        """Begin. `often`: the seconds between two runs of a task that cannot wait for 30."""
        self._tasks = tasks
        self._job = scheduler.add(self._run, EVERY_S)
        self._often = [scheduler.add(partial(self._run_one, what, each), each) for what, each in (often or {}).items()]

    def wake(self) -> None:
        """Run the tasks soon. Does nothing if they were never started."""
        if self._job is not None:
            self._job.wake()

    def stop(self) -> None:
        """Stop running them, and wait for the running task, which `stopping` tells to end."""
        self.stopping = True
        for job in (self._job, *self._often):
            if job is not None:
                job.end()

    def _run(self) -> float:
        REQUESTER.set("housekeeping")
        self.run()
        return EVERY_S

    def _run_one(self, what: str, every_s: float) -> float:
        REQUESTER.set("housekeeping")
        if self._running.acquire(
            blocking=False
        ):  # else all tasks are being run, and waiting would take a thread from other models
            try:
                self.attempt(what, self._tasks[what])
            finally:
                self._running.release()
        return every_s

    def run(self) -> None:
        """Run every task. A failure becomes a `problem`, and does not stop the other tasks."""
        with self._running:
            for what, task in self._tasks.items():
                self.attempt(what, task)

    def attempt(self, what: str, work: Callable[[], None]) -> bool:
        """Do `work`, and report a failure as a problem. Returns whether it succeeded."""
        why: str | None = None
        try:
            work()
        except Exception as error:
            why = str(error)
            if self._problems.get(what) != why:
                log.exception("%s: %s", self._whose, what)
        with self._reporting:
            others = {key: problem for key, problem in self._problems.items() if key != what}
            self._problems = others if why is None else {**others, what: why}
        return why is None
