"""Times of rows: what counts as one, in columns and tensors of every kind, and what is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from jsonschema import Draft202012Validator

from tests.formats.test_manifest import SCHEMA
from tierstore.errors import InvalidInput, SnapshotError
from tierstore.formats.columns import Malformed
from tierstore.formats.row_times import as_rows, as_times, from_rows, given_times, ttl_seconds
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.writer import ShardFormat, SnapshotWriter

NOON, LATER = 1_795_262_400, 1_795_262_461  # 2026-11-21T12:00:00Z, and a minute and a second after it
NOON_ISO = datetime(2026, 11, 21, 12, tzinfo=UTC)
MOMENTS = [NOON_ISO, datetime(2026, 11, 21, 12, 1, 1, 900_000, tzinfo=UTC)]


@pytest.mark.parametrize(
    "values",
    [
        [NOON, LATER],
        np.array([NOON, LATER], np.int64),
        np.array([NOON, LATER], np.uint32),
        np.array([NOON, LATER + 0.9]),
        np.array([NOON * 1000, LATER * 1000 + 900], "datetime64[ms]"),
        pa.array([NOON, LATER]),
        pa.array([float(NOON), LATER + 0.9]),
        pa.array([NOON, LATER], pa.timestamp("s")),
        pa.array([NOON * 10**9, LATER * 10**9 + 9], pa.timestamp("ns", "Europe/Berlin")),
        pa.chunked_array([[NOON], [LATER]]),
        MOMENTS,
        pd.Series(MOMENTS),
        pd.Series([NOON, LATER]),
    ],
    ids=lambda values: f"{type(values).__name__}-{getattr(values, 'dtype', getattr(values, 'type', ''))}",
)
def test_times_of_every_kind_are_whole_seconds(values: Any) -> None:
    times = as_times(values)
    assert times.dtype == np.uint32
    assert times.tolist() == [NOON, LATER]
    np.testing.assert_array_equal(from_rows(as_rows(times)), times)


def test_times_in_a_tensor() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make trainers")
    assert as_times(torch.tensor([NOON, LATER])).tolist() == [NOON, LATER]


def test_a_date_is_its_first_second() -> None:
    assert as_times(pa.array([date(2026, 11, 21)])).tolist() == [NOON - 12 * 3600]


@pytest.mark.parametrize(
    ("values", "reason", "row"),
    [
        (pa.array([NOON, None]), "time is null", 1),
        ([NOON, -1], "-1 is not a time", 1),
        ([NOON, NOON * 1000], "it seems to be in milliseconds", 1),
        (np.array([np.nan, 1.0]), "nan is not a time", 0),
        (np.array(["NaT"], "datetime64[s]"), "is not a time", 0),
        (pa.array(["2026-11-21"]), "expected seconds since 1970, or a column of timestamps or dates, got string", None),
        (np.array([True]), "got [1] of bool", None),
        (np.array([[1]]), r"got [1, 1] of int64", None),
    ],
)
def test_what_is_no_time_is_refused_with_its_row(values: Any, reason: str, row: int | None) -> None:
    with pytest.raises(Malformed) as refused:
        as_times(values)
    assert reason in refused.value.reason
    assert refused.value.row == row
    with pytest.raises(InvalidInput, match="times: "):
        given_times(values)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 2_592_000), ("12h", 43_200), ("90m", 5400), ("45s", 45), ("2w", 1_209_600), ("60", 60), (7, 7)],
)
def test_a_ttl_is_seconds_or_a_number_with_a_unit(text: str | int, seconds: int) -> None:
    assert ttl_seconds(text) == seconds


def manifest(**table: Any) -> dict[str, Any]:
    entry = {"name": "user", "dim": 1, "dtype": "float32", "rows": 0, "shards": (), **table}
    return {"model": "ctr", "version": 1, "created_at": "2026-11-21T12:00:00Z", "tables": ({**entry},)}


def test_a_manifest_keeps_a_ttl_and_its_column_and_follows_the_schema() -> None:
    made = Manifest.create(**manifest(ttl_s="30d", time_column="seen"))
    document = made.to_document()
    assert list(Draft202012Validator(SCHEMA).iter_errors(document)) == []
    assert (document["tables"][0]["ttl_s"], document["tables"][0]["time_column"]) == (2_592_000, "seen")
    assert made.table_specs()["user"].ttl_s == 2_592_000
    plain = Manifest.create(**manifest()).to_document()["tables"][0]
    assert not {"ttl_s", "time_column"} & set(plain), "releases before refuse these fields"
    written = {**document, "tables": [{**document["tables"][0], "ttl_s": "30d"}]}
    assert list(Draft202012Validator(SCHEMA).iter_errors(written)) == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ttl_s": 0}, "greater than or equal to 1"),
        ({"ttl_s": "30 days"}, "expected seconds, or a time such as 30d"),
        ({"ttl_s": "200000d"}, "less than or equal to"),
        ({"ttl_s": 1.5}, "valid integer"),
        ({"ttl_s": True}, "valid integer"),
        ({"time_column": "seen"}, "time_column: of no use without ttl_s"),
        ({"ttl_s": 1, "time_column": "key"}, "'key' is the column of the keys or of the vectors"),
        ({"ttl_s": 1, "time_column": ""}, "at least 1 character"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SnapshotError, match=reason):
        Manifest.create(**manifest(**fields))


def test_a_ttl_needs_a_time_from_somewhere() -> None:
    document = manifest(ttl_s=60)
    del document["created_at"]
    with pytest.raises(SnapshotError, match=r"tables\[0\].ttl_s: needs time_column, or else created_at"):
        Manifest.create(**document)
    Manifest.create(**{**document, "tables": ({**document["tables"][0], "time_column": "seen"},)})


FORMATS: list[ShardFormat] = ["arrow", "parquet", "safetensors", "npz"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_keeps_the_times_of_its_rows(tmp_path: Path, format: ShardFormat) -> None:
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        table = snapshot.table("user", dim=2, ttl_s="30d", time_column="seen", format=format, rows_per_shard=3)
        table.write([1, 2], np.ones((2, 2)), [NOON, LATER])
        table.write([3, 4, 5], np.ones((3, 2)), pa.array([7, 8, 9], pa.timestamp("s")))
    opened = open_snapshot(tmp_path / "s")
    got: dict[int, int] = {}
    for shard in range(2):
        opened.check_checksum("user", shard)
        for batch in opened.batches("user", shard, 2):
            assert batch.times is not None
            got |= dict(zip(batch.keys.tolist(), batch.times.tolist(), strict=True))
        assert sum(map(len, opened.shard_keys("user", shard))) == (3, 2)[shard]
    assert got == {1: NOON, 2: LATER, 3: 7, 4: 8, 5: 9}


@pytest.mark.parametrize("format", [*FORMATS, "hugectr"])
def test_without_a_column_every_row_has_the_time_of_the_snapshot(tmp_path: Path, format: ShardFormat) -> None:
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1, created_at=NOON) as snapshot:
        snapshot.table("user", dim=1, ttl_s=60, format=format).write([1, 2], [[1], [2]])
        snapshot.table("item", dim=1, format=format).write([1, 2], [[1], [2]])
    opened = open_snapshot(tmp_path / "s")
    (batch,) = opened.batches("user", 0)
    assert batch.times is not None
    assert batch.times.tolist() == [NOON, NOON]
    assert next(opened.batches("item", 0)).times is None


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_that_is_not_there_is_named(tmp_path: Path, format: ShardFormat) -> None:
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("user", dim=1, format=format).write([1, 2], [[1], [2]])
    path = tmp_path / "s" / "snapshot.json"
    path.write_text(path.read_text().replace('"rows": 2,', '"ttl_s": 60, "time_column": "seen", "rows": 2,', 1))
    with pytest.raises(SnapshotError, match="'seen'") as refused:
        list(open_snapshot(tmp_path / "s").batches("user", 0))
    assert refused.value.file is not None


def test_a_bad_time_is_refused_with_its_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    np.savez(tmp_path / "user" / "a.npz", keys=[1, 2, 3], vectors=np.ones((3, 1)), seen=[5, 6, -7])
    document = manifest(ttl_s=60, time_column="seen", rows=3, shards=({"path": "user/a.npz", "rows": 3},))
    Manifest.create(**document).write(tmp_path / "snapshot.json")
    with pytest.raises(SnapshotError, match=r"-7 is not a time") as refused:
        list(open_snapshot(tmp_path).batches("user", 0, 2))
    assert (refused.value.file, refused.value.row) == ("user/a.npz", 2)


def test_a_tensor_of_too_few_times_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", keys=[1, 2, 3], vectors=np.ones((3, 1)), seen=[5, 6])
    document = manifest(ttl_s=60, time_column="seen", rows=3, shards=({"path": "a.npz", "rows": 3},))
    Manifest.create(**document).write(tmp_path / "snapshot.json")
    with pytest.raises(SnapshotError, match="'seen': expected a time for each of 3 keys, got"):
        list(open_snapshot(tmp_path).batches("user", 0))


def test_a_hugectr_folder_has_no_column_of_times(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        snapshot.table("user", dim=1, format="hugectr").write([1], [[1]])
        with pytest.raises(SnapshotError, match="a HugeCTR folder holds no times"):
            snapshot.table("other", dim=1, format="hugectr", ttl_s=1, time_column="seen")
    path = tmp_path / "s" / "snapshot.json"
    path.write_text(path.read_text().replace('"rows": 1,', '"ttl_s": 60, "time_column": "seen", "rows": 1,', 1))
    with pytest.raises(SnapshotError, match="a HugeCTR folder holds no times"):
        open_snapshot(tmp_path / "s")


def test_the_writer_wants_times_exactly_where_there_is_a_column(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        timed = snapshot.table("user", dim=1, ttl_s="1d", time_column="seen")
        plain = snapshot.table("item", dim=1)
        with pytest.raises(SnapshotError, match="expected times of its rows for 'seen'"):
            timed.write([1], [[1]])
        with pytest.raises(SnapshotError, match="expected no times"):
            plain.write([1], [[1]], [5])
        with pytest.raises(SnapshotError, match="expected 2 times, one for each key, got 1"):
            timed.write([1, 2], [[1], [2]], [5])
        with pytest.raises(SnapshotError, match=r"table 'user': times: time is null.* in row 0"):
            timed.write([1], [[1]], pa.array([None], pa.int64()))
        with pytest.raises(SnapshotError, match="ttl_s"):
            snapshot.table("bad", dim=1, ttl_s="soon")
