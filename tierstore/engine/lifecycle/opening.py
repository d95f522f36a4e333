"""Opening a version and making it ready to serve: memory, missing deltas, warm caches, its dense part.

For the thread that holds the switch lock, one at a time. A version that fails on the way is closed, and what serves
goes on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from tierstore.engine.data.cascade import LookupCounts
from tierstore.engine.data.overlay import Overlay
from tierstore.engine.deltas.replay import catch_up, unfolded
from tierstore.engine.events.callbacks import guarded
from tierstore.engine.lifecycle.scans import ScannedVersions
from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.lifecycle.throttle import LEAST_OF_A_SWITCH
from tierstore.engine.reads.view import View
from tierstore.engine.serving.undone import Undone
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.version import Version
from tierstore.errors import Closed, Conflict, DiskFull, Overloaded, TooLarge
from tierstore.tiers.background import Pace, in_background
from tierstore.tiers.disk.tier import DiskTier, open_records
from tierstore.types import Progress, ProgressFn

log = logging.getLogger(__name__)

SWITCH_LAG = 4  # deltas that may be left for the last catch-up of a switch, while producers wait


class Opener:
    """Opens and closes the versions of one model."""

    def __init__(self, state: ModelState) -> None:
        self._state, self._shared = state, state.shared
        self._counts: dict[str, LookupCounts] = {}  # by table, over all versions, so that they only grow
        self.scanned = ScannedVersions()

    def open(self, info: VersionInfo) -> Version:
        """Open a version that is not served. Its `problem` says whether that failed."""
        with _noting_problems(info):
            self.scanned.close(info.number)
            rows = self._shared.placement.open_rows(self._state.name, info)
            try:
                version = Version(info, rows, self._counts_of)
            except BaseException:
                rows.close()
                raise
        return version

    @contextlib.contextmanager
    def opened(self, info: VersionInfo) -> Iterator[Version]:
        """Open a version that is not served, for the block."""
        version = self.open(info)
        try:
            yield version
        finally:
            version.close()

    @contextlib.contextmanager
    def reading(self, number: int) -> Iterator[DiskTier]:
        """The disk tier of `reading_version`."""
        with self.reading_version(number) as version:
            yield version.disk

    @contextlib.contextmanager
    def reading_version(self, number: int) -> Iterator[Version]:
        """A version, for reading it whole, for however long; nothing waits for the end of the block.

        The version serves, or is a kept one, which is opened and not dropped by housekeeping. A thread that needs the
        version otherwise (to serve it, to drop it, to close the model) closes it: then reads raise Closed.
        """
        open_version = self._served_or_retiring(number)
        if open_version is not None:
            yield open_version
            return
        version = self._open_to_read(number)
        try:
            yield version
        except BaseException:
            self.scanned.release(version, failed=True)
            raise
        self.scanned.release(version)

    def _open_to_read(self, number: int) -> Version:
        with self._state.switch:
            if self._served_or_retiring(number) is not None:
                raise Closed(f"version {number} of {self._state.name!r} was switched to")
            self._state.live.check_open()
            info = self._state.catalogue.info(number)
            return self.scanned.acquire(number, lambda: self.open(info))

    def _served_or_retiring(self, number: int) -> Version | None:
        view = self._state.live.served.numbered(number)
        return self._state.retiring.numbered(number) if view is None else view.open_version

    def read_records(self, info: VersionInfo) -> None:
        """Learn the watermark of a kept version: reads its records, and nothing of its base."""
        try:
            with (
                _noting_problems(info),
                contextlib.closing(open_records(info.where.db, self._shared.readers)) as disk,
            ):
                info.learn(disk)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others serve; status and `verify` say so too
            log.error("model %s: version %d cannot be opened: %s", self._state.name, info.number, error)

    def free(self, version: Version) -> None:
        """Close a version that was served, or was to be, and return its budgets. Housekeeping gives them to others."""
        try:
            version.close()
        finally:
            self._shared.host_budget.release(version)
            self._shared.devices.release(version)
            self._shared.memory.wake()  # others may get it

    @contextlib.contextmanager
    def warmed(
        self,
        info: VersionInfo,
        replaced: list[Version],
        *,
        force: bool,
        progress: ProgressFn,
        start: bool = False,
        undone: Undone | None = None,
        share: float = 1.0,
    ) -> Iterator[Version]:
        """A version opened, caught up except for the last step (without `undone` deltas), and warm; closed if the block
        fails.

        It takes its memory from `replaced` first, of which the active version is the first, and as much as a `share`
        of the requests is worth. At a `start` it is warmed
        once it serves, and may lack what a full disk does not take. Conflict for a stale one, unless `force`.
        """
        state, live = self._state, self._state.live
        live.check_open()
        progress = guarded(progress)
        if state.catalogue.is_stale(info) and not force:
            raise Conflict(
                f"version {info.number} of {state.name!r} is stale: it holds deltas up to {info.watermark}, and the "
                f"log begins after {state.log.start}; with force it serves without the deltas in between"
            )
        may_lack = (DiskFull,) if start else ()
        version = self.open(info)
        try:
            with contextlib.suppress(*may_lack):
                self._catch_up(version, lag=SWITCH_LAG, force=force, undone=undone, progress=progress)
            version.request_share = share
            # as tables are by now
            self._shared.host_budget.admit(version, *replaced)
            self._shared.devices.admit(version, replaced, live.publisher)
            if start:
                self._shared.warmer.add(version, live.publisher)
            else:
                self._warm(version, replaced[0] if replaced else None, progress)
            state.dense.open(version, lenient=force)
            progress(Progress("switch"))
            with contextlib.suppress(*may_lack):
                self._catch_up(version, lag=SWITCH_LAG, force=force, undone=undone)
            state.dense.open(version, lenient=force)
            yield version
        except BaseException:
            if live.served.view_of(version) is None:  # or the block got as far as it had to
                self.free(version)
            raise

    def _catch_up(
        self,
        version: Version,
        *,
        lag: int = 0,
        force: bool,
        undone: Undone | None = None,
        progress: ProgressFn | None = None,
    ) -> None:
        """Fold what the version lacks, if this node is to do that; otherwise serve it from memory."""
        if self._shared.placement.refusals.allow("catch_up"):
            catch_up(
                version, self._state.log, self._state.dense, lag=lag, lenient=force, undone=undone, progress=progress
            )

    @contextlib.contextmanager
    def last_view(self, version: Version, *, force: bool, start: bool, undone: Undone | None = None) -> Iterator[View]:
        """The view of a version that is caught up to the end of the log (without `undone` deltas), while producers
        wait. Holds `write`.

        What was not folded is in memory: at a `start` what a full disk does not take, and what this node is not to
        fold.
        """
        missing_why: DiskFull | str = "the rows that others bring do not have them yet"
        try:
            self._catch_up(version, force=force, undone=undone)
            self._state.dense.open(version, lenient=force)  # again only if one of the last deltas brought one
        except DiskFull as error:
            if not start:
                raise
            missing_why = error
        overlays = self._unfolded(version, missing_why)
        reserved = sum(overlay.nbytes for overlay in overlays)
        try:
            for overlay in overlays:
                overlay.prepare()
            yield View(version, overlays, overlays[0].hi if overlays else version.watermark)
        except BaseException:
            if self._state.live.served.view_of(version) is None:
                self._shared.overlay_budget.release(reserved)
            raise

    def _unfolded(self, version: Version, full: DiskFull | str) -> tuple[Overlay, ...]:
        budget = self._shared.overlay_budget
        try:
            view = View(version, (), version.watermark)
            overlay = unfolded(view, self._state.log, self._state.dense, limit=budget.total)
            if overlay is None:
                return ()
            budget.reserve(overlay.nbytes)
        except (Overloaded, TooLarge) as error:
            raise DiskFull(
                f"{full}; and version {version.number} cannot serve what is not folded from memory meanwhile: it does "
                f"not fit next to the other overlays into overlay_budget, {budget.total:,} bytes"
            ) from error
        log.log(
            logging.INFO if isinstance(full, str) else logging.WARNING,
            "model %s: deltas %d to %d are served from memory: %s",
            self._state.name,
            overlay.lo,
            overlay.hi,
            full,
        )
        return (overlay,)

    def _warm(self, version: Version, like: Version | None, progress: ProgressFn) -> None:
        throttle = self._shared.throttle

        def warm() -> None:
            pace = Pace(lambda: max(LEAST_OF_A_SWITCH, throttle.share))

            def report(done: int, total: int) -> None:
                progress(Progress("warm", done, total))
                pace.sleep()

            with throttle.at_work("warm"):
                version.warm(like, report)

        if like is None:
            warm()
        else:  # there are requests that go first
            in_background(warm)

    def _counts_of(self, table: str) -> LookupCounts:
        return self._counts.setdefault(table, LookupCounts())


@contextlib.contextmanager
def _noting_problems(info: VersionInfo) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        info.problem = str(error)
        raise
    info.problem = None
