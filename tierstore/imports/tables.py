"""Snapshots of tables as other tools have them: `import_table` for one, `import_tables` for several, `tables.toml`.

One thread at a time. An import that fails leaves no snapshot.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats import files
from tierstore.formats.columns import as_vectors, first_not_finite
from tierstore.formats.names import SNAPSHOT_MANIFEST
from tierstore.formats.writers import SnapshotWriter, TableWriter
from tierstore.imports.sources import blocks, rows_in
from tierstore.types import Combiner, KeyType, Progress, ProgressFn, StorageDtype

Paths = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that reads the imported table."""

    name: str
    combiner: str | Combiner | None = None
    padding_key: int | str | None = None


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table to import: where its rows are, and what it becomes.

    Args:
        source: paths, a frame, Arrow data or a mapping of columns, as `import_table` takes them.
        key, vector: names of the columns; see `import_table`.
        features: none for one of the table's name.
    """

    name: str
    source: Any
    key: str = "key"
    vector: str | Sequence[str] = "vector"
    key_type: str | None = None
    dtype: str | None = None
    default: str | Sequence[float] = "zeros"
    features: tuple[Feature, ...] = field(default=())


def import_table(
    source: Any,
    *,
    model: str,
    table: str,
    key: str = "key",
    vector: str | Sequence[str] = "vector",
    feature: str | None = None,
    combiner: str | Combiner | None = None,
    padding_key: int | str | None = None,
    key_type: str | None = None,
    dtype: str | None = None,
    default: str | Sequence[float] = "zeros",
    dense: Paths | bytes | None = None,
    out: Paths | None = None,
    version: int | None = None,
    delta_seq: int = 0,
    progress: ProgressFn | None = None,
) -> Path:
    """Write a snapshot of one table from what there is, and return its directory.

    >>> import_table("items/", model="ctr", table="item", key="item_id", vector="embedding")

    Args:
        source: a path or paths of Parquet, Arrow or ORC files, of directories of them (as Spark, Ray, DuckDB and pandas
            leave them), or of a HugeCTR folder; or a data frame (pandas, Polars, DuckDB), Arrow data, or a mapping of
            columns that are arrays.
        key: the column of the keys: integers of any width, or strings.
        vector: the column of the vectors (lists, fixed-size lists, arrays), or the columns of one number each: their
            names, or a pattern such as `f*` (`f2` comes before `f10`).
        feature: the name by which the model asks for it; default the table's. combiner: pools its bags. padding_key:
            never counts.
        key_type: `int64`, `uint64` or `string`; default as the column has it.
        dtype: how rows are stored: default float16 where the vectors are, else float32.
        default: what a key gets that the table does not hold: `zeros`, `mean`, or `dim` numbers.
        dense: an ONNX file that makes scores of the rows.
        out: the directory; default `snapshots/<model>/<version>`. version: default the time, as 20261120093000.
        delta_seq: deltas up to this one are in the rows already.

    Raises SnapshotError naming file, row and reason.
    """
    features = (Feature(feature or table, combiner, padding_key),)
    one = TableSource(table, source, key, vector, key_type, dtype, default, features)
    return import_tables(
        [one], model=model, dense=dense, out=out, version=version, delta_seq=delta_seq, progress=progress
    )


def import_tables(
    tables: Iterable[TableSource],
    *,
    model: str,
    dense: Paths | bytes | None = None,
    out: Paths | None = None,
    version: int | None = None,
    delta_seq: int = 0,
    progress: ProgressFn | None = None,
) -> Path:
    """The same for several tables of one model."""
    tables = list(tables)
    number = version or version_of_now()
    where = Path(out) if out is not None else Path("snapshots") / model / str(number)
    report = progress or (lambda _: None)
    total = sum(rows_in(table.source) for table in tables) if progress is not None else 0
    done = 0
    made = not where.exists()
    try:
        with SnapshotWriter(where, model=model, version=number, delta_seq=delta_seq) as snapshot:
            for table in tables:
                done = _import_one(snapshot, table, done, lambda rows: report(Progress("import", rows, total)))
                for feature in table.features or (Feature(table.name),):
                    snapshot.feature(
                        feature.name, table=table.name, combiner=feature.combiner, padding_key=feature.padding_key
                    )
            if dense is not None:
                snapshot.dense(dense if isinstance(dense, bytes) else Path(dense))
    except BaseException:
        if made and where.exists() and not (where / SNAPSHOT_MANIFEST).exists():
            files.remove_tree(where)
        raise
    return where


def version_of_now() -> int:
    """A version number that says when: 20261120093000."""
    return int(datetime.now(UTC).strftime("%Y%m%d%H%M%S"))


def _import_one(snapshot: SnapshotWriter, table: TableSource, done: int, report: Any) -> int:
    """Write one table; returns how many rows are done in all."""
    if table.key_type is not None and table.key_type not in list(KeyType):
        raise SnapshotError(f"key_type: expected {', '.join(KeyType)}, came {table.key_type!r}")
    key_type = None if table.key_type is None else KeyType(table.key_type)
    writer: TableWriter | None = None
    dtype = table.dtype
    for block in blocks(table.source, table.key, table.vector, key_type):
        dim = block.vectors.shape[1]
        if writer is None:
            dtype = dtype or (StorageDtype.FLOAT16 if block.vectors.dtype == np.float16 else StorageDtype.FLOAT32)
            writer = snapshot.table(table.name, dim=dim, dtype=dtype, key=block.key_type, default=table.default)
        if writer.key_type is not block.key_type:
            raise SnapshotError(f"expected {writer.key_type} keys, as before, came {block.key_type}", file=block.place)
        if writer.dim != dim:
            raise SnapshotError(f"expected vectors of {writer.dim} numbers, as before, came {dim}", file=block.place)
        try:
            writer.write(block.keys, block.vectors)
        except InvalidInput as error:
            with np.errstate(over="ignore"):
                stored = block.vectors.astype(np.float16) if dtype == "float16" else as_vectors(block.vectors)
                row = first_not_finite(stored)
            if row is None:
                raise SnapshotError(str(error), file=block.place) from error
            raise SnapshotError(
                f"the vector holds NaN or Inf, or overflows {dtype}", file=block.place, row=block.first + row
            ) from error
        done += len(block.vectors)
        report(done)
    if writer is None:
        raise SnapshotError(f"table {table.name!r}: there are no rows, so nothing says how long a vector is")
    return done


# --- tables.toml


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _FeatureEntry(_Strict):
    combiner: str | None = None
    padding_key: int | str | None = None


class _TableEntry(_Strict):
    path: str | list[str]
    key: str = "key"
    vector: str | list[str] = "vector"
    key_type: str | None = None
    dtype: str | None = None
    default: str | list[float] = "zeros"
    features: dict[str, _FeatureEntry] = Field(default_factory=dict)


class TablesFile(_Strict):
    """`tables.toml`: the tables of a model. `TablesFile.read` gives one."""

    model: str | None = None
    version: int | None = None
    delta_seq: int = 0
    dense: str | None = None
    tables: dict[str, _TableEntry]

    @classmethod
    def read(cls, path: Path) -> TablesFile:
        """Read and check. SnapshotError names the file and the entry."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SnapshotError(f"cannot be read: {error}", file=str(path)) from error
        except ValidationError as error:
            shown = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            raise SnapshotError(shown, file=str(path)) from error

    def sources(self, beside: Path) -> list[TableSource]:
        """The tables; paths are relative to the directory `beside`."""
        return [_source(name, entry, beside) for name, entry in self.tables.items()]


def _source(name: str, entry: _TableEntry, beside: Path) -> TableSource:
    paths = [entry.path] if isinstance(entry.path, str) else entry.path
    features = tuple(Feature(one, of.combiner, of.padding_key) for one, of in entry.features.items())
    return TableSource(
        name,
        [beside / path for path in paths],
        entry.key,
        entry.vector,
        entry.key_type,
        entry.dtype,
        entry.default,
        features,
    )
