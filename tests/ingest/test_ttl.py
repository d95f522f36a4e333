"""Rows that are older than the ttl of their table are not loaded, and the times of the others are kept."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import collisions
from tests.formats.make_golden import timed_built
from tests.ingest.loads import bulk_load
from tierstore.errors import LoadCancelled, SnapshotError
from tierstore.formats.row_times import TIME_BYTES, from_rows
from tierstore.formats.snapshot.built import open_source
from tierstore.formats.snapshot.reader import open_snapshot
from tierstore.formats.snapshot.writer import SnapshotWriter
from tierstore.ingest import bulkload
from tierstore.ingest.build import build_snapshot
from tierstore.ingest.results import TableBuild
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.disk.sealed import BASES
from tierstore.tiers.disk.sst import times_id
from tierstore.types import BaseKind, Progress

DAY = 86400
ROWS = 30_000
SETTINGS: dict[str, Any] = {"memory_bytes": 16 << 20, "workers": 1}


def write(root: Path, now: int, **options: Any) -> np.ndarray:
    """Row k was written k seconds after 20 days ago; the table's ttl is 10 days and so many seconds that half are older."""
    keys = np.random.default_rng(7).permutation(ROWS)
    with SnapshotWriter(root, model="ctr", version=1) as snapshot:
        table = snapshot.table(
            "user", dim=3, ttl_s=20 * DAY - ROWS // 2, time_column="seen", rows_per_shard=7000, **options
        )
        table.write(keys, np.repeat(keys[:, None], 3, axis=1).astype(np.float32), now - 20 * DAY + keys)
        snapshot.table("item", dim=1).write([5, 6], [[5], [6]])
    return keys


def loaded(
    root: Path, out: Path, base: BaseKind = "sealed", **options: Any
) -> tuple[dict[str, TableBuild], dict[int, int], dict[int, float]]:
    """(tables, time by key, first number by key) of table `user`, as they are in the disk tier and read back."""
    db = out.with_suffix(".db")
    with bulk_load(open_source(root), out, base=base, **SETTINGS, **options) as bulk:
        build = bulk.build()
        bulk.ingest(build, db, {"watermark": b"0"})
        bulk.read_back(db)
    readers = ReaderPool(1)
    tier = BASES[base].open(db, block_cache_bytes=1 << 20, reader=readers)
    try:
        times = {
            int(k): int(t)
            for keys, rows in tier.scan(times_id(1), TIME_BYTES)
            for k, t in zip(keys, from_rows(rows), strict=True)
        }
        rows = {
            int(k): float(r.view(np.float32)[0])
            for keys, some in tier.scan(1, 12)
            for k, r in zip(keys, some, strict=True)
        }
        return build.tables, times, rows
    finally:
        tier.close()
        readers.close()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the clock that loads read."""

    def set_(now: int) -> None:
        monkeypatch.setattr(bulkload.time, "time", lambda: float(now))

    return set_


NOW = int(time.time())


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
@pytest.mark.parametrize("format", ["arrow", "parquet", "safetensors", "npz"])
def test_a_load_leaves_out_what_is_too_old(tmp_path: Path, base: BaseKind, format: str, at: Any) -> None:
    at(NOW)
    write(tmp_path / "s", NOW, format=format)
    tables, times, rows = loaded(tmp_path / "s", tmp_path / "out", base)
    kept = range(ROWS // 2, ROWS)  # a row of exactly the ttl's age is kept
    assert times == {k: NOW - 20 * DAY + k for k in kept}
    assert rows == {k: float(k) for k in kept}
    assert (tables["user"].rows, tables["user"].expired) == (ROWS // 2, ROWS // 2)
    assert (tables["item"].rows, tables["item"].expired) == (2, 0)
    np.testing.assert_allclose(tables["user"].mean, np.mean(kept))


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_a_table_of_which_everything_is_too_old_is_empty(tmp_path: Path, base: BaseKind, at: Any) -> None:
    at(NOW + 30 * DAY)
    write(tmp_path / "s", NOW)
    tables, times, rows = loaded(tmp_path / "s", tmp_path / "out", base)
    assert (tables["user"].rows, tables["user"].expired, times, rows) == (0, ROWS, {}, {})


def test_a_load_that_goes_on_later_has_the_time_of_its_beginning(tmp_path: Path, at: Any, monkeypatch: Any) -> None:
    write(tmp_path / "s", NOW)
    whole = loaded(tmp_path / "s", tmp_path / "at-once") if at(NOW) is None else None
    assert whole is not None

    def broken_off(step: Progress) -> None:
        if step.phase == "write":
            raise LoadCancelled("the load was cancelled")

    snapshot = open_snapshot(tmp_path / "s")
    with (
        pytest.raises(LoadCancelled),
        bulk_load(snapshot, tmp_path / "out", base="sealed", progress=broken_off, **SETTINGS) as bulk,
    ):
        bulk.build()
    at(NOW + 5 * DAY)
    tables, times, rows = loaded(tmp_path / "s", tmp_path / "out")
    assert (times, rows) == whole[1:]
    assert (tables["user"].digest, tables["user"].expired) == (whole[0]["user"].digest, ROWS // 2)
    # one that begins anew has a time of its own
    tables, times, _ = loaded(tmp_path / "s", tmp_path / "new")
    assert (tables["user"].rows, times) == (0, {})


def test_a_journal_of_another_load_lends_no_time(tmp_path: Path, at: Any) -> None:
    at(NOW)
    write(tmp_path / "s", NOW)
    write(tmp_path / "other", NOW, dtype="float16")
    with bulk_load(open_snapshot(tmp_path / "other"), tmp_path / "out", base="sealed", **SETTINGS) as bulk:
        bulk.build()
    at(NOW + 5 * DAY)
    assert loaded(tmp_path / "s", tmp_path / "out")[1] == {}


def test_runs_that_are_joined_and_merged_in_small_steps_keep_times(tmp_path: Path, at: Any, monkeypatch: Any) -> None:
    from tierstore.ingest import load_plan

    at(NOW)
    monkeypatch.setattr(load_plan, "MAX_FAN_IN", 2)
    monkeypatch.setattr(load_plan, "_FILE_BYTES", 1 << 16)
    monkeypatch.setattr(load_plan, "_LEAST_SHARE", 1 << 17)
    write(tmp_path / "s", NOW)
    monkeypatch.setitem(SETTINGS, "memory_bytes", 1 << 17)
    _, times, rows = loaded(tmp_path / "s", tmp_path / "out")
    assert times == {k: NOW - 20 * DAY + k for k in range(ROWS // 2, ROWS)}
    assert set(rows) == set(times)


def test_a_built_version_is_cut_off_when_it_is_built_and_brings_its_times(tmp_path: Path, at: Any) -> None:
    write(tmp_path / "s", NOW)
    at(NOW)
    build_snapshot(tmp_path / "s", tmp_path / "built", load_workers=1, load_memory="16MiB")
    at(NOW + 5 * DAY)
    tables, times, rows = loaded(tmp_path / "built", tmp_path / "out")
    assert times == {k: NOW - 20 * DAY + k for k in range(ROWS // 2, ROWS)}
    assert set(rows) == set(times)
    assert (tables["user"].rows, tables["user"].expired) == (ROWS // 2, ROWS // 2)
    document = json.loads((tmp_path / "built" / "built.json").read_text())
    assert [entry.get("expired") for entry in document["tables"]] == [ROWS // 2, None], "earlier releases refuse it"
    assert {file["table"] for file in document["files"]} == {"user", "user.times", "item"}


def test_partitions_have_the_times_of_their_own_rows(tmp_path: Path, at: Any) -> None:
    at(NOW)
    write(tmp_path / "s", NOW)
    build_snapshot(tmp_path / "s", tmp_path / "built", partitions=3, load_workers=1, load_memory="16MiB")
    together: dict[int, int] = {}
    for part in range(3):
        _, times, rows = loaded(tmp_path / "built" / f"partition-{part:04}", tmp_path / f"out-{part}")
        assert set(times) == set(rows)
        assert not set(times) & set(together)
        together |= times
    assert together == {k: NOW - 20 * DAY + k for k in range(ROWS // 2, ROWS)}


def test_a_place_without_times_gets_the_rows_alone(tmp_path: Path, at: Any) -> None:
    at(NOW)
    write(tmp_path / "s", NOW)
    build_snapshot(tmp_path / "s", tmp_path / "built", load_workers=1, load_memory="16MiB")
    for source in ("s", "built"):
        tables, times, rows = loaded(tmp_path / source, tmp_path / f"of-{source}", keep_times=False)
        assert times == {}
        assert (len(rows), tables["user"].expired) == (ROWS // 2, ROWS // 2)


def test_the_golden_files_are_what_is_built_today_and_are_loaded(tmp_path: Path) -> None:
    golden = Path(__file__).parents[2] / "schema/golden"
    timed_built(golden, tmp_path / "built")
    names = sorted(path.relative_to(golden / "timed-built") for path in (golden / "timed-built").rglob("*"))
    assert names == sorted(path.relative_to(tmp_path / "built") for path in (tmp_path / "built").rglob("*"))
    assert len(names) == 11
    for name in names:
        assert (tmp_path / "built" / name).read_bytes() == (golden / "timed-built" / name).read_bytes(), name
    with bulk_load(open_source(golden / "timed-built"), tmp_path / "out", base="sealed", **SETTINGS) as bulk:
        tables = bulk.build().tables
    assert {name: (table.rows, table.expired) for name, table in tables.items()} == {
        **dict.fromkeys(("arrow", "parquet", "safetensors", "npz"), (2, 1)),
        "snapshot": (3, 0),
    }


# --- strings


@pytest.mark.parametrize("expired", [[], [0], [0, 1], [0, 1, 2]])
def test_strings_of_one_hash_expire_each_by_itself(tmp_path: Path, at: Any, expired: list[int]) -> None:
    at(NOW)
    words = collisions.family(3)
    seen = [NOW - (20 if i in expired else 1) * DAY - i for i in range(3)]
    with SnapshotWriter(tmp_path / "s", model="ctr", version=1) as snapshot:
        table = snapshot.table("user", dim=3, key="string", ttl_s="10d", time_column="seen", rows_per_shard=2)
        table.write([*words, "alone"], np.repeat([[1.0], [2.0], [3.0], [4.0]], 3, axis=1), [*seen, NOW])
    tables, times, rows = loaded(tmp_path / "s", tmp_path / "out")
    kept = [i for i in range(3) if i not in expired]
    codes = dict(tables["user"].colliding)
    assert sorted(codes) == (sorted(words[i] for i in kept) if len(kept) > 1 else [])
    for i in kept:
        code = codes.get(words[i], collisions.digest(words[i]))
        assert (rows[code], times[code]) == (i + 1.0, seen[i])
    assert len(rows) == len(times) == len(kept) + 1
    assert tables["user"].expired == len(expired)


@pytest.mark.parametrize("key", ["int64", "string"])
def test_a_key_that_is_there_twice_is_refused_unless_one_is_too_old(tmp_path: Path, at: Any, key: str) -> None:
    at(NOW)
    for name, times in (("both", [NOW, NOW]), ("one", [NOW - 20 * DAY, NOW])):
        with SnapshotWriter(tmp_path / name, model="ctr", version=1) as snapshot:
            table = snapshot.table("user", dim=3, key=key, ttl_s="10d", time_column="seen")
            table.write(["5", "5"] if key == "string" else [5, 5], np.array([[1.0] * 3, [2.0] * 3]), times)
    with pytest.raises(SnapshotError, match=r"duplicate key '?5'?: it is also in user/part-00000.arrow, row 0"):
        loaded(tmp_path / "both", tmp_path / "a")
    assert list(loaded(tmp_path / "one", tmp_path / "b")[2].values()) == [2.0]


def test_a_row_that_is_too_old_is_checked_all_the_same(tmp_path: Path, at: Any) -> None:
    at(NOW)
    np.savez(tmp_path / "a.npz", keys=[1, 2], vectors=np.array([[1, 1, 1], [2, np.inf, 2]], np.float32), seen=[NOW, 5])
    table = {"name": "user", "dim": 3, "dtype": "float32", "ttl_s": "1d", "time_column": "seen", "rows": 2}
    manifest = {
        "format": 1,
        "model": "ctr",
        "version": 1,
        "tables": [{**table, "shards": [{"path": "a.npz", "rows": 2}]}],
    }
    (tmp_path / "snapshot.json").write_text(json.dumps(manifest))
    with pytest.raises(SnapshotError) as refused:
        loaded(tmp_path, tmp_path / "out")
    assert (refused.value.file, refused.value.row) == ("a.npz", 1)
