"""The store: a data directory, open in this process.

Any thread may call anything; `close` waits for nobody, so stop calling first. One process at a time holds the
directory (an flock on LOCK, which the kernel drops with the process).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import urllib.parse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from tierstore.config import Settings, cores, load_settings
from tierstore.engine.budget import HostBudget, OverlayBudget
from tierstore.engine.callbacks import guarded, refuse_inside
from tierstore.engine.changes import changing
from tierstore.engine.checking import verify_store
from tierstore.engine.devices import Devices
from tierstore.engine.epochs import Epochs
from tierstore.engine.loading import load
from tierstore.engine.model import Model
from tierstore.engine.observer import Observer
from tierstore.engine.publisher import Publisher
from tierstore.engine.status import model_status
from tierstore.engine.switching import Shared, ignore
from tierstore.engine.throttle import LookupTimes, Throttle
from tierstore.engine.warming import Warmer
from tierstore.errors import Closed, DeltaError, Locked, NotFound, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.built import open_source
from tierstore.formats.delta import read_delta
from tierstore.formats.names import DataDirectory
from tierstore.formats.regular import read_regular
from tierstore.predict.runtime import Runtime
from tierstore.tiers.background import give_way
from tierstore.tiers.disk import ReaderPool
from tierstore.types import DeltaResult, ProgressFn, VerifyReport

log = logging.getLogger(__name__)

START_THREADS = 8  # models that start at once
SWEEP_S = 5.0  # that `close` waits for the removal of a leftover


def open_store(path: str | Path | None = None, *, config: str | Path | None = None, **settings: Any) -> Store:
    """Open, or begin, the store in the directory `path` (default: the setting `data`).

    Every setting has a keyword, such as `host_budget="4GiB"`; see `tierstore.config.Settings`. Raises Locked if
    another process has it open, ConfigError for a bad setting, StorageError if the directory cannot be used.
    """
    return Store(load_settings(config, **({} if path is None else {"data": path}), **settings))


class Store:
    """Models in one data directory. A context manager; `close` it otherwise."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = DataDirectory(Path(settings.data).absolute())
        files.make_dir(self.root.models)
        self._lock_file = _lock(self.root.lock)
        try:
            # of the processors, what warms a version beside the one that serves takes half at most
            readers = ReaderPool(settings.disk_threads, background=min(settings.disk_threads, max(0, cores() // 2 - 1)))
            self.lookup_times = LookupTimes()
            epochs = Epochs()
            throttle = Throttle(self.lookup_times, epochs.collect, settings.load_p99_ratio)
            self._shared = Shared(
                settings,
                readers,
                HostBudget(settings.host_budget),
                OverlayBudget(settings.overlay_budget),
                Runtime(settings),
                Devices(settings),
                Warmer(self._publishers, settings.warm_rate, settings.hot_keys_every_s, throttle),
                throttle,
                epochs=epochs,
            )
            self._models_lock = threading.Lock()
            self._models: dict[str, Model] = {}
            self._loads: Counter[str] = Counter()  # under way, by model; guarded by _models_lock
            self._closed = False
            self._sweeping = threading.Thread(target=self._sweep, name="tierstore-sweeper", daemon=True)
            try:
                self._start_models()
            except BaseException:
                self._close_models()
                raise
            throttle.start()
            self._shared.warmer.start()
            self._sweeping.start()
        except BaseException:
            _unlock(self._lock_file)
            raise

    def _start_models(self) -> None:
        """Side by side: each waits for its own files most of the time."""
        try:
            names = self.root.models_on_disk()
        except OSError as error:
            raise StorageError(f"cannot read {self.root.models}: {error.strerror or error}") from error
        for name in names:
            self._models[name] = Model(name, self.root.model(name), self._shared)
        models = list(self._models.values())
        with ThreadPoolExecutor(max(1, min(START_THREADS, len(models))), "tierstore-start") as threads:
            for _ in threads.map(Model.find, models):
                pass
            with self._shared.host_budget.awaiting(sum(model.host_need_bytes for model in models)):
                for _ in threads.map(Model.start, models):
                    pass

    def _sweep(self) -> None:
        """Remove what crashes have left; beside what serves, since it may be as large as a version."""
        give_way()
        for model in list(self._models.values()):
            for path in model.leftovers:
                if self._closed:
                    return
                try:
                    files.remove_leftover(path)
                except (
                    StorageError
                ) as error:  # a helper of a killed process may still be writing there; the next start sweeps
                    log.warning("model %s: %s", model.name, error)

    def _publishers(self) -> list[Publisher]:
        return [model.publisher for model in list(self._models.values())]

    @property
    def observers(self) -> list[Observer]:
        """Add to it to be told of deltas and switches."""
        return self._shared.observers

    @property
    def epochs(self) -> Epochs:
        """What compiled readers of views go by."""
        return self._shared.epochs

    def publish_words(self) -> None:
        """Have compiled readers, of which there are some now, find what is served."""
        for name in self.models():
            self.model(name).publisher.publish_words()

    def models(self) -> list[str]:
        """Names of the models there are, sorted."""
        return sorted(self._models)

    def model(self, name: str) -> Model:
        """NotFound, naming those there are, for an unknown one."""
        self._check_open()
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"no model {name!r}; there is {', '.join(self.models()) or 'none yet'}")
        return model

    def load_snapshot(
        self,
        source: str | Path,
        *,
        activate: bool = True,
        progress: ProgressFn | None = None,
        cancelled: threading.Event | None = None,
        model: str | None = None,
    ) -> int:
        """Load the snapshot directory `source`: bulk load, verify, catch up, warm, and switch to it. Returns its version.

        `source` may be what `build_snapshot` has made of one: then it is only copied and verified.
        With `activate` False the version is only kept. `progress` is called as it goes; once it switches, changing
        versions from within that is a Conflict. Set `cancelled` to stop it.
        `model` is the name that is expected. Raises SnapshotError (file, row, reason) for a bad snapshot and Conflict
        for a version that is there already; whatever fails, nothing that served changes. Where only the switch fails, or is
        cancelled, the version is kept, and the error's notes say so.
        """
        self._check_open()
        refuse_inside()  # it would do all its work before it is
        snapshot = open_source(source)
        manifest = snapshot.manifest
        if model is not None and manifest.model != model:
            raise SnapshotError(
                f"expected a snapshot of model {model!r}, came one of {manifest.model!r}", file="snapshot.json"
            )
        with self._models_lock:
            held = self._models.get(manifest.model) or self._begin_model(manifest.model)
            self._loads[held.name] += 1
            aside = any(other.active_version is not None for other in self._models.values())
        try:
            with _changing("load", held, version=manifest.version, source=str(source)):
                return load(
                    held,
                    snapshot,
                    self._shared,
                    activate=activate,
                    aside=aside,
                    progress=progress or ignore,
                    cancelled=cancelled,
                )
        finally:
            with self._models_lock:
                self._loads[held.name] -= 1
                if held.is_empty and not self._loads[held.name] and not self._closed:
                    # a first load that failed leaves no trace of the model, unless another one is coming
                    del self._models[held.name]
                    held.close()
                    files.remove_tree(held.where.root)

    def _begin_model(self, name: str) -> Model:
        where = self.root.model(name)
        try:
            files.make_dir(where.log)
            model = Model(name, where, self._shared)
            try:
                model.find()
                model.start()
            except BaseException:
                model.close()
                raise
            self._models[name] = model
        except BaseException:
            with contextlib.suppress(StorageError):
                files.remove_tree(where.root)
            raise
        return self._models[name]

    def apply_delta(
        self, source: bytes | bytearray | memoryview | str | Path, *, model: str | None = None
    ) -> DeltaResult:
        """Apply a delta, given as bytes or as a path. On return it is durable and visible; see `DeltaResult.applied`.

        `model` is the name that is expected. Raises DeltaError for a bad one, SequenceGap (`expected_seq`) for one out
        of turn, Conflict for a seq held with other content, Overloaded when deltas come faster than they are folded.
        """
        self._check_open()
        data = _delta_bytes(source)
        delta = read_delta(data)
        if model is not None and delta.model != model:
            raise DeltaError(f"expected a delta of model {model!r}, came one of {delta.model!r}")
        return self.model(delta.model).apply_delta(delta, data)

    def activate(self, model: str, version: int, *, force: bool = False, progress: ProgressFn | None = None) -> None:
        """Switch to a kept version: caught up, warmed, then in one step. `force` takes one that is stale.

        To change versions from within `progress`, here and in `rollback` and `canary`, is a Conflict.
        """
        held = self.model(model)
        with _changing("activate", held, force=force or None):
            held.activate(version, force=force, progress=progress or ignore)

    def rollback(self, model: str, *, force: bool = False, progress: ProgressFn | None = None) -> int:
        """Switch to the newest kept version older than the active one. Returns it."""
        held = self.model(model)
        with _changing("rollback", held, force=force or None):
            return held.rollback(force=force, progress=progress or ignore)

    def canary(
        self,
        model: str,
        version: int,
        share: float = 0.05,
        *,
        force: bool = False,
        progress: ProgressFn | None = None,
    ) -> None:
        """Serve a kept version beside the active one, to `share` (0 to 1) of the requests that name no version.

        It is caught up and warmed first; for the version that is the canary already only the share changes.
        """
        held = self.model(model)
        with _changing("canary", held, version=version, share=share, force=force or None):
            held.canary(version, share, force=force, progress=progress or ignore)

    def promote(self, model: str) -> int:
        """Make the canary the active version, in one step. Returns it."""
        held = self.model(model)
        with _changing("promote", held):
            return held.promote()

    def withdraw(self, model: str) -> int:
        """Stop serving the canary; it is kept. Returns it."""
        held = self.model(model)
        with _changing("withdraw", held) as told:
            told["version"] = held.withdraw()
        return int(told["version"])

    def label(self, model: str, name: str, version: int) -> None:
        """Let a label stand for a version that is served, until that is served no more."""
        held = self.model(model)
        with _changing("label", held, label=name, version=version):
            held.label(name, version)

    def unlabel(self, model: str, name: str) -> None:
        """Remove a label."""
        held = self.model(model)
        with _changing("unlabel", held, label=name):
            held.unlabel(name)

    def deactivate(self, model: str) -> None:
        """Stop serving a model, its canary as well; its versions are kept."""
        held = self.model(model)
        with _changing("deactivate", held):
            held.deactivate()

    def drop(self, model: str, version: int) -> None:
        """Delete a version. Conflict for one that is served."""
        held = self.model(model)
        with _changing("drop", held, version=version):
            held.drop(version)

    def verify(self, progress: ProgressFn | None = None) -> VerifyReport:
        """Read every version and every logged delta back and check them."""
        self._check_open()
        refuse_inside()
        throttle = self._shared.throttle
        with throttle.at_work("verify"):
            models = [self._models[name] for name in self.models()]
            return verify_store(models, guarded(progress or ignore), lambda: throttle.share)

    def warm_share(self) -> float:
        """How much of what a start reads into memory is there, 0 to 1; 1 where nothing is to be read."""
        progress = self._shared.warmer.progress()
        return 1.0 if progress is None else progress[0] / max(1, progress[1])

    def throttle(self) -> dict[str, Any]:
        """How fast background work may go beside look-ups, and why; see `Throttle.status`."""
        return self._shared.throttle.status()

    def warming(self) -> dict[str, int] | None:
        """How far the warm-up after the start is: `{"done", "total"}` in keys; None where it is over."""
        progress = self._shared.warmer.progress()
        return None if progress is None else dict(zip(("done", "total"), progress, strict=True))

    def status(self, model: str | None = None) -> dict[str, Any]:
        """The status document: `{"models": {name: …}}`, with the store's own bounds beside it."""
        self._check_open()
        names = self.models() if model is None else [self.model(model).name]
        shared = self._shared
        shared.epochs.collect()
        return {
            "models": {name: model_status(self._models[name]) for name in names},
            "warming": self.warming(),
            "throttle": self.throttle(),
            "host_budget": {"used": shared.host_budget.used, "total": shared.host_budget.total},
            "overlay_budget": {"used": shared.overlay_budget.used, "total": shared.overlay_budget.total},
            "device_budget": {"used": shared.devices.budget.used, "total": shared.devices.budget.total},
            "device": shared.devices.status(),
        }

    def close(self) -> None:
        """Stop background work, close every version, and let go of the directory."""
        if self._closed:
            return
        refuse_inside()
        self._closed = True
        try:
            self._close_models()
        finally:
            _unlock(self._lock_file)

    def _close_models(self) -> None:
        self._shared.throttle.close()
        self._shared.warmer.close()
        if self._sweeping.ident is not None:
            self._sweeping.join(SWEEP_S)  # what it leaves, the next start removes
        with contextlib.ExitStack() as stack:  # one that fails keeps no other from being closed
            stack.callback(self._shared.readers.close)
            stack.callback(self._shared.devices.close)
            for model in self._models.values():
                stack.callback(model.close)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the store was closed")

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _changing(change: str, model: Model, **fields: Any) -> contextlib.AbstractContextManager[dict[str, Any]]:
    return changing(change, model.name, lambda: model.active_version, **fields)


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"cannot use {path.parent} as a data directory: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise Locked(
            f"{path.parent} is open in another process{f' (pid {holder})' if holder else ''}; if that is a service, talk to it with --url"
        ) from None
    with contextlib.suppress(OSError):  # only for whoever wonders; a full disk must not keep the store from opening
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that this one forked has the lock open too, and may live on
    os.close(descriptor)


def _delta_bytes(source: bytes | bytearray | memoryview | str | Path) -> bytes | memoryview:
    if isinstance(source, bytes):
        return source
    if isinstance(source, (bytearray, memoryview)):
        return memoryview(source).cast("B")
    path = (
        Path(urllib.parse.unquote(source.removeprefix("file://")))
        if isinstance(source, str) and source.startswith("file://")
        else Path(source)
    )
    try:
        return read_regular(path)
    except OSError as error:
        raise DeltaError(f"cannot read the delta {path}: {error.strerror or error}") from error
