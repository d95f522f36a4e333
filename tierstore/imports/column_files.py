"""Columns of a file of Parquet, ORC or Arrow (also a stream): its schema, and batches of those that are asked for.

Read batch by batch: memory is bounded by a few batches, and for Parquet by a row group. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds

from tierstore.formats.snapshot.arrow_shards import IPC_FILE_MAGIC
from tierstore.imports.places import FORMATS

BATCH_ROWS = 1 << 15


class ColumnSource(NamedTuple):
    """A table of columns: its schema, what gives batches of some columns, and what counts its rows.

    `batches` may be called again, for the same rows; where `is_ordered` also in the same order.
    """

    schema: pa.Schema
    batches: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
    count_rows: Callable[[], int]
    is_ordered: bool = True


def open_columns(file: Path) -> ColumnSource:
    """The columns of a file, told by its ending; of Arrow also its streams. What Arrow raises."""
    if FORMATS[file.suffix.lower()] == "ipc" and not _is_ipc_file(file):
        return open_stream(file)
    data = ds.dataset(file, format=FORMATS[file.suffix.lower()])
    return ColumnSource(data.schema, lambda names: _scanned(data, names), data.count_rows)


def _is_ipc_file(file: Path) -> bool:
    """Whether it is of Arrow's file format, and no stream."""
    with file.open("rb") as opened:
        return opened.read(len(IPC_FILE_MAGIC)) == IPC_FILE_MAGIC


def _scanned(data: ds.Dataset, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The batches of a dataset; Arrow begins to read ahead when the first is asked for."""
    yield from data.to_batches(columns=list(names), batch_size=BATCH_ROWS, batch_readahead=2)


def open_stream(file: Path) -> ColumnSource:
    """The columns of a stream of Arrow, which is read from its begin each time."""
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        schema = stream.schema
    return ColumnSource(schema, lambda names: _streamed(file, names), lambda: sum(map(len, _streamed(file, ()))))


def _streamed(file: Path, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        for whole in stream:
            batch = whole.select(names)
            batch.validate(full=True)
            yield from sliced(batch)


def sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in parts of at most `BATCH_ROWS` rows."""
    for first in range(0, len(batch), BATCH_ROWS):
        yield batch.slice(first, BATCH_ROWS)
