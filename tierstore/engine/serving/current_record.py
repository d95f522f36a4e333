"""The record of what the next start serves: CURRENT (the active version), `routes.json` and `undone.json`.

Their modules are `routing_record.py` and `undone_record.py`. One change at a time: the caller holds the model's write
lock. A failed change puts back the state before. If even that fails (such as on a full disk), the files are in doubt:
they may differ from what serves, and nothing more is acknowledged until `repair` has corrected them.

After a crash: the rename of CURRENT decides, see `write`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tierstore.engine.serving.routing_record import RoutingRecord, read_routes, save_routes
from tierstore.engine.serving.undone_record import Undone, read_undone, save_undone
from tierstore.errors import Corruption, StorageError
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory, format_version, parse_version


class CurrentRecord:
    """What the next start of one model serves, on record."""

    def __init__(self, where: ModelDirectory) -> None:
        self._where = where
        self._in_doubt: dict[Path, bytes | None] = {}  # file → the content it should have

    def current(self) -> int | None:
        """The active version; None if there is none. Corruption if it is invalid."""
        text = files.read_number(self._where.current)
        if text is None:
            return None
        number = parse_version(text)
        if number is None:
            raise Corruption(
                f"{self._where.current}: expected a version number, got {text[:40]!r}; activate the version that was "
                "served, which the audit names"
            )
        return number

    def routes(self) -> RoutingRecord:
        """The canary, its share and the labels on record. Corruption if it is invalid."""
        return read_routes(self._where.routes)

    def undone(self) -> Undone:
        """The undone deltas, and the lines that count. Corruption if it is invalid."""
        return read_undone(self._where.undone)

    @property
    def in_doubt(self) -> bool:
        """Whether the files may differ from what serves."""
        return bool(self._in_doubt)

    def write(self, routes: RoutingRecord, then: Callable[[], None], undone: Undone | None = None) -> None:
        """Record what the next start serves, and call `then`, which must succeed as well. An error restores the state
        before.

        If `undone` changes, it is written first: after a crash the next start serves the lines that it names, with the
        deltas that it leaves, and does not serve a recorded canary that it makes outdated.

        CURRENT comes before the log, which `then` may restart: after a crash in between, the next start restarts it.
        In the other order the former version would be served without the deltas that the log has just forgotten. And
        CURRENT comes before the routes: the old routes name their active version, and mean nothing for another one.
        """
        self.repair()
        current = self._where.current
        paths = [current, self._where.routes] if undone is None else [self._where.undone, current, self._where.routes]
        before = {path: files.read_bytes(path) for path in paths}
        try:
            if undone is not None:
                save_undone(self._where.undone, undone)
            if routes.active is None:
                files.remove_file(current)
            elif before[current] not in (format_version(routes.active).encode(), files.checked_number(routes.active)):
                files.publish_bytes(current, files.checked_number(routes.active))
            save_routes(self._where.routes, routes)
            then()
        except BaseException:
            self._in_doubt = before  # a failed one may have taken its name all the same
            with contextlib.suppress(StorageError):
                self.repair()
            raise

    def repair(self) -> None:
        """Correct the files after a failed change; nothing to do after any other. StorageError."""
        for path, content in list(self._in_doubt.items()):
            if content is None:
                files.remove_file(path)
            else:
                files.publish_bytes(path, content)
            del self._in_doubt[path]
