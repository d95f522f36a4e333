"""The sampler of host tiers: one thread for a store, which collects what look-ups have noted (`data/insight.py`).

It works for at most one part in `_PART` of the time, besides telling observers that time has passed. Look-ups of a
busy table note keys for a tenth of the time: noting slows the kernel that finds rows by 3 to 4%.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from tierstore import kernels
from tierstore.engine.data.insight import CacheInsight
from tierstore.engine.events.observer import Observer
from tierstore.engine.serving.publisher import Publisher
from tierstore.engine.versions.version import Version
from tierstore.threads import Thread
from tierstore.tiers.background import become_background

log = logging.getLogger(__name__)

MOST_TABLES = 64  # sampled tables, half a megabyte each; others have no curve and no hottest keys
_EVERY_S, _NOTED_S = 0.5, 0.05  # a turn; how much of it look-ups of a busy table are noted
_RETRY_S = 60.0  # after a step that failed
_BUSY_KEYS = 50_000  # looked up in that time
_PART = 400


class CacheSampler:
    """The thread. `publishers` gives the publishers of all models."""

    def __init__(
        self,
        publishers: Callable[[], Sequence[Publisher]],
        refresh: Callable[[], None],
        observers: Sequence[Observer],
        every_s: float = _EVERY_S,
    ) -> None:
        """`refresh` brings the counts of look-ups up to now."""
        self._publishers, self._refresh, self._observers, self._every_s = publishers, refresh, observers, every_s
        self._stopping = threading.Event()
        self._thread = Thread(target=self._run, name="tierstore-cache-sampler", daemon=True)
        self._sampled: list[CacheInsight] = []  # replaced as a whole
        self._failed: list[Observer] = []  # observers that have raised

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it. May be called if it was never started."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        become_background()
        next_step_s = 0.0
        while not self._stopping.wait(self._every_s - _NOTED_S):
            self._notify()
            if kernels.awaited or time.monotonic() < next_step_s:
                continue
            began_s = time.thread_time()
            try:
                self.step(time.time(), time.monotonic())
            except Exception:
                log.exception("host tiers are not looked at for %.0f s; look-ups go on", _RETRY_S)
                next_step_s = time.monotonic() + _RETRY_S
                continue
            self._stopping.wait(_NOTED_S)
            for insight in self._sampled:
                insight.sample.end_if_busy(_BUSY_KEYS)
            next_step_s = time.monotonic() + _PART * (time.thread_time() - began_s)

    def _notify(self) -> None:
        for observer in [one for one in self._observers if one not in self._failed]:
            try:
                observer.time_passed(time.time())
            except Exception:
                log.exception("%s no longer gets the time", type(observer).__name__)
                self._failed.append(observer)

    def step(self, now_s: float, clock_s: float | None = None) -> None:
        """Collect the samples of all served tables. `clock_s`: a clock that never goes back, if it is another one."""
        self._refresh()
        sampled: list[CacheInsight] = []
        for publisher in self._publishers():
            with publisher.pinned() as version:  # the active one; look-ups of a canary are noted in the same place
                if version is not None:
                    self._step(version, now_s, now_s if clock_s is None else clock_s, sampled)
        for insight in self._sampled:
            if insight not in sampled:
                insight.forget()
        self._sampled = sampled

    def _step(self, version: Version, now_s: float, clock_s: float, sampled: list[CacheInsight]) -> None:
        for table in version.tables.values():
            insight, host = table.counts.insight, table.host
            insight.note_minute(now_s, table.counts.as_dict(), version.number, version.watermark)
            wanted = insight in self._sampled or table.counts.total
            if host is not None and host.capacity_rows and wanted and len(sampled) < MOST_TABLES:
                insight.step(host, clock_s)
                sampled.append(insight)
