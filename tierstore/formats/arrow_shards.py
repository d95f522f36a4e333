"""Shards as Arrow data: `.parquet`, and `.arrow` as an IPC file or stream.

A reader is used by one thread at a time and holds one record batch (Parquet: of `batch_rows` rows) in
memory; `.arrow` is memory-mapped and, uncompressed, not copied at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from tierstore.formats.keys import validate
from tierstore.types import Keys, TableSpec, Vectors

Block = tuple[Keys, Vectors | None, pa.Array | None]
_IPC_FILE_MAGIC = b"ARROW1"


def read_parquet(path: Path, spec: TableSpec, batch_rows: int, with_vectors: bool) -> Iterator[Block]:
    """Blocks of at most `batch_rows` rows; without `with_vectors` the vector column is not read. Raises Malformed."""
    with pq.ParquetFile(path, memory_map=True) as file:
        columns = _columns(file.schema_arrow, spec, with_vectors)
        for batch in file.iter_batches(batch_rows, columns=columns, use_threads=False):
            yield _block(batch, spec, with_vectors)


def read_arrow(path: Path, spec: TableSpec, batch_rows: int, with_vectors: bool) -> Iterator[Block]:
    """The same for Arrow IPC, told apart by its first bytes: the file format or the stream format."""
    with pa.memory_map(str(path)) as source:
        is_file = source.read(len(_IPC_FILE_MAGIC)) == _IPC_FILE_MAGIC
        source.seek(0)
        for batch in _file_batches(source, spec, with_vectors) if is_file else _stream_batches(source, spec):
            for column in batch.columns:
                validate(column)
            for start in range(0, len(batch), batch_rows):
                yield _block(batch.slice(start, batch_rows), spec, with_vectors)


def _file_batches(source: pa.MemoryMappedFile, spec: TableSpec, with_vectors: bool) -> Iterator[pa.RecordBatch]:
    schema = pa.ipc.open_file(source).schema
    fields = [schema.get_field_index(name) for name in _columns(schema, spec, with_vectors)]
    reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)


def _stream_batches(source: pa.MemoryMappedFile, spec: TableSpec) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_stream(source)
    columns = _columns(reader.schema, spec, True)
    for batch in reader:
        yield batch.select(columns)


def _columns(schema: pa.Schema, spec: TableSpec, with_vectors: bool) -> list[str]:
    """The names of the columns to read, once their types are known to be right."""
    for name in (KEY, VECTOR):
        if schema.get_field_index(name) < 0:
            raise Malformed(
                f"expected one column {KEY!r} and one column {VECTOR!r}, came {', '.join(schema.names) or 'none'}"
            )
    check_key_kind(schema.field(KEY).type, spec.key)
    check_vector_kind(schema.field(VECTOR).type, spec.dim)
    return [KEY, VECTOR] if with_vectors else [KEY]


def _block(batch: pa.RecordBatch, spec: TableSpec, with_vectors: bool) -> Block:
    codes, strings = key_column(batch.column(KEY), spec.key)
    if not with_vectors:
        return codes, None, strings
    vectors = batch.column(VECTOR)
    if vectors.null_count:
        row = vectors.is_null().to_numpy(zero_copy_only=False).argmax()
        raise Malformed("vector is null: in a snapshot every key has a vector", int(row))
    return codes, vector_column(vectors, spec.dim), strings
