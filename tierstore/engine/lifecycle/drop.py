"""Deleting versions: by a user's request, and surplus versions.

Any thread. A directory first loses its name, under the switch lock, and is then removed without a lock, which may take
long. After a crash in between, the next start removes it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tierstore.engine.events.changes import audited
from tierstore.engine.lifecycle.opening import Opener
from tierstore.engine.lifecycle.routes import Routes
from tierstore.engine.lifecycle.rules import check_unused, surplus_of
from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.serving.order import REPLACED
from tierstore.errors import StorageError
from tierstore.formats import files

log = logging.getLogger(__name__)


class Drops:
    """Drops versions of one model."""

    def __init__(self, state: ModelState, opener: Opener, routes: Routes) -> None:
        self._state, self._opener, self._routes = state, opener, routes
        self._live, self._catalogue = state.live, state.catalogue

    def drop(self, number: int) -> None:
        """Delete a version that is not served, also a damaged or half loaded one; its memory and disk are freed."""
        trash = self._discard(number)
        if trash is not None:
            files.remove_leftover(trash)

    def drop_surplus(self) -> None:
        """Delete versions beyond the number to keep. Does nothing while a switch is under way."""
        trash: list[Path | None] = []
        with self._state.switch.if_free() as held:
            if held:
                for number in self._surplus():
                    with audited(self._state.shared.audit, "drop", self._state.name, lambda: None, version=number):
                        trash.append(self._discard(number))
        for path in trash:
            if path is not None:
                log.info("model %s: drops a version older than those kept: %s", self._state.name, path.name)
                files.remove_leftover(path)

    def _surplus(self) -> list[int]:
        """Unused versions beyond the number to keep."""
        catalogue, keep = self._catalogue, self._state.shared.settings.keep_versions
        used, order = {self._routes.canary, *catalogue.loading}, self._state.file.document.order
        surplus = surplus_of(catalogue.numbers, self._live.active_version, used, keep, order)
        return [n for n in surplus if n not in self._state.retiring and n not in self._opener.scanned]

    def once_active(self, number: int | None = None) -> list[int]:
        """The versions that will be dropped once version `number` is active, by default one newer than all."""
        state, numbers = self._state, self._catalogue.numbers
        if not state.shared.placement.refusals.allow("drop_surplus"):
            return []
        number = max([0, *numbers]) + 1 if number is None else number
        order = state.file.document.order.after(
            (self._live.active_version, self._routes.canary), (number, None), REPLACED
        )
        return surplus_of(numbers, number, (), state.shared.settings.keep_versions, order)

    def _forget(self, number: int) -> None:
        """Take a version off the record; a full disk does not keep it from being dropped."""
        state = self._state
        with self._live.write:
            document = state.file.document.without_version(number)
            try:
                state.publish(document)
            except StorageError as error:  # the next change says so too, as does its directory, which is gone
                log.warning("model %s: version %d is dropped, and still on record: %s", state.name, number, error)
                state.file.amend(document)

    def _discard(self, number: int) -> Path | None:
        """Forget a version, and rename its directory. Returns the path that is still to be removed."""
        state, catalogue = self._state, self._catalogue
        with state.switch:
            catalogue.check_not_loading(number)
            self._live.check_open()
            if number in catalogue.damaged:
                trash = catalogue.discard_damaged(number)
                self._forget(number)
                return trash
            if number in catalogue.unfinished:
                return catalogue.discard_unfinished(number)
            info = catalogue.info(number)
            check_unused(state.name, number, [self._live.active_version], self._routes.canary)
            state.retiring.await_closed(state.name, number)
            with self._live.write:
                state.file.repair()  # the document must not have it serve any more
            self._opener.scanned.close(number)
            for root in [root for root, of in catalogue.replaced.items() if of == number]:
                files.remove_tree(root)  # before the line that counts, or a start would not know what they are
                del catalogue.replaced[root]
            try:
                return files.discard(info.where.root)
            finally:
                if not files.exists(info.where.record):  # its remains have no name, and go at the next start
                    catalogue.forget(number)
                    self._forget(number)
