"""The background threads of a model: one folds overlays and closes versions that were replaced,
one does housekeeping tasks.

What fails is tried again, each thing by itself, and reported by `problem` until it succeeds: look-ups go on, and the
log holds what is not folded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from tierstore.engine.deltas.fold import Folder
from tierstore.engine.events.changes import REQUESTER
from tierstore.engine.lifecycle.retiring import RetiringVersions
from tierstore.engine.lifecycle.throttle import LEAST_OF_A_SWITCH
from tierstore.engine.versions.version import Version
from tierstore.threads import Thread

log = logging.getLogger(__name__)

EVERY_S = 30.0
MAX_BACKOFF_S = 30.0
_MOST_FOLDING = 0.1  # of the time
FOLDING, CLOSING = "deltas are not folded", "what was replaced is not closed"
TIDYING = "changed rows are not put in order"


class Housekeeping:
    """The threads of one model.

    `free` is called with each version that no request reads any more. Each of `tasks` (by what is said when it fails)
    is done every 30 s, and soon once `due` is set. `share` says how much of the time folds may run, 0 to 1.
    """

    def __init__(
        self,
        model: str,
        folder: Folder,
        retiring: RetiringVersions,
        changed: threading.Condition,
        free: Callable[[Version], None],
        due: threading.Event,
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        # constant after construction
        self._model, self._folder, self._retiring, self._changed = model, folder, retiring, changed
        self._free, self._due, self._share = free, due, share
        self._tasks: Mapping[str, Callable[[], None]] = {}
        self._fold_thread = Thread(target=self._fold_and_close, name=f"tierstore-fold-{model}", daemon=True)
        self._task_thread = Thread(target=self._run_tasks, name=f"tierstore-tasks-{model}", daemon=True)
        self._running_tasks = threading.Lock()
        # replaced whole, guarded by _reporting
        self._reporting = threading.Lock()
        self._problems: dict[str, str] = {}
        # guarded by the publisher's condition
        self._stopping = False

    @property
    def problem(self) -> str | None:
        """What has failed and was not done since."""
        return "; ".join(f"{what}: {why}" for what, why in self._problems.items()) or None

    @property
    def stopping(self) -> bool:
        return self._stopping

    def start(self, tasks: Mapping[str, Callable[[], None]]) -> None:
        self._tasks = tasks
        self._fold_thread.start()
        self._task_thread.start()

    def stop(self) -> None:
        """Stop the threads. May be called where they were never started."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._due.set()
        for thread in (self._fold_thread, self._task_thread):
            if thread.is_alive():
                thread.join()

    def run_tasks(self) -> None:
        """Do every task. What fails keeps no other from being done, and becomes a `problem`."""
        with self._running_tasks:
            for what, task in self._tasks.items():
                self._try(what, task)

    def _try(self, what: str, work: Callable[[], None]) -> bool:
        why: str | None = None
        try:
            work()
        except Exception as error:
            why = str(error)
            if self._problems.get(what) != why:
                log.exception("model %s: %s", self._model, what)
        with self._reporting:
            others = {key: problem for key, problem in self._problems.items() if key != what}
            self._problems = others if why is None else {**others, what: why}
        return why is None

    def _run_tasks(self) -> None:
        REQUESTER.set("housekeeping")
        while True:
            self._due.wait(EVERY_S)
            self._due.clear()
            if self._stopping:
                return
            self.run_tasks()

    def _fold_and_close(self) -> None:
        backoff_s = tidy_at_s = 0.0
        while True:
            with self._changed:
                if backoff_s:
                    self._changed.wait_for(lambda: self._stopping, timeout=backoff_s)
                else:
                    self._changed.wait_for(lambda: self._interrupted() or self._folder.due(), timeout=EVERY_S)
                if self._stopping:
                    return
            closed = self._try(CLOSING, self._close_unread)
            folded = self._try(FOLDING, self._fold_oldest)
            if time.monotonic() >= tidy_at_s and not self._try(TIDYING, self._tidy):
                tidy_at_s = time.monotonic() + EVERY_S
            backoff_s = 0.0 if closed and folded else min(MAX_BACKOFF_S, max(0.5, backoff_s * 2))

    def _interrupted(self) -> bool:
        """Whether there is something else to do than to wait for readers. Under the publisher's condition."""
        return self._stopping or bool(self._retiring.unread())

    def _fold_oldest(self) -> None:
        took_s = self._folder.fold_oldest(self._interrupted)
        share = _MOST_FOLDING * max(LEAST_OF_A_SWITCH, self._share())
        pause_s = min(took_s / share, self._folder.longest_pause_s)
        with self._changed:
            # what comes meanwhile is merged in memory: a fold costs much the same, be it of one delta or of fifty
            self._changed.wait_for(lambda: self._interrupted() or self._folder.pressed, timeout=pause_s)

    def _tidy(self) -> None:
        self._folder.tidy(lambda: self._stopping)

    def _close_unread(self) -> None:
        unread = self._retiring.unread()
        for version in unread:
            self._free(version)
            self._retiring.remove(version)
        if unread:
            self._due.set()
