"""Sorted table files: the form in which rows and records enter RocksDB.

Every row and every record enters a disk tier in such a file. Layout of its entries:

    key    table id (2 bytes, big-endian) + key code (8 bytes, big-endian, sign bit flipped)
    value  the row in its storage dtype; empty means that the key is deleted

so that byte order is (table, numeric key). If a table has a ttl, the times of its rows are a table of their own, whose id has the highest bit set.
So are the strings of its keys, if these are strings that are kept: UTF-8, under an id with the two highest bits set.
Table id 0 holds the store's own records; their keys are two zero bytes and the record's name in UTF-8.

Free functions; any thread may call them, several files may be written at once. RocksDB holds the interpreter lock while it writes. So the entries of
a delta, which is folded while requests are served, are written in short blocks with a pause after each: otherwise a thread that waits for the lock
waits for the switch interval, 5 ms. A file is complete and synced when `write_sst` returns; a crash before leaves a partial file that nothing refers
to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import rocksdict
import xxhash

from tierstore.errors import Corruption, StorageError
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.disk.rocks import driver_errors, table_options
from tierstore.types import Keys, Rows

META_TABLE = 0
KEY_BYTES = 10
MAX_TABLE_ID = 0xFFFF
TIMES_BIT = 0x8000  # set in the id of a table's times
MAX_TABLES_WITH_STRINGS = 0x3FFF
_STRINGS_BITS = 0xC000
_SIGN = np.int64(-(2**63))
_BLOCK = 4096  # entries handed to RocksDB at a time
_SHORT_BLOCK = 512  # about a quarter of a millisecond with the interpreter lock held
_READ_BYTES = 1 << 20

# table id, keys, their rows, or values of any length as a `large_binary`, and which of them are deleted
Entries = tuple[int, Keys, Rows | pa.Array, npt.NDArray[np.bool_] | None]


Records = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class SstFile:
    """A finished file.

    `xxh3` is the XXH3-64 (16 hex digits) of its bytes as built; for a delta, `keys` are those of its tables and its records.
    """

    path: Path
    xxh3: str
    bytes: int
    entries: int
    keys: Sequence[tuple[int, Keys]] | None = field(default=None, repr=False, compare=False)
    records: Records = field(default_factory=dict, repr=False, compare=False)


def times_id(table_id: int) -> int:
    """The table id of a table's times: rows of four bytes, with the keys of the table."""
    return table_id | TIMES_BIT


def strings_id(table_id: int) -> int:
    """The table id of the strings of a table's keys, of at most `MAX_TABLES_WITH_STRINGS` tables."""
    return table_id | _STRINGS_BITS


def pack_keys(table_id: int, keys: Keys) -> npt.NDArray[np.void]:
    """Encode `keys` (int64 [n]) as n items of 10 bytes; `.tolist()` turns them into `bytes` objects."""
    if not META_TABLE < table_id <= MAX_TABLE_ID:
        raise ValueError(f"table id {table_id} is out of range: expected 1 to {MAX_TABLE_ID}")
    packed = np.empty((len(keys), KEY_BYTES), np.uint8)
    packed[:, 0] = table_id >> 8
    packed[:, 1] = table_id & 0xFF
    packed[:, 2:] = (keys ^ _SIGN).astype(">i8").view(np.uint8).reshape(len(keys), 8)
    return packed.view(f"V{KEY_BYTES}").ravel()


def sst_keys(table_id: int, keys: Keys) -> list[bytes]:
    """The stored form of `keys`, one `bytes` of 10 each, in the same order."""
    packed: list[bytes] = pack_keys(table_id, keys).tolist()
    return packed


def unpack_keys(stored: Sequence[bytes]) -> Keys:
    """The key codes (int64 [n]) of stored keys, all of one table. Raises Corruption on a key of another length."""
    joined = b"".join(stored)
    if len(joined) != KEY_BYTES * len(stored):
        raise Corruption(f"stored keys should be {KEY_BYTES} bytes each, but {len(stored)} of them take {len(joined)}")
    big_endian = np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)[:, 2:].copy().view(">i8").ravel()
    return big_endian.astype(np.int64) ^ _SIGN


def record_key(name: str) -> bytes:
    """The stored key of the record `name`."""
    if not name:
        raise ValueError("a record needs a name")
    return b"\0\0" + name.encode()


def write_sst(
    path: Path,
    *,
    records: Records | None = None,
    tables: Sequence[Entries] = (),
    delta: bool,
) -> SstFile:
    """Write one sorted file and sync it.

    `records` go to the store's own table. Each of `tables` is (table id, keys int64 [n] ascending and distinct, rows uint8 [n, row_bytes] or
    large_binary [n], deleted bool [n] or None), in ascending order of ids. `delta` adds a Bloom filter, since most look-ups miss a delta. Needs at least one entry.

    Raises ValueError when entries are out of order or there are none, StorageError when the disk fails or is full; no file is left then.
    """
    writer = rocksdict.SstFileWriter(table_options(bloom=delta))
    entries = 0
    try:
        with driver_errors(f"writing {path.name}"):
            writer.open(str(path))
            for stored_keys, values in _blocks(records or {}, tables, _SHORT_BLOCK if delta else _BLOCK):
                deque(map(writer.__setitem__, stored_keys, values), maxlen=0)
                entries += len(stored_keys)
                if delta:
                    yield_to_requests()
            if not entries:
                raise ValueError("nothing to write: a sorted file needs at least one record or row")
            writer.finish()  # holds the interpreter lock for a millisecond, as ingesting the file does
        changed = [(table_id, keys) for table_id, keys, _, _ in tables] if delta else None
        return SstFile(path, file_xxh3(path), path.stat().st_size, entries, changed, records or {})
    except BaseException:
        del writer
        path.unlink(missing_ok=True)
        raise


def checked_tables(tables: Sequence[Entries]) -> Sequence[Entries]:
    """`tables` of `write_sst`. ValueError where they are out of order, or do not match."""
    last_id = META_TABLE
    for table_id, keys, rows, deleted in tables:
        if table_id <= last_id:
            raise ValueError(f"table {table_id} comes after table {last_id}: expected ascending ids from 1")
        last_id = table_id
        if len(keys) != len(rows) or (deleted is not None and len(deleted) != len(keys)):
            raise ValueError(f"table {table_id}: {len(keys)} keys, {len(rows)} rows and marks of deletion do not match")
        if not np.all(keys[1:] > keys[:-1]):
            raise ValueError(f"table {table_id}: keys are not ascending and distinct")
    return tables


def _blocks(records: Records, tables: Sequence[Entries], block: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    if records:
        named = sorted((record_key(name), value) for name, value in records.items())
        yield [key for key, _ in named], [value for _, value in named]
    for table_id, keys, rows, deleted in checked_tables(tables):
        packed = pack_keys(table_id, keys)
        for start in range(0, len(keys), block):
            part = slice(start, start + block)
            yield packed[part].tolist(), _values(rows[part], None if deleted is None else deleted[part])


def _values(rows: Rows | pa.Array, deleted: npt.NDArray[np.bool_] | None) -> list[bytes]:
    values: list[bytes]
    if isinstance(rows, pa.Array):
        values = rows.to_pylist()
    else:
        values = np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").ravel().tolist()
    if deleted is None or not deleted.any():
        return values
    marked = np.empty(len(values), object)
    marked[:] = values
    marked[deleted] = b""
    kept: list[bytes] = marked.tolist()
    return kept


def file_xxh3(path: Path) -> str:
    """XXH3-64 of a file's bytes, 16 hex digits.

    RocksDB's file writer drops what it wrote from the page cache, so this reads from the drive itself, and leaves the bytes cached.
    """
    digest = xxhash.xxh3_64()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise StorageError(f"cannot read {path} back: {error.strerror or error}") from error
    return digest.hexdigest()
