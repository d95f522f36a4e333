"""Reading a snapshot: a directory with `snapshot.json` and the files that it names.

`Snapshot` is immutable and holds no file open; any thread may use it, each iterator from one thread.
Reading is streaming: an iterator holds about one batch (at most 64 MiB of vectors) in memory. Nothing
here writes, and everything that is refused is one SnapshotError naming file, row and reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import xxhash

from tierstore.errors import InvalidInput, MissingExtra, SnapshotError, StorageError
from tierstore.formats.arrow_shards import read_arrow, read_parquet
from tierstore.formats.checksum import checksum, is_hugectr, parts
from tierstore.formats.columns import Malformed
from tierstore.formats.keys import as_codes
from tierstore.formats.manifest import Manifest, ShardEntry, TableEntry
from tierstore.formats.names import SNAPSHOT_MANIFEST
from tierstore.formats.onnx_file import read_onnx
from tierstore.formats.tensor_shards import npy_header, read_hugectr, read_npz, read_safetensors
from tierstore.types import Keys, TableSpec, Vectors

_BATCH_BYTES = 64 << 20
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*(?:::[A-Za-z][A-Za-z0-9+.\-]*)*)://")

_Read = Callable[[Path, TableSpec, int, bool], Iterator[tuple[Keys, Vectors | None, pa.Array | None]]]
_OF_COLUMNS = {".parquet": read_parquet, ".arrow": read_arrow}
_OF_TENSORS: dict[str, _Read] = {".safetensors": read_safetensors, ".npz": read_npz}


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows of a shard.

    keys int64[n] (codes), vectors float32 or float16 [n, dim], `first_row` their place in the shard,
    `strings` the keys themselves (`large_string`) where the table's keys are strings. NaN and Inf
    are not looked for here: whoever encodes the rows finds them.
    """

    keys: Keys
    vectors: Vectors
    first_row: int
    strings: pa.Array | None


def local_path(source: str | Path) -> Path:
    """The directory that `source`, a path or a `file://` URL, names. SnapshotError for any other scheme."""
    if isinstance(source, Path):
        return source
    scheme = _SCHEME.match(source)
    if scheme is None:
        return Path(source)
    if "::" in scheme[1]:
        raise SnapshotError(f"chained URLs are not allowed: {source!r}")
    if scheme[1].lower() == "s3":
        raise SnapshotError(
            f"cannot read {source!r}: s3:// sources are not supported yet; copy the snapshot to a local path"
        )
    if scheme[1].lower() != "file":
        raise SnapshotError(f"cannot read {source!r}: expected a local path or a file:// URL, came {scheme[1]}://")
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise SnapshotError(f"cannot read {source!r}: {error}") from error
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise SnapshotError(f"cannot read {source!r}: expected file:///path, without host, query or fragment")
    return Path(unquote(parts.path))


def open_snapshot(source: str | Path) -> Snapshot:
    """Read and check a snapshot's manifest, and that every file it names is there and inside it.

    source: a local directory (or the `snapshot.json` in it), or a `file://` URL. Raises SnapshotError.
    """
    root = local_path(source)
    if "\0" in str(root):
        raise SnapshotError("a path cannot hold a NUL character")
    if root.name == SNAPSHOT_MANIFEST and root.is_file():
        root = root.parent
    if not root.is_dir():
        raise SnapshotError(f"{root} is not a directory: expected a snapshot, a directory with {SNAPSHOT_MANIFEST}")
    inside(root, SNAPSHOT_MANIFEST)
    snapshot = Snapshot(root.resolve(), Manifest.read(root / SNAPSHOT_MANIFEST))
    snapshot.check_files()
    return snapshot


def inside(root: Path, name: str) -> None:
    """SnapshotError where a manifest is a link that leads out of its directory."""
    try:
        within = (root / name).resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError) as error:
        raise SnapshotError(f"cannot be read: {error}", file=name) from error
    if not within:
        raise SnapshotError("leads outside the snapshot's directory", file=name)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An opened snapshot. `root` is absolute and resolved."""

    root: Path
    manifest: Manifest

    def check_files(self) -> None:
        """Raise SnapshotError unless every file that the manifest names exists, inside the snapshot."""
        for table in self.manifest.tables:
            for shard in table.shards:
                self._readers(table, shard)
        for path in self.manifest.warmup.values():
            self._resolve(path, file_only=True)
        if self.manifest.dense is not None:
            self._resolve(self.manifest.dense.path, file_only=True)
        for path in self.manifest.requests:
            self._resolve(path, file_only=True)

    def batches(self, table: str, shard_no: int, batch_rows: int = 65536) -> Iterator[Batch]:
        """The shard's rows in order, at most `batch_rows` at a time (fewer where a row is wide).

        Types, dim, lengths, nulls and the row count are checked on the way: SnapshotError.
        """
        entry, shard = self._shard(table, shard_no)
        batch_rows = max(1, min(batch_rows, _BATCH_BYTES // (4 * entry.dim)))
        for codes, vectors, first_row, strings in self._read(entry, shard, batch_rows, with_vectors=True):
            assert vectors is not None
            yield Batch(codes, vectors, first_row, strings)

    def shard_keys(self, table: str, shard_no: int, batch_rows: int = 1 << 20) -> Iterator[Keys]:
        """The codes of the shard's keys in order, without reading its vectors where the format allows."""
        entry, shard = self._shard(table, shard_no)
        for codes, _, _, _ in self._read(entry, shard, batch_rows, with_vectors=False):
            yield codes

    def check_checksum(self, table: str, shard_no: int) -> None:
        """Read the shard through and compare with its `xxh3`, if the manifest gives one. Raises SnapshotError."""
        _, shard = self._shard(table, shard_no)
        if shard.xxh3 is None:
            return
        with naming(shard.path):
            came = checksum(self._resolve(shard.path))
        if came != shard.xxh3:
            raise SnapshotError(
                f"wrong checksum: expected xxh3 {shard.xxh3}, came {came}; copy the file again", file=shard.path
            )

    def shard_bytes(self, table: str, shard_no: int) -> int:
        """The size of the shard on disk."""
        _, shard = self._shard(table, shard_no)
        path = self._resolve(shard.path)
        return sum(file.stat().st_size for file in parts(path))

    def identity(self) -> str:
        """32 hex digits that are the same for the same content: of the manifest, and of each file that it names.

        Of a shard without a checksum, size and time of its last change stand for the content. Raises SnapshotError.
        """
        parts_of: list[Any] = [self.manifest.to_document()]
        for table in self.manifest.tables:
            for shard in table.shards:
                with naming(shard.path):
                    stats = [file.stat() for file in parts(self._resolve(shard.path))]
                parts_of.append([(of.st_size, None if shard.xxh3 else of.st_mtime_ns) for of in stats])
        dense = () if self.manifest.dense is None else (self.manifest.dense.path,)
        for name in (*dense, *self.manifest.warmup.values(), *self.manifest.requests):
            with naming(name):
                parts_of.append(checksum(self._resolve(name, file_only=True)))
        return xxhash.xxh3_128_hexdigest(json.dumps(parts_of).encode())

    def warmup_keys(self, table: str) -> Keys | None:
        """Codes of the keys that the snapshot wants warm, in its order; None if it names none. Raises SnapshotError."""
        name = self.manifest.warmup.get(table)
        if name is None:
            return None
        path = self._resolve(name, file_only=True)
        with naming(name):
            with open(path, "rb") as file:
                dtype, shape = npy_header(file)
                if len(shape) != 1 or shape[0] * dtype.itemsize != path.stat().st_size - file.tell():
                    raise Malformed(
                        f"expected one dimension of keys, came shape {list(shape)} in {path.stat().st_size} bytes"
                    )
                keys = np.fromfile(file, dtype, shape[0])
            return as_codes(keys, self.manifest.table(table).key)

    def dense_path(self) -> Path | None:
        """The ONNX file of the dense part, or None if the snapshot has none."""
        return None if self.manifest.dense is None else self._resolve(self.manifest.dense.path, file_only=True)

    def dense_model(self) -> bytes | None:
        """The ONNX model of the dense part, weights that lie beside it taken in; None if there is none. SnapshotError."""
        path = self.dense_path()
        if path is None or self.manifest.dense is None:
            return None
        with naming(self.manifest.dense.path):
            return read_onnx(path, self.root)

    def request_paths(self) -> list[tuple[str, Path]]:
        """(name in the manifest, file) of the recorded requests, in order."""
        return [(name, self._resolve(name, file_only=True)) for name in self.manifest.requests]

    def _shard(self, table: str, shard_no: int) -> tuple[TableEntry, ShardEntry]:
        entry = self.manifest.table(table)
        return entry, entry.shards[shard_no]

    def _readers(self, entry: TableEntry, shard: ShardEntry) -> list[tuple[str, Path, _Read]]:
        """(name, file, how it is read) of what a shard consists of. Raises SnapshotError."""
        path = self._resolve(shard.path)
        if path.is_dir() and is_hugectr(path):
            return [(shard.path, path, read_hugectr)]
        files = [shard.path]
        if path.is_dir():
            files = [f"{shard.path}/{part.relative_to(path).as_posix()}" for part in parts(path)]
            if not files:
                raise SnapshotError(
                    "expected .parquet or .arrow files in this directory, or a HugeCTR folder's key and emb_vector; "
                    "came none",
                    file=shard.path,
                )
        return [(file, self._resolve(file, file_only=True), self._reader(entry, file)) for file in files]

    def _reader(self, entry: TableEntry, file: str) -> _Read:
        ending = PurePosixPath(file).suffix
        if ending in _OF_COLUMNS:
            return partial(_OF_COLUMNS[ending], columns=(entry.columns.key, entry.columns.vector))
        if ending not in _OF_TENSORS:
            known = ", ".join([*_OF_COLUMNS, *_OF_TENSORS])
            raise SnapshotError(
                f"expected {known}, a HugeCTR folder or a directory of Parquet files, came {ending or 'no ending'}",
                file=file,
            )
        return _OF_TENSORS[ending]

    def _resolve(self, name: str, *, file_only: bool = False) -> Path:
        """The file behind a manifest's path: it exists and, symlinks followed, lies inside the snapshot."""
        try:
            return self._followed(name, file_only)
        except (OSError, RuntimeError, UnicodeError) as error:
            raise SnapshotError(f"cannot be read: {error}", file=name) from error

    def _followed(self, name: str, file_only: bool) -> Path:
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root) or path == self.root:
            raise SnapshotError("leads outside the snapshot's directory", file=name)
        if path.is_dir() and not file_only:
            for part in parts(path):
                self._resolve(f"{name}/{part.relative_to(path).as_posix()}", file_only=True)
        elif not path.is_file():  # nor a device or a pipe, which would never end
            raise SnapshotError("expected a file" if path.exists() else "is missing", file=name)
        return path

    def _read(
        self, entry: TableEntry, shard: ShardEntry, batch_rows: int, *, with_vectors: bool
    ) -> Iterator[tuple[Keys, Vectors | None, int, pa.Array | None]]:
        first_row = 0
        for name, path, read in self._readers(entry, shard):
            with naming(name) as place:
                for codes, vectors, strings in read(path, entry.spec(), batch_rows, with_vectors):
                    if first_row + len(codes) > shard.rows:
                        raise SnapshotError(
                            f"expected {shard.rows} rows, as snapshot.json says, came more", file=shard.path
                        )
                    yield codes, vectors, first_row, strings
                    first_row += len(codes)
                    place.first_row += len(codes)
        if first_row != shard.rows:
            raise SnapshotError(f"expected {shard.rows} rows, as snapshot.json says, came {first_row}", file=shard.path)


class _Place:
    first_row = 0


@contextmanager
def naming(file: str) -> Iterator[_Place]:
    """Turn whatever a reader or its library raises into one SnapshotError that names `file` and the row."""
    place = _Place()
    try:
        yield place
    except SnapshotError:
        raise
    except Malformed as error:
        row = None if error.row is None else place.first_row + error.row
        raise SnapshotError(error.reason, file=file, row=row) from error
    except (InvalidInput, MissingExtra) as error:
        raise SnapshotError(str(error), file=file) from error
    except StorageError:
        raise
    except Exception as error:  # libraries raise whatever they come upon in a damaged file, errors of syntax included
        raise SnapshotError(f"cannot be read: {str(error) or type(error).__name__}", file=file) from error
