"""The manifest's checks, and the schema in `schema/` that promises the same to others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.manifest import Manifest, overflows
from tierstore.types import Combiner, FeatureSpec, KeyType, StorageDtype, TableSpec

SCHEMA = json.loads((Path(__file__).parents[2] / "schema" / "snapshot.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)

GOOD: dict[str, Any] = {
    "format": 1,
    "model": "ctr",
    "version": 20261120,
    "created_at": "2026-11-20T02:00:00Z",
    "delta_seq": 41820,
    "tables": [
        {
            "name": "item",
            "key": "int64",
            "dim": 2,
            "dtype": "float16",
            "default": [0.5, -1],
            "rows": 7,
            "shards": [
                {"path": "item/part-0.parquet", "rows": 3, "xxh3": "0123456789abcdef"},
                {"path": "item/part-1", "rows": 4},
            ],
        },
        {"name": "user", "key": "string", "dim": 1, "dtype": "int8", "default": "mean", "rows": 0, "shards": []},
        {
            "name": "raw",
            "key": "uint64",
            "dim": 65536,
            "dtype": "bfloat16",
            "default": "zeros",
            "rows": 0,
            "shards": [],
        },
    ],
    "features": [
        {"name": "item_id", "table": "item"},
        {"name": "clicked", "table": "item", "combiner": "mean", "padding_key": -1},
        {"name": "who", "table": "user", "combiner": "sqrtn", "padding_key": ""},
    ],
    "dense": {"path": "dense.onnx"},
    "warmup": {"item": "warmup/item.npy"},
}

Edit = Callable[[dict[str, Any]], object]


def edited(edit: Edit) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    edit(document)
    return document


def item(**fields: Any) -> Edit:
    return lambda document: document["tables"][0].update(fields)


def shard(**fields: Any) -> Edit:
    return lambda document: document["tables"][0]["shards"][0].update(fields)


def feature(number: int = 0, **fields: Any) -> Edit:
    return lambda document: document["features"][number].update(fields)


def top(**fields: Any) -> Edit:
    return lambda document: document.update(fields)


def without(*names: str) -> Edit:
    return lambda document: [document.pop(name) for name in names]


GOOD_EDITS: dict[str, Edit] = {
    "as it is": lambda document: None,
    "only what is required": without("created_at", "delta_seq", "features", "dense", "warmup"),
    "key defaults to int64": lambda document: document["tables"][0].pop("key"),
    "default defaults to zeros": lambda document: document["tables"][0].pop("default"),
    "no dense part": top(dense=None),
    "no tables": top(tables=[], features=[], warmup={}),
    "largest version": top(version=(1 << 63) - 1),
    "with an offset": top(created_at="2026-11-20T02:00:00+01:00"),
    "without an offset": top(created_at="2026-11-20T02:00:00"),
    "dots within a name": shard(path="item/..part..0.parquet"),
    "a dot as a part": shard(path="./item/part.arrow"),
    "largest float16": item(default=[65504, -65519.99]),
    "int8 default of all the range": item(dtype="int8", default=[3e38, -3e38]),
    "largest int4": item(dtype="int4", default=[65504, -65519.99]),
    "largest padding key": feature(1, padding_key=(1 << 63) - 1),
}

# what the schema refuses too: the edit, and what the reader says
BAD_BY_SCHEMA: dict[str, tuple[Edit, str]] = {
    "no format": (without("model"), "model: Field required"),
    "format 2": (top(format=2), "format: Input should be 1, got 2"),
    "unknown field": (top(tabels=[]), "tabels: Extra inputs are not permitted"),
    "bad model name": (top(model="a/b"), "model: model name 'a/b' is not allowed"),
    "version 0": (top(version=0), "version: .*greater than or equal to 1, got 0"),
    "version true": (top(version=True), "version: .*valid integer, got True"),
    "version text": (top(version="1"), "version: .*valid integer, got '1'"),
    "version too large": (top(version=1 << 63), "version: .*less than or equal to"),
    "version not whole": (top(version=1.5), "version: .*integer, got 1.5"),
    "delta_seq negative": (top(delta_seq=-1), "delta_seq: .*greater than or equal to 0, got -1"),
    "delta_seq largest": (top(delta_seq=(1 << 63) - 1), "delta_seq: .*less than"),
    "time of day": (top(created_at="yesterday"), "created_at: expected an ISO 8601 time .*'yesterday'"),
    "time as a number": (top(created_at=1732060800), "created_at: expected an ISO 8601 time"),
    "tables as an object": (top(tables={}), "tables: .*array"),
    "table without dim": (lambda d: d["tables"][0].pop("dim"), r"tables\[0\].dim: Field required"),
    "table without rows": (lambda d: d["tables"][0].pop("rows"), r"tables\[0\].rows: Field required"),
    "dim 0": (item(dim=0), r"tables\[0\].dim: .*got 0"),
    "dim 65537": (item(dim=65537), r"tables\[0\].dim: .*got 65537"),
    "key int32": (item(key="int32"), r"tables\[0\].key: .*'int64', 'uint64' or 'string', got 'int32'"),
    "dtype float64": (item(dtype="float64"), r"tables\[0\].dtype: .*got 'float64'"),
    "default ones": (item(default="ones"), r"tables\[0\].default: expected \"zeros\", \"mean\" or a list"),
    "default number": (item(default=0), r"tables\[0\].default: expected"),
    "default of text": (item(default=["0", "0"]), r"tables\[0\].default: expected"),
    "default of booleans": (item(default=[True, False]), r"tables\[0\].default: expected"),
    "rows negative": (shard(rows=-1), r"tables\[0\].shards\[0\].rows: .*got -1"),
    "absolute path": (shard(path="/etc/passwd"), r"shards\[0\].path: expected a path .* within it, got '/etc/passwd'"),
    "path up": (shard(path="../item.arrow"), r"shards\[0\].path: .*'../item.arrow'"),
    "path up midway": (shard(path="a/../../b.arrow"), r"shards\[0\].path"),
    "path ends up": (shard(path="a/.."), r"shards\[0\].path"),
    "path is the directory": (shard(path="."), r"shards\[0\].path"),
    "path empty": (shard(path=""), r"shards\[0\].path"),
    "path with backslash": (shard(path="a\\b.arrow"), r"shards\[0\].path"),
    "path with NUL": (shard(path="a\0.arrow"), r"shards\[0\].path"),
    "checksum too short": (shard(xxh3="abc"), r"shards\[0\].xxh3: .*pattern .*'abc'"),
    "checksum in capitals": (shard(xxh3="0123456789ABCDEF"), r"shards\[0\].xxh3"),
    "checksum as a number": (shard(xxh3=12), r"shards\[0\].xxh3: .*string, got 12"),
    "unknown combiner": (feature(combiner="max"), r"features\[0\].combiner: .*'sum', 'mean' or 'sqrtn', got 'max'"),
    "feature name": (feature(name="a b"), r"features\[0\].name: feature name 'a b' is not allowed"),
    "padding key 1.5": (feature(padding_key=1.5), r"features\[0\].padding_key: expected a key"),
    "padding key true": (feature(padding_key=True), r"features\[0\].padding_key: expected a key"),
    "dense without path": (top(dense={}), r"dense.path: Field required"),
    "dense outside": (top(dense={"path": "../d.onnx"}), r"dense.path: expected a path"),
    "warm-up not npy": (top(warmup={"item": "warmup/item.pkl"}), r"warmup.item: expected a .npy file"),
    "warm-up outside": (top(warmup={"item": "../item.npy"}), r"warmup.item: expected a path"),
}

# what takes more than a schema: marked "Also:" in it
BAD_BEYOND_SCHEMA: dict[str, tuple[Edit, str]] = {
    "rows not the sum": (item(rows=8), r"tables\[0\].rows: expected the sum of its shards' rows, 7, got 8"),
    "shard twice": (lambda d: d["tables"][0]["shards"][1].update(path="item/part-0.parquet"), r"tables\[0\].shards: 'item/part-0.parquet' is listed twice"),
    "table twice": (lambda d: d["tables"][1].update(name="item"), "tables: two are named 'item'"),
    "feature twice": (feature(1, name="item_id"), "features: two are named 'item_id'"),
    "feature of no table": (feature(table="nope"), r"features\[0\].table: 'nope' is not a table of this snapshot"),
    "warm-up of no table": (top(warmup={"nope": "n.npy"}), "warmup.nope: not a table of this snapshot"),
    "default too short": (item(default=[1]), r"tables\[0\].default: expected 2 numbers, as dim says, got 1"),
    "default beyond float16": (item(default=[0, 65520]), r"tables\[0\].default\[1\]: 65520.0 is not a finite float16 number"),
    "default beyond float32": (item(dtype="float32", default=[1e39, 0]), r"tables\[0\].default\[0\]: 1e\+39 is not a finite float32"),
    "default an endless integer": (item(default=[10**400, 0]), r"tables\[0\].default: a number is too large"),
    "padding text for int64": (feature(padding_key="x"), r"features\[0\].padding_key: expected an int64 key, got 'x'"),
    "padding number for string": (feature(2, padding_key=0), r"features\[2\].padding_key: expected a string"),
    "padding key too large": (feature(padding_key=1 << 63), r"features\[0\].padding_key: expected an int64 key"),
    "no such day": (top(created_at="2026-13-45"), "created_at: expected an ISO 8601 time"),
}  # fmt: skip


@pytest.mark.parametrize("edit", GOOD_EDITS.values(), ids=GOOD_EDITS)
def test_reader_and_schema_take_what_is_good(edit: Edit) -> None:
    document = edited(edit)
    assert list(VALIDATOR.iter_errors(document)) == []
    manifest = Manifest.parse(json.dumps(document))
    assert Manifest.parse(json.dumps(manifest.to_document())) == manifest
    assert list(VALIDATOR.iter_errors(manifest.to_document())) == []


@pytest.mark.parametrize(("edit", "reason"), BAD_BY_SCHEMA.values(), ids=BAD_BY_SCHEMA)
def test_reader_and_schema_refuse_what_is_bad(edit: Edit, reason: str) -> None:
    document = edited(edit)
    assert list(VALIDATOR.iter_errors(document)) != []
    with pytest.raises(SnapshotError, match="^snapshot.json: .*" + reason) as refusal:
        Manifest.parse(json.dumps(document))
    assert refusal.value.file == "snapshot.json"


@pytest.mark.parametrize(("edit", "reason"), BAD_BEYOND_SCHEMA.values(), ids=BAD_BEYOND_SCHEMA)
def test_the_reader_refuses_what_a_schema_cannot(edit: Edit, reason: str) -> None:
    document = edited(edit)
    assert list(VALIDATOR.iter_errors(document)) == []
    with pytest.raises(SnapshotError, match="^snapshot.json: .*" + reason):
        Manifest.parse(json.dumps(document))


def test_the_schema_is_a_schema_and_describes_every_field() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    table = Manifest.model_fields
    assert set(SCHEMA["properties"]) == set(table)
    for name, definition in (
        ("TableEntry", "table"),
        ("ShardEntry", "shard"),
        ("FeatureEntry", "feature"),
        ("HeadEntry", "head"),
    ):
        model = Manifest.model_json_schema()["$defs"][name]
        assert set(SCHEMA["$defs"][definition]["properties"]) == set(model["properties"])
        assert set(SCHEMA["$defs"][definition]["required"]) == set(model["required"])


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}'])
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(SnapshotError, match=r"^snapshot\.json: "):
        Manifest.parse(text)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_default_that_is_not_finite_is_refused(value: str) -> None:
    text = json.dumps(edited(item(default=[0, 77.25]))).replace("77.25", value)
    with pytest.raises(SnapshotError, match=r"tables\[0\].default\[1\]: -?(nan|inf) is not a finite float16 number"):
        Manifest.parse(text)


def test_specs_say_what_the_document_says() -> None:
    manifest = Manifest.parse(json.dumps(GOOD))
    assert manifest.table_specs()["item"] == TableSpec("item", KeyType.INT64, 2, StorageDtype.FLOAT16, (0.5, -1.0))
    assert manifest.table_specs()["user"] == TableSpec("user", KeyType.STRING, 1, StorageDtype.INT8, "mean")
    assert manifest.feature_specs()["clicked"] == FeatureSpec("clicked", "item", Combiner.MEAN, -1)
    assert manifest.feature_specs()["item_id"] == FeatureSpec("item_id", "item")
    assert manifest.created_at == datetime(2026, 11, 20, 2, tzinfo=UTC)
    assert manifest.table("raw").dim == 65536
    with pytest.raises(KeyError):
        manifest.table("nope")


def test_a_manifest_is_written_as_it_will_be_read(tmp_path: Path) -> None:
    manifest = Manifest.parse(json.dumps(GOOD))
    manifest.write(tmp_path / "snapshot.json")
    assert Manifest.read(tmp_path / "snapshot.json") == manifest
    assert json.loads((tmp_path / "snapshot.json").read_text()) == GOOD


def test_a_directory_without_a_manifest_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"snapshot\.json: not found in .*not finished"):
        Manifest.read(tmp_path / "snapshot.json")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_overflow_is_what_the_cast_would_do(value: float) -> None:
    import ml_dtypes

    with np.errstate(over="ignore"):
        assert overflows(value, StorageDtype.FLOAT32) == bool(np.isinf(np.float32(value)))
        assert overflows(value, StorageDtype.FLOAT16) == bool(np.isinf(np.float16(value)))
        assert overflows(value, StorageDtype.INT4) == bool(np.isinf(np.float16(value)))
        as_float32 = np.float32(value)
        assert overflows(float(as_float32), StorageDtype.BFLOAT16) == bool(
            np.isinf(as_float32.astype(ml_dtypes.bfloat16))
        )


@pytest.mark.parametrize("dtype", [StorageDtype.FLOAT32, StorageDtype.FLOAT16, StorageDtype.BFLOAT16])
def test_overflow_begins_where_rounding_reaches_infinity(dtype: StorageDtype) -> None:
    import ml_dtypes

    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    edge = {"float32": 2.0**128 - 2.0**103, "float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119}[dtype]
    with np.errstate(over="ignore"):
        assert np.isinf(np.float64(edge).astype(kind))
        assert not np.isinf(np.float64(np.nextafter(edge, 0)).astype(np.float32 if dtype == "bfloat16" else kind))
    assert overflows(edge, dtype)
    assert not overflows(float(np.nextafter(edge, 0)), dtype)
