"""A model: look-ups, deltas, loads, and what is done in the background. Which versions serve is `switching.py`.

Look-ups and deltas: any thread (see `serving.py`). Loads and drops: any thread, one switch or drop at a time
(`_switch`), beside deltas and look-ups.

After a crash: CURRENT names the active version, its RocksDB holds every delta up to its watermark, and the delta
log those above.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tierstore.engine.publisher import Lease, Publisher
from tierstore.engine.replay import catch_up
from tierstore.engine.served import STABLE, Served
from tierstore.engine.switching import DRAIN_S, Shared, Switching
from tierstore.engine.version import Version, VersionInfo
from tierstore.engine.view import View
from tierstore.errors import (
    Conflict,
    DeltaError,
    NotFound,
    SnapshotError,
    StorageError,
    TierstoreError,
)
from tierstore.formats import files
from tierstore.formats.delta import Delta, read_delta
from tierstore.formats.names import ModelDirectory
from tierstore.predict.signature import Signature
from tierstore.types import DeltaResult, FeatureSpec, Progress, ProgressFn, TableSpec

log = logging.getLogger(__name__)

KEPT_LAG = 256  # deltas a kept version may fall behind before it is caught up in the background


class Model(Switching):
    """One served name."""

    def __init__(self, name: str, where: ModelDirectory, shared: Shared) -> None:
        super().__init__(name, where, shared, self._keep_house)
        self.damaged: dict[int, str] = {}  # versions whose record could not be read at start, and why

    # --- look-ups and deltas

    def view(self, version: int | str | None = None, route: bytes | str | None = None) -> Lease:
        """Hold one view for the length of a request: `with model.view() as view`. NotReady where nothing serves.

        `version` is a number or a label. A number that is not served is NotReady, or NotFound if there is no such
        version; an unknown label is NotFound. Without it the request goes to the active version or, as its share says,
        to the canary: requests of an equal `route` (a request id) to the same one, others at random.
        """
        if isinstance(version, int):
            self._info(version)
        return Lease(self._serving.publisher, version, route)

    def _enter(self, version: int | str | None, route: bytes | str | None) -> tuple[View, Publisher]:
        """What entering `view(version, route)` does, in fewer steps; the caller leaves the view."""
        if isinstance(version, int):
            self._info(version)
        publisher = self._serving.publisher
        return publisher.enter(version, route), publisher

    def lookup(
        self,
        feature: str,
        keys: Any,
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> Any:
        """`View.lookup` on the view that `view(version, route)` gives."""
        view, publisher = self._enter(version, route)
        try:
            return view.lookup(feature, keys, **options)
        finally:
            publisher.leave(view)

    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> Any:
        """`View.lookup_bags` on the view that `view(version, route)` gives."""
        view, publisher = self._enter(version, route)
        try:
            return view.lookup_bags(feature, keys, offsets, **options)
        finally:
            publisher.leave(view)

    def lookup_many(
        self,
        keys: Mapping[str, Any],
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Several features at once, all of one version and one seq: {feature: what `lookup` returns}."""
        with self.view(version, route) as view:
            return {feature: view.lookup(feature, of, **options) for feature, of in keys.items()}

    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: int | str | None = None,
        route: bytes | str | None = None,
    ) -> Any:
        """`View.predict` on the view that `view(version, route)` gives."""
        with self.view(version, route) as view:
            return view.predict(inputs, outputs=outputs)

    @property
    def signature(self) -> Signature | None:
        """What the active version's dense part takes and gives; None where none is served. NotReady where nothing serves."""
        with self.view(STABLE) as view:
            return None if view.predictor is None else view.predictor.signature

    def apply_delta(self, delta: Delta, data: bytes | memoryview) -> DeltaResult:
        """Log a delta and make it visible; `data` is what `delta` was read from."""
        return self._serving.apply(
            delta, data, lambda number: self._infos[number].specs if number in self._infos else None, self.dense
        )

    # --- what there is

    @property
    def publisher(self) -> Publisher:
        """What holds the current views; for those who lend views to other processes."""
        return self._serving.publisher

    @property
    def ready(self) -> bool:
        """Whether look-ups are answered."""
        return self._serving.current is not None

    @property
    def features(self) -> dict[str, FeatureSpec]:
        """Of the active version. NotReady where nothing serves."""
        with self.view(STABLE) as view:
            return view.features

    @property
    def tables(self) -> dict[str, TableSpec]:
        """Of the active version. NotReady where nothing serves."""
        with self.view(STABLE) as view:
            return view.holder.specs

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to keep: no version, complete or coming, and no log."""
        return not (self._infos or self.damaged or self._loading) and self._deltas.start is None

    @property
    def problem(self) -> str | None:
        """Why nothing serves, or why background work does not get on."""
        return self._start_problem or self._canary_problem or self._keeper.problem

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

    # --- start and stop

    def start(self) -> None:
        """Find the versions on disk, open the active one, replay the log onto it, and begin to serve.

        A version that cannot be opened is reported by `problem`, and the model waits for another.
        """
        files.sweep(self.where.root)
        infos = {}
        for number in self.where.versions_on_disk():
            where = self.where.version(number)
            try:
                if not files.exists(where.record):
                    files.remove_tree(where.root)  # a load that was cut off
                    continue
                files.remove_tree(where.build)  # a fold that was
                for folder in (where.root, where.hot_keys):
                    files.sweep(folder)
                infos[number] = VersionInfo(where)
            except TierstoreError as error:
                self.damaged[number] = str(error)
                log.error("model %s: version %d is damaged: %s", self.name, number, error)
        self._infos = infos
        try:
            self._serve_again()
        except TierstoreError as error:
            self._start_problem = str(error)
            log.exception("model %s does not serve", self.name)
        self._keeper.start()

    def close(self) -> None:
        """Stop the background thread, wait for look-ups under way, and close what is open."""
        retired = self._keeper.stop()
        with self._switch, self._serving.write:
            self._closed = True
            serving = self._serving.set(Served())
            publisher = self._serving.publisher
            open_ = [*retired, *serving]
            with publisher.changed:
                publisher.changed.wait_for(lambda: not any(map(publisher.reads, open_)), timeout=DRAIN_S)
            for version in serving:
                with contextlib.suppress(StorageError):  # they only make the next start warmer
                    version.save_hot_keys()
            for version in open_:
                self._freed(version)

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[Version]:
        """A version for reading as a whole: one that is served as it is, another one opened for the length of the block."""
        with self._serving.publisher.pinned(number) as served:
            if served is not None:
                yield served
                return
        with self._switch, self._serving.publisher.pinned(number) as served:
            if served is not None:  # switched to meanwhile
                yield served
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
            if number not in self.served.versions:
                self._forget(number)
                files.remove_tree(where.root)
                with self._serving.write, contextlib.suppress(StorageError):
                    self._record.settle()  # there is room now
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

    def drop(self, number: int) -> None:
        """Delete a version that is not served, a damaged one as well. Its memory and disk come back."""
        with self._switch:
            if number in self._loading:
                raise Conflict(f"version {number} of {self.name!r} is being loaded")
            if number in self.damaged:
                files.remove_tree(self.where.version(number).root)
                del self.damaged[number]
                return
            info = self._info(number)
            if number == self.active_version:
                raise Conflict(f"version {number} of {self.name!r} is active; activate another one first")
            if number == self.canary_number:
                raise Conflict(f"version {number} of {self.name!r} is the canary; withdraw it first")
            self._wait_retired(number)
            with self._serving.write:
                self._record.settle()  # CURRENT must not go on naming it
            try:
                files.remove_tree(info.where.root)
            finally:
                if not files.exists(
                    info.where.record
                ):  # what is left of it has lost its name, and goes at the next start
                    self._forget(number)

    # --- background

    def _keep_house(self) -> None:
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
            number
            for number in self.versions
            if active is not None and number < active and number not in self._loading and number != self.canary_number
        ]
        for number in older[: max(0, len(older) - self._shared.settings.keep_versions)]:
            if not self._keeper.is_retiring(number):
                self.drop(number)
                log.info("model %s: dropped version %d, older than those kept", self.name, number)

    def _catch_up_kept(self) -> None:
        """A kept version never falls far behind, so that rollback is quick. One that is damaged keeps no other from it."""
        failed: TierstoreError | None = None
        for info in self.infos():
            behind = (self._deltas.last or 0) - info.watermark
            busy = (
                info.number in self._loading
                or info.number in self.served.versions
                or self._keeper.is_retiring(info.number)
            )
            if behind <= KEPT_LAG or busy or self.is_stale(info):
                continue
            try:
                version = self._open(info)
                try:
                    catch_up(version, self._deltas, self.dense)
                finally:
                    version.close()
            except DeltaError as error:
                log.warning("model %s: version %d cannot be caught up: %s", self.name, info.number, error)
            except TierstoreError as error:
                failed = error
        if failed is not None:
            raise failed

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
