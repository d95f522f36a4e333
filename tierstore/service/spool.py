"""Snapshots that clients send in pieces, kept below the data directory until a load has taken them.

A client names its upload itself, by a digest of what it has (`client/upload.py`), and says which files there are. So
the same command, run again after whatever cut it off, finds what came before. A piece is acknowledged once it is
flushed. Names on disk are made of parts that `_PART` allows, below a directory of the upload's own.

Any thread; calls may block on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.config import Settings
from tierstore.engine.data.disk_room import check_free
from tierstore.errors import Conflict, DiskFull, InvalidInput, NotFound, StorageError, TierstoreError
from tierstore.formats import files
from tierstore.formats.names import DataDirectory
from tierstore.sizes import size_text

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
MOST_FILES = 100_000
MOST_PARTS = 8
_RECORD = "upload.json"
_FILES = "files"
_MISSING = ".part"  # behind the name of a file that is not whole
_ID = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"[A-Za-z0-9_=,+@-][A-Za-z0-9._=,+@-]{0,127}")
_SWEEP_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Upload:
    """What is being sent: the files of one snapshot or built version of a model, by name, with their bytes."""

    id: str
    model: str
    root: Path
    sizes: Mapping[str, int]
    names: tuple[str, ...]  # of `sizes`, in their order

    @property
    def files(self) -> Path:
        """The directory that a load reads, once all is there."""
        return self.root / _FILES

    def there(self, name: str) -> int:
        """So many bytes of a file have come."""
        path, size = self.files / name, self.sizes[name]
        if path.exists():  # a file is whole under its own name alone
            return size
        try:
            there = _missing(path).stat().st_size
        except FileNotFoundError:
            return 0
        return min(there, max(0, size - 1)) // PIECE_BYTES * PIECE_BYTES

    def document(self) -> dict[str, Any]:
        """`files` in the order in which they were declared: bytes of each that have come."""
        there = [self.there(name) for name in self.sizes]
        return {
            "upload": self.id,
            "model": self.model,
            "piece_bytes": PIECE_BYTES,
            "files": there,
            "bytes": sum(there),
            "total_bytes": sum(self.sizes.values()),
        }


class Spool:
    """The uploads of a service."""

    @classmethod
    def below(cls, settings: Settings) -> Spool:
        """The spool of a service."""
        where, keep_s = DataDirectory(settings.data).uploads, settings.load_retention_s
        return cls(where, settings.spool_budget, settings.disk_reserve, keep_s)

    def __init__(self, root: Path, budget: int | None, reserve: int, retention_s: float) -> None:
        """budget: bytes of all together, None for what the disk has; reserve: bytes to keep free; retention_s: how long
        one stays to which nothing comes.
        """
        self._root, self._budget, self._reserve, self._retention_s = root, budget, reserve, retention_s
        self._lock = threading.Lock()
        # guarded by _lock
        self._known: dict[str, Upload] = {}
        self._busy: dict[str, int] = {}  # id → how many calls or loads have it
        self._changing: dict[str, threading.Lock] = {}
        self._swept_s = 0.0
        if root.is_dir():
            files.sweep(root)
            for path in sorted(root.iterdir()):
                self._find(path)
        self.sweep()

    def declare(self, model: str, name: str, sizes: Mapping[str, int]) -> Upload:
        """The upload `name` of a model, new or begun before: file → bytes.

        InvalidInput for names that cannot be files here, Conflict where the id has other files, DiskFull where there
        is no room.
        """
        if not _ID.fullmatch(name):
            raise InvalidInput(f"upload {name[:40]!r}: expected 32 hexadecimal digits")
        _check_files(sizes)
        self.sweep()
        with self._lock:
            there = self._known.get(name)
            if there is not None:
                if (there.model, dict(there.sizes)) != (model, dict(sizes)):
                    raise Conflict(f"upload {name} has other files, or is of another model")
                os.utime(there.root / _RECORD)
                return there
            total = sum(sizes.values())
            held = sum(sum(of.sizes.values()) for of in self._known.values())
            if self._budget is not None and held + total > self._budget:
                raise DiskFull(
                    f"no room for {size_text(total)} more: {size_text(held)} are being sent, and spool_budget is "
                    f"{size_text(self._budget)}"
                )
            check_free(
                self._root if self._root.exists() else self._root.parent,
                self._reserve,
                "a snapshot that is sent",
                total,
            )
            upload = Upload(name, model, self._root / name, dict(sizes), tuple(sizes))
            files.make_dir(upload.files)
            files.publish_record(upload.root / _RECORD, {"model": model, "files": dict(sizes)})
            self._known[name] = upload
            return upload

    def of(self, model: str, name: str) -> Upload:
        """An upload that was declared. NotFound otherwise."""
        with self._lock:
            upload = self._known.get(name)
        if upload is None or upload.model != model:
            raise NotFound(
                f"no upload {name[:40]!r} of {model!r} here: it was swept or loaded, or another node behind the same "
                "address has it; send all pieces to one node"
            )
        return upload

    def write(self, upload: Upload, number: int, offset: int, piece: memoryview, sha256: str) -> int:
        """Take a piece of file `number`. Returns the bytes of that file that are there, on the drive.

        One that came before changes nothing. InvalidInput where its digest, length or offset is not what they must be,
        Conflict where it does not follow what is there.
        """
        if not 0 <= number < len(upload.sizes):
            raise NotFound(f"upload {upload.id} has {len(upload.sizes)} files, from 0 on; got {number}")
        name = upload.names[number]
        size = upload.sizes[name]
        wanted = min(PIECE_BYTES, size - offset)
        if offset % PIECE_BYTES or wanted <= 0 or len(piece) != wanted:
            raise InvalidInput(
                f"a piece of {len(piece)} bytes at {offset} of {size}: expected {PIECE_BYTES} at a multiple of that, "
                "and what is left at the end"
            )
        if hashlib.sha256(piece).hexdigest() != sha256.lower():
            raise InvalidInput(
                "the piece is not the one whose sha256 was given: it was changed on its way, send it again"
            )
        with self._using(upload):
            there = upload.there(name)
            if there > offset:
                return there
            if there < offset:
                raise Conflict(
                    f"{there} bytes of file {number} are there, so the next piece begins at {there}, not {offset}"
                )
            check_free(upload.root, self._reserve, "a piece of a snapshot", len(piece))
            _append(upload.files / name, offset, piece, whole=offset + len(piece) == size)
            return offset + len(piece)

    @contextlib.contextmanager
    def loading(self, upload: Upload) -> Iterator[None]:
        """While a load reads it. A load that went well has taken it: it is removed."""
        with self._held(upload):
            yield
        try:
            self.discard(upload)
        except TierstoreError as error:  # the load went well all the same
            logger.warning("upload %s stays until it is swept: %s", upload.id, error)

    def whole(self, upload: Upload) -> Path:
        """The directory of a snapshot that is there as a whole. Conflict before."""
        missing = [name for name, size in upload.sizes.items() if size and not (upload.files / name).exists()]
        if missing:
            raise Conflict(
                f"{len(missing)} of {len(upload.sizes)} files of upload {upload.id} are not whole, {missing[0]} among "
                "them: send the rest"
            )
        for name in (name for name, size in upload.sizes.items() if not size):
            path = upload.files / name
            if not path.exists():
                files.make_dir(path.parent)
                path.touch()
        for folder in {(upload.files / name).parent for name in upload.sizes}:
            files.fsync_dir(folder)  # a name may be there whose flush has failed
        os.utime(upload.root / _RECORD)
        return upload.files

    def discard(self, upload: Upload) -> None:
        """Remove it. Conflict while a load reads it or a piece comes."""
        with self._lock:
            if self._busy.get(upload.id):
                raise Conflict(f"upload {upload.id} is being read or written: try again when that is done")
            trash = self._forget(upload)
        if trash is not None:
            files.remove_leftover(trash)

    def _forget(self, upload: Upload) -> Path | None:
        """Take it out. Returns what is left to remove. Holds the lock, as the same id may be declared at once."""
        self._known.pop(upload.id, None)
        self._changing.pop(upload.id, None)
        return files.discard(upload.root)

    def all(self, model: str) -> list[Upload]:
        """The uploads of a model, loaded ones not."""
        with self._lock:
            return [upload for upload in self._known.values() if upload.model == model]

    def sweep(self) -> None:
        """Remove those to which nothing has come for `retention_s`. At most once a minute."""
        with self._lock:
            if time.monotonic() - self._swept_s < _SWEEP_EVERY_S and self._swept_s:
                return
            self._swept_s = time.monotonic()
            known = list(self._known.values())
        for upload in known:
            if time.time() - _touched(upload) <= self._retention_s:
                continue
            with self._lock:
                is_idle = self._known.get(upload.id) is upload and not self._busy.get(upload.id)
                trash = self._forget(upload) if is_idle else None
            if trash is not None:
                files.remove_leftover(trash)

    @contextlib.contextmanager
    def _held(self, upload: Upload) -> Iterator[None]:
        with self._lock:
            if self._known.get(upload.id) is not upload:
                raise NotFound(f"upload {upload.id} is gone")
            self._busy[upload.id] = self._busy.get(upload.id, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._busy[upload.id] -= 1
                if not self._busy[upload.id]:
                    del self._busy[upload.id]

    @contextlib.contextmanager
    def _using(self, upload: Upload) -> Iterator[None]:
        """One piece at a time comes to an upload."""
        with self._held(upload):
            with self._lock:
                lock = self._changing.setdefault(upload.id, threading.Lock())
            with lock:
                yield

    def _find(self, path: Path) -> None:
        """Take up what an earlier process has left, or remove what is no upload."""
        try:
            document = files.read_json(path / _RECORD)
            upload = Upload(path.name, document["model"], path, document["files"], tuple(document["files"]))
        except (StorageError, KeyError, OSError):
            files.remove_tree(path)
            return
        for part in upload.files.rglob(f"*{_MISSING}"):
            # its last piece may have been cut off by a failure of power before it was flushed
            size = part.stat().st_size
            os.truncate(part, max(0, (size - 1) // PIECE_BYTES * PIECE_BYTES))
        self._known[upload.id] = upload


def _check_files(sizes: Mapping[str, int]) -> None:
    if not 0 < len(sizes) <= MOST_FILES:
        raise InvalidInput(f"files: expected 1 to {MOST_FILES}, got {len(sizes)}")
    for name, size in sizes.items():
        parts = name.split("/")
        if len(parts) > MOST_PARTS or not all(_PART.fullmatch(part) for part in parts) or name.endswith(_MISSING):
            raise InvalidInput(
                f"file {name[:80]!r}: expected up to {MOST_PARTS} names between slashes, of letters, digits and "
                "_=,+@.-, none beginning with a dot"
            )
        if size < 0:
            raise InvalidInput(f"file {name[:80]!r}: expected a number of bytes, got {size}")
    folders = {"/".join(name.split("/")[:depth]) for name in sizes for depth in range(1, name.count("/") + 1)}
    if both := folders & sizes.keys():
        raise InvalidInput(f"{min(both)!r} is a file and a folder")


def _missing(path: Path) -> Path:
    return path.with_name(path.name + _MISSING)


def _append(path: Path, offset: int, piece: memoryview, *, whole: bool) -> None:
    part = _missing(path)
    files.make_dir(path.parent)
    try:
        with open(part, "r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)
            files.sync(file, part)
        if whole:
            files.rename(part, path)
    except (OSError, StorageError) as error:
        with contextlib.suppress(OSError):
            os.truncate(part, offset)  # of a piece that is not acknowledged nothing counts
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot write {part}: {error}") from error


def _touched(upload: Upload) -> float:
    times = [upload.root / _RECORD, *upload.files.rglob("*")]
    return max((path.stat().st_mtime for path in times if path.exists()), default=0.0)
