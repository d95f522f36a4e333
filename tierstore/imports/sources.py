"""Where rows come from: files and directories, frames, Arrow data, arrays; each as blocks of keys and vectors.

Files are read batch by batch: memory is bounded by a few batches, and by a row group for Parquet. One thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.checksum import is_hugectr, parts
from tierstore.formats.columns import Malformed
from tierstore.formats.given import as_rows, guessed_key_type
from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.formats.tensor_shards import read_hugectr
from tierstore.imports.columns import choose, keys_of, vectors_of
from tierstore.types import KeyType, StorageDtype, TableSpec

_FORMATS = {".parquet": "parquet", ".arrow": "ipc", ".feather": "ipc", ".ipc": "ipc", ".orc": "orc"}
_BATCH_ROWS = 1 << 15


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows: `keys` as a writer takes them, `vectors` [n, dim] of numbers.

    They are those from row `first` on of `place`, a file.
    """

    place: str
    first: int
    key_type: KeyType
    keys: Any
    vectors: np.ndarray


def blocks(source: Any, key: str, vector: str | Sequence[str], key_type: KeyType | None) -> Iterator[Block]:
    """The rows of `source`: paths of files and directories, a frame, Arrow data, or a mapping of columns.

    Raises SnapshotError naming the file, and the row where one is to blame.
    """
    paths = as_paths(source)
    if paths is not None:
        for path in paths:
            yield from _of_path(path, key, vector, key_type)
        return
    with _naming("the table"):
        if isinstance(source, Mapping):
            yield from _of_columns(source, key, vector, key_type)
            return
        reader = _reader(source)
        yield from _of_batches("the table", reader.schema, reader, key, vector, key_type)


def as_paths(source: Any) -> list[Path] | None:
    """The paths that `source` names; None if it is the data itself."""
    if isinstance(source, (str, os.PathLike)):
        return [Path(source)]
    if isinstance(source, (list, tuple)) and source and all(isinstance(one, (str, os.PathLike)) for one in source):
        return [Path(one) for one in source]
    return None


def rows_in(source: Any) -> int:
    """How many rows there are, where that is known without reading them; 0 where it is not."""
    paths = as_paths(source)
    if paths is None:
        return len(source) if hasattr(source, "__len__") and not isinstance(source, Mapping) else 0
    try:
        folders = [path for path in paths if path.is_dir() and is_hugectr(path)]
        total = sum((path / HUGECTR_KEYS).stat().st_size // 8 for path in folders)
        for path in paths:
            if path not in folders:
                total += sum(_dataset(file).count_rows() for file in parts(path))
    except (OSError, pa.ArrowException, SnapshotError):
        return 0  # whoever reads it says what is wrong with it
    return total


@contextmanager
def _naming(file: str) -> Iterator[None]:
    """Whatever goes wrong, as one SnapshotError that names the file."""
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


def _of_path(path: Path, key: str, vector: str | Sequence[str], key_type: KeyType | None) -> Iterator[Block]:
    if not path.exists():
        raise SnapshotError("is missing", file=str(path))
    if path.is_dir() and is_hugectr(path):
        yield from _of_hugectr(path)
        return
    files = parts(path)
    if not files:
        raise SnapshotError("expected a directory with Parquet, Arrow or ORC files; came none", file=str(path))
    for file in files:
        with _naming(str(file)):
            data = _dataset(file)
            batches = data.to_batches(
                columns=choose(data.schema, key, vector, key_type).names, batch_size=_BATCH_ROWS, batch_readahead=2
            )
            yield from _of_batches(str(file), data.schema, batches, key, vector, key_type)


def _dataset(file: Path) -> ds.Dataset:
    if file.suffix not in _FORMATS:
        raise SnapshotError(
            f"expected {', '.join(_FORMATS)} or a HugeCTR folder, came {file.suffix or 'no ending'}; what DuckDB or "
            "pandas can read they can write as Parquet",
            file=str(file),
        )
    return ds.dataset(file, format=_FORMATS[file.suffix])


def _of_batches(
    place: str, schema: pa.Schema, batches: Any, key: str, vector: str | Sequence[str], key_type: KeyType | None
) -> Iterator[Block]:
    chosen = choose(schema, key, vector, key_type)
    first = 0
    for batch in batches:
        if not len(batch):
            continue
        try:
            yield Block(place, first, chosen.key_type, keys_of(batch, chosen), vectors_of(batch, chosen))
        except InvalidInput as error:
            among = "" if not first else f", in the batch that begins with row {first}"
            raise InvalidInput(f"{error}{among}") from error
        first += len(batch)


def _of_columns(
    columns: Mapping[str, Any], key: str, vector: str | Sequence[str], key_type: KeyType | None
) -> Iterator[Block]:
    names = [key, *([vector] if isinstance(vector, str) else vector)]
    missing = [name for name in names if name not in columns]
    if missing:
        raise InvalidInput(f"there is no column {missing[0]!r}; there are {', '.join(map(repr, columns)) or 'none'}")
    keys = columns[key]
    if isinstance(vector, str):
        rows = as_rows(columns[vector])
    else:
        rows = np.stack([np.asarray(columns[name]) for name in vector], axis=1)
    if len(keys) != len(rows):
        raise InvalidInput(f"expected a vector for each key, came {len(keys)} keys and {len(rows)} vectors")
    yield Block("the table", 0, key_type or guessed_key_type(keys), keys, rows)


def _reader(source: Any) -> pa.RecordBatchReader:
    """Arrow batches of a frame, a table, or whatever speaks Arrow's C stream interface."""
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, ds.Dataset):
        return source.scanner(batch_size=_BATCH_ROWS, batch_readahead=2).to_reader()
    if isinstance(source, pa.Table):
        return source.to_reader(_BATCH_ROWS)
    if hasattr(source, "iloc"):  # pandas: an index that has a name may be the key
        named = any(name is not None for name in source.index.names)
        return pa.Table.from_pandas(source, preserve_index=named).to_reader(_BATCH_ROWS)
    if hasattr(source, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(source)
    raise InvalidInput(
        "expected paths, a data frame (pandas, Polars, DuckDB), Arrow data or a mapping of columns, came "
        f"{type(source).__name__}; write it to Parquet and give the path"
    )


def _of_hugectr(path: Path) -> Iterator[Block]:
    """A HugeCTR/HPS sparse model, whose sizes tell `dim`."""
    with _naming(str(path)):
        sizes = {}
        for name in (HUGECTR_KEYS, HUGECTR_VECTORS):
            if not (path / name).is_file():
                raise InvalidInput(f"expected the files {HUGECTR_KEYS!r} and {HUGECTR_VECTORS!r}; {name!r} is missing")
            sizes[name] = (path / name).stat().st_size
        rows = sizes[HUGECTR_KEYS] // 8
        dim, rest = divmod(sizes[HUGECTR_VECTORS], 4 * max(rows, 1))
        if sizes[HUGECTR_KEYS] % 8 or rest or bool(rows) is not bool(dim):
            raise InvalidInput(
                f"expected int64 keys and as many rows of float32; came {sizes[HUGECTR_KEYS]} bytes of keys and "
                f"{sizes[HUGECTR_VECTORS]} of vectors"
            )
        spec = TableSpec("", KeyType.INT64, dim, StorageDtype.FLOAT32)
        first = 0
        for keys, vectors, _ in read_hugectr(path, spec, _BATCH_ROWS, True) if rows else ():
            assert vectors is not None
            yield Block(str(path), first, KeyType.INT64, keys, vectors)
            first += len(keys)
