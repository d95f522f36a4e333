"""All models of a store started together, and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.model import Model
from tierstore.errors import StorageError
from tierstore.formats.names import DataDirectory

START_THREADS = 8  # models that start at once


def start_models(root: DataDirectory, shared: Shared, models: dict[str, Model]) -> None:
    """Add what is on disk to `models`, and start it: in parallel, because each waits for its own files most of the time."""
    try:
        names = root.models_on_disk()
    except OSError as error:
        raise StorageError(f"cannot read {root.models}: {error.strerror or error}") from error
    for name in names:
        models[name] = Model(name, root.model(name), shared)
    every = list(models.values())
    with ThreadPoolExecutor(max(1, min(START_THREADS, len(every))), "tierstore-start") as threads:
        for _ in threads.map(lambda model: model.catalogue.find(), every):
            pass
        with shared.host_budget.awaiting(sum(model.starter.host_need_bytes for model in every)):
            for _ in threads.map(Model.start, every):
                pass


def start_background(shared: Shared) -> None:
    """Begin what looks after all models from time to time."""
    for part in (shared.throttle, shared.warmer, shared.sampler):
        part.start()


def stop_background(shared: Shared) -> None:
    """End what works beside the models."""
    shared.dense.limits.close()
    shared.throttle.close()
    shared.sampler.close()
    shared.warmer.close()


def close_models(shared: Shared, models: dict[str, Model], last: Callable[[], None] | None) -> None:
    """Close the models, `last`, and what they share. One that fails keeps no other from being closed."""
    with contextlib.ExitStack() as stack:
        stack.callback(shared.readers.close)
        stack.callback(shared.devices.close)
        stack.callback(shared.audit.close)
        if last is not None:
            stack.callback(last)
        for model in models.values():
            stack.callback(model.close)
