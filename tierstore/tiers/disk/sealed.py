"""The disk tier over sealed base files: loaded rows are in our own files, rows that deltas changed are in RocksDB.

Kernels (`sealed_rows.py`) read without the interpreter lock and without an object for each row. They read a key from the base if a filter in memory
says that no delta has changed it; otherwise from a copy of the changes (`patches.py`) if that is complete; otherwise from RocksDB. RocksDB's record
`base` names the base's files, so opening the tier refuses a base file that is missing, cut off or replaced. The filter is kept in a file
(`changed_keys_file.py`), and is filled from RocksDB if that file is not up to date.

Threads and crashes: as in `tier.py`. The base never changes after a load.

Why a look-up never answers an older row than an earlier look-up: `change` first adds its keys to the filter, then has RocksDB take in the rows, and
then publishes their patches, in one step. A look-up takes the current patches, and then reads the filter. If its patches lack a key of the change, it
answers the value before, from an older patch or the base, as if it had begun earlier; a look-up that begins later has the same patches or newer ones.
If patches are not complete, a key that is in the filter but not in them is read from RocksDB, which has the newest row, or, until the change is
there, the row before; if it has none, the base has it. If the filter were filled afterwards, a look-up in between would miss a row that another
thread has read already. Nobody relies on a change before `change` has returned.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tierstore import open_files
from tierstore.errors import Corruption, StorageError
from tierstore.formats.files import make_dir, rename_all
from tierstore.kernels.codec import address_of
from tierstore.kernels.partitions import group
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.base import Peek, ReadBy
from tierstore.tiers.disk import changed_keys_file, sealed_rows
from tierstore.tiers.disk.changed_keys import ChangedKeys
from tierstore.tiers.disk.changed_keys_file import ChangedFile
from tierstore.tiers.disk.database import Database
from tierstore.tiers.disk.delta_file import write_delta_file
from tierstore.tiers.disk.layout import BASE as BASE_WORDS
from tierstore.tiers.disk.merge import Changes, ascending, merged_blocks
from tierstore.tiers.disk.patches import RECORD as PATCHES
from tierstore.tiers.disk.patches import Patched, Patches
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed_file import Opened, SealedFile, check_still, open_sealed, read_blocks
from tierstore.tiers.disk.sealed_table import SealedTable, close_all, scatter
from tierstore.tiers.disk.sst import Entries, Records, SstFile
from tierstore.tiers.disk.tier import IDENTITY, WATERMARK, DiskTier, TableContent
from tierstore.types import MAX_PARTITIONS, BaseKind, Keys, Rows, States, Tier

log = logging.getLogger(__name__)

BASE = "base"
_CHUNK_KEYS = 1024  # keys of one task: 2 ms warm
_WINDOW = 32  # reads of a task under way
_COPY_ROWS = 16384  # rows at a time
_PATCHES = 64  # open patches that are allowed for; many tables and changes have more
_NO_BLOCKS = np.zeros(2, np.int64)  # the block places of an empty base


def base_record(files: Sequence[SealedFile | SstFile], parts: int = 1) -> dict[str, bytes]:
    """The record that names the sealed files of a tier's base, and the number of partitions if each file has only one."""
    entries = [{"name": file.path.name, "bytes": file.bytes, "xxh3": file.xxh3} for file in files]
    return {BASE: json.dumps(entries if parts == 1 else {"partitions": parts, "files": entries}).encode()}


class SealedTier(DiskTier):
    """A RocksDB directory that has the base's files in its folder `base`. Make one with `create` or `open`."""

    _open_threads = 1  # RocksDB has only deltas, which are a few files
    _merge_at = 16  # patches answer look-ups; each merge writes all changed rows again, which costs more than folds

    def __init__(self, path: Path, database: Database, readers: ReaderPool) -> None:
        super().__init__(path, database, readers)
        # replaced as a whole by the one writer, so that readers need no lock
        self._base: dict[int, SealedTable] = {}
        self._changed: dict[int, ChangedKeys] = {}
        self._words: dict[int, npt.NDArray[np.int64]] = {}  # for kernels, by table id
        self._changed_file: ChangedFile | None = None  # for the writer
        self._patches = Patches(path)

    @classmethod
    def open(cls, path: Path, *, block_cache_bytes: int, reader: ReaderPool, read_only: bool = False) -> Self:
        """`DiskTier.open`; Corruption for a base file that is missing or is not the one that was built."""
        tier = cls._open(path, block_cache_bytes, reader, read_only=read_only)
        try:
            tier._open_base()
            tier._fill_changed(keep=not read_only)
            open_files.allow(_PATCHES)
            changed = any(changed.keys for changed in tier._changed.values())
            tier._patches.open(tier.record, changed=changed, remove_unnamed=not read_only)
            close_all(tier._let_files_go())  # an opened version may not be read for a long time
        except BaseException:
            tier.close()
            raise
        return tier

    def _fill_changed(self, *, keep: bool) -> None:
        """Fill the filters from their file, or else from RocksDB's keys.

        With `keep`, the file is kept up to date from now on.
        """
        path, watermark, identity = self.path / changed_keys_file.NAME, self.watermark(), self.record(IDENTITY)
        replayed = None if watermark is None else changed_keys_file.replay(path, watermark, identity)
        size: int | None = None
        if replayed is not None:
            self._changed, size = replayed
        elif keep and watermark is not None:
            try:
                size = changed_keys_file.rewrite(path, self._entries_from_rocksdb(watermark), identity)
            except StorageError as error:
                log.warning("%s; the next start fills the filters again", error)
        if size is None:
            self._changed = {}
            for table_id, keys in self._table_keys():
                self._changed_in(table_id).add(keys)
        elif keep:
            self._changed_file = ChangedFile(path, size)
        self._have_filters()

    def _have_filters(self) -> None:
        """Make a filter for each table of the base before there are readers: later only the writer adds to the dictionary."""
        self._changed = {table_id: ChangedKeys() for table_id in self._base} | self._changed

    def _entries_from_rocksdb(self, watermark: int) -> Iterator[bytes]:
        for table_id, keys in self._table_keys():
            yield changed_keys_file.entry(-1, {table_id: self._changed_in(table_id).add(keys)})
        yield changed_keys_file.entry(watermark, {})

    def _open_base(self) -> None:
        self._base = _open_tables(self.path, self.record(BASE))
        self._have_filters()

    def ingest(self, files: Sequence[SstFile | SealedFile | Path]) -> None:
        """Take in the base's files, once, with a file of records, `base_record` among them. Later rows come by `change`."""
        sealed = [file for file in files if isinstance(file, SealedFile)]
        sorted_files = [file for file in files if not isinstance(file, SealedFile)]
        for file in sorted_files:
            if not isinstance(file, SstFile) or file.entries != len(file.records):
                raise ValueError(f"{file}: expected a file of records alone; rows come by `change`")
        if sealed:
            self._move_in(sealed)
        super().ingest(sorted_files)
        if sealed:
            self._open_base()
            self._patches.open(self.record, changed=False, remove_unnamed=False)

    def _change(self, keys: Sequence[tuple[int, Keys]], watermark: bytes | None) -> None:
        new = {table_id: self._changed_in(table_id).add(changed) for table_id, changed in keys}
        if self._changed_file is not None:
            seq = int(watermark) if watermark is not None and watermark.isdigit() else -1
            if not self._changed_file.add(seq, new) and seq == self.watermark():
                raise StorageError(
                    f"{self.path / changed_keys_file.NAME} can be neither written nor removed, and would pass for up "
                    "to date"
                )

    def _move_in(self, sealed: list[SealedFile]) -> None:
        if self._base or self.record(BASE) is not None:
            raise ValueError(f"{self.path} has its base already; load another version")
        folder = make_dir(self.path / BASE)
        rename_all([(file.path, folder / file.path.name) for file in sealed])

    def change(self, path: Path, records: Records, tables: Sequence[Entries], strings: Sequence[Entries] = ()) -> None:
        """`DiskTier.change`, with the patches of the change."""
        open_files.allow(len(tables))
        patches, all_records = self._patches.write(tables, records)
        try:
            yield_to_requests()
            watermark = records.get(WATERMARK)
            self._change([(table_id, keys) for table_id, keys, _, _ in tables], watermark)  # before the rows are there
            super().change(path, all_records, tables, strings)
            self._patches.add(patches)
        except BaseException:
            before = self._patches.distrust()  # the change may be in RocksDB: let it answer
            is_there = self.record(PATCHES) == all_records[PATCHES]
            self._patches.trust(before)
            if is_there:
                self._patches.add(patches)
            else:
                self._patches.remove(patches)
            raise

    def _write(self, path: Path, records: Records, tables: Sequence[Entries]) -> SstFile:
        """See DiskTier. Look-ups of keys that no change has do not come to it, so it needs no filter."""
        return write_delta_file(path, records=records, tables=tables)

    @property
    def compaction_due(self) -> bool:
        """See DiskTier."""
        return not self._patches.is_whole or self._patches.is_due

    @property
    def compaction_urgent(self) -> bool:
        """See DiskTier."""
        return self._patches.are_many

    def compact(self, path: Path, records: Records, row_bytes: Mapping[int, int], give_up: Callable[[], bool]) -> bool:
        """`DiskTier.compact`: rebuilds patches that are not complete, and merges patches of like size."""
        before = self._patches.published
        if not self._patches.is_whole:
            if not self._patches.rebuild(row_bytes, self._entries_from, give_up):
                return True
            super().change(path, self._patches.records_as_whole(records), [])
            self._patches.complete()
        self._patches.merge(give_up)
        return self._patches.published is not before

    def _entries_from(self, table_id: int, row_bytes: int, low: int | None) -> Iterator[Changes]:
        return self._entries(table_id, row_bytes, _COPY_ROWS, low)

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        """`DiskTier.get`. If a table's rows have another length than `rows`, Corruption for all keys."""
        keys = np.ascontiguousarray(keys)
        with self._database.held():
            table = self._base.get(table_id)
            if table is not None:
                table.check_row_bytes(rows.shape[1], keys)
            if (by := self.read_by(table_id, rows.shape[1])) is None:  # a table without rows and without changes
                state[:] = Tier.ABSENT
                return
            parts = 1 if table is None else table.parts
            if parts == 1 and rows.flags.c_contiguous:
                failures = self._get_by(by, table_id, keys, rows, state)
            else:  # kernels need keys by part, and rows without gaps
                order = _by_part(keys, parts)
                whole, found = np.empty(rows.shape, np.uint8), np.zeros(len(keys), np.uint8)
                failures = self._get_by(by, table_id, keys[order], whole, found)
                scatter(order, whole, found, rows, state)
        if failures:
            raise _joined(failures)

    def in_order(self, table_id: int, keys: Keys) -> Keys:
        """See DiskTier."""
        keys, table = super().in_order(table_id, keys), self._base.get(table_id)
        return keys if table is None or table.parts == 1 else keys[_by_part(keys, table.parts)]

    def _get_by(self, by: ReadBy, table_id: int, keys: Keys, rows: Rows, state: States) -> list[StorageError]:
        """`get` for keys by part and then ascending. Returns errors, with the keys that could not be read."""
        failures: list[StorageError] = []
        damaged = bool(self._read(by, by.changes, table_id, keys, rows, state))
        left = np.flatnonzero(state == Tier.PENDING)  # perhaps changed, or the base's and damaged: RocksDB knows
        if not len(left):
            return failures
        order = left[np.argsort(keys[left])]
        some, found = keys[order], np.zeros(len(left), np.uint8)
        got = np.empty((len(left), rows.shape[1]), np.uint8)
        lost = np.zeros(len(left), np.bool_)
        try:
            self._get(table_id, some, got, found, unknown=Tier.PENDING)
        except StorageError as error:
            failures.append(error)
            lost = np.isin(some, error.keys)
        if by.changes == sealed_rows.ALL and (not damaged or (found != Tier.PENDING).any()):
            self._patches.damaged = True  # they could not answer their keys
        scatter(order, got, found, rows, state)
        left = np.sort(order[(found == Tier.PENDING) & ~lost])  # RocksDB does not have them
        if len(left):
            got, found = np.empty((len(left), rows.shape[1]), np.uint8), np.zeros(len(left), np.uint8)
            failures += self._read(by, sealed_rows.BASE_ALONE, table_id, keys[left], got, found)
            scatter(left, got, found, rows, state)
        return failures

    def _read(
        self, by: ReadBy, changes: int, table_id: int, keys: Keys, rows: Rows, state: States
    ) -> list[StorageError]:
        """Have kernels read keys by part and then ascending, into rows without gaps. Returns at most one error."""
        lost: list[tuple[int, npt.NDArray[np.int32]]] = []
        if (base := self._base.get(table_id)) is not None:
            try:
                base.awake()
            except StorageError as error:
                error.keys = keys.tolist()
                return [error]
        if changes != sealed_rows.BASE_ALONE and isinstance(by.kept, Patched):
            by.kept.awake()
        at, count, row_bytes = address_of(by.patches), len(by.patches), rows.shape[1]

        def read(start: int, stop: int) -> None:
            trouble = np.zeros(stop - start, np.int32)
            if sealed_rows.look_up(
                by.base_at, at, count, changes, keys[start:stop], address_of(rows) + start * row_bytes, row_bytes,
                state[start:stop], trouble, _WINDOW,
            ):  # fmt: skip
                lost.append((start, trouble))

        self._readers.run(len(keys), read, _CHUNK_KEYS)
        return [self._base[table_id].why(keys, lost)] if lost else []

    def peek(self, table_id: int, row_bytes: int, key: int) -> dict[str, Peek]:
        """`DiskTier.peek`: `changes` (rows that deltas brought) and `base`.

        A change that the filter denies is `filtered`: no look-up reads it.
        """
        keys, rows, state = np.array([key], np.int64), np.empty((1, row_bytes), np.uint8), np.zeros(1, np.uint8)
        with self._database.held():
            changed, by = self._changed.get(table_id), self.read_by(table_id, row_bytes)
            changes = self._peek(table_id, row_bytes, key)
            maybe = changed is not None and changed.maybe_changed(keys) is not None
            if changes.holds != "nothing" and not maybe:
                changes = changes._replace(heat={"filtered": True})
            if by is not None and (failures := self._read(by, sealed_rows.BASE_ALONE, table_id, keys, rows, state)):
                raise _joined(failures)
        return {"changes": changes, "base": Peek(rows.tobytes()) if state[0] == Tier.DISK else Peek()}

    def check_base(self) -> None:
        """`DiskTier.check_base`, by the ends of the files."""
        with self._database.held():
            for table in self._base.values():
                for file in table.files:
                    check_still(file)

    def close_idle_files(self, once_unread: Callable[[Callable[[], None]], None]) -> None:
        """See DiskTier."""
        super().close_idle_files(once_unread)
        with self._database.alone() as is_alone:
            if not is_alone:
                return
            descriptors = self._let_files_go()
        if descriptors:
            once_unread(lambda: close_all(descriptors))

    def _let_files_go(self) -> list[int]:
        descriptors = self._patches.close_idle_files()
        for table in self._base.values():
            descriptors += table.close_idle_files()
        return descriptors

    def read_by(self, table_id: int, row_bytes: int) -> ReadBy | None:
        """See RowStore. None for a table without rows and changes, or if its rows have another length."""
        table, changed = self._base.get(table_id), self._changed.get(table_id)
        if changed is None or (table is not None and table.row_bytes != row_bytes):
            return None
        words = self._words.get(table_id)
        if words is None:
            changed_at = address_of(changed.place)
            words = _without_base(changed_at) if table is None else table.words(changed_at)
            words = self._words.setdefault(table_id, words)
        patched = self._patches.of(table_id, row_bytes)
        return ReadBy(address_of(words), patched.changes, patched.addresses, patched)

    def stats(self) -> dict[str, int]:
        """RocksDB's counts, whose `bytes` and `files` are of deltas, and the base's.

        `…_memory_bytes` are held while the tier is open.
        """
        return super().stats() | {
            "base_files": sum(len(table.files) for table in self._base.values()),
            "base_bytes": self._base_bytes(),
            "base_index_memory_bytes": sum(table.first_keys.nbytes for table in self._base.values()),
            "changed_keys": sum(changed.keys for changed in self._changed.values()),
            "changed_filter_memory_bytes": sum(changed.nbytes for changed in self._changed.values()),
            **self._patches.stats(),
        }

    def bytes_on_disk(self) -> int:
        """Bytes of the base, of RocksDB's sorted files and of patches."""
        return super().bytes_on_disk() + self._base_bytes() + self._patches.stats()["patch_bytes"]

    def verify(
        self, row_bytes: Mapping[int, int], progress: Callable[[int], None] | None = None
    ) -> dict[int, TableContent]:
        """`DiskTier.verify`; patches are read back too. `compact` rebuilds a damaged one."""
        content = super().verify(row_bytes, progress)
        self._patches.check()
        return content

    def close(self) -> None:
        """Close RocksDB and the base, as DiskTier does."""
        super().close()  # waits for calls under way: after this none uses a file descriptor
        self._close_base()
        self._patches.close()

    def _close_base(self) -> None:
        base, self._base = self._base, {}
        for table in base.values():
            table.close()

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
        """`DiskTier._live_blocks`, of the base with the deltas' changes merged in."""
        table = self._base.get(table_id)
        deltas = self._entries(table_id, row_bytes, entries, low, high)
        if table is None:
            yield from super()._live_blocks(table_id, row_bytes, entries, low, high)
            return
        table.check_row_bytes(row_bytes, table.first_keys[:0])
        yield from merged_blocks(self._base_blocks(table, entries, low, high), deltas, entries)

    def _base_blocks(
        self, table: SealedTable, entries: int, low: int | None, high: int | None
    ) -> Iterator[tuple[Keys, Rows]]:
        parts = [part for part in range(table.parts) if table.part_starts[part] < table.part_starts[part + 1]]
        each = entries if len(parts) == 1 else max(1, entries // (2 * len(parts)))  # `ascending` may hold two of each
        return ascending([self._part_blocks(table, each, low, high, part) for part in parts], each)

    def _part_blocks(
        self, table: SealedTable, entries: int, low: int | None, high: int | None, part: int
    ) -> Iterator[tuple[Keys, Rows]]:
        for file, first, last in table.runs(low, high, entries, part):
            with self._database.held():
                table.awake()
                keys, rows = read_blocks(file, first, last, None)
            begin = 0 if low is None else int(np.searchsorted(keys, low))
            end = len(keys) if high is None else int(np.searchsorted(keys, high))
            for start in range(begin, end, entries):
                piece = slice(start, min(start + entries, end))
                yield keys[piece], rows[piece]


BASES: dict[BaseKind, type[DiskTier]] = {"sealed": SealedTier, "rocksdb": DiskTier}


def _without_base(changed_at: int) -> npt.NDArray[Any]:
    """The words of a table without rows in the base."""
    return BASE_WORDS.make(part_starts_at=address_of(_NO_BLOCKS), parts=1, changed_at=changed_at)


def _by_part(keys: Keys, parts: int) -> npt.NDArray[np.int64]:
    """The places of `keys` by part, and within each part as they are."""
    order, starts = np.empty(len(keys), np.int64), np.empty(parts + 1, np.int64)
    group(keys, np.arange(len(keys)), np.arange(parts), order, starts)
    return order


def _open_tables(path: Path, record: bytes | None) -> dict[int, SealedTable]:
    if record is None:
        raise Corruption(f"{path}: the record of its base is missing; drop the version and load its snapshot again")
    opened: list[Opened] = []
    parts, entries = _entries_of(record, path)
    open_files.allow(len(entries))
    try:
        for entry in entries:
            opened.append(open_sealed(path / BASE / entry["name"], xxh3=entry["xxh3"], size=entry["bytes"]))  # noqa: PERF401
        of_table: dict[int, list[Opened]] = {}
        for file in opened:
            of_table.setdefault(file.table_id, []).append(file)
        return {table_id: SealedTable(files, parts) for table_id, files in of_table.items()}
    except BaseException:
        for file in opened:
            os.close(file.fd)
        raise


def _entries_of(record: bytes, path: Path) -> tuple[int, list[dict[str, Any]]]:
    """The parts of a `base_record`: how many partitions, and name, bytes and checksum of each file."""
    try:
        document = json.loads(record)
        parts, files = (1, document) if isinstance(document, list) else (document["partitions"], document["files"])
        if not 1 <= parts <= MAX_PARTITIONS:
            raise ValueError(f"expected at most {MAX_PARTITIONS} partitions, got {parts}")
        return parts, [{"name": str(e["name"]), "bytes": int(e["bytes"]), "xxh3": str(e["xxh3"])} for e in files]
    except (ValueError, KeyError, TypeError) as error:
        raise Corruption(f"{path}: the record of its base cannot be read: {error}") from error


def _joined(failures: list[StorageError]) -> StorageError:
    first = failures[0]
    first.keys = sorted({int(key) for failure in failures for key in failure.keys})
    return first
