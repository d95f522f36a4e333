"""Rows and times as callers have them: every shape that people's tools give comes out the same, or is refused by name."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from tierstore.errors import DeltaError, InvalidInput, SnapshotError
from tierstore.formats.delta.reader import read_delta
from tierstore.formats.delta.writer import DeltaWriter
from tierstore.formats.normalize import vector_rows
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.formats.times import as_utc

ROWS = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def torch_of(change: Callable[[Any], Any]) -> Callable[[], Any]:
    def made() -> Any:
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        return change(torch.tensor(ROWS))

    return made


GIVEN: dict[str, Callable[[], Any]] = {
    "array": lambda: ROWS,
    "bfloat16": lambda: ROWS.astype(ml_dtypes.bfloat16),
    "lists": ROWS.tolist,
    "list of arrays": lambda: list(ROWS),
    "object array of arrays": lambda: pd.Series(list(ROWS)).to_numpy(),
    "arrow list": lambda: pa.array(ROWS.tolist()),
    "arrow large list of halves": lambda: pa.array(list(ROWS.astype(np.float16)), pa.large_list(pa.float16())),
    "arrow fixed-size list": lambda: pa.array(ROWS.tolist(), pa.list_(pa.float32(), 3)),
    "arrow slice": lambda: pa.array([[9.0, 9.0], *ROWS.tolist()]).slice(1),
    "arrow fixed-size slice": lambda: pa.array([[9.0] * 3, *ROWS.tolist()], pa.list_(pa.float32(), 3)).slice(1),
    "arrow list views": lambda: pa.array([[9.0], *ROWS.tolist()], pa.list_view(pa.float64())).slice(1),
    "arrow chunks": lambda: pa.chunked_array([[row] for row in ROWS.tolist()]),
    "arrow tensors": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(ROWS),
    "pandas column of arrays": lambda: pd.DataFrame({"v": list(ROWS)})["v"],
    "pandas column of lists": lambda: pd.DataFrame({"v": ROWS.tolist()}, index=[7, 8])["v"],
    "pandas arrow column": lambda: pd.Series(pa.array(ROWS.tolist()), dtype=pd.ArrowDtype(pa.list_(pa.float64()))),
    "pandas frame": lambda: pd.DataFrame(ROWS),
    "polars column of arrays": lambda: pl.Series(ROWS),
    "polars column of lists": lambda: pl.Series(ROWS.tolist()),
    "tensor": torch_of(lambda tensor: tensor),
    "tensor that needs gradients": torch_of(lambda tensor: tensor.requires_grad_()),
    "tensor of bfloat16": torch_of(lambda tensor: tensor.bfloat16().requires_grad_()),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_rows_come_out_the_same_whatever_holds_them(given: Callable[[], Any]) -> None:
    rows = vector_rows(given())
    assert rows.shape == (2, 3)
    assert rows.astype(np.float32).tolist() == ROWS.tolist()


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_writers_take_them(tmp_path: Path, given: Callable[[], Any]) -> None:
    vectors = given()
    with SnapshotWriter(tmp_path, model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=3).write(pd.Series([7, 8]), vectors)
    (batch,) = open_snapshot(tmp_path).batches("item", 0)
    assert (batch.keys.tolist(), batch.vectors.tolist()) == ([7, 8], ROWS.tolist())
    delta = DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    delta.upsert("item", pd.Series([7, 8]), vectors)
    assert read_delta(delta.to_bytes()).tables["item"].vectors.tolist() == ROWS.tolist()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([[1.0, 2.0], [3.0]], "vector 1 has 1 numbers, those before it 2"),
        (pd.Series([[1.0], [2.0], [3.0, 4.0]]), "vector 2 has 2 numbers, those before it 1"),
        (pa.array([[1.0], None]), "vector 1 is null"),
        (pa.array([[1.0, 2.0], [3.0, None]]), "number 1 of vector 1 is null"),
        (pa.array(["a"]), "got an Arrow column of string"),
        (pa.array([["a"]]), "got an Arrow column of list"),
        ([1.0, 2.0], r"got \[2\] of float64"),
        (ROWS[None], r"got \[1, 2, 3\] of float32"),
        (np.array([["a"]]), r"got \[1, 1\] of <U1"),
        (pd.Series([np.zeros((2, 2))]), "expected vectors of shape"),
        (pd.Series(["a", "b"]), "expected vectors of shape"),
        (None, "expected vectors of shape"),
    ],
)
def test_what_are_no_rows_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        vector_rows(given)


def test_rows_of_no_keys_are_fine(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path, model="ctr", version=1) as snapshot:
        snapshot.table("item", dim=3).write([], [])
        snapshot.feature("item_id", table="item")
    delta = DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    delta.upsert("item", pa.array([], pa.int64()), pa.array([], pa.list_(pa.float32())))
    assert read_delta(delta.to_bytes()).tables == {}


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("int64", ["a"], r"table 'item': expected int64 keys, got str; .* table.'item', key=\"string\", …"),
        ("string", [1], r"table 'item': expected string keys .* table.'item', key=\"int64\", …"),
        ("int64", {1}, "got a set, which has no order"),
        ("string", {"a"}, "got a set, which has no order"),
        ("string", "abc", "got a single str"),
        ("int64", 5, "got a single int"),
        ("string", 5, "got a single int"),
        ("int64", None, "expected a sequence of int64 keys, got NoneType"),
    ],
)
def test_keys_of_another_kind_say_where_the_kind_is_named(tmp_path: Path, kind: str, keys: Any, reason: str) -> None:
    table = SnapshotWriter(tmp_path, model="ctr", version=1).table("item", dim=1, key=kind)
    with pytest.raises(InvalidInput, match=reason):
        table.write(keys, [[1.0]])


NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    "given",
    [
        NOON,
        NOON.astimezone(timezone(timedelta(hours=9))),
        pd.Timestamp(NOON),
        NOON.timestamp(),
        int(NOON.timestamp()),
        np.int64(NOON.timestamp()),
        np.float64(NOON.timestamp()),
        "2026-11-20T12:00:00Z",
        "2026-11-20T21:00:00+09:00",
    ],
)
def test_a_moment_is_taken_in_every_form_that_says_which_it_is(given: Any) -> None:
    assert as_utc(given) == NOON
    delta = DeltaWriter(io.BytesIO(), model="ctr", seq=1, event_time=given)
    assert read_delta(delta.to_bytes()).event_time == NOON


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (datetime(2026, 11, 20), "expected a datetime with a time zone, got .* without one: use datetime.now"),
        (pd.Timestamp("2026-11-20"), "expected a datetime with a time zone"),
        (date(2026, 11, 20), "got a date without a time"),
        (np.datetime64("2026-11-20"), "got a datetime64, which has no zone"),
        (1_795_339_045_837.5, "expected seconds since 1970, such as time.time.., got 1"),
        (math.nan, "expected seconds since 1970"),
        (-1, "expected seconds since 1970"),
        (True, "got bool"),
        ("noon", "expected an ISO 8601 time"),
        ("2026-11-20T12:00:00", "an ISO 8601 time with an offset, got .* write '2026-11-20T12:00:00Z' if it is UTC"),
        ("2026-11-20", "an ISO 8601 time with an offset, got .* write '2026-11-20T00:00:00Z' if it is UTC"),
    ],
)
def test_a_moment_that_might_be_another_is_refused(tmp_path: Path, given: Any, reason: str) -> None:
    with pytest.raises(DeltaError, match=f"event_time: .*{reason}"):
        DeltaWriter(io.BytesIO(), model="ctr", seq=1, event_time=given)
    with pytest.raises(SnapshotError, match=f"created_at: .*{reason}"):
        SnapshotWriter(tmp_path, model="ctr", version=1, created_at=given)
