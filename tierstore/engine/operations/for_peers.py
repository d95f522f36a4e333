"""A node's answers to its peers: what its logs hold, and its models at one moment, file by file, as in a backup.

There is one image of a model at a time, for all peers that copy it, held while they read it. A thread of low priority
makes it, and it is removed when nobody has asked for HOLD_S. The log goes on meanwhile: a peer gets what came after
the image as deltas, so an image from before the log begins is made again. Any thread may call anything. A crash leaves
an image, which the next start removes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierstore.engine.model import Model
from tierstore.engine.operations.backup import SCRATCH, entry_of, files_of, make_image
from tierstore.engine.operations.low_priority import low_priority
from tierstore.errors import Closed, Conflict, InvalidInput, NotFound, StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.backups import Backup, BackupFile
from tierstore.formats.names import ModelDirectory
from tierstore.formats.uploads import scratch_directory
from tierstore.threads import Thread
from tierstore.tiers.background import Pace

log = logging.getLogger(__name__)

HOLD_S = 300.0  # how long an image is held after the last request
READ_BYTES = 8 << 20  # the most of a file that is read at once


class Image:
    """One image, made and held by a thread of its own."""

    def __init__(self, model: Model, number: int) -> None:
        # constant after construction
        self.number, self.model = number, model
        self._changed = threading.Condition()
        # guarded by _changed
        self.used_s = time.monotonic()
        self.done = self.total = 0  # bytes that were read for the list of files, and of how many
        self.backup: Backup | None = None  # set once it is made
        self.error: Exception | None = None
        self._paths: dict[str, Path] = {}  # content → path
        self._ended = threading.Event()
        Thread(target=self._run, name="tierstore-image", daemon=True).start()

    @property
    def usable(self) -> bool:
        """Whether it is being made, or is there and the log has everything since."""
        if self._ended.is_set() or self.error is not None:
            return False
        return self.backup is None or self.backup.seq >= (self.model.log.start or 0)

    def touch(self) -> None:
        with self._changed:
            self.used_s = time.monotonic()

    def end(self) -> None:
        """Release it."""
        with self._changed:
            self._ended.set()
            self._changed.notify_all()

    def path(self, content: str) -> Path:
        """The path of a content. NotFound."""
        with self._changed:
            self.used_s = time.monotonic()
            if self._ended.is_set() or content not in self._paths:
                raise NotFound(
                    f"the image of model {self.model.name!r} that is held has no {content}: ask for the image again"
                )
            return self._paths[content]

    def _run(self) -> None:
        model = self.model
        try:
            with scratch_directory(model.where.root, SCRATCH) as scratch:
                low_priority(model.state.shared.throttle, "image", lambda _: self._make(scratch / "image"), self._ended)
                with self._changed:
                    while (remaining_s := self.used_s + HOLD_S - time.monotonic()) > 0 and not self._ended.is_set():
                        self._changed.wait(remaining_s)
                    self._ended.set()
        except Exception as error:
            if not isinstance(error, TierstoreError):
                log.exception("model %s: no image for a peer", model.name)
            self.error = error
        finally:
            self._ended.set()

    def _make(self, root: Path) -> None:
        throttle = self.model.state.shared.throttle
        pace = Pace(lambda: throttle.share)
        active, seq = make_image(self.model, ModelDirectory(root))
        self.total = files.tree_bytes(root)
        entries: list[BackupFile] = []
        for path in files_of(root):
            if self._ended.is_set():
                raise Closed(f"the image of {self.model.name!r} is not needed any more")
            entries.append(entry_of(path, path.relative_to(root).as_posix()))
            self._paths[entries[-1].content] = path
            self.done += entries[-1].bytes
            pace.sleep()
        self.backup = Backup(model=self.model.name, version=active, seq=seq, files=tuple(entries))


class PeerSide:
    """A store's answers to other nodes. `models` gives all models, `model` one by its name.

    `close` it before the store.
    """

    def __init__(self, models: Callable[[], list[str]], model: Callable[[str], Model]) -> None:
        self.node = secrets.token_hex(8)  # by which a node recognizes itself among the peers it is given
        self._models, self._model = models, model
        self._numbers = itertools.count(time.time_ns())  # no two images have the same number, also after a restart
        self._lock = threading.Lock()
        # guarded by _lock
        self._of: dict[str, Image] = {}
        self._closed = False

    def logs(self) -> dict[str, Any]:
        """By model what its log holds: deltas `start + 1` to `last`, its rollbacks, and its faults."""
        found = {}
        for name in self._models():
            with contextlib.suppress(NotFound):  # it is gone meanwhile
                model = self._model(name)
                log = model.state.log
                found[name] = {
                    "active": model.active_version,
                    "start": log.start,
                    "last": log.last,
                    "damage": "; ".join(log.damage) or None,
                    "rollbacks": [list(each) for each in log.undone.rollbacks],
                }
        return found

    def digest(self, name: str, after: int, upto: int) -> str | None:
        """`DeltaLog.digest_of`. NotFound for an unknown model."""
        return self._model(name).state.log.digest_of(after, upto)

    def image(self, name: str) -> dict[str, Any]:
        """The image of a model, begun if there is none: its number and its `backup`, or its progress."""
        image = self._image(name)
        if image.backup is None:
            return {"number": image.number, "done": image.done, "total": image.total}
        return {"number": image.number, "backup": image.backup.model_dump(mode="json")}

    def _image(self, name: str) -> Image:
        """NotFound; Conflict for a model that has nothing to copy; the error of a failed image."""
        model = self._model(name)
        model.state.shared.placement.refusals.check("backup", model=name)
        if model.active_version is None:
            raise Conflict(f"model {name!r} serves no version that could be copied")
        with self._lock:
            if self._closed:
                raise Closed("the store was closed")
            image = self._of.get(name)
            if image is not None and image.error is not None:
                del self._of[name]
                raise image.error
            if image is None or image.model is not model or not image.usable:
                if image is not None:
                    image.end()
                image = self._of[name] = Image(model, next(self._numbers))
        image.touch()
        return image

    def read(self, name: str, content: str, begin: int, count: int) -> bytes:
        """Bytes of a file of the held image. NotFound, StorageError."""
        if not 0 < count <= READ_BYTES:
            raise InvalidInput(f"count: expected 1 to {READ_BYTES} bytes, got {count}")
        with self._lock:
            image = self._of.get(name)
        if image is None:
            raise NotFound(f"no image of model {name!r} is held: ask for one")
        path = image.path(content)
        try:
            with open(path, "rb") as file:
                file.seek(begin)
                return file.read(count)
        except FileNotFoundError as error:
            raise NotFound(f"the image of model {name!r} is gone: ask for another one") from error
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Release all images."""
        with self._lock:
            self._closed = True
            for image in self._of.values():
                image.end()
