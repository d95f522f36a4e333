"""A sealed base file: rows of one table, sorted by key, in blocks that kernels read. Written once, never changed.

    header (4096 bytes) | blocks | first key of each block (int64) | trailer (48 bytes)

Every block has its own checksum; header, first keys and trailer share one, in the trailer. schema/layout.md has the bytes.

Free functions; any thread may call them. A file appears under its name whole and synced, or not at all.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tierstore.errors import Corruption, StorageError
from tierstore.formats import files
from tierstore.tiers.disk.block_shape import block_shape
from tierstore.tiers.disk.sealed_blocks import HEADER_BYTES, pack, unpack
from tierstore.types import Keys, Rows

FORMAT = 1
_MAGIC, _END = b"TIERSEAL", b"LAESREIT"
_HEADER = struct.Struct("<8sIIIIIQ")  # magic, format, table id, bytes a row, bytes a block, rows a full block, content
_TRAILER = struct.Struct("<QQqqQ8s")  # rows, blocks, first key, last key, checksum, magic
_READ_BYTES = 8 << 20  # more than the pieces of a scan, which need not be joined then
_PACK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A finished file. `xxh3` is the checksum in its trailer, 16 hex digits."""

    path: Path
    xxh3: str
    bytes: int
    entries: int


@dataclass(slots=True)
class Opened:
    """An open file, checked as far as is possible without reading its blocks."""

    path: Path
    fd: int  # -1 while it is closed, see `open_again`
    xxh3: str
    table_id: int
    row_bytes: int
    rows: int
    per_block: int
    block_bytes: int
    first_keys: Keys  # the first key of each block
    last_key: int
    size: int


def write_sealed_parts(
    path: Path, table_id: int, row_bytes: int, parts: Iterable[tuple[Keys, Rows]], *, durable: bool = True
) -> SealedFile:
    """Write one file of keys (int64 [n], ascending, distinct) and rows (uint8 [n, row_bytes]), in parts of any length; holds one at a time.

    `durable` as for `files.publish`. Leaves no file when it raises: ValueError for other keys or none, StorageError when the disk fails.
    """
    block_bytes, per_block = block_shape(row_bytes)
    content = xxhash.xxh3_64()
    first_keys: list[Keys] = []
    count = blocks = 0
    last_key: int | None = None
    partial: tuple[Keys, Rows] = np.empty(0, np.int64), np.empty((0, row_bytes), np.uint8)  # less than a block
    with files.publish(path, durable=durable) as file:

        def put(keys: Keys, rows: Rows) -> None:
            nonlocal blocks
            at_once = max(1, _PACK_BYTES // block_bytes) * per_block
            for begin in range(0, len(keys), at_once):
                part = slice(begin, begin + at_once)
                packed = pack(keys[part], rows[part], per_block, block_bytes, blocks).data
                content.update(packed)
                file.write(packed)
                first_keys.append(keys[part][::per_block].copy())
                blocks += len(first_keys[-1])

        file.write(bytes(HEADER_BYTES))
        for keys, rows in parts:
            if len(keys) != len(rows) or not _ascending(keys, last_key):
                raise ValueError(f"{path.name}: expected one row for each of one or more ascending, distinct keys")
            if not len(keys):
                continue
            count, last_key = count + len(keys), int(keys[-1])
            begin = min(len(keys), -len(partial[0]) % per_block)  # fills the partial block
            partial = np.concatenate([partial[0], keys[:begin]]), np.concatenate([partial[1], rows[:begin]])
            if len(partial[0]) == per_block:
                put(*partial)
                partial = partial[0][:0], partial[1][:0]
            end = begin + (len(keys) - begin) // per_block * per_block
            put(keys[begin:end], rows[begin:end])
            if end < len(keys):
                partial = keys[end:].copy(), rows[end:].copy()
            del keys, rows
        put(*partial)
        if last_key is None:
            raise ValueError(f"{path.name}: expected one row for each of one or more ascending, distinct keys")
        all_first_keys = np.concatenate(first_keys)
        file.write(all_first_keys.data)
        # includes the hash of the blocks: a file of other rows under the same keys must not pass for this one
        header = _HEADER.pack(_MAGIC, FORMAT, table_id, row_bytes, block_bytes, per_block, content.intdigest())
        header = header.ljust(HEADER_BYTES, b"\0")
        trailer = _trailer(header, all_first_keys, count, last_key)
        file.write(trailer)
        size = file.tell()
        file.seek(0)
        file.write(header)
    return SealedFile(path, _checksum(trailer), size, count)


def _ascending(keys: Keys, after: int | None) -> bool:
    return bool(np.all(keys[1:] > keys[:-1])) and (after is None or not len(keys) or after < int(keys[0]))


def open_sealed(path: Path, *, xxh3: str, size: int) -> Opened:
    """Open the file that `write_sealed_parts` returned this checksum and size for; reads its first keys, not its blocks.

    Raises Corruption if it is not that file or was cut off, StorageError if it cannot be read.
    """
    fd = _open(path)
    try:
        return _opened(path, fd, xxh3, size)
    except OSError as error:
        os.close(fd)
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Corruption(f"{path} is missing; drop the version and load its snapshot again") from error
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror or error}") from error


def open_again(file: Opened) -> int:
    """A new descriptor of a file that was opened before. Corruption if it is another file now, StorageError."""
    fd = _open(file.path)
    try:
        _check_still(file, fd)
        _read_singly(fd, file)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _opened(path: Path, fd: int, xxh3: str, size: int) -> Opened:
    found = os.fstat(fd).st_size
    if found != size or size < HEADER_BYTES + _TRAILER.size:
        raise Corruption(f"{path}: expected {size} bytes, found {found}: the file was cut off or replaced")
    header = _read(fd, 0, HEADER_BYTES)
    trailer = _read(fd, size - _TRAILER.size, _TRAILER.size)
    magic, form, table_id, row_bytes, block_bytes, per_block, _ = _HEADER.unpack_from(header)
    rows, blocks, _, last_key, _, end = _TRAILER.unpack(trailer)
    if (magic, end) != (_MAGIC, _END) or blocks * block_bytes + blocks * 8 + HEADER_BYTES + _TRAILER.size != size:
        raise Corruption(f"{path} is not a sealed file, or its ends are damaged")
    if form != FORMAT:
        raise Corruption(f"{path}: expected format {FORMAT}, got {form}; it was written by another release")
    first_keys = np.frombuffer(_read(fd, HEADER_BYTES + blocks * block_bytes, 8 * blocks), np.int64)
    if _trailer(header, first_keys, rows, last_key) != trailer or _checksum(trailer) != xxh3:
        raise Corruption(f"{path}: header, first keys or trailer do not match their checksum {xxh3}")
    opened = Opened(path, fd, xxh3, table_id, row_bytes, rows, per_block, block_bytes, first_keys, last_key, size)
    _read_singly(fd, opened)
    return opened


def _read_singly(fd: int, file: Opened) -> None:
    """Turn read-ahead off: look-ups read single blocks, and reading ahead would only fill the page cache."""
    os.posix_fadvise(fd, 0, HEADER_BYTES + len(file.first_keys) * file.block_bytes, os.POSIX_FADV_RANDOM)


def check_still(file: Opened) -> None:
    """Raise Corruption if another sealed file was copied over an open one in place: its blocks are whole, so no read notices it."""
    if file.fd < 0:
        os.close(open_again(file))
    else:
        _check_still(file, file.fd)


def _check_still(file: Opened, fd: int) -> None:
    try:
        trailer = _read(fd, file.size - _TRAILER.size, _TRAILER.size)
    except OSError as error:
        raise StorageError(f"cannot read {file.path}: {error.strerror or error}") from error
    if len(trailer) < _TRAILER.size or _checksum(trailer) != file.xxh3:
        raise Corruption(
            f"{file.path} was written over since it was opened, and may answer with rows that are not its own: "
            "put the whole data directory back, or drop the version and load its snapshot again"
        )


def read_blocks(file: Opened, first: int, last: int, floor: int | None) -> tuple[Keys, Rows]:
    """Keys and rows of blocks [first, last), with every checksum verified; `floor` is the key before them, if any.

    Raises Corruption naming file and block, StorageError for errors of the drive.
    """
    try:
        raw = _read(file.fd, HEADER_BYTES + first * file.block_bytes, (last - first) * file.block_bytes)
    except OSError as error:
        raise StorageError(f"cannot read {file.path}: {error.strerror or error}") from error
    if len(raw) < (last - first) * file.block_bytes:
        raise Corruption(f"{file.path} ends within block {first + len(raw) // file.block_bytes}")
    count = min(file.rows, last * file.per_block) - first * file.per_block
    keys, rows, bad = unpack(
        np.frombuffer(raw, np.uint8), count, file.row_bytes, file.per_block, file.block_bytes, first, floor
    )
    if bad >= 0:
        raise Corruption(f"{file.path}: block {first + bad} (key {file.first_keys[first + bad]} on) is damaged")
    if not np.array_equal(keys[:: file.per_block], file.first_keys[first:last]):
        raise Corruption(f"{file.path}: blocks {first} to {last - 1} are not the blocks that were written there")
    return keys, rows


def _trailer(header: bytes, first_keys: Keys, rows: int, last_key: int) -> bytes:
    first_key = int(first_keys[0]) if len(first_keys) else 0
    whole = xxhash.xxh3_64(header)
    whole.update(first_keys.data)
    whole.update(_TRAILER.pack(rows, len(first_keys), first_key, last_key, 0, _END))
    return _TRAILER.pack(rows, len(first_keys), first_key, last_key, whole.intdigest(), _END)


def _checksum(trailer: bytes) -> str:
    return f"{_TRAILER.unpack(trailer)[4]:016x}"


def _read(fd: int, offset: int, size: int) -> bytes:
    parts = []
    while size and (part := os.pread(fd, min(size, _READ_BYTES), offset)):
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts)
