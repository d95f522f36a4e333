"""Directories of Parquet, as other tools leave them, are shards as they are, under the names that their columns have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

from tests.formats.test_manifest import SCHEMA
from tests.imports.make_corpus import CORPUS
from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.checksum import checksum
from tierstore.formats.snapshot.reader import Snapshot, open_snapshot

N, DIM = 100, 4
KEYS = np.arange(N) * 7
VECTORS = np.arange(N * DIM, dtype=np.float32).reshape(N, DIM) / 8


def frame() -> pd.DataFrame:
    return pd.DataFrame({"item_id": KEYS, "price": 1.0, "embedding": list(VECTORS)})


def as_spark(where: Path) -> None:
    """Spark's `df.write.parquet`: snappy parts, a checksum beside each, `_SUCCESS` last."""
    where.mkdir(parents=True)
    table = pa.Table.from_pandas(frame(), preserve_index=False)
    for i in range(4):
        name = f"part-{i:05d}-6c1f0e0a-c000.snappy.parquet"
        pq.write_table(table.slice(i * 25, 25), where / name, compression="snappy")
        (where / f".{name}.crc").write_bytes(b"crc")
    (where / "_SUCCESS").touch()
    (where / "._SUCCESS.crc").write_bytes(b"crc")


def as_pandas(where: Path) -> None:
    """pandas' `to_parquet(partition_cols=…)`."""
    frame().assign(day="2026-11-20").to_parquet(where, partition_cols=["day"])


def as_duckdb(where: Path) -> None:
    """DuckDB's `COPY … TO … (PARTITION_BY …)`."""
    df = frame().assign(bucket=KEYS % 3)  # which the query names
    duckdb.sql(f"COPY (SELECT * FROM df) TO '{where}' (FORMAT parquet, PARTITION_BY (bucket))")
    assert len(df) == N


def as_arrow(where: Path) -> None:
    where.mkdir(parents=True)
    table = pa.Table.from_pandas(frame(), preserve_index=False)
    with pa.ipc.new_file(where / "part-0.arrow", table.schema) as writer:
        writer.write_table(table)


DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "spark": as_spark,
    "pandas": as_pandas,
    "duckdb": as_duckdb,
    "arrow": as_arrow,
}


def manifest(root: Path, **table: Any) -> None:
    entry = {
        "name": "item", "dim": DIM, "dtype": "float32", "rows": N, "shards": [{"path": "items", "rows": N}],
        "columns": {"key": "item_id", "vector": "embedding"}, **table,
    }  # fmt: skip
    document = {"format": 1, "model": "ctr", "version": 1, "tables": [entry]}
    assert list(Draft202012Validator(SCHEMA).iter_errors(document)) == []
    (root / "snapshot.json").write_text(json.dumps(document))


def rows_of(snapshot: Snapshot) -> dict[int, list[float]]:
    rows: dict[int, list[float]] = {}
    for batch in snapshot.batches("item", 0, 16):
        assert batch.first_row == len(rows)
        rows.update(zip(batch.keys.tolist(), batch.vectors.tolist(), strict=True))
    return rows


@pytest.mark.parametrize("write", DIRECTORIES.values(), ids=DIRECTORIES)
def test_a_directory_is_a_shard(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "items")
    manifest(tmp_path, shards=[{"path": "items", "rows": N, "xxh3": checksum(tmp_path / "items")}])
    snapshot = open_snapshot(tmp_path)
    assert rows_of(snapshot) == dict(zip(KEYS.tolist(), VECTORS.tolist(), strict=True))
    assert np.sort(np.concatenate(list(snapshot.shard_keys("item", 0)))).tolist() == KEYS.tolist()
    snapshot.check_checksum("item", 0)


def test_what_is_wrong_names_the_file_in_the_directory_and_its_row(tmp_path: Path) -> None:
    as_spark(tmp_path / "items")
    third = sorted((tmp_path / "items").glob("*.parquet"))[2]
    table = pq.read_table(third)
    vectors = table["embedding"].to_pylist()
    vectors[5] = vectors[5][:-1]
    pq.write_table(table.set_column(2, "embedding", [vectors]), third)
    manifest(tmp_path)
    with pytest.raises(SnapshotError, match="expected a vector of 4 numbers, got 3") as refusal:
        rows_of(open_snapshot(tmp_path))
    assert (refusal.value.file, refusal.value.row) == (f"items/{third.name}", 5)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({}, "expected one column 'key' and one column 'vector', got item_id, price, embedding; `columns` of the table"),
        ({"key": "item_id", "vector": "price"}, "column 'price': expected a list or fixed-size list of floats, got"),
        ({"key": "price", "vector": "embedding"}, "column 'price': expected int64, as the table's keys are, got double"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there_or_of_another_type(tmp_path: Path, columns: Any, reason: str) -> None:
    as_spark(tmp_path / "items")
    manifest(tmp_path, columns=columns)
    with pytest.raises(SnapshotError, match=reason):
        rows_of(open_snapshot(tmp_path))


def test_a_file_of_another_kind_in_the_directory_is_refused(tmp_path: Path) -> None:
    as_spark(tmp_path / "items")
    (tmp_path / "items" / "README.txt").touch()
    manifest(tmp_path)
    with pytest.raises(SnapshotError, match=r"^items/README.txt: expected .parquet, .*got .txt"):
        open_snapshot(tmp_path)


def test_a_directory_that_a_log_describes_is_refused(tmp_path: Path) -> None:
    shutil.copytree(CORPUS / "delta", tmp_path / "items")
    manifest(tmp_path, dim=3, rows=4, shards=[{"path": "items", "rows": 4}])
    with pytest.raises(SnapshotError, match=r"^items: items is a Delta table \(_delta_log\): .* deleted rows back"):
        open_snapshot(tmp_path)


def test_a_link_out_of_the_snapshot_is_refused_in_a_directory_too(tmp_path: Path) -> None:
    root = tmp_path / "s"
    as_spark(root / "items")
    pq.write_table(pa.table({"key": [1]}), tmp_path / "outside.parquet")
    (root / "items" / "more.parquet").symlink_to(tmp_path / "outside.parquet")
    manifest(root)
    with pytest.raises(SnapshotError, match=r"^items/more.parquet: leads outside"):
        open_snapshot(root)


def test_without_features_each_table_is_one(tmp_path: Path) -> None:
    as_spark(tmp_path / "items")
    manifest(tmp_path)
    (feature,) = open_snapshot(tmp_path).manifest.feature_specs().values()
    assert (feature.name, feature.table, feature.combiner) == ("item", "item", None)
