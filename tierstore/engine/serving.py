"""What a model serves right now: the view that requests take, the deltas that go into it, and their folding.

Look-ups: any thread, no lock beyond the view's count. Deltas: any thread, one at a time (`write`). `fold_oldest`: one
thread. `write` is taken before the publisher's condition.

After a crash: a delta that was acknowledged is in the log; the view is made again by replay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from tierstore.engine.budget import OverlayBudget
from tierstore.engine.deltalog import DeltaLog
from tierstore.engine.dense import DenseParts
from tierstore.engine.observer import Observer
from tierstore.engine.overlay import Overlay, encode_delta, stack
from tierstore.engine.version import Version
from tierstore.engine.view import Publisher, View
from tierstore.errors import Conflict, NotReady, SequenceGap
from tierstore.formats.delta import Delta
from tierstore.predict.session import DenseSession
from tierstore.types import DeltaResult, TableSpec


class Serving:
    """The published view of one model and the way of a delta into it."""

    def __init__(
        self,
        name: str,
        deltas: DeltaLog,
        budget: OverlayBudget,
        observers: list[Observer],
        grace_s: float,
        told: Sequence[Callable[[], None]] = (),
    ) -> None:
        # constant after construction
        self.name, self.deltas = name, deltas
        self.publisher = Publisher(told)
        self.write = threading.Lock()  # held by whoever changes the log or the view
        self._budget, self._observers, self._grace_s = budget, observers, grace_s
        # guarded by write
        self._folding: Overlay | None = None
        self.last_event: datetime | None = None

    @property
    def current(self) -> View | None:
        return self.publisher.current

    def apply(
        self,
        delta: Delta,
        data: bytes | memoryview,
        specs_of: Callable[[int], Mapping[str, TableSpec] | None],
        dense: DenseParts,
    ) -> DeltaResult:
        """Log a delta, then publish it. On return it is durable, and every request that starts sees it whole.

        `specs_of` gives the tables of a version that may not be serving, or None for one that is not known (yet).
        `dense` makes its dense part ready, if it brings one.
        """
        ahead = self._ready_dense(delta, dense)
        with self.write:
            if self._is_held(delta):
                return DeltaResult(self.name, delta.seq, applied=False)
            view = self.current
            if view is None:
                raise NotReady(f"model {self.name!r} has no active version; load or activate one before sending deltas")
            overlay = encode_delta(
                delta, view.holder.specs, for_this_version=delta.base_version in (None, view.version)
            )
            if (
                delta.base_version not in (None, view.version)
                and (specs := specs_of(delta.base_version or 0)) is not None
            ):
                # that version would choke on it at catch-up, when it is too late to refuse it
                encode_delta(delta, specs, for_this_version=True)
                if delta.dense is not None:
                    dense.check(delta.seq, delta.dense, delta.base_version or 0)
            if overlay.dense is not None:
                made_for, overlay.predictor = ahead
                if made_for is not view.holder:  # switched meanwhile, or its turn was not foreseen
                    overlay.predictor = dense.of_delta(delta.seq, overlay.dense, view)
            self._budget.take(overlay.nbytes)
            try:
                # all that may fail comes before the log: what is in it must become visible
                overlays = stack(view.overlays, overlay, frozen=self._folding)
                self.deltas.append(delta.seq, data, delta.digest)
            except BaseException:
                self._budget.give(overlay.nbytes)
                raise
            # rows that a newer delta in the same overlay replaced are gone
            self._budget.give(_bytes(view.overlays) + overlay.nbytes - _bytes(overlays))
            self.publisher.publish(View(view.holder, overlays, delta.seq))
            self.last_event = delta.event_time
        freshness_s = (datetime.now(UTC) - delta.event_time).total_seconds()
        rows = sum(len(table.keys) for table in delta.tables.values())
        for observer in self._observers:
            observer.delta_visible(self.name, delta.seq, rows, freshness_s)
        return DeltaResult(self.name, delta.seq, applied=True)

    def _ready_dense(self, delta: Delta, dense: DenseParts) -> tuple[Version | None, DenseSession | None]:
        """(version, session) of a delta's dense part, made before `write` is taken, so that nobody waits for it.

        The delta's turn may change until then: whatever is doubtful is left for later.
        """
        last = self.deltas.last
        if delta.dense is None or last is None or delta.seq != last + 1:
            return None, None
        view = self.publisher.enter()
        if view is None:
            return None, None
        try:
            if delta.base_version not in (None, view.version):
                return None, None
            return view.holder, dense.of_delta(delta.seq, delta.dense, view)
        finally:
            self.publisher.leave(view)

    def _is_held(self, delta: Delta) -> bool:
        last = self.deltas.last
        if last is None:
            raise NotReady(f"model {self.name!r} has no active version; load or activate one before sending deltas")
        if delta.seq == last + 1:
            return False
        if delta.seq > last + 1:
            raise SequenceGap(
                f"delta {delta.seq} of {self.name!r} came out of turn; {last + 1} is next", expected_seq=last + 1
            )
        held = self.deltas.digest(delta.seq)
        if held is not None and held != delta.digest:
            raise Conflict(
                f"delta {delta.seq} of {self.name!r} is held with other content; give new content a new seq, {last + 1} is next"
            )
        return True

    def switch(self, version: Version | None) -> Version | None:
        """Publish a version that is caught up, or nothing. Holds `write`. Returns the version that served before."""
        before = self.current
        self.publisher.publish(None if version is None else View(version, (), version.watermark))
        if before is None:
            return None
        self._budget.give(_bytes(before.overlays))
        return before.holder

    def fold_due(self) -> bool:
        """Whether there is an overlay that nobody reads beneath. Call it under the publisher's condition."""
        view = self.current
        return (
            view is not None
            and bool(view.overlays)
            and not self.publisher.read_below(view.holder, view.overlays[-1].hi)
        )

    def fold_oldest(self, interrupted: Callable[[], bool]) -> None:
        """Fold the oldest overlay into the tiers, then publish a view without it. Producers and look-ups go on.

        Waits for those who read beneath it, until the version is replaced or `interrupted` (called under the
        publisher's condition) is true: one slow reader must not keep the caller from everything else.
        """
        changed = self.publisher.changed
        view = self.current
        if view is None or not view.overlays:
            return
        version = view.holder
        wait_s = view.overlays[-1].born_s + self._grace_s - time.monotonic()

        def off() -> bool:
            current = self.current
            return current is None or current.holder is not version or interrupted()

        with changed:
            if wait_s > 0 and changed.wait_for(off, timeout=wait_s):
                return
        with self.write:
            view = self.current
            if view is None or view.holder is not version or not view.overlays:
                return
            oldest = self._folding = view.overlays[-1]  # from here on no delta merges into it
        try:
            with changed:
                changed.wait_for(lambda: off() or not self.publisher.read_below(version, oldest.hi))
                if off():
                    return
            version.fold(oldest)
            with self.write:
                view = self.current
                if view is not None and view.holder is version:
                    rest = tuple(overlay for overlay in view.overlays if overlay is not oldest)
                    self.publisher.publish(View(version, rest, view.seq))
                    self._budget.give(oldest.nbytes)
        finally:
            with self.write:
                self._folding = None


def _bytes(overlays: tuple[Overlay, ...]) -> int:
    return sum(overlay.nbytes for overlay in overlays)
