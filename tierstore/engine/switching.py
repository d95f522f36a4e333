"""Which of a model's versions serve: the active one, maybe a canary beside it, and the labels that point to them.

Everything that opens, switches or deletes versions runs one at a time (`_switch`), beside deltas and look-ups; what only
changes routes (share, labels, withdraw) waits for none of that. Any thread may call. Locks are taken in the order
`_switch`, `serving.write`, the publisher's condition.

A canary stands beside one active version: when another one becomes active, or none, the canary is promoted (if it is the
one) or withdrawn, in the same step.

After a crash: CURRENT names the active version, and `routes.json` (see `routes.py`) the canary and the labels beside it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tierstore.config import Settings
from tierstore.engine.budget import HostBudget, OverlayBudget
from tierstore.engine.callbacks import SwitchLock, guarded
from tierstore.engine.deltalog import DeltaLog
from tierstore.engine.dense import DenseParts
from tierstore.engine.devices import Devices
from tierstore.engine.epochs import Epochs
from tierstore.engine.keeper import Keeper
from tierstore.engine.observer import Observer
from tierstore.engine.overlay import Overlay
from tierstore.engine.reading import ReadVersions
from tierstore.engine.record import Record
from tierstore.engine.replay import catch_up, unfolded
from tierstore.engine.resting import RestingVersion
from tierstore.engine.routes import Routes, check_label, check_share
from tierstore.engine.served import CANARY, STABLE, Served
from tierstore.engine.serving import Serving
from tierstore.engine.table import LookupCounts
from tierstore.engine.throttle import LEAST_OF_A_SWITCH, Throttle
from tierstore.engine.version import Version, VersionInfo
from tierstore.engine.view import View
from tierstore.engine.warming import Warmer
from tierstore.errors import (
    Closed,
    Conflict,
    Corruption,
    DiskFull,
    NotFound,
    Overloaded,
    StorageError,
    TierstoreError,
    TooLarge,
)
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory
from tierstore.predict.runtime import Runtime
from tierstore.tiers.background import Pace, in_background, watch
from tierstore.tiers.disk import ReaderPool, open_records
from tierstore.types import Progress, ProgressFn

log = logging.getLogger(__name__)

SWITCH_LAG = 4  # deltas that may be left for the last catch-up of a switch, while producers wait
DRAIN_S = 60.0  # how long a switch to a version waits for its former readers


@dataclass(slots=True)
class Shared:
    """What all models of a store have in common."""

    settings: Settings
    readers: ReaderPool
    host_budget: HostBudget
    overlay_budget: OverlayBudget
    dense: Runtime
    devices: Devices
    warmer: Warmer
    throttle: Throttle
    observers: list[Observer] = field(default_factory=list)
    epochs: Epochs = field(default_factory=Epochs)


def ignore(progress: Progress) -> None:
    """For who does not care how far it is."""


class Switching:
    """The versions of one model, and the verbs by which they come to serve. `name` and `where` are constant."""

    def __init__(
        self, name: str, where: ModelDirectory, shared: Shared, chores: Mapping[str, Callable[[], None]]
    ) -> None:
        self.name, self.where = name, where
        self._shared = shared
        self._deltas, self._record = DeltaLog(where), Record(where)
        self._serving = Serving(
            name,
            self._deltas,
            self._record,
            shared.overlay_budget,
            shared.observers,
            shared.settings.fold_grace_s,
            shared.epochs,
        )
        watch(self._serving.publisher)
        self._keeper = Keeper(self._serving, self._freed, chores, lambda: shared.throttle.share)
        self._switch = SwitchLock()
        self._start_problem: str | None = None
        self._canary_problem: str | None = None  # why the canary on record is not served
        self._awaited: Routes | None = None  # that canary, its share and labels; the next start tries again
        self._counts: dict[str, LookupCounts] = {}  # by table, over all versions, so that they only grow
        self.dense = DenseParts(
            name, shared.dense, lambda number: self._infos.get(number), lambda: self._serving.current
        )
        self._times = shared.throttle.times
        self._resting = RestingVersion()
        self._read = ReadVersions(self._resting)
        self._closed = False
        # guarded by serving.write; replaced whole, so that readers need no lock
        self._infos: dict[int, VersionInfo] = {}
        self.damaged: dict[int, str] = {}  # versions whose record could not be read at start, and why
        self._loading: dict[int, tuple[int, Progress]] = {}  # version → (delta_seq, how far)

    @property
    def active_version(self) -> int | None:
        """What `stable` stands for; None where nothing serves."""
        view = self._serving.current
        return None if view is None else view.version

    @property
    def served(self) -> Served:
        """What is served at this moment."""
        return self._serving.served

    @property
    def versions(self) -> list[int]:
        """Complete versions, ascending."""
        return sorted(self._infos)

    def is_stale(self, info: VersionInfo) -> bool:
        """Whether deltas that the version lacks are gone from the log."""
        return self._deltas.start is not None and info.watermark < self._deltas.start

    def _counts_of(self, table: str) -> LookupCounts:
        return self._counts.setdefault(table, LookupCounts())

    # --- one version

    def check_open(self) -> None:
        """Closed once the model was closed; its directory may be another process's then."""
        if self._closed:
            raise Closed(f"the store of model {self.name!r} was closed")

    def _info(self, number: int) -> VersionInfo:
        info = self._infos.get(number)
        if info is None:
            raise NotFound(
                f"model {self.name!r} has no version {number}; it has {', '.join(map(str, self.versions)) or 'none'}"
            )
        return info

    def _forget(self, number: int) -> None:
        with self._serving.write:
            self._infos = {key: info for key, info in self._infos.items() if key != number}

    def _open(self, info: VersionInfo) -> Version:
        with _noted(info):
            self._read.take_away(info.number)
            resting = self._resting.take(info.number)
            version = Version.open(info, self._shared.settings, self._shared.readers, self._counts_of, resting)
        self._have_seen(info)
        return version

    def _have_seen(self, info: VersionInfo) -> None:
        self._deltas.seen(info.watermark, from_log=info.watermark > info.manifest.delta_seq)

    def _freed(self, version: Version) -> None:
        """Give back what a version held that was served, or was to be. The house deals it to others."""
        try:
            self._resting.leave(version)
        finally:
            self._shared.host_budget.release(version)
            self._shared.devices.release(version)
            self._keeper.see_to_house()

    def _wait_retired(self, number: int) -> None:
        if not self._keeper.wait_retired(number, DRAIN_S):
            raise Conflict(
                f"version {number} of {self.name!r} is still read by requests that began {DRAIN_S:.0f} s ago; try again"
            )

    @contextlib.contextmanager
    def _warmed(
        self, info: VersionInfo, leaving: list[Version], *, force: bool, progress: ProgressFn, start: bool = False
    ) -> Iterator[Version]:
        """A version opened, caught up but for the last step, and warm; closed if the block fails. Holds `_switch`.

        It makes its room in memory at the cost of `leaving` first, the active version first of them. At a `start` it
        is warmed once it serves, and may lack what a full disk does not take.
        """
        self.check_open()
        progress = guarded(progress)
        if self.is_stale(info) and not force:
            raise Conflict(
                f"version {info.number} of {self.name!r} is stale: it holds deltas up to {info.watermark}, and the log begins after "
                f"{self._deltas.start}; with force it serves without what came between"
            )
        like = leaving[0] if leaving else None
        may_lack = (DiskFull,) if start else ()
        version = self._open(info)
        try:
            self._shared.host_budget.admit(version, *leaving)
            self._shared.devices.admit(version, leaving, self._serving.publisher)
            with contextlib.suppress(*may_lack):
                catch_up(version, self._deltas, self.dense, leave=SWITCH_LAG, lenient=force, progress=progress)
            if start:
                self._shared.warmer.add(version, self._serving.publisher)
            else:
                self._warm(version, like, progress)
            self.dense.open(version, lenient=force)
            progress(Progress("switch"))
            with contextlib.suppress(*may_lack):
                catch_up(version, self._deltas, self.dense, leave=SWITCH_LAG, lenient=force)
            self.dense.open(version, lenient=force)
            yield version
        except BaseException:
            version.close()  # it may be what failed: nothing rests of it
            self._freed(version)
            raise

    def _warm(self, version: Version, like: Version | None, progress: ProgressFn) -> None:
        throttle = self._shared.throttle

        def warm() -> None:
            pace = Pace(lambda: max(LEAST_OF_A_SWITCH, throttle.share))

            def tell(done: int, total: int) -> None:
                progress(Progress("warm", done, total))
                pace.rest()

            with throttle.at_work("warm"):
                version.warm(like, tell)

        if like is None:
            warm()
        else:  # there are requests to give way to
            in_background(warm)

    def _last_step(self, version: Version, *, force: bool) -> None:
        """Catch up to the end of the log, while producers wait. Holds `write`."""
        catch_up(version, self._deltas, self.dense, lenient=force)
        self.dense.open(version, lenient=force)  # anew only if one of the last deltas brought one

    @contextlib.contextmanager
    def _last_view(self, version: Version, *, force: bool, start: bool) -> Iterator[View]:
        """Caught up to the end of the log. At a `start`, what a full disk does not take is in memory. Holds `write`."""
        overlays: tuple[Overlay, ...] = ()
        try:
            self._last_step(version, force=force)
        except DiskFull as error:
            if not start:
                raise
            overlays = self._unfolded(version, error)
        taken = sum(overlay.nbytes for overlay in overlays)
        try:
            yield View(version, overlays, overlays[0].hi if overlays else version.watermark)
        except BaseException:
            self._shared.overlay_budget.give(taken)
            raise

    def _unfolded(self, version: Version, full: DiskFull) -> tuple[Overlay, ...]:
        budget = self._shared.overlay_budget
        try:
            overlay = unfolded(version, self._deltas, self.dense, limit=budget.total)
            if overlay is None:
                return ()
            budget.take(overlay.nbytes)
        except (Overloaded, TooLarge) as error:
            raise DiskFull(
                f"{full}; and version {version.number} cannot serve what is not folded from memory meanwhile: it does not fit "
                f"beside the rest into overlay_budget, {budget.total:,} bytes"
            ) from error
        log.warning("model %s: deltas %d to %d are served from memory: %s", self.name, overlay.lo, overlay.hi, full)
        return (overlay,)

    # --- the active version

    def activate(self, number: int, *, force: bool = False, progress: ProgressFn = ignore) -> None:
        """Open, catch up and warm a kept version, then switch to it in one step; nothing to do for the active one.

        The canary is promoted if it is the one, and withdrawn otherwise. Conflict for a version that is stale, unless
        `force`: then it serves without what it lacks.
        """
        with self._switch:
            info = self._info(number)
            old = self.active_version
            if number == old:
                return
            if not self._promote(number):
                self._wait_retired(number)  # not before: a canary may be withdrawn meanwhile
                self._serve(info, force=force, progress=progress)
        self._tell_switched(old, number)

    def promote(self) -> int:
        """Make the canary the active version in one step; nothing is opened or warmed. Returns its number."""
        with self._switch:
            old, canary = self.active_version, self.served.canary
            if canary is None or not self._promote(canary.version):
                raise self._no_canary()
        self._tell_switched(old, canary.version)
        return canary.version

    def rollback(self, *, force: bool = False, progress: ProgressFn = ignore) -> int:
        """Go back to the newest kept version older than the active one. Returns its number. The canary as for `activate`."""
        with self._switch:
            active = self.active_version
            if active is None:
                raise Conflict(
                    f"model {self.name!r} has no active version to roll back from; activate one of {self.versions}"
                )
            older = [number for number in self.versions if number < active]
            if not older:
                raise Conflict(f"model {self.name!r} has no version older than {active} to roll back to")
            self.activate(older[-1], force=force, progress=progress)
            return older[-1]

    def deactivate(self) -> None:
        """Stop serving, the canary as well; the versions are kept."""
        with self._switch, self._serving.write:
            old = self.active_version
            self._publish(Served())
        if old is not None:
            self._tell_switched(old, None)

    def _serve(self, info: VersionInfo, *, force: bool, progress: ProgressFn) -> None:
        leaving = [view.holder for view in self.served.views]
        with self._warmed(info, leaving, force=force, progress=progress) as version, self._serving.write:
            self._last_step(version, force=force)
            self._publish(Served(View(version, (), version.watermark)))
            self._start_problem = None

    def _promote(self, number: int) -> bool:
        with self._serving.write:
            served = self.served
            if served.canary is None or served.canary.version != number:
                return False
            labels = {name: of for name, of in served.labels.items() if of == number}
            self._publish(Served(served.canary, labels=labels))
        return True

    def _tell_switched(self, old: int | None, new: int | None) -> None:
        if new is not None:
            self._load_is_over(new)
        for observer in self._shared.observers:
            observer.version_switched(self.name, old, new)

    def _load_is_over(self, number: int) -> None:
        """Whoever has switched to it: a load of the same snapshot has nothing to go on from."""
        mark = self.where.version(number).loading
        if mark.exists():
            with contextlib.suppress(StorageError):
                files.remove_file(mark)

    # --- the canary

    def canary(self, number: int, share: float, *, force: bool = False, progress: ProgressFn = ignore) -> None:
        """Serve a kept version beside the active one: to `share` (0 to 1) of the requests that name no version.

        It is opened, caught up and warmed first, as in a switch. For the version that is the canary already only the
        share changes. Conflict for the active version, beside another canary, where nothing is active, and for a
        version that is stale, unless `force`.
        """
        share = check_share(share)
        if self._set_share(number, share):
            return
        with self._switch:
            info = self._info(number)
            if self._set_share(number, share):
                return
            served = self.served
            if served.active is None:
                raise Conflict(f"model {self.name!r} has no active version to stand beside; activate {number} instead")
            if number == served.active.version:
                raise Conflict(f"version {number} of {self.name!r} is active; the canary is another one")
            if served.canary is not None:
                raise Conflict(
                    f"version {served.canary.version} of {self.name!r} is the canary; promote or withdraw it first"
                )
            awaited = self._awaited
            if awaited is not None and awaited.canary != number:
                raise Conflict(f"model {self.name!r}: {self._canary_problem}; withdraw it first")
            self._wait_retired(number)
            self._add_canary(info, share, force=force, progress=progress)

    def _set_share(self, number: int, share: float) -> bool:
        """Whether that version is the canary; its share is set then."""
        with self._serving.write:
            served = self.served
            if served.canary is None or served.canary.version != number:
                return False
            self._publish(replace(served, share=share))
            return True

    def _add_canary(
        self, info: VersionInfo, share: float, *, force: bool, progress: ProgressFn, start: bool = False
    ) -> None:
        leaving = [view.holder for view in self.served.views]
        with (
            self._warmed(info, leaving, force=force, progress=progress, start=start) as version,
            self._serving.write,
            self._last_view(version, force=force, start=start) as view,
        ):
            served = self.served
            labels = {} if self._awaited is None else self._awaited.labels
            self._publish(replace(served, canary=view, share=share, labels={**labels, **served.labels}))

    def withdraw(self) -> int:
        """Stop serving the canary; the version is kept, labels that point to it go. Returns its number."""
        with self._serving.write:
            served = self.served
            number = self.canary_number
            if number is None:
                raise self._no_canary()
            labels = {name: of for name, of in served.labels.items() if of != number}
            self._publish(Served(served.active, labels=labels))
            return number

    @property
    def canary_number(self) -> int | None:
        """The canary, also where it could not be served after a restart; None where there is none."""
        if self.served.canary is not None:
            return self.served.canary.version
        return None if self._awaited is None else self._awaited.canary

    def _no_canary(self) -> Conflict:
        why = f": {self._canary_problem}" if self._canary_problem else ""
        return Conflict(f"model {self.name!r} has no canary{why}")

    # --- labels

    def label(self, name: str, number: int) -> None:
        """Let a label stand for a version that is served, until that is served no more. Conflict for another one."""
        check_label(name)
        with self._serving.write:
            info, served = self._info(number), self.served
            if served.numbered(number) is None:
                serves = " and ".join(map(str, served.versions)) or "nothing"
                raise Conflict(
                    f"label {name!r} may only point to what is served, and {self.name!r} serves {serves}, not {info.number}; activate "
                    "it or make it the canary first"
                )
            self._publish(
                replace(served, labels={**served.labels, name: number}),
                self._awaited and self._awaited.without_label(name),
            )

    def unlabel(self, name: str) -> None:
        """Remove a label. NotFound where there is none of that name, Conflict for `stable` and `canary`."""
        if name in (STABLE, CANARY):
            raise Conflict(f"label {name!r} cannot be removed: it always stands for the {name} version")
        with self._serving.write:
            served, awaited = self.served, self._awaited
            if name not in served.labels and (awaited is None or name not in awaited.labels):
                raise NotFound(
                    f"model {self.name!r} has no label {name!r}; it has {', '.join(served.all_labels()) or 'none'}"
                )
            labels = {key: of for key, of in served.labels.items() if key != name}
            self._publish(replace(served, labels=labels), awaited and awaited.without_label(name))

    # --- publishing

    def _publish(self, served: Served, awaited: Routes | None = None) -> None:
        """Serve that from now on, and after a restart, with the canary that is `awaited` beside it.

        Holds `write`. On an error nothing has changed.
        """
        self.check_open()
        for info in self._infos.values():
            # before CURRENT, which alone says so of the active version; a crash in between leaves what holds in any case
            if info.number not in served.versions:
                info.keep_asked()
        self._record.write(Routes.of(served, awaited), lambda: self._go_on_from(served.active))
        if awaited is None and self._canary_problem is not None:
            log.warning("model %s: no longer on record: %s", self.name, self._canary_problem)
            self._canary_problem = None
        self._awaited = awaited
        for view in self.served.views:
            if served.of(view.holder) is None:
                # before it is out of sight: who waits for the version to be closed must find it in one place
                self._keeper.retire(view.holder)
        self._serving.set(served)

    def _go_on_from(self, active: View | None) -> None:
        """Restart the log where the active version's snapshot reaches beyond it, or where nobody can tell what it held.

        Then another version must become active for it, by which all that the log may have held is given up or in it.
        """
        if active is None:
            return
        begun, watermark = self._deltas.last, active.holder.watermark
        if self._deltas.unusable is not None:
            if active.version != self.active_version:
                self._deltas.restart(watermark)
        elif begun is None or watermark > begun:
            self._deltas.restart(watermark)

    # --- start

    def _serve_again(self) -> None:
        """Serve what CURRENT and the routes say. A canary that cannot be served is reported, and everything else goes on."""
        current = self._record.current()
        for info in self._infos.values():
            if info.number != current:
                self._learn_watermark(info)
        if current is None:
            return
        if current not in self._infos:
            why = f"is damaged: {self.damaged[current]}" if current in self.damaged else "is not on disk"
            raise Corruption(
                f"{self.where.current} names version {current}, which {why}; activate one of {self.versions}"
            )
        if self._deltas.unusable is None:
            self._infos[current].asked_upto = self._deltas.last or 0
        kept = self._kept_routes(current)
        labels = {name: of for name, of in kept.labels.items() if of == current}
        with (
            self._warmed(self._infos[current], [], force=True, progress=ignore, start=True) as version,
            self._serving.write,
            self._last_view(version, force=True, start=True) as view,
        ):
            active = Served(view, labels=labels)
            if kept.canary is None and self._canary_problem is None and self._deltas.unusable is None:
                self._publish(active)
                return
            # the record stays as it is until the canary is there as well, and the log if nobody can tell what it held
            if self._deltas.unusable is None:
                self._go_on_from(active.active)
            self._serving.set(active)
        if kept.canary is not None:
            self._awaited = replace(kept, labels={name: of for name, of in kept.labels.items() if of != current})
            try:
                self._add_canary(self._info(kept.canary), kept.share, force=True, progress=ignore, start=True)
            except TierstoreError as error:
                self._canary_problem = f"the canary, version {kept.canary}, is not served: {error}"
                log.exception("model %s: %s", self.name, self._canary_problem)

    def _kept_routes(self, active: int) -> Routes:
        try:
            return self._record.routes().beside(active)
        except TierstoreError as error:
            self._canary_problem = f"canary and labels are not served: {error}"
            log.error("model %s: %s", self.name, self._canary_problem)
            return Routes(active)

    def _learn_watermark(self, info: VersionInfo) -> None:
        """Of a version that is only kept: its records are read, and nothing of its base."""
        try:
            with _noted(info), contextlib.closing(open_records(info.where.db, self._shared.readers)) as disk:
                info.learn(disk)
            self._have_seen(info)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others serve; status and `verify` say so too
            log.error("model %s: version %d cannot be opened: %s", self.name, info.number, error)


@contextlib.contextmanager
def _noted(info: VersionInfo) -> Iterator[None]:
    """Opening a version: whether that succeeded is its `problem`."""
    try:
        yield
    except Exception as error:
        info.problem = str(error)
        raise
    info.problem = None
