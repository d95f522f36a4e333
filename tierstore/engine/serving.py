"""What a model serves right now: the views that requests take, the deltas that go into them, and their folding.

There is one log, and a delta goes into every version that is served: all their views are published as one, before the
delta is acknowledged. Each version folds by itself, one fold at a time.

Look-ups: any thread, no lock beyond the view's count. Deltas: any thread, one at a time (`write`). `fold_oldest`: one
thread. `write` is taken before the publisher's condition.

After a crash: a delta that was acknowledged is in the log; the view is made again by replay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from tierstore.engine.budget import OverlayBudget
from tierstore.engine.deltalog import DeltaLog
from tierstore.engine.dense import DenseParts
from tierstore.engine.epochs import Epochs
from tierstore.engine.observer import Observer
from tierstore.engine.overlay import Overlay, encode_delta, stack
from tierstore.engine.publisher import Publisher
from tierstore.engine.record import Record
from tierstore.engine.served import Served
from tierstore.engine.version import Version
from tierstore.engine.view import View
from tierstore.errors import Conflict, DeltaError, NotReady, SequenceGap, TooLarge
from tierstore.formats.delta import Delta
from tierstore.predict.session import DenseSession
from tierstore.tiers.background import hurrying
from tierstore.types import DeltaResult, TableSpec


class Serving:
    """The published views of one model and the way of a delta into them."""

    def __init__(
        self,
        name: str,
        deltas: DeltaLog,
        record: Record,
        budget: OverlayBudget,
        observers: list[Observer],
        grace_s: float,
        epochs: Epochs | None = None,
    ) -> None:
        # constant after construction
        self.name, self.deltas, self._record = name, deltas, record
        self.publisher = Publisher(name, epochs)
        self.write = threading.Lock()  # held by whoever changes the log or a view
        self._budget, self._observers, self._grace_s = budget, observers, grace_s
        # guarded by write
        self._folding: Overlay | None = None
        self.last_event: datetime | None = None

    @property
    def served(self) -> Served:
        return self.publisher.served

    @property
    def current(self) -> View | None:
        """The active version's view."""
        return self.publisher.current

    def apply(
        self,
        delta: Delta,
        data: bytes | memoryview,
        specs_of: Callable[[int], Mapping[str, TableSpec] | None],
        dense: DenseParts,
    ) -> DeltaResult:
        """Log a delta, then publish it. On return it is durable, and every request that starts sees it whole.

        `specs_of` gives the tables of a version that may not be served, or None for one that is not known (yet).
        `dense` makes its dense part ready, if it brings one.
        """
        ahead = self._ready_dense(delta, dense)
        with self.write:
            served = self.served
            self._check_log(delta, served)
            if self._is_held(delta, served):
                return DeltaResult(self.name, delta.seq, applied=False)
            if served.active is None:
                raise served.nothing(self.name, " before sending deltas")
            # a canary's snapshot may reach beyond the log; then it holds the delta already
            views = [view for view in served.views if view.seq < delta.seq]
            new = [self._encode(delta, view, served) for view in views]
            base = delta.base_version
            if base is not None and served.numbered(base) is None and (specs := specs_of(base)) is not None:
                # that version would choke on it at catch-up, when it is too late to refuse it
                encode_delta(delta, specs, {}, for_this_version=True)
                if delta.dense is not None:
                    dense.check(delta.seq, delta.dense, base)
            for view, overlay in zip(views, new, strict=True):
                if overlay.dense is not None:
                    if view.holder not in ahead:  # switched meanwhile, or its turn was not foreseen
                        ahead[view.holder] = self._session(delta, view, served, dense)
                    overlay.predictor = ahead[view.holder]
            taken = _bytes(new)
            with _naming_the_canary(views[-1 if new[0].nbytes <= self._budget.total else 0], served):
                self._budget.take(taken)
            try:
                # all that may fail comes before the log: what is in it must become visible
                stacks = [
                    stack(view.overlays, overlay, frozen=self._folding)
                    for view, overlay in zip(views, new, strict=True)
                ]
                after = served.with_views(
                    View(view.holder, overlays, delta.seq) for view, overlays in zip(views, stacks, strict=True)
                )
                self._record.settle()  # else the next start might serve another version, without this delta
                self.deltas.append(delta.seq, data, delta.digest)
            except BaseException:
                self._budget.give(taken)
                raise
            if delta.dense is not None:
                for view in views:
                    view.holder.info.asked_upto = delta.seq
            # rows that a newer delta in the same overlay replaced are gone
            self._budget.give(sum(_bytes(view.overlays) for view in views) + taken - sum(map(_bytes, stacks)))
            self.publisher.publish(after)
            self.last_event = delta.event_time
        freshness_s = (datetime.now(UTC) - delta.event_time).total_seconds()
        rows = sum(len(table.keys) for table in delta.tables.values())
        for observer in self._observers:
            observer.delta_visible(self.name, delta.seq, rows, freshness_s)
        return DeltaResult(self.name, delta.seq, applied=True)

    def _encode(self, delta: Delta, view: View, served: Served) -> Overlay:
        with _naming_the_canary(view, served):
            for_it = delta.base_version in (None, view.version)
            return encode_delta(delta, view.holder.specs, view.colliding, for_this_version=for_it)

    def _session(self, delta: Delta, view: View, served: Served, dense: DenseParts) -> DenseSession | None:
        assert delta.dense is not None
        with _naming_the_canary(view, served):
            return dense.of_delta(delta, delta.dense, view)

    def _ready_dense(self, delta: Delta, dense: DenseParts) -> dict[Version, DenseSession | None]:
        """Sessions of a delta's dense part, by version, made before `write` is taken, so that nobody waits for them.

        The delta's turn may change until then: whatever is doubtful is left for later.
        """
        last = self.deltas.last
        if delta.dense is None or last is None or delta.seq != last + 1:
            return {}
        with self.publisher.beside() as served:
            return {
                view.holder: self._session(delta, view, served, dense)
                for view in served.views
                if delta.base_version in (None, view.version) and view.seq < delta.seq
            }

    def _check_log(self, delta: Delta, served: Served) -> None:
        """NotReady where the log is damaged so that it takes no delta, or does not know whether it had this one."""
        why = self.deltas.unusable or (self.deltas.why_lost(delta.seq) if served.active is None else None)
        if why is not None:
            raise NotReady(f"model {self.name!r} takes no delta {delta.seq}: {why}")

    def _is_held(self, delta: Delta, served: Served) -> bool:
        last = self.deltas.last
        if last is None:
            raise served.nothing(self.name, " before sending deltas")
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

    def set(self, served: Served) -> list[Version]:
        """Publish what is to be served, caught up. Holds `write`. Returns the versions that were and are no more."""
        before = self.served.views
        self.publisher.publish(served)
        gone = [view for view in before if served.of(view.holder) is None]
        self._budget.give(sum(_bytes(view.overlays) for view in gone))
        return [view.holder for view in gone]

    def fold_due(self) -> bool:
        """Whether there is an overlay that nobody reads beneath. Call it under the publisher's condition."""
        return any(map(self._is_due, self.served.views))

    def _is_due(self, view: View) -> bool:
        return bool(view.overlays) and not self.publisher.read_below(view.holder, view.overlays[-1].hi)

    def fold_oldest(self, interrupted: Callable[[], bool]) -> None:
        """Fold the oldest overlay into the tiers, then publish a view without it. Producers and look-ups go on.

        Waits for those who read beneath it, until its version is not served any more, another one can be folded, or
        `interrupted` (called under the publisher's condition) is true: one slow reader must not keep the caller from
        everything else.
        """
        changed = self.publisher.changed
        with changed:
            waiting = sorted((v for v in self.served.views if v.overlays), key=lambda v: v.overlays[-1].born_s)
            view = next(filter(self._is_due, waiting), waiting[0] if waiting else None)
        if view is None:
            return
        version = view.holder
        wait_s = view.overlays[-1].born_s + self._grace_s - time.monotonic()

        def off() -> bool:
            return self.served.of(version) is None or interrupted()

        with changed:
            if wait_s > 0 and changed.wait_for(off, timeout=wait_s):
                return
        with self.write:
            view = self.served.of(version)
            if view is None or not view.overlays:
                return
            oldest = self._folding = view.overlays[-1]  # from here on no delta merges into it
        try:
            with changed:
                changed.wait_for(
                    lambda: off() or not self.publisher.read_below(version, oldest.hi) or self._due_beside(version)
                )
                if off() or self.publisher.read_below(version, oldest.hi):
                    return
            with hurrying(len(view.overlays) > 1):  # deltas come faster than they are folded
                version.fold(oldest)
            with self.write:
                view = self.served.of(version)
                if view is not None:
                    rest = tuple(overlay for overlay in view.overlays if overlay is not oldest)
                    self.publisher.publish(self.served.with_views([View(version, rest, view.seq)]))
                    self._budget.give(oldest.nbytes)
        finally:
            with self.write:
                self._folding = None

    def _due_beside(self, version: Version) -> bool:
        return any(view.holder is not version and self._is_due(view) for view in self.served.views)


@contextmanager
def _naming_the_canary(view: View, served: Served) -> Iterator[None]:
    """A delta that is refused for the canary's sake says so: what is active could take it."""
    try:
        yield
    except (DeltaError, TooLarge) as error:
        if view is not served.canary:
            raise
        raise type(error)(
            f"{error}; version {view.version} is the canary: withdraw it, or send what is for one version alone with a base_version"
        ) from error


def _bytes(overlays: Sequence[Overlay]) -> int:
    return sum(overlay.nbytes for overlay in overlays)
