"""The background threads of a model: one folds overlays and closes what was replaced, one keeps the log and the disk short.

Whatever fails here is tried again, each thing by itself, and reported by `problem` until it succeeds: look-ups go on, and the
log holds what is not folded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from tierstore.engine.serving import Serving
from tierstore.engine.throttle import LEAST_OF_A_SWITCH
from tierstore.engine.version import Version
from tierstore.tiers.background import Pace

log = logging.getLogger(__name__)

HOUSE_KEEPING_S = 30.0
MAX_BACKOFF_S = 30.0
_LONGEST_REST_S = 0.5  # after a fold
FOLDING, CLOSING = "deltas are not folded", "what was replaced is not closed"


class Keeper:
    """`freed` is called with each version that nobody reads any more, each of `chores` now and then.

    `share` says how much of the time folds may be at work. Chores are known by what is said when they fail.
    """

    def __init__(
        self,
        serving: Serving,
        freed: Callable[[Version], None],
        chores: Mapping[str, Callable[[], None]],
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._serving, self._freed, self._chores, self._share = serving, freed, chores, share
        self._changed = serving.publisher.changed
        name = serving.name
        self._thread = threading.Thread(target=self._run, name=f"tierstore-keeper-{name}", daemon=True)
        self._house = threading.Thread(target=self._run_chores, name=f"tierstore-house-{name}", daemon=True)
        self._chores_due = threading.Event()
        self._keeping = threading.Lock()  # held while chores are done
        # replaced whole, guarded by _reporting
        self._reporting = threading.Lock()
        self._problems: dict[str, str] = {}
        # guarded by the publisher's condition
        self._retiring: list[Version] = []
        self._stopping = False

    @property
    def problem(self) -> str | None:
        """What has failed and was not done since."""
        return "; ".join(f"{what}: {why}" for what, why in self._problems.items()) or None

    def start(self) -> None:
        self._thread.start()
        self._house.start()

    def stop(self) -> list[Version]:
        """Stop the threads. Returns versions that are retired and still open."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._chores_due.set()
        for thread in (self._thread, self._house):
            if thread.is_alive():
                thread.join()
        return self._retiring

    def retire(self, version: Version) -> None:
        """Free `version` once its last reader has left."""
        with self._changed:
            self._retiring.append(version)
            self._changed.notify_all()

    def wait_retired(self, number: int, timeout_s: float) -> bool:
        """Wait until no retired version of that number is open any more; False if it still is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(version.number != number for version in self._retiring), timeout=timeout_s
            )

    def retiring(self, number: int) -> Version | None:
        """The retired version of that number that is open still."""
        with self._changed:
            return next((version for version in self._retiring if version.number == number), None)

    def is_retiring(self, number: int) -> bool:
        return self.retiring(number) is not None

    def see_to_house(self) -> None:
        """Have the chores done soon: what was replaced leaves memory, and maybe versions that are not to be kept."""
        self._chores_due.set()

    @property
    def stopping(self) -> bool:
        return self._stopping

    def keep_house(self) -> None:
        """Do every chore. What fails keeps no other from being done, and becomes a `problem`."""
        with self._keeping:
            for what, chore in self._chores.items():
                self._try(what, chore)

    def _try(self, what: str, work: Callable[[], None]) -> bool:
        why: str | None = None
        try:
            work()
        except Exception as error:
            why = str(error)
            if self._problems.get(what) != why:
                log.exception("model %s: %s", self._serving.name, what)
        with self._reporting:
            others = {key: known for key, known in self._problems.items() if key != what}
            self._problems = others if why is None else {**others, what: why}
        return why is None

    def _run_chores(self) -> None:
        while True:
            self._chores_due.wait(HOUSE_KEEPING_S)
            self._chores_due.clear()
            if self._stopping:
                return
            self.keep_house()

    def _run(self) -> None:
        backoff_s = 0.0
        while True:
            with self._changed:
                if backoff_s:
                    self._changed.wait_for(lambda: self._stopping, timeout=backoff_s)
                else:
                    self._changed.wait_for(lambda: self._stopping or self._due(), timeout=HOUSE_KEEPING_S)
                if self._stopping:
                    return
            closed = self._try(CLOSING, self._free_retired)
            folded = self._try(FOLDING, self._fold_oldest)
            backoff_s = 0.0 if closed and folded else min(MAX_BACKOFF_S, max(0.5, backoff_s * 2))

    def _fold_oldest(self) -> None:
        pace = Pace(lambda: max(LEAST_OF_A_SWITCH, self._share()), most_s=_LONGEST_REST_S, clock=time.thread_time)
        self._serving.fold_oldest(lambda: self._stopping or self._may_free())
        with self._changed:
            late = self._serving.fold_due()  # deltas come faster than they are folded
        if not late:
            pace.rest()

    def _due(self) -> bool:
        return self._serving.fold_due() or self._may_free()

    def _may_free(self) -> bool:
        publisher = self._serving.publisher
        return any(not publisher.reads(version) for version in self._retiring)

    def _free_retired(self) -> None:
        with self._changed:
            idle = [version for version in self._retiring if not self._serving.publisher.reads(version)]
        for version in idle:
            self._freed(version)
            with self._changed:
                self._retiring.remove(version)
                self._changed.notify_all()
        if idle:
            self.see_to_house()
