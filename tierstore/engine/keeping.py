"""The versions of a model on disk: found at start, loaded, kept in step with the log, dropped. See `switching.py` for what serves.

Loads and drops: any thread, one switch or drop at a time (`_switch`), beside deltas and look-ups. Chores are for the
background thread (`keeper.py`).

After a crash: a version is there if its record is. What a load has left stays for a time, for one of the same snapshot to go
on from; what a drop or a fold has left goes at the next start.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tierstore.engine.replay import catch_up
from tierstore.engine.served import Served
from tierstore.engine.switching import DRAIN_S, Shared, Switching
from tierstore.engine.unfinished import Unfinished, clear_for, find_unfinished
from tierstore.engine.version import Version, VersionInfo
from tierstore.errors import (
    Closed,
    Conflict,
    Corruption,
    DeltaError,
    LoadCancelled,
    NotFound,
    SnapshotError,
    StorageError,
    TierstoreError,
)
from tierstore.formats import files
from tierstore.formats.delta import read_delta
from tierstore.formats.names import ModelDirectory
from tierstore.ingest.bulkload import can_go_on
from tierstore.tiers.disk import DiskTier
from tierstore.types import Progress, ProgressFn

log = logging.getLogger(__name__)

KEPT_LAG = 256  # deltas a kept version may fall behind before it is caught up in the background


class Keeping(Switching):
    """Those of one model, and the way they come and go."""

    def __init__(self, name: str, where: ModelDirectory, shared: Shared) -> None:
        chores = {
            "memory is not dealt again": self._deal_memory,
            "the delta log is not pruned": self._prune_log,
            "versions older than those kept are not dropped": self._drop_surplus,
            "kept versions are not caught up": lambda: self._unless_switching(self._catch_up_kept),
            "what broken-off loads have left is not removed": self._drop_unfinished,
        }
        super().__init__(name, where, shared, chores)
        self._unread: str | None = None  # why the directory could not be looked through at start
        self.leftovers: list[Path] = []  # of crashes, which nobody needs; known from `find` on
        self.unfinished: dict[int, Unfinished] = {}  # guarded by serving.write; replaced whole

    # --- what there is

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to keep: no version, complete or coming, and no log."""
        known = self._infos or self.damaged or self._loading or self.unfinished
        return not known and self._deltas.start is None and self._unread is None

    def infos(self) -> list[VersionInfo]:
        """What is known of each complete version, ascending."""
        infos = self._infos
        return [infos[number] for number in sorted(infos)]

    def loads(self) -> list[tuple[int, Progress]]:
        """Versions that are being loaded, and how far."""
        return [
            (number, progress) for number, (_, progress) in sorted(self._loading.items()) if number not in self._infos
        ]

    # --- start and stop

    def find(self) -> None:
        """Find the versions on disk, and what crashes have left beside them. Comes before `start`.

        Whatever is wrong with one version, or with the directory as a whole, keeps nothing else from being found.
        """
        self._look_for_leftovers(self.where.root)
        infos: dict[int, VersionInfo] = {}
        try:
            numbers = self.where.versions_on_disk()
        except OSError as error:
            self._unread = f"{self.where.root} cannot be read: {error.strerror or error}; mend that and start again"
            numbers = []
        for number in numbers:
            where = self.where.version(number)
            try:
                if not files.exists(where.record):
                    if not self._keep_unfinished(number):
                        self._discard(where.root)
                    continue
                self._discard(where.build)  # a fold that was
                for folder in (where.root, where.hot_keys):
                    self._look_for_leftovers(folder)
                infos[number] = VersionInfo(where)
                if infos[number].number != number:
                    raise Corruption(f"{where.record} is of version {infos.pop(number).number}: expected {number}")
            except Exception as error:  # noqa: BLE001 - the others serve
                if os.path.lexists(where.root):  # else it has lost its name, if no more
                    self.damaged[number] = str(error)
                log.error("model %s: version %d is damaged: %s", self.name, number, error)
        self._infos = infos

    def _look_for_leftovers(self, folder: Path) -> None:
        try:
            self.leftovers += files.leftovers(folder)
        except StorageError as error:  # the next start tries again
            log.warning("model %s: %s", self.name, error)

    def _discard(self, folder: Path) -> None:
        trash = files.discard(folder)
        if trash is not None:
            self.leftovers.append(trash)

    @property
    def host_need_bytes(self) -> int:
        """Memory for the host tier that the version to be served at the start could use."""
        with contextlib.suppress(TierstoreError):
            current = self._record.current()
            if current in self._infos:
                return sum(self._infos[current].host_needs())
        return 0

    def start(self) -> None:
        """Open the active version, replay the log onto it, and begin to serve; it is warmed by and by.

        A version that cannot be opened is reported by `problem`, and the model waits for another.
        """
        for why in self._deltas.damage:
            log.error("model %s: %s", self.name, why)
        try:
            if self._unread is not None:
                raise StorageError(self._unread)
            self._serve_again()
        except Exception as error:  # whatever it is, the other models serve
            self._start_problem = str(error)
            self._serving.set(Served(problem=self._start_problem))
            log.exception("model %s does not serve", self.name)
        self._keeper.start()

    def close(self) -> None:
        """Stop the background thread, wait for look-ups under way, and close what is open."""
        retired = self._keeper.stop()
        with self._switch, self._serving.write:
            with contextlib.suppress(StorageError):
                self._record.settle()
            self._closed = True
            serving = self._serving.set(Served())
            publisher = self._serving.publisher
            open_ = [*retired, *serving]
            with publisher.changed:
                publisher.changed.wait_for(lambda: not any(map(publisher.reads, open_)), timeout=DRAIN_S)
            for version in serving:
                if self._shared.warmer.of(version) is None:  # else what was saved last says more than what is in memory
                    with contextlib.suppress(StorageError):  # they only make the next start warmer
                        version.save_hot_keys()
            for version in open_:
                self._freed(version)
            self._read.end()
            self._resting.end()

    @contextlib.contextmanager
    def reading(self, number: int) -> Iterator[DiskTier]:
        """The disk tier of a version, to be read as a whole, for however long; nobody waits for the end of the block.

        It is that of what serves, or of a kept version, opened and kept from being dropped by the house. Who needs the
        version otherwise (to serve it, to drop it, to close the model) takes it away: what reads on raises Closed.
        """
        open_ = self._served_or_retiring(number)
        if open_ is not None:
            yield open_.disk
            return
        version = self._begin_reading(number)
        try:
            yield version.disk
        except BaseException:
            self._read.leave(version, failed=True)  # it may be what failed: nothing rests of it
            raise
        self._read.leave(version)

    def _served_or_retiring(self, number: int) -> Version | None:
        view = self.served.numbered(number)
        return self._keeper.retiring(number) if view is None else view.holder

    def _begin_reading(self, number: int) -> Version:
        with self._switch:
            open_ = self._served_or_retiring(number)
            if open_ is not None:
                raise Closed(f"version {number} of {self.name!r} was switched to")
            self.check_open()
            info = self._info(number)

            def open_anew() -> Version:
                self._resting.close(number)  # what the disk says is read, as the next start will
                return self._open(info)

            return self._read.enter(number, open_anew)

    @contextlib.contextmanager
    def _opened_kept(self, info: VersionInfo) -> Iterator[Version]:
        """A version that is not served, opened for the length of the block. Holds `_switch`."""
        version = self._open(info)
        try:
            yield version
        except BaseException:
            version.close()  # it may be what failed: nothing rests of it
            raise
        self._resting.leave(version)

    def _close_kept(self, number: int) -> None:
        """Close whatever is open of a version that is not served."""
        self._read.take_away(number)
        self._resting.close(number)

    # --- loading

    @contextlib.contextmanager
    def loading(self, number: int, delta_seq: int, identity: str) -> Iterator[ProgressFn]:
        """Reserve a version's directory, and the log from `delta_seq` on, for a load; on an error nothing of it stays.

        But for what is loaded and could only not be switched to; for what serves meanwhile; and for what a load of the
        same snapshot, by its `identity`, can go on from. The version may be there already: then it was only not
        switched to. Where the model was closed, the directory may be another process's by now.
        """
        where = self.where.version(number)
        with self._serving.write:
            if self._unread is not None:  # there may be such a version
                raise StorageError(self._unread)
            if number in self._loading:
                raise Conflict(f"version {number} of {self.name!r} is being loaded already")
            complete = number in self._infos
            if complete and (number in self.served.versions or files.read_bytes(where.loading) != identity.encode()):
                raise Conflict(
                    f"version {number} of {self.name!r} is there already; activate it, or drop it first, or give the snapshot a new version"
                )
            if self._deltas.start is not None and delta_seq < self._deltas.start:
                raise SnapshotError(
                    f"delta_seq is {delta_seq}, but the delta log begins after {self._deltas.start}, so what came between is gone; "
                    f"export a snapshot with delta_seq {self._deltas.start} or later",
                    file="snapshot.json",
                )
            if (lost := self._deltas.lost_above(delta_seq)) is not None:
                raise SnapshotError(
                    f"delta_seq is {delta_seq}, and it could not be caught up: {lost}", file="snapshot.json"
                )
            older = [other for other in self.unfinished if other < number]  # this snapshot takes their place
            trash = [files.discard(self.where.version(other).root) for other in older]
            self.unfinished = {other: of for other, of in self.unfinished.items() if other > number}
            self._loading[number] = delta_seq, Progress("start")

        def note(progress: Progress) -> None:
            self.check_open()
            self._loading[number] = delta_seq, progress

        try:
            if not complete:
                clear_for(where, identity)
            for path in filter(None, trash):
                files.remove_leftover(path)
            yield note
            self._load_is_over(number)
        except BaseException as error:
            if number in self._infos and (not isinstance(error, SnapshotError) or isinstance(error, LoadCancelled)):
                error.add_note(f"version {number} of {self.name!r} is loaded all the same, and kept; it is not active")
                raise
            # one that is complete may be on its way to be served for somebody else's sake
            with self._switch if number in self._infos else contextlib.nullcontext():
                if not (self._closed or number in self.served.versions or self._keeper.is_retiring(number)):
                    self._forget(number)
                    self._close_kept(number)
                    if not (can_go_on(error) and self._keep_unfinished(number)):
                        files.remove_tree(where.root)
                    with self._serving.write, contextlib.suppress(StorageError):
                        self._record.settle()  # there is room now
            raise
        finally:
            with self._serving.write:
                self._loading.pop(number, None)
                self.damaged.pop(number, None)  # its directory was replaced, or removed

    def _keep_unfinished(self, number: int) -> bool:
        """Remember what a load has left, if another one can go on from it."""
        found = find_unfinished(self.where.version(number)) if self._shared.settings.load_retention_s else None
        if found is None:
            return False
        with self._serving.write:
            self.unfinished = {**self.unfinished, number: found}
        log.info(
            "model %s: the load of version %d was broken off; %d MiB are kept, and loading the same snapshot goes on from there",
            self.name,
            number,
            found.bytes >> 20,
        )
        return True

    def _drop_unfinished(self) -> None:
        """Remove what nobody has taken up for a time."""
        for number, left in self.unfinished.items():
            if left.age_s >= self._shared.settings.load_retention_s:
                trash = self._take_unfinished_away(number)
                if trash is not None:
                    log.info("model %s: removes what a load of version %d has left", self.name, number)
                    files.remove_leftover(trash)

    def _take_unfinished_away(self, number: int) -> Path | None:
        with self._serving.write:
            if self.unfinished.get(number) is None:  # a load has taken it up
                return None
            trash = files.discard(self.where.version(number).root)
            self.unfinished = {other: of for other, of in self.unfinished.items() if other != number}
            return trash

    def adopt(self, info: VersionInfo, *, activate: bool, progress: ProgressFn) -> None:
        """Count a version whose directory is complete, and switch to it if asked."""
        with self._serving.write:
            self._infos = {**self._infos, info.number: info}
        if activate:
            self.activate(info.number, progress=progress)

    def drop(self, number: int) -> None:
        """Delete a version that is not served, one that is damaged or half loaded as well. Its memory and disk come back."""
        trash = self._take_away(number)
        if trash is not None:
            files.remove_leftover(trash)  # which may take long: nobody waits for it but who asked

    def _take_away(self, number: int) -> Path | None:
        """Forget a version, and take its directory's name. Returns what is left to be removed."""
        with self._switch:
            if number in self._loading:
                raise Conflict(f"version {number} of {self.name!r} is being loaded")
            self.check_open()
            if number in self.damaged:
                return self._take_damaged_away(number)
            if number in self.unfinished:
                return self._take_unfinished_away(number)
            info = self._info(number)
            if number == self.active_version:
                raise Conflict(f"version {number} of {self.name!r} is active; activate another one first")
            if number == self.canary_number:
                raise Conflict(f"version {number} of {self.name!r} is the canary; withdraw it first")
            self._wait_retired(number)
            with self._serving.write:
                self._record.settle()  # CURRENT must not go on naming it
            self._close_kept(number)
            try:
                return files.discard(info.where.root)
            finally:
                if not files.exists(
                    info.where.record
                ):  # what is left of it has lost its name, and goes at the next start
                    self._forget(number)

    def _take_damaged_away(self, number: int) -> Path | None:
        with self._serving.write:
            if number in self._loading:
                raise Conflict(f"version {number} of {self.name!r} is being loaded")
            self._loading[number] = self._deltas.last or 0, Progress("drop")  # so that nobody loads it meanwhile
        try:
            trash = files.discard(self.where.version(number).root)
            del self.damaged[number]
            return trash
        finally:
            with self._serving.write:
                del self._loading[number]

    # --- background

    def _deal_memory(self) -> None:
        self._shared.host_budget.settle(lambda: self._keeper.stopping)
        self._shared.devices.budget.settle(lambda: self._keeper.stopping)

    def _prune_log(self) -> None:
        with self._serving.write:
            self._record.settle()
            # one that serves though it is stale goes on from where the log begins
            needed = [
                max(info.watermark, self._deltas.start or 0)
                for info in self._infos.values()
                if not self.is_stale(info) or info.number in self.served.versions
            ]
            needed += [delta_seq for delta_seq, _ in self._loading.values()]
            if needed:
                self._deltas.prune(min(needed), min_age_s=self._shared.settings.log_retention_s)

    def _unless_switching(self, chore: Callable[[], None]) -> None:
        if not self._switch.acquire(blocking=False):
            return  # it comes round again
        try:
            chore()
        finally:
            self._switch.release()

    def _drop_surplus(self) -> None:
        trash: list[Path | None] = []
        self._unless_switching(lambda: trash.extend(map(self._take_away, self._surplus())))
        for path in trash:
            if path is not None:
                log.info("model %s: drops a version older than those kept: %s", self.name, path.name)
                files.remove_leftover(path)

    def _surplus(self) -> list[int]:
        """Versions that are older than those that are to be kept, and that nobody uses."""
        active = self.active_version
        older = [
            number
            for number in self.versions
            if active is not None and number < active and number not in self._loading and number != self.canary_number
        ]
        surplus = older[: max(0, len(older) - self._shared.settings.keep_versions)]
        return [number for number in surplus if not self._keeper.is_retiring(number) and number not in self._read]

    def _catch_up_kept(self) -> None:
        """A kept version never falls far behind, so that rollback is quick. One that is damaged keeps no other from it."""
        failed: TierstoreError | None = None
        for info in self.infos():
            behind = (self._deltas.last or 0) - info.watermark
            busy = (
                info.number in self._loading
                or info.number in self.served.versions
                or self._keeper.is_retiring(info.number)
                or info.number in self._read
            )
            if behind <= KEPT_LAG or busy or self.is_stale(info):
                continue
            try:
                with self._opened_kept(info) as version:
                    catch_up(version, self._deltas, self.dense, leave=KEPT_LAG // 2)
            except DeltaError as error:
                log.warning("model %s: version %d cannot be caught up: %s", self.name, info.number, error)
            except TierstoreError as error:
                failed = error
        if failed is not None:
            raise failed

    def check_log(self) -> tuple[int, list[str]]:
        """Read every entry of the log back, and what the next start goes by: how many entries there are, and what is wrong."""
        problems, count = [f"{self.name}: {why}" for why in self._deltas.damage], 0
        for check in (self._record.current, self._record.routes, self._deltas.check):
            try:
                check()
            except TierstoreError as error:
                problems.append(f"{self.name}: {error}")
        for seq in self._deltas.held():
            try:
                read_delta(self._deltas.read(seq))
                count += 1
            except NotFound:
                continue  # pruned meanwhile
            except TierstoreError as error:
                problems.append(f"{self.name}: {error}")
        return count, problems
