"""Housekeeping tasks of a model (`housekeeping.py`). On one thread; what fails is tried again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from tierstore.engine.deltas.replay import catch_up
from tierstore.engine.deltas.retention import may_go
from tierstore.engine.events.changes import requester
from tierstore.engine.lifecycle.drop import Drops
from tierstore.engine.lifecycle.expiry import Expiry
from tierstore.engine.lifecycle.opening import Opener
from tierstore.engine.lifecycle.recurring import EVERY_S
from tierstore.engine.lifecycle.rules import is_to_serve
from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.placement import Act
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.version import Version
from tierstore.errors import Closed, DeltaError, TierstoreError
from tierstore.formats import files

log = logging.getLogger(__name__)

_EXPIRY = "expired rows are not removed"
_SOONEST_S = 0.5  # between two searches for expired rows
_READERS_S = 1.0  # the wait for requests that began before
KEPT_LAG = 256  # deltas a kept version may fall behind before it is caught up in the background


class Tasks:
    """The background work of one model. `stopping`: the model is being closed."""

    def __init__(self, state: ModelState, opener: Opener, drops: Drops, stopping: Callable[[], bool]) -> None:
        self._state, self._opener, self._drops, self._stopping = state, opener, drops, stopping
        self._expiry = Expiry(state, stopping)
        self._unfit: dict[int, VersionInfo] = {}  # kept versions that a delta of the log does not fit, by number

    def by_problem(self) -> dict[str, Callable[[], None]]:
        """The tasks that the placement leaves to this node, in order, by the text for their failure."""
        allow = self._state.shared.placement.refusals.allow
        tasks: dict[str, tuple[Callable[[], None], Act | None]] = {
            "what larger tables have replaced is not freed": (self._close_outgrown, None),
            "the delta log is not pruned": (self._prune_log, None),
            "versions older than those kept are not dropped": (self._drops.drop_surplus, "drop_surplus"),
            "kept versions are not caught up": (self._catch_up_kept, "catch_up"),
            "what was built again is not removed": (self._remove_replaced, None),
            "what broken-off loads have left is not removed": (self._drop_unfinished, None),
            _EXPIRY: (self._expiry.check, None),
            "what serves is not what was loaded": (self._check_bases, "check_files"),
            "files that nothing reads are not closed": (self._let_files_go, None),
        }
        return {problem: task for problem, (task, act) in tasks.items() if act is None or allow(act)}

    def often(self) -> dict[str, float]:
        """The seconds between two runs of a task, where those of the others are too many."""
        every_s = self._state.shared.settings.ttl_check_s
        return {_EXPIRY: max(_SOONEST_S, every_s)} if 0 < every_s < EVERY_S else {}

    def _close_outgrown(self) -> None:
        for view in self._state.live.served.views:
            self._close_outgrown_of(view.open_version)

    def _close_outgrown_of(self, version: Version) -> None:
        """Free the host tables of a version that larger ones have replaced, once no reader uses them."""
        live, changed, outgrown = self._state.live, self._state.live.publisher.changed, version.hosts.outgrown
        if not outgrown or not live.renew(version):
            return

        def are_left() -> bool:
            return not live.publisher.read_before(version)

        with changed:
            changed.wait_for(lambda: self._stopping() or are_left(), timeout=_READERS_S)
            if not are_left():  # the next try goes on
                return
        version.hosts.close_outgrown(outgrown)
        self._state.shared.memory.wake()

    def _prune_log(self) -> None:
        state, log_ = self._state, self._state.log
        with state.live.write:
            state.file.repair()
            infos = state.catalogue.infos()
            held = [seq for info in infos if (seq := self._needed_after(info, log_.start or 0)) is not None]
            loading = [delta_seq for delta_seq, _ in state.catalogue.loading.values()]
            before, keep_s = log_.start, state.shared.placement.log_retention_s
            upto = may_go(log_.ages(), held, loading, before or 0, keep_s)
            if upto is not None and (dropped := log_.prune(upto)):
                self._report("prune", deltas=dropped, before={"start": before}, after={"start": log_.start})

    def _needed_after(self, info: VersionInfo, start: int) -> int | None:
        """The seq above which the log, which begins after `start`, is kept for a version; None if it is not.

        For what serves, what a rollback may go to and what waits to serve. For others as far as they can be caught up:
        what somebody may want to look into does not make the log grow without end.
        """
        catalogue, number = self._state.catalogue, info.number
        if number in self._state.live.served.versions:
            return max(info.watermark, start)  # a stale one goes on from where the log begins
        outdated = catalogue.is_outdated(number)
        is_unfit = self._unfit.get(number) is info  # and not another one with its number, loaded since
        if catalogue.is_stale(info) or ((outdated or is_unfit) and not self._is_to_serve(number)):
            return None
        loaded = info.manifest.delta_seq
        return loaded if outdated and loaded >= start else info.watermark  # it is built again, as long as it can be

    def _is_to_serve(self, number: int) -> bool:
        return is_to_serve(number, self._state.live.active_version, self._state.file.document.order)

    def _remove_replaced(self) -> None:
        """Remove lines that no longer count, once nothing reads them."""
        state = self._state
        for root, number in list(state.catalogue.replaced.items()):
            with state.switch.if_free() as held:
                if not held or number in state.retiring:
                    continue
                trash = files.discard(root)
                state.catalogue.replaced.pop(root, None)
            if trash is not None:
                files.remove_leftover(trash)

    def _catch_up_kept(self) -> None:
        """Catch up kept versions, so that a rollback is quick. A version that cannot be caught up does not stop the
        others.
        """
        state = self._state
        failed: list[str] = []
        with state.switch.if_free() as held:
            for info in state.catalogue.infos() if held else []:
                if not self._is_behind(info):
                    continue
                try:
                    with self._opener.opened(info) as version:
                        catch_up(version, state.log, state.dense, lag=KEPT_LAG // 2)
                    self._unfit.pop(info.number, None)
                except DeltaError as error:
                    self._unfit[info.number] = info
                    if not self._is_to_serve(info.number):
                        log.info("model %s: the log is not kept for version %d: %s", state.name, info.number, error)
                        continue
                    failed.append(
                        f"version {info.number}: {error}; the log is kept for it from delta {info.watermark + 1} on: "
                        "drop it, or activate it with force, by which it passes over what does not fit"
                    )
                except TierstoreError as error:
                    failed.append(f"version {info.number}: {error}")
        if failed:
            raise TierstoreError("; ".join(failed))

    def _is_behind(self, info: VersionInfo) -> bool:
        """Whether a version should be caught up: it lacks many deltas, can get them, and nothing uses it."""
        state, number = self._state, info.number
        used = (
            number in state.catalogue.loading
            or number in state.live.served.versions
            or number in state.retiring
            or number in self._opener.scanned
        )
        lags = (state.log.last or 0) - info.watermark > KEPT_LAG
        return lags and not used and not state.catalogue.is_stale(info) and not state.catalogue.is_outdated(number)

    def _drop_unfinished(self) -> None:
        """Remove unfinished loads that no load went on from for a time."""
        state = self._state
        for number, load in state.catalogue.unfinished.items():
            if load.age_s >= state.shared.settings.load_retention_s:
                trash = state.catalogue.discard_unfinished(number)
                if trash is not None:
                    self._report("drop", version=number, unfinished=True)
                    log.info("model %s: removes the leftovers of a load of version %d", state.name, number)
                    files.remove_leftover(trash)

    def _check_bases(self) -> None:
        for view in self._state.live.served.views:
            with contextlib.suppress(Closed):  # it no longer serves
                view.open_version.disk.check_base()

    def _let_files_go(self) -> None:
        for view in self._state.live.served.views:
            with contextlib.suppress(Closed):
                view.open_version.let_files_go(self._state.shared.epochs.once_unread)

    def _report(self, change: str, **fields: Any) -> None:
        self._state.shared.audit.change(change, requester(), "done", flush=False, model=self._state.name, **fields)
