"""The sorted file of a fold, written without the driver.

RocksDB's own writer takes an entry at a time and holds the interpreter lock, 0.4 µs a row and a millisecond at its end, for which look-ups in the
process wait. The rows of a change are one array, sorted, of one length: whole blocks of entries are laid out by a few copies, without the lock. Strings,
of any length, are laid out by Arrow.

The format is RocksDB's block-based table, format version 5, with XXH3 checksums, as `rocks.table_options` has it; nothing is compressed, keys share no
bytes, and there is no filter: where the base is sealed, another one tells which keys have changed. RocksDB's next compaction rewrites the file as it
writes all its files. The layout is that of https://github.com/facebook/rocksdb/wiki/Rocksdb-BlockBasedTable-Format and of `table/format.cc`.

Free functions; any thread may call them. A file is complete and on the drive when `write_delta_file` returns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.tiers.background import yield_to_requests
from tierstore.tiers.disk.sst import KEY_BYTES, Entries, Records, SstFile, checked_tables, pack_keys, record_key
from tierstore.types import Keys, Rows

_BLOCK_BYTES = 128 << 10  # also laid out at a time: some ten microseconds
_RESTART = 16  # entries: a search within a block ends with so many of them
_VALUE = struct.pack("<Q", 1)  # the end of a stored key: sequence number 0, which an ingest replaces, and "a value"
_KEY_BYTES = KEY_BYTES + len(_VALUE)
_TRAILER = struct.Struct("<BI")  # of a block: not compressed, and its checksum
_XXH3, _VERSION, _MAGIC = 4, 5, 0x88E2_41B7_85F4_CFF7
_HANDLES_BYTES = 40  # of the footer
_MOST_STRINGS = 1 << 16  # laid out at a time


def write_delta_file(path: Path, *, records: Records, tables: Sequence[Entries]) -> SstFile:
    """Write the sorted file of a change and sync it; arguments and errors as for `write_sst`."""
    tables = checked_tables(tables)
    named = sorted((record_key(name), value) for name, value in records.items())
    entries = len(named) + sum(len(keys) for _, keys, _, _ in tables)
    if not entries:
        raise ValueError("nothing to write: a sorted file needs at least one record or row")
    try:
        with files.create(path) as file:
            writer = _Writer(file)
            if named:
                writer.block([_entry(key + _VALUE, value) for key, value in named], named[-1][0] + _VALUE)
            for table_id, keys, rows, deleted in tables:
                laid_out = _blocks if isinstance(rows, np.ndarray) else _blocks_of_any_length
                for block, restarts, last in laid_out(table_id, keys, rows, deleted):
                    writer.put_block(block, restarts, last)
            writer.finish(entries)
            files.sync(file, path)
        return SstFile(path, writer.xxh3.hexdigest(), writer.at, entries, [(of[0], of[1]) for of in tables], records)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):  # as the disk fills up, say
            raise files.storage_error(f"writing {path.name}", error) from error
        raise


class _Writer:
    """A file that is being written, block by block. `at`: its bytes so far; `xxh3`: of these."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.at, self.xxh3 = 0, xxhash.xxh3_64()
        self._index: list[bytes] = []  # entries, one a data block
        self._data_bytes = 0

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.xxh3.update(data)
        self.at += len(data)

    def _put(self, block: bytes | memoryview, restarts: npt.NDArray[np.int64]) -> bytes:
        """Write a block and what follows it. Returns its handle."""
        end = restarts.astype("<u4").tobytes() + struct.pack("<I", len(restarts))
        checksum = xxhash.xxh3_64(block)
        checksum.update(end)
        handle = _varint(self.at) + _varint(len(block) + len(end))
        self._write(block)
        self._write(end + _TRAILER.pack(0, checksum.intdigest() & 0xFFFF_FFFF))
        return handle

    def put_block(self, block: bytes | memoryview, restarts: npt.NDArray[np.int64], last_key: bytes) -> None:
        """Write a block of entries; `restarts` are places in it where entries begin, `last_key` is that of the last."""
        self._index.append(_entry(last_key, self._put(block, restarts)))
        self._data_bytes = self.at

    def block(self, entries: Sequence[bytes], last_key: bytes) -> None:
        self.put_block(b"".join(entries), _starts(entries), last_key)

    def finish(self, entries: int) -> None:
        properties = {
            "rocksdb.block.based.table.index.type": struct.pack("<I", 0),
            "rocksdb.block.based.table.prefix.filtering": b"0",
            "rocksdb.block.based.table.whole.key.filtering": b"1",
            "rocksdb.comparator": b"leveldb.BytewiseComparator",
            "rocksdb.compression": b"NoCompression",
            "rocksdb.data.size": _varint(self._data_bytes),
            "rocksdb.deleted.keys": _varint(0),
            "rocksdb.external_sst_file.global_seqno": struct.pack("<Q", 0),
            "rocksdb.external_sst_file.version": struct.pack("<I", 2),
            "rocksdb.filter.size": _varint(0),
            "rocksdb.fixed.key.length": _varint(0),
            "rocksdb.format.version": _varint(0),
            "rocksdb.index.key.is.user.key": _varint(0),
            "rocksdb.index.size": _varint(sum(map(len, self._index))),
            "rocksdb.index.value.is.delta.encoded": _varint(0),
            "rocksdb.merge.operands": _varint(0),
            "rocksdb.num.data.blocks": _varint(len(self._index)),
            "rocksdb.num.entries": _varint(entries),
            "rocksdb.raw.key.size": _varint(entries * _KEY_BYTES),
            "rocksdb.raw.value.size": _varint(max(0, self._data_bytes - entries * _KEY_BYTES)),
        }
        index = self._put(b"".join(self._index), _starts(self._index))
        listed = [_entry(name.encode(), value) for name, value in sorted(properties.items())]
        place = self._put(b"".join(listed), _starts(listed))
        known = [_entry(b"rocksdb.properties", place)]
        meta = self._put(b"".join(known), _starts(known))
        footer = bytes([_XXH3]) + (meta + index).ljust(_HANDLES_BYTES, b"\0") + struct.pack("<IQ", _VERSION, _MAGIC)
        self._write(footer)


def _blocks(
    table_id: int, keys: Keys, rows: Rows, deleted: npt.NDArray[np.bool_] | None
) -> Iterator[tuple[memoryview, npt.NDArray[np.int64], bytes]]:
    """(entries, restarts, last stored key) of each block."""
    size = _varint(rows.shape[1])
    head = np.frombuffer(bytes((0, _KEY_BYTES)) + size, np.uint8)
    key_at, value_at = len(head), len(head) + _KEY_BYTES
    each = value_at + rows.shape[1]
    per_block = max(1, _BLOCK_BYTES // each)
    for begin in range(0, len(keys), per_block):
        some = slice(begin, begin + per_block)
        count = len(keys[some])
        entries = np.empty((count, each), np.uint8)
        entries[:, :key_at] = head
        entries[:, key_at : key_at + KEY_BYTES] = pack_keys(table_id, keys[some]).view(np.uint8).reshape(count, -1)
        entries[:, key_at + KEY_BYTES : value_at] = np.frombuffer(_VALUE, np.uint8)
        entries[:, value_at:] = rows[some]
        starts = np.arange(count, dtype=np.int64) * each
        laid_out = entries.reshape(-1)
        if deleted is not None and (marked := deleted[some]).any():  # an entry without a value, whose size is one byte
            entries[marked, 2] = 0
            kept = np.ones(entries.shape, np.bool_)
            kept[marked, 3:key_at] = False
            kept[marked, value_at:] = False
            laid_out = entries[kept]
            np.cumsum(np.where(marked, 3 + _KEY_BYTES, each)[:-1], out=starts[1:])
        yield laid_out.data, starts[::_RESTART], entries[-1, key_at:value_at].tobytes()
        yield_to_requests()


def _blocks_of_any_length(
    table_id: int, keys: Keys, values: pa.Array, deleted: npt.NDArray[np.bool_] | None
) -> Iterator[tuple[memoryview, npt.NDArray[np.int64], bytes]]:
    """`_blocks`, of values of any length, large_binary [n]."""
    binary = pa.large_binary()
    head, nothing = pa.scalar(bytes((0, _KEY_BYTES)), binary), pa.scalar(b"", binary)
    for begin in range(0, len(keys), _MOST_STRINGS):
        count = len(keys[begin : begin + _MOST_STRINGS])
        stored = np.empty((count, _KEY_BYTES), np.uint8)
        stored[:, :KEY_BYTES] = pack_keys(table_id, keys[begin : begin + count]).view(np.uint8).reshape(count, -1)
        stored[:, KEY_BYTES:] = np.frombuffer(_VALUE, np.uint8)
        fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(_KEY_BYTES), count, [None, pa.py_buffer(stored)])
        some = values.slice(begin, count)
        if deleted is not None:
            some = pc.if_else(pa.array(deleted[begin : begin + count].astype(np.bool_)), nothing, some)
        lengths, of = np.unique(pc.binary_length(some).to_numpy(zero_copy_only=False), return_inverse=True)
        sizes = pa.array(map(_varint, lengths.tolist()), binary).take(pa.array(of))
        entries = pc.binary_join_element_wise(head, sizes, fixed.cast(binary), some, nothing)
        _, offsets, data = entries.buffers()
        starts, laid_out = np.frombuffer(offsets, np.int64)[: count + 1], memoryview(data)
        first = 0
        while first < count:  # once a block
            end = max(first + 1, int(np.searchsorted(starts, starts[first] + _BLOCK_BYTES, "right")) - 1)
            block = laid_out[starts[first] : starts[end]]
            yield block, starts[first:end:_RESTART] - starts[first], stored[end - 1].tobytes()
            first = end
            yield_to_requests()


def _entry(key: bytes, value: bytes) -> bytes:
    """An entry whose key shares nothing with the one before."""
    return b"\0" + _varint(len(key)) + _varint(len(value)) + key + value


def _starts(entries: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """Where each entry of a block begins."""
    return np.cumsum([0, *map(len, entries[:-1])])


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
