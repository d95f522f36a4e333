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
from tierstore.errors import Closed
from tierstore.threads import NEVER_S
from tierstore.tiers.background import in_background, without_yielding

_MOST_FOLDING = 0.1  # of the time


class Folder:
    """Folds the overlays of one model, on one thread at a time.

    An overlay is folded `grace_s` after it was made, so that deltas merge in memory. `share`: the share of the time
    that folds may take, above 0 and at most 1.
    """

    def __init__(self, live: LiveViews, grace_s: float, share: Callable[[], float] = lambda: 1.0) -> None:
        self._live, self._grace_s, self._share = live, grace_s, share
        self._pause_until_s = 0.0

    def _is_due(self, view: View) -> bool:
        """Whether no request reads beneath the oldest overlay of a view. Call it under the publisher's condition."""
        return bool(view.overlays) and not self._live.publisher.read_below(view.open_version, view.overlays[-1].hi)

    @property
    def pressed(self) -> bool:
        """Whether unfolded deltas take much of their memory budget."""
        budget = self._live.overlay_budget
        return 4 * budget.used > budget.total

    def fold_due(self) -> float:
        """Fold the oldest overlay into the tiers, if that may be done now, then publish a view without it.

        Producers and look-ups go on. Returns the seconds until one may be folded, NEVER_S while nothing changes. An
        overlay that requests read beneath is chosen all the same, and takes in no delta from then on; of two versions,
        the one whose readers have left is chosen.
        """
        live, changed = self._live, self._live.publisher.changed
        with changed:
            waiting = sorted((v for v in live.served.views if v.overlays), key=lambda v: v.overlays[-1].born_s)
            view = next(filter(self._is_due, waiting), waiting[0] if waiting else None)
        if view is None:
            self._choose(None)
            return NEVER_S
        now_s = time.monotonic()
        # deltas in a pause are merged in memory: a fold of one delta takes about as long as a fold of fifty
        until_s = view.overlays[-1].born_s + self._grace_s
        if not self.pressed:
            until_s = max(until_s, self._pause_until_s)
        if until_s > now_s:
            return until_s - now_s
        view = self._choose(view.open_version)
        if view is None or not self._may_fold(view):
            return NEVER_S
        try:
            took_s = self._fold(view)
        except Closed:  # it is being replaced: what takes its place has the delta by itself
            return NEVER_S
        finally:
            self._choose(None)
        # at most forty times as long as each delta waits in any case
        pause_s = min(took_s / (_MOST_FOLDING * self._share()), 40 * self._grace_s, 2.0)
        self._pause_until_s = time.monotonic() + pause_s
        return 0.0

    def _choose(self, version: Version | None) -> View | None:
        """Freeze the oldest overlay of a version's current view, so that no delta is merged into it.

        None if there is none, and all overlays take in deltas.
        """
        live = self._live
        if version is None and live.folding is None:
            return None
        with live.write:
            view = None if version is None else live.served.view_of(version)
            live.folding = view.overlays[-1] if view is not None and view.overlays else None
            return None if live.folding is None else view

    def _may_fold(self, view: View) -> bool:
        version, seq = view.open_version, view.overlays[-1].hi
        with self._live.publisher.changed:
            return version.rows.may_fold(seq) and not self._live.publisher.read_below(version, seq)

    def _fold(self, view: View) -> float:
        """Fold the view's oldest overlay. Returns the seconds taken."""
        live, version, oldest = self._live, view.open_version, view.overlays[-1]
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

    def compact(self, stopping: Callable[[], bool]) -> None:
        """Merge the files of changed rows of served versions. Stops if deltas need the fold more. StorageError,
        Corruption.

        A view is published, which wakes this thread, only where there are other files: it would go round otherwise,
        for as long as it has to stop at once.
        """
        live = self._live
        for version in [view.open_version for view in live.served.views if view.open_version.rows.compaction_due()]:

            def give_up(version: Version = version) -> bool:
                return (
                    stopping()
                    or live.served.view_of(version) is None
                    or (self.pressed and not version.rows.compaction_urgent())
                )

            if in_background(lambda version=version, give_up=give_up: version.compact(give_up)):  # type: ignore[misc]
                live.renew(version)  # compiled readers then release what was replaced
