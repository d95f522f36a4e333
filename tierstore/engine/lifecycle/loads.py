"""The claims of loads on a version's directory and on the log, and what happens to both at their end.

Any thread; the heavy work of a load is in `operations/load.py`. After a crash see `unfinished.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from tierstore.engine.lifecycle.opening import Opener
from tierstore.engine.lifecycle.rules import is_waiting
from tierstore.engine.lifecycle.state import ModelState
from tierstore.engine.lifecycle.unfinished import clear_for
from tierstore.errors import Conflict, LoadCancelled, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.ingest.bulkload import can_go_on
from tierstore.types import Progress, ProgressFn


class Loads:
    """The claims of one model's loads on directories of versions and on the log."""

    def __init__(self, state: ModelState, opener: Opener) -> None:
        self._state, self._opener = state, opener
        self._live, self._catalogue, self._log = state.live, state.catalogue, state.log

    @contextlib.contextmanager
    def claim(self, number: int, delta_seq: int, identity: str, activate: bool) -> Iterator[ProgressFn]:
        """Reserve a version's directory, and the log from `delta_seq` on, for a load; an error removes the directory.

        It stays if the version was loaded and only the switch failed, if it serves meanwhile, or if a load of the same
        snapshot, by its `identity`, can go on from it. The version may be there already, if only its switch failed. If
        the model was closed, the directory may belong to another process by now.
        """
        where = self._catalogue.where(number)
        with self._live.write:
            self._catalogue.check_readable()  # such a version may be among them
            complete = number in self._catalogue
            same = self._state.file.document.loads.get(number) == identity
            self._check(number, delta_seq, same=same)
            if not complete:
                self._check_number(number, activate=activate)
                # what is on record of an earlier version of that number means nothing any more
                document = self._state.file.document.without_version(number)
                others = {
                    n: of for n, of in document.loads.items() if n > number or n not in self._catalogue.unfinished
                }
                self._state.publish(replace(document, loads={**others, number: identity}))
            trash = self._catalogue.discard_unfinished_up_to(number)
            self._catalogue.loading[number] = delta_seq, Progress("start")

        def note(progress: Progress) -> None:
            self._live.check_open()
            self._catalogue.loading[number] = delta_seq, progress

        try:
            if not complete:
                clear_for(where)
            for path in trash:
                files.remove_leftover(path)
            yield note
            with self._live.write, contextlib.suppress(StorageError):  # it only says that the load can go on
                self._state.publish(self._state.file.document.without_load(number))
        except BaseException as error:
            self._clean_up(number, error)
            raise
        finally:
            with self._live.write:
                self._catalogue.loading.pop(number, None)
                self._catalogue.damaged.pop(number, None)  # its directory was replaced, or removed

    def _check(self, number: int, delta_seq: int, *, same: bool) -> None:
        """Conflict or SnapshotError if such a load is impossible; `same`: the last one was of the same snapshot. Holds
        `write`.
        """
        name, is_caught_up = self._state.name, self._state.shared.placement.refusals.allow("catch_up")
        start = self._log.start if is_caught_up else None  # otherwise the target must know what it lacks
        if number in self._catalogue.loading:
            raise Conflict(f"version {number} of {name!r} is being loaded already")
        if number in self._catalogue and (number in self._live.served.versions or not same):
            raise Conflict(
                f"version {number} of {name!r} is there already; activate it, or drop it first, or give the snapshot "
                "a new version"
            )
        if start is not None and delta_seq < start:
            raise SnapshotError(
                f"delta_seq is {delta_seq}, but the delta log begins after {start}, so the deltas in between are gone; "
                f"export a snapshot with delta_seq {start} or later",
                file="snapshot.json",
            )
        if (lost := self._log.lost_above(delta_seq)) is not None:
            raise SnapshotError(
                f"delta_seq is {delta_seq}, and it could not be caught up: {lost}", file="snapshot.json"
            )

    def _check_number(self, number: int, *, activate: bool) -> None:
        """Conflict if there are as many versions as allowed. Holds `write`."""
        name, settings, served = self._state.name, self._state.shared.settings, self._live.served.versions
        there = {*self._catalogue.numbers, *self._catalogue.loading} - {number}
        most, order = settings.quota_of(name).versions, self._state.file.document.order
        if most is not None and len(there) >= most:
            free = order.first_to_go(there - {*served, *self._catalogue.loading})
            what = (
                f"drop one first: {free}"
                if free
                else "it serves or loads them all, so deactivate one or raise the quota"
            )
            raise Conflict(f"model {name!r} has {len(there)} versions, its quota is {most}; {what}")
        # nothing drops these
        active = self._live.active_version
        waiting = sorted(n for n in there if is_waiting(n, active, order) and n not in served)
        most = settings.keep_versions + 1
        if not activate and len(waiting) >= most:
            raise Conflict(
                f"model {name!r} has versions that were loaded and never activated: {waiting}; "
                f"keep_versions={settings.keep_versions} allows {most} of them, so activate one or drop one first"
            )

    def _clean_up(self, number: int, error: BaseException) -> None:
        catalogue, state = self._catalogue, self._state
        if number in catalogue and (not isinstance(error, SnapshotError) or isinstance(error, LoadCancelled)):
            error.add_note(f"version {number} of {state.name!r} is loaded all the same, and kept; it is not active")
            return
        # a complete version may be on its way to be served, by another thread's switch
        with state.switch if number in catalogue else contextlib.nullcontext():
            if not (self._live.closed or number in self._live.served.versions or number in state.retiring):
                catalogue.forget(number)
                self._opener.scanned.close(number)
                if not (can_go_on(error) and catalogue.keep_unfinished(number)):
                    files.remove_tree(self._catalogue.where(number).root)
                    with self._live.write, contextlib.suppress(StorageError):
                        state.publish(state.file.document.without_load(number))
                with self._live.write, contextlib.suppress(StorageError):
                    state.file.repair()  # there is room now
