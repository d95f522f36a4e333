"""Tables of other tools as snapshots: `import_table` for one, `import_tables` for several.

One thread at a time. A failed import writes no snapshot.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats import files
from tierstore.formats.columns import as_vectors
from tierstore.formats.keys import as_codes
from tierstore.formats.names import SNAPSHOT_MANIFEST
from tierstore.formats.row_times import TIME
from tierstore.formats.snapshot.golden import RTOL
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.writer import SnapshotWriter, TableWriter
from tierstore.imports.golden import write_golden_file
from tierstore.imports.lake_tables import AsOf
from tierstore.imports.row_sources import Block, Wanted, bad_row, blocks, check, rows_in
from tierstore.kernels.codec import BadRow, encode
from tierstore.types import Combiner, KeyType, Progress, ProgressFn, StorageDtype

Paths = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that reads the imported table. `hash` as for `SnapshotWriter.feature`."""

    name: str
    combiner: str | Combiner | None = None
    padding_key: int | str | None = None
    hash: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table to import: where its rows are, and the settings of the table.

    Args:
        source: paths, a frame, Arrow data or a mapping of columns, as for `import_table`.
        key: column of the keys, as for `import_table`; so are `vector` and `time_column`.
        ttl_s: rows that were not written for so long expire.
        features: by default one with the table's name.
        dim: numbers of a vector, as for `import_table`.
        on_null: as for `import_table`; so are `on_duplicate`, `integers` and `as_of`.
    """

    name: str
    source: Any
    key: str = "key"
    vector: str | Sequence[str] = "vector"
    key_type: str | None = None
    dtype: str | None = None
    default: str | Sequence[float] | None = None
    features: tuple[Feature, ...] = field(default=())
    ttl_s: int | str | None = None
    time_column: str | None = None
    on_null: str = "fail"
    on_duplicate: str = "fail"
    dim: int | None = None
    integers: bool = False
    as_of: AsOf | None = None

    @property
    def wanted(self) -> Wanted:
        """What is read of the source."""
        key_type = None if self.key_type is None else KeyType(self.key_type)
        return Wanted(
            self.key,
            self.vector,
            key_type,
            self.time_column,
            skip_nulls=self.on_null == "skip",
            dim=self.dim,
            integers=self.integers,
            has_default=self.default is not None,
            as_of=self.as_of,
            in_order=self.on_duplicate == "last",
        )


@dataclass(frozen=True, slots=True)
class GoldenFile:
    """Golden examples to import: a Parquet file, and how far an answer may be off, as for `SnapshotWriter.golden`."""

    path: Paths
    rtol: float = RTOL
    atol: float | None = None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was left out of a table: how many rows with a null, and how many whose key comes again.

    And how far numbers are off once they are stored in the table's dtype, at most and on average.
    """

    table: str
    nulls: int
    duplicates: int
    largest_error: float = 0.0
    mean_error: float = 0.0


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
    default: str | Sequence[float] | None = None,
    ttl_s: int | str | None = None,
    time_column: str | None = None,
    on_null: str = "fail",
    on_duplicate: str = "fail",
    dim: int | None = None,
    integers: bool = False,
    as_of: AsOf | None = None,
    dense: Paths | bytes | None = None,
    out: Paths | None = None,
    version: int | None = None,
    delta_seq: int = 0,
    progress: ProgressFn | None = None,
    left_out: Callable[[LeftOut], None] | None = None,
    golden: GoldenFile | Paths | None = None,
) -> Path:
    """Write a snapshot of one table, and return its directory.

    >>> import_table("items/", model="ctr", table="item", key="item_id", vector="embedding")

    Args:
        source: a path or paths of Parquet, Arrow or ORC files, of directories of them (as Spark, Ray, DuckDB and pandas
            write them), of a Delta or Iceberg table (`as_of`: its version or snapshot, or a time), of checkpoints,
            `.npz`, `.npy`, text, or of a HugeCTR folder; or a frame, Arrow data, or a mapping of columns.
        key: the column of the keys: integers of any width, or strings; as `meta.id`, a field of a structure. vector:
            that of the vectors (lists, fixed-size lists, arrays), or those of one number each: their names, or a
            pattern such as `f*` (`f2` before `f10`).
        feature: its name in requests; default the table's. combiner: how its bags are pooled. padding_key: one that
            never counts. key_type: `int64`, `uint64` or `string`; default the column's. dtype: of storage; default
            float16 where the vectors are, else float32. default: the vector of absent keys: `zeros`, `mean`, or `dim`
            numbers; else the source's own where that has one (TorchRec's managed collisions), else zeros.
        ttl_s: rows not written for so long expire: seconds, or a time such as `30d`. time_column: says when each row
            was written (seconds since 1970, timestamps, dates); default the time of the import.
        on_null: `skip` leaves out rows with a null in one of these columns, or in a vector; `fail` refuses them.
            on_duplicate: `last` keeps the last row of a key, and holds all keys in memory; else the load fails.
        dim: numbers of a vector: others are refused; HugeCTR's files are compared with it, and TFRA's need it.
            integers: vectors of integers are meant; else they are refused, as codes of a quantized table.
        dense: an ONNX file. golden: a Parquet file of golden examples. left_out: called with what was left out.
        out: default `snapshots/<model>/<version>`. version: default the time, as 20261120093000. delta_seq: deltas up
            to this one are in the rows already.

    SnapshotError names file, row and reason.
    """
    of = (Feature(feature or table, combiner, padding_key),)
    columns = key, vector, key_type, dtype, default, of, ttl_s, time_column, on_null, on_duplicate, dim, integers, as_of
    how: dict[str, Any] = {"delta_seq": delta_seq, "progress": progress, "left_out": left_out, "golden": golden}
    one = [TableSource(table, source, *columns)]
    return import_tables(one, model=model, dense=dense, out=out, version=version, **how)


def import_tables(
    tables: Iterable[TableSource],
    *,
    model: str,
    dense: Paths | bytes | None = None,
    out: Paths | None = None,
    version: int | None = None,
    delta_seq: int = 0,
    progress: ProgressFn | None = None,
    left_out: Callable[[LeftOut], None] | None = None,
    golden: GoldenFile | Paths | None = None,
) -> Path:
    """Write a snapshot of one model from several tables."""
    tables = list(tables)
    number = version_of_now() if version is None else version
    check_tables(tables, model=model, version=number, delta_seq=delta_seq)
    where = Path(out) if out is not None else Path("snapshots") / model / str(number)
    report = progress or (lambda _: None)
    total = sum(rows_in(table.source, table.as_of) for table in tables) if progress is not None else 0
    done = 0
    created = not where.exists()
    with files.new_dirs(where.parent):
        try:
            with SnapshotWriter(where, model=model, version=number, delta_seq=delta_seq) as snapshot:
                for table in tables:
                    done, left = _import_one(
                        snapshot, table, done, lambda rows: report(Progress("import", rows, total))
                    )
                    if left_out is not None:
                        left_out(left)
                    for feature in table.features or (Feature(table.name),):
                        snapshot.feature(
                            feature.name,
                            table=table.name,
                            combiner=feature.combiner,
                            padding_key=feature.padding_key,
                            hash=feature.hash,
                        )
                if dense is not None:
                    snapshot.dense(dense if isinstance(dense, bytes) else Path(dense))
                if golden is not None:
                    _write_examples(snapshot, tables, golden, dense)
        except BaseException:
            if created and where.exists() and not (where / SNAPSHOT_MANIFEST).exists():
                files.remove_tree(where)
            raise
    return where


def _write_examples(
    snapshot: SnapshotWriter, tables: Sequence[TableSource], golden: GoldenFile | Paths, dense: Paths | bytes | None
) -> None:
    file = golden if isinstance(golden, GoldenFile) else GoldenFile(golden)
    pooled = {
        feature.name: feature.combiner is not None
        for table in tables
        for feature in table.features or (Feature(table.name),)
    }
    graph = dense if dense is None or isinstance(dense, bytes) else Path(dense)
    write_golden_file(snapshot, Path(file.path), pooled=pooled, dense=graph, rtol=file.rtol, atol=file.atol)


def version_of_now() -> int:
    """The current time (UTC) as a version number: 20261120093000."""
    return int(datetime.now(UTC).strftime("%Y%m%d%H%M%S"))


def check_tables(tables: Sequence[TableSource], *, model: str, version: int, delta_seq: int) -> None:
    """SnapshotError for names, words and numbers that no snapshot has, or columns that the files do not have,
    before rows are read.
    """
    for table in tables:
        _check_words(table)
    _check_declared(tables, model=model, version=version, delta_seq=delta_seq, created_at=datetime.now(UTC))
    for table in tables:
        check(table.source, table.wanted)


def _check_declared(tables: Sequence[TableSource], **head: Any) -> None:
    """SnapshotError for what the manifest of these tables would not take.

    What only rows tell, types of keys and lengths of vectors, is taken to fit.
    """
    entries: list[dict[str, Any]] = []
    features: list[dict[str, Any]] = []
    for table in tables:
        of_table = table.features or (Feature(table.name),)
        texts = any(isinstance(feature.padding_key, str) and feature.hash is None for feature in of_table)
        given = "zeros" if table.default is None else table.default
        default = given if isinstance(given, str) else [float(x) for x in given]
        entries.append(
            {
                "name": table.name,
                "key": table.key_type or (KeyType.STRING if texts else KeyType.INT64),
                "dim": table.dim or (1 if isinstance(default, str) else len(default)),
                "dtype": table.dtype or StorageDtype.FLOAT32,
                "default": default,
                "ttl_s": table.ttl_s,
                "rows": 0,
                "shards": (),
            }
        )
        for feature in of_table:
            padding = feature.padding_key
            if padding is not None and not isinstance(padding, str):
                padding = None if table.key_type is None else int(padding)
            one = {"name": feature.name, "table": table.name, "combiner": feature.combiner, "padding_key": padding}
            features.append(one if feature.hash is None else {**one, "hash": dict(feature.hash)})
    Manifest.create(**head, tables=tuple(entries), features=tuple(features))


def _import_one(snapshot: SnapshotWriter, table: TableSource, done: int, report: Any) -> tuple[int, LeftOut]:
    """Write one table. `done` are the rows of earlier tables; returns them with its own, and what was left out."""
    writer: TableWriter | None = None
    dtype = table.dtype
    last = _last_rows(table) if table.on_duplicate == "last" else None
    seen = nulls = duplicates = 0
    for whole in blocks(table.source, table.wanted):
        block = whole if last is None else whole.only(last[seen : seen + len(whole.vectors)])
        seen += len(whole.vectors)
        nulls += whole.left_out
        duplicates += len(whole.vectors) - len(block.vectors)
        if not len(block.vectors):
            continue
        _check_block(block, table, writer, dtype)
        if writer is None:
            dtype = dtype or (StorageDtype.FLOAT16 if block.vectors.dtype == np.float16 else StorageDtype.FLOAT32)
            own = "zeros" if block.default is None else block.default.tolist()
            writer = snapshot.table(
                table.name,
                dim=block.vectors.shape[1],
                dtype=dtype,
                key=block.key_type,
                default=own if table.default is None else table.default,
                ttl_s=table.ttl_s,
                time_column=None if table.time_column is None else TIME,
            )
        try:
            writer.write(block.keys, as_vectors(block.vectors), block.times)
        except InvalidInput as error:
            found = _not_finite(block.vectors, writer.dtype)
            if found is None:
                raise SnapshotError(str(error), file=block.file) from error
            row, reason = found
            raise bad_row(reason, block.file, block.row(row)) from error
        report(done + seen + nulls)
    if last is not None and seen != len(last):
        raise InvalidInput(_TWICE)
    if writer is None:
        left = f": {nulls} rows with a null were left out" if nulls else ""
        raise SnapshotError(
            f"table {table.name!r}: expected at least one row, to know the length of a vector; got none{left}"
        )
    writer.is_incomplete = nulls > 0
    rounding = writer.rounding
    return done + seen + nulls, LeftOut(table.name, nulls, duplicates, rounding.largest, rounding.mean)


def _check_block(block: Block, table: TableSource, writer: TableWriter | None, dtype: str | None) -> None:
    """SnapshotError for rows that do not fit what is said of the table, or those that the writer has had."""
    dim = block.vectors.shape[1]
    if not dim:
        raise bad_row("the vector has no numbers, expected at least one", block.file, block.row(0))
    expected, of = (table.dim, "--dim (dim=) says") if writer is None else (writer.dim, "in earlier blocks")
    if expected not in (None, dim):
        raise bad_row(f"expected vectors of {expected} numbers, as {of}, got {dim}", block.file, block.row(0))
    if writer is None:
        return
    if writer.key_type is not block.key_type:
        texts = KeyType.STRING in (writer.key_type, block.key_type)
        how = "string (key_type=) reads all as strings" if texts else "uint64 (key_type=) reads all as such, or int64"
        raise SnapshotError(
            f"expected {writer.key_type} keys, as in earlier blocks, got {block.key_type}; --key-type {how}",
            file=block.file,
        )
    if table.dtype is None and dtype == StorageDtype.FLOAT16 and block.vectors.dtype != np.float16:
        raise SnapshotError(
            f"expected float16 numbers, as in earlier blocks, got {block.vectors.dtype}; --dtype float32 (dtype=) "
            "stores all as such, --dtype float16 rounds them",
            file=block.file,
        )


def _not_finite(vectors: npt.NDArray[Any], dtype: StorageDtype) -> tuple[int, str] | None:
    """The first row with a number that cannot be stored, and what is wrong with it; None where there is none."""
    try:
        encode(as_vectors(vectors), dtype)
    except BadRow as bad:
        number = vectors[bad.row, bad.column]
        return bad.row, f"the vector holds NaN or Inf, or overflows {dtype}: its number {bad.column} is {number}"
    return None


_TWICE = "expected a source that can be read twice to find duplicate keys, got a reader of batches: give all as a table"


def _last_rows(table: TableSource) -> npt.NDArray[np.bool_]:
    """Which rows of a table are the last of their key, of all that are read. Reads the source once."""
    if hasattr(table.source, "read_next_batch") or hasattr(table.source, "__next__"):  # of PyArrow, arro3 and others
        raise InvalidInput(_TWICE)
    read = (block.keys for block in blocks(table.source, table.wanted) if len(block.keys))
    keys = [one if isinstance(one, pa.Array) else pa.array(np.asarray(one)) for one in read]
    if len({one.type for one in keys}) != 1:  # which the import refuses
        return np.ones(sum(map(len, keys)), bool)
    numbers = pa.concat_arrays(keys).dictionary_encode().indices.to_numpy(zero_copy_only=False)
    last = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
    last[numbers] = np.arange(len(numbers))  # of equal ones the last is kept
    is_last = np.zeros(len(numbers), bool)
    is_last[last] = True
    return is_last


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
    for block in blocks(table.source, replace(table.wanted, time=None)):
        wanted = as_codes([ast.literal_eval(found[2])], block.key_type)
        for row in np.flatnonzero(as_codes(block.keys, block.key_type) == wanted):
            place = block.file, block.row(int(row))
            if first is not None:
                reason = (
                    f"duplicate key {found[2]}: it is also in {first[0]}, row {first[1]}; --on-duplicate last "
                    "(on_duplicate='last') keeps the last row of a key"
                )
                return bad_row(reason, *place)
            first = place
    return None


def _check_words(table: TableSource) -> None:
    """SnapshotError for an unknown key type, dtype or combiner, before anything is read."""
    given: list[tuple[str, Any, Iterable[str]]] = [
        ("key_type", table.key_type, KeyType),
        ("dtype", table.dtype, StorageDtype),
        ("on_null", table.on_null, ("fail", "skip")),
        ("on_duplicate", table.on_duplicate, ("fail", "last")),
    ]
    given += [(f"combiner of feature {feature.name!r}", feature.combiner, Combiner) for feature in table.features]
    for what, word, words in given:
        if word is not None and word not in list(words):
            raise SnapshotError(f"table {table.name!r}: {what}: expected {', '.join(words)}, got {word!r}")
