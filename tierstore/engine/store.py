"""The store: a data directory, open in this process.

Any thread may call anything; `close` does not wait for calls under way, so stop calling first. One process at a time
holds the directory (`lifecycle/directory_lock.py`); in a child that it forks, the store and its models raise Closed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tierstore.access.audit import Audit
from tierstore.arguments import number_or_none, whole_number
from tierstore.config import Settings, load_settings
from tierstore.config.memory import why_too_much
from tierstore.engine.deltas.incoming import Incoming, IncomingDelta, may_run
from tierstore.engine.deltas.origin import Origin
from tierstore.engine.events.callbacks import guarded, refuse_inside
from tierstore.engine.events.changes import audited
from tierstore.engine.events.observer import Observer
from tierstore.engine.lifecycle import copied, directory_format
from tierstore.engine.lifecycle.directory_lock import lock, unlock
from tierstore.engine.lifecycle.state import ignore, make_shared
from tierstore.engine.lifecycle.throttle import LookupTimes
from tierstore.engine.model import Model
from tierstore.engine.operations.backup import backup
from tierstore.engine.operations.digests import digests
from tierstore.engine.operations.explain import explain
from tierstore.engine.operations.export import ExportOptions, export, new_target
from tierstore.engine.operations.from_peers import copies_of
from tierstore.engine.operations.load import load
from tierstore.engine.operations.parked import ParkedMessages
from tierstore.engine.operations.restore import leftovers_of
from tierstore.engine.operations.status import store_status, with_problems
from tierstore.engine.operations.together import Models, close_shared, start_background, stop_background
from tierstore.engine.operations.verify import verify_store
from tierstore.engine.placement import ModelVerbs
from tierstore.engine.placements.choose import choose_placement
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.publisher import Publisher
from tierstore.errors import (
    Closed,
    InvalidInput,
    RemoteUnavailable,
    SnapshotError,
    StorageError,
    TierstoreError,
    unknown_model,
)
from tierstore.forks import refuse, renew_in_child
from tierstore.formats import files
from tierstore.formats.delta.source import DeltaSource
from tierstore.formats.names import DataDirectory
from tierstore.formats.snapshot.built import open_source
from tierstore.kafka.parked import ParkedFiles
from tierstore.status import StoreStatus
from tierstore.threads import Thread
from tierstore.tiers.background import become_background
from tierstore.types import MAX_PARTITIONS, BackupReport, DeltaResult, ExportReport, ProgressFn, VerifyReport

log = logging.getLogger(__name__)

SWEEP_S = 5.0  # how long `close` waits for the removal of a leftover


def open_store(path: str | Path | None = None, *, config: str | Path | None = None, **settings: Any) -> Store:
    """Open the store in the directory `path`, or create it (default: the setting `data`).

    Every setting has a keyword, such as `host_budget="4GiB"`; see `tierstore.config.Settings`. Raises Locked if
    another process has it open, ConfigError for a bad setting, StorageError if the directory cannot be used.
    """
    return Store(load_settings(config, **({} if path is None else {"data": path}), **settings))


class Store(ParkedMessages):
    """Models in one data directory. A context manager; `close` it otherwise."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = DataDirectory(Path(settings.data).absolute())
        files.make_dir(self.root.models)
        self._lock_file = lock(self.root.lock)
        try:
            directory_format.check(self.root)
            if (why := why_too_much(settings)) is not None:
                log.warning("%s", why)
            self.lookup_times = LookupTimes()
            self.shared = make_shared(settings, self.root.root, self.lookup_times, self._publishers)
            self.shared.copied = copied.prepare(self.root, self._lock_file)
            self._models = Models(self.root, self.shared)
            self.parked_files = ParkedFiles(self.root.parked)  # messages that a source could not apply
            self._sweeping = Thread(target=self._sweep, name="tierstore-sweeper", daemon=True)
            try:
                self.placement = self.shared.placement = choose_placement(self.shared, self._models)
            except BaseException:
                close_shared(self.shared)
                raise
            try:
                self.placement.start()
            except BaseException:
                self._close_models()
                raise
            start_background(self.shared)
            self._sweeping.start()
            renew_in_child(self)
        except BaseException:
            unlock(self._lock_file)
            raise

    def _leftovers(self) -> list[tuple[str, Path]]:
        of_models = [(model.name, path) for model in self._models.all() for path in model.catalogue.leftovers]
        of_others = leftovers_of(self.root.root) + ([] if self.settings.peer else copies_of(self.root.root))
        return of_models + [("of an export, a restore or a copy", path) for path in of_others]

    def _sweep(self) -> None:
        """Remove what crashes left behind, on a thread of its own, as it may be as large as a version."""
        become_background()
        for model, path in self._leftovers():
            if self._models.closed:
                return
            try:
                files.remove_leftover(path)
            except StorageError as error:  # a helper of a killed process may write there; the next start sweeps again
                log.warning("model %s: %s", model, error)

    def _publishers(self) -> list[Publisher]:
        return [model.publisher for model in self._models.all()]

    @property
    def observers(self) -> list[Observer]:
        """Observers of deltas and switches; append yours."""
        return self.shared.observers

    @property
    def audit(self) -> Audit:
        """The audit of changes; transports add the callers that they refused."""
        return self.shared.audit

    @property
    def epochs(self) -> Epochs:
        """The registry of compiled readers, by which they find what is served."""
        return self.shared.epochs

    def publish_words(self) -> None:
        """Publish what is served to compiled readers, which exist from now on."""
        for name in self.models():
            self.model(name).publisher.publish_words()

    def models(self) -> list[str]:
        """Names of the models, sorted."""
        return self._models.names()

    def model(self, name: str) -> Model:
        """The model of that name. NotFound, which names the existing ones, for an unknown name; RemoteUnavailable if
        other machines may have it and do not answer.
        """
        self._check_open()
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            # an unknown name is certain only after all who may have the model have answered
            why = self.placement.unheard
            raise unknown_model(name, self.models()) if why is None else RemoteUnavailable(why)
        return model

    def load_snapshot(
        self, source: str | Path, *, activate: bool = True, progress: ProgressFn | None = None,
        cancelled: threading.Event | None = None, model: str | None = None,
    ) -> int:  # fmt: skip
        """Load the snapshot directory `source`: bulk load, verify, catch up, warm, and switch to it. Returns its
        version.

        `source` may be a version made by `build_snapshot`: then it is only copied and verified. With `activate` False
        the version is only kept. `progress` is called during the load; once it switches, changing versions from within
        that is a Conflict. Set `cancelled` to stop it. `model` is the expected name. Raises SnapshotError (file, row,
        reason) for a bad snapshot and Conflict for an existing version; an error never changes what serves. If only
        the switch fails, or is cancelled, the version is kept, and the error's notes say so.
        """
        self._check_open()
        refuse_inside()  # refused now rather than after all its work
        self.placement.refusals.check("load")
        with audited(self.audit, "load", model, lambda: None, source=str(source)) as noted:
            snapshot = open_source(source, self.settings.own)
            noted["unchanged"] = True  # until it has changed something
        manifest = snapshot.manifest
        if model is not None and manifest.model != model:
            raise SnapshotError(
                f"expected a snapshot of model {model!r}, got one of {manifest.model!r}", file="snapshot.json"
            )
        with self.placement.loading(manifest.model):
            held = self.model(manifest.model)
            aside = any(other.active_version is not None for other in self._models.all())
            drops = held.drops.once_active(manifest.version) if activate else []
            with held.changing("load", version=manifest.version, source=str(source), drops=drops or None):
                return load(
                    held,
                    snapshot,
                    self.placed(held).load(),
                    activate=activate,
                    aside=aside,
                    progress=progress or ignore,
                    cancelled=cancelled,
                )

    def placed(self, model: Model) -> ModelVerbs:
        """The operations that change a model, wherever its rows are."""
        return self.placement.existing(model.name)

    def apply_delta(
        self, source: DeltaSource, *, model: str | None = None, seq: int | None = None, origin: Origin | None = None
    ) -> DeltaResult:
        """Apply a delta, bytes or a path, of this `model` and `seq`; log `origin` with it. On return it is durable and
        visible.

        DeltaError for a bad delta or another one than named, SequenceGap (`expected_seq`) for one out of turn,
        Conflict, Overloaded.
        """
        self._check_open()
        placed = self.placed(self.model((incoming := IncomingDelta(source, model, seq)).header.model))
        if (held := placed.held(incoming.header)) is not None:
            return held
        with incoming.decoded(self.shared.decoding, self.shared.overlay_budget) as delta:
            return placed.apply_delta(delta, incoming.data, origin)

    def apply_run(self, model: str, run: Sequence[tuple[int, DeltaSource, Origin | None]]) -> int:
        """Apply deltas that wait, the next ones of this model, together: durable by one flush of the log, and published
        in one step. Each of `run`: (seq, bytes or path, origin).

        Returns how many of them, from the first on, are durable and visible; the others have changed nothing. It may
        be none: `apply_delta` of the next one says why. For sources that have several deltas at a time.
        """
        self._check_open()
        placed, ready = self.placed(self.model(model)), list[Incoming]()
        if not run or placed.next_in_run() != run[0][0]:
            return 0
        with contextlib.ExitStack() as decoded:
            with contextlib.suppress(TierstoreError):  # of the first that cannot be taken in
                for seq, source, origin in run:
                    incoming = IncomingDelta(source, model, seq)
                    delta = decoded.enter_context(incoming.decoded(self.shared.decoding, self.shared.overlay_budget))
                    if not may_run(delta):
                        break
                    ready.append((delta, incoming.data, origin))
            return placed.apply_run(ready) if ready else 0

    def adopt(self, name: str, directory: Path) -> None:
        """Serve a model whose directory was made on this file system, as by a restore; it is moved into the store.

        Conflict if there is such a model.
        """
        self._check_open()
        self.placement.adopt(name, directory)
        held = self.model(name)
        for observer in self.observers:
            observer.version_switched(name, None, held.active_version)

    def activate(
        self, model: str, version: int, *, force: bool = False, expected_active: int | None = None,
        progress: ProgressFn | None = None,
    ) -> None:  # fmt: skip
        """Switch to a kept version in one step, after it was caught up and warmed. `force` also accepts a stale one.

        With `expected_active`, Conflict if neither that version nor `version` is active. Changing versions from within
        `progress`, here and in `rollback` and `canary`, is a Conflict.
        """
        held, version = self.model(model), whole_number("version", version, 1)
        expected_active = number_or_none("expected_active", expected_active, 1)
        progress = progress or ignore
        drops = held.drops.once_active(version)
        with held.changing("activate", force=force or None, expected_active=expected_active, drops=drops or None):
            self.placed(held).activate(version, force=force, expected_active=expected_active, progress=progress)

    def rollback(
        self, model: str, *, to_seq: int | None = None, force: bool = False, expected_active: int | None = None,
        progress: ProgressFn | None = None,
    ) -> int:  # fmt: skip
        """Switch to the version that served last. Returns it. The one that is left is no target of a rollback until it
        is activated by number, and is dropped before others.

        With `to_seq` the active version stays, and all deltas above that seq are undone: it is as it was right after
        delta `to_seq` was applied. With `expected_active`, Conflict if another version is active: so a rollback that
        is sent again goes back only once.
        """
        held, expected_active = self.model(model), number_or_none("expected_active", expected_active, 1)
        to_seq = number_or_none("to_seq", to_seq, 0)
        if to_seq is not None:
            if force:
                raise InvalidInput("force is for a rollback to another version; expected to_seq without it")
            with held.changing("rollback", to_seq=to_seq, expected_active=expected_active) as noted:
                version = self.placed(held).rollback_to(
                    to_seq, expected_active=expected_active, progress=progress or ignore
                )
                noted["undone"] = [list(each) for each in held.state.log.undone.ranges]
                return version
        with held.changing("rollback", force=force or None, expected_active=expected_active):
            return self.placed(held).rollback(force=force, expected_active=expected_active, progress=progress or ignore)

    def canary(
        self, model: str, version: int, share: float = 0.05, *, force: bool = False, progress: ProgressFn | None = None
    ) -> None:
        """Serve a kept version next to the active one, for `share` (0 to 1) of the requests that name no version.

        It is caught up and warmed first; if it is the canary already, only the share changes.
        """
        held, version = self.model(model), whole_number("version", version, 1)
        with held.changing("canary", version=version, share=share, force=force or None):
            self.placed(held).canary(version, share, force=force, progress=progress or ignore)

    def promote(self, model: str) -> int:
        """Make the canary the active version, in one step. Returns it."""
        held = self.model(model)
        drops = None if held.routes.canary is None else held.drops.once_active(held.routes.canary)
        with held.changing("promote", drops=drops or None):
            return self.placed(held).promote()

    def withdraw(self, model: str) -> int:
        """Stop serving the canary, which is kept. Returns it."""
        held = self.model(model)
        with held.changing("withdraw") as fields:
            fields["version"] = self.placed(held).withdraw()
        return int(fields["version"])

    def label(self, model: str, name: str, version: int) -> None:
        """Give a serving version a label, which it has until it stops serving."""
        held, version = self.model(model), whole_number("version", version, 1)
        with held.changing("label", label=name, version=version):
            self.placed(held).label(name, version)

    def unlabel(self, model: str, name: str) -> None:
        """Remove a label."""
        held = self.model(model)
        with held.changing("unlabel", label=name):
            self.placed(held).unlabel(name)

    def deactivate(self, model: str) -> None:
        """Stop serving a model, also its canary; its versions are kept."""
        held = self.model(model)
        with held.changing("deactivate"):
            self.placed(held).deactivate()

    def drop(self, model: str, version: int) -> None:
        """Delete a version. Conflict for a served one."""
        held, version = self.model(model), whole_number("version", version, 1)
        with held.changing("drop", version=version):
            self.placed(held).drop(version)

    def verify(self, progress: ProgressFn | None = None) -> VerifyReport:
        """Read every version and every logged delta back and check them."""
        self._check_open()
        refuse_inside()
        models = [self.model(name) for name in self.models()]
        return verify_store(models, self.root.root, guarded(progress or ignore), self.shared.throttle)

    def digests(
        self, model: str, *, version: int | str | None = None, seq: int | None = None, buckets: int = 1024,
        listed: Mapping[str, Sequence[int]] | None = None, expired_at_s: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Digests of all rows that a model serves at one seq, for comparing nodes; see `operations/digests.py`.

        Look-ups and deltas go on.
        """
        return digests(self.model(model), version, seq, buckets, listed, expired_at_s)

    def export(
        self, model: str, directory: str | Path, *, version: int | str | None = None, as_version: int | None = None,
        partitions: int | None = None, progress: ProgressFn | None = None, cancelled: threading.Event | None = None,
    ) -> ExportReport:  # fmt: skip
        """Write what a model serves now, with all deltas up to one seq, as a snapshot in the new `directory`, or below
        a URL.

        `version` is a served number or label, by default the active version; `as_version` is the number that the
        snapshot gets, by default the same. With `partitions`, 1 or more, a built version is written. Deltas, switches
        and look-ups go on. Set `cancelled` to stop it: Closed. InvalidInput for string keys that are not kept,
        Conflict for a directory that exists. An error leaves no directory.
        """
        held = self.model(model)
        new_version, count = (
            number_or_none("as_version", as_version, 1),
            number_or_none("partitions", partitions, 1, MAX_PARTITIONS),
        )
        options = ExportOptions(version, new_version, count)
        where = new_target(directory, outside=self.root.root)
        return export(held, where, options, self.root.root, guarded(progress or ignore), cancelled)

    def explain(self, model: str, feature: str, keys: Any, *, version: int | str | None = None) -> dict[str, Any]:
        """Why a few keys are answered as they are, by a served version (number or label; None: the active one).

        Changes nothing.
        """
        return explain(self.model(model), feature, keys, version=version)

    def backup(
        self, model: str, directory: str | Path, *, keep: int = 1, progress: ProgressFn | None = None,
        cancelled: threading.Event | None = None,
    ) -> BackupReport:  # fmt: skip
        """Back up a model as of one moment in a directory or below a URL, where the newest `keep` backups stay; see
        `restore`.
        """
        held, where = self.model(model), new_target(directory, outside=self.root.root, empty=False)
        with held.changing("backup", directory=str(directory)):
            return backup(held, where, keep, guarded(progress or ignore), cancelled)

    def warm_share(self) -> float:
        """The share of a start's warm-up that is done: 0 to 1; 1 if there is nothing to read."""
        return self.shared.warmer.share()

    def unserved(self) -> list[str]:
        """Recorded models that could not be served at the start, and are not served since; their `problem` says why."""
        return sorted(model.name for model in self._models.all() if model.state.live.start_problem is not None)

    def throttle(self) -> dict[str, Any]:
        """How fast background work may go while look-ups are served, and why; see `Throttle.status`."""
        return self.shared.throttle.status()

    def warming(self) -> dict[str, int] | None:
        """Progress of the warm-up after the start: `{"done", "total"}` in keys; None once it is over."""
        progress = self.shared.warmer.progress()
        return None if progress is None else dict(zip(("done", "total"), progress, strict=True))

    def status(self, model: str | None = None) -> StoreStatus:
        """The status document: `{"models": {name: …}, "problems": […]}`, and the store's own bounds."""
        self._check_open()
        names = self.models() if model is None else [self.model(model).name]
        document = store_status({name: self.model(name) for name in names}, self.shared, self.warming())
        return cast(StoreStatus, with_problems(self.placement.add_status(document)))

    def close(self) -> None:
        """Stop background work, close every version, and unlock the directory."""
        if self._models.closed:
            return
        refuse_inside()
        self._models.closed = True
        torn = self.shared.copied and any(model.problem for model in self._models.all())
        try:
            self._close_models()
        finally:
            unlock(self._lock_file, whole=not torn)

    def end_predictions(self) -> None:
        """End the running predictions: a graph may never end by itself."""
        self.shared.dense.limits.end_all()

    def _close_models(self) -> None:
        stop_background(self.shared)
        if self._sweeping.ident is not None:
            self._sweeping.join(SWEEP_S)  # the next start removes what is left
        try:
            self.placement.close(self._models.close)
        finally:
            close_shared(self.shared)

    def _check_open(self) -> None:
        if self._models.closed:
            raise Closed("the store was closed")

    def renew(self) -> None:
        """In a forked child: the store, and what callers may have of it, raise Closed. `close` does nothing."""
        for model in self._models.all():
            model.refuse()
        refuse(self, "close")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
