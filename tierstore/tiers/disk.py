"""The disk tier: one version's rows in one RocksDB directory, read in sorted batches.

Nothing is ever written through RocksDB's log: rows and records come in as finished sorted files
(`sst.py`) that are ingested by move, each call one atomic step. A value of no bytes marks a deleted
key. RocksDB's settings and errors are in `rocks.py`; no other modules know it.

Threads: `get`, `scan`, `record`, `watermark`, `stats` and `verify` may be called from many threads at
once, also while `ingest` runs; they see each ingest whole or not at all. `ingest` is for one writer.
`close` waits until the calls under way have left; later ones raise Closed.

Full disk: RocksDB cannot open a directory for writing then, so `open` opens it for reading, and the next `ingest` tries
for writing again.

Crash: what `ingest` returned from is there after a crash, whole. An ingest that was cut off is there
whole or not at all; file names that were not moved stay where they were.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, groupby, repeat
from operator import is_not, itemgetter
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import rocksdict

from tierstore.errors import Closed, Corruption, DiskFull, StorageError
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.background import hand_over
from tierstore.tiers.cursor import Cursor
from tierstore.tiers.readers import ReaderPool
from tierstore.tiers.rocks import driver_errors, scan_options, tier_options, translate
from tierstore.tiers.sealed_file import SealedFile
from tierstore.tiers.sst import (
    KEY_BYTES,
    MAX_TABLE_ID,
    META_TABLE,
    SstFile,
    file_xxh3,
    pack_keys,
    record_key,
    sst_keys,
    unpack_keys,
    write_sst,
)
from tierstore.types import Keys, Rows, States, Tier

__all__ = [
    "META_TABLE",
    "DiskTier",
    "ReaderPool",
    "SstFile",
    "TableContent",
    "file_xxh3",
    "open_records",
    "sst_keys",
    "write_sst",
]

log = logging.getLogger(__name__)

WATERMARK = "watermark"
_RECORDS = 2048  # read at a time
_RECORDS_CACHE_BYTES = 1 << 20
_DIGEST_BLOCK = 65536
_L0_MAX = 24  # RocksDB does not hold ingests back, however many files pile up
_MERGE_POLL_S = 0.01
_OPEN_THREADS = 16  # RocksDB's default; each takes a tenth of a millisecond to start, with the interpreter lock held
_TABLE_OF = itemgetter(slice(0, 2))  # of a stored key
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


@dataclass(frozen=True, slots=True)
class TableContent:
    """What a table holds: live rows, keys marked deleted, and the digest of the live rows (see `kernels/digest.py`)."""

    rows: int
    deleted: int
    digest: int


class Resting(Protocol):
    """What stays open of a tier that was left, for who opens it next. One call, of either method, ends it."""

    def wake(self, *, block_cache_bytes: int, reader: ReaderPool) -> DiskTier:
        """The tier again, with the errors of `DiskTier.open`."""

    def close(self) -> None:
        """Close the files and give the lock back."""

    def memory_bytes(self) -> int:
        """What it holds in memory."""


class DiskTier:
    """One RocksDB directory. Make one with `create` or `open`."""

    _open_threads = _OPEN_THREADS  # that look at its files as it is opened

    def __init__(self, path: Path, db: rocksdict.Rdict, cache: rocksdict.Cache, readers: ReaderPool) -> None:
        # constant after construction
        self.path = path
        self._db, self._cache = db, cache
        self._readers = readers
        # guarded by _gate
        self._gate = threading.Condition()
        self._inside = 0
        self._closed = False
        self._cursors: set[Cursor] = set()
        # of the writer, where a full disk has kept the tier from being opened for writing
        self._reopen: Callable[[], rocksdict.Rdict] | None = None
        self._former: rocksdict.Rdict | None = None  # opened for reading; scans that began before may still use it

    @classmethod
    def create(cls, path: Path, *, block_cache_bytes: int, reader: ReaderPool) -> Self:
        """Make an empty tier in the directory `path`, which must not hold one yet. Raises StorageError."""
        return cls._open(path, block_cache_bytes, reader, new=True)

    @classmethod
    def open(cls, path: Path, *, block_cache_bytes: int, reader: ReaderPool, read_only: bool = False) -> Self:
        """Open the tier in `path`. Raises StorageError if there is none, Locked if it is open already, Corruption.

        Any number of processes may open a tier that nobody writes `read_only`; nothing can be ingested then.
        """
        return cls._open(path, block_cache_bytes, reader, read_only=read_only)

    @classmethod
    def _open(
        cls, path: Path, block_cache_bytes: int, reader: ReaderPool, *, new: bool = False, read_only: bool = False
    ) -> Self:
        cache = rocksdict.Cache(block_cache_bytes)
        family = tier_options(cache, cls._open_threads)
        family.create_if_missing(new)
        family.set_error_if_exists(new)

        def connect(access: rocksdict.AccessType) -> rocksdict.Rdict:
            hand_over()  # with the interpreter lock held, it takes milliseconds
            with driver_errors(f"opening {path}"):
                # the family's options must be given as such: on reopen RocksDB would take its defaults for it
                return rocksdict.Rdict(str(path), family, column_families={"default": family}, access_type=access)

        to_read, to_write = rocksdict.AccessType.read_only(), rocksdict.AccessType.read_write()
        try:
            return cls(path, connect(to_read if read_only else to_write), cache, reader)
        except DiskFull as error:
            if new:
                raise
            log.warning("%s; until then it is only read", error)
        tier = cls(path, connect(to_read), cache, reader)
        tier._reopen = lambda: connect(to_write)
        return tier

    def rest(self) -> Resting | None:
        """As `close`, but for what takes long to open again; None where nothing stays open."""
        self.close()
        return None

    def ingest(self, files: Sequence[SstFile | SealedFile | Path]) -> None:
        """Take in sorted files, all or none, by moving them into the directory (same file system).

        Of files that hold the same key, the later in `files` wins. Raises StorageError; the files
        then stay where they are.
        """
        if not files:
            return
        if sealed := [file.path.name for file in files if isinstance(file, SealedFile)]:
            raise ValueError(f"{sealed[0]} is a sealed file; a base of RocksDB alone cannot take it in")
        options = rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        paths = [str(file.path if isinstance(file, SstFile) else file) for file in files]
        self._open_for_writing()
        with self._entered() as db, driver_errors(f"ingesting {len(paths)} files into {self.path}"):
            self._await_merges(db)
            db.ingest_external_file(paths, options)

    def _open_for_writing(self) -> None:
        if self._reopen is not None:
            with self._entered() as db:
                self._db, self._former, self._reopen = self._reopen(), db, None
        with self._gate:  # who comes in from here on has the other one
            former = None if self._inside or self._cursors else self._former
            if former is not None:
                self._former = None
        if former is not None:
            close_rocksdb(self.path, former)

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """Read `keys` (int64 [n], ascending, distinct) into `rows` (uint8 [n, row_bytes]).

        state[i] becomes DISK with rows[i] filled, or ABSENT. Keys that lie in a damaged block are
        left as they were; after all others are answered, Corruption is raised with their codes in
        `.keys`. Raises Closed, or StorageError in the same way (`.keys`) when reads fail.
        """
        self._get(table_id, keys, rows, state, unknown=Tier.ABSENT)

    def words_at(self, table_id: int, row_bytes: int) -> int:
        """0: only the driver reads its files."""
        return 0

    def _get(self, table_id: int, keys: Keys, rows: Rows, state: States, *, unknown: Tier) -> None:
        """`get`, with ABSENT for keys that are marked deleted alone and `unknown` for those that no file has."""
        with self._entered() as db:
            packed = pack_keys(table_id, keys)
            lost: list[tuple[int, Exception]] = []

            def read(start: int, stop: int) -> None:
                _read_chunk(db, packed[start:stop].tolist(), start, rows, state, lost, unknown)

            self._readers.run(len(keys), read)
        if lost:
            raise _lost_keys(table_id, keys, lost)

    def record(self, name: str) -> bytes | None:
        """The store's own record `name`, or None. Raises Corruption."""
        with self._entered() as db, driver_errors(f"reading record {name!r} of {self.path}"):
            value: bytes | None = db.get([record_key(name)])[0]
        return value or None

    def watermark(self) -> int | None:
        """The delta seq that the tier is up to, as the last ingested file said."""
        value = self.record(WATERMARK)
        if value is None:
            return None
        if not value.isdigit():
            raise Corruption(f"{self.path}: the watermark should be a number, it is {value[:40]!r}")
        return int(value)

    def scan(self, table_id: int, row_bytes: int, batch_rows: int = 65536) -> Iterator[tuple[Keys, Rows]]:
        """Live rows in ascending order of keys, as (int64 [n], uint8 [n, row_bytes]) with n <= batch_rows.

        Every block's checksum is verified; the block cache is left alone. Sees the tier as it was
        when the scan began. Raises Corruption, or Closed if the tier is closed meanwhile.
        """
        for keys, rows, _ in self._live_blocks(table_id, row_bytes, batch_rows):
            if len(keys):
                yield keys, rows

    def verify(
        self, row_bytes: Mapping[int, int], progress: Callable[[int], None] | None = None
    ) -> dict[int, TableContent]:
        """Read every block back with its checksum verified, and sum up each table.

        `row_bytes` says for each table id how long its rows are. Calls `progress(entries)` with the
        running total. Reading leaves the files in the OS cache. Raises Corruption naming the file
        that RocksDB found damaged, or the table and key of a row of another length.
        """
        self.check_background()
        for _ in self._blocks(META_TABLE, _RECORDS):
            pass  # records are small; reading them checks their blocks
        seen = 0

        def tell(entries: int) -> None:
            nonlocal seen
            seen += entries
            if progress is not None:
                progress(seen)

        return {table_id: self.sum_up(table_id, length, tell=tell) for table_id, length in row_bytes.items()}

    def sum_up(
        self,
        table_id: int,
        row_bytes: int,
        low: int | None = None,
        high: int | None = None,
        *,
        tell: Callable[[int], None],
    ) -> TableContent:
        """What a table holds of the keys in [low, high) (None: no limit), read as by `verify`; `tell(more entries)`."""
        count = deleted = digest = 0
        for keys, rows, gone in self._live_blocks(table_id, row_bytes, _DIGEST_BLOCK, low, high):
            digest = (digest + digest_rows(keys, rows)) % 2**64
            count, deleted = count + len(keys), deleted + gone
            tell(len(keys) + gone)
        return TableContent(count, deleted, digest)

    def compact(self) -> None:
        """Merge everything down and wait for it. Raises StorageError if a merge failed in the background."""
        with self._entered() as db, driver_errors(f"compacting {self.path}"):
            db.compact_range(None, None)
        self.check_background()

    def check_background(self) -> None:
        """Raise StorageError if RocksDB's own threads have failed (it says so nowhere else)."""
        failed = self.stats()["background_errors"]
        if failed:
            raise StorageError(f"{self.path}: RocksDB reports {failed} failed background jobs; see its LOG file there")

    def stats(self) -> dict[str, int]:
        """Files and bytes; `l0_files` is how many files a look-up may have to ask before the sorted levels."""
        with self._entered() as db, driver_errors(f"reading properties of {self.path}"):
            counts = {name: int(db.property_int_value(f"rocksdb.{rocks}") or 0) for name, rocks in _PROPERTIES.items()}
            counts["l0_files"] = int(db.property_value("rocksdb.num-files-at-level0") or 0)
            counts["files"] = len(db.live_files())
        return counts

    def bytes_on_disk(self) -> int:
        """Bytes of all sorted files, those that only a running scan still needs included."""
        with self._entered() as db:
            return int(db.property_int_value("rocksdb.total-sst-files-size") or 0)

    def close(self) -> None:
        """Wait for calls under way, then close the files and give the lock back. Scans end with Closed. May be repeated."""
        if self._end():
            close_rocksdb(self.path, self._db)

    def _end(self) -> bool:
        """Wait for calls under way; later ones raise Closed. False if it was closed already."""
        with self._gate:
            if self._closed:
                return False
            self._closed = True
            self._gate.notify_all()  # an ingest that waits for merges gives up
            while self._inside:
                self._gate.wait()
            # RocksDB iterators must not outlive the database: a step on one would crash the process
            for cursor in self._cursors:
                cursor.iterator = None
            self._cursors.clear()
            former, self._former = self._former, None
        if former is not None:
            close_rocksdb(self.path, former)
        return True

    def _await_merges(self, db: rocksdict.Rdict) -> None:
        """Wait while too many files lie unmerged; each of them costs every look-up. Bounds their number."""
        while int(db.property_value("rocksdb.num-files-at-level0") or 0) >= _L0_MAX:
            if has_failed(db):
                raise StorageError(f"{self.path}: RocksDB cannot merge files any more; see its LOG file there")
            with self._gate:
                if self._closed:
                    raise Closed(f"{self.path}: the disk tier was closed")
                self._gate.wait(_MERGE_POLL_S)

    @contextmanager
    def _entered(self) -> Iterator[rocksdict.Rdict]:
        with self._gate:
            if self._closed:
                raise Closed(f"{self.path}: the disk tier was closed")
            self._inside += 1
        try:
            yield self._db
        finally:
            with self._gate:
                self._inside -= 1
                if not self._inside:
                    self._gate.notify_all()

    def _live_blocks(
        self, table_id: int, row_bytes: int, entries: int, low: int | None = None, high: int | None = None
    ) -> Iterator[tuple[Keys, Rows, int]]:
        """Keys and rows that are not deleted, at most `entries`, and how many deleted keys lay between them."""
        for keys, deleted, rows in self._entries(table_id, row_bytes, entries, low, high):
            yield (keys[~deleted], rows, int(np.count_nonzero(deleted))) if deleted.any() else (keys, rows, 0)

    def _entries(
        self, table_id: int, row_bytes: int, entries: int, low: int | None = None, high: int | None = None
    ) -> Iterator[tuple[Keys, npt.NDArray[np.bool_], Rows]]:
        """Keys, which of them are deleted, and the rows of the others. Raises Corruption for a row of another length."""
        for stored, values in self._blocks(table_id, entries, low, high):
            keys = unpack_keys(stored)
            deleted = ~np.fromiter(map(bool, values), np.bool_, len(values))
            live = list(filter(None, values))
            wrong = np.fromiter(map(len, live), np.int64, len(live)) != row_bytes
            if wrong.any():
                codes, first = keys[~deleted][wrong].tolist(), len(live[int(np.argmax(wrong))])
                raise Corruption(
                    f"{self.path}: table {table_id}, key {codes[0]}: expected a row of {row_bytes} bytes, found {first}",
                    keys=codes,
                )
            yield keys, deleted, np.frombuffer(b"".join(live), np.uint8).reshape(len(live), row_bytes)

    def _blocks(
        self, table_id: int, entries: int, low: int | None = None, high: int | None = None
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Entries of a table, those with keys in [low, high) if given, as (stored keys, values); at most `entries` at a time."""
        first = _prefix(table_id) if low is None else _stored(table_id, low)
        end = _prefix(table_id + 1) if high is None else _stored(table_id, high)
        return self._step(f"scanning table {table_id} of {self.path}", first, Cursor(end), entries)

    def _table_keys(self) -> Iterator[tuple[int, Keys]]:
        """(table id, keys in ascending order) of every entry that is no record, deleted ones too; values are not taken out."""
        cursor = Cursor(_prefix(MAX_TABLE_ID + 1), values=False)
        for stored, _ in self._step(f"reading the keys of {self.path}", _prefix(META_TABLE + 1), cursor, _DIGEST_BLOCK):
            for table_id, keys in groupby(stored, _TABLE_OF):
                yield int.from_bytes(table_id, "big"), unpack_keys(list(keys))

    def _step(
        self, doing: str, first: bytes, cursor: Cursor, entries: int
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        with self._entered() as db, driver_errors(doing):
            cursor.iterator = db.iter(scan_options())
            cursor.iterator.seek(first)
            self._cursors.add(cursor)
        try:
            more = True
            while more:
                with self._entered(), driver_errors(doing):
                    stored, values, more = cursor.take(entries)
                if stored:
                    yield stored, values
        finally:
            cursor.iterator = None
            with self._gate:
                self._cursors.discard(cursor)


def open_records(path: Path, reader: ReaderPool) -> DiskTier:
    """The tier in `path`, of whichever kind, for its records alone: its base is not opened, and nothing is written."""
    return DiskTier.open(path, block_cache_bytes=_RECORDS_CACHE_BYTES, reader=reader, read_only=True)


def has_failed(db: rocksdict.Rdict) -> bool:
    """Whether a background job of RocksDB has failed. Then it may take nothing in until it is opened again."""
    return int(db.property_int_value("rocksdb.background-errors") or 0) > 0


def close_rocksdb(path: Path, db: rocksdict.Rdict) -> None:
    """Close the files of a database that nobody uses, and give the lock back."""
    try:
        with driver_errors(f"closing {path}"):
            db.close()
    except StorageError as error:
        # it says again how a merge failed, and is closed all the same; nothing that was ingested waits to be written
        log.warning("%s", error)


def _prefix(table_id: int) -> bytes:
    """Where a table's keys begin; for one past the last table, where all keys end."""
    return table_id.to_bytes(2, "big") if table_id <= MAX_TABLE_ID else b"\xff" * (KEY_BYTES + 1)


def _stored(table_id: int, key: int) -> bytes:
    (stored,) = sst_keys(table_id, np.array([key], np.int64))
    return stored


def _read_chunk(
    db: rocksdict.Rdict,
    stored: list[bytes],
    start: int,
    rows: Rows,
    state: States,
    lost: list[tuple[int, Exception]],
    unknown: Tier,
) -> None:
    """Read one chunk. One damaged block fails a whole batch, so a failed one is halved down to the keys that fail."""
    try:
        values: list[bytes | None] = db.get(stored)
    except Exception as error:
        if type(error) is not Exception:
            raise
        if len(stored) == 1:
            lost.append((start, error))
            return
        half = len(stored) // 2
        _read_chunk(db, stored[:half], start, rows, state, lost, unknown)
        _read_chunk(db, stored[half:], start + half, rows, state, lost, unknown)
        return
    found = np.fromiter(map(bool, values), np.bool_, len(values))
    live = list(filter(None, values))
    where = start + np.flatnonzero(found)
    wrong = np.fromiter(map(len, live), np.int64, len(live)) != rows.shape[1]
    if wrong.any():
        damage = Exception(f"Corruption: rows of another length than {rows.shape[1]} bytes")
        lost.extend(zip(where[wrong].tolist(), repeat(damage)))
        live, where = list(compress(live, ~wrong)), where[~wrong]
    rows[where] = np.frombuffer(b"".join(live), np.uint8).reshape(len(live), rows.shape[1])
    state[where] = Tier.DISK
    known = np.fromiter(map(is_not, values, repeat(None)), np.bool_, len(values))
    state[start : start + len(values)][~found] = np.where(known[~found], Tier.ABSENT, unknown)


def _lost_keys(table_id: int, keys: Keys, lost: list[tuple[int, Exception]]) -> StorageError:
    codes = [int(keys[position]) for position, _ in sorted(lost, key=itemgetter(0))]
    shown = ", ".join(map(str, codes[:5])) + (", …" if len(codes) > 5 else "")
    error = translate(lost[0][1], f"reading {len(codes)} keys of table {table_id} ({shown})")
    assert isinstance(error, StorageError)
    error.keys = codes
    return error
