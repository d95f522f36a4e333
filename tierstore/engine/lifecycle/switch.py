"""Switches: verbs that open a version, switch to it, or stop serving it.

Each holds the switch lock; deltas and look-ups go on meanwhile. Any thread may call. A failed switch changes nothing.

After a crash: see `routes.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from tierstore.arguments import check_share
from tierstore.engine.lifecycle.opening import Opener
from tierstore.engine.lifecycle.rebuild import Rebuilder
from tierstore.engine.lifecycle.routes import Routes
from tierstore.engine.lifecycle.rules import check_active, check_canary, check_expected, served_last
from tierstore.engine.lifecycle.state import ModelState, ignore
from tierstore.engine.serving.order import DEACTIVATED, REPLACED, ROLLBACK
from tierstore.engine.serving.routing import Routing
from tierstore.engine.serving.undone import Rollbacks, Undone
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Conflict
from tierstore.formats.names import MAX_ORDINAL
from tierstore.types import ProgressFn


class Switcher:
    """Switches of one model."""

    def __init__(self, state: ModelState, opener: Opener, routes: Routes) -> None:
        self._state, self._opener, self._routes = state, opener, routes
        self._rebuilder = Rebuilder(state, opener)
        self._live, self._catalogue, self._name = state.live, state.catalogue, state.name

    def activate(
        self, number: int, *, force: bool = False, expected_active: int | None = None, progress: ProgressFn = ignore
    ) -> None:
        """Open, catch up and warm a kept version, then switch to it in one step; does nothing for the active one.

        The canary is promoted if it is this version, and withdrawn otherwise. Conflict for a stale version, unless
        `force`: then it serves without the deltas it lacks. Conflict also if `expected_active` is given and a third
        version is active.
        """
        with self._state.switch:
            old = self._live.active_version
            if number != old:
                check_expected(self._name, expected_active, old)
            self._switch(number, force=force, left=REPLACED, progress=progress)

    def _switch(self, number: int, *, force: bool, left: str, progress: ProgressFn) -> None:
        """Switch to a version; `left`: why the active one is left. Holds the switch lock."""
        info = self._catalogue.info(number)
        old = self._live.active_version
        if number == old:
            return
        if not self._routes.promote(number, left):
            self._state.retiring.await_closed(self._name, number)  # not before: a canary may be withdrawn meanwhile
            self._serve(info, force=force, left=left, progress=progress)
        self._report(old, number)

    def promote(self) -> int:
        """Make the canary the active version in one step; nothing is opened or warmed. Returns its number."""
        with self._state.switch:
            old, canary = self._live.active_version, self._live.served.canary
            if canary is None or not self._routes.promote(canary.version):
                raise self._routes.no_canary()
        self._report(old, canary.version)
        return canary.version

    def rollback(
        self, *, force: bool = False, expected_active: int | None = None, progress: ProgressFn = ignore
    ) -> int:
        """Go back to the version that served last. Returns its number. The one that is left is then no target of a
        rollback, and goes first, until it is activated by number.

        The canary as for `activate`. Conflict if `expected_active` is given and another version is active.
        """
        with self._state.switch:
            active, order = self._check_active(expected_active), self._state.file.document.order
            before = served_last(self._name, active, self._catalogue.numbers, order)
            self._switch(before, force=force, left=ROLLBACK, progress=progress)
            return before

    def rollback_to(self, seq: int, *, expected_active: int | None = None, progress: ProgressFn = ignore) -> int:
        """Bring the active version back to its state right after delta `seq` was applied. Returns its number.

        It is built again beside what serves and switched to in one step. All later deltas up to that step are then
        undone in every version; the canary is withdrawn. Conflict if that is impossible, see `Rebuilder.check`.
        """
        with self._state.switch:
            number = self._check_active(expected_active)
            info, deltas = self._catalogue.info(number), self._state.log
            self._check_seq(info, seq)
            changes = deltas.undone.as_of(seq, deltas.last or 0).ranges != deltas.undone.ranges
            if not changes and not self._catalogue.is_outdated(number):
                return number
            ahead = deltas.undone.as_of(seq, MAX_ORDINAL)
            self._build_without(info, ahead, lambda: deltas.undone.as_of(seq, deltas.last or 0), progress)
        self._report(number, number)
        return number

    def follow_undone(self, rollbacks: Rollbacks, progress: ProgressFn = ignore) -> None:
        """Undo what a peer has undone: `rollbacks` are this model's, and those that the peer has done since.

        For deltas that are still to come from the peer, this is on record before they come. If what serves has such a
        delta it is built again, as by `rollback_to`. Conflict if that is impossible.
        """
        with self._state.switch:
            number = self._check_active(None)
            info, wanted = self._catalogue.info(number), replace(self._state.log.undone, rollbacks=rollbacks)
            with self._live.write:
                undone = self._outdating(wanted)
                if not undone.outdated.intersection(self._live.served.versions):
                    self._routes.publish(self._live.served, self._routes.awaited, undone=undone)
                    return
            self._build_without(info, wanted, lambda: wanted, progress)
        self._report(number, number)

    def _build_without(
        self, info: VersionInfo, ahead: Undone, at_last: Callable[[], Undone], progress: ProgressFn
    ) -> None:
        """Serve a new line of the active version without undone deltas; `at_last` gives them, at the moment of the
        switch.

        Holds the switch lock.
        """
        replaced = [view.open_version for view in self._live.served.views]
        with (
            self._rebuilder.built(info) as line,
            self._opener.warmed(line, replaced, force=False, progress=progress, undone=ahead) as version,
            self._live.write,
            self._opener.last_view(version, force=False, start=False, undone=ahead) as view,
        ):
            labels = {name: of for name, of in self._live.served.labels.items() if of == info.number}
            undone = self._outdating(at_last())
            undone = undone.with_line(info.number, undone.line(info.number) + 1)
            self._routes.publish(Routing(view, labels=labels), undone=undone, built=[line])

    def _check_active(self, expected: int | None) -> int:
        return check_active(self._name, self._live.active_version, expected, self._catalogue.numbers)

    def _check_seq(self, info: VersionInfo, seq: int) -> None:
        lowest, last = info.manifest.delta_seq, self._state.log.last or 0
        if not lowest <= seq <= last:
            raise Conflict(
                f"model {self._name!r}: expected a seq from {lowest} to {last}, got {seq}; the snapshot of version "
                f"{info.number} holds deltas up to {lowest}, and {last} is the newest one"
            )

    def _outdating(self, undone: Undone) -> Undone:
        """The record of what is to be undone, with the versions that it makes outdated. Holds `write`."""
        outdated = {
            info.number
            for info in self._catalogue.infos()
            if undone.differs_from(self._state.log.undone, info.manifest.delta_seq, self._held_by(info))
        }
        return replace(undone, outdated=undone.outdated | outdated)

    def _held_by(self, info: VersionInfo) -> int:
        """The newest delta that a version has, also in memory if it is served."""
        view = self._live.served.numbered(info.number)
        return info.watermark if view is None else view.seq

    def deactivate(self) -> None:
        """Stop serving, also the canary; the versions are kept."""
        with self._state.switch, self._live.write:
            old = self._live.active_version
            self._routes.publish(Routing(), left=DEACTIVATED)
        if old is not None:
            self._report(old, None)

    def canary(self, number: int, share: float, *, force: bool = False, progress: ProgressFn = ignore) -> None:
        """Serve a kept version next to the active one, for `share` (0 to 1) of the requests that name no version.

        It is opened, caught up and warmed first, as in a switch. If it is the canary already, only the share changes.
        Conflict for the active version, while there is another canary, if nothing is active, and for a stale version,
        unless `force`.
        """
        share = check_share(share)
        if self._routes.set_share(number, share):
            return
        with self._state.switch:
            info = self._catalogue.info(number)
            if self._routes.set_share(number, share):
                return
            self._check_canary(number)
            self._state.retiring.await_closed(self._name, number)
            self.add_canary(info, share, force=force, progress=progress)

    def _check_canary(self, number: int) -> None:
        served, awaited = self._live.served, self._routes.awaited
        of_canary = None if served.canary is None else served.canary.version
        check_canary(self._name, number, self._live.active_version, of_canary)
        if awaited is not None and awaited.canary != number:
            raise Conflict(f"model {self._name!r}: {self._routes.problem}; withdraw it first")

    def add_canary(
        self, info: VersionInfo, share: float, *, force: bool, progress: ProgressFn, start: bool = False
    ) -> None:
        """Make a version ready and serve it as the canary. Holds the switch lock, except at a `start`."""
        replaced = [view.open_version for view in self._live.served.views]
        with (
            self._current_line(info, force=force) as line,
            self._routes.beside_canary(share),
            self._opener.warmed(line, replaced, force=force, progress=progress, start=start, share=share) as version,
            self._live.write,
            self._opener.last_view(version, force=force, start=start) as view,
        ):
            served, awaited = self._live.served, self._routes.awaited
            labels = {} if awaited is None else awaited.labels
            routing = replace(served, canary=view, share=share, labels={**labels, **served.labels})
            self._publish(routing, info, line)

    def _serve(self, info: VersionInfo, *, force: bool, left: str, progress: ProgressFn) -> None:
        replaced = [view.open_version for view in self._live.served.views]
        with (
            self._current_line(info, force=force) as line,
            self._opener.warmed(line, replaced, force=force, progress=progress) as version,
            self._live.write,
            self._opener.last_view(version, force=force, start=False) as view,
        ):
            self._publish(Routing(view), info, line, left)
            self._live.start_problem = None

    @contextlib.contextmanager
    def _current_line(self, info: VersionInfo, *, force: bool) -> Iterator[VersionInfo]:
        """The version itself, or a new line of it if it holds undone deltas; with `force` itself if that is
        impossible.
        """
        if not self._catalogue.is_outdated(info.number):
            yield info
            return
        try:
            self._rebuilder.check(info)
        except Conflict as error:
            if not force:
                raise Conflict(
                    f"{error}; it holds deltas that were undone, and with force it serves with them"
                ) from error
            yield info
            return
        with self._rebuilder.built(info) as line:
            yield line

    def _publish(self, served: Routing, info: VersionInfo, line: VersionInfo, left: str = REPLACED) -> None:
        """Publish a routing in which `line` of the version `info` is new. Holds `write`."""
        if line is info:
            self._routes.publish(served, left=left)
            return
        undone = self._state.log.undone
        undone = undone.with_line(info.number, undone.line(info.number) + 1)
        self._routes.publish(served, undone=undone, built=[line], left=left)

    def follow(self, number: int, ready: Callable[[], float | None], *, start: bool, progress: ProgressFn) -> None:
        """Serve a version as the cluster's pointer says: it is warmed, `ready` waits for its moment, then it is
        published.

        `ready` returns its share as the canary, or None if it is to be active. An error of `ready` or `progress` ends
        this with nothing changed. Also for the active version, opened anew: for a node that missed deltas. At a
        `start` it is warmed while it serves.
        """
        with self._state.switch:
            info, old = self._catalogue.info(number), self._live.active_version
            replaced = [view.open_version for view in self._live.served.views]
            with self._opener.warmed(info, replaced, force=True, progress=progress, start=start) as version:
                share = ready()
                with self._live.write, self._opener.last_view(version, force=True, start=start) as view:
                    served = self._live.served
                    routing = Routing(view) if share is None else replace(served, canary=view, share=share)
                    self._publish(routing, info, info)
                    self._live.start_problem = None
        if share is None:
            self._report(old, number)

    def follow_canary(self, current: int | None, canary: int | None, share: float) -> None:
        """Promote, withdraw or re-share the served canary, as the cluster's pointer says. Waits for no switch."""
        served = self._live.served
        if served.canary is None:
            return
        number = served.canary.version
        if number == current:
            if self._routes.promote(number):
                self._report(None if served.active is None else served.active.version, number)
        elif number != canary:
            self._routes.withdraw()
        elif share != served.share:
            self._routes.set_share(number, share)

    def _report(self, old: int | None, new: int | None) -> None:
        for observer in self._state.shared.observers:
            observer.version_switched(self._name, old, new)
