"""Deltas from files of rows: `rows_delta` makes the bytes of one from Parquet, Arrow or ORC.

Files are read batch by batch, and given up as soon as the delta would be too large. Any thread, one at a time for each
call. Nothing is sent or stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tierstore.arguments import check_name
from tierstore.errors import DeltaError, InvalidInput
from tierstore.formats.columns import KEY, VECTOR, as_vectors, first_not_finite, key_type_of
from tierstore.formats.delta.reader import MAX_DECODED_BYTES
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.normalize import UnfitRow
from tierstore.formats.snapshot.arrow_shards import IPC_FILE_MAGIC
from tierstore.formats.strings import without_dictionary
from tierstore.formats.times import TimeLike
from tierstore.imports.column_files import open_columns
from tierstore.imports.columns import (
    SKIP_NULLS,
    Chosen,
    choose_columns,
    choose_key,
    converted,
    keys_of,
    picked,
    vectors_of,
)
from tierstore.imports.places import FORMATS, RowsKind, RowsPlace, places_of
from tierstore.imports.row_sources import as_paths, naming_rows
from tierstore.types import KeyType

TABLE, DELETED = "table", "deleted"  # columns that are read where a file has them
_OWN_WORDS = {b"model", b"seq", b"event_time"}  # of which a delta has all in its schemas' metadata
_ROWS_MAGIC = (IPC_FILE_MAGIC, b"PAR1")
_LEAST_NUMBER_BYTES, _MOST_NUMBER_BYTES = 2, 8
_ROW_BYTES = 8


@dataclass(frozen=True, slots=True)
class RowsColumns:
    """Which columns of a file say what a delta does, and how.

    Args:
        key: as for `import_table`; so are `vector` and `integers`.
        table: the column with the name of each row's table. By default `table`, where there is one.
        deleted: the column of booleans that says which keys are deleted. By default `deleted`, where there is one.
        zeros_delete: a row of zeros deletes its key, as in the deltas of trainers that know no other sign.
    """

    key: str = KEY
    vector: str | Sequence[str] = VECTOR
    table: str | None = None
    deleted: str | None = None
    zeros_delete: bool = False
    integers: bool = False


def holds_rows(path: Path) -> bool:
    """Whether a path is of rows, and no delta: a directory, a file of another format, or Arrow without a delta's
    metadata. What cannot be read counts as a delta, and its reader says what is wrong.
    """
    if path.is_dir() or (path.suffix.lower() in FORMATS and FORMATS[path.suffix.lower()] != "ipc"):
        return True
    try:
        with path.open("rb") as file:
            if file.read(max(map(len, _ROWS_MAGIC))).startswith(_ROWS_MAGIC):
                return True
            file.seek(0)
            return not _OWN_WORDS & set(pa.ipc.open_stream(file).schema.metadata or {})
    except (pa.ArrowException, OSError):
        return False


def rows_delta(
    source: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    model: str,
    seq: int,
    table: str | None = None,
    tables: Mapping[str, str] | None = None,
    columns: RowsColumns = RowsColumns(),
    event_time: TimeLike | None = None,
    base_version: int | None = None,
    max_bytes: int = MAX_DECODED_BYTES,
) -> bytes:
    """The bytes of a delta from files of rows, for `apply_delta`.

    >>> store.apply_delta(rows_delta("rows.parquet", model="ctr", seq=41821, table="item"))

    A row sets its key's vector. A null vector deletes the key, as does `deleted`; of a key that is there twice the last
    row counts.

    Args:
        source: a path or paths of Parquet, Arrow (IPC, file or stream) or ORC files, or of directories of them.
        table: the table of all rows; default what the column `table` says of each, else the only one of `tables`.
        tables: types of keys by table, as the model has them: keys are converted, other tables refused.
        event_time: the newest training event in it; default when the newest of the files was written, so that the
            same files make the same delta.
        base_version: the one version that it is for; default every version.
        max_bytes: what its rows may take; files that hold more are refused, most before they are read.

    DeltaError names file, row and reason.
    """
    paths = as_paths(source)
    if paths is None:
        raise DeltaError(f"expected the path of a file of rows, got {type(source).__name__}: DeltaWriter takes arrays")
    if table is not None:
        check_name("table", table)
    with _as_delta_errors():
        places = places_of(paths)
        for place in places:
            if place.kind is not RowsKind.COLUMNS:
                raise DeltaError(f"{place.path}: expected Parquet, Arrow or ORC, got {place.kind.value}")
        moment = max(place.path.stat().st_mtime for place in places) if event_time is None and places else event_time
        writer = DeltaWriter(BytesIO(), model=model, seq=seq, event_time=moment, base_version=base_version)
        rows = _Rows(writer, table, tables, columns, max_bytes)
        for place in places:
            rows.add(place)
        return writer.to_bytes()


@contextmanager
def _as_delta_errors() -> Iterator[None]:
    try:
        yield
    except DeltaError:
        raise
    except InvalidInput as error:  # a delta deletes by null: its rows are not left out
        raise DeltaError(str(error).replace(f"; {SKIP_NULLS}", "")) from error
    except OSError as error:
        raise DeltaError(f"cannot read {error.filename}: {error.strerror or error}") from error


class _Rows:
    """The rows of files, handed to the writer of one delta."""

    def __init__(
        self,
        writer: DeltaWriter,
        table: str | None,
        tables: Mapping[str, str] | None,
        columns: RowsColumns,
        max_bytes: int,
    ) -> None:
        self._writer, self._table, self._tables, self._columns = writer, table, tables, columns
        self._left, self._most = max_bytes, max_bytes

    def add(self, place: RowsPlace) -> None:
        file = str(place.path)
        with naming_rows(file):
            schema, batches, *_ = open_columns(place.path)
            folders = dict(place.folders)
            table = self._column(self._columns.table, TABLE, schema, folders) if self._table is None else None
            deleted = self._column(self._columns.deleted, DELETED, schema, folders)
            if table is None and self._table is None:
                self._table = self._only_table(schema)
            chosen = self._chosen(schema, deleted, folders)
            self._refuse_large(place.path, chosen)
            wanted, first = {*chosen.to_read, table, deleted}, 0
            for batch in batches([one for one in schema.names if one in wanted]):
                try:
                    self._add_batch(batch, chosen, table, deleted, folders)
                except UnfitRow as error:
                    raise UnfitRow(first + error.row, error.reason) from error
                first += len(batch)

    def _column(self, named: str | None, usual: str, schema: pa.Schema, folders: Mapping[str, pa.Scalar]) -> str | None:
        """The column of this name, which must be there, or the usual one, if it is."""
        name = usual if named is None else named
        if name in schema.names or name in folders:
            return name
        if named is not None:
            raise InvalidInput(f"expected a column {named!r}, there are {', '.join(map(repr, schema.names)) or 'none'}")
        return None

    def _only_table(self, schema: pa.Schema) -> str:
        known = list(self._tables or ())
        if len(known) == 1:
            return known[0]
        tables = f"; the tables are {', '.join(known)}" if known else ""
        raise InvalidInput(
            f"expected the table of these rows: --table (table=), or a column {TABLE!r} with it; there are "
            f"{', '.join(map(repr, schema.names)) or 'no columns'}{tables}"
        )

    def _chosen(self, schema: pa.Schema, deleted: str | None, folders: Mapping[str, pa.Scalar]) -> Chosen:
        """The columns of keys and vectors; without vectors where every row deletes its key."""
        vector = self._columns.vector
        if isinstance(vector, str):
            kind = schema.field(vector).type if schema.names.count(vector) == 1 else None
            if kind == pa.null() or (vector not in schema.names and deleted == DELETED and vector == VECTOR):
                return choose_key(schema, self._columns.key, folders)
        names = self._columns.key, vector, None
        return choose_columns(schema, *names, dim=None, integers=self._columns.integers, folders=folders)

    def _refuse_large(self, path: Path, chosen: Chosen) -> None:
        """Refuse a file whose rows, as it says itself or at the least, take more than is left."""
        if path.suffix.lower() == ".parquet":
            with pq.ParquetFile(path) as file:
                of, numbers = file.metadata, 0
                columns = {chosen.steps[name][0] for name in chosen.vectors if chosen.steps[name]}
                for group in map(of.row_group, range(of.num_row_groups)):
                    for column in map(group.column, range(group.num_columns)):
                        if column.path_in_schema.split(".")[0] in columns:
                            numbers += column.num_values
                least = numbers * _LEAST_NUMBER_BYTES + of.num_rows * _ROW_BYTES
        else:  # of whose columns the largest are the vectors
            least = path.stat().st_size * _LEAST_NUMBER_BYTES // _MOST_NUMBER_BYTES
        self._check(least)

    def _check(self, nbytes: int) -> None:
        if nbytes > self._left:
            raise InvalidInput(
                f"the rows would take more than the {self._most} bytes that a delta may have: split them into several "
                "deltas, or load them as a snapshot"
            )

    def _add_batch(
        self,
        batch: pa.RecordBatch,
        chosen: Chosen,
        table: str | None,
        deleted: str | None,
        folders: Mapping[str, pa.Scalar],
    ) -> None:
        if not len(batch):
            return
        rows = picked(batch, chosen)
        gone = _gone(rows, chosen, None if deleted is None else _column_of(batch, deleted, folders), deleted)
        if table is None:
            assert self._table is not None
            self._add_table(self._table, rows, chosen, gone, np.arange(len(batch)))
            return
        names = without_dictionary(_column_of(batch, table, folders))
        if key_type_of(names.type) is not KeyType.STRING:
            raise InvalidInput(f"column {table!r}: expected names of tables, got {names.type}")
        if names.null_count:
            raise UnfitRow(_first(names.is_null()), f"column {table!r}: expected the name of the row's table, got null")
        coded = names.dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False)
        for code, name in enumerate(coded.dictionary.to_pylist()):
            self._add_table(str(name), rows, chosen, gone, np.flatnonzero(codes == code))

    def _add_table(
        self, name: str, rows: pa.RecordBatch, chosen: Chosen, gone: npt.NDArray[np.bool_], at: npt.NDArray[np.int64]
    ) -> None:
        """Hand the rows `at` of a batch to the writer, as rows of one table."""
        key = chosen.key_type if self._tables is None else self._tables.get(name)
        if key is None:
            raise UnfitRow(
                int(at[0]), f"expected a table among {', '.join(self._tables or ()) or 'none'}, got {name!r}"
            )
        with _numbered(at):
            keys = converted(keys_of(rows.take(pa.array(at)), chosen), KeyType(key), chosen.key)
        if gone[at].any() or self._columns.zeros_delete:
            last = _last_of_each(keys)  # the writer gets rows that are set before those that are deleted
            keys, at = keys.take(pa.array(last)), at[last]
        kept = np.flatnonzero(~gone[at])
        vectors: npt.NDArray[Any] = np.empty((0, 0), np.float32)
        if len(kept):
            with _numbered(at[kept]):
                vectors = as_vectors(vectors_of(rows.take(pa.array(at[kept])), chosen))
            if self._columns.zeros_delete:
                some = vectors.any(axis=1)
                kept, vectors = kept[some], vectors[some]
            if (bad := first_not_finite(vectors)) is not None:
                raise UnfitRow(int(at[kept[bad]]), "the vector holds NaN or Inf, or overflows float32")
        self._check(used := vectors.nbytes + keys.nbytes)
        self._left -= used
        if len(kept):
            self._writer.upsert(name, keys.take(pa.array(kept)), vectors, key=key)
        if len(kept) < len(at):
            others = np.ones(len(at), bool)
            others[kept] = False
            self._writer.delete(name, keys.filter(pa.array(others)), key=key)


def _gone(rows: pa.RecordBatch, chosen: Chosen, flags: pa.Array | None, deleted: str | None) -> npt.NDArray[np.bool_]:
    """Which rows delete their keys, bool[n]: those without a vector, or those that the column `deleted` says."""
    without = np.ones(len(rows), bool)
    for name in chosen.vectors:
        without &= rows.column(name).is_null().to_numpy(zero_copy_only=False)
    if flags is None:
        return without
    if not pa.types.is_boolean(flags.type):
        raise InvalidInput(f"column {deleted!r}: expected booleans, true where the key is deleted, got {flags.type}")
    if flags.null_count:
        raise UnfitRow(_first(flags.is_null()), f"column {deleted!r}: expected true or false, got null")
    said: npt.NDArray[np.bool_] = flags.to_numpy(zero_copy_only=False)
    if (unlike := without & ~said).any():
        raise UnfitRow(int(np.argmax(unlike)), f"expected a vector, as {deleted!r} is false, got null")
    return said


@contextmanager
def _numbered(at: npt.NDArray[np.int64]) -> Iterator[None]:
    """Errors about a row of some say which one it is of all: `at`."""
    try:
        yield
    except UnfitRow as error:
        raise UnfitRow(int(at[error.row]), error.reason) from error


def _column_of(batch: pa.RecordBatch, name: str, folders: Mapping[str, pa.Scalar]) -> pa.Array:
    return batch.column(name) if name in batch.schema.names else pa.repeat(folders[name], len(batch))


def _last_of_each(keys: pa.Array) -> npt.NDArray[np.int64]:
    """The last row of each key, ascending."""
    codes = keys.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    _, last = np.unique(codes[::-1], return_index=True)
    return np.sort(len(codes) - 1 - last)


def _first(mask: pa.Array) -> int:
    return int(np.argmax(mask.to_numpy(zero_copy_only=False)))
