"""Writing a delta: what a trainer calls every minute.

A `DeltaWriter` belongs to one thread. Rows are kept in memory until the block ends (deltas are
small); then the file appears whole under its name, durable, or, if the block raised, not at all.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from tierstore.arguments import check_name, number_or_none, whole_number
from tierstore.errors import DeltaError, InvalidInput
from tierstore.formats.columns import KEY, MAX_DIM, VECTOR, as_vectors, first_not_finite
from tierstore.formats.files import publish
from tierstore.formats.keys import as_codes, from_codes
from tierstore.formats.names import dense_table
from tierstore.formats.normalize import guessed_key_type, vector_rows
from tierstore.formats.onnx_file import read_dense
from tierstore.formats.strings import as_arrow_strings
from tierstore.formats.times import TimeLike, as_utc, format_time
from tierstore.types import KeyType, Vectors

_ARROW_KEYS = {KeyType.INT64: pa.int64(), KeyType.UINT64: pa.uint64(), KeyType.STRING: pa.large_string()}


class DeltaWriter:
    """Write one delta to a path or to a binary file object.

    >>> with DeltaWriter("deltas/41821.arrow", model="ctr", seq=41821) as delta:
    ...     delta.upsert("item", keys, vectors)
    ...     delta.delete("item", retired)

    seq: one more than the model's last. event_time: the newest training event in it (a datetime with a zone, seconds
    since 1970 or ISO 8601 with an offset; default now). base_version: the one version that it is meant for; default
    every version. Within the delta the later of two rows with one key wins. Errors in what is given are DeltaError.
    """

    def __init__(
        self,
        target: str | Path | IO[bytes],
        *,
        model: str,
        seq: int,
        event_time: TimeLike | None = None,
        base_version: int | None = None,
    ) -> None:
        if not isinstance(target, (str, Path)) and not hasattr(target, "write"):
            raise DeltaError(
                f"target: expected a path, or a file that is open for writing bytes, got {type(target).__name__}"
            )
        self._target = target
        self._metadata = _metadata(model, seq, event_time, base_version)
        self._tables: dict[str, _TableRows] = {}
        self._graphs: dict[str, bytes | None] = {}  # by head
        self._closed = False

    def upsert(self, table: str, keys: Any, vectors: Any, *, key: str | None = None) -> None:
        """Set rows. keys [n] as `lookup` takes them; vectors float [n, dim], written as float32 or float16.

        Both may be NumPy arrays, sequences, Arrow columns, pandas columns or tensors, as
        `TableWriter.write` takes them.

        `key` is the table's key type where the keys alone do not say it: a list of int counts as int64.
        """
        rows = self._table(table, keys, key)
        try:
            values = as_vectors(vector_rows(vectors))
        except InvalidInput as error:
            raise DeltaError(f"table {table!r}: {error}") from error
        if len(values) or len(keys):
            rows.upsert(keys, values)

    def delete(self, table: str, keys: Any, *, key: str | None = None) -> None:
        """Delete rows. The keys need not exist."""
        self._table(table, keys, key).delete(keys)

    def dense(self, model: str | Path | bytes | bytearray | memoryview | None, *, head: str = "") -> None:
        """Replace the dense part: an ONNX file, or its bytes; the last call for a head counts.

        Weights in other files next to the file are included. head: the one of several over the same tables that is
        served as `<model>.<head>`; it may be new. None: it is served no more.
        """
        self._open()
        graph = None if model is None else read_dense(model, DeltaError)
        self._graphs[head and check_name("head", head)] = graph

    def to_bytes(self) -> bytes:
        """The delta so far, as bytes."""
        sink = pa.BufferOutputStream()
        self._write(sink)
        return bytes(sink.getvalue().to_pybytes())

    def close(self) -> None:
        """Write the delta. Nothing may be added after it; calling it again does nothing."""
        if self._closed:
            return
        if isinstance(self._target, (str, Path)):
            with publish(self._target) as file:
                self._write(file)
        else:
            self._write(self._target)
        self._closed = True

    def __enter__(self) -> DeltaWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise DeltaError("this delta is written already: start the next one")

    def _table(self, name: str, keys: Any, key: str | None) -> _TableRows:
        self._open()
        try:
            key_type = guessed_key_type(keys) if key is None else KeyType(key)
        except ValueError as error:
            raise DeltaError(f"table {name!r}: {error}") from error
        rows = self._tables.setdefault(check_name("table", name), _TableRows(name, key_type))
        if rows.key_type is not key_type:
            raise DeltaError(
                f"table {name!r}: expected {rows.key_type} keys, as came before, got {key_type}; name the type by key="
            )
        return rows

    def _write(self, sink: Any) -> None:
        """Write one stream for each schema: their number, `parts`, must be known before the first."""
        streams: dict[pa.Schema, list[tuple[str, list[pa.RecordBatch]]]] = {}
        for name, rows in self._tables.items():
            streams.setdefault(rows.schema(), []).append((name, rows.batches()))
        for head, graph in self._graphs.items():
            dense = pa.record_batch({"onnx": pa.array([graph], pa.large_binary())})
            streams.setdefault(dense.schema, []).append((dense_table(head), [dense]))
        if not streams:
            streams[_TableRows("", KeyType.INT64).schema()] = []
        metadata = {**self._metadata, "parts": str(len(streams))}
        for schema, tables in streams.items():
            with pa.ipc.new_stream(sink, schema.with_metadata(metadata)) as writer:
                for name, batches in tables:
                    for batch in batches:
                        writer.write_batch(batch, custom_metadata={"table": name})


class _TableRows:
    """The rows of one table, in the order of the calls; None for vectors means deleted."""

    def __init__(self, name: str, key_type: KeyType) -> None:
        self.name, self.key_type = name, key_type
        self.dim: int | None = None
        self.is_half = True
        self.rows: list[tuple[pa.Array, Vectors | None]] = []

    def upsert(self, keys: Any, vectors: Vectors) -> None:
        column = self._keys(keys)
        if vectors.ndim != 2 or len(vectors) != len(column):
            raise DeltaError(
                f"table {self.name!r}: expected vectors of shape [{len(column)}, dim], one a key, got "
                f"{list(vectors.shape)}"
            )
        dim = vectors.shape[1]
        if not 1 <= dim <= MAX_DIM or dim != (self.dim or dim):
            raise DeltaError(
                f"table {self.name!r}: expected vectors of {self.dim or f'1 to {MAX_DIM}'} numbers, got {dim}"
            )
        row = first_not_finite(vectors)
        if row is not None:
            raise DeltaError(f"table {self.name!r}, row {row}: the vector holds NaN or Inf (or overflows float32)")
        self.dim = dim
        self.is_half &= vectors.dtype == np.float16
        self.rows.append((column, vectors.copy()))

    def delete(self, keys: Any) -> None:
        self.rows.append((self._keys(keys), None))

    def schema(self) -> pa.Schema:
        return pa.schema(
            [pa.field(KEY, _ARROW_KEYS[self.key_type], nullable=False), pa.field(VECTOR, self._vector_type())]
        )

    def batches(self) -> list[pa.RecordBatch]:
        schema, kind = self.schema(), self._vector_type()
        out = []
        for column, vectors in self.rows:
            if vectors is None:
                values = pa.nulls(len(column), kind)
            else:
                flat = np.ascontiguousarray(vectors, np.float16 if self.is_half else np.float32).reshape(-1)
                values = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind)
            out.append(pa.record_batch([column, values], schema=schema))
        return out

    def _vector_type(self) -> pa.DataType:
        if self.dim is None:
            return pa.list_(pa.float32())
        return pa.list_(pa.float16() if self.is_half else pa.float32(), self.dim)

    def _keys(self, keys: Any) -> pa.Array:
        if self.key_type is KeyType.STRING:
            return as_arrow_strings(keys)
        return pa.array(np.array(from_codes(as_codes(keys, self.key_type), self.key_type)))


def _metadata(model: str, seq: int, event_time: TimeLike | None, base_version: int | None) -> dict[str, str]:
    check_name("model", model)
    try:
        seq, base_version = whole_number("seq", seq, 1), number_or_none("base_version", base_version, 1)
    except InvalidInput as error:
        raise DeltaError(str(error)) from error
    try:
        moment = datetime.now(UTC) if event_time is None else as_utc(event_time)
    except ValueError as error:
        raise DeltaError(f"event_time: {error}") from error
    metadata = {"model": model, "seq": str(seq), "event_time": format_time(moment)}
    return metadata if base_version is None else {**metadata, "base_version": str(base_version)}
