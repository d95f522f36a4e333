"""Deltas: ordered, exactly once, durable, whole, and never undone by a promotion."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.test_store import folded
from tierstore.engine.data.overlay import OverlayTable
from tierstore.engine.deltas import incoming
from tierstore.engine.versions.version import Version
from tierstore.errors import Conflict, DeltaError, NotReady, Overloaded, SequenceGap, SnapshotError, TooLarge
from tierstore.formats.delta.reader import Undecoded
from tierstore.kernels import overlay_index
from tierstore.tiers.background import is_background
from tierstore.types import KeyType, StorageDtype, TableSpec


def first(store, feature: str, key: int) -> float:
    return float(store.model("ctr").lookup(feature, [key])[0, 0])


def test_a_delta_is_seen_at_once_folded_and_after_reopening(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    assert first(store, "item_id", 2000) == 0  # now cached as absent
    result = store.apply_delta(
        scenes.delta(1, {"item": ([1, 2000], scenes.vectors("item", 1, [1, 2000]))}, {"user": [7]})
    )
    assert (result.model, result.seq, result.applied) == ("ctr", 1, True)

    def check(store) -> None:
        for _ in range(2):
            rows, found = store.model("ctr").lookup("item_id", [1, 2000, 2], return_found=True)
            assert found.all()
            np.testing.assert_array_equal(rows[:2], scenes.vectors("item", 1, [1, 2000]))
            np.testing.assert_array_equal(rows[2:], scenes.vectors("item", 0, [2]))
            rows, found = store.model("ctr").lookup("user_id", [7, 8], return_found=True)
            assert found.tolist() == [False, True]
            assert not rows[0].any()

    check(store)
    assert store.status()["models"]["ctr"]["overlays"] == 1
    store.close()
    again = open_store()
    check(again)
    assert again.status()["models"]["ctr"]["overlays"] == 0
    again.apply_delta(scenes.stamped(2, {"item": [3]}))
    folded(again)
    check(again)
    assert again.status()["models"]["ctr"]["folded_watermark"] == 2


@pytest.mark.parametrize("large", [True, False])
def test_a_large_delta_and_a_fold_are_worked_on_at_a_low_priority(store, tmp_path, monkeypatch, large):
    """So that look-ups get the processor at once; a small delta is not worth a thread."""
    seen: list[tuple[str, bool]] = []

    def noting(owner: object, name: str) -> None:
        wrapped = getattr(owner, name)

        def noted(*args: object, **options: object) -> object:
            seen.append((name, is_background()))
            return wrapped(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    store.load_snapshot(scenes.write_snapshot(tmp_path))
    delta = scenes.stamped(1, {"item": [1]})
    monkeypatch.setattr(incoming, "LARGE_BYTES", len(delta) + (not large))
    for owner, name in ((Undecoded, "decode"), (Version, "encode"), (Version, "fold")):
        noting(owner, name)
    assert store.apply_delta(delta).applied
    folded(store)
    assert seen == [("decode", large), ("encode", large), ("fold", True)]
    assert not is_background()


def test_order_duplicates_gaps_and_conflicts(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path, delta_seq=10))
    with pytest.raises(SequenceGap) as gap:
        store.apply_delta(scenes.stamped(12, {"item": [1]}))
    assert gap.value.expected_seq == 11
    eleven = scenes.stamped(11, {"item": [1]})
    assert store.apply_delta(eleven).applied
    assert not store.apply_delta(eleven).applied
    assert not store.apply_delta(scenes.stamped(10, {"item": [1]})).applied  # in the snapshot
    with pytest.raises(Conflict, match="other content"):
        store.apply_delta(scenes.stamped(11, {"item": [2]}))
    assert first(store, "item_id", 2) == scenes.vector("item", 0, 2)[0]


def test_a_delta_of_another_key_type_says_where_the_type_is_named(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    delta = tierstore.DeltaWriter(io.BytesIO(), model="ctr", seq=1)
    delta.upsert("item", [1 << 63], np.ones((1, 8), np.float32))
    with pytest.raises(DeltaError, match="int64 keys, the delta brings uint64; `DeltaWriter` takes key='int64'"):
        store.apply_delta(delta.to_bytes())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"upserts": {"nope": ([1], np.ones((1, 8), np.float32))}}, "nope"),
        ({"upserts": {"item": ([1], np.ones((1, 9), np.float32))}}, "8 numbers"),
        ({"upserts": {"item": ([1], np.full((1, 8), 1e6, np.float32))}}, "key 1"),
    ],
)
def test_a_bad_delta_changes_nothing(store, tmp_path, change, words):
    store.load_snapshot(scenes.write_snapshot(tmp_path, dtype="float16"))
    with pytest.raises(DeltaError, match=words):
        store.apply_delta(scenes.delta(1, {"user": ([1], scenes.vectors("user", 1, [1])), **change["upserts"]}))
    assert first(store, "user_id", 1) == scenes.vector("user", 0, 1)[0]
    assert store.status()["models"]["ctr"]["log"]["entries"] == 0
    assert store.apply_delta(scenes.stamped(1, {"user": [1]})).applied
    with pytest.raises(DeltaError):
        store.apply_delta(b"not arrow")
    with pytest.raises(DeltaError, match=r"missing\.arrow"):
        store.apply_delta(tmp_path / "missing.arrow")
    with pytest.raises(DeltaError, match="other"):
        store.apply_delta(scenes.stamped(2, {"user": [1]}), model="other")


def test_a_delta_for_another_version_is_passed_over_and_kept_for_it(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    store.apply_delta(scenes.stamped(1, {"item": [1]}, base_version=2))
    store.apply_delta(scenes.stamped(2, {"item": [2]}, base_version=1))
    assert first(store, "item_id", 1) == scenes.vector("item", 0, 1)[0]
    assert first(store, "item_id", 2) == scenes.vector("item", 2, 2)[0]
    assert store.status()["models"]["ctr"]["watermark"] == 2
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2))
    assert first(store, "item_id", 1) == scenes.vector("item", 1, 1)[0]
    assert first(store, "item_id", 2) == scenes.vector("item", 0, 2)[0]
    with pytest.raises(DeltaError, match="nope"):  # refused now, not when version 1 is rolled back to
        store.apply_delta(scenes.delta(3, {"nope": ([1], np.ones((1, 8), np.float32))}, base_version=1))


def test_a_fresh_snapshot_and_a_rollback_are_caught_up(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    for seq in range(1, 21):
        store.apply_delta(scenes.stamped(seq, {"item": [seq], "user": [seq]}))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=10, stamp=15))
    assert first(store, "item_id", 5) == scenes.vector("item", 15, 5)[0]
    assert first(store, "item_id", 11) == scenes.vector("item", 11, 11)[0]
    store.apply_delta(scenes.stamped(21, {"item": [21]}))
    assert store.rollback("ctr") == 1
    for key in (5, 11, 20, 21):
        assert first(store, "item_id", key) == scenes.vector("item", key, key)[0]
    assert store.status()["models"]["ctr"]["watermark"] == 21


def test_a_snapshot_beyond_the_log_restarts_it_and_makes_older_versions_stale(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1))
    store.apply_delta(scenes.stamped(1, {"item": [1]}))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=100))
    with pytest.raises(SequenceGap) as gap:
        store.apply_delta(scenes.stamped(102, {"item": [1]}))
    assert gap.value.expected_seq == 101
    assert not store.apply_delta(scenes.stamped(2, {"item": [1]})).applied  # the snapshot holds it
    store.apply_delta(scenes.stamped(101, {"item": [3]}))
    states = {entry["version"]: entry["state"] for entry in store.status()["models"]["ctr"]["versions"]}
    assert states == {1: "stale", 2: "active"}
    with pytest.raises(Conflict, match="stale"):
        store.rollback("ctr")
    with pytest.raises(SnapshotError, match="delta_seq"):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 3, delta_seq=50))
    assert store.rollback("ctr", force=True) == 1
    assert first(store, "item_id", 3) == scenes.vector("item", 101, 3)[0]
    store.close()
    again = open_store()
    assert again.model("ctr").active_version == 1
    assert again.apply_delta(scenes.stamped(102, {"item": [4]})).applied


def test_no_delta_without_an_active_version(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path), activate=False)
    with pytest.raises(NotReady, match="activate"):
        store.apply_delta(scenes.stamped(1, {"item": [1]}))


def test_a_request_under_way_sees_none_of_a_later_delta(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    with ctr.view() as old:
        before = old.lookup("item_id", [1])
        for seq in range(1, 6):
            store.apply_delta(scenes.stamped(seq, {"item": [1], "user": [1]}))
        with ctr.view() as new:
            assert new.lookup("item_id", [1])[0, 0] == scenes.vector("item", 5, 1)[0]
            assert new.overlays  # not folded, because `old` is still read
        np.testing.assert_array_equal(old.lookup("item_id", [1]), before)
        np.testing.assert_array_equal(old.lookup("user_id", [1]), scenes.vectors("user", 0, [1]))
    folded(store)
    assert first(store, "item_id", 1) == scenes.vector("item", 5, 1)[0]


def test_a_slow_miss_never_puts_its_old_row_over_a_newer_delta(store, tmp_path):
    """The race, by construction: a row is read from disk, a delta replaces and folds it, then the promotion comes."""
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    with ctr.view() as view:
        table = view.open_version.tables["item"]
        key = np.array([900])
        rows, state = np.empty((1, table.spec.row_bytes), np.uint8), np.zeros(1, np.uint8)
        table.store.get(table.table_id, key, rows, state)
        seq = view.seq
    absent = np.array([5000])
    store.apply_delta(scenes.stamped(1, {"item": [900, 5000]}))
    folded(store)
    assert table.host.insert(key, rows, seq) == 0
    assert table.host.insert_absent(absent, seq) == 0
    for _ in range(2):
        np.testing.assert_array_equal(ctr.lookup("item_id", [900, 5000]), scenes.vectors("item", 1, [900, 5000]))


def test_a_promotion_before_the_fold_is_brought_up_to_date_by_it(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    store.apply_delta(scenes.stamped(1, {"item": [900]}))
    with ctr.view() as view:
        version = view.open_version
        table = version.tables["item"]
        rows, state = np.empty((1, table.spec.row_bytes), np.uint8), np.zeros(1, np.uint8)
        table.store.get(table.table_id, np.array([900]), rows, state)
        assert table.host.insert(np.array([900]), rows, view.seq) == 1  # the old row, resident beneath the overlay
    assert first(store, "item_id", 900) == scenes.vector("item", 1, 900)[0]
    version.fold(view.overlays[-1])
    out, state = np.empty((1, 8), np.float32), np.zeros(1, np.uint8)
    table.host.lookup(np.array([900]), out, state)
    np.testing.assert_array_equal(out, scenes.vectors("item", 1, [900]))


def test_overlay_bytes_are_a_bound(open_store, tmp_path):
    store = open_store(overlay_budget="64KiB", fold_grace_s=60)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    applied = 0
    with pytest.raises(Overloaded):  # noqa: PT012
        for seq in range(1, 100):
            keys = range(seq * 100, seq * 100 + 100)
            store.apply_delta(scenes.stamped(seq, {"item": keys}))
            applied = seq
    assert applied > 2
    assert store.status()["overlay_budget"]["used"] <= 64 << 10
    with pytest.raises(TooLarge):
        store.apply_delta(scenes.stamped(applied + 1, {"item": range(5000)}))
    assert first(store, "item_id", applied * 100) == scenes.vector("item", applied, applied * 100)[0]


def test_many_small_deltas_stand_as_few_overlays(open_store, tmp_path):
    store = open_store(fold_grace_s=60)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in range(1, 129):
        store.apply_delta(scenes.stamped(seq, {"item": range(seq * 10, seq * 10 + 10)}))
    assert store.status()["models"]["ctr"]["overlays"] <= 8
    np.testing.assert_array_equal(
        store.model("ctr").lookup("item_id", [10, 655, 1289]),
        [scenes.vector("item", k // 10, k) for k in (10, 655, 1289)],
    )


def test_a_new_dense_part_is_kept_with_its_rows(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    dense = scenes.some_dense()
    store.apply_delta(scenes.delta(1, {"item": ([1], scenes.vectors("item", 1, [1]))}, dense=dense))
    folded(store)
    assert (tmp_path / "data/models/ctr/1/dense.onnx").read_bytes() == dense
    with store.model("ctr").view() as view:
        assert view.has_dense


def test_the_log_is_pruned_below_every_watermark_after_its_retention(open_store, tmp_path):
    store = open_store(log_retention_s=0)
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    for seq in range(1, 11):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    folded(store)
    scenes.housekeep(store)
    assert store.status()["models"]["ctr"]["log"] == {"start": 10, "last": 10, "entries": 0}
    assert not list(Path(tmp_path, "data/models/ctr/log").glob("*.arrow"))
    store.close()
    again = open_store()
    assert not again.apply_delta(scenes.stamped(10, {"item": [10]})).applied
    assert again.apply_delta(scenes.stamped(11, {"item": [11]})).applied


@pytest.mark.thorough
def test_four_readers_see_whole_deltas_and_nothing_stale_after_an_acknowledgement(store, tmp_path):
    """A delta rewrites the same keys of both tables; a view must show one stamp everywhere, and never an old one."""
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    items, users = np.arange(0, 64), np.arange(64, 128)
    store.apply_delta(scenes.stamped(1, {"item": items, "user": users}))
    acknowledged, stop, wrong, newest = [1], threading.Event(), [], 500

    def read() -> None:
        last = 0
        while not stop.wait(0.001):  # leaves the interpreter to the writer now and then
            floor = acknowledged[0]
            with ctr.view() as view:
                stamps = {
                    *(view.lookup("item_id", items)[:, 0] - items % 64),
                    *(view.lookup("user_id", users)[:, 0] - users % 64),
                }
                seq = view.seq
            if len(stamps) != 1 or seq < floor or seq < last or stamps != {(seq % 16) * 64.0}:
                wrong.append((stamps, seq, floor, last))
                return
            last = seq

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for seq in range(2, newest + 1):
        store.apply_delta(scenes.stamped(seq, {"item": items, "user": users}))
        acknowledged[0] = seq
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    folded(store)
    assert first(store, "item_id", 3) == scenes.vector("item", newest, 3)[0]


@pytest.mark.parametrize("keys", [1, 1000, 65_537])
def test_the_bytes_of_an_overlay_are_those_that_it_takes(keys):
    spec = TableSpec("item", KeyType.INT64, 8, StorageDtype.FLOAT16)
    table = OverlayTable(spec, np.arange(keys), np.zeros((keys, 16), np.uint8), np.zeros(keys, np.bool_))
    index = overlay_index.build(table.keys)
    parts = (table.keys, index, table.rows, table.deleted)
    filter_bytes = 8 * max(1, len(index) // 8)
    assert table.nbytes == sum(part.nbytes for part in parts) + filter_bytes
