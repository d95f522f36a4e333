"""Promotion from the host tier to the device, and back for rows that the device evicts: one thread, and rings of keys.

Look-ups into GPU memory offer keys that the host tier answered, from any thread, without waiting: keys that find no
room in the table's ring are dropped, and all keys if another thread is offering. The promoter's compiled code takes
keys, chooses among them and moves their rows. It holds a view like a request, so that no delta newer than the view is
folded meanwhile; keys in the view's overlays are skipped. So the host tier's rows of the other keys are current, and
stay so until both tiers have them: a row is never older than a delta, on either side. A key is admitted when it is
offered for the second time (or at once while there is room), because a row that is looked up once is not worth room
on the device.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from tierstore import kernels
from tierstore.engine.data.cascade import Cascade
from tierstore.engine.data.table_view import TableView
from tierstore.kernels.codec import address_of
from tierstore.threads import Thread
from tierstore.tiers.device import staging
from tierstore.tiers.device.table import DeviceTable
from tierstore.tiers.host.table import HostTable
from tierstore.types import Keys, States

log = logging.getLogger(__name__)

RING_KEYS = 1 << 15  # keys of a table that are offered and not handled yet
_JOB_KEYS = 4096  # keys handled at a time
_SEEN = 1 << 16  # fingerprints of recently offered keys of a table


class PromotionView(Protocol):
    """The part of a view that a promotion needs."""

    @property
    def seq(self) -> int: ...
    def table(self, name: str) -> TableView: ...


# Calls its argument with the view that serves a version now, holding it meanwhile; does nothing if none serves.
WithView = Callable[[Callable[[PromotionView], None]], None]


class Offers:
    """Keys that look-ups offer to the caches of one table of one version. Any thread."""

    def __init__(self, promoter: Promoter, table: Cascade, with_view: WithView) -> None:
        self._promoter, self._table, self._with_view = promoter, table, with_view
        self._lock = threading.Lock()
        # guarded by _lock
        self._ring = np.zeros(staging.RING_WORDS + RING_KEYS, np.int64)
        self._queued = False  # whether the promoter's thread will come
        # only for the promoter's thread
        self._keys, self._seen = np.empty(_JOB_KEYS, np.int64), np.zeros(_SEEN, np.uint16)

    def __call__(self, keys: Keys, states: States) -> None:
        """Offer the keys whose state is HOST."""
        if kernels.awaited or not self._lock.acquire(blocking=False):
            self._promoter.dropped += len(keys)
            return
        try:
            self._promoter.dropped += staging.offer(self._ring, np.ascontiguousarray(keys), states)
            if not self._queued and self.waiting:
                self._queued = True
                self._promoter.put(self)
        finally:
            self._lock.release()

    @property
    def waiting(self) -> int:
        """The number of offered keys that are not handled yet."""
        return int(self._ring[staging.PUT] - self._ring[staging.POPPED])

    def promote(self) -> None:
        """On the promoter's thread: move some keys; others wait for their turn."""
        with self._lock:
            keys = self._keys[: staging.pop(self._ring, self._keys)]
            self._queued = bool(self.waiting)
            if self._queued:
                self._promoter.put(self)
        device, host = self._table.device, self._table.host
        if device is None or host is None:
            return
        device.read_below(host)
        self._with_view(lambda view: self._move(view, keys, device, host))

    def _move(self, view: PromotionView, keys: Keys, device: DeviceTable, host: HostTable) -> None:
        spec, under = self._table.spec, view.table(self._table.spec.name)
        rows = np.empty((len(keys), spec.row_bytes), np.uint8)
        is_full = device.rows_resident >= device.capacity_rows * 0.9
        above = np.array([address_of(overlay.words) for overlay in under.overlays], np.int64)
        with host.unnoted() as words_at:
            n = 0
            if words_at:
                n = staging.choose(
                    keys, self._seen, is_full, above, words_at, spec.dim, spec.row_bytes, address_of(rows)
                )
        if not n:
            return
        _, gone, gone_rows = device.exchange(keys[:n], rows[:n], view.seq)
        if len(gone):
            stay = ~under.overlaid(gone)
            host.insert(gone[stay], gone_rows[stay], view.seq)


class Promoter:
    """The queue of tables with offers, and its thread. Any thread may `put`; `close` once no look-up runs."""

    def __init__(self) -> None:
        # a table is in it once, however many keys wait
        self._queue: queue.Queue[Offers | Callable[[], None] | None] = queue.Queue()
        self._thread = Thread(target=self._run, name="tierstore-promoter", daemon=True)
        self.dropped = 0  # keys; approximate
        self._thread.start()

    def put(self, offers: Offers) -> None:
        self._queue.put(offers)

    def alone(self, work: Callable[[], None]) -> None:
        """Do `work` while nothing is promoted. Raises its errors."""
        done: Future[None] = Future()

        def on_thread() -> None:
            try:
                work()
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                done.set_exception(error)

        self._queue.put(on_thread)
        done.result()

    def drain(self) -> None:
        """Wait until all offers are done."""
        self._queue.join()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if isinstance(job, Offers):
                    job.promote()
                else:
                    job()
            except Exception:
                log.exception("a promotion to the device failed; look-ups go on")
            finally:
                self._queue.task_done()
        self._queue.task_done()
