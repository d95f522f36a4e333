"""What the next start is to serve: CURRENT, which names the active version, and `routes.json` beside it (`routes.py`).

One change at a time: the caller holds the model's write lock. A change that fails puts back what was there. Where the
disk does not even take that (it is full, say), the files are in doubt: what serves and what they say may differ, and
nothing more is acknowledged until `settle` has put them right.

After a crash: the rename of CURRENT decides, see `write`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tierstore.engine.routes import Routes, read_routes, save_routes
from tierstore.errors import Corruption, StorageError
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory, format_version, parse_version


class Record:
    """That of one model."""

    def __init__(self, where: ModelDirectory) -> None:
        self._where = where
        self._in_doubt: dict[Path, bytes | None] = {}  # what each file should hold

    def current(self) -> int | None:
        """The active version; None where there is none. Corruption if it makes no sense."""
        text = files.read_number(self._where.current)
        if text is None:
            return None
        number = parse_version(text)
        if number is None:
            raise Corruption(f"{self._where.current}: expected a version number, came {text[:40]!r}")
        return number

    def routes(self) -> Routes:
        """What is on record beside the active version. Corruption if it makes no sense."""
        return read_routes(self._where.routes)

    def write(self, routes: Routes, then: Callable[[], None]) -> None:
        """Have the next start serve that, and do what else must not fail. On an error it is as it was before.

        CURRENT comes before the log, which `then` may restart: after a crash in between, the next start restarts it. The
        other way round, the version before would be served without the deltas that the log has just forgotten. And it
        comes before the routes: beside another version than before the old ones mean what they should.
        """
        self.settle()
        current = self._where.current
        before = {path: files.read_bytes(path) for path in (current, self._where.routes)}
        try:
            if routes.active is None:
                files.remove_file(current)
            elif before[current] not in (format_version(routes.active).encode(), files.checked_number(routes.active)):
                files.publish_bytes(current, files.checked_number(routes.active))
            save_routes(self._where.routes, routes)
            then()
        except BaseException:
            self._in_doubt = before  # one that failed may have taken its name all the same
            with contextlib.suppress(StorageError):
                self.settle()
            raise

    def settle(self) -> None:
        """Put right what a change that failed has left; nothing to do after any other. StorageError."""
        for path, content in list(self._in_doubt.items()):
            if content is None:
                files.remove_file(path)
            else:
                files.publish_bytes(path, content)
            del self._in_doubt[path]
