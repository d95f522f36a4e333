"""What a store says of its caches: hit rates at other sizes beside stores of these sizes, the hottest keys, and the last hour."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

import tierstore
from tests.engine.scenes import eventually
from tierstore.engine.data.insight import PLACES, CacheInsight, KeyCounts
from tierstore.engine.lifecycle import sampler
from tierstore.errors import InvalidInput, NotFound

ROWS = 3_000


def snapshot(where: Path, version: int, key: str = "int64") -> Path:
    keys: Any = np.arange(ROWS) if key != "string" else [f"k{i}" for i in range(ROWS)]
    with tierstore.SnapshotWriter(where / str(version), model="m", version=version, delta_seq=0) as writer:
        writer.table("t", dim=4, key=key).write(keys, np.ones((ROWS, 4), np.float32))
        writer.feature("f", table="t")
    return where / str(version)


@pytest.fixture
def store(tmp_path: Path):
    with tierstore.open(tmp_path / "data", host_budget="64KiB", load_workers=1) as opened:
        opened.shared.sampler.close()  # the tests take its turns
        yield opened


def look_up(store: tierstore.Store, keys: Any, turns: int = 1, now_s: float = 0.0) -> None:
    """`turns` times: sample, and look these keys up."""
    for _ in range(turns):
        store.shared.sampler.step(now_s)
        store.model("m").lookup("f", keys)
    store.shared.sampler.step(now_s)


@pytest.mark.thorough
def test_half_and_twice_the_memory_do_what_the_store_says(tmp_path: Path) -> None:
    """Within 3 points of stores that have so much, for memory of 5, 10 and 20% of the rows."""
    from tools.plan_check import measure

    found = {}
    for share in (0.05, 0.1, 0.2):
        root = tmp_path / str(share)
        (found[share],) = measure(root, rows=60_000, lookups=1_500_000, exponents=(1.0,), share=share)
    tried = found[0.1].tried
    for scale, share in ((0.5, 0.05), (1.0, 0.1), (2.0, 0.2)):
        assert tried[scale] == pytest.approx(found[share].hit_rate, abs=0.03), (scale, found)
    assert 0.5 < found[0.05].hit_rate < found[0.1].hit_rate < found[0.2].hit_rate < 0.95, "worth telling apart"


def test_the_hottest_keys_are_named_with_their_share(store: tierstore.Store, tmp_path: Path) -> None:
    store.load_snapshot(snapshot(tmp_path, 1))
    keys = np.concatenate([np.full(600, 7), np.full(300, 11), np.arange(100, 200)])
    np.random.default_rng(0).shuffle(keys)
    look_up(store, keys, turns=8)
    report = store.model("m").cache("t", 3)
    assert [entry["key"] for entry in report["hottest"][:2]] == [7, 11]
    assert [entry["share"] for entry in report["hottest"]] == pytest.approx([0.6, 0.3, 0.001], abs=0.002)
    assert len(report["hottest"]) == 3


@pytest.mark.parametrize(
    ("key", "asked", "expected"),
    [("uint64", 5, 5), ("string", "k5", "k5"), ("string", "nobody", xxhash.xxh3_64_hexdigest(b"nobody"))],
)
def test_keys_are_shown_by_their_type(
    store: tierstore.Store, tmp_path: Path, key: str, asked: Any, expected: Any
) -> None:
    """A string that no row has by its hash."""
    store.load_snapshot(snapshot(tmp_path, 1, key))
    look_up(store, [asked] if key == "string" else np.array([asked], np.uint64), turns=2)
    assert [entry["key"] for entry in store.model("m").cache("t")["hottest"]] == [expected]


def test_before_look_ups_the_keys_are_those_that_were_hot_when_last_served(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "data", host_budget="64KiB", load_workers=1) as store:
        store.load_snapshot(snapshot(tmp_path, 1))
        store.model("m").lookup("f", [5, 6, 5, 5])
    with tierstore.open(tmp_path / "data") as store:
        entries = store.model("m").cache("t", 2)["hottest"]
    assert {entry["key"] for entry in entries} == {5, 6}
    assert {entry["share"] for entry in entries} == {None}


def test_keys_that_do_not_exist_take_no_memory_in_a_trial(store: tierstore.Store, tmp_path: Path) -> None:
    """250 rows have room in a quarter of the cache, and would not with as many keys beside them."""
    store.load_snapshot(snapshot(tmp_path, 1))
    keys, random = np.arange(-270, 250), np.random.default_rng(1)
    for _ in range(200):
        random.shuffle(keys)
        look_up(store, keys)
    quarter = store.status("m")["models"]["m"]["tables"]["t"]["cache"]["curve"][0]
    assert 400 < quarter["rows"] < 600
    assert quarter["hit_rate"] > 0.97


def test_a_store_samples_by_itself(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "data", host_budget="64KiB", load_workers=1) as store:
        store.load_snapshot(snapshot(tmp_path, 1))
        until = time.monotonic() + 60
        while not (hottest := store.model("m").cache("t", 1)["hottest"]) or hottest[0]["share"] is None:
            store.model("m").lookup("f", [3, 3, 3, 4])
            assert time.monotonic() < until
        assert hottest == [{"key": 3, "share": pytest.approx(0.75, abs=0.1)}]


def test_what_a_bad_request_gets(store: tierstore.Store, tmp_path: Path) -> None:
    store.load_snapshot(snapshot(tmp_path, 1))
    with pytest.raises(NotFound, match="no table 'u'; version 1 has t"):
        store.model("m").cache("u")
    with pytest.raises(InvalidInput, match="limit"):
        store.model("m").cache("t", 0)


def test_a_switch_and_deltas_are_told_in_the_minute_that_they_came_in(store: tierstore.Store, tmp_path: Path) -> None:
    store.load_snapshot(snapshot(tmp_path, 1))
    look_up(store, [1], now_s=0)
    look_up(store, [1, 2, 3], now_s=61)
    store.load_snapshot(snapshot(tmp_path, 2))
    look_up(store, [1, 2], now_s=130)
    look_up(store, [1], now_s=190)
    history = store.model("m").cache("t")["history"]
    assert [minute["version"] for minute in history] == [1, 2, 2]
    assert [minute["switch"] for minute in history] == [False, True, False]
    assert [minute["at_s"] for minute in history] == [60, 120, 180]
    assert sum(minute["keys"] for minute in history) == 6, "each look-up is in one minute"


def test_an_hour_is_kept_and_hit_rates_are_of_the_last_minutes() -> None:
    insight, host, disk = CacheInsight(), 0, 0
    for minute in range(200):
        insight.note_minute(60.0 * minute, {"host": host, "disk": disk, "absent": 0}, 1, 0)
        host, disk = host + (75 if minute < 195 else 50), disk + (25 if minute < 195 else 50)
    assert len(insight.history()) == 60
    assert insight.status()["hit_rate"] == pytest.approx((6 * 75 + 4 * 50) / 1000)


def test_a_table_that_is_served_no_more_keeps_no_memory(store: tierstore.Store, tmp_path: Path) -> None:
    store.load_snapshot(snapshot(tmp_path, 1))
    look_up(store, np.arange(100), turns=4)
    with store.model("m").view() as view:
        insight = view.open_version.tables["t"].counts.insight
    assert insight.status()["curve"]
    store.deactivate("m")
    store.shared.sampler.step(0.0)
    assert insight.status()["curve"] == []


# --- counts of keys


def test_rare_keys_make_room_for_frequent_ones() -> None:
    counts, random = KeyCounts(), np.random.default_rng(1)
    for turn in range(200):
        counts.add(np.concatenate([random.integers(10**6, 10**9, 900), np.repeat(np.arange(10), 10)]), turn / 2)
    hottest = counts.hottest(20)
    assert {key for key, _ in hottest[:10]} == set(range(10))
    assert all(share == pytest.approx(0.01, abs=0.001) for _, share in hottest[:10])
    assert counts.nbytes <= 16 * PLACES


def test_what_was_hot_fades() -> None:
    counts = KeyCounts()
    counts.add(np.full(1000, 1), 0.0)
    counts.add(np.full(1000, 2), 1200.0)
    assert counts.hottest(2) == [(2, pytest.approx(0.8)), (1, pytest.approx(0.2))]


def test_the_hottest_keys_stay_so_wherever_the_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back by years, and on again, beside look-ups; and an error ends no more than one look."""
    turns = itertools.count()

    def clock() -> float:
        turn = next(turns)
        if turn == 5:
            raise RuntimeError("injected failure")
        return time.time() - (turn % 4) * 1e9

    monkeypatch.setattr(sampler, "time", SimpleNamespace(time=clock, monotonic=time.monotonic, thread_time=lambda: 0.0))
    monkeypatch.setattr(sampler, "_RETRY_S", 0.0)
    monkeypatch.setattr(sampler, "_EVERY_S", sampler._NOTED_S)
    with tierstore.open(tmp_path / "data", host_budget="64KiB", load_workers=1) as store:
        store.shared.sampler._every_s = sampler._NOTED_S
        store.load_snapshot(snapshot(tmp_path, 1))

        def share() -> float:
            store.model("m").lookup("f", np.full(16, 7))
            return dict(store.model("m").served.active.open_version.tables["t"].counts.insight.counts.hottest(1)).get(
                7, 0.0
            )

        eventually(
            lambda: share() == 1.0 and next(turns) > 40, "key 7 has all look-ups, after ten settings of the clock"
        )
