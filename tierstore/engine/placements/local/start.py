"""The start of a model: open what its document has serve, replay the log onto it, and serve.

On the thread that opens the store. It is warmed once it serves (`warm.py`). A version that cannot be opened is
reported by `problem`, and the model waits for another; the other models serve in any case.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from tierstore import open_files
from tierstore.engine.lifecycle.copied import check_version, mark_outdated
from tierstore.engine.lifecycle.state import ignore
from tierstore.engine.model import Model
from tierstore.engine.serving.document import SavedRoutes
from tierstore.engine.serving.routing import Routing
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Corruption, TierstoreError

log = logging.getLogger(__name__)

_OF_ROWS = (".sst", ".sealed", ".rows")


class Starter:
    """The start of one model; after `Catalogue.find`."""

    def __init__(self, model: Model) -> None:
        self._model, self._state, self._opener = model, model.state, model.opener
        self._routes, self._switcher = model.routes, model.switcher

    @property
    def host_need_bytes(self) -> int:
        """Memory of the host tier that the version to be served could use."""
        active = self._state.file.document.routes.active
        info = None if active is None else self._state.catalogue.get(active)
        return 0 if info is None else sum(info.host_needs())

    @property
    def files(self) -> int:
        """The number of row files of the versions to be served, which are open while they are read."""
        served = self._state.file.document.routes.serving
        infos = [self._state.catalogue.get(number) for number in served if number is not None]
        every = (path for info in infos if info is not None for path in info.where.db.rglob("*"))
        return sum(path.suffix in _OF_ROWS for path in every)

    def start(self, *, again: bool = False) -> None:
        """Serve what the last process served, and begin housekeeping. A failure becomes the model's problem.

        again: it can be started again, so what passes (too many open files) is raised.
        """
        state = self._state
        for why in state.log.damage:
            log.error("model %s: %s", state.name, why)
        try:
            state.catalogue.check_readable()
            self._serve_again()
        except Exception as error:  # whatever it is, the other models serve
            if again and open_files.are_too_many(error):
                raise
            state.live.start_problem = str(error)
            state.live.set(Routing(problem=str(error)))
            log.exception("model %s does not serve", state.name)
        self._model.start()

    def _serve_again(self) -> None:
        state, copied = self._state, self._state.shared.copied
        current = state.file.document.routes.active
        for info in state.catalogue.infos():
            if info.number != current or copied:
                self._opener.read_records(info)
        if copied:
            mark_outdated(state, current)
        if current is not None:
            self._serve_current(current)
        with state.live.write:
            state.publish(state.file.document)  # nothing is written unless the copy is of several moments

    def _serve_current(self, current: int) -> None:
        state = self._state
        info = self._current_info(current)
        self._check_copied(info)
        info.dense_accepted_upto = state.log.last or 0
        recorded = state.file.document.routes
        self._serve_active(info, recorded)
        if recorded.canary is not None:
            self._serve_canary(recorded.canary, recorded.share)

    def _current_info(self, current: int) -> VersionInfo:
        catalogue = self._state.catalogue
        info = catalogue.get(current)
        if info is None:
            damaged = catalogue.damaged.get(current)
            why = "is not on disk" if damaged is None else f"is damaged: {damaged}"
            raise Corruption(
                f"{self._state.where.state} has version {current} serve, which {why}; activate one of "
                f"{catalogue.numbers}"
            )
        return info

    def _serve_active(self, info: VersionInfo, recorded: SavedRoutes) -> None:
        # the canary stays on record until it is there as well
        awaited = None if recorded.canary is None else _labelled(recorded, recorded.canary)
        with (
            self._opener.warmed(info, [], force=True, progress=ignore, start=True) as version,
            self._state.live.write,
            self._opener.last_view(version, force=True, start=True) as view,
        ):
            self._routes.publish(Routing(view, labels=_labelled(recorded, info.number).labels), awaited)

    def _serve_canary(self, number: int, share: float) -> None:
        """Serve the recorded canary. A failure is reported, and everything else goes on."""
        try:
            info = self._state.catalogue.info(number)
            self._check_copied(info)
            self._switcher.add_canary(info, share, force=True, progress=ignore, start=True)
        except TierstoreError as error:
            self._routes.problem = f"the canary, version {number}, is not served: {error}"
            log.exception("model %s: %s", self._state.name, self._routes.problem)

    def _check_copied(self, info: VersionInfo) -> None:
        if self._state.shared.copied:
            check_version(self._state, info)


def _labelled(recorded: SavedRoutes, version: int) -> SavedRoutes:
    """The record with the labels of one version."""
    return replace(recorded, labels={name: number for name, number in recorded.labels.items() if number == version})
