"""Sources of rows: files and directories, data frames, Arrow data, arrays; all as blocks of keys and vectors.

Files are read batch by batch: memory is bounded by a few batches, and for Parquet by a row group. One thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.columns import Malformed
from tierstore.formats.names import HUGECTR_KEYS
from tierstore.formats.normalize import UnfitRow, guessed_key_type, refused_integers, vector_rows
from tierstore.formats.row_times import Times, as_times
from tierstore.formats.snapshot.reader import naming
from tierstore.formats.snapshot.table_logs import log_above
from tierstore.imports.column_files import BATCH_ROWS, ColumnSource, open_columns
from tierstore.imports.columns import (
    TAKE_INTEGERS,
    Chosen,
    NullColumn,
    choose_columns,
    converted,
    keys_of,
    picked,
    vectors_of,
    without_nulls,
)
from tierstore.imports.hugging_face import dataset_reader
from tierstore.imports.keras_weights import read_keras
from tierstore.imports.lake_tables import AsOf, as_of, lake_object, open_delta, open_iceberg
from tierstore.imports.named_tensors import NamedTensors, read_npy_files, read_npz_file, read_safetensors_file
from tierstore.imports.places import (
    HDF5,
    NPY,
    NPZ,
    SAFETENSORS,
    RowsKind,
    RowsPlace,
    npy_folders,
    places_of,
)
from tierstore.imports.raw_pairs import RowsPart, read_hugectr, read_pairs
from tierstore.imports.tensor_pieces import put_together
from tierstore.imports.tensor_rows import rows_in_tensors
from tierstore.imports.text_vectors import read_text
from tierstore.imports.torch_tensors import read_distributed, read_saved
from tierstore.types import KeyType


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of `file`, from row `first` on: `keys` as a writer accepts them, `vectors` numbers
    [n, dim], `times` if asked for.

    `left_out` are rows between them that were passed over, as they hold a null. `default` is what the source itself has
    for keys that are not there.
    """

    file: str
    first: int
    key_type: KeyType
    keys: Any
    vectors: np.ndarray
    times: Times | None = None
    kept: np.ndarray | None = None  # where some are left out, the number of each row that is there, from `first` on
    left_out: int = 0
    default: np.ndarray | None = None

    def row(self, i: int) -> int:
        """The number in the file of the block's row `i`."""
        return self.first + (i if self.kept is None else int(self.kept[i]))

    def only(self, wanted: np.ndarray) -> Block:
        """The rows where `wanted`, bool [n], is True."""
        if wanted.all():
            return self
        keys = self.keys.filter(pa.array(wanted)) if isinstance(self.keys, pa.Array) else np.asarray(self.keys)[wanted]
        kept = np.flatnonzero(wanted) if self.kept is None else self.kept[wanted]
        times = None if self.times is None else self.times[wanted]
        return replace(self, keys=keys, vectors=self.vectors[wanted], times=times, kept=kept)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Names of the columns of keys, vectors and times (None: there are none), and the type to convert keys to, if any.

    skip_nulls: pass over rows that hold a null; else they are errors. dim: numbers of a vector, where that is said.
    integers: vectors of integers are meant, and no codes. has_default: the caller says what absent keys get. as_of:
    which version of a lake table, by number or time. in_order: the order of rows counts.
    """

    key: str
    vector: str | Sequence[str]
    key_type: KeyType | None
    time: str | None
    skip_nulls: bool = False
    dim: int | None = None
    integers: bool = False
    has_default: bool = False
    as_of: AsOf | None = None
    in_order: bool = False


def blocks(source: Any, wanted: Wanted) -> Iterator[Block]:
    """The rows of `source`: paths of files and directories, a frame, Arrow data, or a mapping of columns.

    SnapshotError names the file, and the row if it is one row's fault.
    """
    paths = as_paths(source)
    if paths is not None:
        for place in places_of(paths):
            yield from _opened(place, wanted)
        return
    with naming_rows("the table"):
        _refuse_version(wanted)
        if isinstance(source, Mapping):
            yield from _of_columns(source, wanted)
        elif (table := lake_object(source)) is not None:
            yield from _of_table("the table", table, wanted)
        else:
            reader = _reader(source)
            yield from _of_batches("the table", _chosen(reader.schema, wanted), reader, wanted.skip_nulls)


def check(source: Any, wanted: Wanted) -> None:
    """SnapshotError where files do not have what is wanted. Reads their schemas and headers alone; other sources are
    passed over.
    """
    for place in places_of(as_paths(source) or ()):
        _opened(place, wanted)


def bad_row(reason: str, file: str, row: int) -> SnapshotError:
    """What is wrong with one row of a file."""
    return SnapshotError(f"{reason} (rows are counted from 0)", file=file, row=row)


def _chosen(schema: pa.Schema, wanted: Wanted, folders: Mapping[str, pa.Scalar] | None = None) -> Chosen:
    names = wanted.key, wanted.vector, wanted.key_type, wanted.time
    return choose_columns(schema, *names, dim=wanted.dim, integers=wanted.integers, folders=folders)


def as_paths(source: Any) -> list[Path] | None:
    """The paths in `source`; None if it is the data itself."""
    if isinstance(source, (str, os.PathLike)):
        return [Path(source)]
    if isinstance(source, (list, tuple)) and source and all(isinstance(one, (str, os.PathLike)) for one in source):
        return [Path(one) for one in source]
    return None


def rows_in(source: Any, version: AsOf | None = None) -> int:
    """About how many rows there are, where that can be found without reading them; else 0."""
    paths = as_paths(source)
    if paths is None:
        return len(source) if hasattr(source, "__len__") and not isinstance(source, Mapping) else 0
    total = 0
    try:
        for place in places_of(paths):
            if place.kind is RowsKind.HUGECTR:
                total += (place.path / HUGECTR_KEYS).stat().st_size // 8
            elif place.kind in _COLUMNS:
                with naming_rows(str(place.path)):
                    total += _columns_of(place, version).count_rows()
            else:
                return 0
    except (OSError, SnapshotError):
        return 0  # reading it reports what is wrong
    return total


_CAST_128 = "cast columns of 128 bits to Int64 where they are made"
_WHAT_TO_DO = {  # by what Arrow says
    "more than 64 bits": _CAST_128,
    "_pli128": _CAST_128,
    "_plu128": _CAST_128,
    "spanned by list offsets": "in DuckDB, write lists where arrays are null: column::FLOAT[]",  # its issue 24731
    "duplicate field names": "rename columns of one name, or leave them out, where the file is made",
}


@contextmanager
def naming_rows(file: str) -> Iterator[None]:
    """Turns every error into a SnapshotError that names the file, and the row if it is one row's fault."""
    try:
        with naming(file):
            try:
                yield
            except UnfitRow as error:
                raise bad_row(error.reason, file, error.row) from error
            except Malformed as error:
                if error.row is None:
                    raise
                raise bad_row(error.reason, file, error.row) from error
    except SnapshotError as error:
        for sign, what_to_do in _WHAT_TO_DO.items():
            if sign in error.reason:
                raise SnapshotError(f"{error.reason}; {what_to_do}", file=file) from error
        raise


def _opened(place: RowsPlace, wanted: Wanted) -> Iterator[Block]:
    """The blocks of a place. What names and headers show is checked at once, rows when they are read."""
    file = str(place.path)
    if place.kind in _COLUMNS:
        with naming_rows(file):
            return _named(file, _of_file(place, wanted))
    with naming_rows(file):
        _refuse_version(wanted)
    if wanted.time is not None:
        raise SnapshotError(
            f"expected a column {wanted.time!r} for times, which a checkpoint does not have: without it all rows have "
            "the time of the import",
            file=file,
        )
    if place.kind is RowsKind.TENSORS:
        if not isinstance(wanted.vector, str):
            raise SnapshotError(f"expected one tensor of rows, got {len(wanted.vector)} names", file=file)
        parts = rows_in_tensors(
            _tensors(place.files),
            wanted.key,
            wanted.vector,
            integers=wanted.integers,
            has_default=wanted.has_default,
        )
        return _of_parts(file, parts, wanted)
    with naming_rows(file):
        read = {RowsKind.PAIRS: read_pairs, RowsKind.HUGECTR: read_hugectr, RowsKind.TEXT: read_text}[place.kind]
        return _of_parts(file, read(place.path, wanted.dim), wanted)


def _tensors(files: Sequence[Path]) -> list[NamedTensors]:
    """The tensors of files; arrays of one folder are together, and so are shards."""
    found = put_together([_tensors_of(file) for file in files if file.suffix.lower() != NPY])
    for folder in npy_folders(files):
        with naming_rows(str(folder[0])):
            found.append(read_npy_files(folder))
    return found


def _named(file: str, blocks_of: Iterator[Block]) -> Iterator[Block]:
    with naming_rows(file):
        yield from blocks_of


def _tensors_of(file: Path) -> NamedTensors:
    ending = file.suffix.lower()
    if ending in (SAFETENSORS, NPZ):
        with naming_rows(str(file)):
            return read_safetensors_file(file) if ending == SAFETENSORS else read_npz_file(file)
    if ending in HDF5:
        with naming_rows(str(file)):
            return read_keras(file)
    return read_distributed(file) if file.is_dir() else read_saved(file)


def _of_parts(file: str, parts: Iterator[RowsPart], wanted: Wanted) -> Iterator[Block]:
    """Blocks of rows that are arrays."""
    with naming_rows(file):
        for part in parts:
            keys, key_type = part.keys, wanted.key_type or guessed_key_type(part.keys)
            if isinstance(keys, pa.Array) or guessed_key_type(keys) is not key_type:
                try:
                    keys = converted(pa.array(keys), key_type, wanted.key)
                except UnfitRow as error:
                    row = error.row if part.kept is None else int(part.kept[error.row])
                    raise bad_row(error.reason, part.place, part.first + row) from error
            yield Block(part.place, part.first, key_type, keys, part.vectors, kept=part.kept, default=part.default)


_LAKES = {RowsKind.DELTA: open_delta, RowsKind.ICEBERG: open_iceberg}
_COLUMNS = {RowsKind.COLUMNS, *_LAKES}


def _columns_of(place: RowsPlace, version: AsOf | None) -> ColumnSource:
    if place.kind in _LAKES:
        return _LAKES[place.kind](place.path, None if version is None else as_of(version))
    return open_columns(place.path)


def _of_file(place: RowsPlace, wanted: Wanted) -> Iterator[Block]:
    """Blocks of a file of columns, or a lake table. A file without rows has none, whatever its columns: their types are
    then often null.
    """
    source = _columns_of(place, wanted.as_of)
    if place.kind in _LAKES:
        return _of_table(str(place.path), source, wanted)
    _refuse_version(wanted)
    _refuse_mapped(source.schema)
    try:
        chosen = _chosen(source.schema, wanted, dict(place.folders))
    except InvalidInput as error:
        rows = source.count_rows()
        if rows and not (isinstance(error, NullColumn) and wanted.skip_nulls):
            raise
        return iter([Block(str(place.path), 0, KeyType.INT64, [], np.empty((0, 0)), left_out=rows)])
    return _of_batches(str(place.path), chosen, source.batches(chosen.to_read), wanted.skip_nulls)


def _of_table(file: str, source: ColumnSource, wanted: Wanted) -> Iterator[Block]:
    """Blocks of a table that need not give its rows in an order."""
    if wanted.in_order and not source.is_ordered:
        raise InvalidInput(
            "--on-duplicate last (on_duplicate='last'): expected rows in an order, which this table does not promise: "
            "have the engine that writes it keep one row of each key"
        )
    chosen = _chosen(source.schema, wanted)
    return _of_batches(file, chosen, source.batches(chosen.to_read), wanted.skip_nulls)


def _refuse_version(wanted: Wanted) -> None:
    if wanted.as_of is not None:
        raise InvalidInput("--as-of (as_of=): expected the path of a Delta or Iceberg table, which alone has versions")


def _of_batches(file: str, chosen: Chosen, batches: Any, skip_nulls: bool) -> Iterator[Block]:
    first = 0
    for whole in batches:
        kept = None
        try:
            all_rows = picked(whole, chosen)
            batch, kept = without_nulls(all_rows, chosen) if skip_nulls else (all_rows, None)
            left_out = len(whole) - len(batch)
            if len(batch):
                times = None if chosen.time is None else as_times(batch.column(chosen.time))
                keys, vectors = keys_of(batch, chosen), vectors_of(batch, chosen)
                yield Block(file, first, chosen.key_type, keys, vectors, times, kept, left_out)
            elif left_out:
                yield Block(file, first, chosen.key_type, keys_of(batch, chosen), np.empty((0, 0)), left_out=left_out)
        except Malformed as error:
            reason = f"column {chosen.time!r}: {error.reason}"
            if error.row is None:
                raise InvalidInput(reason) from error
            raise bad_row(reason, file, first + (error.row if kept is None else int(kept[error.row]))) from error
        except UnfitRow as error:  # of all rows, or of those that are kept
            raise bad_row(error.reason, file, first + (error.row if kept is None else int(kept[error.row]))) from error
        first += len(whole)


def _of_columns(columns: Mapping[str, Any], wanted: Wanted) -> Iterator[Block]:
    key, vector = wanted.key, wanted.vector
    names = [key, *([vector] if isinstance(vector, str) else vector), *([] if wanted.time is None else [wanted.time])]
    missing = [name for name in names if name not in columns]
    if missing:
        raise InvalidInput(f"expected a column {missing[0]!r}; there are {', '.join(map(repr, columns)) or 'none'}")
    keys = columns[key]
    if isinstance(vector, str):
        rows = vector_rows(columns[vector], integers=wanted.integers)
    else:
        rows = _side_by_side(columns, vector, wanted.integers)
    if len(keys) != len(rows):
        raise InvalidInput(f"expected a vector for each key, got {len(keys)} keys and {len(rows)} vectors")
    times = None if wanted.time is None else as_times(columns[wanted.time])
    yield Block("the table", 0, wanted.key_type or guessed_key_type(keys), keys, rows, times)


def _side_by_side(columns: Mapping[str, Any], names: Sequence[str], integers: bool) -> np.ndarray:
    """Vectors of one column a number. They are integers where all of them are, as in files of such columns."""
    arrays = [np.asarray(columns[name]) for name in names]
    for name, array in zip(names, arrays, strict=True):
        if array.ndim != 1 or array.dtype.kind not in "fiu":
            raise InvalidInput(f"column {name!r}: expected numbers, got {list(array.shape)} of {array.dtype}")
        if len(array) != len(arrays[0]):
            raise InvalidInput(f"column {name!r}: expected {len(arrays[0])} numbers, as before, got {len(array)}")
    if not integers and all(array.dtype.kind in "iu" for array in arrays):
        raise InvalidInput(
            f"columns {names[0]!r} to {names[-1]!r}: {refused_integers(arrays[0].dtype)}. {TAKE_INTEGERS}"
        )
    return np.stack(arrays, axis=1)


_PHYSICAL_NAME = b"delta.columnMapping.physicalName"


def _refuse_mapped(schema: pa.Schema) -> None:
    """Raise InvalidInput for columns of a Delta table that are mapped, in PyArrow's hands.

    PyArrow looks them up in the files by the table's names for them, and finds nulls, or a column that had this name
    once. deltalake itself reads them right.
    """
    mapped = [one.name for one in schema if one.metadata is not None and _PHYSICAL_NAME in one.metadata]
    if mapped:
        raise InvalidInput(
            f"columns {', '.join(map(repr, mapped[:3]))} are of a Delta table with column mapping, whose files have "
            "them under other names: PyArrow reads nulls there, or what had the name before. Import the table by its "
            "directory, or the deltalake.DeltaTable itself"
        )


def _refuse_delta(source: Any) -> None:
    """Raise InvalidInput for a Delta table in PyArrow's hands that gives other rows than the table has: with mapped
    columns, or as a dataset of plain files, which knows no log.
    """
    _refuse_mapped(source.schema)
    if isinstance(source, ds.FileSystemDataset) and isinstance(source.filesystem, LocalFileSystem):
        for folder in {Path(file).parent for file in source.files}:
            reason = log_above(folder / "file")
            if reason is not None:
                raise InvalidInput(reason)


def _reader(source: Any) -> pa.RecordBatchReader:
    """Arrow batches of a frame, a table, or any object with Arrow's C stream interface."""
    if isinstance(source, (ds.Dataset, pa.Table, pa.RecordBatch, pa.RecordBatchReader)):
        _refuse_delta(source)
    if (reader := dataset_reader(source, BATCH_ROWS)) is not None:
        return reader
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, ds.Dataset):
        # others implement Arrow's class (Vortex's), and refuse what they do not have
        is_arrows = type(source).__module__.startswith("pyarrow.")
        options = {"batch_size": BATCH_ROWS, "batch_readahead": 2} if is_arrows else {}
        return source.scanner(**options).to_reader()
    if isinstance(source, pa.Table):
        return source.to_reader(BATCH_ROWS)
    if type(source).__name__ == "LazyFrame":  # of Polars
        source = source.collect()
    if type(source).__module__.startswith("dask"):
        raise InvalidInput("got a frame of Dask: write it by to_parquet(…) and pass the path, or pass its compute()")
    if hasattr(source, "iloc"):  # pandas: a named index may be the key
        named = any(name is not None for name in source.index.names)
        return pa.Table.from_pandas(source, preserve_index=named).to_reader(BATCH_ROWS)
    if hasattr(source, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(source)
    raise InvalidInput(
        "expected paths, a data frame (pandas, Polars, DuckDB), Arrow data or a mapping of columns, got "
        f"{type(source).__name__}; write it as Parquet and pass the path"
    )
