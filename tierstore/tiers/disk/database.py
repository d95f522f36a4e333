"""One RocksDB directory: its users, and when it is open, for reading or for writing.

It is open while it is used. It is opened for reading, which takes a millisecond and one descriptor for each sorted file, and for writing once
something is to be changed. Unused databases stay open, the `MOST_UNUSED` of this process that were used last; others are closed, and opened again
when they are needed.

RocksDB crashes the process if it is used after it is closed. So every use is inside `entered`, and `close` waits until no thread is inside `entered`
or `held`. Any thread may call anything, but `ingest` is for one writer.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import rocksdict

from tierstore import open_files
from tierstore.errors import Closed, StorageError
from tierstore.formats.regular import check_directory
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.disk.cursor import Cursor
from tierstore.tiers.disk.rocks import driver_errors, scan_options, tier_options

log = logging.getLogger(__name__)

_MOST_MORE = 20  # unmerged files than are to be merged: RocksDB does not delay ingests, however many files pile up
_MERGE_POLL_S = 0.01
_OPENED_AT_ONCE = 16  # files, by RocksDB itself
MOST_UNUSED = 16
_PROPERTIES = {
    "bytes": "total-sst-files-size",
    "entries_estimate": "estimate-num-keys",
    "pending_compaction_bytes": "estimate-pending-compaction-bytes",
    "running_compactions": "num-running-compactions",
    "background_errors": "background-errors",
    "block_cache_bytes": "block-cache-usage",
    "block_cache_budget_bytes": "block-cache-capacity",
    "index_bytes": "estimate-table-readers-mem",
}


class _Connection:
    """An open RocksDB, from opening it to closing it."""

    def __init__(self, db: rocksdict.Rdict, writable: bool, cache: rocksdict.Cache) -> None:
        self.db, self.writable, self.cache = db, writable, cache  # constant after construction
        # guarded by the database's gate
        self.users = 0
        self.cursors: set[Cursor] = set()

    @property
    def unused(self) -> bool:
        return not self.users and not self.cursors

    def stats(self) -> dict[str, int]:
        """Files and bytes, as RocksDB reports them. `l0_files`: files that a look-up may have to read before the others."""
        counts = {name: int(self.db.property_int_value(f"rocksdb.{rocks}") or 0) for name, rocks in _PROPERTIES.items()}
        counts["l0_files"] = int(self.db.property_value("rocksdb.num-files-at-level0") or 0)
        counts["files"] = len(self.db.live_files())
        return counts


class Database:
    """One RocksDB directory. Construction opens it once. Raises StorageError, Locked, Corruption, or DiskFull for a `new` one."""

    def __init__(
        self,
        path: Path,
        *,
        block_cache_bytes: int,
        open_threads: int,
        merge_at: int,
        new: bool = False,
        read_only: bool = False,
    ) -> None:
        """`open_threads`, `merge_at`: as for `tier_options`."""
        # constant after construction
        self._path, self._cache_bytes, self._open_threads = path, block_cache_bytes, open_threads
        self._read_only, self._merge_at = read_only, merge_at
        self._opening = threading.Lock()  # held while it is opened or closed; taken before _gate
        # guarded by _gate
        self._gate = threading.Condition()
        self._users = 0  # within `held`
        self._closed = False
        self._current: _Connection | None = None
        self._former: list[_Connection] = []  # still in use
        self._last_stats: dict[str, int] = {}  # from the last time that it was open
        if new:
            self._current = self._connect(to_write=True, new=True)
        with self.entered():
            pass

    def _connect(self, *, to_write: bool, new: bool = False) -> _Connection:
        # opened for reading, RocksDB knows nothing of the merges of the next one to write, which remove files from the
        # directory: it goes on with those that it has open. By itself it opens sixteen, and the others when they are read
        hold = 0 if to_write else self._files()
        with self._gate:  # a scan may keep a former connection for long: all of them share one cache, within its bytes
            others = [*self._former, *([] if self._current is None else [self._current])]
        cache = others[0].cache if others else rocksdict.Cache(self._cache_bytes)
        family = tier_options(cache, self._open_threads, self._merge_at, hold=hold)
        family.create_if_missing(new)
        family.set_error_if_exists(new)
        access = rocksdict.AccessType.read_write() if to_write else rocksdict.AccessType.read_only()
        yield_to_requests()  # with the interpreter lock held, it takes milliseconds
        with driver_errors(f"opening {self._path}"):
            if not new:
                check_directory(self._path)
            # the family's options must be given as such: on reopen RocksDB would use its defaults
            db = rocksdict.Rdict(str(self._path), family, column_families={"default": family}, access_type=access)
        return _Connection(db, to_write, cache)

    def _files(self) -> int:
        """The number of sorted files in the directory; this process may have them open from now on."""
        files = len(list(self._path.glob("*.sst")))
        if files > _OPENED_AT_ONCE:
            open_files.allow(files)
        return files

    @contextmanager
    def held(self) -> Iterator[None]:
        """In the block `close` does not return. Raises Closed."""
        with self._gate:
            if self._closed:
                raise Closed(f"{self._path}: the disk tier was closed")
            self._users += 1
        try:
            yield
        finally:
            with self._gate:
                self._users -= 1
                if not self._users:
                    self._gate.notify_all()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no thread is inside `held`; then none can enter until the block ends."""
        with self._gate:
            yield not self._users

    @contextmanager
    def entered(self, *, to_write: bool = False) -> Iterator[rocksdict.Rdict]:
        """Use RocksDB in the block: it stays open until the block ends. Raises Closed, and errors as construction."""
        with self._connected(to_write) as connection:
            yield connection.db

    @contextmanager
    def _connected(self, to_write: bool = False) -> Iterator[_Connection]:
        with self.held():
            connection = self._acquire(to_write)
            try:
                yield connection
            finally:
                self._release(connection)

    def _acquire(self, to_write: bool) -> _Connection:
        connection = self._acquire_open(to_write)
        while connection is None:
            with self._opening:
                connection = self._acquire_open(to_write)
                if connection is None:
                    opened = self._connect(to_write=to_write)
                    with self._gate:
                        if self._current is not None:  # its users go on with it
                            self._former.append(self._current)
                        self._current = opened
                        connection = self._acquire_open(to_write)
        return connection

    def _acquire_open(self, to_write: bool) -> _Connection | None:
        with self._gate:
            connection = self._current
            if connection is None or (to_write and not connection.writable):
                return None
            connection.users += 1
            return connection

    def _release(self, connection: _Connection) -> None:
        with self._gate:
            connection.users -= 1
        self._close_former()
        _unused.note(self)

    def _close_former(self) -> None:
        """Close former connections that nothing uses any more."""
        with self._gate:
            unused = [each for each in self._former if each.unused]
            self._former = [each for each in self._former if each not in unused]
        for each in unused:
            self._close(each)

    def close_idle_files(self) -> bool:
        """Close the connection if it is not used; False if it is."""
        if not self._opening.acquire(blocking=False):
            return False
        try:
            with self._gate:
                connection = self._current
                if connection is None or not connection.unused:
                    return connection is None
                self._current, self._last_stats = None, connection.stats()
            self._close(connection)
            return True
        finally:
            self._opening.release()

    def stats(self) -> dict[str, int]:
        """Files and bytes, as RocksDB reports them, or reported last while it was open."""
        with self.held():
            with self._gate:
                if self._current is None:
                    return dict(self._last_stats)
            with self._connected() as connection, driver_errors(f"reading properties of {self._path}"):
                return connection.stats()

    def scan(
        self, doing: str, first: bytes, end: bytes, entries: int, *, values: bool = True
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """(stored keys, values) from `first` up to `end`, at most `entries` at a time, as they were at the beginning.

        Without `values` they are empty. Raises Closed if the database is closed meanwhile; `doing` is for errors.
        """
        cursor = Cursor(end, values=values)
        with self._connected() as connection, driver_errors(doing):
            cursor.iterator = connection.db.iter(scan_options())
            cursor.iterator.seek(first)
            with self._gate:
                connection.cursors.add(cursor)
        try:
            more = True
            while more:
                with self.held(), driver_errors(doing):
                    stored, found, more = cursor.next(entries)
                if stored:
                    yield stored, found
        finally:
            cursor.iterator = None
            with self._gate:
                connection.cursors.discard(cursor)
            self._close_former()

    def ingest(self, paths: Sequence[Path]) -> None:
        """Take in sorted files by moving them, all or none; the later file wins for a key in several. Raises StorageError."""
        options = rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        doing = f"ingesting {len(paths)} files into {self._path}"
        if self._read_only:
            raise StorageError(f"{doing}: it was opened for reading alone")
        with self.entered(to_write=True) as db, driver_errors(doing):
            self._await_merges(db)
            db.ingest_external_file(list(map(str, paths)), options)

    def checkpoint(self, path: Path) -> None:
        """Make a directory `path` with the files as they are now, sorted files by hard links. Raises StorageError."""
        yield_to_requests()  # with the interpreter lock held, it takes milliseconds
        with self.entered(to_write=True) as db, driver_errors(f"copying {self._path} to {path}"):
            rocksdict.Checkpoint(db).create_checkpoint(str(path))

    def compact_range(self) -> None:
        """Merge all files and wait for it."""
        with self.entered(to_write=True) as db, driver_errors(f"compacting {self._path}"):
            db.compact_range(None, None)

    def _await_merges(self, db: rocksdict.Rdict) -> None:
        """Wait while too many files are not merged: each of them slows what reads here. Raises StorageError, Closed."""
        while int(db.property_value("rocksdb.num-files-at-level0") or 0) >= self._merge_at + _MOST_MORE:
            if int(db.property_int_value("rocksdb.background-errors") or 0):
                raise StorageError(f"{self._path}: RocksDB cannot merge files any more; see its LOG file there")
            with self._gate:
                if self._closed:
                    raise Closed(f"{self._path}: the disk tier was closed")
                self._gate.wait(_MERGE_POLL_S)

    def close(self) -> None:
        """Wait for calls under way, then close the files and release the lock. Scans end with Closed. May be repeated."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._gate.notify_all()  # an ingest that waits for merges gives up
            while self._users:
                self._gate.wait()
        _unused.forget(self)
        with self._opening, self._gate:
            connections = [*self._former, *([] if self._current is None else [self._current])]
            self._former, self._current = [], None
            # RocksDB iterators must not outlive the database: a step on one would crash the process
            for connection in connections:
                for cursor in connection.cursors:
                    cursor.iterator = None
        for connection in connections:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        try:
            with driver_errors(f"closing {self._path}"):
                connection.db.close()
        except StorageError as error:
            # it reports a failed merge again, and is closed all the same; nothing that was ingested waits to be written
            log.warning("%s", error)


class _Unused:
    """The open databases of this process, the least recently used first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[Database, None] = OrderedDict()  # guarded by _lock

    def note(self, database: Database) -> None:
        """Note that a database was used and is open; close others that nobody uses if there are too many."""
        with self._lock:
            self._open[database] = None
            self._open.move_to_end(database)
            most = len(self._open) - MOST_UNUSED
            oldest = [other for other, _ in zip(self._open, range(most), strict=False)]
        for other in oldest:
            if other.close_idle_files():
                self.forget(other)

    def forget(self, database: Database) -> None:
        with self._lock:
            self._open.pop(database, None)


_unused = _Unused()
