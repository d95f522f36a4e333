"""The background thread of a model: folds overlays, closes what was replaced, keeps the log and the disk short.

Whatever fails here is reported by `problem` and tried again: look-ups go on, and the log holds what is not folded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tierstore.engine.serving import Serving
from tierstore.engine.version import Version

log = logging.getLogger(__name__)

HOUSE_KEEPING_S = 30.0
MAX_BACKOFF_S = 30.0


class Keeper:
    """One thread. `freed` is called with each version that nobody reads any more; `keep_house` now and then."""

    def __init__(self, serving: Serving, freed: Callable[[Version], None], keep_house: Callable[[], None]) -> None:
        self._serving, self._freed, self._keep_house = serving, freed, keep_house
        self._changed = serving.publisher.changed
        self._house_kept_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"tierstore-keeper-{serving.name}", daemon=True)
        self.problem: str | None = None
        # guarded by the publisher's condition
        self._retiring: list[Version] = []
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[Version]:
        """Stop the thread. Returns versions that are retired and still open."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
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

    def is_retiring(self, number: int) -> bool:
        with self._changed:
            return any(version.number == number for version in self._retiring)

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
            try:
                self._free_retired()
                self._serving.fold_oldest(lambda: self._stopping or self._may_free())
                if time.monotonic() - self._house_kept_s >= HOUSE_KEEPING_S:
                    self._house_kept_s = time.monotonic()
                    self._keep_house()
                backoff_s, self.problem = 0.0, None
            except Exception as error:
                backoff_s = min(MAX_BACKOFF_S, max(0.5, backoff_s * 2))
                self.problem = f"deltas are not folded: {error}"
                log.exception("model %s: background work failed; next try in %.1f s", self._serving.name, backoff_s)

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
            self._house_kept_s = 0.0  # what was replaced may have left versions that are not to be kept
