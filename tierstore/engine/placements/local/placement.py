"""The placement of rows on this machine, for a store without a cluster and without upstream nodes. Any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tierstore import open_files
from tierstore.engine.lifecycle.state import Shared
from tierstore.engine.operations.together import Models
from tierstore.engine.placement import ModelVerbs, Refusals
from tierstore.engine.placements.local.rows import LocalRows
from tierstore.engine.placements.local.start import Starter
from tierstore.engine.placements.local.target import LocalTarget
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import ConfigError, unknown_model
from tierstore.formats import files
from tierstore.threads import Pool
from tierstore.tiers.disk.database import MOST_UNUSED
from tierstore.tiers.disk.sealed import BASES

START_THREADS = 8  # models that start at the same time
_OF_A_CHANGE = 8  # files that RocksDB has open beside those of rows during a change, and the log's
BLOCK_CACHE_BYTES = 32 << 20  # of RocksDB's block cache for each open version: mostly index blocks


class LocalPlacement:
    """The `Placement` whose pointers are the documents of models and whose logs are this machine's own."""

    refusals = Refusals({})
    unheard = None
    ready = True

    def __init__(self, shared: Shared, models: Models) -> None:
        self._shared, self._models, self._base = shared, models, shared.settings.base
        self.log_retention_s = shared.settings.log_kept_s

    def start(self) -> None:
        """Start all models in parallel, because each waits for its own files most of the time."""
        every = self._models.find()
        with Pool(max(1, min(START_THREADS, len(every))), "tierstore-start") as threads:
            threads.map(lambda model: model.catalogue.find(), every)
            starters = list(map(Starter, every))
            changing = _OF_A_CHANGE * min(len(starters), MOST_UNUSED)
            needed = changing + sum(starter.files for starter in starters)
            open_files.require(needed, f"what {self._models.root.root} serves")
            with self._shared.host_budget.awaiting(sum(starter.host_need_bytes for starter in starters)):
                threads.map(Starter.start, starters)

    def close(self, close_models: Callable[[], None]) -> None:
        close_models()

    @contextlib.contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Keep a model during a load: a first load that fails leaves no trace of it, unless another load is coming."""
        try:
            with self._models.loading(name, self._models.begin):
                yield
        finally:
            if (empty := self._models.release(name)) is not None:
                empty.close()
                files.remove_tree(empty.where.root)

    def adopt(self, name: str, directory: Path) -> None:
        self._models.adopt(name, directory, lambda model: Starter(model).start(again=True))

    def existing(self, name: str) -> ModelVerbs:
        model = self._models.get(name)
        if model is None:
            raise unknown_model(name, self._models.names())
        switcher, routes = model.switcher, model.routes
        return ModelVerbs(
            leads=lambda: True, load=lambda: LocalTarget(model, self._base, self._shared.settings.own),
            held=model.deltas.held, apply_delta=model.apply_delta,
            next_in_run=model.deltas.next_in_run, apply_run=model.apply_run,
            activate=switcher.activate, rollback=switcher.rollback,
            rollback_to=switcher.rollback_to, canary=switcher.canary, promote=switcher.promote,
            withdraw=routes.withdraw,
            label=routes.label, unlabel=routes.unlabel, deactivate=switcher.deactivate, drop=model.drops.drop,
        )  # fmt: skip

    def open_rows(self, name: str, info: VersionInfo) -> LocalRows:
        if info.base == "remote":
            raise ConfigError(
                f"the rows of version {info.number} of {name!r} are in a cluster: start with --remote, or drop the "
                "version"
            )
        opened = BASES[info.base].open(info.where.db, block_cache_bytes=BLOCK_CACHE_BYTES, reader=self._shared.readers)
        return LocalRows(opened)

    def add_status(self, document: dict[str, Any]) -> dict[str, Any]:
        return document
