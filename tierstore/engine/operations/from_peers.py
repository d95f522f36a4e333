"""Takes over from a peer: acknowledged deltas, which of them are undone, and whole models.

The files of a model's image are read into a directory beside the models, each compared with its checksum. Files that
were read stay if a crash or the peer breaks the copy off, and the next try goes on from them: whole files are compared
with the peer's list, and a partial file is read on from its end. One thread for a data directory.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import xxhash

from tierstore.engine.data.disk_room import check_free
from tierstore.engine.deltas.incoming import IncomingDelta
from tierstore.engine.model import Model
from tierstore.engine.operations.restore import fetch_files
from tierstore.engine.serving.undone import Rollbacks
from tierstore.errors import Closed, Corruption, RemoteUnavailable, StorageError
from tierstore.formats import files
from tierstore.formats.backups import Backup, BackupFile, content_of
from tierstore.formats.names import TEMPORARY, DataDirectory
from tierstore.tiers.upstream.peer import Peer, PeerImage
from tierstore.types import Progress, ProgressFn

SCRATCH = f"{TEMPORARY}copy-"
CHUNK_BYTES = 4 << 20  # of a file that are requested at once
_BLOCK = 4 << 20
_IMAGE_POLL_S = 0.1
IMAGE_S = 600.0  # how long an image may take for a file; each is read as a whole first
_TRIES = 10  # of a copy whose image is replaced meanwhile


def follow_delta(model: Model, data: bytes, seq: int) -> None:
    """Apply a delta that a peer has acknowledged. Parts that do not fit a version are skipped there; an undone delta is
    applied to none.

    Errors as `Store.apply_delta`.
    """
    shared = model.state.shared
    with IncomingDelta(data, model.name, seq).decoded(shared.decoding, shared.overlay_budget) as delta:
        model.apply_delta(delta, data, lenient=True)


def follow_undone(model: Model, rollbacks: Rollbacks) -> None:
    """Undo what a peer has undone, see `Switcher.follow_undone`."""
    with model.changing("rollback") as noted:
        model.switcher.follow_undone(rollbacks)
        noted["undone"] = [list(each) for each in model.log.undone.ranges]


def copies_of(root: Path) -> list[Path]:
    """Leftovers of copies that were broken off, in a data directory."""
    return list(root.glob(f"{SCRATCH}*"))


def copy_model(
    peer: Peer, model: str, root: DataDirectory, reserve: int, progress: ProgressFn, stopping: threading.Event
) -> Path:
    """Copy the directory of a model from a peer, leaving `reserve` bytes free. Returns it, to be moved into the store.

    RemoteUnavailable, NotFound, Overloaded: try again, and it goes on. Corruption for a file that differs from the
    peer's; the next try reads it again. DiskFull if the remaining bytes have no room. Closed once `stopping` is set.
    """
    where = root.root / f"{SCRATCH}{model}"
    image = _await_image(peer, model, progress, stopping)
    for _ in range(_TRIES):
        assert image.backup is not None
        _check(image.backup, model, peer)
        _remove_others(where, image.backup)
        total = sum(file.bytes for file in image.backup.files)
        check_free(root.root, reserve, f"a copy of model {model!r}", total - files.tree_bytes(where))
        fetch_files(_Files(peer, stopping), image.backup, where, 0, total, progress)
        before, image = image, _await_image(peer, model, progress, stopping)
        if image.number == before.number:  # otherwise it was replaced meanwhile: most of the files are the same
            return where
    raise RemoteUnavailable(f"{peer}: its image of model {model!r} is another one each time; it is tried again")


def _await_image(peer: Peer, model: str, progress: ProgressFn, stopping: threading.Event) -> PeerImage:
    done, moved_s = -1, time.monotonic()
    while (image := peer.image(model)).backup is None:
        now_s = time.monotonic()
        if image.done > done:
            done, moved_s = image.done, now_s
        elif now_s - moved_s > IMAGE_S:
            raise RemoteUnavailable(
                f"{peer}: its image of model {model!r} stands still at {image.done} of {image.total} bytes"
            )
        progress(Progress("image", image.done, image.total))
        if stopping.wait(_IMAGE_POLL_S):
            raise _ended(model)
    return image


def _ended(model: str) -> Closed:
    return Closed(f"the copy of model {model!r} was broken off; the next start goes on")


def _check(backup: Backup, model: str, peer: Peer) -> None:
    paths = {file.path for file in backup.files}
    if backup.model != model or len(paths) < len(backup.files):
        raise RemoteUnavailable(f"{peer}: expected the files of model {model!r}, got others")


def _remove_others(where: Path, backup: Backup) -> None:
    """Remove files of an earlier try that this copy does not use."""
    wanted = {where / file.path for file in backup.files}
    wanted |= {_part(where / file.path, file) for file in backup.files}
    for path in sorted(where.rglob("*")) if where.is_dir() else []:
        if path.is_file() and path not in wanted:
            files.remove_file(path)


def _part(to: Path, file: BackupFile) -> Path:
    """The path of a partly received file."""
    return to.with_name(f"{TEMPORARY}{file.xxh3}-{file.bytes}-{to.name}"[:255])


class _Files:
    """The files of an image, read on from where an earlier try ended."""

    def __init__(self, peer: Peer, stopping: threading.Event) -> None:
        self._peer, self._stopping = peer, stopping

    def fetch(self, model: str, file: BackupFile, to: Path) -> None:
        if to.is_file() and to.stat().st_size == file.bytes and content_of(to)[0] == file.xxh3:
            return
        part = _part(to, file)
        digest = self._receive(model, file, part)
        if digest != file.xxh3:
            files.remove_file(part)
            raise Corruption(
                f"{self._peer}: {file.path} of model {model!r} was damaged on its way, or the peer's disk is: "
                f"expected {file.bytes} bytes with xxh3 {file.xxh3}, got {digest}; it is read again"
            )
        files.rename(part, to)

    def _receive(self, model: str, file: BackupFile, part: Path) -> str:
        """Receive the remainder of `part`. Returns the XXH3-64 of its bytes."""
        hashed, size = xxhash.xxh3_64(), 0
        try:
            with open(part, "a+b") as to:
                to.seek(0)
                while size < file.bytes and (block := to.read(min(_BLOCK, file.bytes - size))):
                    hashed.update(block)
                    size += len(block)
                to.truncate(size)
                while size < file.bytes:
                    if self._stopping.is_set():
                        raise _ended(model)
                    received = self._peer.read(model, file.content, size, min(CHUNK_BYTES, file.bytes - size))
                    if not 0 < len(received) <= file.bytes - size:
                        raise RemoteUnavailable(
                            f"{self._peer}: {file.path} of model {model!r} ends after {size} of {file.bytes} bytes"
                        )
                    to.write(received)
                    hashed.update(received)
                    size += len(received)
                files.sync(to, part)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"cannot write {part}: {error.strerror or error}") from error
        return hashed.hexdigest()
