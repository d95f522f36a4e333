"""Files of rows as deltas: what a row says, sets or deletes what it says, and what does not fit is refused by file and row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

import tierstore
from tierstore.errors import DeltaError
from tierstore.formats.delta.reader import Delta, read_delta
from tierstore.imports.deltas import RowsColumns, holds_rows, rows_delta

LISTS = pa.list_(pa.float32())
Rows = dict[str, dict[Any, list[float] | None]]


def rows_of(delta: Delta) -> Rows:
    """The rows of a delta by table and key; None for a key that it deletes."""
    found: Rows = {}
    for name, table in delta.tables.items():
        keys = table.keys.tolist() if table.given is None else table.strings_at(np.arange(len(table.keys))).to_pylist()
        rows = zip(keys, table.vectors.tolist(), table.deleted.tolist(), strict=True)
        found[name] = {key: None if is_deleted else row for key, row, is_deleted in rows}
    return found


def made(path: Path, **options: Any) -> Rows:
    return rows_of(read_delta(rows_delta(path, model="ctr", seq=5, **options)))


def write(path: Path, **columns: Any) -> Path:
    table = pa.table(columns)
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.suffix == ".orc":
        orc.write_table(table, path)
    elif path.suffix == ".feather":
        feather.write_feather(table, path)
    else:
        new = pa.ipc.new_file if path.suffix == ".ipc" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("ending", ["parquet", "feather", "ipc", "arrow", "orc"])
def test_rows_of_every_format_are_a_delta_and_of_a_key_the_last_counts(tmp_path: Path, ending: str) -> None:
    vectors = pa.array([[1, 2], None, [3, 4], [5, 6], None, [7, 8]], LISTS)
    path = write(tmp_path / f"rows.{ending}", key=pa.array([1, 2, 3, 2, 3, 4]), vector=vectors)
    assert holds_rows(path)
    assert made(path, table="item") == {"item": {1: [1, 2], 2: [5, 6], 3: None, 4: [7, 8]}}


def test_a_delta_is_no_file_of_rows(tmp_path: Path) -> None:
    with tierstore.DeltaWriter(tmp_path / "5.arrow", model="ctr", seq=5) as delta:
        delta.upsert("item", np.array([1]), np.ones((1, 2), np.float32))
    (tmp_path / "6.arrow").write_bytes(b"neither")
    assert not holds_rows(tmp_path / "5.arrow")
    assert not holds_rows(tmp_path / "6.arrow")


def test_a_column_says_each_rows_table(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "table": pa.array(["a", "b", "a", "b"]).dictionary_encode(),
        "key": pa.array([1, 1, 2, 2]),
        "vector": pa.array([[1, 2], [1, 2, 3], [3, 4], None], LISTS),
    }
    expected = {"a": {1: [1, 2], 2: [3, 4]}, "b": {1: [1, 2, 3], 2: None}}
    assert made(write(tmp_path / "rows.parquet", **columns)) == expected
    other = write(tmp_path / "other.parquet", **{"name" if one == "table" else one: of for one, of in columns.items()})
    assert made(other, columns=RowsColumns(table="name")) == expected
    folders = [write(tmp_path / f"spark/table={name}/part.parquet", key=pa.array([1]), vector=pa.array([[1.0]], LISTS)) for name in "ab"]  # fmt: skip
    assert folders
    assert made(tmp_path / "spark") == {"a": {1: [1]}, "b": {1: [1]}}


def test_a_column_of_booleans_deletes(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "key": pa.array([1, 2, 3, 3]),
        "vector": pa.array([[1], None, [3], [4]], LISTS),
        "deleted": pa.array([False, True, False, True]),
    }
    path = write(tmp_path / "rows.parquet", **columns)
    assert made(path, table="item") == {"item": {1: [1], 2: None, 3: None}}
    columns["deleted"] = pa.array([False] * 4)
    with pytest.raises(DeltaError, match=r"row 1: expected a vector, as 'deleted' is false, got null"):
        made(write(path, **columns), table="item")
    columns["deleted"] = pa.array([False, None, False, True])
    with pytest.raises(DeltaError, match=r"row 1: column 'deleted': expected true or false, got null"):
        made(write(path, **columns), table="item")
    columns["deleted"] = pa.array([0, 1, 0, 1])
    with pytest.raises(DeltaError, match=r"column 'deleted': expected booleans"):
        made(write(path, **columns), table="item")


def test_a_file_of_deletes_needs_no_vectors(tmp_path: Path) -> None:
    null = write(tmp_path / "null.parquet", key=pa.array(["a", "b"]), vector=pa.nulls(2))
    assert made(null, table="word") == {"word": {"a": None, "b": None}}
    without = write(tmp_path / "without.parquet", key=pa.array(["a"]), deleted=pa.array([True]))
    assert made(without, table="word") == {"word": {"a": None}}


def test_zeros_delete_only_where_that_is_said(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "embedding_name": pa.array(["a", "a", "b", "a"]),
        "key_id": pa.array([1, 2, 1, 1]),
        "embedding": pa.array([[1, 2], [0, -0.0], [0.0], [0, 0]], LISTS),
    }
    path = write(tmp_path / "delta.parquet", **columns)
    how = RowsColumns("key_id", "embedding", "embedding_name")
    assert made(path, columns=how) == {"a": {1: [0, 0], 2: [0, 0]}, "b": {1: [0]}}
    how = RowsColumns("key_id", "embedding", "embedding_name", zeros_delete=True)
    assert made(path, columns=how) == {"a": {1: None, 2: None}, "b": {1: None}}


def test_keys_become_those_of_the_models_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", key=pa.array([1, 7], pa.int32()), vector=pa.array([[1], [2]], LISTS))
    assert made(path, tables={"big": "uint64"}) == {"big": {1: [1], 7: [2]}}, "the only table"
    assert made(path, table="word", tables={"big": "uint64", "word": "string"}) == {"word": {"1": [1], "7": [2]}}
    with pytest.raises(DeltaError, match=r"--table.*a column 'table'.*'key', 'vector'; the tables are big, word"):
        made(path, tables={"big": "uint64", "word": "string"})
    with pytest.raises(DeltaError, match=r"expected a table among big, got 'item'"):
        made(path, table="item", tables={"big": "uint64"})
    negative = write(path, key=pa.array([1, -7]), vector=pa.array([[1], [2]], LISTS))
    with pytest.raises(DeltaError, match=r"rows.parquet, row 1: .*uint64"):
        made(negative, tables={"big": "uint64"})


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"key": pa.array([1, None]), "vector": pa.array([[1], [2]], LISTS)}, r"row 1: expected a key in column 'key', got null \("),
        ({"key": pa.array([1, 2]), "vector": pa.array([[1], [float("nan")]], LISTS)}, r"row 1: the vector holds NaN"),
        ({"key": pa.array([1, 2]), "vector": pa.array([[1], [None]], LISTS)}, r"row 1: .*number 0 of the vector is null \("),
        ({"key": pa.array([1, 2]), "vector": pa.array([[1], []], LISTS)}, r"row 1: .*the vector has 0 numbers"),
        ({"key": pa.array([1, 2]), "vector": pa.array([[1], [2]], pa.list_(pa.uint8()))}, r"codes"),
        ({"id": pa.array([1, 2]), "vector": pa.array([[1], [2]], LISTS)}, r"expected one column 'key'.*--key"),
        ({"key": pa.array([1, 2]), "emb": pa.array([[1], [2]], LISTS)}, r"expected one column 'vector'.*--vector"),
        ({"table": pa.array(["a", None]), "key": pa.array([1, 2]), "vector": pa.array([[1], [2]], LISTS)}, r"row 1: column 'table'"),
        ({"table": pa.array(["a", "b/c"]), "key": pa.array([1, 2]), "vector": pa.array([[1], [2]], LISTS)}, r"b/c"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_file_and_row(tmp_path: Path, columns: dict[str, Any], reason: str) -> None:
    path = write(tmp_path / "rows.parquet", **columns)
    options = {} if "table" in columns else {"table": "item"}
    with pytest.raises(DeltaError, match=rf"rows\.parquet.*{reason}"):
        made(path, **options)


def test_a_row_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    n = 100_000
    vectors = np.ones((n, 2), np.float32)
    vectors[-1] = np.inf
    path = tmp_path / "rows.parquet"
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 2)
    pq.write_table(pa.table({"key": pa.array(np.arange(n)), "vector": lists}), path)
    with pytest.raises(DeltaError, match=f"row {n - 1}: "):
        made(path, table="item")


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Parquet its metadata say how many numbers there are, however well they are compressed."""
    n = 50_000
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(n * 64, np.float32)), 64)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"key": pa.array(np.arange(n)), "vector": lists}), path, compression="zstd")
    assert path.stat().st_size < 1 << 20, "it does not look large"
    size = n * (64 * 4 + 8)
    assert len(rows_delta(path, model="ctr", seq=1, table="item", max_bytes=size)) > size
    with pytest.raises(DeltaError, match=rf"more than the {size - 1} bytes .* split them"):
        rows_delta(path, model="ctr", seq=1, table="item", max_bytes=size - 1)
    monkeypatch.setattr("tierstore.imports.deltas.picked", None)  # reading it would fail
    with pytest.raises(DeltaError, match="split them"):
        rows_delta(path, model="ctr", seq=1, table="item", max_bytes=size // 2 - n * 8)


def test_the_same_file_makes_the_same_delta_of_the_time_when_it_was_written(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", key=pa.array([1]), vector=pa.array([[1]], LISTS))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    content = rows_delta(path, model="ctr", seq=1, table="item")
    assert content == rows_delta(path, model="ctr", seq=1, table="item")
    assert read_delta(content).event_time.timestamp() == 1_700_000_000
    other = rows_delta(path, model="ctr", seq=1, table="item", event_time="2026-11-20T02:00:00Z", base_version=3)
    assert (read_delta(other).event_time.isoformat(), read_delta(other).base_version) == (
        "2026-11-20T02:00:00+00:00",
        3,
    )
