"""Reading a delta: concatenated Arrow IPC streams, validated whole.

`read_delta` is a pure function; any thread may call it, with bytes that nobody changes meanwhile. Its
result is immutable by convention; of the bytes it may share those of string keys. Whatever the bytes are, it
returns a delta or raises DeltaError, within the memory that it was allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from tierstore.arguments import check_name
from tierstore.errors import DeltaError, InvalidInput, StorageError
from tierstore.formats.columns import (
    KEY,
    MAX_DIM,
    VECTOR,
    Malformed,
    check_vector_kind,
    first_not_finite,
    key_column,
    key_type_of,
    value_kind,
    vector_column,
)
from tierstore.formats.delta.frames import BadFrames, split_streams
from tierstore.formats.delta.metadata import metadata_of
from tierstore.formats.names import head_of_table
from tierstore.formats.regular import read_regular
from tierstore.formats.strings import validate
from tierstore.kernels.codec import all_finite
from tierstore.kernels.overlay_index import dedup_last
from tierstore.types import Keys, KeyType, Vectors

ONNX = "onnx"
MAX_DECODED_BYTES = 1 << 30
# of memory that a row takes while it is read, beside its vector and what the framing claims: codes and places; strings
# with their offsets and their table; and, where rows are deleted, what Arrow notes of the others
_ROW_BYTES, _STRING_BYTES, _NULL_BYTES = 32, 96, 96
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class DeltaTable:
    """What a delta changes in one table.

    key: the keys' type. keys int64[m]: codes, ascending and distinct; of strings their hashes, of which those of two
    keys that collide are equal. vectors float32 or float16 [m, dim], zeros in deleted rows. deleted bool[m]. dim: None
    (and vectors [m, 0]) if every row is deleted.
    """

    key: KeyType
    keys: Keys
    vectors: Vectors
    deleted: npt.NDArray[np.bool_]
    dim: int | None
    given: tuple[pa.Array, npt.NDArray[np.int64]] | None = (
        None  # for string keys: all strings of the delta, and which of them these are
    )

    def strings_at(self, positions: npt.NDArray[np.int64]) -> pa.Array:
        """large_string: the keys at some positions of a table with string keys."""
        assert self.given is not None
        strings, rows = self.given
        return strings.take(pa.array(rows[positions]))


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """A delta. `digest` is the XXH3-64 of its `nbytes` bytes: the same seq with another digest is a conflict.

    base_version: the one version that it is for, or None for all. dense: the new ONNX models by head, of the dense part
    without a name by ""; an empty one where the head goes.
    """

    model: str
    seq: int
    event_time: datetime
    base_version: int | None
    tables: dict[str, DeltaTable]
    dense: dict[str, bytes]
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """The header of a delta, read before it is decoded. `decoded_bytes`: what its rows take then, as it claims."""

    model: str
    seq: int
    digest: str
    decoded_bytes: int


def read_delta(
    data: bytes | bytearray | memoryview | str | Path,
    *,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
    reserve: Callable[[int], None] = lambda _: None,
) -> Delta:
    """Read and validate a delta from bytes, or from the file at a path.

    Raises DeltaError for anything but a whole and well-formed delta (`schema/delta.md`), or one that would take more
    than `max_decoded_bytes` in memory; StorageError if the file cannot be read. `reserve` is told of bytes beyond those
    that its framing claims before they are taken: what is gathered from the batches is there beside them, and deleted
    rows take as many as others.
    """
    if isinstance(data, (str, Path)):
        path = Path(data)
        try:
            data = read_regular(path)
        except OSError as error:
            raise StorageError(f"cannot read the delta {path}: {error.strerror or error}") from error
    return Undecoded(data, max_decoded_bytes=max_decoded_bytes).decode(reserve)


class Undecoded:
    """The bytes of a delta, of which only the framing and what it says of itself have been read: `header`.

    DeltaError as `read_delta`, for what the framing shows.
    """

    def __init__(self, data: bytes | bytearray | memoryview, *, max_decoded_bytes: int = MAX_DECODED_BYTES) -> None:
        self._view, self._most = memoryview(data).cast("B"), max_decoded_bytes
        _as_delta(self._open, self._view)

    def _open(self) -> None:
        self._streams, decoded = split_streams(self._view, self._most)
        self._first = self._reader(self._streams[0])
        self._metadata = stated = metadata_of(self._first.schema.metadata or {})
        self.header = DeltaHeader(stated.model, stated.seq, str(xxhash.xxh3_64_hexdigest(self._view)), decoded)

    def _reader(self, stream: tuple[int, int]) -> pa.RecordBatchStreamReader:
        return pa.ipc.open_stream(pa.py_buffer(self._view[slice(*stream)]))

    def decode(self, reserve: Callable[[int], None] = lambda _: None) -> Delta:
        """Validate and decode it; once. See `read_delta`."""
        return _as_delta(lambda: self._decode(reserve), self._view)

    def _decode(self, reserve: Callable[[int], None]) -> Delta:
        stated, streams = self._metadata, self._streams
        tables: dict[str, _Collected] = {}
        dense: dict[str, bytes] = {}
        for number, stream in enumerate(streams):
            reader = self._reader(stream) if number else self._first
            if number and metadata_of(reader.schema.metadata or {}) != stated:
                raise DeltaError("bad delta: its streams differ in model, seq, event_time, base_version or parts")
            for batch, metadata in reader.iter_batches_with_custom_metadata():
                name = _table_name(metadata)
                if (of := head_of_table(name)) is not None:
                    dense[of] = _onnx(name, batch, reserve)
                else:
                    tables.setdefault(name, _Collected(name, reserve)).add(batch)
        if len(streams) != stated.parts:
            raise DeltaError(
                f"bad delta, cut or joined: expected {stated.parts} streams, as its metadata `parts` says, "
                f"got {len(streams)}"
            )
        return Delta(
            model=stated.model,
            seq=stated.seq,
            event_time=stated.event_time,
            base_version=stated.base_version,
            tables={name: each.finish(self._most) for name, each in tables.items() if each.codes},
            dense=dense,
            digest=self.header.digest,
            nbytes=len(self._view),
        )


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """What a delta does to some keys of one table: by code whether it deletes it; those that it names alone."""

    event_time: datetime
    base_version: int | None
    deleted: dict[int, bool]


def read_changes(data: bytes | memoryview, table: str, codes: Keys, as_codes: Callable[[pa.Array], Keys]) -> KeyChanges:
    """What a delta does to `codes` of a table, of a delta that was accepted: no vector is decoded. DeltaError.

    `as_codes` gives the codes of a column of keys.
    """
    view = memoryview(data).cast("B")

    def read() -> KeyChanges:
        deleted: dict[int, bool] = {}
        streams, _ = split_streams(view, MAX_DECODED_BYTES)
        for start, end in streams:
            reader = pa.ipc.open_stream(pa.py_buffer(view[start:end]))
            stated = metadata_of(reader.schema.metadata or {})
            for batch, metadata in reader.iter_batches_with_custom_metadata():
                if _table_name(metadata) == table:
                    keys, vectors = as_codes(batch.column(KEY)), batch.column(VECTOR)
                    # of a key that is there twice the last row counts
                    deleted |= {int(keys[at]): not vectors[at].is_valid for at in np.flatnonzero(np.isin(keys, codes))}
        return KeyChanges(stated.event_time, stated.base_version, deleted)

    return _as_delta(read, view)


def _as_delta(read: Callable[[], T], view: memoryview) -> T:
    if not len(view):
        raise DeltaError("expected Arrow IPC streams, got no bytes at all")
    try:
        return read()
    except DeltaError:
        raise
    except (BadFrames, Malformed) as error:
        raise DeltaError(f"bad delta: {error}") from error
    except (pa.ArrowException, ValueError, TypeError, KeyError, OSError, MemoryError, OverflowError) as error:
        # Arrow raises several builtin types; all of them mean that the bytes are not Arrow
        raise DeltaError(f"bad delta: not valid Arrow data: {error}") from error


def _table_name(metadata: Any) -> str:
    raw = dict(metadata or {}).get(b"table")
    if raw is None:
        raise DeltaError("bad delta: a record batch does not name its table in its custom metadata `table`")
    name = str(raw.decode(errors="replace"))
    try:
        return name if head_of_table(name) is not None else check_name("table", name)
    except InvalidInput as error:
        raise DeltaError(f"bad delta: {error}") from error


def _onnx(name: str, batch: pa.RecordBatch, reserve: Callable[[int], None]) -> bytes:
    """The graph that a batch carries; empty where it is null."""
    kind = batch.schema.field(0).type if batch.num_columns else None
    if batch.schema.names != [ONNX] or not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise DeltaError(f"table {name}: expected one binary column {ONNX!r}, got {_shown(batch.schema)}")
    batch.validate(full=True)
    if len(batch) != 1:
        raise DeltaError(f"table {name}: expected one row, got {len(batch)} rows")
    reserve(2 * (pc.binary_length(batch.column(0))[0].as_py() or 0))  # Arrow copies it twice on its way out
    graph = batch.column(0)[0].as_py()
    if graph == b"":
        raise DeltaError(f"table {name}: expected an ONNX model, or null to take it away; got no bytes at all")
    return bytes(graph or b"")


def _shown(schema: pa.Schema) -> str:
    shown = ", ".join(f"{column.name!r} ({column.type})" for column in schema)
    return str(shown[:200] or "no columns")


@dataclass(slots=True)
class _Collected:
    """A table's rows in their order in the delta, over batches and streams. `reserve` as for `read_delta`."""

    name: str
    reserve: Callable[[int], None]
    key: KeyType | None = None
    dim: int | None = None
    rows: int = 0
    codes: list[Keys] = field(default_factory=list)
    kept: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    vectors: list[Vectors] = field(default_factory=list)
    strings: list[pa.Array] = field(default_factory=list)
    apart: int = 0  # bytes reserved for the vectors of a batch that are a copy of it

    def add(self, batch: pa.RecordBatch) -> None:
        """Append a batch's rows. Raises DeltaError naming the table and the row in it."""
        try:
            self._add(batch)
        except Malformed as error:
            row = "" if error.row is None else f", row {self.rows + error.row}"
            raise DeltaError(f"table {self.name!r}{row}: {error.reason}") from error

    def _add(self, batch: pa.RecordBatch) -> None:
        if sorted(batch.schema.names) != [KEY, VECTOR]:
            raise Malformed(f"expected columns {KEY!r} and {VECTOR!r}, got {_shown(batch.schema)}")
        key, vector = batch.column(KEY), batch.column(VECTOR)
        key_type = key_type_of(key.type)
        if key_type is None or self.key not in (None, key_type):
            raise Malformed(f"column {KEY!r}: expected {self.key or 'int64, uint64 or string'}, got {key.type}")
        self.key = key_type
        self.reserve(len(batch) * (_STRING_BYTES if key_type is KeyType.STRING else _ROW_BYTES))
        brings_vectors = _brings_vectors(vector.type)
        validate(key)
        vector.validate(full=True)
        codes, strings = key_column(key, key_type)
        if brings_vectors:
            kept = (
                vector.is_valid().to_numpy(zero_copy_only=False) if vector.null_count else np.ones(len(batch), np.bool_)
            )
            self._add_vectors(vector, kept)
        else:
            kept = np.zeros(len(batch), np.bool_)
        self.codes.append(codes)
        self.kept.append(kept)
        if strings is not None:
            self.strings.append(strings)
        self.rows += len(batch)

    def _add_vectors(self, vector: pa.Array, kept: npt.NDArray[np.bool_]) -> None:
        if not kept.any():
            return
        if self.dim is None:
            self.dim = self._dim_of(vector)
        if not kept.all():  # Arrow copies the others; of the batches before only these copies are left
            n = int(np.count_nonzero(kept))
            apart = n * self.dim * vector.type.value_type.bit_width // 8 + len(kept) * _NULL_BYTES
            self.reserve(max(0, apart - self.apart))
            self.apart = max(self.apart, apart)
        vectors = vector_column(vector, self.dim)
        if not all_finite(vectors):
            bad = first_not_finite(vectors)
            raise Malformed("the vector holds NaN or Inf", int(np.flatnonzero(kept)[bad]))
        self.vectors.append(vectors)

    def _dim_of(self, vector: pa.Array) -> int:
        if pa.types.is_fixed_size_list(vector.type):
            dim = int(vector.type.list_size)
        else:
            dim = int(pc.list_value_length(vector).drop_null()[0].as_py())
        if not 1 <= dim <= MAX_DIM:
            raise Malformed(f"expected a vector of 1 to {MAX_DIM} numbers, got {dim}")
        return dim

    def finish(self, max_bytes: int) -> DeltaTable:
        assert self.key is not None
        codes, kept = _joined(self.codes), _joined(self.kept)
        last, all_kept = dedup_last(codes), bool(kept.all())
        given = None
        if self.key is KeyType.STRING:
            strings = pa.concat_arrays(self.strings)
            last = _last_of_each(strings, codes, last)
            given = strings, last
        deleted = np.zeros(len(last), np.bool_) if all_kept else ~kept[last]
        dim = self.dim if all_kept or not deleted.all() else None
        if dim is None:
            return DeltaTable(self.key, codes[last], np.zeros((len(last), 0), np.float32), deleted, None, given)
        dtype = np.result_type(*self.vectors)
        if (n := len(last)) * dim * dtype.itemsize > max_bytes:
            raise DeltaError(
                f"table {self.name!r}: its {n} rows of {dim} numbers would take more than {max_bytes} bytes: split it"
            )
        joined = int(np.count_nonzero(kept)) * dim * dtype.itemsize if len(self.vectors) > 1 else 0
        self.reserve(joined + n * dim * dtype.itemsize)  # beside what they are copied from
        vectors = _joined(self.vectors)
        if all_kept:
            vectors = vectors.take(last, axis=0)
        else:  # a deleted row has no vector in the delta
            vectors = vectors.take(np.maximum(np.cumsum(kept) - 1, 0)[last], axis=0)
            vectors[deleted] = 0
        return DeltaTable(self.key, codes[last], vectors, deleted, dim, given)


@lru_cache(64)
def _brings_vectors(kind: pa.DataType) -> bool:
    """Whether a column of this type may have vectors; Malformed if it has anything but float32, float16 or nothing."""
    if pa.types.is_null(kind):
        return False
    check_vector_kind(kind, None)
    if value_kind(kind) not in (pa.float32(), pa.float16()):
        raise Malformed(f"column {VECTOR!r}: expected float32 or float16, got {value_kind(kind)}")
    return True


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _last_of_each(strings: pa.Array, codes: Keys, last: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The last row of each string, ordered by code. `last`: the last row of each code, which is mostly the same."""
    order = np.argsort(codes, kind="stable")
    equal = np.flatnonzero(codes[order[1:]] == codes[order[:-1]])
    if not pc.any(pc.not_equal(strings.take(pa.array(order[equal])), strings.take(pa.array(order[equal + 1])))).as_py():
        return last
    last = dedup_last(strings.dictionary_encode().indices.to_numpy().astype(np.int64))
    return last[np.argsort(codes[last], kind="stable")]
