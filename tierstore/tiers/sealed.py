"""The disk tier over sealed base files: rows as loaded in files of our own, what deltas changed in RocksDB.

A key is looked for in RocksDB only if a filter in memory says that a delta may have changed it; all others are read
from the base by kernels (`kernels/sealed.py`), without the interpreter lock and without an object a row. RocksDB's
record `base` says which files the base is made of, so that one that is missing, cut off or exchanged is refused when
the tier is opened. The filter is kept in a file (`changed_file.py`), and filled from RocksDB where that file is not up to date.

Threads and crashes: as `disk.py` says. The base never changes after a load.

Why a look-up never answers an older row than one it could have seen before: `ingest` puts a delta's keys into the
filter first, then ingests, and then returns. A look-up

    - that asked the filter before the key was in it reads the base: it began before the ingest ended, and nobody
      may have been told of the delta yet;
    - that finds the key in the filter asks RocksDB, which has the delta's row or, until the ingest is done, what it
      had before, or nothing: then the base has the newest row.

Of two look-ups, one after the other, the second sees the filter and RocksDB as the first saw them, or later. Were the
filter filled after the ingest, a look-up in between would pass by a row that another thread has read already.
"""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tierstore.errors import Corruption, StorageError
from tierstore.formats.files import make_dir, rename_all
from tierstore.kernels.codec import address_of
from tierstore.tiers import changed_file
from tierstore.tiers.changed import ChangedKeys
from tierstore.tiers.changed_file import ChangedFile
from tierstore.tiers.disk import WATERMARK, DiskTier, Resting, close_rocksdb, has_failed
from tierstore.tiers.readers import ReaderPool
from tierstore.tiers.sealed_file import Opened, SealedFile, open_sealed, read_blocks
from tierstore.tiers.sealed_table import SealedTable, scatter
from tierstore.tiers.sst import SstFile
from tierstore.types import BaseKind, Keys, Rows, States, Tier

log = logging.getLogger(__name__)

BASE = "base"


def base_record(files: Sequence[SealedFile | SstFile]) -> dict[str, bytes]:
    """The record by which a tier knows the sealed files of its base."""
    entries = [{"name": file.path.name, "bytes": file.bytes, "xxh3": file.xxh3} for file in files]
    return {BASE: json.dumps(entries).encode()}


class SealedTier(DiskTier):
    """A RocksDB directory with the base's files in the folder `base` in it. Make one with `create` or `open`."""

    _open_threads = 1  # deltas alone are a few files

    def __init__(self, path: Path, db: Any, cache: Any, readers: ReaderPool) -> None:
        super().__init__(path, db, cache, readers)
        # replaced whole by the one writer, so that readers need no lock
        self._base: dict[int, SealedTable] = {}
        self._changed: dict[int, ChangedKeys] = {}
        self._words: dict[int, npt.NDArray[np.int64]] = {}  # for kernels, by table
        self._changed_file: ChangedFile | None = None  # of the writer

    @classmethod
    def open(cls, path: Path, *, block_cache_bytes: int, reader: ReaderPool, read_only: bool = False) -> Self:
        """As DiskTier.open; raises Corruption for a base file that is missing or is not the one that was built."""
        tier = cls._open(path, block_cache_bytes, reader, read_only=read_only)
        tier._open_base()
        try:
            tier._fill_changed(keep=not read_only)
        except BaseException:
            tier.close()
            raise
        return tier

    def _fill_changed(self, *, keep: bool) -> None:
        """Fill the filters: from their file, or else from RocksDB's keys. `keep` that file from now on."""
        path, watermark = self.path / changed_file.NAME, self.watermark()
        known = None if watermark is None else changed_file.replay(path, watermark)
        size: int | None = None
        if known is not None:
            self._changed, size = known
        elif keep and watermark is not None:
            try:
                size = changed_file.write_anew(path, self._entries_anew(watermark))
            except StorageError as error:
                log.warning("%s; the next start fills the filters anew", error)
        if size is None:
            self._changed = {}
            for table_id, keys in self._table_keys():
                self._changed_in(table_id).add(keys)
        elif keep:
            self._changed_file = ChangedFile(path, size)
        self._have_filters()

    def _have_filters(self) -> None:
        """A filter for each table of the base, before anybody else may ask: only the writer adds to what there is."""
        self._changed = {table_id: ChangedKeys() for table_id in self._base} | self._changed

    def _entries_anew(self, watermark: int) -> Iterator[bytes]:
        for table_id, keys in self._table_keys():
            yield changed_file.entry(-1, {table_id: self._changed_in(table_id).add(keys)})
        yield changed_file.entry(watermark, {})

    def _open_base(self) -> None:
        try:
            self._take_base()
        except BaseException:
            self.close()
            raise

    def _take_base(self) -> None:
        self._base = _open_tables(self.path, self.record(BASE))
        self._have_filters()

    def ingest(self, files: Sequence[SstFile | SealedFile | Path]) -> None:
        """Take in the base's files, once, with the `base_record` of them; or a delta, as DiskTier does.

        A delta's files must come as `write_sst(delta=True)` returned them, with their keys.
        """
        sealed = [file for file in files if isinstance(file, SealedFile)]
        sorted_files = [file for file in files if not isinstance(file, SealedFile)]
        if sealed:
            self._move_in(sealed)
        for file in sorted_files:
            if not isinstance(file, SstFile) or file.keys is None:
                raise ValueError(f"{file}: expected a file of a delta with its keys")
            self._change(
                file.keys, file.records.get(WATERMARK)
            )  # before the rows are there: see the module's docstring
        super().ingest(sorted_files)
        if sealed:
            self._take_base()

    def _change(self, keys: Sequence[tuple[int, Keys]], watermark: bytes | None) -> None:
        new = {table_id: self._changed_in(table_id).add(changed) for table_id, changed in keys}
        if self._changed_file is not None:
            self._changed_file.add(int(watermark) if watermark is not None and watermark.isdigit() else -1, new)

    def _move_in(self, sealed: list[SealedFile]) -> None:
        if self._base or self.record(BASE) is not None:
            raise ValueError(f"{self.path} has its base already; load another version")
        folder = make_dir(self.path / BASE)
        rename_all([(file.path, folder / file.path.name) for file in sealed])

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """As DiskTier.get. A table whose rows are of another length than `rows` is Corruption, for all keys."""
        keys = np.ascontiguousarray(keys)
        with self._entered():
            changed, table = self._changed.get(table_id), self._base.get(table_id)
            perhaps = None if changed is None else changed.perhaps(keys)
            failures: list[StorageError] = []
            if table is None and perhaps is None:
                state[:] = Tier.ABSENT
            elif table is None:
                super().get(table_id, keys, rows, state)
            elif perhaps is None:
                failures += table.get(keys, rows, state, self._readers, wanted=np.ones(len(keys), np.bool_))
            else:
                failures += self._get_both(table, table_id, keys, rows, state, perhaps)
        if failures:
            raise _joined(failures)

    def words_at(self, table_id: int, row_bytes: int) -> int:
        """As RowStore says; 0 where there is no base, or one whose rows are of another length."""
        table, changed = self._base.get(table_id), self._changed.get(table_id)
        if table is None or changed is None or table.row_bytes != row_bytes:
            return 0
        words = self._words.setdefault(table_id, table.words(address_of(changed.place)))
        return address_of(words)

    def _get_both(
        self, table: SealedTable, table_id: int, keys: Keys, rows: Rows, state: States, perhaps: npt.NDArray[np.bool_]
    ) -> list[StorageError]:
        """RocksDB for what deltas may have changed, then the base for all that RocksDB does not know."""
        failures: list[StorageError] = []
        asked = np.flatnonzero(perhaps)
        found, got = np.zeros(len(asked), np.uint8), np.empty((len(asked), rows.shape[1]), np.uint8)
        lost = np.zeros(len(asked), np.bool_)
        try:
            self._get(table_id, keys[asked], got, found, unknown=Tier.PENDING)
        except StorageError as error:
            failures.append(error)
            lost = np.isin(keys[asked], error.keys)
        scatter(asked, got, found, rows, state)
        perhaps[asked[(found == Tier.PENDING) & ~lost]] = False  # RocksDB does not know them
        return failures + table.get(keys, rows, state, self._readers, wanted=~perhaps)

    def stats(self) -> dict[str, int]:
        """RocksDB's, whose `bytes` and `files` are of deltas, and the base's; `…_memory_bytes` are held for good."""
        return super().stats() | {
            "base_files": sum(len(table.files) for table in self._base.values()),
            "base_bytes": self._base_bytes(),
            "base_index_memory_bytes": sum(table.fences.nbytes for table in self._base.values()),
            "changed_keys": sum(changed.keys for changed in self._changed.values()),
            "changed_filter_memory_bytes": sum(changed.nbytes for changed in self._changed.values()),
        }

    def bytes_on_disk(self) -> int:
        """Bytes of the base and of RocksDB's sorted files."""
        return super().bytes_on_disk() + self._base_bytes()

    def close(self) -> None:
        """As DiskTier.close, and close the base."""
        super().close()  # waits for calls under way: none uses a descriptor after this
        self._close_base()
        if self._changed_file is not None:
            self._changed_file.close()

    def _close_base(self) -> None:
        base, self._base = self._base, {}
        for table in base.values():
            table.close()

    def rest(self) -> Resting | None:
        """As DiskTier.rest. RocksDB stays open, to open which takes 5 ms with the interpreter lock held, but caches nothing."""
        if self._reopen is not None:  # it is to be opened for writing
            return super().rest()
        if not self._end():
            return None
        self._close_base()
        changed_file, self._changed_file = self._changed_file, None
        return _Resting(self.path, self._db, self._cache, self._changed, changed_file)

    def _base_bytes(self) -> int:
        return sum(file.size for table in self._base.values() for file in table.files)

    def _changed_in(self, table_id: int) -> ChangedKeys:
        changed = self._changed.get(table_id)
        if changed is None:
            changed = ChangedKeys()
            self._changed = self._changed | {table_id: changed}
        return changed

    def _live_blocks(
        self, table_id: int, row_bytes: int, entries: int, low: int | None = None, high: int | None = None
    ) -> Iterator[tuple[Keys, Rows, int]]:
        """The base with what deltas changed laid over it, as DiskTier's of RocksDB alone."""
        table = self._base.get(table_id)
        deltas = self._entries(table_id, row_bytes, entries, low, high)
        if table is None:
            yield from super()._live_blocks(table_id, row_bytes, entries, low, high)
            return
        table.check_row_bytes(row_bytes, table.fences[:0])
        over = next(deltas, None)  # from here on RocksDB's rows stand as they were
        for keys, rows in self._base_blocks(table, entries, low, high):
            while len(keys):
                if over is None or over[0][0] > keys[-1]:
                    yield keys, rows, 0
                    break
                end = min(int(keys[-1]), int(over[0][-1]))
                part, rest = _cut(over, end)
                upto = int(np.searchsorted(keys, end, "right"))
                merged_keys, merged, gone = _laid_over(keys[:upto], rows[:upto], *part)
                for start in range(0, max(1, len(merged_keys)), entries):
                    piece = slice(start, start + entries)
                    yield merged_keys[piece], merged[piece], 0 if start else gone
                keys, rows = keys[upto:], rows[upto:]
                over = rest if len(rest[0]) else next(deltas, None)
        while over is not None:
            changed, deleted, new = over
            yield changed[~deleted], new, int(np.count_nonzero(deleted))
            over = next(deltas, None)

    def _base_blocks(
        self, table: SealedTable, entries: int, low: int | None, high: int | None
    ) -> Iterator[tuple[Keys, Rows]]:
        for file, first, last in table.runs(low, high, entries):
            with self._entered():
                keys, rows = read_blocks(file, first, last, None)
            begin = 0 if low is None else int(np.searchsorted(keys, low))
            end = len(keys) if high is None else int(np.searchsorted(keys, high))
            for start in range(begin, end, entries):
                part = slice(start, min(start + entries, end))
                yield keys[part], rows[part]


class _Resting:
    """RocksDB, and which keys deltas may have changed; the base's files are closed."""

    def __init__(
        self, path: Path, db: Any, cache: Any, changed: dict[int, ChangedKeys], file: ChangedFile | None
    ) -> None:
        cache.set_capacity(0)
        self._parts, self._changed, self._changed_file = (path, db, cache), changed, file

    def wake(self, *, block_cache_bytes: int, reader: ReaderPool) -> SealedTier:
        """The tier again. Where RocksDB has failed it is opened anew: it would go on refusing what comes in."""
        path, db, cache = self._parts
        if has_failed(db):
            self.close()
            return SealedTier.open(path, block_cache_bytes=block_cache_bytes, reader=reader)
        cache.set_capacity(block_cache_bytes)
        tier = SealedTier(path, db, cache, reader)
        tier._changed_file = self._changed_file  # closed with the tier if the base cannot be opened
        tier._open_base()
        tier._changed = self._changed
        return tier

    def close(self) -> None:
        """Close RocksDB as well."""
        path, db, _ = self._parts
        if self._changed_file is not None:
            self._changed_file.close()
        close_rocksdb(path, db)

    def memory_bytes(self) -> int:
        """RocksDB's indexes and filters of deltas, and the filter of the keys that they changed."""
        indexes = int(self._parts[1].property_int_value("rocksdb.estimate-table-readers-mem") or 0)
        return indexes + sum(changed.nbytes for changed in self._changed.values())


BASES: dict[BaseKind, type[DiskTier]] = {"sealed": SealedTier, "rocksdb": DiskTier}


def _open_tables(path: Path, record: bytes | None) -> dict[int, SealedTable]:
    if record is None:
        raise Corruption(f"{path}: the record of its base is missing; drop the version and load its snapshot again")
    opened: list[Opened] = []
    entries = _entries_of(record, path)
    _allow_descriptors(len(entries))
    try:
        for entry in entries:
            opened.append(open_sealed(path / BASE / entry["name"], xxh3=entry["xxh3"], size=entry["bytes"]))  # noqa: PERF401
        of_table: dict[int, list[Opened]] = {}
        for file in opened:
            of_table.setdefault(file.table_id, []).append(file)
        return {table_id: SealedTable(files) for table_id, files in of_table.items()}
    except BaseException:
        for file in opened:
            os.close(file.fd)
        raise


def _allow_descriptors(more: int) -> None:
    """Raise this process's own limit of open files, within what it may have, if with so many more half of it were taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    if soft != resource.RLIM_INFINITY and held + more > soft // 2:
        wanted = soft + 2 * (held + more)
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _entries_of(record: bytes, path: Path) -> list[dict[str, Any]]:
    try:
        return [{"name": str(e["name"]), "bytes": int(e["bytes"]), "xxh3": str(e["xxh3"])} for e in json.loads(record)]
    except (ValueError, KeyError, TypeError) as error:
        raise Corruption(f"{path}: the record of its base cannot be read: {error}") from error


def _joined(failures: list[StorageError]) -> StorageError:
    first = failures[0]
    first.keys = sorted({int(key) for failure in failures for key in failure.keys})
    return first


def _cut(
    entries: tuple[Keys, npt.NDArray[np.bool_], Rows], end: int
) -> tuple[tuple[Keys, npt.NDArray[np.bool_], Rows], tuple[Keys, npt.NDArray[np.bool_], Rows]]:
    """Entries up to and including the key `end`, and the others."""
    keys, deleted, rows = entries
    at = int(np.searchsorted(keys, end, "right"))
    live = at - int(np.count_nonzero(deleted[:at]))
    return (keys[:at], deleted[:at], rows[:live]), (keys[at:], deleted[at:], rows[live:])


def _laid_over(
    keys: Keys, rows: Rows, changed: Keys, deleted: npt.NDArray[np.bool_], new_rows: Rows
) -> tuple[Keys, Rows, int]:
    """Base rows without those that were changed, and the new ones, by key; and how many were marked deleted."""
    if not len(changed):
        return keys, rows, 0
    kept = ~np.isin(keys, changed, assume_unique=True)
    all_keys = np.concatenate([keys[kept], changed[~deleted]])
    order = np.argsort(all_keys, kind="stable")
    return all_keys[order], np.concatenate([rows[kept], new_rows])[order], int(np.count_nonzero(deleted))
