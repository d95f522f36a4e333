"""What a trainer writes is a snapshot when, and only when, its block ends well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from jsonschema import Draft202012Validator

from tests.formats.disks import FailingDisk, ForgetfulDisk
from tests.formats.test_manifest import SCHEMA
from tierstore.errors import InvalidInput, SnapshotError, StorageError
from tierstore.formats import files
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.kernels import codec
from tierstore.types import StorageDtype

FORMATS = ["arrow", "parquet", "safetensors", "npz", "hugectr"]


def write(root: Path, format: Any = "arrow") -> None:
    with SnapshotWriter(root, model="ctr", version=7, delta_seq=3) as snapshot:
        item = snapshot.table("item", dim=2, dtype="float16", default=[0.5, 1], format=format, rows_per_shard=2)
        item.write([1, 2, 3], [[1, 2], [3, 4], [5, 6]])
        snapshot.feature("clicked", table="item", combiner="mean", padding_key=np.int64(-1))
        snapshot.warmup("item", [2])
        snapshot.dense(b"onnx")


@pytest.mark.parametrize("format", FORMATS)
def test_the_manifest_says_what_was_written(tmp_path: Path, format: Any) -> None:
    write(tmp_path / "s", format)
    document = json.loads((tmp_path / "s" / "snapshot.json").read_text())
    assert list(Draft202012Validator(SCHEMA).iter_errors(document)) == []
    assert document["delta_seq"] == 3
    (table,) = document["tables"]
    assert table | {"shards": None} == {
        "name": "item", "key": "int64", "dim": 2, "dtype": "float16", "default": [0.5, 1.0], "rows": 3, "shards": None,
    }  # fmt: skip
    assert [shard["rows"] for shard in table["shards"]] == [2, 1]
    assert document["features"] == [{"name": "clicked", "table": "item", "combiner": "mean", "padding_key": -1}]
    snapshot = open_snapshot(tmp_path / "s")
    for shard_no in range(2):
        snapshot.check_checksum("item", shard_no)
    assert snapshot.dense_path().read_bytes() == b"onnx"


def test_an_error_in_the_block_leaves_no_snapshot_and_no_scratch(tmp_path: Path) -> None:
    def train(format: Any) -> None:
        with SnapshotWriter(tmp_path / format, model="ctr", version=1) as snapshot:
            snapshot.table("item", dim=1, format=format).write([1], [[1.0]])
            raise RuntimeError("out of memory")

    for format in FORMATS:
        with pytest.raises(RuntimeError, match="out of memory"):
            train(format)
        assert not (tmp_path / format / "snapshot.json").exists()
        assert [path for path in (tmp_path / format).rglob("*") if path.is_file()] == []
        with pytest.raises(SnapshotError, match="not finished"):
            open_snapshot(tmp_path / format)


@pytest.mark.parametrize("format", FORMATS)
def test_whichever_operation_fails_there_is_a_whole_snapshot_or_none(tmp_path: Path, format: Any) -> None:
    count = FailingDisk()
    with files.use(count):
        write(tmp_path / "count", format)
    assert count.operations > 10
    for fail_at in range(count.operations):
        root = tmp_path / str(fail_at)
        with files.use(FailingDisk(fail_at)), pytest.raises(StorageError, match="injected failure"):
            write(root, format)
        if (root / "snapshot.json").exists():
            assert fail_at == count.operations - 1  # only its directory's fsync was left to do
            assert len(list(open_snapshot(root).batches("item", 0))) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_written_snapshot_survives_power_loss(tmp_path: Path, format: Any) -> None:
    disk = ForgetfulDisk(tmp_path)
    with files.use(disk):
        write(tmp_path / "s", format)
    disk.lose_power()
    snapshot = open_snapshot(tmp_path / "s")
    for shard_no in range(2):
        snapshot.check_checksum("item", shard_no)
    assert np.concatenate(list(snapshot.shard_keys("item", 0))).tolist() == [1, 2]
    assert snapshot.warmup_keys("item").tolist() == [2]


def test_a_snapshot_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path)
    before = (tmp_path / "snapshot.json").read_bytes()
    with pytest.raises(SnapshotError, match="holds a snapshot already"):
        write(tmp_path)
    assert (tmp_path / "snapshot.json").read_bytes() == before


def test_what_a_crash_left_may_be_written_over(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "snapshot.json").unlink()
    write(tmp_path)
    open_snapshot(tmp_path).check_checksum("item", 0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dim": 0}, "dim: .*got 0"),
        ({"dim": 1, "dtype": "float64"}, "dtype: .*got 'float64'"),
        ({"dim": 1, "key": "int32"}, "key: .*got 'int32'"),
        ({"dim": 2, "default": [1.0]}, "default: expected 2 numbers"),
        ({"dim": 1, "default": "ones"}, "default: expected"),
        ({"dim": 1, "format": "csv"}, "format: expected one of arrow, parquet, safetensors, npz, hugectr, got 'csv'"),
        ({"dim": 1, "rows_per_shard": 0}, "rows_per_shard: expected at least 1"),
        ({"dim": 1, "key": "string", "format": "npz"}, "string keys need format arrow or parquet"),
        ({"dim": 1, "key": "uint64", "format": "hugectr"}, "holds int64 keys"),
    ],
)
def test_a_table_that_cannot_be_is_refused_when_begun(tmp_path: Path, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(SnapshotError, match=reason):
        SnapshotWriter(tmp_path, model="ctr", version=1).table("item", **arguments)


@pytest.mark.parametrize(
    ("field", "value"), [("model", "a/b"), ("version", 0), ("delta_seq", -1), ("created_at", "noon")]
)
def test_a_snapshot_that_cannot_be_is_refused_when_begun(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(SnapshotError, match=field):
        SnapshotWriter(tmp_path / "s", **{"model": "ctr", "version": 1, field: value})
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("keys", "vectors", "reason"),
    [
        ([1], [1.0, 2.0], r"expected vectors of shape \[n, dim\], or .*got \[2\]"),
        ([1], [[1.0]], r"expected vectors of shape \[1, 2\]"),
        ([1, 2], [[1.0, 2.0]], r"expected vectors of shape \[2, 2\]"),
        ([1], [["a", "b"]], "got .* of <U1"),
        ([1.5], [[1.0, 2.0]], "expected int64 keys, got float"),
        (
            [5, 6],
            [[1.0, 2.0], [3.0, np.nan]],
            r"item/part-00000.arrow, row 2: table 'item': the vector holds NaN or Inf",
        ),
        ([5, 6], [[1.0, 2.0], [3.0, 65520.0]], r"row 2: .*overflows float16"),
    ],
)
def test_rows_that_cannot_be_are_refused_when_written(tmp_path: Path, keys: Any, vectors: Any, reason: str) -> None:
    table = SnapshotWriter(tmp_path, model="ctr", version=1).table("item", dim=2, dtype="float16")
    table.write([0], [[0.0, 0.0]])
    with pytest.raises(InvalidInput, match=reason):
        table.write(keys, vectors)


@pytest.mark.parametrize("dtype", list(StorageDtype))
@pytest.mark.parametrize("given", [np.float32, np.float64, np.float16])
def test_what_rounding_costs_is_said_by_the_table(tmp_path: Path, dtype: StorageDtype, given: Any) -> None:
    table = SnapshotWriter(tmp_path, model="ctr", version=1).table("item", dim=33, dtype=dtype)
    assert (table.rounding.largest, table.rounding.mean) == (0, 0)
    vectors = np.random.default_rng(3).standard_normal((4500, 33)).astype(given)
    for part in (vectors[:4000], vectors[4000:4000], vectors[4000:]):
        table.write(np.arange(len(part)), part)
    stored = np.empty(vectors.shape, np.float32)
    codec.decode(codec.encode(vectors.astype(np.float32), dtype), dtype, stored)
    off = np.abs(stored.astype(np.float64) - vectors.astype(np.float32))
    assert table.rounding.largest == pytest.approx(off.max(), rel=1e-6)
    assert table.rounding.mean == pytest.approx(off.mean(), rel=1e-6)
    assert bool(off.any()) is (dtype != "float32" and dtype != np.dtype(given).name)


@pytest.mark.parametrize(("dtype", "number"), [("bfloat16", 3.4e38), ("int4", 65520.0)])
def test_a_number_beyond_the_dtype_is_refused_when_written(tmp_path: Path, dtype: str, number: float) -> None:
    table = SnapshotWriter(tmp_path, model="ctr", version=1).table("item", dim=2, dtype=dtype)
    vectors = np.zeros((40_000, 2), np.float32)
    vectors[39_000, 1] = number
    with pytest.raises(SnapshotError, match=f"row 39000: .*overflows {dtype}"):
        table.write(np.arange(40_000), vectors)


def test_a_feature_of_no_table_is_refused_at_the_end(tmp_path: Path) -> None:
    snapshot = SnapshotWriter(tmp_path, model="ctr", version=1)
    snapshot.table("item", dim=1).write([1], [[1.0]])
    snapshot.feature("x", table="nope")
    with pytest.raises(SnapshotError, match="'nope' is not a table"):
        snapshot.close()
    assert not (tmp_path / "snapshot.json").exists()
    with pytest.raises(SnapshotError, match="is finished"):
        snapshot.table("more", dim=1)


def test_misuse_is_told(tmp_path: Path) -> None:
    snapshot = SnapshotWriter(tmp_path, model="ctr", version=1)
    snapshot.table("item", dim=1)
    with pytest.raises(SnapshotError, match="begun already"):
        snapshot.table("item", dim=1)
    with pytest.raises(SnapshotError, match="not a table of this snapshot"):
        snapshot.warmup("nope", [1])


def test_arrow_keys_and_half_vectors_are_taken_as_they_are(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, model="ctr", version=1) as snapshot:
        table = snapshot.table("word", dim=1, key="string", dtype="float16")
        table.write(pa.array(["x", "a", "b"]).slice(1), np.array([[1], [2]], np.float16))
    (batch,) = open_snapshot(tmp_path).batches("word", 0)
    assert batch.strings.to_pylist() == ["a", "b"]
    assert batch.vectors.dtype == np.float16


def test_an_argument_of_another_kind_is_refused_by_its_name(tmp_path: Path) -> None:
    for directory in (None, 5, ""):
        with pytest.raises(SnapshotError, match="directory: expected a path or a URL"):
            SnapshotWriter(directory, model="ctr", version=1)  # type: ignore[arg-type]
    writer: Any = SnapshotWriter(tmp_path / "s", model="ctr", version=1)
    for default in (None, 5, [1, "a"], [None, 1]):
        with pytest.raises(SnapshotError, match="table 'item': default: expected 'zeros', 'mean' or 2 numbers"):
            writer.table("item", dim=2, default=default)
    for hashed in (5, "mod", [1]):
        with pytest.raises(SnapshotError, match="feature 'item_id': hash: expected a mapping"):
            writer.feature("item_id", table="item", hash=hashed)
    for graph in (None, 5, [b"onnx"]):
        with pytest.raises(SnapshotError, match="dense: expected the path of an ONNX file, or its bytes"):
            writer.dense(graph)
    writer.dense(bytearray(b"onnx"))
    assert (tmp_path / "s" / "dense.onnx").read_bytes() == b"onnx"
