"""Reading a snapshot: a directory, or objects below a URL, with `snapshot.json` and the files that it names.

`Snapshot` is immutable and holds no file open; any thread may use it, each iterator from one thread.
Reading is streaming: an iterator holds about one batch (at most 64 MiB of vectors) in memory. Nothing
here writes, and everything that is refused is one SnapshotError naming file, row and reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import xxhash

from tierstore.errors import InvalidInput, MissingExtra, SnapshotError, StorageError, shown
from tierstore.formats.buckets import EXTRAS
from tierstore.formats.columns import Malformed
from tierstore.formats.keys import as_codes
from tierstore.formats.names import BUILT_MANIFEST, GOLDEN_INDEX, SNAPSHOT_MANIFEST
from tierstore.formats.objects import Location, ObjectPath, is_inside, is_url, names_below, revision_of, size_of
from tierstore.formats.onnx_file import read_onnx
from tierstore.formats.regular import open_regular
from tierstore.formats.row_times import Times, seconds_of
from tierstore.formats.snapshot.arrow_shards import read_arrow, read_parquet
from tierstore.formats.snapshot.checksum import checksum, checksum_while_read, is_hugectr, parts
from tierstore.formats.snapshot.golden import MAX_BYTES, GoldenEntry, GoldenIndex, digest_parts
from tierstore.formats.snapshot.manifest import Manifest, ShardEntry, TableEntry
from tierstore.formats.snapshot.table_logs import reason_of_log
from tierstore.formats.snapshot.tensor_shards import npy_header, read_hugectr_shard, read_npz, read_safetensors
from tierstore.types import Keys, TableSpec, Vectors

_BATCH_BYTES = 64 << 20
_MANIFESTS = (SNAPSHOT_MANIFEST, BUILT_MANIFEST)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*(?:::[A-Za-z][A-Za-z0-9+.\-]*)*)://")

_Read = Callable[[Location, TableSpec, int, bool], Iterator[tuple[Keys, Vectors | None, pa.Array | None, Times | None]]]
_OF_COLUMNS = {".parquet": read_parquet, ".arrow": read_arrow}
_OF_TENSORS = {".safetensors": read_safetensors, ".npz": read_npz}


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of a shard.

    keys int64[n] (codes), vectors float32 or float16 [n, dim], `first_row` their place in the shard,
    `strings` the keys themselves (`large_string`) where the table's keys are strings, `times` uint32 [n] when rows were
    written, where the table has a ttl. NaN and Inf are not checked here, but where the rows are encoded.
    """

    keys: Keys
    vectors: Vectors
    first_row: int
    strings: pa.Array | None
    times: Times | None = None


def location(source: str | Path) -> Location:
    """What `source`, a path or a URL, names; without the name of a manifest, which it may end with.

    Objects are listed now. SnapshotError for a URL that cannot be read, or has no manifest.
    """
    if isinstance(source, str) and is_url(source):
        for manifest in _MANIFESTS:
            source = source.removesuffix("/" + manifest)
        return ObjectPath.listed(source, if_any=_MANIFESTS)
    path = local_path(source)
    return path.parent if path.name in _MANIFESTS and path.is_file() else path


def local_path(source: str | Path) -> Path:
    """The directory that `source`, a path or a `file://` URL, names. SnapshotError for any other scheme."""
    if not isinstance(source, (str, Path)) or not str(source):
        raise SnapshotError(f"expected a path or a URL, got {shown(source)}")
    if "\0" in str(source):
        raise SnapshotError("a path cannot hold a NUL character")
    if isinstance(source, Path):
        return source
    scheme = _SCHEME.match(source)
    if scheme is None:
        return Path(source)
    if "::" in scheme[1]:
        raise SnapshotError(f"chained URLs are not allowed: {source!r}")
    if scheme[1].lower() != "file":
        urls = ", ".join(f"{name}://" for name in ("file", *EXTRAS))
        raise SnapshotError(f"cannot read {source!r}: expected a path, or a URL of {urls}, got {scheme[1]}://")
    try:
        parts = urlsplit(source)
    except ValueError as error:
        raise SnapshotError(f"cannot read {source!r}: {error}") from error
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise SnapshotError(f"cannot read {source!r}: expected file:///path, without host, query or fragment")
    return Path(unquote(parts.path))


def open_snapshot(source: str | Path) -> Snapshot:
    """Read and check a snapshot's manifest, and that every file it names is there and inside it.

    source: a local directory (or the `snapshot.json` in it), a `file://` URL, or one of an object
    storage. Raises SnapshotError.
    """
    return Snapshot.open(location(source))


def inside(root: Location, name: str) -> None:
    """Raise SnapshotError where a manifest is a link out of its directory."""
    try:
        within = is_inside((root / name).resolve(), root.resolve())
    except (OSError, RuntimeError) as error:
        raise SnapshotError(f"cannot be read: {error}", file=name) from error
    if not within:
        raise SnapshotError("leads outside the snapshot's directory", file=name)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An opened snapshot. `root` is absolute and resolved."""

    root: Location
    manifest: Manifest

    @classmethod
    def open(cls, root: Location) -> Snapshot:
        """As `open_snapshot`, of a place."""
        if not root.is_dir():
            raise SnapshotError(f"{root} is not a directory: expected a snapshot, a directory with {SNAPSHOT_MANIFEST}")
        inside(root, SNAPSHOT_MANIFEST)
        snapshot = Snapshot(root.resolve(), Manifest.read(root / SNAPSHOT_MANIFEST))
        snapshot.check_files()
        return snapshot

    def check_files(self) -> None:
        """Raise SnapshotError unless every file that the manifest names exists, inside the snapshot."""
        for table in self.manifest.tables:
            for shard in table.shards:
                self._readers(table, shard)
        for path in self.manifest.side_files:
            self.file(path)
        self.golden_paths()

    def batches(self, table: str, shard_no: int, batch_rows: int = 65536) -> Iterator[RowBatch]:
        """The shard's rows in order, at most `batch_rows` at a time (fewer where a row is wide).

        Checks types, dim, lengths, nulls and the row count: raises SnapshotError.
        """
        entry, shard = self._shard(table, shard_no)
        batch_rows = max(1, min(batch_rows, _BATCH_BYTES // (4 * entry.dim)))
        created_at, of_snapshot = self.manifest.created_at, entry.ttl_s is not None and entry.time_column is None
        for codes, vectors, first_row, strings, times in self._read(entry, shard, batch_rows, with_vectors=True):
            assert vectors is not None
            if of_snapshot and created_at is not None:
                times = np.full(len(codes), seconds_of(created_at), np.uint32)
            yield RowBatch(codes, vectors, first_row, strings, times)

    def shard_keys(self, table: str, shard_no: int, batch_rows: int = 1 << 20) -> Iterator[Keys]:
        """The codes of the shard's keys in order, without reading its vectors where the format allows."""
        entry, shard = self._shard(table, shard_no)
        for codes, *_ in self._read(entry, shard, batch_rows, with_vectors=False):
            yield codes

    def shard_strings(self, table: str, shard_no: int, batch_rows: int) -> Iterator[tuple[Keys, pa.Array]]:
        """The hashes and strings of the shard's string keys in order, read as by `shard_keys`."""
        entry, shard = self._shard(table, shard_no)
        for hashes, _, _, strings, _ in self._read(entry, shard, batch_rows, with_vectors=False):
            yield hashes, strings

    def check_checksum(self, table: str, shard_no: int) -> None:
        """Read the shard through and compare with its `xxh3`, if the manifest gives one. Raises SnapshotError."""
        _, shard = self._shard(table, shard_no)
        if shard.xxh3 is None:
            return
        with naming(shard.path):
            _compare(shard, checksum(self._resolve(shard.path)))

    @contextmanager
    def checking(self, table: str, shard_no: int) -> Iterator[None]:
        """Compare the shard with its `xxh3`, if the manifest gives one. For the block that reads it.

        Raises SnapshotError.

        A file is compared before. An object is compared as it comes, so that it comes once, and what the block
        has read counts only when the block has ended. What it is refused for there may be due to a wrong
        shard: then that is the error.
        """
        _, shard = self._shard(table, shard_no)
        path = None if shard.xxh3 is None else self._resolve(shard.path)
        if not isinstance(path, ObjectPath):
            self.check_checksum(table, shard_no)
            yield
            return
        with checksum_while_read(path) as finish:
            refused: SnapshotError | None = None
            try:
                yield
            except SnapshotError as error:
                refused = error
            with naming(shard.path):
                _compare(shard, finish())
            if refused is not None:
                raise refused

    def identity(self) -> str:
        """32 hex digits that are equal for equal content of the manifest and of each file that it names.

        For a shard without a checksum they depend on its size and the time of its last change, or its ETag; so they do
        for other objects. Raises SnapshotError.
        """
        parts_of: list[Any] = [self.manifest.to_document()]
        for table in self.manifest.tables:
            for shard in table.shards:
                with naming(shard.path):
                    revisions = [revision_of(file) for _, file in parts(self._resolve(shard.path))]
                parts_of.append([(size, None if shard.xxh3 else revision) for size, revision in revisions])
        for name in self.manifest.side_files:
            with naming(name):
                parts_of.append(_revision(self.file(name)))
        parts_of += digest_parts(self.golden_index(), [_revision(path) for _, path in self.golden_paths()])
        return xxhash.xxh3_128_hexdigest(json.dumps(parts_of).encode())

    def check_unchanged(self, identity: str) -> None:
        """Raise SnapshotError where `identity` would now be another one: for the end of what reads it."""
        root = self.root.listed_again() if isinstance(self.root, ObjectPath) else self.root
        if replace(self, root=root).identity() != identity:
            raise SnapshotError("its files changed while they were read; write a new version to a place of its own")

    def warmup_keys(self, table: str) -> Keys | None:
        """Codes of the keys that the snapshot wants warm, in its order; None if it names none. Raises SnapshotError."""
        name = self.manifest.warmup.get(table)
        if name is None:
            return None
        path = self.file(name)
        with naming(name):
            with open_regular(path) as file:
                dtype, shape = npy_header(file)
                if len(shape) != 1 or shape[0] * dtype.itemsize != size_of(path) - file.tell():
                    raise Malformed(f"expected one dimension of keys, got shape {list(shape)} in {size_of(path)} bytes")
                keys = np.frombuffer(file.read(), dtype)
            return as_codes(keys, self.manifest.table(table).key)

    def file(self, name: str) -> Location:
        """The file of a name in the manifest, or in `built.json`. Raises SnapshotError."""
        return self._resolve(name, file_only=True)

    def side_bytes(self) -> int:
        """Bytes of its side files: dense parts, warm-up keys, recorded requests, golden examples. SnapshotError."""
        graphs = self.manifest.graphs
        paths = [self.file(name) for name in self.manifest.side_files if name not in graphs.values()]
        dense = sum(len(self.dense_model(head) or b"") for head in graphs)  # weights may lie beside one
        return dense + sum(map(size_of, [*paths, *(path for _, path in self.golden_paths())]))

    def dense_path(self, head: str = "") -> Location | None:
        """The ONNX file of a head, or None if the snapshot has none."""
        name = self.manifest.graphs.get(head)
        return None if name is None else self.file(name)

    def dense_model(self, head: str = "") -> bytes | None:
        """The ONNX model of a head, including weights in other files; None if there is none. Raises SnapshotError."""
        path = self.dense_path(head)
        if path is None:
            return None
        with naming(self.manifest.graphs[head]):
            return read_onnx(path, self.root)

    def request_paths(self, head: str = "") -> list[tuple[str, Location]]:
        """(name in the manifest, file) of the requests recorded for a head, in order."""
        return [(name, self.file(name)) for name in self.manifest.recorded.get(head, ())]

    def _golden_folder(self) -> str | None:
        """The folder of the golden examples, as names in the manifest are; None if there are none."""
        folder, _, name = GOLDEN_INDEX.rpartition("/")
        return folder if (self.root / folder / name).exists() else None

    def golden_index(self) -> GoldenIndex | None:
        """Which golden examples there are; None if there are none. Raises SnapshotError."""
        folder = self._golden_folder()
        if folder is None:
            return None
        name = f"{folder}/{PurePosixPath(GOLDEN_INDEX).name}"
        with naming(name):
            return GoldenIndex.read(self.file(name))

    def golden_paths(self) -> list[tuple[GoldenEntry, Location]]:
        """The golden examples and their files, in order. Raises SnapshotError."""
        index, folder = self.golden_index(), self._golden_folder()
        if index is None:
            return []
        paths = [(entry, self.file(f"{folder}/{entry.path}")) for entry in index.examples]
        if (nbytes := sum(size_of(path) for _, path in paths)) > 2 * MAX_BYTES:
            raise SnapshotError(
                f"golden examples of {nbytes} bytes, at most {MAX_BYTES} are allowed", file=GOLDEN_INDEX
            )
        return paths

    def _shard(self, table: str, shard_no: int) -> tuple[TableEntry, ShardEntry]:
        entry = self.manifest.table(table)
        return entry, entry.shards[shard_no]

    def _readers(self, entry: TableEntry, shard: ShardEntry) -> list[tuple[str, Location, _Read]]:
        """(name, file, reader) of each file of a shard. Raises SnapshotError."""
        path = self._resolve(shard.path)
        if path.is_dir() and is_hugectr(path):
            if entry.time_column is not None:
                raise SnapshotError(
                    "a HugeCTR folder holds no times: without time_column all rows have the snapshot's created_at",
                    file=shard.path,
                )
            return [(shard.path, path, read_hugectr_shard)]
        files = [shard.path]
        if path.is_dir():
            reason = reason_of_log(PurePosixPath(shard.path), names_below(path))
            if reason is not None:
                raise SnapshotError(reason, file=shard.path)
            files = [f"{shard.path}/{part}" for part, _ in parts(path)]
            if not files:
                raise SnapshotError(
                    "expected .parquet or .arrow files in this directory, or a HugeCTR folder's key and emb_vector; "
                    "got none",
                    file=shard.path,
                )
        return [(file, self.file(file), self._reader(entry, file)) for file in files]

    def _reader(self, entry: TableEntry, file: str) -> _Read:
        ending = PurePosixPath(file).suffix
        if ending in _OF_COLUMNS:
            return partial(_OF_COLUMNS[ending], columns=(entry.columns.key, entry.columns.vector, entry.time_column))
        if ending not in _OF_TENSORS:
            formats = ", ".join([*_OF_COLUMNS, *_OF_TENSORS])
            raise SnapshotError(
                f"expected {formats}, a HugeCTR folder or a directory of Parquet files, got {ending or 'no ending'}",
                file=file,
            )
        return partial(_OF_TENSORS[ending], time=entry.time_column)

    def _resolve(self, name: str, *, file_only: bool = False) -> Location:
        """The file of a path in the manifest. It exists and, with symlinks resolved, is inside the snapshot."""
        try:
            return self._followed(name, file_only)
        except (OSError, RuntimeError, UnicodeError) as error:
            raise SnapshotError(f"cannot be read: {error}", file=name) from error

    def _followed(self, name: str, file_only: bool) -> Location:
        path = (self.root / name).resolve()
        if not is_inside(path, self.root) or path == self.root:
            raise SnapshotError("leads outside the snapshot's directory", file=name)
        if path.is_dir() and not file_only:
            for part, _ in parts(path):
                self.file(f"{name}/{part}")
        elif not path.is_file():  # a device or a pipe would never end
            raise SnapshotError("expected a file" if path.exists() else "is missing", file=name)
        return path

    def _read(
        self, entry: TableEntry, shard: ShardEntry, batch_rows: int, *, with_vectors: bool
    ) -> Iterator[tuple[Keys, Vectors | None, int, pa.Array | None, Times | None]]:
        first_row = 0
        for name, path, read in self._readers(entry, shard):
            with naming(name) as place:
                for codes, vectors, strings, times in read(path, entry.spec(), batch_rows, with_vectors):
                    if first_row + len(codes) > shard.rows:
                        raise SnapshotError(
                            f"expected {shard.rows} rows, as snapshot.json says, got more", file=shard.path
                        )
                    yield codes, vectors, first_row, strings, times
                    first_row += len(codes)
                    place.first_row += len(codes)
        if first_row != shard.rows:
            raise SnapshotError(f"expected {shard.rows} rows, as snapshot.json says, got {first_row}", file=shard.path)


def _revision(path: Location) -> Any:
    """What changes with a small file."""
    return revision_of(path) if isinstance(path, ObjectPath) else checksum(path)


def _compare(shard: ShardEntry, got: str) -> None:
    if got != shard.xxh3:
        raise SnapshotError(
            f"wrong checksum: expected xxh3 {shard.xxh3}, got {got}; copy the file again", file=shard.path
        )


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
    except Exception as error:  # on damaged files libraries raise anything, even SyntaxError
        if isinstance(
            error.__context__, StorageError
        ):  # such as zipfile, which takes it for what is wrong with the file
            raise error.__context__ from None
        raise SnapshotError(f"cannot be read: {str(error) or type(error).__name__}", file=file) from error
