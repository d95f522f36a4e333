"""A file of strings: keys of a table with string keys, by ascending hash, in compressed blocks that are found by hash.

    header (16 bytes) | blocks | index, an entry a block | trailer (40 bytes)

A string goes by its hash (XXH3-64, seed 0), which is not stored but made again, and so compared, when a block is read. Every
block has a checksum in the index, and the index one in the trailer. Look-ups never read such a file. schema/layout.md has
the bytes.

Free functions; any thread may call them; an open file is for one thread. A file appears under its name whole and synced,
or not at all, and never changes.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import xxhash

from tierstore import open_files
from tierstore.errors import Corruption, StorageError
from tierstore.formats import files
from tierstore.formats.colliding import hash_arrow
from tierstore.types import Keys

FORMAT = 1
_MAGIC, _END = b"TIERSTRS", b"SRTSREIT"
_HEADER = struct.Struct("<8sII")  # magic, format, 0
_TRAILER = struct.Struct("<QQQQ8s")  # strings, blocks, where the index begins, its checksum, magic
_INDEX = np.dtype(
    [("hash", "<i8"), ("at", "<u8"), ("bytes", "<u8"), ("unpacked", "<u8"), ("strings", "<u8"), ("xxh3", "<u8")]
)
_BLOCK_BYTES = 64 << 10  # of strings and their lengths; a longer string has a block of its own
_LENGTH_BYTES = 4
_ADDED_BYTES = 4 << 20  # of strings that are cut into blocks at a time

Strings = Iterator[tuple[Keys, pa.Array]]  # hashes or codes int64 [n], ascending, and large_string [n]


@dataclass(frozen=True, slots=True)
class StringsFile:
    """A finished file. `xxh3`: the checksum of its index, 16 hex digits, which has the checksums of its blocks."""

    name: str
    xxh3: str
    bytes: int
    strings: int


class MissingStrings(StrEnum):
    """Why a version keeps no strings of a table."""

    OFF = "off"
    SIZE = "size"  # they would take more than the setting allows
    ROOM = "room"  # the disk had no room for them
    BUILT = "built"  # it was loaded from a built version, which has none


@dataclass(frozen=True, slots=True)
class KeptStrings:
    """What a version keeps of the strings of a table as it was loaded; `missing` says why it keeps none."""

    files: tuple[StringsFile, ...] = ()
    missing: MissingStrings | None = None

    def document(self) -> dict[str, Any]:
        """The entry in the version's record, which `parse` reads."""
        files = [[of.name, of.xxh3, of.bytes, of.strings] for of in self.files]
        return {"files": files} if self.missing is None else {"missing": self.missing.value}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Self:
        """ValueError, TypeError, KeyError for another document."""
        if "missing" in document:
            return cls(missing=MissingStrings(document["missing"]))
        made = ((str(name), f"{int(xxh3, 16):016x}", int(size), int(n)) for name, xxh3, size, n in document["files"])
        return cls(tuple(StringsFile(*of) for of in made))


def sorted_strings(hashes: Keys, strings: pa.Array) -> Strings:
    """Strings, large_string [n] in any order, by ascending hash, some megabytes at a time."""
    order = np.argsort(hashes, kind="stable")
    step = max(1, _ADDED_BYTES * len(order) // max(1, strings.nbytes))  # or all would be copied at once
    for begin in range(0, len(order), step):
        part = order[begin : begin + step]
        yield hashes[part], strings.take(pa.array(part))


def write_ascending(path: Path, parts: Strings) -> StringsFile:
    """Write one file of strings that come by ascending hash. StorageError, and what `parts` raises."""
    index: list[tuple[int, ...]] = []
    codec, at = _codec(), _HEADER.size
    with files.publish(path) as file:
        file.write(_HEADER.pack(_MAGIC, FORMAT, 0))
        for hashes, strings in _together(parts):
            offsets = np.frombuffer(strings.buffers()[1], np.int64)[strings.offset : strings.offset + len(strings) + 1]
            ends = np.cumsum(np.diff(offsets) + _LENGTH_BYTES)
            cuts = np.searchsorted(ends, np.arange(_BLOCK_BYTES, ends[-1], _BLOCK_BYTES))
            for begin, end in pairwise(np.unique(np.concatenate([[0], cuts, [len(hashes)]])).tolist()):
                unpacked = _packable(strings.take(pa.array(np.arange(begin, end))))
                block = codec.compress(unpacked, asbytes=True)
                checksum = xxhash.xxh3_64_intdigest(block)
                index.append((int(hashes[begin]), at, len(block), len(unpacked), end - begin, checksum))
                file.write(block)
                at += len(block)
        entries = np.array(index, _INDEX)
        file.write(entries.tobytes())
        count, checksum = int(entries["strings"].sum()), xxhash.xxh3_64_intdigest(entries.tobytes())
        file.write(_TRAILER.pack(count, len(index), at, checksum, _END))
        size = at + entries.nbytes + _TRAILER.size
    return StringsFile(path.name, f"{checksum:016x}", size, count)


def finished(path: Path) -> StringsFile:
    """What a file says of itself at its end. Corruption for one that is none; StorageError."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TRAILER.size))
            strings, _, _, checksum, end = _TRAILER.unpack(file.read())
    except struct.error:
        end = b""
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    if end != _END:
        raise Corruption(f"{path} is no file of strings")
    return StringsFile(path.name, f"{checksum:016x}", size, strings)


def _together(parts: Strings) -> Strings:
    """The same in parts of about `_ADDED_BYTES`, so that blocks are full."""
    held: list[tuple[Keys, pa.Array]] = []
    for hashes, strings in parts:
        if len(hashes):
            held.append((hashes, strings))
        if sum(strings.nbytes for _, strings in held) >= _ADDED_BYTES:
            yield np.concatenate([of for of, _ in held]), pa.concat_arrays([of for _, of in held])
            held.clear()
    if held:
        yield np.concatenate([of for of, _ in held]), pa.concat_arrays([of for _, of in held])


def _codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=1)


def _packable(strings: pa.Array) -> bytes:
    """The bytes of a block before it is compressed: the length of each string, then all of them."""
    _, offsets, data = strings.buffers()
    ends = np.frombuffer(offsets, np.int64)[: len(strings) + 1]
    text = b"" if data is None else memoryview(data)[ends[0] : ends[-1]]
    return b"".join((np.diff(ends).astype("<u4").tobytes(), text))


class OpenStrings:
    """A file that is open for reading, for one thread. A context manager."""

    def __init__(self, path: Path, expected: StringsFile) -> None:
        """Reads the index. Corruption for a file that is missing, or is not the expected one; StorageError."""
        self._path, self._codec = path, _codec()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise Corruption(f"{path} is missing; {_LOST}") from error
        except OSError as error:
            raise StorageError(f"cannot open {path}: {error.strerror or error}") from error
        try:
            self._index = self._read_index(expected)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenStrings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def all(self) -> Strings:
        """All strings by ascending hash, a block at a time. Corruption, which names file and block; StorageError."""
        for block in range(len(self._index)):
            yield self._block(block)

    def find(self, hashes: Keys) -> dict[int, str]:
        """The strings of those of `hashes`, ascending, that are there, by hash. Errors as of `all`."""
        found: dict[int, str] = {}
        blocks = np.searchsorted(self._index["hash"], hashes, "right") - 1
        for block in np.unique(blocks[blocks >= 0]).tolist():
            there, strings = self._block(block)
            wanted = hashes[blocks == block]
            at = np.minimum(np.searchsorted(there, wanted), len(there) - 1)
            equal = there[at] == wanted
            found |= zip(wanted[equal].tolist(), strings.take(pa.array(at[equal])).to_pylist(), strict=True)
        return found

    def _read_index(self, expected: StringsFile) -> np.ndarray:
        size = os.fstat(self._fd).st_size
        if size != expected.bytes:
            raise Corruption(
                f"{self._path}: expected {expected.bytes} bytes, found {size}: it was cut off or replaced; {_LOST}"
            )
        strings, blocks, at, checksum, end = _TRAILER.unpack(self._read(size - _TRAILER.size, _TRAILER.size))
        index = self._read(at, size - _TRAILER.size - at) if at <= size else b""
        right = end == _END and strings == expected.strings and len(index) == blocks * _INDEX.itemsize
        right = right and int(np.frombuffer(index, _INDEX)["strings"].sum()) == strings
        if not right or f"{checksum:016x}" != expected.xxh3 or xxhash.xxh3_64_intdigest(index) != checksum:
            raise Corruption(f"{self._path}: its index does not match its checksum {expected.xxh3}; {_LOST}")
        return np.frombuffer(index, _INDEX)

    def _block(self, number: int) -> tuple[Keys, pa.Array]:
        entry = self._index[number]
        block = self._read(int(entry["at"]), int(entry["bytes"]))
        if xxhash.xxh3_64_intdigest(block) != entry["xxh3"]:
            raise Corruption(f"{self._path}: block {number} of {len(self._index)} is damaged; {_LOST}")
        count, unpacked = int(entry["strings"]), self._codec.decompress(block, int(entry["unpacked"]))
        text = unpacked.slice(count * _LENGTH_BYTES)
        ends = np.zeros(count + 1, np.int64)
        np.cumsum(np.frombuffer(unpacked, "<u4", count), out=ends[1:])
        strings = pa.LargeStringArray.from_buffers(count, pa.py_buffer(ends), text)
        hashes = hash_arrow(strings)
        if hashes[0] != entry["hash"] or (hashes[1:] < hashes[:-1]).any():
            raise Corruption(f"{self._path}: block {number} has other strings than were written there; {_LOST}")
        return hashes, strings

    def _read(self, at: int, size: int) -> bytes:
        parts = []
        try:
            while size and (part := os.pread(self._fd, size, at)):
                parts.append(part)
                at, size = at + len(part), size - len(part)
        except OSError as error:
            raise StorageError(f"cannot read {self._path}: {error.strerror or error}") from error
        if size:
            raise Corruption(f"{self._path} ends too early; {_LOST}")
        return b"".join(parts)


_LOST = "look-ups need it not, but to export its table, load the version's snapshot again"


def merged_strings(parts: Sequence[Strings]) -> Strings:
    """All strings by ascending code, each code once: with the string of the last of the parts that have it."""
    ahead = [(part, first) for part in parts if (first := next(part, None)) is not None]
    while ahead:
        sure = min(int(codes[-1]) for _, (codes, _) in ahead)  # above it a part may have codes that are not read yet
        pieces: list[tuple[Keys, pa.Array]] = []
        later = []
        for part, (codes, strings) in ahead:
            at = int(np.searchsorted(codes, sure, "right"))
            pieces.append((codes[:at], strings.slice(0, at)))
            left = (codes[at:], strings.slice(at)) if at < len(codes) else next(part, None)
            if left is not None:
                later.append((part, left))
        ahead = later
        codes = np.concatenate([piece for piece, _ in pieces])
        order = np.argsort(codes, kind="stable")
        last = np.append(codes[order][1:] != codes[order][:-1], True)
        order = order[last]
        yield codes[order], pa.concat_arrays([strings for _, strings in pieces]).take(pa.array(order))


@contextlib.contextmanager
def opened(folder: Path, expected: Sequence[StringsFile]) -> Iterator[list[OpenStrings]]:
    """The files of a folder, open for the length of a block. Errors as of `OpenStrings`."""
    open_files.allow(len(expected))
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(OpenStrings(folder / of.name, of)) for of in expected]
