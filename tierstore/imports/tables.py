"""Tables of other tools as snapshots: `import_table` for one, `import_tables` for several, and `tables.toml`.

One thread at a time. A failed import writes no snapshot.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats import files
from tierstore.formats.columns import as_vectors, first_not_finite
from tierstore.formats.keys import as_codes
from tierstore.formats.names import SNAPSHOT_MANIFEST
from tierstore.formats.row_times import TIME
from tierstore.formats.snapshot.writer import SnapshotWriter, TableWriter
from tierstore.imports.sources import Wanted, blocks, rows_in
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
    """A table to import: where its rows are, and the settings of the table.

    Args:
        source: paths, a frame, Arrow data or a mapping of columns, as for `import_table`.
        key, vector, time_column: names of the columns; see `import_table`.
        ttl_s: rows that were not written for so long expire.
        features: by default one with the table's name.
    """

    name: str
    source: Any
    key: str = "key"
    vector: str | Sequence[str] = "vector"
    key_type: str | None = None
    dtype: str | None = None
    default: str | Sequence[float] = "zeros"
    features: tuple[Feature, ...] = field(default=())
    ttl_s: int | str | None = None
    time_column: str | None = None


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
    ttl_s: int | str | None = None,
    time_column: str | None = None,
    dense: Paths | bytes | None = None,
    out: Paths | None = None,
    version: int | None = None,
    delta_seq: int = 0,
    progress: ProgressFn | None = None,
) -> Path:
    """Write a snapshot of one table, and return its directory.

    >>> import_table("items/", model="ctr", table="item", key="item_id", vector="embedding")

    Args:
        source: a path or paths of Parquet, Arrow or ORC files, of directories of them (as Spark, Ray, DuckDB and pandas
            write them), or of a HugeCTR folder; or a data frame (pandas, Polars, DuckDB), Arrow data, or a mapping of
            columns that are arrays.
        key: the column of the keys: integers of any width, or strings.
        vector: the column of the vectors (lists, fixed-size lists, arrays), or the columns of one number each: their
            names, or a pattern such as `f*` (`f2` comes before `f10`).
        feature: its name in requests; default the table's. combiner: how its bags are pooled. padding_key: a key that never
            counts.
        key_type: `int64`, `uint64` or `string`; default that of the column.
        dtype: how rows are stored: default float16 where the vectors are, else float32.
        default: the vector of keys that the table does not hold: `zeros`, `mean`, or `dim` numbers.
        ttl_s: rows that were not written for so long expire: seconds, or a time such as `30d`. time_column: the column that
            says when each row was written (seconds since 1970, timestamps or dates); default the time of the import for all.
        dense: an ONNX file that scores the rows.
        out: the directory; default `snapshots/<model>/<version>`. version: default the time, as 20261120093000.
        delta_seq: deltas up to this one are in the rows already.

    SnapshotError names file, row and reason.
    """
    features = (Feature(feature or table, combiner, padding_key),)
    source_table = TableSource(table, source, key, vector, key_type, dtype, default, features, ttl_s, time_column)
    return import_tables(
        [source_table], model=model, dense=dense, out=out, version=version, delta_seq=delta_seq, progress=progress
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
    """Write a snapshot of one model from several tables."""
    tables = list(tables)
    number = version or version_of_now()
    where = Path(out) if out is not None else Path("snapshots") / model / str(number)
    report = progress or (lambda _: None)
    total = sum(rows_in(table.source) for table in tables) if progress is not None else 0
    done = 0
    created = not where.exists()
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
        if created and where.exists() and not (where / SNAPSHOT_MANIFEST).exists():
            files.remove_tree(where)
        raise
    return where


def version_of_now() -> int:
    """The current time (UTC) as a version number: 20261120093000."""
    return int(datetime.now(UTC).strftime("%Y%m%d%H%M%S"))


def _import_one(snapshot: SnapshotWriter, table: TableSource, done: int, report: Any) -> int:
    """Write one table. `done` are the rows of earlier tables; returns them with its own."""
    _check_words(table)
    key_type = None if table.key_type is None else KeyType(table.key_type)
    writer: TableWriter | None = None
    dtype = table.dtype
    for block in blocks(table.source, Wanted(table.key, table.vector, key_type, table.time_column)):
        dim = block.vectors.shape[1]
        if writer is None:
            dtype = dtype or (StorageDtype.FLOAT16 if block.vectors.dtype == np.float16 else StorageDtype.FLOAT32)
            writer = snapshot.table(
                table.name,
                dim=dim,
                dtype=dtype,
                key=block.key_type,
                default=table.default,
                ttl_s=table.ttl_s,
                time_column=None if table.time_column is None else TIME,
            )
        if writer.key_type is not block.key_type:
            raise SnapshotError(
                f"expected {writer.key_type} keys, as in earlier blocks, got {block.key_type}", file=block.file
            )
        if writer.dim != dim:
            raise SnapshotError(
                f"expected vectors of {writer.dim} numbers, as in earlier blocks, got {dim}", file=block.file
            )
        try:
            writer.write(block.keys, block.vectors, block.times)
        except InvalidInput as error:
            with np.errstate(over="ignore"):
                stored = block.vectors.astype(np.float16) if dtype == "float16" else as_vectors(block.vectors)
                row = first_not_finite(stored)
            if row is None:
                raise SnapshotError(str(error), file=block.file) from error
            raise SnapshotError(
                f"the vector holds NaN or Inf, or overflows {dtype}", file=block.file, row=block.first + row
            ) from error
        done += len(block.vectors)
        report(done)
    if writer is None:
        raise SnapshotError(
            f"table {table.name!r}: expected at least one row, to know the length of a vector; got none"
        )
    return done


_DUPLICATE = re.compile(r"([\w-]+)/\S+, row \d+: duplicate key (.+): it is also in")


def duplicate_in(tables: Iterable[TableSource], error: SnapshotError) -> SnapshotError | None:
    """A load's error about a key that is there twice, by the files and rows of the `tables`; None for any other error.

    The load knows the snapshot alone. Reads the keys of the table again, up to the second such key.
    """
    found = _DUPLICATE.search(str(error))
    table = None if found is None else next((one for one in tables if one.name == found[1]), None)
    if found is None or table is None:
        return None
    first: tuple[str, int] | None = None
    key_type = None if table.key_type is None else KeyType(table.key_type)
    for block in blocks(table.source, Wanted(table.key, table.vector, key_type, None)):
        wanted = as_codes([ast.literal_eval(found[2])], block.key_type)
        for row in np.flatnonzero(as_codes(block.keys, block.key_type) == wanted):
            place = block.file, block.first + int(row)
            if first is not None:
                reason = f"duplicate key {found[2]}: it is also in {first[0]}, row {first[1]}"
                return SnapshotError(reason, file=place[0], row=place[1])
            first = place
    return None


def _check_words(table: TableSource) -> None:
    """SnapshotError for an unknown key type, dtype or combiner, before anything is read."""
    given: list[tuple[str, Any, type[StrEnum]]] = [
        ("key_type", table.key_type, KeyType),
        ("dtype", table.dtype, StorageDtype),
    ]
    given += [(f"combiner of feature {feature.name!r}", feature.combiner, Combiner) for feature in table.features]
    for what, word, words in given:
        if word is not None and word not in list(words):
            raise SnapshotError(f"table {table.name!r}: {what}: expected {', '.join(words)}, got {word!r}")


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
    ttl_s: int | str | None = None
    time_column: str | None = None
    features: dict[str, _FeatureEntry] = Field(default_factory=dict)


class TablesFile(_Strict):
    """`tables.toml`: the tables of a model. Made by `TablesFile.read`."""

    model: str | None = None
    version: int | None = None
    delta_seq: int = 0
    dense: str | None = None
    tables: dict[str, _TableEntry]

    @classmethod
    def read(cls, path: Path) -> TablesFile:
        """Read and check the file. SnapshotError names the file and the entry."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise SnapshotError(f"cannot be read: {error}", file=str(path)) from error
        except ValidationError as error:
            shown = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            raise SnapshotError(shown, file=str(path)) from error

    def sources(self, root: Path) -> list[TableSource]:
        """The tables; relative paths start from the directory `root`."""
        return [_source(name, entry, root) for name, entry in self.tables.items()]


def _source(name: str, entry: _TableEntry, root: Path) -> TableSource:
    paths = [entry.path] if isinstance(entry.path, str) else entry.path
    features = tuple(Feature(feature, it.combiner, it.padding_key) for feature, it in entry.features.items())
    return TableSource(
        name,
        [root / path for path in paths],
        entry.key,
        entry.vector,
        entry.key_type,
        entry.dtype,
        entry.default,
        features,
        entry.ttl_s,
        entry.time_column,
    )
