"""Applying a delta: checked, logged, and published in all versions that are served.

There is one log, and a delta goes into every served version: all their views are published in one step, before the
delta is acknowledged. Any thread may apply, one at a time (`LiveViews.write`); look-ups never wait for it. A large
delta is handled at a low priority (docs/decisions/delta-latency.md).

After a crash: an acknowledged delta is in the log; the view is made again by replay.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial, reduce
from itertools import chain

from tierstore.engine.data.dense_head import Heads
from tierstore.engine.data.disk_room import DiskRoom
from tierstore.engine.data.overlay import Overlay, encode_delta, stack
from tierstore.engine.deltas.dense_parts import DenseParts
from tierstore.engine.deltas.incoming import Incoming, gently, may_run
from tierstore.engine.deltas.log import DeltaLog, NewEntry
from tierstore.engine.deltas.newest_event import NewestEvent
from tierstore.engine.deltas.origin import Origin, with_passed_over
from tierstore.engine.deltas.replay import missing, unfolded
from tierstore.engine.events.changes import requester
from tierstore.engine.events.observer import Observer
from tierstore.engine.reads.view import View
from tierstore.engine.serving.live import LiveViews
from tierstore.engine.serving.routing import Routing
from tierstore.engine.versions.version import Version
from tierstore.errors import Conflict, DeltaError, NotReady, SequenceGap, StorageError, TierstoreError, TooLarge
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.delta.reader import Delta, DeltaHeader
from tierstore.types import DeltaResult, TableSpec

log = logging.getLogger(__name__)

Brought = dict[Version, Heads]  # version → dense parts of a delta, ready to run


@dataclass(slots=True)
class _Stacked:
    """Overlays that come onto a view, and the colliding keys with them."""

    view: View
    colliding: Mapping[str, CollidingKeys]
    overlays: list[Overlay] = field(default_factory=list)

    def add(self, overlay: Overlay) -> None:
        self.overlays.append(overlay)
        if overlay.colliding:
            self.colliding = {**self.colliding, **overlay.colliding}


class DeltaPath:
    """Applies the deltas of one model.

    `specs_of` gives the tables of a version that may not be served, or None if it does not exist (yet). `dense` makes
    a delta's dense part ready, if it has one.
    """

    def __init__(
        self,
        live: LiveViews,
        log: DeltaLog,
        dense: DenseParts,
        specs_of: Callable[[int], Mapping[str, TableSpec] | None],
        observers: Sequence[Observer],
        room: DiskRoom,
    ) -> None:
        # constant after construction
        self._live, self._log, self._room = live, log, room
        self._dense, self._specs_of, self._observers = dense, specs_of, observers
        self.newest_event = NewestEvent(log)

    def apply(
        self, delta: Delta, data: bytes | memoryview, origin: Origin | None = None, *, lenient: bool = False
    ) -> DeltaResult:
        """Log a delta, then publish it. On return it is durable, and every request that starts sees it whole.

        `data` is what `delta` was read from. `origin` is logged with it: a source finds there how far it has read.
        lenient: for a delta that was acknowledged before; parts that do not fit a version are skipped there, as in a
        catch-up.
        """
        if delta.dense:  # the threads of a session would inherit the priority
            return self._apply(delta, data, origin, lenient)
        return gently(len(data), self._live.overlay_budget, lambda: self._apply(delta, data, origin, lenient))

    def _apply(self, delta: Delta, data: bytes | memoryview, origin: Origin | None, lenient: bool) -> DeltaResult:
        model = self._live.model
        try:
            brought = self._brought_ahead(delta)
        except DeltaError:
            if not lenient:
                raise
            brought = {}
        with self._live.write:
            self._check_log(delta, self._live.served)
            self._show_logged()
            served = self._live.served
            if self._is_held(delta, served):
                return self._held_result(delta.seq)
            if served.active is None:
                raise served.nothing(model, " before sending deltas")
            undone = self._log.undone.range_of(delta.seq)
            if undone is not None and not lenient:
                raise Conflict(
                    f"deltas {delta.seq} to {undone[1]} of {model!r} are undone on the peer that this node catches up "
                    f"from, and come from there: {undone[1] + 1} is next; or roll back to {self._log.last}, and they "
                    "are undone no more"
                )
            self._room.check_delta(len(data))
            # a canary's snapshot may reach beyond the log; then it holds the delta already
            views = [view for view in served.views if view.seq < delta.seq]
            if undone is not None:
                overlays = [Overlay(delta.seq, delta.seq, {}, undone=((delta.seq, delta.seq),)) for _ in views]
            elif lenient:
                overlays = [self._fitting(delta, view, served, brought) for view in views]
            else:
                overlays = self._overlays(delta, views, served, brought)
            try:
                self._log_and_publish(delta, data, origin, views, overlays, served)
            except BaseException:  # if it is in the log it counts as held
                with contextlib.suppress(Exception):  # otherwise the next delta tries again
                    self._show_logged()
                raise
            if undone is None:
                self.newest_event.applied(delta.seq, delta.event_time, requester())
        self._tell(delta)
        return DeltaResult(model, delta.seq, applied=True)

    def _tell(self, delta: Delta) -> None:
        freshness_s = (datetime.now(UTC) - delta.event_time).total_seconds()
        rows = sum(len(table.keys) for table in delta.tables.values())
        for observer in self._observers:
            observer.delta_visible(self._live.model, delta.seq, rows, freshness_s)

    def next_in_run(self) -> int | None:
        """The seq of the delta with which `apply_run` begins now; None while it takes none."""
        served, last = self._live.served, self._log.last
        if last is None or served.active is None or any(view.seq != last for view in served.views):
            return None
        return last + 1

    def apply_run(self, run: Sequence[Incoming]) -> int:
        """Apply the next deltas of the log together: flushed side by side, counted and published in one step.

        Returns how many of them, from the first on; those are acknowledged, and the others have changed nothing. What
        cannot be taken in together (a dense part, one for a version alone, one that is not next or is refused) is to be
        applied by itself, and then there is an error that says why.
        """
        nbytes = sum(len(data) for _, data, _ in run)
        applied = gently(nbytes, self._live.overlay_budget, lambda: self._apply_run(run))
        for delta, _, _ in run[:applied]:
            self._tell(delta)
        return applied

    def _apply_run(self, run: Sequence[Incoming]) -> int:
        with self._live.write:
            self._show_logged()
            served, budget, first = self._live.served, self._live.overlay_budget, self.next_in_run()
            if first is None:
                return 0
            entries, stacked, reserved = list[NewEntry](), [_Stacked(view, view.colliding) for view in served.views], 0
            try:
                with contextlib.suppress(TierstoreError):  # whoever applies it by itself hears why
                    for seq, (delta, data, origin) in enumerate(run, first):
                        if delta.seq != seq or not may_run(delta) or self._log.undone.range_of(seq):
                            break
                        overlays = [self._encode(delta, each.view, served, each.colliding) for each in stacked]
                        self._room.check_delta(len(data))
                        budget.reserve(nbytes := _bytes(overlays))
                        reserved += nbytes
                        for each, overlay in zip(stacked, overlays, strict=True):
                            each.add(overlay)
                        entries.append(NewEntry(seq, data, delta.digest, origin))
            except BaseException:
                budget.release(reserved)
                raise
            if not entries:
                return 0
            try:
                by_view = [each.overlays for each in stacked]
                self._publish(served.views, by_view, served, lambda: self._log.append(*entries))
            except StorageError:  # none of them counts
                return 0
            except BaseException:  # if they are in the log they count as held
                with contextlib.suppress(Exception):  # otherwise the next delta tries again
                    self._show_logged()
                raise
            newest = run[len(entries) - 1][0]
            self.newest_event.applied(newest.seq, newest.event_time, requester())
            return len(entries)

    def held(self, header: DeltaHeader) -> DeltaResult | None:
        """The result for a delta that the log has already, which need not be decoded; None for any other delta."""
        if self._log.digest(header.seq) != header.digest:
            return None
        with self._live.write:
            if self._log.digest(header.seq) != header.digest:
                return None
            self._show_logged()
            return self._held_result(header.seq)

    def _held_result(self, seq: int) -> DeltaResult:
        undone = self._log.undone.range_of(seq) is not None
        return DeltaResult(self._live.model, seq, applied=False, send_as=(self._log.last or 0) + 1 if undone else None)

    def check(self, delta: Delta, served: Routing) -> list[Overlay]:
        """The overlays that a delta would add to the views that are served; DeltaError if it does not fit one.

        Changes nothing.
        """
        return self._overlays(delta, [view for view in served.views if view.seq < delta.seq], served, {})

    def _fitting(self, delta: Delta, view: View, served: Routing, brought: Brought) -> Overlay:
        """The overlay of a delta for one version, with the parts that fit it."""
        why: str | None = None
        for part in (delta, replace(delta, dense={})):
            try:
                overlay = self._overlays(part, [view], served, brought)[0]
            except DeltaError as error:
                why = why or str(error)
                log.warning(
                    "model %s: version %d skips what does not fit in delta %d: %s",
                    self._live.model, view.version, delta.seq, error,
                )  # fmt: skip
                continue
            if why is not None and delta.base_version in (None, view.version):
                overlay.passed_over = dict.fromkeys(delta.dense, why)
            return overlay
        return Overlay(delta.seq, delta.seq, {})

    def _overlays(self, delta: Delta, views: Sequence[View], served: Routing, brought: Brought) -> list[Overlay]:
        """One overlay for each view, checked: nothing is changed yet."""
        overlays = [self._encode(delta, view, served) for view in views]
        base = delta.base_version
        if base is not None and served.numbered(base) is None and (specs := self._specs_of(base)) is not None:
            # that version would fail at catch-up, when it is too late to refuse the delta
            encode_delta(delta, specs, {}, for_this_version=True)
            self._dense.check(delta, base)
        for view, overlay in zip(views, overlays, strict=True):
            if overlay.heads:
                if view.open_version not in brought:  # a switch or another delta came first
                    brought[view.open_version] = self._brought(delta, view, served)
                overlay.heads = brought[view.open_version]
        return overlays

    def _log_and_publish(
        self,
        delta: Delta,
        data: bytes | memoryview,
        origin: Origin | None,
        views: list[View],
        overlays: list[Overlay],
        served: Routing,
    ) -> None:
        def log_it() -> None:
            by_view = list(zip(views, overlays, strict=True))
            passed_over = [view.version for view, overlay in by_view if overlay.passed_over]
            self._log.append(NewEntry(delta.seq, data, delta.digest, with_passed_over(origin, passed_over)))
            for view, overlay in by_view:
                if overlay.heads:
                    view.open_version.info.dense_accepted_upto = delta.seq

        alone = [[overlay] for overlay in overlays]
        fits_memory = overlays[0].nbytes <= self._live.overlay_budget.total
        with _naming_the_canary(views[-1 if fits_memory else 0], served):
            self._live.overlay_budget.reserve(_bytes(overlays))
        self._publish(views, alone, served, log_it)

    def _publish(
        self,
        views: Sequence[View],
        overlays: Sequence[Sequence[Overlay]],
        served: Routing,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Publish overlays, whose bytes are reserved, over views: for each those that follow, the oldest first.

        Everything that may fail comes before `first`, except for lack of memory.
        """
        budget, after = self._live.overlay_budget, served
        reserved = surplus = sum(map(_bytes, overlays))
        try:
            stacks = [
                reduce(partial(stack, frozen=self._live.folding), each, view.overlays)
                for view, each in zip(views, overlays, strict=True)
            ]
            for overlay in chain.from_iterable(stacks):
                overlay.prepare()
            after = served.with_views(
                View(view.open_version, stacked, each[-1].hi)
                for view, stacked, each in zip(views, stacks, overlays, strict=True)
            )
            # frees rows that a newer delta in the same overlay replaced
            surplus = sum(view.overlay_bytes for view in views) + reserved - sum(map(_bytes, stacks))
            first()
            self._live.publisher.publish(after)
        except BaseException:
            shown = after is not served and self._live.served is after
            budget.release(surplus if shown else reserved)
            raise
        budget.release(surplus)

    def _show_logged(self) -> None:
        """Publish deltas of the log that views lack, after an interruption (Ctrl-C, no memory). Holds `write`."""
        for view in self._live.served.views:
            served, budget = self._live.served, self._live.overlay_budget
            if not missing(view, self._log):
                continue
            overlay = unfolded(view, self._log, self._dense, limit=budget.total)
            if overlay is not None:
                budget.reserve(overlay.nbytes)
                self._publish([view], [[overlay]], served)

    def _encode(
        self, delta: Delta, view: View, served: Routing, colliding: Mapping[str, CollidingKeys] | None = None
    ) -> Overlay:
        """`colliding`: the colliding keys before this delta, if deltas that the view lacks come between."""
        with _naming_the_canary(view, served):
            return view.open_version.encode(delta, view.colliding if colliding is None else colliding)

    def _brought(self, delta: Delta, view: View, served: Routing) -> Heads:
        with _naming_the_canary(view, served):
            return self._dense.of_delta(delta, delta.dense, view, waits=False)

    def _brought_ahead(self, delta: Delta) -> Brought:
        """A delta's dense parts, made before `write` is held, so that no other producer waits for them.

        The delta's turn may change until then: doubtful parts are made later.
        """
        last = self._log.last
        if not delta.dense or last is None or delta.seq != last + 1:
            return {}
        with self._live.publisher.hold_all() as served:
            return {
                view.open_version: self._brought(delta, view, served)
                for view in served.views
                if delta.base_version in (None, view.version) and view.seq < delta.seq
            }

    def _check_log(self, delta: Delta, served: Routing) -> None:
        """NotReady if the log cannot say whether it had this delta, and nothing serves."""
        why = self._log.why_lost(delta.seq) if served.active is None else None
        if why is not None:
            raise NotReady(f"model {self._live.model!r} takes no delta {delta.seq}: {why}")

    def _is_held(self, delta: Delta, served: Routing) -> bool:
        """Whether the log has this delta.

        Conflict for a delta of other content with this seq, SequenceGap for one that is not the next.
        """
        model, last = self._live.model, self._log.last
        if last is None:
            raise served.nothing(model, " before sending deltas")
        if delta.seq == last + 1:
            return False
        if delta.seq > last + 1:
            raise SequenceGap(
                f"delta {delta.seq} of {model!r} came out of turn; {last + 1} is next", expected_seq=last + 1
            )
        held = self._log.digest(delta.seq)
        if held is not None and held != delta.digest:
            raise Conflict(
                f"delta {delta.seq} of {model!r} is held with other content; give new content a new seq, {last + 1} "
                "is next"
            )
        return True


@contextmanager
def _naming_the_canary(view: View, served: Routing) -> Iterator[None]:
    """Add to an error that the canary caused it: the active version could accept the delta."""
    try:
        yield
    except (DeltaError, TooLarge) as error:
        if view is not served.canary:
            raise
        raise type(error)(
            f"{error}; version {view.version} is the canary: withdraw it, or send what is for one version alone with "
            "a base_version"
        ) from error


def _bytes(overlays: Sequence[Overlay]) -> int:
    return sum(overlay.nbytes for overlay in overlays)
