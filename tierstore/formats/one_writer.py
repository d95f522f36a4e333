"""A lock for one writer at a time of a place that several processes or machines may write to: a directory, or below a
URL.

A directory has a file that is locked (`flock`), which ends with the process. Below a URL each writer has an object of
its own, which it writes again from time to time; who finds another one's, of less than GONE_S ago, gives way. Both may
do so, where they begin at once. Lists of S3's, Google's and Azure's storage have what was written before them, so two
never go on together.

A crash leaves the file, which locks nothing then, or the object, which counts for GONE_S.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from tierstore.errors import Conflict, StorageError
from tierstore.formats import files
from tierstore.formats.buckets import Bucket
from tierstore.formats.patience import QUICK_PATIENCE_S, until_done

log = logging.getLogger(__name__)

LOCK = "LOCK"
CLAIM = "WRITER-"
GONE_S = 3600.0
RENEW_S = 60.0
T = TypeVar("T")
# to be called again and again while a writer is at work; `at_once`: before it removes what another might need
StillAlone = Callable[[bool], None]


@contextlib.contextmanager
def only_writer(place: Path | str, what: str) -> Iterator[StillAlone]:
    """Be the only writer of a directory, or below a URL, for the block. Conflict, which names `what`, where another is.

    What it gives raises Conflict once that is not so any more. StorageError, MissingExtra.
    """
    if isinstance(place, Path):
        with _locked(place, what):
            yield lambda at_once: None
        return
    claim = _Claim(place, what)
    try:
        claim.check(at_once=True)
        yield claim.check
    finally:
        claim.remove()


@contextlib.contextmanager
def _locked(folder: Path, what: str) -> Iterator[None]:
    path = files.make_dir(folder) / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"cannot use {path}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Conflict(f"{what}: another one is under way there; wait for it to end") from None
    except OSError as error:  # of a file system without locks
        log.warning(
            "%s cannot be locked, so see to it that nobody else writes there: %s", path, error.strerror or error
        )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open too
        os.close(descriptor)


class _Claim:
    """The object of one writer below a URL."""

    def __init__(self, url: str, what: str) -> None:
        self._url, self._what = url, what
        self._bucket, self._name = Bucket(url), CLAIM + uuid.uuid4().hex
        self._renewed_s: float | None = None

    def check(self, at_once: bool) -> None:
        """Conflict where another writer is at work, or has taken this one for gone."""
        now_s = time.monotonic()
        if self._renewed_s is not None:
            if not at_once and now_s - self._renewed_s < RENEW_S:
                return
            if self._name not in self._claims():
                raise Conflict(f"{self._what}: it stood still for so long that another one took its place; try again")
        text = f"{os.uname().nodename} {os.getpid()}".encode()
        self._try(lambda: self._bucket.send(self._bucket.key_of(self._name), text))
        claims = self._claims()
        mine = claims.get(self._name)
        if mine is None:
            raise StorageError(f"{self._url}/{self._name} was written, and is not listed; try again")
        for name, written in claims.items():
            if name != self._name and (mine - written).total_seconds() < GONE_S:
                raise Conflict(
                    f"{self._what}: another one is under way there, which wrote {self._url}/{name} at {written}; wait "
                    f"for it to end. One that was killed counts for {GONE_S / 60:.0f} minutes, or until that object is "
                    "removed"
                )
            if name != self._name:
                self._remove(name)
        self._renewed_s = now_s

    def _claims(self) -> dict[str, datetime]:
        return self._try(lambda: self._bucket.written(CLAIM))

    def remove(self) -> None:
        """Let others write."""
        self._remove(self._name)

    def _remove(self, name: str) -> None:
        try:
            self._bucket.remove(self._bucket.key_of(name))
        except OSError as error:
            log.warning("%s/%s is left, as it cannot be removed: %s", self._url, name, error)

    def _try(self, call: Callable[[], T]) -> T:
        what = f"cannot write {self._url}"
        try:
            return until_done(what, lambda _: call(), patience_s=QUICK_PATIENCE_S)
        except PermissionError as error:
            raise StorageError(f"{what}: {error}") from error
