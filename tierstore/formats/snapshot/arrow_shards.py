"""Shards as Arrow data: `.parquet`, and `.arrow` as an IPC file or stream.

A reader is used by one thread at a time and holds one record batch (Parquet: of `batch_rows` rows) in
memory; a local `.arrow` is memory-mapped and, uncompressed, not copied at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from tierstore.formats.columns import (
    KEY,
    VECTOR,
    Malformed,
    check_key_kind,
    check_vector_kind,
    key_column,
    vector_column,
)
from tierstore.formats.objects import Location, ObjectPath
from tierstore.formats.row_times import Times, as_times
from tierstore.formats.strings import validate
from tierstore.types import Keys, TableSpec, Vectors

Block = tuple[Keys, Vectors | None, pa.Array | None, Times | None]
Columns = tuple[str, str, str | None]  # names of the key's, the vector's and the time's, if there is one
IPC_FILE_MAGIC = b"ARROW1"
_BUFFER_BYTES = 1 << 20  # of a column chunk of an object


def _buffer_bytes(path: Location) -> int:
    """Bytes of a column chunk that are held; 0: it is read as a whole, which costs nothing where it is mapped."""
    return _BUFFER_BYTES if isinstance(path, ObjectPath) else 0


@contextlib.contextmanager
def _mapped(path: Location) -> Iterator[pa.NativeFile]:
    if isinstance(path, ObjectPath):
        with path.open() as stream, pa.PythonFile(stream, mode="r") as file:
            yield file
    else:
        with pa.memory_map(str(path)) as file:
            yield file


def read_parquet(
    path: Location, spec: TableSpec, batch_rows: int, with_vectors: bool, *, columns: Columns = (KEY, VECTOR, None)
) -> Iterator[Block]:
    """Blocks of at most `batch_rows` rows; without `with_vectors` the vector column is not read. Raises Malformed."""
    with _mapped(path) as source, pq.ParquetFile(source, buffer_size=_buffer_bytes(path)) as file:
        wanted = _wanted(file.schema_arrow, spec, columns, with_vectors)
        for batch in file.iter_batches(batch_rows, columns=wanted, use_threads=False):
            yield _block(batch, spec, columns, with_vectors)


def read_arrow(
    path: Location, spec: TableSpec, batch_rows: int, with_vectors: bool, *, columns: Columns = (KEY, VECTOR, None)
) -> Iterator[Block]:
    """Read a shard of Arrow IPC, in the file format or the stream format, as its first bytes say."""
    with _mapped(path) as source:
        is_file = source.read(len(IPC_FILE_MAGIC)) == IPC_FILE_MAGIC
        source.seek(0)
        batches = (_file_batches if is_file else _stream_batches)(source, spec, columns, with_vectors)
        for batch in batches:
            for column in batch.columns:
                validate(column)
            for start in range(0, len(batch), batch_rows):
                yield _block(batch.slice(start, batch_rows), spec, columns, with_vectors)


def _file_batches(
    source: pa.NativeFile, spec: TableSpec, columns: Columns, with_vectors: bool
) -> Iterator[pa.RecordBatch]:
    schema = pa.ipc.open_file(source).schema
    fields = [schema.get_field_index(name) for name in _wanted(schema, spec, columns, with_vectors)]
    reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


def _stream_batches(
    source: pa.NativeFile, spec: TableSpec, columns: Columns, with_vectors: bool
) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_stream(source)
    wanted = _wanted(reader.schema, spec, columns, with_vectors)
    for batch in reader:
        yield batch.select(wanted)


def _wanted(schema: pa.Schema, spec: TableSpec, columns: Columns, with_vectors: bool) -> list[str]:
    """The names of the columns to read, once their types are known to be right."""
    key, vector, time = columns
    if schema.get_field_index(key) < 0 or schema.get_field_index(vector) < 0:
        got = ", ".join(schema.names) or "none"
        raise Malformed(
            f"expected one column {key!r} and one column {vector!r}, got {got}; `columns` of the table in "
            "snapshot.json gives them other names, `tierstore import` takes files as they are"
        )
    check_key_kind(schema.field(key).type, spec.key, key)
    check_vector_kind(schema.field(vector).type, spec.dim, vector)
    if time is not None and schema.get_field_index(time) < 0:
        raise Malformed(f"expected one column {time!r}, the table's time_column, got {', '.join(schema.names)}")
    return [name for name in columns if name is not None] if with_vectors else [key]


def _block(batch: pa.RecordBatch, spec: TableSpec, columns: Columns, with_vectors: bool) -> Block:
    codes, strings = key_column(batch.column(columns[0]), spec.key)
    if not with_vectors:
        return codes, None, strings, None
    vectors = batch.column(columns[1])
    if vectors.null_count:
        row = vectors.is_null().to_numpy(zero_copy_only=False).argmax()
        raise Malformed("vector is null: in a snapshot every key has a vector", int(row))
    times = None if columns[2] is None else as_times(batch.column(columns[2]))
    return codes, vector_column(vectors, spec.dim), strings, times
