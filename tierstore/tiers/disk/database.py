"""One open RocksDB directory: who uses it, how it is closed, and how it is opened for writing once the disk has room.

RocksDB crashes the process if it is used after it is closed. So every use is within `entered`, and `close` waits until
nobody is within it. Any thread may call anything, but `ingest` is for one writer.

Full disk: RocksDB cannot open a directory for writing then. It is opened for reading, and
the next `ingest` tries again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import rocksdict

from tierstore.errors import Closed, DiskFull, StorageError
from tierstore.formats.regular import check_directory
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.disk.cursor import Cursor
from tierstore.tiers.disk.rocks import driver_errors, scan_options, tier_options

log = logging.getLogger(__name__)

_L0_MAX = 24  # RocksDB does not hold ingests back, however many files pile up
_MERGE_POLL_S = 0.01


class Database:
    """Opened at construction. Raises StorageError, Locked, Corruption, or DiskFull for a `new` one."""

    def __init__(
        self, path: Path, *, block_cache_bytes: int, open_threads: int, new: bool = False, read_only: bool = False
    ) -> None:
        # constant after construction
        self._path = path
        self._cache = rocksdict.Cache(block_cache_bytes)
        # guarded by _gate
        self._gate = threading.Condition()
        self._users = 0
        self._closed = False
        self._cursors: set[Cursor] = set()
        # of the writer, where a full disk has kept the directory from being opened for writing
        self._open_to_write: Callable[[], rocksdict.Rdict] | None = None
        self._former: rocksdict.Rdict | None = None  # opened for reading; scans that began before may still use it

        family = tier_options(self._cache, open_threads)
        family.create_if_missing(new)
        family.set_error_if_exists(new)

        def connect(access: rocksdict.AccessType) -> rocksdict.Rdict:
            yield_to_requests()  # with the interpreter lock held, it takes milliseconds
            with driver_errors(f"opening {path}"):
                if not new:
                    check_directory(path)
                # the family's options must be given as such: on reopen RocksDB would take its defaults for it
                return rocksdict.Rdict(str(path), family, column_families={"default": family}, access_type=access)

        to_read, to_write = rocksdict.AccessType.read_only(), rocksdict.AccessType.read_write()
        try:
            self._db = connect(to_read if read_only else to_write)
        except DiskFull as error:
            if new:
                raise
            log.warning("%s; until then it is only read", error)
            self._db = connect(to_read)
            self._open_to_write = lambda: connect(to_write)

    @contextmanager
    def entered(self) -> Iterator[rocksdict.Rdict]:
        """Use RocksDB within the block: it stays open until the block ends. Raises Closed."""
        with self._gate:
            self._check_open()
            self._users += 1
        try:
            yield self._db
        finally:
            with self._gate:
                self._users -= 1
                if not self._users:
                    self._gate.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._path}: the disk tier was closed")

    def scan(
        self, doing: str, first: bytes, end: bytes, entries: int, *, values: bool = True
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """(stored keys, values) from `first` to before `end`, at most `entries` at a time,
        as they were at the beginning.

        Without `values` they are empty. Raises Closed where the database is closed meanwhile; `doing` is for errors.
        """
        cursor = Cursor(end, values=values)
        with self.entered() as db, driver_errors(doing):
            cursor.iterator = db.iter(scan_options())
            cursor.iterator.seek(first)
            self._cursors.add(cursor)
        try:
            more = True
            while more:
                with self.entered(), driver_errors(doing):
                    stored, found, more = cursor.next(entries)
                if stored:
                    yield stored, found
        finally:
            cursor.iterator = None
            with self._gate:
                self._cursors.discard(cursor)

    def ingest(self, paths: Sequence[Path]) -> None:
        """Take sorted files in by moving them, all or none; of files with the same key the later wins.

        Raises StorageError.
        """
        options = rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        self._prepare_writing()
        with self.entered() as db, driver_errors(f"ingesting {len(paths)} files into {self._path}"):
            self._await_merges(db)
            db.ingest_external_file(list(map(str, paths)), options)

    def checkpoint(self, path: Path) -> None:
        """Make a directory `path` with what is in files at this moment, sorted files by second names.

        Raises StorageError.
        """
        yield_to_requests()  # with the interpreter lock held, it takes milliseconds
        with self.entered() as db, driver_errors(f"copying {self._path} to {path}"):
            rocksdict.Checkpoint(db).create_checkpoint(str(path))

    def _prepare_writing(self) -> None:
        """Open it for writing, where a full disk has prevented that so far. Raises DiskFull where it still does."""
        if self._open_to_write is not None:
            with self.entered() as db:
                self._db, self._former, self._open_to_write = self._open_to_write(), db, None
        with self._gate:  # from here on `entered` gives the new one
            former = None if self._users or self._cursors else self._former
            if former is not None:
                self._former = None
        if former is not None:
            self._close(former)

    def _await_merges(self, db: rocksdict.Rdict) -> None:
        """Wait while too many files are not merged: each of them costs every look-up. Raises StorageError, Closed."""
        while int(db.property_value("rocksdb.num-files-at-level0") or 0) >= _L0_MAX:
            if int(db.property_int_value("rocksdb.background-errors") or 0):
                raise StorageError(f"{self._path}: RocksDB cannot merge files any more; see its LOG file there")
            with self._gate:
                self._check_open()
                self._gate.wait(_MERGE_POLL_S)

    def close(self) -> None:
        """Wait for calls under way, then close the files and give the lock back. Scans end with Closed.

        May be repeated.
        """
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._gate.notify_all()  # an ingest that waits for merges gives up
            while self._users:
                self._gate.wait()
            # RocksDB iterators must not outlive the database: a step on one would crash the process
            for cursor in self._cursors:
                cursor.iterator = None
            self._cursors.clear()
            former, self._former = self._former, None
        if former is not None:
            self._close(former)
        self._close(self._db)

    def _close(self, db: rocksdict.Rdict) -> None:
        try:
            with driver_errors(f"closing {self._path}"):
                db.close()
        except StorageError as error:
            # it says again how a merge failed, and is closed all the same; nothing that was
            # ingested waits to be written
            log.warning("%s", error)
