"""Writing to object storage: files of a local directory are uploaded under the same names below a
URL, each whole or not at all.

An upload is tried again until it has come whole, like a range that is read (`patience.py`). What is written last makes
the others count, so a process that dies before that leaves objects that nothing accepts.

`Uploads` belongs to one thread; two of its own upload.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from tierstore.errors import Conflict, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.buckets import Bucket
from tierstore.formats.objects import entries
from tierstore.formats.patience import PATIENCE_S, QUICK_PATIENCE_S, until_done
from tierstore.threads import Pool

log = logging.getLogger(__name__)

_THREADS = 2
_WAITING = 2  # files that are written and not yet uploaded, beside those that are


def check_nothing_at(url: str) -> None:
    """Conflict where there are objects below `url`. MissingExtra, StorageError."""
    try:
        found = entries(url)
    except SnapshotError as error:
        raise StorageError(str(error)) from error
    if found is not None and any(found):
        raise Conflict(f"{url} exists already; expected a URL with nothing below it")


@contextlib.contextmanager
def scratch_directory(within: str | Path | None, name: str) -> Iterator[Path]:
    """A directory for the block, in `within` or where temporary files are."""
    where = Path(tempfile.mkdtemp(prefix=name, dir=within))
    try:
        yield where
    finally:
        with contextlib.suppress(StorageError):
            files.remove_tree(where)


class Uploads:
    """Uploads to below `url`. End it with `close` or `abort`."""

    def __init__(self, url: str, directory: Path) -> None:
        """`directory` is where the files are before.

        MissingExtra where the library for the storage is not installed.
        """
        self._url, self._directory = url.rstrip("/"), directory
        self._bucket = Bucket(self._url, sends=True)
        self._threads = Pool(_THREADS, "tierstore-uploads")
        self._pending: set[Future[None]] = set()
        self._started: list[str] = []  # keys that may be there by now, in order
        self._ended = threading.Event()

    def exists(self, name: str) -> bool:
        """Whether there is such an object. StorageError."""
        what, key = f"{self._url} cannot be read", self._bucket.key_of(name)
        try:
            return until_done(what, lambda _: self._bucket.exists(key), patience_s=QUICK_PATIENCE_S)
        except PermissionError as error:
            raise StorageError(f"{what}: {error}") from error

    def add(self, path: Path) -> None:
        """Upload a file, or all below a directory, in the background; then it is removed here.

        Waits while too many are waiting.

        StorageError where an upload failed, this one or an earlier one.
        """
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_dir():
                continue
            self._wait_for(_THREADS + _WAITING - 1)
            self._started.append(self._key_of(file))
            self._pending.add(self._threads.submit(self._upload, file))

    def finish_with(self, path: Path) -> None:
        """Upload this file when all others are there, and return when it is. StorageError."""
        self._wait_for(0)
        self.add(path)
        self._wait_for(0)

    def close(self) -> None:
        """End the threads; everything was uploaded."""
        self._threads.shutdown()

    def stop(self) -> None:
        """End the uploads; what was written stays."""
        self._ended.set()
        self._threads.shutdown(cancel_futures=True)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there. StorageError."""
        try:
            self._bucket.remove(self._bucket.key_of(name))
        except OSError as error:
            raise StorageError(f"cannot remove {self._url}/{name}: {error}") from error

    def abort(self) -> None:
        """End the uploads, and remove what they have written; the last first, as that makes the others count."""
        self.stop()
        for key in reversed(self._started):
            try:
                self._bucket.remove(key)
            except OSError as error:
                log.warning("%s is left, as it cannot be removed: %s", key, error)

    def _key_of(self, file: Path) -> str:
        return self._bucket.key_of(file.relative_to(self._directory).as_posix())

    def _wait_for(self, most: int) -> None:
        """Wait until at most so many uploads are pending."""
        while len(self._pending) > most:
            done, _ = wait(self._pending, return_when=FIRST_COMPLETED)
            self._pending -= done
            for upload in done:
                upload.result()

    def _upload(self, file: Path) -> None:
        key, size = self._key_of(file), file.stat().st_size

        def put(_: float) -> None:
            self._bucket.send(key, file)
            found = self._bucket.size(key)
            if found != size:
                raise OSError(f"it has {found:,} bytes there, and {size:,} here")

        what = f"cannot write {self._url}/{file.relative_to(self._directory).as_posix()}"
        try:
            until_done(what, put, patience_s=PATIENCE_S, ended=self._ended)
        except (FileNotFoundError, PermissionError) as error:
            raise StorageError(f"{what}: {error}") from error
        file.unlink()


def upload_tree(directory: Path, url: str, last: str) -> None:
    """Move all files below `directory` to below `url`, the one named `last` at the end.

    StorageError; then nothing is left there.
    """
    uploads = Uploads(url, directory)
    try:
        for file in sorted(directory.rglob("*")):
            if file.is_file() and file != directory / last:
                uploads.add(file)
        uploads.finish_with(directory / last)
    except BaseException:
        uploads.abort()
        raise
    uploads.close()
