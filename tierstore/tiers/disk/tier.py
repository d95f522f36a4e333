"""The disk tier: one version's rows in one RocksDB directory, read in sorted batches.

Nothing is written through RocksDB's log: rows and records come in as finished sorted files (`sst.py`), which are ingested by moving them. Each ingest
is one atomic step. A value of no bytes marks a deleted key.

Threads: `get`, `scan`, `record`, `watermark`, `stats` and `verify` may be called from many threads at once, also while `ingest` runs; they see an
ingest as a whole or not at all. `ingest` is for one writer. `close` waits until the calls under way have ended; later calls raise Closed.

Crash: what an `ingest` that returned has taken in is there after a crash. An interrupted ingest is there as a whole or not at all; files that were
not moved stay where they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, repeat
from operator import is_not, itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.errors import Corruption, StorageError
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.base import Peek, ReadBy
from tierstore.tiers.disk.database import Database
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.rocks import driver_errors, scan_options, translate
from tierstore.tiers.disk.sealed_file import SealedFile
from tierstore.tiers.disk.sst import (
    KEY_BYTES,
    MAX_TABLE_ID,
    META_TABLE,
    Entries,
    Records,
    SstFile,
    pack_keys,
    record_key,
    sst_keys,
    unpack_keys,
    write_sst,
)
from tierstore.types import Keys, Rows, States, Tier

WATERMARK = "watermark"
IDENTITY = "identity"  # the record of the tier's version, if there is one
_RECORDS = 2048  # read at a time
_RECORDS_CACHE_BYTES = 1 << 20
_DIGEST_BLOCK = 65536
_OPEN_THREADS = 16  # RocksDB's default; each takes a tenth of a millisecond to start, with the interpreter lock held
_TABLE_OF = itemgetter(slice(0, 2))  # the table's part of a stored key


@dataclass(frozen=True, slots=True)
class TableContent:
    """The content of a table: live rows, keys marked as deleted, and the digest of the live rows (see `kernels/digest.py`)."""

    rows: int
    deleted: int
    digest: int


class DiskTier:
    """One RocksDB directory. Make one with `create` or `open`."""

    _open_threads = _OPEN_THREADS  # threads that read the ends of its files at opening
    _merge_at = 4  # files of changes: a look-up asks each of them

    def __init__(self, path: Path, database: Database, readers: ReaderPool) -> None:
        # constant after construction
        self.path = path
        self._database, self._readers = database, readers

    @classmethod
    def create(cls, path: Path, *, block_cache_bytes: int, reader: ReaderPool) -> Self:
        """Make an empty tier in the directory `path`, which must not hold one yet. Raises StorageError."""
        return cls._open(path, block_cache_bytes, reader, new=True)

    @classmethod
    def open(cls, path: Path, *, block_cache_bytes: int, reader: ReaderPool, read_only: bool = False) -> Self:
        """Open the tier in `path`. Raises StorageError if there is none, Corruption. Its first change raises Locked if another open tier has changed it.

        Any number of processes may open a tier with `read_only`, if none of them writes it; then nothing can be ingested.
        """
        return cls._open(path, block_cache_bytes, reader, read_only=read_only)

    @classmethod
    def _open(
        cls, path: Path, block_cache_bytes: int, reader: ReaderPool, *, new: bool = False, read_only: bool = False
    ) -> Self:
        database = Database(
            path,
            block_cache_bytes=block_cache_bytes,
            open_threads=cls._open_threads,
            merge_at=cls._merge_at,
            new=new,
            read_only=read_only,
        )
        return cls(path, database, reader)

    def ingest(self, files: Sequence[SstFile | SealedFile | Path]) -> None:
        """Take in sorted files, all or none, by moving them into the directory (same file system).

        If several files hold a key, the later in `files` wins. Raises StorageError; the files then stay where they are.
        """
        if not files:
            return
        if sealed := [file.path.name for file in files if isinstance(file, SealedFile)]:
            raise ValueError(f"{sealed[0]} is a sealed file; a base of RocksDB alone cannot ingest it")
        self._database.ingest([file if isinstance(file, Path) else file.path for file in files])

    @property
    def compaction_due(self) -> bool:
        """Whether `compact` has anything to do."""
        return False

    @property
    def compaction_urgent(self) -> bool:
        """Whether there are so many files that `compact` must not wait for other work."""
        return False

    def compact(self, path: Path, records: Records, row_bytes: Mapping[int, int], give_up: Callable[[], bool]) -> bool:
        """Merge the files of changed rows, on the thread that makes changes. Readers go on; `give_up` is called often.

        `records` and `row_bytes` (by table id) as for a change, `path` too. Returns whether there are other files now,
        which compiled readers find with the next view. StorageError, Corruption.
        """
        return False

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """Read `keys` (int64 [n], ascending, distinct) into `rows` (uint8 [n, row_bytes]).

        state[i] becomes DISK with rows[i] filled, or ABSENT. Keys in a damaged block stay as they were; after all others are answered, Corruption is
        raised with their codes in `.keys`. Raises Closed, or StorageError in the same way (`.keys`) when reads fail.
        """
        self._get(table_id, keys, rows, state, unknown=Tier.ABSENT)

    def in_order(self, table_id: int, keys: Keys) -> Keys:
        """`keys` (int64 [n]) in the order in which their rows lie in the files."""
        return np.sort(keys)

    def peek(self, table_id: int, row_bytes: int, key: int) -> dict[str, Peek]:
        """The entries of the tier's parts for a key, by name, the part that answers first; fills no cache. Errors as `get`."""
        return {"disk": self._peek(table_id, row_bytes, key)}

    def _peek(self, table_id: int, row_bytes: int, key: int) -> Peek:
        """RocksDB's entry for a key."""
        with self._database.entered() as db, driver_errors(f"reading key {key} of table {table_id} of {self.path}"):
            value: bytes | None = db.get(_stored(table_id, key), read_opt=scan_options())
        if value is not None and len(value) not in (0, row_bytes):
            raise Corruption(
                f"{self.path}: table {table_id}, key {key}: expected a row of {row_bytes} bytes, found {len(value)}"
            )
        return Peek(value or None, absent=value == b"")

    def read_by(self, table_id: int, row_bytes: int) -> ReadBy | None:
        """None: only the driver reads RocksDB's files."""
        return None

    def change(self, path: Path, records: Records, tables: Sequence[Entries], strings: Sequence[Entries] = ()) -> None:
        """Take in a change of rows and records in one atomic step, through a file at `path`. One thread at a time.

        `tables` as for `write_sst`; of `strings`, which look-ups never read, the values are large_binary. StorageError;
        then nothing has changed, and no file is left.
        """
        file = self._write(path, records, sorted([*tables, *strings], key=itemgetter(0)))
        yield_to_requests()
        try:
            DiskTier.ingest(self, [file])
        except BaseException:
            file.path.unlink(missing_ok=True)
            raise

    def _write(self, path: Path, records: Records, tables: Sequence[Entries]) -> SstFile:
        """The sorted file of a change: with a filter, since look-ups of all keys come to it."""
        return write_sst(path, records=records, tables=tables, delta=True)

    def _get(self, table_id: int, keys: Keys, rows: Rows, state: States, *, unknown: Tier) -> None:
        """`get`, with ABSENT only for keys that are marked as deleted, and `unknown` for keys in no file."""
        with self._database.entered() as db:
            packed = pack_keys(table_id, keys)
            lost: list[tuple[int, Exception]] = []

            def read(start: int, stop: int) -> None:
                _read_chunk(db, packed[start:stop].tolist(), start, rows, state, lost, unknown)

            self._readers.run(len(keys), read)
        if lost:
            raise _lost_keys(table_id, keys, lost)

    def record(self, name: str) -> bytes | None:
        """The store's own record `name`, or None. Raises Corruption."""
        with self._database.entered() as db, driver_errors(f"reading record {name!r} of {self.path}"):
            value: bytes | None = db.get([record_key(name)])[0]
        return value or None

    def records(self) -> list[str]:
        """The names of all records. Raises Corruption."""
        return [stored[2:].decode() for keys, _ in self._blocks(META_TABLE, _RECORDS) for stored in keys]

    def watermark(self) -> int | None:
        """The seq of the newest delta in the tier, from the last ingested file; None if there is none."""
        value = self.record(WATERMARK)
        if value is None:
            return None
        if not value.isdigit():
            raise Corruption(f"{self.path}: the watermark should be a number, got {value[:40]!r}")
        return int(value)

    def scan(self, table_id: int, row_bytes: int, batch_rows: int = 65536) -> Iterator[tuple[Keys, Rows]]:
        """Live rows in ascending order of keys, as (int64 [n], uint8 [n, row_bytes]) with n <= batch_rows.

        Verifies every block's checksum; leaves the block cache as it is. Sees the tier as it was when the scan began. Raises Corruption, or Closed if
        the tier is closed meanwhile.
        """
        for keys, rows, _ in self._live_blocks(table_id, row_bytes, batch_rows):
            if len(keys):
                yield keys, rows

    def codes_from(self, table_id: int, row_bytes: int, low: int, count: int) -> Keys:
        """The first live keys that are at least `low`, ascending: int64 [at most `count`]."""
        found: list[Keys] = []
        with contextlib.closing(self._live_blocks(table_id, row_bytes, count, low)) as blocks:  # type: ignore[type-var]
            for keys, _, _ in blocks:
                found.append(keys)
                if sum(map(len, found)) >= count:
                    break
        return np.concatenate(found)[:count] if found else np.empty(0, np.int64)

    def strings(self, table_id: int, batch: int = 16384) -> Iterator[tuple[Keys, pa.Array]]:
        """The `strings` of changes in ascending order of keys: int64 [n], large_string [n]; one that is deleted is empty.

        Sees the tier as it was when the first batch was read. Raises Corruption, Closed.
        """
        for stored, values in self._blocks(table_id, batch):
            yield unpack_keys(stored), pa.array(values, pa.large_binary()).cast(pa.large_string())

    def strings_of(self, table_id: int, keys: Keys) -> list[str]:
        """The `strings` of changes of some keys; empty where there is none, or it is deleted. Corruption, Closed."""
        with self._database.entered() as db, driver_errors(f"reading strings of table {table_id} of {self.path}"):
            values: list[bytes | None] = db.get(pack_keys(table_id, keys).tolist())
        return [(value or b"").decode() for value in values]

    def check_base(self) -> None:
        """Check, without reading rows, that the base's files are still the ones that were opened. Corruption, StorageError, Closed."""

    def close_idle_files(self, once_unread: Callable[[Callable[[], None]], None]) -> None:
        """Close all files if no thread is reading; reads open them again.

        `once_unread` calls its argument once no compiled reader uses the old descriptors.
        """
        self._database.close_idle_files()

    def verify(
        self, row_bytes: Mapping[int, int], progress: Callable[[int], None] | None = None
    ) -> dict[int, TableContent]:
        """Read every block back with its checksum verified, and sum up each table.

        `row_bytes`: table id → length of its rows. Calls `progress(entries)` with the running total. Leaves the files in the page cache. Raises
        Corruption naming the file that RocksDB found damaged, or the table and key of a row of another length.
        """
        self.check_background()
        for _ in self._blocks(META_TABLE, _RECORDS):
            pass  # records are small; reading them checks their blocks
        seen = 0

        def report(entries: int) -> None:
            nonlocal seen
            seen += entries
            if progress is not None:
                progress(seen)

        return {table_id: self.sum_up(table_id, length, report=report) for table_id, length in row_bytes.items()}

    def sum_up(
        self,
        table_id: int,
        row_bytes: int,
        low: int | None = None,
        high: int | None = None,
        *,
        report: Callable[[int], None],
    ) -> TableContent:
        """The content of a table for the keys in [low, high) (None: no limit), read as by `verify`; `report(more entries)`."""
        count = deleted = digest = 0
        for keys, rows, gone in self._live_blocks(table_id, row_bytes, _DIGEST_BLOCK, low, high):
            digest = (digest + digest_rows(keys, rows)) % 2**64
            count, deleted = count + len(keys), deleted + gone
            report(len(keys) + gone)
        return TableContent(count, deleted, digest)

    def checkpoint(self, path: Path) -> None:
        """Make a directory `path` with RocksDB's files as they are now. Raises StorageError, Closed."""
        self._database.checkpoint(path)

    def compact_range(self) -> None:
        """Merge all files and wait for it. Raises StorageError if a merge failed in the background."""
        self._database.compact_range()
        self.check_background()

    def check_background(self) -> None:
        """Raise StorageError if RocksDB's own threads have failed, which it reports nowhere else."""
        failed = self.stats()["background_errors"]
        if failed:
            raise StorageError(f"{self.path}: RocksDB reports {failed} failed background jobs; see its LOG file there")

    def stats(self) -> dict[str, int]:
        """Files and bytes. `l0_files`: how many files a look-up may have to read before the sorted levels."""
        return self._database.stats()

    def bytes_on_disk(self) -> int:
        """Bytes of all sorted files, including those that only a running scan still needs."""
        return self._database.stats()["bytes"]

    def close(self) -> None:
        """Wait for calls under way, then close the files and release the lock. Scans end with Closed. May be repeated."""
        self._database.close()

    def _live_blocks(
        self, table_id: int, row_bytes: int, entries: int, low: int | None = None, high: int | None = None
    ) -> Iterator[tuple[Keys, Rows, int]]:
        """Keys and rows that are not deleted, at most `entries` at a time, and how many deleted keys were among them."""
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
                    f"{self.path}: table {table_id}, key {codes[0]}: expected a row of {row_bytes} bytes, found "
                    f"{first}",
                    keys=codes,
                )
            yield keys, deleted, np.frombuffer(b"".join(live), np.uint8).reshape(len(live), row_bytes)

    def _blocks(
        self, table_id: int, entries: int, low: int | None = None, high: int | None = None
    ) -> Iterator[tuple[list[bytes], list[bytes]]]:
        """(stored keys, values) of a table, for keys in [low, high) (None: no limit); at most `entries` at a time."""
        first = _prefix(table_id) if low is None else _stored(table_id, low)
        end = _prefix(table_id + 1) if high is None else _stored(table_id, high)
        return self._database.scan(f"scanning table {table_id} of {self.path}", first, end, entries)

    def _table_keys(self) -> Iterator[tuple[int, Keys]]:
        """(table id, keys in ascending order) of every entry that is not a record, including deleted keys; reads no values."""
        first, end = _prefix(META_TABLE + 1), _prefix(MAX_TABLE_ID + 1)
        doing = f"reading the keys of {self.path}"
        for stored, _ in self._database.scan(doing, first, end, _DIGEST_BLOCK, values=False):
            for table_id, keys in groupby(stored, _TABLE_OF):
                yield int.from_bytes(table_id, "big"), unpack_keys(list(keys))


def open_records(path: Path, reader: ReaderPool) -> DiskTier:
    """Open the tier in `path`, of either form, for its records only: does not open its base, and writes nothing."""
    return DiskTier.open(path, block_cache_bytes=_RECORDS_CACHE_BYTES, reader=reader, read_only=True)


def _prefix(table_id: int) -> bytes:
    """The stored key at which a table's keys begin; behind the last table, where all keys end."""
    return table_id.to_bytes(2, "big") if table_id <= MAX_TABLE_ID else b"\xff" * (KEY_BYTES + 1)


def _stored(table_id: int, key: int) -> bytes:
    (stored,) = sst_keys(table_id, np.array([key], np.int64))
    return stored


def _read_chunk(
    db: Any,
    stored: list[bytes],
    start: int,
    rows: Rows,
    state: States,
    lost: list[tuple[int, Exception]],
    unknown: Tier,
) -> None:
    """Read one chunk. One damaged block fails a whole batch, so a failed batch is halved down to the keys that fail."""
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
    has_entry = np.fromiter(map(is_not, values, repeat(None)), np.bool_, len(values))
    state[start : start + len(values)][~found] = np.where(has_entry[~found], Tier.ABSENT, unknown)


def _lost_keys(table_id: int, keys: Keys, lost: list[tuple[int, Exception]]) -> StorageError:
    codes = [int(keys[position]) for position, _ in sorted(lost, key=itemgetter(0))]
    shown = ", ".join(map(str, codes[:5])) + (", …" if len(codes) > 5 else "")
    error = translate(lost[0][1], f"reading {len(codes)} keys of table {table_id} ({shown})")
    assert isinstance(error, StorageError)
    error.keys = codes
    return error
