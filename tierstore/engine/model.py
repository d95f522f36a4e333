"""A model: its versions, and the verbs that change which of them serves.

Look-ups and deltas: any thread (see `serving.py`). Loads, switches and drops: any thread, one switch or drop at a
time (`_switch`), beside deltas and look-ups. Locks are taken in the order `_switch`, `serving.write`, the
publisher's condition.

After a crash: CURRENT names the active version, its RocksDB holds every delta up to its watermark, and the delta
log those above.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierstore.config import Settings
from tierstore.engine.budget import HostBudget, OverlayBudget
from tierstore.engine.deltalog import DeltaLog
from tierstore.engine.dense import DenseParts
from tierstore.engine.devices import Devices
from tierstore.engine.keeper import Keeper
from tierstore.engine.observer import Observer
from tierstore.engine.replay import catch_up
from tierstore.engine.serving import Serving
from tierstore.engine.table import LookupCounts
from tierstore.engine.version import Version, VersionInfo
from tierstore.engine.view import Lease, Publisher
from tierstore.errors import (
    Closed,
    Conflict,
    Corruption,
    DeltaError,
    NotFound,
    SnapshotError,
    StorageError,
    TierstoreError,
)
from tierstore.formats import files
from tierstore.formats.delta import Delta, read_delta
from tierstore.formats.names import ModelDirectory, format_version, parse_version
from tierstore.predict.runtime import Runtime
from tierstore.predict.signature import Signature
from tierstore.tiers.disk import ReaderPool
from tierstore.types import DeltaResult, FeatureSpec, Progress, ProgressFn, TableSpec

log = logging.getLogger(__name__)

SWITCH_LAG = 4  # deltas that may be left for the last catch-up of a switch, while producers wait
KEPT_LAG = 256  # deltas a kept version may fall behind before it is caught up in the background
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
    observers: list[Observer] = field(default_factory=list)
    told: list[Callable[[], None]] = field(default_factory=list)  # called whenever a view is published; see `Publisher`


def _ignore(progress: Progress) -> None:
    pass


class Model:
    """One served name. `name` and `where` are constant."""

    def __init__(self, name: str, where: ModelDirectory, shared: Shared) -> None:
        self.name, self.where = name, where
        self._shared = shared
        self._deltas = DeltaLog(where)
        self._serving = Serving(
            name, self._deltas, shared.overlay_budget, shared.observers, shared.settings.fold_grace_s, shared.told
        )
        self._keeper = Keeper(self._serving, self._freed, self._keep_house)
        self._switch = threading.RLock()
        self._start_problem: str | None = None
        self._counts: dict[str, LookupCounts] = {}  # by table, over all versions, so that they only grow
        self.dense = DenseParts(name, shared.dense, lambda number: self._infos.get(number))
        self._closed = False
        self.damaged: dict[int, str] = {}  # versions whose record could not be read at start, and why
        # guarded by serving.write; replaced whole, so that readers need no lock
        self._infos: dict[int, VersionInfo] = {}
        self._loading: dict[int, tuple[int, Progress]] = {}  # version → (delta_seq, how far)

    # --- look-ups and deltas

    def view(self, version: int | None = None) -> Lease:
        """Hold one view for the length of a request: `with model.view() as view`. NotReady where nothing serves.

        With `version`, NotReady unless that one is active, NotFound if there is none.
        """
        if version is not None and version not in self._infos:
            raise self._no_version(version)
        return Lease(self._serving.publisher, self.name, version)

    def lookup(self, feature: str, keys: Any, **options: Any) -> Any:
        """`View.lookup` on the current view."""
        with self.view() as view:
            return view.lookup(feature, keys, **options)

    def lookup_bags(self, feature: str, keys: Any, offsets: Any, **options: Any) -> Any:
        """`View.lookup_bags` on the current view."""
        with self.view() as view:
            return view.lookup_bags(feature, keys, offsets, **options)

    def lookup_many(self, keys: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Several features at once, all of one version and one seq: {feature: what `lookup` returns}."""
        with self.view() as view:
            return {feature: view.lookup(feature, of, **options) for feature, of in keys.items()}

    def predict(
        self, inputs: Mapping[str, Any], *, outputs: Sequence[str] | None = None, version: int | None = None
    ) -> Any:
        """`View.predict` on the current view."""
        with self.view(version) as view:
            return view.predict(inputs, outputs=outputs)

    @property
    def signature(self) -> Signature | None:
        """What the dense part that is served takes and gives; None where none is. NotReady where nothing serves."""
        with self.view() as view:
            return None if view.predictor is None else view.predictor.signature

    def apply_delta(self, delta: Delta, data: bytes | memoryview) -> DeltaResult:
        """Log a delta and make it visible; `data` is what `delta` was read from."""
        return self._serving.apply(
            delta, data, lambda number: self._infos[number].specs if number in self._infos else None, self.dense
        )

    # --- what there is

    @property
    def active_version(self) -> int | None:
        view = self._serving.current
        return None if view is None else view.version

    @property
    def publisher(self) -> Publisher:
        """What holds the current view; for those who lend views to other processes."""
        return self._serving.publisher

    @property
    def ready(self) -> bool:
        """Whether look-ups are answered."""
        return self._serving.current is not None

    @property
    def features(self) -> dict[str, FeatureSpec]:
        """Of the active version. NotReady where nothing serves."""
        with self.view() as view:
            return view.features

    @property
    def tables(self) -> dict[str, TableSpec]:
        """Of the active version. NotReady where nothing serves."""
        with self.view() as view:
            return view.holder.specs

    @property
    def versions(self) -> list[int]:
        """Complete versions, ascending."""
        return sorted(self._infos)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to keep: no version, complete or coming, and no log."""
        return not self._infos and not self._loading and self._deltas.start is None

    @property
    def problem(self) -> str | None:
        """Why nothing serves, or why background work does not get on."""
        return self._start_problem or self._keeper.problem

    @property
    def last_event_time(self) -> str | None:
        """Of the newest delta applied since the start, ISO 8601."""
        event = self._serving.last_event
        return None if event is None else event.isoformat()

    def infos(self) -> list[VersionInfo]:
        """What is known of each complete version, ascending."""
        infos = self._infos
        return [infos[number] for number in sorted(infos)]

    def loads(self) -> list[tuple[int, Progress]]:
        """Versions that are being loaded, and how far."""
        return [
            (number, progress) for number, (_, progress) in sorted(self._loading.items()) if number not in self._infos
        ]

    def log_status(self) -> dict[str, Any]:
        return {"start": self._deltas.start, "last": self._deltas.last, "entries": self._deltas.entries}

    def is_stale(self, info: VersionInfo) -> bool:
        """Whether deltas that the version lacks are gone from the log."""
        return self._deltas.start is not None and info.watermark < self._deltas.start

    def _no_version(self, number: int) -> NotFound:
        return NotFound(
            f"model {self.name!r} has no version {number}; it has {', '.join(map(str, self.versions)) or 'none'}"
        )

    # --- start and stop

    def start(self) -> None:
        """Find the versions on disk, open the active one, replay the log onto it, and begin to serve.

        A version that cannot be opened is reported by `problem`, and the model waits for another.
        """
        files.sweep(self.where.root)
        infos = {}
        for number in self.where.versions_on_disk():
            where = self.where.version(number)
            if not where.record.exists():
                files.remove_tree(where.root)  # a load that was cut off
                continue
            try:
                infos[number] = VersionInfo(where)
            except TierstoreError as error:
                self.damaged[number] = str(error)
                log.error("model %s: version %d is damaged: %s", self.name, number, error)
        self._infos = infos
        try:
            current = self._read_current()
            for info in infos.values():
                if info.number != current:
                    self._learn_watermark(info)
            if current is not None:
                if current not in infos:
                    raise Corruption(
                        f"{self.where.current} names version {current}, which is not on disk; activate one of {self.versions}"
                    )
                self._serve(infos[current], force=True, progress=_ignore)
        except TierstoreError as error:
            self._start_problem = str(error)
            log.exception("model %s does not serve", self.name)
        self._keeper.start()

    def _learn_watermark(self, info: VersionInfo) -> None:
        try:
            self._open(info).close()
        except TierstoreError as error:  # `verify` says so too; the others serve
            log.error("model %s: version %d cannot be opened: %s", self.name, info.number, error)

    def close(self) -> None:
        """Stop the background thread, wait for look-ups under way, and close what is open."""
        retired = self._keeper.stop()
        with self._switch, self._serving.write:
            self._closed = True
            version = self._serving.switch(None)
            publisher = self._serving.publisher
            open_ = [*retired, *([] if version is None else [version])]
            with publisher.changed:
                publisher.changed.wait_for(lambda: not any(map(publisher.reads, open_)), timeout=DRAIN_S)
            if version is not None:
                with contextlib.suppress(StorageError):  # they only make the next start warmer
                    version.save_hot_keys()
            for version in open_:
                self._freed(version)

    def _read_current(self) -> int | None:
        try:
            text = self.where.current.read_text().strip()
        except FileNotFoundError:
            return None
        number = parse_version(text)
        if number is None:
            raise Corruption(f"{self.where.current}: expected a version number, came {text!r}")
        return number

    def _open(self, info: VersionInfo) -> Version:
        return Version.open(info, self._shared.settings, self._shared.readers, self.counts_of)

    def counts_of(self, table: str) -> LookupCounts:
        """The look-up counts of a table, over all versions."""
        return self._counts.setdefault(table, LookupCounts())

    def _freed(self, version: Version) -> None:
        version.close()
        self._shared.host_budget.release(version)
        self._shared.host_budget.settle()
        self._shared.devices.release(version)

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[Version]:
        """A version for reading as a whole: the active one as it is, another one opened for the length of the block."""
        with self._serving.publisher.pinned() as active:
            if active is not None and active.number == number:
                yield active
                return
        with self._switch, self._serving.publisher.pinned() as active:
            if active is not None and active.number == number:  # switched to meanwhile
                yield active
                return
            self._wait_retired(number)
            version = self._open(self._info(number))
            try:
                yield version
            finally:
                version.close()

    # --- loading

    @contextlib.contextmanager
    def loading(self, number: int, delta_seq: int) -> Iterator[ProgressFn]:
        """Reserve a version's directory, and the log from `delta_seq` on, for a load; on an error nothing of it stays."""
        with self._serving.write:
            if number in self._loading:
                raise Conflict(f"version {number} of {self.name!r} is being loaded already")
            if number in self._infos:
                raise Conflict(
                    f"version {number} of {self.name!r} is there already; drop it first, or give the snapshot a new version"
                )
            if self._deltas.start is not None and delta_seq < self._deltas.start:
                raise SnapshotError(
                    f"delta_seq is {delta_seq}, but the delta log begins after {self._deltas.start}, so what came between is gone; "
                    f"export a snapshot with delta_seq {self._deltas.start} or later",
                    file="snapshot.json",
                )
            self._loading[number] = delta_seq, Progress("start")

        def note(progress: Progress) -> None:
            self._check_open()
            self._loading[number] = delta_seq, progress

        where = self.where.version(number)
        try:
            files.remove_tree(where.root)
            files.make_dir(where.root)
            yield note
        except BaseException:
            if number != self.active_version:
                self._forget(number)
                files.remove_tree(where.root)
            raise
        finally:
            with self._serving.write:
                self._loading.pop(number, None)
                self.damaged.pop(number, None)  # its directory was replaced, or removed

    def adopt(self, info: VersionInfo, *, activate: bool, progress: ProgressFn) -> None:
        """Count a version whose directory is complete, and switch to it if asked."""
        with self._serving.write:
            self._infos = {**self._infos, info.number: info}
        if activate:
            self.activate(info.number, progress=progress)

    def _forget(self, number: int) -> None:
        with self._serving.write:
            self._infos = {key: info for key, info in self._infos.items() if key != number}

    # --- which version serves

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the store of model {self.name!r} was closed")

    def _info(self, number: int) -> VersionInfo:
        info = self._infos.get(number)
        if info is None:
            raise self._no_version(number)
        return info

    def activate(self, number: int, *, force: bool = False, progress: ProgressFn = _ignore) -> None:
        """Open, catch up and warm a kept version, then switch to it in one step; nothing to do for the active one.

        Conflict for a version that is stale, unless `force`: then it serves without what it lacks.
        """
        with self._switch:
            info = self._info(number)
            old = self.active_version
            if number == old:
                return
            self._wait_retired(number)
            self._serve(info, force=force, progress=progress)
        for observer in self._shared.observers:
            observer.version_switched(self.name, old, number)

    def _wait_retired(self, number: int) -> None:
        if not self._keeper.wait_retired(number, DRAIN_S):
            raise Conflict(
                f"version {number} of {self.name!r} is still read by requests that began {DRAIN_S:.0f} s ago; try again"
            )

    def _serve(self, info: VersionInfo, *, force: bool, progress: ProgressFn) -> None:
        self._check_open()
        if self.is_stale(info) and not force:
            raise Conflict(
                f"version {info.number} of {self.name!r} is stale: it holds deltas up to {info.watermark}, and the log begins after "
                f"{self._deltas.start}; with force it serves without what came between"
            )
        current = self._serving.current
        old = None if current is None else current.holder
        version = self._open(info)
        try:
            self._shared.host_budget.admit(version, old)
            self._shared.devices.admit(version, old, self._serving.publisher)
            catch_up(version, self._deltas, leave=SWITCH_LAG, lenient=force, progress=progress)
            version.warm(old, lambda done, total: progress(Progress("warm", done, total)))
            self.dense.open(version, lenient=force)
            progress(Progress("switch"))
            catch_up(version, self._deltas, leave=SWITCH_LAG, lenient=force)
            self.dense.open(version, lenient=force)
            with self._serving.write:
                catch_up(version, self._deltas, lenient=force)
                self.dense.open(version, lenient=force)  # anew only if one of the last deltas brought one
                self._point_to(version)
                self._serving.switch(version)
                self._start_problem = None
        except BaseException:
            self._freed(version)
            raise
        if old is not None:
            self._keeper.retire(old)

    def _point_to(self, version: Version) -> None:
        """Make `version` the one that the next start serves, and have the log go on from it.

        CURRENT comes first: after a crash in between, the next start restarts the log. The other way round, the
        version before would be served without the deltas that the log has just forgotten.
        """
        wanted = format_version(version.number).encode()
        with self._current_restored_on_error() as before:
            if before != wanted:
                files.publish_bytes(self.where.current, wanted)
            if self._deltas.last is None or version.watermark > self._deltas.last:
                self._deltas.restart(version.watermark)

    @contextlib.contextmanager
    def _current_restored_on_error(self) -> Iterator[bytes | None]:
        """A change of CURRENT that fails may have taken its name all the same; put back what the block began with."""
        path = self.where.current
        before = path.read_bytes() if path.exists() else None
        try:
            yield before
        except BaseException:
            with contextlib.suppress(StorageError):
                if before is None:
                    files.remove_file(path)
                else:
                    files.publish_bytes(path, before)
            raise

    def rollback(self, *, force: bool = False, progress: ProgressFn = _ignore) -> int:
        """Go back to the newest kept version older than the active one. Returns its number."""
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
        """Stop serving; the version is kept."""
        with self._switch:
            with self._serving.write:
                with self._current_restored_on_error():
                    files.remove_file(self.where.current)
                old = self._serving.switch(None)
            if old is not None:
                self._keeper.retire(old)
        if old is not None:
            for observer in self._shared.observers:
                observer.version_switched(self.name, old.number, None)

    def drop(self, number: int) -> None:
        """Delete a version that is not active. Its memory and disk come back."""
        with self._switch:
            if number in self._loading:
                raise Conflict(f"version {number} of {self.name!r} is being loaded")
            info = self._info(number)
            if number == self.active_version:
                raise Conflict(f"version {number} of {self.name!r} is active; activate another one first")
            self._wait_retired(number)
            try:
                files.remove_tree(info.where.root)
            finally:
                if not info.where.record.exists():  # what is left of it has lost its name, and goes at the next start
                    self._forget(number)

    # --- background

    def _keep_house(self) -> None:
        with self._serving.write:
            needed = [info.watermark for info in self._infos.values() if not self.is_stale(info)]
            needed += [delta_seq for delta_seq, _ in self._loading.values()]
            if needed:
                self._deltas.prune(min(needed), min_age_s=self._shared.settings.log_retention_s)
        if not self._switch.acquire(blocking=False):
            return  # a switch is going on; this comes round again
        try:
            self._drop_surplus()
            self._catch_up_kept()
        finally:
            self._switch.release()

    def _drop_surplus(self) -> None:
        active = self.active_version
        older = [
            number for number in self.versions if active is not None and number < active and number not in self._loading
        ]
        for number in older[: max(0, len(older) - self._shared.settings.keep_versions)]:
            if not self._keeper.is_retiring(number):
                self.drop(number)
                log.info("model %s: dropped version %d, older than those kept", self.name, number)

    def _catch_up_kept(self) -> None:
        """A kept version never falls far behind, so that rollback is quick."""
        for info in self.infos():
            behind = (self._deltas.last or 0) - info.watermark
            busy = (
                info.number in self._loading
                or info.number == self.active_version
                or self._keeper.is_retiring(info.number)
            )
            if behind <= KEPT_LAG or busy or self.is_stale(info):
                continue
            version = self._open(info)
            try:
                catch_up(version, self._deltas)
            except DeltaError as error:
                log.warning("model %s: version %d cannot be caught up: %s", self.name, info.number, error)
            finally:
                version.close()

    def check_log(self) -> tuple[int, list[str]]:
        """Read every entry of the log back: how many there are, and what is wrong."""
        problems, count = [], 0
        for seq in range((self._deltas.start or 0) + 1, (self._deltas.last or 0) + 1):
            try:
                read_delta(self._deltas.read(seq))
                count += 1
            except NotFound:
                continue  # pruned meanwhile
            except TierstoreError as error:
                problems.append(f"{self.name}: {error}")
        return count, problems
