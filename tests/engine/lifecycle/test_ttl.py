"""Rows with a ttl in what serves: they expire where nothing has written them, once and for good, and nothing else does."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstore
from tests.counts import few_or_many
from tests.engine import scenes
from tests.engine.test_store import folded
from tests.engine.ttl_scenes import (
    DAY,
    NOW,
    ROWS,
    OpenStore,
    check,
    delta,
    found,
    rows_of,
    user,
    write,
)
from tierstore.engine.lifecycle import expiry
from tierstore.engine.operations.sampled_digests import sampled_digests
from tierstore.formats.row_times import TIME_BYTES, from_rows
from tierstore.ingest import bulkload
from tierstore.types import Tier

pytestmark = pytest.mark.usefixtures("quick_loads")


# --- what expires, and what does not


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_rows_that_nothing_wrote_expire_and_stay_so(
    open_store: OpenStore, tmp_path: Path, base: str, days_later: Any
) -> None:
    store = open_store(base=base)
    store.load_snapshot(write(tmp_path))
    assert found(store) == set(range(ROWS))  # they are in memory from here on
    check(store)
    assert found(store) == set(range(ROWS)), "20 days is the oldest"
    assert user(store)["ttl"]["expired_since"] == 0
    days_later(20)
    check(store)
    kept = set(range(201))  # the last was written 10 days before NOW
    assert found(store) == kept
    assert np.array_equal(store.model("ctr").lookup("user", np.arange(201)), rows_of(np.arange(201), 1))
    assert (user(store)["rows"], user(store)["rows_exact"], user(store)["ttl"]["expired_since"]) == (201, True, 199)
    assert store.verify().ok
    store.close()
    store = open_store(base=base)
    assert found(store) == kept
    assert (user(store)["rows"], user(store)["ttl"]["expired_since"]) == (201, 199)
    assert store.verify().ok
    days_later(40)
    check(store)
    assert (found(store), user(store)["rows"], user(store)["ttl"]["expired_since"]) == (set(), 0, 400)
    assert store.verify().ok
    assert store.model("ctr").lookup("item", [1, 2], return_found=True)[1].all()


@pytest.mark.parametrize("grace_s", [0.0, 60.0], ids=["folded", "not folded"])
def test_a_delta_lets_its_rows_live_from_its_own_time(
    open_store: OpenStore, tmp_path: Path, grace_s: float, days_later: Any
) -> None:
    store = open_store(fold_grace_s=grace_s)
    store.load_snapshot(write(tmp_path))
    store.apply_delta(delta(1, [300, 301, 399, 405], days=10))
    store.apply_delta(delta(2, [301], days=15, gone=[399, 7]))
    if not grace_s:
        folded(store)
    days_later(39)  # what was written before day 9 goes
    check(store)
    assert found(store) == {300, 301, 405}
    assert np.array_equal(store.model("ctr").lookup("user", [300, 301]), [rows_of([300], 2)[0], rows_of([301], 3)[0]])
    store.close()
    store = open_store(fold_grace_s=0.0)  # what was not folded comes from the log
    folded(store)
    assert found(store) == {300, 301, 405}
    days_later(41)
    check(store)
    assert found(store) == {301}
    store.apply_delta(delta(3, [300, 5], days=41))
    assert found(store) == {300, 301, 5}
    folded(store)
    check(store)
    assert found(store) == {300, 301, 5}
    assert user(store)["rows"] == 3
    assert store.verify().ok


def test_a_replay_of_the_log_brings_nothing_back(open_store: OpenStore, tmp_path: Path, days_later: Any) -> None:
    """Deltas that are in the version stay out of the replay, and a newer version gets none from before its seq."""
    store = open_store()
    store.load_snapshot(write(tmp_path))
    for seq in range(1, 6):
        store.apply_delta(delta(seq, [seq, 400 + seq], days=seq))
    folded(store)
    days_later(33.5)
    check(store)
    expected = {4, 5, 404, 405}
    assert found(store) == expected
    for _ in range(2):
        store.close()
        store = open_store()
        assert found(store) == expected
    store.apply_delta(delta(6, [1], days=6))
    assert found(store) == expected | {1}


def test_rows_written_by_a_delta_that_is_too_old_already_go_as_well(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path))
    store.apply_delta(delta(1, [1, 2], days=-40))
    folded(store)
    assert {1, 2} <= found(store), "the last write counts, and it is there until it is looked for"
    check(store)
    assert found(store) == set(range(ROWS)) - {1, 2}


def test_string_keys_expire_too(open_store: OpenStore, tmp_path: Path, days_later: Any) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path, key="string"))
    store.apply_delta(delta(1, [390], days=1, as_text=True))
    folded(store)
    days_later(20)
    check(store)
    assert found(store, as_text=True) == {*range(201), 390}
    assert store.verify().ok


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("delta"), st.sets(st.integers(0, 40), min_size=1, max_size=12), st.integers(-5, 5)),
        st.tuples(st.just("deleted"), st.sets(st.integers(0, 40), min_size=1, max_size=5), st.just(0)),
        st.tuples(st.just("later"), st.just(set()), st.integers(1, 20)),
        st.tuples(st.just("restart"), st.just(set()), st.just(0)),
        st.tuples(st.just("folded"), st.just(set()), st.just(0)),
        st.tuples(st.just("exported"), st.just(set()), st.just(0)),
    ),
    max_size=14,
)


@given(operations=OPERATIONS)
@settings(max_examples=few_or_many(4, 15), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_writes_searches_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, days_later: Any, operations: list[tuple[str, set[int], int]]
) -> None:
    root, days, seq, version = tmp_path_factory.mktemp("any"), 0, 0, 1
    options: dict[str, Any] = {"host_budget": "4MiB", "disk_threads": 1, "fold_grace_s": 60.0, "keep_versions": 0}
    options["ttl_most_share"] = 1
    days_later(0)
    expected = {key: -key for key in range(30)}  # the day on which it was written
    with tierstore.SnapshotWriter(root / "s", model="ctr", version=1) as snapshot:
        table = snapshot.table("user", dim=4, ttl_s="30d", time_column="seen")
        table.write(list(expected), rows_of(list(expected), 1), [NOW + day * DAY for day in expected.values()])
    store = tierstore.open(root / "data", **options)
    try:
        store.load_snapshot(root / "s")
        for what, keys, of in operations:
            if what in ("delta", "deleted"):
                seq += 1
                gone = what == "deleted"
                store.apply_delta(
                    delta(seq, [] if gone else sorted(keys), days=days + of, gone=sorted(keys) if gone else ())
                )
                expected = {key: day for key, day in expected.items() if key not in keys}
                expected |= {} if gone else dict.fromkeys(keys, days + of)
            elif what == "later":
                days += of
                days_later(days)
                with store.model("ctr").view() as view:
                    above = {key for overlay in view.table("user").overlays for key in overlay.keys.tolist()}
                check(store)
                expected = {key: day for key, day in expected.items() if day >= days - 30 or key in above}
            elif what == "restart":
                store.close()
                store = tierstore.open(root / "data", **options | {"fold_grace_s": 0.0 if of else 60.0})
            elif what == "folded":
                store.close()
                store = tierstore.open(root / "data", **options | {"fold_grace_s": 0.0})
                folded(store)
            else:
                version += 1
                store.export("ctr", root / f"s-{version}", as_version=version)
                with pytest.MonkeyPatch.context() as patch:  # a load at that time, not now
                    now = SimpleNamespace(time=lambda now=NOW + days * DAY: now, monotonic=time.monotonic)
                    patch.setattr(bulkload, "time", now)
                    store.load_snapshot(root / f"s-{version}")
                expected = {key: day for key, day in expected.items() if day >= days - 30}
            assert found(store, np.arange(45)) == set(expected), (what, keys, of)
        assert store.verify().ok
    finally:
        store.close()


def test_the_times_on_disk_are_those_of_the_last_write(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path))
    store.apply_delta(delta(1, [5, 405], days=3))
    store.apply_delta(delta(2, [5], days=-3, gone=[6]))
    folded(store)
    version = store.model("ctr").publisher.current.open_version  # type: ignore[union-attr]
    keys = np.array([4, 5, 6, 405, 406])
    rows, state = np.zeros((5, TIME_BYTES), np.uint8), np.zeros(5, np.uint8)
    version.disk.get(version.info.times_ids["user"], keys, rows, state)
    absent = [Tier.DISK, Tier.DISK, Tier.ABSENT, Tier.DISK, Tier.ABSENT]
    assert state.tolist() == absent
    assert from_rows(rows)[[0, 1, 3]].tolist() == [NOW - 4 * (DAY // 20), NOW - 3 * DAY, NOW + 3 * DAY]


# --- versions


def test_every_version_that_serves_expires_and_what_is_kept_is_as_it_was(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store(keep_versions=2)
    store.load_snapshot(write(tmp_path, 1))
    store.load_snapshot(write(tmp_path, 2))
    store.load_snapshot(write(tmp_path, 3), activate=False)
    store.canary("ctr", 3, 0.5)
    days_later(20)
    check(store)
    assert found(store, version=2) == found(store, version=3) == set(range(201))
    store.promote("ctr")
    assert found(store) == set(range(201))
    store.activate("ctr", 1)
    assert found(store) == set(range(ROWS)), "it was kept, and is as it was"
    check(store)
    assert found(store) == set(range(201))


def test_a_kept_version_that_is_caught_up_knows_the_times_of_deltas(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path, 1))
    store.load_snapshot(write(tmp_path, 2))
    store.apply_delta(delta(1, [5, 399], days=15))
    store.rollback("ctr")
    days_later(40)
    check(store)
    assert found(store) == {5, 399}


def test_a_rollback_to_a_delta_undoes_the_expiry_with_the_deltas_until_it_is_looked_for_again(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store()
    store.load_snapshot(write(tmp_path))
    store.apply_delta(delta(1, [5, 399], days=15))
    store.apply_delta(delta(2, [6, 398], days=15))
    folded(store)
    days_later(40)
    check(store)
    assert found(store) == {5, 6, 398, 399}
    store.rollback("ctr", to_seq=1)
    check(store)
    assert found(store) == {5, 399}
    assert store.verify().ok
    assert user(store)["ttl"]["expired_since"] == ROWS - 2


@pytest.mark.parametrize("restart", [False, True])
def test_rows_that_expired_in_steps_and_come_back_with_a_rollback_are_removed_again(
    open_store: OpenStore, tmp_path: Path, days_later: Any, restart: bool
) -> None:
    """No check has removed more than its share; together they are more than that."""
    store = open_store(ttl_most_share=0.5)
    store.load_snapshot(write(tmp_path))
    for seq, key in ((1, 0), (2, 1)):
        store.apply_delta(delta(seq, [key], days=20))
    folded(store)
    for days, left in ((15, 301), (20, 201), (25, 101)):
        days_later(days)
        check(store)
        assert len(found(store)) == left
    kept = found(store)
    if restart:
        store.close()
        store = open_store(ttl_most_share=0.5)
    store.rollback("ctr", to_seq=1)
    check(store)
    assert (found(store), store.status()["problems"]) == (kept, [])
    assert store.verify().ok
    days_later(300)
    check(store)
    assert found(store) == kept, "a clock that is wrong deletes nothing now either"
    assert "rows of table 'user' are older than" in store.status()["problems"][0]["text"]


def test_rows_that_come_back_with_a_rollback_go_though_others_are_too_many(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store(ttl_most_share=0.5)
    store.load_snapshot(write(tmp_path))
    store.apply_delta(delta(1, [0], days=1))
    folded(store)
    days_later(15)
    check(store)
    store.rollback("ctr", to_seq=0)
    assert found(store) == set(range(ROWS))
    days_later(300)
    check(store)
    assert found(store) == set(range(301))
    assert "301 of about 301 rows" in store.status()["problems"][0]["text"]
    days_later(15)
    check(store)
    assert (found(store), store.status()["problems"]) == (set(range(301)), [])


@pytest.mark.parametrize("fold", [True, False])
def test_an_export_has_the_times_of_its_rows(
    open_store: OpenStore, tmp_path: Path, fold: bool, days_later: Any
) -> None:
    store = open_store(fold_grace_s=0.0 if fold else 60.0)
    store.load_snapshot(write(tmp_path))
    store.apply_delta(delta(1, [300, 405], days=10, gone=[3]))
    store.apply_delta(delta(2, [405], days=12))
    if fold:
        folded(store)
    days_later(15)
    check(store)
    expected = (set(range(301)) - {3}) | {405}
    assert found(store) == expected
    store.export("ctr", tmp_path / "exported", as_version=7)
    with tierstore.open(tmp_path / "other", host_budget="4MiB", disk_threads=2, ttl_most_share=1) as other:
        other.load_snapshot(tmp_path / "exported")
        assert found(other) == expected
        days_later(41)
        check(other)
        assert found(other) == {405}
        assert other.verify().ok


def test_a_delta_counts_where_the_snapshot_has_one_time_for_all_its_rows(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1, created_at=NOW - 5 * DAY) as snapshot:
        snapshot.table("user", dim=4, ttl_s="30d").write(np.arange(20), rows_of(np.arange(20), 1))
    store = open_store()
    store.load_snapshot(tmp_path / "s")
    store.apply_delta(delta(1, [3], days=1))
    folded(store)
    days_later(26)
    check(store)
    assert found(store) == {3}


# --- when it is looked for


def test_it_is_looked_for_soon_after_a_start_and_then_every_so_often(
    open_store: OpenStore, tmp_path: Path, days_later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(ttl_check_s=1000)
    store.load_snapshot(write(tmp_path))
    seconds = [0.0]
    monkeypatch.setattr(expiry, "time", SimpleNamespace(time=lambda: NOW + 20 * DAY, monotonic=lambda: seconds[0]))
    scenes.housekeep(store)
    assert found(store) == set(range(201))
    assert user(store)["ttl"]["checked_at"] is not None
    monkeypatch.setattr(expiry, "time", SimpleNamespace(time=lambda: NOW + 40 * DAY, monotonic=lambda: seconds[0]))
    for later, left in ((500, 201), (999, 201), (1000, 0)):
        seconds[0] = later
        scenes.housekeep(store)
        assert len(found(store)) == left, later


def test_it_is_looked_for_as_often_as_the_setting_says_also_below_the_period_of_other_work(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store(ttl_check_s=0.5)
    store.load_snapshot(write(tmp_path))
    scenes.housekeep(store)
    days_later(20)
    scenes.eventually(lambda: found(store) == set(range(201)), "rows expire", timeout_s=15)


def test_it_is_not_looked_for_where_that_is_off_or_no_table_has_a_ttl(
    open_store: OpenStore, tmp_path: Path, days_later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("rows were looked for")

    monkeypatch.setattr(expiry, "old_keys", never)
    store = open_store(ttl_check_s=0)
    store.load_snapshot(write(tmp_path))
    days_later(40)
    scenes.housekeep(store)
    assert found(store) == set(range(ROWS))
    store.close()
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2))
    scenes.housekeep(store)
    assert store.model("ctr").problem is None
    tables = store.status()["models"]["ctr"]["tables"]
    assert all(table["ttl"] is None for table in tables.values())


# --- samples


@pytest.mark.parametrize("grace_s", [0.0, 60.0], ids=["folded", "not folded"])
def test_a_sample_counts_rows_as_absent_that_are_expired_by_then(
    open_store: OpenStore, tmp_path: Path, grace_s: float, days_later: Any
) -> None:
    store = open_store(fold_grace_s=grace_s)
    store.load_snapshot(write(tmp_path))
    store.apply_delta(delta(1, [399], days=20))
    store.apply_delta(delta(2, [0, 398], days=-25, gone=[1]))
    if not grace_s:
        folded(store)

    def sampled(days: float | None) -> dict[str, Any]:
        at_s = None if days is None else int(NOW + days * DAY)
        keys = {"user": [399, 398, 3, 2, 2, 1, 0, 10**6], "item": [1, 2]}
        return sampled_digests(store.model("ctr"), None, keys, 0, at_s)["tables"]  # type: ignore[no-any-return]

    assert [sampled(days)["user"]["found"] for days in (None, 0, 6, 29, 31, 51)] == [6, 6, 4, 4, 1, 0]
    assert sampled(51)["item"] == sampled(None)["item"]
    assert sampled(0)["user"] == sampled(None)["user"]
    assert (sampled(0)["user"]["ttl_s"], sampled(0)["item"]["ttl_s"]) == (30 * DAY, None)
    days_later(6)
    before = sampled(6)
    check(store)
    assert sampled(6) == before


# --- a clock that is wrong


def test_a_clock_that_is_a_year_ahead_for_one_check_deletes_nothing_and_is_a_problem(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store(ttl_most_share=0.5)
    store.load_snapshot(write(tmp_path))
    days_later(365)
    check(store)
    for _ in range(2):
        assert found(store) == set(range(ROWS))
        assert user(store)["rows"] == ROWS
        (problem,) = store.status()["problems"]
        assert problem["kind"] == "background_work"
        assert "expired rows are not removed: version 1: 400 of about 400 rows of table 'user'" in problem["text"]
        assert "set ttl_most_share to 1" in problem["text"]
        scenes.housekeep(store)
    days_later(11)  # it is set: 20 rows have expired
    scenes.housekeep(store)
    assert found(store) == set(range(381))
    assert store.status()["problems"] == []


def test_where_the_clock_is_right_the_setting_says_that_all_may_go(
    open_store: OpenStore, tmp_path: Path, days_later: Any
) -> None:
    store = open_store(ttl_most_share=0.5)
    store.load_snapshot(write(tmp_path))
    days_later(365)
    check(store)
    store.close()
    store = open_store(ttl_most_share=1)
    check(store)
    assert (found(store), store.status()["problems"]) == (set(), [])


def test_what_expires_evenly_between_two_searches_that_are_far_apart_is_deleted(
    open_store: OpenStore, tmp_path: Path, monkeypatch: Any
) -> None:
    """Of rows that come evenly and live as long as it takes to the next search, half have expired then."""
    clock = SimpleNamespace(now=float(NOW))
    clock.time = clock.monotonic = lambda: clock.now
    monkeypatch.setattr(expiry, "time", clock)
    store = open_store(ttl_most_share=0.1, ttl_check_s=35 * DAY)
    store.load_snapshot(write(tmp_path))
    scenes.housekeep(store)
    clock.now += 20 * DAY
    scenes.housekeep(store)
    assert len(found(store)) == ROWS, "no search is due"
    clock.now += 15 * DAY - 5 * DAY  # not yet
    scenes.housekeep(store)
    store.apply_delta(delta(1, range(200), days=20))
    folded(store)
    clock.now += 5 * DAY
    scenes.housekeep(store)
    assert found(store) == set(range(200)), "half of them, after 35 days, of rows that live for 30"
    assert store.status()["problems"] == []
