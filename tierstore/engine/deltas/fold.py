"""Folding: the oldest overlay of a version goes into its tiers, and a view without it is published.

Each version folds by itself, one fold at a time, on one thread; look-ups and producers go on.

After a crash: RocksDB holds the deltas up to its watermark, the log those above.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tierstore.engine.reads.view import View
from tierstore.engine.serving.live import LiveViews
from tierstore.engine.versions.version import Version
from tierstore.tiers.background import in_background, without_yielding


class Folder:
    """Folds the overlays of one model.

    An overlay is `grace_s` old before it is folded, so that deltas merge in memory.
    """

    def __init__(self, live: LiveViews, grace_s: float) -> None:
        self._live, self._grace_s = live, grace_s

    def due(self) -> bool:
        """Whether there is an overlay that no request reads beneath. Call it under the publisher's condition."""
        return any(map(self._is_due, self._live.served.views))

    def _is_due(self, view: View) -> bool:
        return bool(view.overlays) and not self._live.publisher.read_below(view.open_version, view.overlays[-1].hi)

    @property
    def longest_pause_s(self) -> float:
        """How long the next fold may wait for more deltas after one: forty times as long as each waits in any case."""
        return min(40 * self._grace_s, 2.0)

    @property
    def pressed(self) -> bool:
        """Whether what is not folded takes much of the memory that it may."""
        budget = self._live.overlay_budget
        return 4 * budget.used > budget.total

    def fold_oldest(self, interrupted: Callable[[], bool]) -> float:
        """Fold the oldest overlay into the tiers, then publish a view without it. Producers and look-ups go on.

        Returns the seconds that the fold took.

        Waits for requests that read beneath it, until its version is not served any more, another one can be folded, or
        `interrupted` (called under the publisher's condition) is true: one slow reader must not keep the caller from
        everything else.
        """
        live, changed = self._live, self._live.publisher.changed
        with changed:
            waiting = sorted((v for v in live.served.views if v.overlays), key=lambda v: v.overlays[-1].born_s)
            view = next(filter(self._is_due, waiting), waiting[0] if waiting else None)
        if view is None:
            return 0.0
        version = view.open_version

        def off() -> bool:
            return live.served.view_of(version) is None or interrupted()

        wait_s = view.overlays[-1].born_s + self._grace_s - time.monotonic()
        with changed:
            if wait_s > 0 and changed.wait_for(off, timeout=wait_s):
                return 0.0
        with live.write:
            view = live.served.view_of(version)
            if view is None or not view.overlays:
                return 0.0
            live.folding = view.overlays[-1]  # from here on no delta merges into it
        try:
            return self._fold(view, off)
        finally:
            with live.write:
                live.folding = None

    def _fold(self, view: View, off: Callable[[], bool]) -> float:
        live, changed = self._live, self._live.publisher.changed
        version, oldest = view.open_version, view.overlays[-1]

        def ready() -> bool:
            return version.rows.may_fold(oldest.hi) and not live.publisher.read_below(version, oldest.hi)

        with changed:
            changed.wait_for(lambda: off() or ready() or self._other_due(version))
            if off() or not ready():
                return 0.0
        began_s = time.monotonic()
        if len(view.overlays) > 1:  # deltas arrive faster than they are folded
            with without_yielding(True):
                version.fold(oldest)
        else:
            in_background(lambda: version.fold(oldest))
        with live.write:
            now = live.served.view_of(version)
            if now is not None:
                newer = tuple(overlay for overlay in now.overlays if overlay is not oldest)
                live.publisher.publish(live.served.with_views([View(version, newer, now.seq)]))
                live.overlay_budget.release(oldest.nbytes)
        return time.monotonic() - began_s

    def tidy(self, stopping: Callable[[], bool]) -> None:
        """Put the files of changed rows of what serves in order. It is broken off where deltas need the fold more.

        StorageError, Corruption.
        """
        live = self._live
        for version in [view.open_version for view in live.served.views if view.open_version.rows.needs_tidying()]:

            def give_up(version: Version = version) -> bool:
                return (
                    stopping()
                    or live.served.view_of(version) is None
                    or (self.pressed and not version.rows.must_tidy())
                )

            in_background(lambda version=version, give_up=give_up: version.tidy(give_up))  # type: ignore[misc]
            with live.write:
                now = live.served.view_of(version)
                if now is not None:  # for compiled readers to let go of what it replaced
                    live.publisher.publish(live.served.with_views([View(version, now.overlays, now.seq)]))

    def _other_due(self, version: Version) -> bool:
        return any(view.open_version is not version and self._is_due(view) for view in self._live.served.views)
