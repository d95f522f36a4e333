"""Begins, releases and closes all models of an open store."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tierstore.engine.lifecycle import earlier_form
from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.errors import Closed, Conflict, StorageError
from tierstore.formats import files
from tierstore.formats.names import DataDirectory, ModelDirectory


class Models:
    """The models of one store, by name. Any thread."""

    def __init__(self, root: DataDirectory, shared: Shared) -> None:
        self.root, self._shared = root, shared  # constant after construction
        self._lock = threading.RLock()
        # guarded by _lock; changed in one step each, so that readers need no lock
        self._models: dict[str, Model] = {}
        self._loads: Counter[str] = Counter()  # model → loads under way
        self.closed = False  # set when the store closes: after that nothing is released

    def names(self) -> list[str]:
        """Sorted."""
        return sorted(self._models)

    def all(self) -> list[Model]:
        return list(self._models.values())

    def get(self, name: str) -> Model | None:
        return self._models.get(name)

    def find(self) -> list[Model]:
        """The models in the data directory, not started yet. StorageError if it cannot be read."""
        try:
            names = self.root.models_on_disk()
        except OSError as error:
            raise StorageError(f"cannot read {self.root.models}: {error.strerror or error}") from error
        self._models |= {name: Model(name, self.root.model(name), self._shared) for name in names}
        return self.all()

    def begin(self, name: str) -> Model:
        """A model, made and started if it is new."""
        with self._lock:
            if name not in self._models:
                self._models[name] = Model.begin(name, self.root.model(name), self._shared)
            return self._models[name]

    def adopt(self, name: str, directory: Path, start: Callable[[Model], None]) -> None:
        """Move a model's directory here, and `start` the model. Conflict if there is one of that name. On an error it
        is back in its place, to be tried again.
        """
        with self._lock:
            own = self.root.model(name)
            if self.closed or name in self._models or files.exists(own.root):
                raise Conflict(f"model {name!r} is here already, and is not copied over it")
            earlier_form.convert(ModelDirectory(directory), name)  # of a peer of an earlier release
            try:
                files.rename(directory, own.root)
                self._models[name] = self._adopted(name, start)
            except BaseException:
                if not self.closed and files.exists(own.root):  # else the next start finds it
                    with contextlib.suppress(StorageError):  # of making it durable
                        files.rename(own.root, directory)
                raise

    def _adopted(self, name: str, start: Callable[[Model], None]) -> Model:
        """The model whose directory was moved here, started."""
        model = Model(name, self.root.model(name), self._shared)
        try:
            model.catalogue.find()
            start(model)
            if self.closed:
                raise Closed("the store was closed")
        except BaseException:
            model.close()
            raise
        return model

    def release(self, name: str) -> Model | None:
        """Remove a model that has no version and is not being loaded, to be closed; None if it is not so."""
        with self._lock:
            model = self._models.get(name)
            is_needed = model is None or self.closed or self._loads[name] or not model.catalogue.is_empty
            return None if is_needed else self._models.pop(name)

    @contextlib.contextmanager
    def loading(self, name: str, begin: Callable[[str], object]) -> Iterator[None]:
        """In the block a model, which `begin` makes if it is new, is kept, though it may have nothing."""
        with self._lock:
            self._loads[name] += 1
        try:
            begin(name)
            yield
        finally:
            with self._lock:
                self._loads[name] -= 1

    def close(self) -> None:
        """Close all models, once the placement begins none any more. An error does not stop the others from being
        closed.
        """
        with contextlib.ExitStack() as stack:
            for model in self.all():
                stack.callback(model.close)


def start_background(shared: Shared) -> None:
    """Start the background work over all models."""
    for part in (shared.throttle, shared.warmer, shared.sampler):
        part.start()

    def deal_again() -> None:
        for budget in (shared.host_budget, shared.devices.budget):
            budget.rebalance(lambda: shared.memory.stopping)

    shared.memory.start(shared.tending, {"memory is not dealt again": deal_again})


def stop_background(shared: Shared) -> None:
    """Stop the background work over all models."""
    shared.memory.stop()
    shared.dense.limits.close()
    shared.throttle.close()
    shared.sampler.close()
    shared.warmer.close()


def close_shared(shared: Shared) -> None:
    """Close what models share, after the models."""
    with contextlib.ExitStack() as stack:
        stack.callback(shared.readers.close)
        stack.callback(shared.folding.close)
        stack.callback(shared.tending.close)
        stack.callback(shared.devices.close)
        stack.callback(shared.audit.close)
