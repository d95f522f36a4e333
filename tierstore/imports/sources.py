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

from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.columns import Malformed
from tierstore.formats.names import HUGECTR_KEYS
from tierstore.formats.normalize import guessed_key_type, vector_rows
from tierstore.formats.row_times import Times, as_times
from tierstore.formats.snapshot.checksum import is_hugectr, parts
from tierstore.imports.checkpoints import RowsPart, is_state_dict, pairs_in, read_hugectr, read_pairs, read_state_dict
from tierstore.imports.columns import Chosen, choose_columns, keys_of, vectors_of, without_nulls
from tierstore.types import KeyType

_FORMATS = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc", ".ipc": "ipc", ".orc": "orc"}
_BATCH_ROWS = 1 << 15


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of `file`, from row `first` on: `keys` as a writer accepts them, `vectors` numbers
    [n, dim], `times` if asked for.

    `left_out` are rows between them that were passed over, as they hold a null.
    """

    file: str
    first: int
    key_type: KeyType
    keys: Any
    vectors: np.ndarray
    times: Times | None = None
    kept: np.ndarray | None = None  # where some are left out, the number of each row that is there, from `first` on
    left_out: int = 0

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

    skip_nulls: pass over rows that hold a null; else they are errors.
    """

    key: str
    vector: str | Sequence[str]
    key_type: KeyType | None
    time: str | None
    skip_nulls: bool = False


def blocks(source: Any, wanted: Wanted) -> Iterator[Block]:
    """The rows of `source`: paths of files and directories, a frame, Arrow data, or a mapping of columns.

    SnapshotError names the file, and the row if it is one row's fault.
    """
    paths = as_paths(source)
    if paths is not None:
        for path in paths:
            yield from _of_path(path, wanted)
        return
    with _errors_naming("the table"):
        if isinstance(source, Mapping):
            yield from _of_columns(source, wanted)
            return
        reader = _reader(source)
        yield from _of_batches("the table", _chosen(reader.schema, wanted), reader, wanted.skip_nulls)


def check(source: Any, wanted: Wanted) -> None:
    """SnapshotError where files do not have the columns. Reads their schemas alone; other sources are passed over."""
    for path in as_paths(source) or ():
        if not (pairs_in(path) or is_state_dict(path) or (path.is_dir() and is_hugectr(path))):
            for file in _files(path) if path.exists() else ():
                with _errors_naming(str(file)):
                    _chosen(_dataset(file).schema, wanted)


def _chosen(schema: pa.Schema, wanted: Wanted) -> Chosen:
    return choose_columns(schema, wanted.key, wanted.vector, wanted.key_type, wanted.time)


def as_paths(source: Any) -> list[Path] | None:
    """The paths in `source`; None if it is the data itself."""
    if isinstance(source, (str, os.PathLike)):
        return [Path(source)]
    if isinstance(source, (list, tuple)) and source and all(isinstance(one, (str, os.PathLike)) for one in source):
        return [Path(one) for one in source]
    return None


def rows_in(source: Any) -> int:
    """How many rows there are, where that can be found without reading them; else 0."""
    paths = as_paths(source)
    if paths is None:
        return len(source) if hasattr(source, "__len__") and not isinstance(source, Mapping) else 0
    try:
        folders = [path for path in paths if path.is_dir() and is_hugectr(path)]
        total = sum((path / HUGECTR_KEYS).stat().st_size // 8 for path in folders)
        for path in paths:
            if path not in folders:
                total += sum(_dataset(file).count_rows() for file in _files(path))
    except (OSError, pa.ArrowException, SnapshotError):
        return 0  # reading it reports what is wrong
    return total


def _files(path: Path) -> list[Path]:
    return [path / name for name, _ in parts(path)]


@contextmanager
def _errors_naming(file: str) -> Iterator[None]:
    """Turns every error into a SnapshotError that names the file."""
    try:
        yield
    except SnapshotError:
        raise
    except Malformed as error:
        raise SnapshotError(error.reason, file=file, row=error.row) from error
    except InvalidInput as error:
        raise SnapshotError(str(error), file=file) from error
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise SnapshotError(f"cannot be read: {error}", file=file) from error


def _of_path(path: Path, wanted: Wanted) -> Iterator[Block]:
    if pairs_in(path):
        yield from _of_parts(path, read_pairs(path), wanted)
        return
    if is_state_dict(path):
        if not isinstance(wanted.vector, str):
            raise SnapshotError(f"expected one tensor of rows, got {len(wanted.vector)} names", file=str(path))
        yield from _of_parts(path, read_state_dict(path, wanted.key, wanted.vector), wanted)
        return
    if not path.exists():
        raise SnapshotError("is missing", file=str(path))
    if path.is_dir() and is_hugectr(path):
        yield from _of_parts(path, read_hugectr(path), replace(wanted, key_type=KeyType.INT64))
        return
    files = _files(path)
    if not files:
        raise SnapshotError("expected a directory with Parquet, Arrow or ORC files; got none", file=str(path))
    for file in files:
        with _errors_naming(str(file)):
            data = _dataset(file)
            chosen = _chosen(data.schema, wanted)
            batches = data.to_batches(columns=chosen.names, batch_size=_BATCH_ROWS, batch_readahead=2)
            yield from _of_batches(str(file), chosen, batches, wanted.skip_nulls)


def _of_parts(path: Path, parts: Iterator[RowsPart], wanted: Wanted) -> Iterator[Block]:
    if wanted.time is not None:
        raise SnapshotError(
            f"expected a column {wanted.time!r} for times, which a checkpoint does not have: without it all rows have "
            "the time of the import",
            file=str(path),
        )
    with _errors_naming(str(path)):
        for part in parts:
            yield Block(part.place, part.first, wanted.key_type or guessed_key_type(part.keys), part.keys, part.vectors)


def _dataset(file: Path) -> ds.Dataset:
    if file.suffix not in _FORMATS:
        raise SnapshotError(
            f"expected {', '.join(_FORMATS)}, a checkpoint (.safetensors, .pt, …) or a HugeCTR folder, got "
            f"{file.suffix or 'no ending'}; DuckDB or pandas can convert other formats to Parquet",
            file=str(file),
        )
    return ds.dataset(file, format=_FORMATS[file.suffix])


def _of_batches(file: str, chosen: Chosen, batches: Any, skip_nulls: bool) -> Iterator[Block]:
    first = 0
    for whole in batches:
        batch, kept = without_nulls(whole, chosen) if skip_nulls else (whole, None)
        left_out = len(whole) - len(batch)
        try:
            if len(batch):
                times = None if chosen.time is None else as_times(batch.column(chosen.time))
                keys, vectors = keys_of(batch, chosen), vectors_of(batch, chosen)
                yield Block(file, first, chosen.key_type, keys, vectors, times, kept, left_out)
            elif left_out:
                yield Block(file, first, chosen.key_type, keys_of(batch, chosen), np.empty((0, 0)), left_out=left_out)
        except Malformed as error:
            row = "" if error.row is None else f"row {error.row}: "
            raise InvalidInput(f"{row}column {chosen.time!r}: {error.reason}{_place(first)}") from error
        except InvalidInput as error:
            raise InvalidInput(f"{error}{_place(first)}") from error
        first += len(whole)


def _place(first: int) -> str:
    return "" if not first else f", in the batch that begins with row {first}"


def _of_columns(columns: Mapping[str, Any], wanted: Wanted) -> Iterator[Block]:
    key, vector = wanted.key, wanted.vector
    names = [key, *([vector] if isinstance(vector, str) else vector), *([] if wanted.time is None else [wanted.time])]
    missing = [name for name in names if name not in columns]
    if missing:
        raise InvalidInput(f"expected a column {missing[0]!r}; there are {', '.join(map(repr, columns)) or 'none'}")
    keys = columns[key]
    if isinstance(vector, str):
        rows = vector_rows(columns[vector])
    else:
        rows = np.stack([np.asarray(columns[name]) for name in vector], axis=1)
    if len(keys) != len(rows):
        raise InvalidInput(f"expected a vector for each key, got {len(keys)} keys and {len(rows)} vectors")
    times = None if wanted.time is None else as_times(columns[wanted.time])
    yield Block("the table", 0, wanted.key_type or guessed_key_type(keys), keys, rows, times)


def _reader(source: Any) -> pa.RecordBatchReader:
    """Arrow batches of a frame, a table, or any object with Arrow's C stream interface."""
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, ds.Dataset):
        return source.scanner(batch_size=_BATCH_ROWS, batch_readahead=2).to_reader()
    if isinstance(source, pa.Table):
        return source.to_reader(_BATCH_ROWS)
    if type(source).__name__ == "LazyFrame":  # of Polars
        source = source.collect()
    if hasattr(source, "iloc"):  # pandas: a named index may be the key
        named = any(name is not None for name in source.index.names)
        return pa.Table.from_pandas(source, preserve_index=named).to_reader(_BATCH_ROWS)
    if hasattr(source, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(source)
    raise InvalidInput(
        "expected paths, a data frame (pandas, Polars, DuckDB), Arrow data or a mapping of columns, got "
        f"{type(source).__name__}; write it as Parquet and pass the path"
    )
