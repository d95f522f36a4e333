"""Changes of routing alone: which of the open versions get which requests, now and after a restart.

Any thread; each verb holds the write lock for a moment and waits for no switch. A canary belongs to one active
version: when another becomes active, or none, the canary is promoted (if it is the one) or withdrawn, in the same
step.

After a crash: the model's document (`serving/document.py`) says what serves.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tierstore.engine.lifecycle.rules import no_canary
from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.reads.view import View
from tierstore.engine.serving.document import SavedRoutes, StateDocument, check_label
from tierstore.engine.serving.order import REPLACED
from tierstore.engine.serving.routing import CANARY, STABLE, Routing
from tierstore.engine.serving.undone import Undone
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import Conflict, NotFound

log = logging.getLogger(__name__)


class Routes:
    """Changes of one model's routing: which of its open versions get which requests."""

    def __init__(self, state: ModelState) -> None:
        self._state, self._live, self._name = state, state.live, state.name
        # guarded by the write lock
        self.problem: str | None = None  # why the canary on record is not served
        self.awaited: SavedRoutes | None = None  # that canary, its share and labels; the next start tries again

    # --- publishing

    def publish(
        self,
        served: Routing,
        awaited: SavedRoutes | None = None,
        undone: Undone | None = None,
        built: Sequence[VersionInfo] = (),
        *,
        left: str = REPLACED,
    ) -> None:
        """Serve this routing from now on, and after a restart, together with the canary that is `awaited`.

        In the same step `undone` takes effect, and the lines that were `built` count. `left`: why an active version
        that does not serve any more was left. Holds `write`. On an error nothing has changed.
        """
        state, live = self._state, self._live
        live.check_open()
        start = self._new_start(served.active)
        if start is not None:
            state.log.prepare_restart(start)
        state.publish(self._document(SavedRoutes.for_routing(served, awaited), start, undone, built, left))
        try:
            self._set(served, awaited, start, built)
        except BaseException:  # Ctrl-C, no memory: what is on record must be what serves
            self._set(served, awaited, start, built)
            raise

    def _document(
        self, routes: SavedRoutes, start: int | None, undone: Undone | None, built: Sequence[VersionInfo], left: str
    ) -> StateDocument:
        state = self._state
        document = state.file.document
        accepted = dict(document.accepted)
        for info in state.catalogue.infos():
            if info.number not in routes.serving and info.dense_accepted_upto > info.watermark:
                accepted[info.number] = max(info.dense_accepted_upto, accepted.get(info.number, 0))
        for info in built:
            accepted.pop(info.number, None)
        return replace(
            document,
            routes=routes,
            order=document.order.after(document.routes.serving, routes.serving, left),
            undone=document.undone if undone is None else undone,
            log_start=document.log_start if start is None else start,
            loads={number: of for number, of in document.loads.items() if number not in routes.serving},
            accepted=accepted,
        )

    def _set(
        self, served: Routing, awaited: SavedRoutes | None, start: int | None, built: Sequence[VersionInfo]
    ) -> None:
        """Serve what is on record. May be done twice."""
        state, live = self._state, self._live
        if start is not None:
            state.log.restarted(start)
        state.catalogue.replace(built)
        if awaited is None and self.problem is not None:
            log.warning("model %s: no longer on record: %s", self._name, self.problem)
            self.problem = None
        self.awaited = awaited
        for view in live.served.views:
            if served.view_of(view.open_version) is None:
                # before it is out of sight: a thread that waits for the version to be closed must find it in one place
                state.retiring.add(view.open_version)
        live.set(served)
        self._note_shares(served)

    @contextlib.contextmanager
    def beside_canary(self, share: float) -> Iterator[None]:
        """In the block a canary of that share is opened: the active version makes do with the memory of the others."""
        self._note_shares(replace(self._live.served, share=share))
        try:
            yield
        except BaseException:
            self._note_shares(self._live.served)
            raise

    def _note_shares(self, served: Routing) -> None:
        """Have memory divided by the versions' shares of the requests."""
        for view in served.views:
            share = served.share if view is served.canary else 1.0 - served.share
            if share != view.open_version.request_share:
                view.open_version.request_share = share
                self._state.shared.memory.wake()

    def _new_start(self, active: View | None) -> int | None:
        """The seq after which the log begins, or begins again as the active version's snapshot reaches beyond it; None
        if it goes on.
        """
        if active is None:
            return None
        last, watermark = self._state.log.last, active.open_version.watermark
        return watermark if last is None or watermark > last else None

    # --- the canary

    @property
    def canary(self) -> int | None:
        """The canary's number, also if it could not be served after a restart; None if there is none."""
        if self._live.served.canary is not None:
            return self._live.served.canary.version
        return None if self.awaited is None else self.awaited.canary

    def set_share(self, number: int, share: float) -> bool:
        """Set the canary's share. False, with nothing changed, if the canary is not version `number`."""
        with self._live.write:
            served = self._live.served
            if served.canary is None or served.canary.version != number:
                return False
            self.publish(replace(served, share=share))
            return True

    def promote(self, number: int, left: str = REPLACED) -> bool:
        """Make the canary the active version. False, with nothing changed, if the canary is not version `number`.
        `left`: why the active one is left.
        """
        with self._live.write:
            served = self._live.served
            if served.canary is None or served.canary.version != number:
                return False
            labels = {name: version for name, version in served.labels.items() if version == number}
            self.publish(Routing(served.canary, labels=labels), left=left)
        return True

    def withdraw(self) -> int:
        """Stop serving the canary; the version is kept, its labels are removed. Returns its number."""
        with self._live.write:
            served, number = self._live.served, self.canary
            if number is None:
                raise self.no_canary()
            labels = {name: version for name, version in served.labels.items() if version != number}
            self.publish(Routing(served.active, labels=labels))
            return number

    def no_canary(self) -> Conflict:
        return no_canary(self._name, self.problem)

    # --- labels

    def label(self, name: str, number: int) -> None:
        """Give a serving version a label, which it has until it stops serving. Conflict for a version that does not
        serve.
        """
        check_label(name)
        with self._live.write:
            info, served = self._state.catalogue.info(number), self._live.served
            if served.numbered(number) is None:
                serves = " and ".join(map(str, served.versions)) or "nothing"
                raise Conflict(
                    f"label {name!r} may only point to what is served, and {self._name!r} serves {serves}, not "
                    f"{info.number}; activate it or make it the canary first"
                )
            labels = {**served.labels, name: number}
            self.publish(replace(served, labels=labels), self.awaited and self.awaited.without_label(name))

    def unlabel(self, name: str) -> None:
        """Remove a label. NotFound if there is none of that name, Conflict for `stable` and `canary`."""
        if name in (STABLE, CANARY):
            raise Conflict(f"label {name!r} cannot be removed: it always stands for the {name} version")
        with self._live.write:
            served, awaited = self._live.served, self.awaited
            if not isinstance(name, str) or (
                name not in served.labels and (awaited is None or name not in awaited.labels)
            ):
                raise NotFound(
                    f"model {self._name!r} has no label {name!r}; it has {', '.join(served.all_labels()) or 'none'}"
                )
            labels = {other: version for other, version in served.labels.items() if other != name}
            self.publish(replace(served, labels=labels), awaited and awaited.without_label(name))
