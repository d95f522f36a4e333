"""The file of a table's filters of changed keys (`changed_keys.py`), next to RocksDB, so that a start need not read all of RocksDB's keys.

    header (16 bytes, and 8 of the identity) | entries

An entry is what one delta has added to the filters: for each table, the keys that its filter did not find. Entries replayed in order give the same
filters, bit by bit. That matters: a key that a filter found by chance is in no entry, and the filter must still find it. An entry is durable before
RocksDB has the delta, and has the delta's watermark. So a file that reaches RocksDB's watermark is complete; any other file is written again. So is a
file whose version or line is not RocksDB's, if RocksDB records its own. schema/layout.md has the bytes.

For the one writer of a tier. A crash leaves whole entries, and perhaps a part of one more, whose delta is not in RocksDB.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.tiers.disk.changed_keys import BITS_A_KEY, SMALLEST, ChangedKeys
from tierstore.types import Keys

log = logging.getLogger(__name__)

NAME = "changed.keys"
FORMATS = (1, 2)  # without and with the identity
_HEADER = struct.Struct("<8sHHI")  # magic, format, bits a key, keys of the smallest layer
_ENTRY = struct.Struct("<QqQ")  # bytes of its tables, watermark, checksum of both and of the tables
_TABLE = struct.Struct("<IIQ")  # id, 0, keys


def _head(identity: bytes | None) -> bytes:
    """The header of a file beside a RocksDB with this identity record, if it has one."""
    head = _HEADER.pack(b"TIERCHGD", FORMATS[identity is not None], BITS_A_KEY, SMALLEST)
    return head if identity is None else head + xxhash.xxh3_64_intdigest(identity).to_bytes(8, "little")


def entry(watermark: int, tables: Mapping[int, Keys]) -> bytes:
    """The bytes of one entry. `tables`: table id → the keys that are new to its filter."""
    parts = [part for number, keys in tables.items() for part in (_TABLE.pack(number, 0, len(keys)), keys.tobytes())]
    body = b"".join(parts)
    return _ENTRY.pack(len(body), watermark, _checksum(watermark, body)) + body


def _checksum(watermark: int, body: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(_ENTRY.pack(len(body), watermark, 0))
    digest.update(body)
    return int(digest.intdigest())


def replay(path: Path, watermark: int, identity: bytes | None) -> tuple[dict[int, ChangedKeys], int] | None:
    """(filters by table id, bytes of the file up to its last whole entry), or None for a file that is behind RocksDB, or belongs to another one.

    StorageError if it cannot be read.
    """
    try:
        data = np.memmap(path, np.uint8, "r").data if path.stat().st_size else memoryview(b"")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    head = _head(identity)
    if bytes(data[: len(head)]) != head:
        return None
    filters: dict[int, ChangedKeys] = {}
    at, reached = len(head), -1
    while at + _ENTRY.size <= len(data):
        size, upto, checksum = _ENTRY.unpack_from(data, at)
        body = data[at + _ENTRY.size : at + _ENTRY.size + size]
        if len(body) < size or _checksum(upto, body) != checksum:
            break
        _put(body, filters)
        at, reached = at + _ENTRY.size + size, max(reached, upto)
    return (filters, at) if reached >= watermark else None


def _put(body: memoryview, filters: dict[int, ChangedKeys]) -> None:
    at = 0
    while at < len(body):
        number, _, count = _TABLE.unpack_from(body, at)
        at += _TABLE.size
        keys = np.frombuffer(body, np.int64, count, at)
        filters.setdefault(number, ChangedKeys()).put(keys)
        at += keys.nbytes


def rewrite(path: Path, entries: Iterable[bytes], identity: bytes | None) -> int:
    """Publish a file of these entries. Returns its bytes. Raises StorageError, and errors of `entries`."""
    with files.publish(path) as file:
        file.write(_head(identity))
        for each in entries:
            file.write(each)
        return file.tell()


class ChangedFile:
    """The file, for appending. If it cannot be written it is removed, and the next start writes it again."""

    def __init__(self, path: Path, size: int) -> None:
        """`size`: bytes up to the last whole entry; bytes behind are cut off."""
        self._path = path
        self._size: int | None = size  # None: it is not kept up to date

    def add(self, watermark: int, tables: Mapping[int, Keys]) -> bool:
        """Append an entry and make it durable. False if it is not in the file, and the file is still there."""
        if self._size is not None:
            try:
                with open(self._path, "r+b") as file:
                    file.truncate(self._size)
                    file.seek(self._size)
                    file.write(entry(watermark, tables))
                    files.sync(file, self._path)
                    self._size = file.tell()
            except (OSError, StorageError) as error:
                log.warning("%s is not kept up to date: %s", self._path, error)
                self._size = None
                with suppress(StorageError):  # if the file stays, its watermark shows that it is behind
                    files.remove_file(self._path)
        return self._size is not None or not files.exists(self._path)
