"""Promotion from the host tier to the device, and back for rows that are evicted there: one thread, one bounded queue.

Look-ups offer keys that the host tier answered, from any thread, and never wait: where the queue is full the offer is
dropped. The thread works under a view that it holds like a request, so that no delta newer than the view is folded
meanwhile; keys in the view's overlays are skipped. So what the host tier holds of the others is current, and stays so
until both tiers have it: a row is never older than a delta, on either side. A key is admitted the second time that it
is offered (or at once where there is room), because a row that is looked up once is not worth room on the device.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.data.overlay import OverlayTable
from tierstore.kernels.hashing import mix_all
from tierstore.threads import Thread
from tierstore.types import Keys, Tier

log = logging.getLogger(__name__)

QUEUE_JOBS = 64
JOB_KEYS = 4096
_SEEN = 1 << 16  # fingerprints of keys offered lately, a table


class Moment(Protocol):
    """What a promotion needs of a view."""

    @property
    def seq(self) -> int: ...
    def overlays_of(self, table: str) -> Sequence[OverlayTable]: ...


# Calls its argument with the view that serves a version now, and holds that view meanwhile; does
# nothing where none serves.
WithView = Callable[[Callable[[Moment], None]], None]


class Offers:
    """Rows that look-ups offer to the caches of one table of one version. Any thread."""

    def __init__(self, promoter: Promoter, table: Cascade, with_view: WithView) -> None:
        self._promoter, self._table, self._with_view = promoter, table, with_view
        self._seen = np.zeros(_SEEN, np.uint16)  # of the promoter's thread alone

    def __call__(self, keys: Keys) -> None:
        """Offer keys that the host tier has answered; at most `JOB_KEYS` of them are copied."""
        if len(keys):
            self._promoter.put(self, keys[:JOB_KEYS].copy())

    def promote(self, keys: Keys) -> None:
        """On the promoter's thread."""
        keys = np.unique(keys)
        device = self._table.device
        if device is None:
            return
        if device.rows_resident >= device.capacity_rows * 0.9:
            keys = keys[self._offered_before(keys)]
        if len(keys):
            self._with_view(lambda view: self._move(view, keys))

    def _offered_before(self, keys: Keys) -> np.ndarray:
        """Which keys were offered lately: a direct-mapped table of fingerprints, which forgets what is overwritten."""
        hashed = mix_all(keys)
        slots = (hashed >> np.uint64(24)) & np.uint64(_SEEN - 1)
        prints = ((hashed >> np.uint64(48)) | np.uint64(1)).astype(np.uint16)
        before: np.ndarray = self._seen[slots] == prints
        self._seen[slots] = prints
        return before

    def _move(self, view: Moment, keys: Keys) -> None:
        table = self._table
        device, host = table.device, table.host
        if device is None or host is None:
            return
        fresh = np.zeros(len(keys), np.uint8)
        nothing = np.empty((len(keys), table.spec.dim), np.float32)
        for overlay in view.overlays_of(table.spec.name):
            overlay.lookup(keys, nothing, fresh, table.default)
        keys = keys[fresh == Tier.PENDING]
        rows, state = host.stored(keys)
        there = state == Tier.HOST
        _, gone, gone_rows = device.exchange(keys[there], rows[there], view.seq)
        if len(gone):
            below = np.zeros(len(gone), np.uint8)
            nothing = np.empty((len(gone), table.spec.dim), np.float32)
            for overlay in view.overlays_of(table.spec.name):
                overlay.lookup(gone, nothing, below, table.default)
            stay = below == Tier.PENDING
            host.insert(gone[stay], gone_rows[stay], view.seq)


class Promoter:
    """The queue and its thread. Any thread may `put`; `close` once no look-up runs."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Offers, Keys] | Callable[[], None] | None] = queue.Queue(QUEUE_JOBS)
        self._thread = Thread(target=self._run, name="tierstore-promoter", daemon=True)
        self.dropped = 0  # offers, because the queue was full
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Offers in the queue, of `QUEUE_JOBS` at most."""
        return self._queue.qsize()

    def put(self, offers: Offers, keys: Keys) -> None:
        try:
            self._queue.put_nowait((offers, keys))
        except queue.Full:
            self.dropped += 1

    def alone(self, work: Callable[[], None]) -> None:
        """Do `work` while nothing is promoted. What it raises is raised here."""
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
                if isinstance(job, tuple):
                    offers, keys = job
                    offers.promote(keys)
                else:
                    job()
            except Exception:
                log.exception("a promotion to the device failed; look-ups go on")
            finally:
                self._queue.task_done()
        self._queue.task_done()
