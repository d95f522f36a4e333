"""Warm-up of versions that serve already: after a start, rows of hot keys are read into memory, in the order of
`data/reading_order.py`.

One thread for a store, of low priority. It reads at most `warm_rate` rows a second, or fewer if look-ups get slower.
It also saves the hot keys of what serves from time to time, for a start after a crash. The keys of a version that is
not warm yet are not saved, since the file has more of them than memory.

`add` before `start`; any thread may read the progress. Only saved keys survive a crash.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstore import kernels
from tierstore.engine.data.cascade import SHORT_BATCH, Cascade
from tierstore.engine.data.reading_order import pieces, stretch_after
from tierstore.engine.lifecycle.throttle import LEAST_SHARE, Throttle
from tierstore.engine.reads.view import View
from tierstore.engine.serving.publisher import Publisher
from tierstore.engine.versions.version import Version
from tierstore.errors import Closed, TierstoreError
from tierstore.threads import Thread
from tierstore.tiers.background import Pace, become_background, yield_if_background
from tierstore.types import Keys, Tier

log = logging.getLogger(__name__)

_NONE = np.empty(0, np.int64)
_AWAITED_S = 0.1  # between two checks whether kernels are compiled
_MOST_FAILURES = 16  # batches that the disk cannot read, after which a warm-up ends


@dataclass(slots=True)
class _TableWarmup:
    """The keys to read into the cache of a table, from all sources, one after the other."""

    table: Cascade
    tier: Tier
    sources: Sequence[Keys]
    give_way: Callable[[], None]
    done: int = 0
    _pieces: Iterator[Keys] = field(default_factory=lambda: iter(()))  # of the stretch, those to come
    _piece: Keys = field(default_factory=lambda: _NONE)  # what is left of it

    @property
    def total(self) -> int:
        cache = self.table.caches.get(self.tier)
        return 0 if cache is None else min(sum(map(len, self.sources)), cache.capacity_rows)

    def next(self, limit: int) -> Keys:
        """The next keys, at most `limit`; none at the end."""
        self.prepare()
        keys, self._piece = self._piece[:limit], self._piece[limit:]
        return keys

    def prepare(self) -> None:
        """Have the next keys in memory, in order: what takes long about `next`."""
        while not len(self._piece):
            piece = next(self._pieces, None)
            if piece is not None:
                self._piece = piece
            elif len(stretch := self._next_stretch()):
                self._pieces = pieces(stretch, self.table.in_order, self.give_way)
            else:
                break

    def _next_stretch(self) -> Keys:
        begin = self.done
        count = max(0, min(stretch_after(begin), self.total - begin))
        for keys in self.sources:
            if begin < len(keys):
                return keys[begin : begin + count]
            begin -= len(keys)
        return _NONE


class WarmUp:
    """The warm-up of one version. `step` and `prepare` are for one thread; what takes long about them calls `give_way`
    often.
    """

    def __init__(
        self, version: Version, publisher: Publisher, give_way: Callable[[], None] = yield_if_background
    ) -> None:
        self.version, self.publisher = version, publisher
        warmups = [
            _TableWarmup(table, tier, version.kept_hot_keys(name, tier), give_way)
            for name, table in version.tables.items()
            for tier in table.caches
        ]
        self._warmups = [warmup for warmup in warmups if warmup.total]
        self.failures = 0

    @property
    def done(self) -> int:
        """The number of keys that were read."""
        return sum(min(warmup.done, warmup.total) for warmup in self._warmups)

    @property
    def total(self) -> int:
        """The number of keys to read."""
        return sum(warmup.total for warmup in self._warmups)

    @property
    def over(self) -> bool:
        return self.done >= self.total

    def _behind(self) -> _TableWarmup | None:
        """The warmup of the cache that is furthest behind; None if all are done."""
        warmup = min(
            self._warmups, key=lambda warmup: warmup.done / warmup.total if warmup.total else 1.0, default=None
        )
        return None if warmup is None or warmup.done >= warmup.total else warmup

    def prepare(self) -> None:
        """Make the next `step` short."""
        if (warmup := self._behind()) is not None:
            warmup.prepare()

    def step(self, view: View, limit: int) -> int:
        """Read at most `limit` keys, for the cache that is furthest behind, under a view of the version that the caller
        holds.

        Returns their number; 0 at the end. Keys that the disk cannot read are skipped: look-ups will report the error.
        """
        warmup = self._behind()
        if warmup is None:
            return 0
        keys = warmup.next(limit)
        warmup.done += len(keys)
        view.table(warmup.table.spec.name).warm(keys, warmup.tier)
        return len(keys)


class Warmer:
    """The thread. `publishers` gives the publishers of all models."""

    def __init__(
        self, publishers: Callable[[], Sequence[Publisher]], rate: float, save_every_s: float, throttle: Throttle
    ) -> None:
        # constant after construction
        self._throttle = throttle
        self._publishers, self._rate, self._save_every_s = publishers, rate, save_every_s
        self._stopping = threading.Event()
        self._thread = Thread(target=self._run, name="tierstore-warmer", daemon=True)
        # guarded by _lock
        self._lock = threading.Lock()
        self._warm_ups: tuple[WarmUp, ...] = ()  # replaced as a whole, so that readers need no lock
        self._over = 0  # keys read by finished warm-ups
        # for the thread
        self._saved_s = time.monotonic()
        self._next_s = 0.0
        self._pace_of_work = Pace(lambda: max(LEAST_SHARE, throttle.share), most_s=0.5)

    def add(self, version: Version, publisher: Publisher) -> None:
        """Warm a version that is about to serve."""
        with self._lock:
            self._warm_ups = (*self._warm_ups, WarmUp(version, publisher, self._give_way))

    def warm_up_of(self, version: Version) -> WarmUp | None:
        """The warm-up of a version; None if it is over, or there was none."""
        return next((each for each in self._warm_ups if each.version is version), None)

    def share(self) -> float:
        """The share that is read, 0 to 1; 1 if nothing is to be read."""
        progress = self.progress()
        return 1.0 if progress is None else progress[0] / max(1, progress[1])

    def progress(self) -> tuple[int, int] | None:
        """(keys read, keys to read) of all warm-ups since the start; None once all are over."""
        with self._lock:
            warm_ups, over = self._warm_ups, self._over
        if not warm_ups:
            return None
        return over + sum(each.done for each in warm_ups), over + sum(each.total for each in warm_ups)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it. May be called if it was never started."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        become_background()
        with contextlib.ExitStack() as at_work:
            self._loop(at_work)

    def _loop(self, at_work: contextlib.ExitStack) -> None:
        if self._warm_ups:
            at_work.enter_context(self._throttle.at_work("warm"))
        while not self._stopping.is_set():
            remaining_s = self._saved_s + self._save_every_s - time.monotonic() if self._save_every_s else None
            if remaining_s is not None and remaining_s <= 0:
                self.save_hot_keys()
                continue
            if kernels.awaited:  # warming needs them
                self._stopping.wait(_AWAITED_S)
                continue
            for warm_up in self._warm_ups:
                if warm_up.over:
                    self._end(warm_up)
            if not self._warm_ups:
                at_work.close()
                self._stopping.wait(remaining_s)
                continue
            self._pace_of_work.begin()
            self._step(min(self._warm_ups, key=lambda each: each.done / max(1, each.total)))

    def _step(self, warm_up: WarmUp) -> None:
        try:
            warm_up.prepare()
            with warm_up.publisher.hold_all() as served:  # no longer than this: it holds folds back
                view = served.view_of(warm_up.version)
                rows = 0 if view is None else warm_up.step(view, SHORT_BATCH)
        except Exception as error:  # whatever the error, the other keys are read, and other versions warmed
            if self._stopping.is_set():
                return
            log.warning("warming version %d: %s", warm_up.version.number, error, exc_info=_unexpected(error))
            warm_up.failures += 1
            rows = 0 if warm_up.failures == _MOST_FAILURES else SHORT_BATCH
        if not rows:
            self._end(warm_up)
        self._pace_of_work.sleep()
        self._pace(rows)

    def _give_way(self) -> None:
        yield_if_background()
        if self._stopping.is_set():
            raise Closed("the warm-up has ended: the store is being closed")

    def _end(self, warm_up: WarmUp) -> None:
        with self._lock:
            self._warm_ups = tuple(each for each in self._warm_ups if each is not warm_up)
            self._over += warm_up.done

    def _pace(self, rows: int) -> None:
        now = time.monotonic()
        self._next_s = max(self._next_s, now) + rows / self._rate
        self._stopping.wait(self._next_s - now)

    def save_hot_keys(self) -> None:
        """Save the hot keys of everything that serves and is warm. On the thread, periodically."""
        for publisher in self._publishers():
            for number in publisher.served.versions:
                with publisher.pinned(number) as version:
                    if version is None or self.warm_up_of(version) is not None or self._stopping.is_set():
                        continue
                    try:
                        version.save_hot_keys(self._stopping.is_set)
                    except Exception as error:  # whatever the error, the next try is made
                        log.warning(
                            "hot keys of version %d are not saved: %s", number, error, exc_info=_unexpected(error)
                        )
        self._saved_s = time.monotonic()


def _unexpected(error: Exception) -> bool:
    """Whether the log should show where an error came from."""
    return not isinstance(error, TierstoreError)
