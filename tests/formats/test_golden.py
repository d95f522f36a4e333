"""Files written long ago, in `schema/golden/`, are read as what they were written for.

Nothing here may be regenerated to make a test pass: these files stand for those that users have.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tierstore.formats.delta.reader import Delta, read_delta
from tierstore.formats.snapshot.reader import Snapshot, open_snapshot
from tierstore.types import Combiner, FeatureSpec, KeyType, StorageDtype, TableSpec

SCHEMA = Path(__file__).parents[2] / "schema"
GOLDEN = SCHEMA / "golden"
LOW, HIGH = -(1 << 63), (1 << 63) - 1
NUMBERS = {LOW: [-1.0, -0.75], -1: [-0.5, -0.25], 0: [0.0, 0.25], 7: [0.5, 0.75], HIGH: [1.0, 1.25]}
ONNX = b"stands for an ONNX model"
EMPTY, A, B, KAESE = (
    0x2D06800538D394C2,
    0xE6C632B61E964E1F,
    0x575A0B1C44D8843F,
    0xC3B8A562FBCFDFB1,
)  # by the xxhash package


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    return open_snapshot(GOLDEN / "snapshot")


def rows(snapshot: Snapshot, table: str) -> dict[int, list[float]]:
    out: dict[int, list[float]] = {}
    for shard_no in range(len(snapshot.manifest.table(table).shards)):
        snapshot.check_checksum(table, shard_no)
        for batch in snapshot.batches(table, shard_no):
            out |= dict(zip(batch.keys.tolist(), batch.vectors.tolist(), strict=True))
    return out


def test_the_manifest(snapshot: Snapshot) -> None:
    manifest = snapshot.manifest
    assert (manifest.model, manifest.version, manifest.delta_seq) == ("golden", 20261120, 41820)
    assert manifest.created_at == datetime(2026, 11, 20, 2, tzinfo=UTC)
    assert manifest.table_specs()["half"] == TableSpec("half", KeyType.INT64, 2, StorageDtype.FLOAT16, (0.5, -2.0))
    assert manifest.table_specs()["words"] == TableSpec("words", KeyType.STRING, 1, StorageDtype.INT8)
    assert manifest.feature_specs() == {
        "item_id": FeatureSpec("item_id", "arrow"),
        "clicked": FeatureSpec("clicked", "arrow", Combiner.MEAN, -1),
        "query": FeatureSpec("query", "words", Combiner.SQRTN, ""),
    }


def test_the_manifest_follows_the_schema() -> None:
    schema = json.loads((SCHEMA / "snapshot.schema.json").read_text(encoding="utf-8"))
    document = json.loads((GOLDEN / "snapshot" / "snapshot.json").read_text(encoding="utf-8"))
    assert list(Draft202012Validator(schema).iter_errors(document)) == []


@pytest.mark.parametrize("table", ["arrow", "parquet", "safetensors", "npz", "hugectr", "half"])
def test_rows_in_every_format(snapshot: Snapshot, table: str) -> None:
    assert rows(snapshot, table) == NUMBERS


def test_unsigned_and_string_keys(snapshot: Snapshot) -> None:
    assert rows(snapshot, "unsigned") == {0: [1.0], LOW: [2.0], -1: [3.0]}
    assert rows(snapshot, "words") == {signed(EMPTY): [1.0], signed(A): [2.0], signed(KAESE): [3.0]}
    (batch,) = snapshot.batches("words", 0)
    assert batch.strings.to_pylist() == ["", "a", "käse"]


def test_warm_up_and_dense(snapshot: Snapshot) -> None:
    warm: Any = snapshot.warmup_keys("arrow"), snapshot.warmup_keys("words")
    assert warm[0].tolist() == [7, 0]
    assert warm[1].tolist() == [signed(KAESE)]
    dense = snapshot.dense_path()
    assert dense is not None
    assert dense.read_bytes() == ONNX


TIMES = {-1: 1, 0: 4_294_967_294, 7: 4_294_967_295}


@pytest.mark.parametrize("table", ["arrow", "parquet", "safetensors", "npz", "snapshot"])
def test_times_of_rows_in_every_format(table: str) -> None:
    snapshot = open_snapshot(GOLDEN / "timed")
    assert rows(snapshot, table) == {-1: [0.0, 1.0], 0: [2.0, 3.0], 7: [4.0, 5.0]}
    (batch,) = snapshot.batches(table, 0)
    assert batch.times is not None
    made = dict.fromkeys(TIMES, 1_795_140_000)  # 2026-11-20T02:00:00Z
    assert dict(zip(batch.keys.tolist(), batch.times.tolist(), strict=True)) == (made if table == "snapshot" else TIMES)
    assert snapshot.manifest.table(table).ttl_s == (3_162_240_000 if table == "snapshot" else 604_800_000)
    schema = json.loads((SCHEMA / "snapshot.schema.json").read_text(encoding="utf-8"))
    document = json.loads((GOLDEN / "timed" / "snapshot.json").read_text(encoding="utf-8"))
    assert list(Draft202012Validator(schema).iter_errors(document)) == []


CHANGES = {1: None, 2: [3.0, 4.0], 3: [5.0, 6.0]}
DELTAS: dict[str, tuple[int | None, dict[str, dict[int, list[float] | None]], dict[str, bytes]]] = {
    "41821-upserts-and-deletes": (20261120, {"arrow": CHANGES}, {}),
    "41822-two-streams": (None, {"arrow": CHANGES, "unsigned": {-1: [1.0, 2.0, 3.0]}}, {}),
    "41823-strings-zstd": (None, {"words": {signed(KAESE): [4.0], signed(B): None}}, {}),
    "41824-dense": (None, {}, {"": ONNX}),
    "41825-empty": (None, {}, {}),
    "41827-heads": (None, {}, {"cvr": ONNX, "": b""}),
    "41826-written": (
        None,
        {"arrow": {10: [1.0, 2.0], 11: None, 12: None}, "half": {10: [5.0, 6.0]}, "words": {signed(A): None}},
        {"": ONNX},
    ),
}


def content(delta: Delta) -> dict[str, dict[int, list[float] | None]]:
    return {
        name: {
            key: None if gone else row
            for key, row, gone in zip(table.keys.tolist(), table.vectors.tolist(), table.deleted, strict=True)
        }
        for name, table in delta.tables.items()
    }


@pytest.mark.parametrize("name", DELTAS)
def test_deltas(name: str) -> None:
    base_version, tables, dense = DELTAS[name]
    delta = read_delta(GOLDEN / "deltas" / f"{name}.arrow")
    assert (delta.model, delta.seq, delta.base_version) == ("golden", int(name[:5]), base_version)
    assert delta.event_time == datetime(2026, 11, 20, 2, tzinfo=UTC)
    assert content(delta) == tables
    assert delta.dense == dense


def test_every_golden_delta_has_its_test() -> None:
    assert {path.stem for path in (GOLDEN / "deltas").iterdir()} == set(DELTAS)


def test_types_of_the_golden_rows(snapshot: Snapshot) -> None:
    assert {next(snapshot.batches(table, 0)).vectors.dtype for table in ("arrow", "parquet", "npz")} == {
        np.dtype(np.float32)
    }
    assert next(snapshot.batches("half", 0)).vectors.dtype == np.float16
