"""The helper's tasks in this process: runs, ranges, and how colliding strings are told from repeated ones."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tierstore.errors import SnapshotError
from tierstore.formats.snapshot.manifest import Manifest
from tierstore.formats.snapshot.reader import RowBatch, Snapshot
from tierstore.ingest.merge import merge_runs
from tierstore.ingest.runs import Run, RunWriter, merged, quantiles, run_keys
from tierstore.ingest.sort import join_runs, sort_shards
from tierstore.ingest.tasks import JoinRuns, Merged, MergeRuns, SortShards
from tierstore.ingest.worker import describe
from tierstore.kernels.digest import digest_rows
from tierstore.tiers.disk.sealed_file import open_sealed, read_blocks
from tierstore.types import BaseKind, Keys


class FakeSnapshot(Snapshot):
    """Shards given as lists of (key code, text), so that two strings may be made to collide."""

    @classmethod
    def of(cls, root: Path, shards: list[list[tuple[int, str]]], *, key: str = "int64") -> FakeSnapshot:
        entries = tuple({"path": f"part-{i}.arrow", "rows": len(shard)} for i, shard in enumerate(shards))
        rows = sum(map(len, shards))
        table = {"name": "t", "key": key, "dim": 2, "dtype": "float32", "rows": rows, "shards": entries}
        snapshot = cls(root, Manifest.create(model="m", version=1, tables=(table,)))
        object.__setattr__(snapshot, "shards", shards)
        return snapshot

    def batches(self, table: str, shard_no: int, batch_rows: int = 3) -> Iterator[RowBatch]:
        shard: Any = self.shards[shard_no]  # type: ignore[attr-defined]
        for start in range(0, len(shard), 3):
            part = shard[start : start + 3]
            keys = np.array([code for code, _ in part], np.int64)
            vectors = np.stack([keys.astype(np.float32), -keys.astype(np.float32)], axis=1)
            yield RowBatch(keys, vectors, start, pa.array([text for _, text in part], pa.large_string()))

    def shard_keys(self, table: str, shard_no: int, batch_rows: int = 3) -> Iterator[Keys]:
        for batch in self.batches(table, shard_no):
            yield batch.keys


def silent(rows: int) -> None:
    pass


def merge(
    snapshot: FakeSnapshot,
    directory: Path,
    runs: list[Run],
    low: int | None = None,
    high: int | None = None,
    base: BaseKind = "rocksdb",
    step_bytes: int = 64,
) -> Merged:
    listed = directory / "runs.json"
    listed.write_text(json.dumps(runs))
    return merge_runs(
        snapshot, MergeRuns("t", 1, str(listed), low, high, str(directory / f"out-{low}"), base, step_bytes), silent
    )


_codes = st.lists(st.integers(-1000, 1000), min_size=1, max_size=60, unique=True)


@settings(max_examples=few_or_many(12, 40))
@given(
    codes=_codes,
    cut=st.integers(0, 60),
    run_rows=st.integers(1, 20),
    ranges=st.integers(1, 7),
    base=st.sampled_from(["sealed", "rocksdb"]),
    step_bytes=st.integers(1, 400),
    joined=st.integers(0, 4),
)
def test_runs_steps_and_ranges_of_any_size_hold_every_row_once(
    tmp_path_factory: pytest.TempPathFactory,
    codes: list[int],
    cut: int,
    run_rows: int,
    ranges: int,
    base: BaseKind,
    step_bytes: int,
    joined: int,
) -> None:
    directory = tmp_path_factory.mktemp("runs")
    snapshot = FakeSnapshot.of(directory, [[(c, "") for c in codes[:cut]], [(c, "") for c in codes[cut:]]])
    told: list[int] = []
    sorted_ = sort_shards(snapshot, SortShards("t", [0, 1], str(directory / "r"), run_rows * 16, 1024), told.append)
    assert sum(told) == len(codes)
    assert max(count for _, count in sorted_.runs) <= run_rows
    for path, count in sorted_.runs:
        assert (np.diff(run_keys(path, count)) > 0).all()
    np.testing.assert_allclose(np.sum(sorted_.sums, axis=0), [sum(codes), -sum(codes)])

    runs = sorted_.runs
    if joined:
        some = runs[:joined]
        result = join_runs(snapshot, JoinRuns("t", some, str(directory / "joined"), step_bytes), silent)
        runs = [result.run, *runs[joined:]]
        for path, _ in some:
            Path(path).unlink()  # as the load does
    limits = [None, *quantiles(runs, 8, ranges), None]
    assert len(limits) <= ranges + 1
    parts = [merge(snapshot, directory, runs, low, high, base, step_bytes) for low, high in pairwise(limits)]
    wanted = [
        [c for c in sorted(codes) if (low is None or low <= c) and (high is None or c < high)]
        for low, high in pairwise(limits)
    ]
    assert [part.rows for part in parts] == list(map(len, wanted))
    for part, keys in zip(parts, wanted, strict=True):
        rows = np.array([[c, -float(c)] for c in keys], np.float32).reshape(-1, 2).view(np.uint8)
        assert part.digest == digest_rows(np.array(keys, np.int64), np.ascontiguousarray(rows))


def written(path: Path, keys: np.ndarray) -> Run:
    """A run of these keys, each with itself as its row."""
    with RunWriter(str(path), len(keys), 8) as run:
        for part in np.array_split(keys, 3):
            run.add(part, part.view(np.uint8).reshape(-1, 8))
    return str(path), len(keys)


@pytest.mark.parametrize("shape", ["alike", "one after the other", "one long"])
def test_a_merge_holds_one_step_however_many_and_long_its_runs_are(tmp_path: Path, shape: str) -> None:
    rng, rows = np.random.default_rng(1), 20_000
    runs = []
    for number in range(20):
        keys = np.sort(rng.choice(10**9, rows if shape != "one long" or not number else 50, replace=False))
        runs.append(written(tmp_path / f"r{number}", keys + (number * 10**9 if shape == "one after the other" else 0)))
    everything = np.sort(np.concatenate([run_keys(*run) for run in runs]))
    step_bytes = 16 * 5_000
    steps = list(merged(runs, 8, None, None, step_bytes))
    assert max(len(keys) for keys, _ in steps) <= 5_000
    np.testing.assert_array_equal(np.concatenate([keys for keys, _ in steps]), everything)
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in steps]).view(np.int64).ravel(), everything)
    assert len(steps) < 40 * len(everything) // 5_000


def merge_all(snapshot: FakeSnapshot, directory: Path, base: BaseKind = "rocksdb") -> Merged:
    shards = list(range(len(snapshot.manifest.tables[0].shards)))
    runs = sort_shards(snapshot, SortShards("t", shards, str(directory / "r"), 64, 1024), silent).runs
    return merge(snapshot, directory, runs, base=base)


def keys_and_rows(path: Path, xxh3: str) -> dict[int, float]:
    """Each code in a sealed file, with the first number of its row."""
    opened = open_sealed(path, xxh3=xxh3, size=path.stat().st_size)
    try:
        keys, rows = read_blocks(opened, 0, len(opened.first_keys), None)
    finally:
        os.close(opened.fd)
    return dict(zip(keys.tolist(), rows.view(np.float32)[:, 0].tolist(), strict=True))


_weak = st.lists(
    st.tuples(st.integers(-20, 20), st.text("abc", max_size=3)), min_size=1, max_size=40, unique_by=lambda key: key[1]
)


@settings(max_examples=few_or_many(20, 60))
@given(
    keys=_weak,
    cut=st.integers(0, 40),
    run_rows=st.integers(1, 20),
    ranges=st.integers(1, 3),
    step_bytes=st.integers(1, 400),
)
def test_every_string_gets_a_code_of_its_own_however_weak_the_hash(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[tuple[int, str]],
    cut: int,
    run_rows: int,
    ranges: int,
    step_bytes: int,
) -> None:
    """The hash is given, and far apart (the real one leaves as much room): each row must be where its string says."""
    directory = tmp_path_factory.mktemp("runs")
    keys = [(code << 40, text) for code, text in keys]
    told: list[int] = []
    snapshot = FakeSnapshot.of(directory, [keys[:cut], keys[cut:]], key="string")
    runs = sort_shards(snapshot, SortShards("t", [0, 1], str(directory / "r"), run_rows * 16, 1024), silent).runs
    listed = directory / "runs.json"
    listed.write_text(json.dumps(runs))
    found: dict[int, float] = {}
    apart: dict[str, int] = {}
    for low, high in pairwise([None, *quantiles(runs, 8, ranges), None]):
        out = directory / f"out-{low}"
        task = MergeRuns("t", 1, str(listed), low, high, str(out), "sealed", step_bytes)
        result = merge_runs(snapshot, task, told.append)
        apart |= dict(result.colliding)
        if result.xxh3 is not None:
            here = keys_and_rows(out, result.xxh3)
            assert len(here) == result.rows
            assert all((low is None or low <= code) and (high is None or code < high) for code in here)
            found |= here
    shared = {code for code, texts in Counter(code for code, _ in keys).items() if texts > 1}
    assert apart.keys() == {text for code, text in keys if code in shared}
    assert not shared & found.keys()
    assert found == {apart.get(text, code): float(np.float32(code)) for code, text in keys}
    assert sum(told) == len(keys)
    assert not list(directory.glob("*.colliding"))


@pytest.mark.parametrize("base", ["rocksdb", "sealed"])
def test_a_code_is_taken_that_no_run_has(tmp_path: Path, base: BaseKind) -> None:
    shards = [[(1, "a"), (2, "b"), (3, "c"), (4, "d")], [(5, "e"), (6, "f"), (7, "g"), (9, "h"), (2, "z")]]
    result = merge_all(FakeSnapshot.of(tmp_path, shards, key="string"), tmp_path, base)
    assert (result.rows, result.colliding) == (9, [("b", 8), ("z", 10)])


def test_more_shared_hashes_than_any_accident_makes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.ingest.colliding._MOST", 3)
    shards = [[(code, f"{code}-{which}") for code in range(0, 50, 10) for which in range(2)]]
    with pytest.raises(SnapshotError, match="4 hashes or more are shared by several keys"):
        merge_all(FakeSnapshot.of(tmp_path, shards, key="string"), tmp_path)
    assert not (tmp_path / "out-None").exists()


def test_one_string_given_twice_is_called_a_duplicate(tmp_path: Path) -> None:
    shards = [[(1, "a"), (2, "b")], [(3, "c"), (2, "b")]]
    with pytest.raises(SnapshotError) as failure:
        merge_all(FakeSnapshot.of(tmp_path, shards, key="string"), tmp_path)
    assert str(failure.value) == "part-1.arrow, row 1: duplicate key 'b': it is also in part-0.arrow, row 1"


@pytest.mark.parametrize("step_bytes", [1, 32, 1 << 20])
@pytest.mark.parametrize("run_bytes", [16, 64, 1 << 20])
def test_a_number_given_twice_is_found_within_a_run_and_across_runs(
    tmp_path: Path, run_bytes: int, step_bytes: int
) -> None:
    snapshot = FakeSnapshot.of(tmp_path, [[(9, ""), (5, ""), (1, ""), (7, ""), (5, "")]])
    runs = sort_shards(snapshot, SortShards("t", [0], str(tmp_path / "r"), run_bytes, 1024), silent).runs
    with pytest.raises(SnapshotError, match=r"part-0.arrow, row 4: duplicate key 5.*row 1"):
        merge(snapshot, tmp_path, runs, base="sealed", step_bytes=step_bytes)


def test_quantiles_weigh_runs_by_their_rows(tmp_path: Path) -> None:
    """A short run among long ones must not pull the cuts towards its keys."""
    runs = []
    for number, keys in enumerate((np.arange(100_000), np.arange(10**6, 10**6 + 50))):
        runs.append(written(tmp_path / f"r{number}", keys))
    cuts = np.array(quantiles(runs, 8, 4))
    assert len(cuts) == 3
    np.testing.assert_allclose(cuts, [25_000, 50_000, 75_000], atol=5_000)


def test_a_full_disk_in_a_helper_is_said_in_words() -> None:
    answer = describe(OSError(errno.ENOSPC, "No space left on device", "/data/runs/item-0.0"))
    assert answer == {"error": "full", "message": "/data/runs/item-0.0: the disk is full"}
    assert describe(MemoryError())["error"] == "storage"
    assert "load_memory" in describe(MemoryError())["message"]
    assert "boom" in describe(RuntimeError("boom"))["message"]
