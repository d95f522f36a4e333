"""The store through its public API, on a real RocksDB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests import int4_model
from tests.engine import scenes
from tierstore.engine.events.observer import Observer
from tierstore.errors import Closed, Conflict, InvalidInput, Locked, NotFound, NotReady, SnapshotError
from tierstore.types import Progress


def folded(store: tierstore.Store, model: str = "ctr") -> None:
    """Wait until every delta is folded."""
    publisher = store.model(model).publisher
    with publisher.changed:
        assert publisher.changed.wait_for(lambda: not publisher.current.overlays, timeout=20)


def test_every_key_answers_its_row_and_others_the_default(store, tmp_path):
    assert store.load_snapshot(scenes.write_snapshot(tmp_path, 7)) == 7
    ctr = store.model("ctr")
    keys = np.array([3, 999, 1000, -1, 3, 2**63 - 1, -(2**63)])
    for _ in range(3):  # from disk, then from memory
        rows, found = ctr.lookup("item_id", keys, return_found=True)
        assert found.tolist() == [True, True, False, False, True, False, False]
        np.testing.assert_array_equal(rows[found], scenes.vectors("item", 0, [3, 999, 3]))
        assert not rows[~found].any()
    assert ctr.lookup("item_id", [], dtype="float16").shape == (0, 8)
    assert ctr.active_version == 7


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_storage_dtypes_answer_the_source_rows(store, tmp_path, dtype):
    store.load_snapshot(scenes.write_snapshot(tmp_path, dtype=dtype))
    keys = np.random.default_rng(0).integers(0, 1000, 300)
    for answer in ("float32", "float16"):
        for _ in range(2):
            rows = store.model("ctr").lookup("item_id", keys, dtype=answer)
            assert rows.dtype == answer
            np.testing.assert_allclose(rows, scenes.vectors("item", 0, keys), rtol=0.01)


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_rows_of_four_bits_are_answered_as_documented_from_every_tier(open_store, tmp_path, base):
    model, store = int4_model.Model(), open_store(base=base)
    store.load_snapshot(model.snapshot(tmp_path / "snapshot"))
    for _ in range(2):  # from disk, then from memory
        model.check(store.model("ctr"))
    with store.model("ctr").view():  # so that nothing is folded
        for seq in (1, 2, 3):
            store.apply_delta(model.delta(seq))
            model.check(store.model("ctr"))
    folded(store)
    for _ in range(2):
        model.check(store.model("ctr"))
    store.export("ctr", tmp_path / "exported")
    store.close()
    model.check(open_store(base=base).model("ctr"))
    with tierstore.open(tmp_path / "other", host_budget="4MiB", load_workers=1) as other:
        other.load_snapshot(tmp_path / "exported")
        model.check(other.model("ctr"))


def test_defaults_zeros_mean_and_list(store, tmp_path):
    listed = [float(i) for i in range(8)]
    for version, default in enumerate(("mean", "zeros"), 1):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version, default=default))
        expected = scenes.vectors("item", 0, range(1000)).mean(axis=0) if default == "mean" else np.zeros(8)
        np.testing.assert_allclose(store.model("ctr").lookup("item_id", [5000])[0], expected, rtol=1e-5)
    with tierstore.SnapshotWriter(tmp_path / "listed", model="other", version=1) as writer:
        writer.table("item", dim=8, default=listed).write(np.array([1]), np.ones((1, 8), np.float32))
        writer.feature("item_id", table="item")
    store.load_snapshot(tmp_path / "listed")
    np.testing.assert_array_equal(store.model("other").lookup("item_id", [1, 2]), [[1] * 8, listed])


def test_bags_pool_by_offsets_weights_and_padding(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    value = lambda key: float(scenes.vector("item", 0, key)[0])  # noqa: E731
    keys, offsets = [1, 2, 0, 3, 5000], [0, 3, 3]  # padding key 0 never counts; the second bag is empty; 5000 is absent
    bags, found = ctr.lookup_bags("clicked", keys, offsets, return_found=True)
    np.testing.assert_allclose(bags[:, 0], [(value(1) + value(2)) / 2, 0, value(3) / 2])
    assert found.tolist() == [True, True, False, True, False]
    weights = [1.0, 3.0, 9.0, 2.0, 2.0]
    np.testing.assert_allclose(
        ctr.lookup_bags("clicked", keys, offsets, weights=weights, combiner="sqrtn")[:, 0],
        [(value(1) + 3 * value(2)) / np.sqrt(10), 0, 2 * value(3) / np.sqrt(8)],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        ctr.lookup_bags("item_id", [4, 5], [0], combiner="sum", dtype="float16")[:, 0], [value(4) + value(5)]
    )
    with pytest.raises(InvalidInput, match="no combiner"):
        ctr.lookup_bags("item_id", [4, 5], [0])
    with pytest.raises(InvalidInput, match="first offset"):
        ctr.lookup_bags("clicked", [4, 5], [1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bags_with_keys_from_memory_and_from_disk_are_pooled_and_counted_alike(store, tmp_path, dtype):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    version = ctr.publisher.current.open_version
    version.drop_caches()
    version.attach_host(1 << 20, 1 << 20, None)
    counts = version.tables["item"].counts
    ctr.lookup("item_id", np.arange(1, 50))  # in memory from now on
    before = counts.as_dict()
    keys = np.array([1, 2, 3, 70, 0, 4, 5, 71, 5000, 6])  # 70, 71: on disk; 0: padding; 5000: nowhere
    bags, found = ctr.lookup_bags(
        "clicked", keys, np.array([0, 2, 5, 5, 8]), combiner="sum", dtype=dtype, return_found=True
    )
    rows = np.where((keys > 0) & (keys < 1000), scenes.vectors("item", 0, np.minimum(keys, 999)).T, 0).T
    expected = [rows[:2].sum(0), rows[2:5].sum(0), rows[:0].sum(0), rows[5:8].sum(0), rows[8:].sum(0)]
    np.testing.assert_allclose(bags, expected, rtol=1e-3 if dtype == "float16" else 1e-6)
    assert found.tolist() == [True] * 4 + [False] + [True] * 3 + [False, True]
    after = counts.as_dict()
    assert {tier: after[tier] - before[tier] for tier in ("host", "disk", "absent")} == {
        "host": 6,
        "disk": 2,
        "absent": 1,
    }


def test_bad_lookups_say_what_is_wrong(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr = store.model("ctr")
    for call, kind, words in [
        (lambda: ctr.lookup("nope", [1]), NotFound, "clicked, item_id, user_id"),
        (lambda: ctr.lookup("item_id", [1.5]), InvalidInput, "int64"),
        (lambda: ctr.lookup("item_id", [1], dtype="float64"), InvalidInput, "float16"),
        (lambda: ctr.lookup("item_id", [1], dtype=["float32"]), InvalidInput, "float16"),
        (lambda: ctr.lookup(["item_id"], [1]), NotFound, "clicked, item_id, user_id"),
        (lambda: ctr.lookup("item_id", [1], version=["stable"]), InvalidInput, "a version is a number, or a label"),
        (lambda: ctr.lookup("item_id", [1], out=np.empty((2, 8), np.float32)), InvalidInput, r"\(1, 8\)"),
        (lambda: ctr.lookup_bags("clicked", [1], [0], weights=[1, 2]), InvalidInput, "weights"),
        (lambda: ctr.lookup_bags("clicked", [1], [0], combiner="max"), InvalidInput, "sqrtn"),
        (
            lambda: ctr.lookup_bags("clicked", [1, 2], [0], weights=[1, np.nan]),
            InvalidInput,
            "weights: the one at 1 is",
        ),
        (
            lambda: ctr.lookup_bags("clicked", [1, 2], [0], weights=[-np.inf, 1]),
            InvalidInput,
            "weights: the one at 0 is",
        ),
        (lambda: store.model("nope"), NotFound, "ctr"),
        (lambda: ctr.view(99), NotFound, "99"),
    ]:
        with pytest.raises(kind, match=words):
            call()


def test_lookup_many_answers_from_one_view(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    rows = store.model("ctr").lookup_many({"user_id": [1, 2], "item_id": [3]})
    assert {name: of.shape for name, of in rows.items()} == {"user_id": (2, 4), "item_id": (1, 8)}


def test_lookup_many_takes_bags_beside_keys(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    ctr, bags = store.model("ctr"), ([1, 2, 3], [0, 2], [1.0, 0.5, 2.0])
    many = ctr.lookup_many({"item_id": [3], "clicked": bags}, return_found=True)
    alone = ctr.lookup_bags("clicked", *bags[:2], weights=bags[2], return_found=True)
    for left, right in zip((*many["clicked"], many["item_id"][0]), (*alone, ctr.lookup("item_id", [3])), strict=True):
        np.testing.assert_array_equal(left, right)


def test_out_is_written_and_returned(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    out = np.empty((2, 8), np.float32)
    assert store.model("ctr").lookup("item_id", [1, 2], out=out) is out
    np.testing.assert_array_equal(out, scenes.vectors("item", 0, [1, 2]))


def test_who_opens_a_store_that_is_open_is_told_where_it_is(store, tmp_path):
    with pytest.raises(Locked, match="open in this process already: use the store"):
        tierstore.open(tmp_path / "data")
    program = f"import tierstore; tierstore.open({str(tmp_path / 'data')!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert f"open in another process (pid {os.getpid()}); if that is a service, talk to it with --url" in done.stderr


def test_a_look_up_in_a_closed_store_says_that_it_is_closed(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    model = store.model("ctr")
    store.close()
    with pytest.raises(NotReady, match="the store was closed"):
        model.lookup("item_id", [1])


def test_reopening_serves_what_was_active_with_hot_keys_warm(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.model("ctr").lookup("user_id", np.arange(100, 200))
    store.close()
    with pytest.raises(Closed):
        store.model("ctr")
    again = scenes.warmed(open_store())
    np.testing.assert_array_equal(
        again.model("ctr").lookup("user_id", np.arange(100, 200)), scenes.vectors("user", 0, range(100, 200))
    )
    assert again.status()["models"]["ctr"]["tables"]["user"]["lookup_keys"]["host"] == 100


def test_a_version_is_loaded_once_and_a_failed_load_leaves_nothing(store, tmp_path):
    source = scenes.write_snapshot(tmp_path, 3)
    store.load_snapshot(source)
    with pytest.raises(Conflict, match="drop it first"):
        store.load_snapshot(source)
    bad = scenes.write_snapshot(tmp_path, 4)
    next(bad.rglob("*item*/*")).unlink()
    with pytest.raises(SnapshotError):
        store.load_snapshot(bad)
    assert store.model("ctr").versions == [3]
    assert not (tmp_path / "data/models/ctr/4").exists()
    first = scenes.write_snapshot(tmp_path, 1, model="fresh")
    next(first.rglob("*item*/*")).unlink()
    with pytest.raises(SnapshotError):
        store.load_snapshot(first)
    assert store.models() == ["ctr"]
    with pytest.raises(SnapshotError, match="other"):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 9), model="other")


def test_switch_rollback_drop_and_keep(store, tmp_path):
    for version in (1, 2, 3):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version, stamp=version), activate=version != 3)
    ctr = store.model("ctr")
    assert ctr.active_version == 2
    assert ctr.lookup("item_id", [5])[0, 0] == scenes.vector("item", 2, 5)[0]
    store.activate("ctr", 3)
    assert ctr.lookup("item_id", [5])[0, 0] == scenes.vector("item", 3, 5)[0]
    with pytest.raises(Conflict, match="active"):
        store.drop("ctr", 3)
    assert store.rollback("ctr") == 2
    assert ctr.lookup("item_id", [5])[0, 0] == scenes.vector("item", 2, 5)[0]
    store.drop("ctr", 3)
    assert 3 not in ctr.versions
    assert not (tmp_path / "data/models/ctr/3").exists()
    with pytest.raises(NotFound, match="no version 3"):
        store.activate("ctr", 3)


def test_only_as_many_older_versions_stay_as_are_kept(store, tmp_path):
    ctr = None
    for version in range(1, 5):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
        ctr = store.model("ctr")
    scenes.housekeep(store)
    assert ctr.versions == [3, 4]


def test_deactivate_stops_serving_and_keeps_the_version(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.deactivate("ctr")
    with pytest.raises(NotReady, match="no active version"):
        store.model("ctr").lookup("item_id", [1])
    store.close()
    again = open_store()
    assert again.model("ctr").active_version is None
    again.activate("ctr", 1)
    assert again.model("ctr").lookup("item_id", [1]).shape == (1, 8)


def test_progress_and_observers_are_told(store, tmp_path):
    steps: list[Progress] = []
    seen: list[tuple] = []

    class Watch(Observer):
        def delta_visible(self, model, seq, rows, freshness_s):
            seen.append((model, seq, rows, freshness_s))

        def version_switched(self, model, old, new):
            seen.append((model, old, new))

    store.observers.append(Watch())
    store.load_snapshot(scenes.write_snapshot(tmp_path), progress=steps.append)
    assert {"ingest", "verify", "switch"} <= {step.phase for step in steps}
    store.apply_delta(scenes.stamped(1, {"item": [1]}, event_time=datetime.now(UTC) - timedelta(seconds=10)))
    assert seen[0] == ("ctr", None, 1)
    assert seen[1][:3] == ("ctr", 1, 1)
    assert 10 <= seen[1][3] < 60


def test_status_carries_the_promised_figures(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.model("ctr").lookup("item_id", [1, 1, 5000, 900])
    model = store.status("ctr")["models"]["ctr"]
    assert model["active_version"] == 1
    assert model["watermark"] == 0
    assert model["versions"][0]["state"] == "active"
    assert model["versions"][0]["dense"] is None
    item = model["tables"]["item"]
    assert item["rows"] == 1000
    assert sum(item["lookup_keys"].values()) == 4
    assert item["lookup_keys"]["absent"] == 1
    assert 0 < item["tier_bytes"]["host"] <= item["tier_budget_bytes"]["host"]
    assert item["tier_bytes"]["disk"] > 0


def test_the_host_budget_is_never_exceeded_by_versions_and_models(open_store, tmp_path):
    store = open_store(host_budget="2MiB")
    rows = {"user": 5000, "item": 20000}
    budget = store.shared.host_budget
    worst = 0

    def note(step: Progress) -> None:
        nonlocal worst
        worst = max(worst, budget.used)

    for model in ("a", "b"):
        for version in (1, 2, 3):
            store.load_snapshot(scenes.write_snapshot(tmp_path, version, model=model, rows=rows), progress=note)
            assert store.model(model).lookup("item_id", [19999])[0, 0] == scenes.vector("item", 0, 19999)[0]
    assert 1 << 20 < worst <= 2 << 20
    for model in store.status()["models"].values():
        assert all(table["tier_budget_bytes"]["host"] > 0 for table in model["tables"].values())


def test_verify_reads_everything_and_names_a_damaged_log_entry(open_store, tmp_path):
    store = open_store()
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version))
    store.apply_delta(scenes.stamped(1, {"item": [1, 2000]}))
    folded(store)
    report = store.verify()
    assert report.ok, report.problems
    assert (report.versions, report.deltas) == (2, 1)
    assert report.rows == 2 * 1500 + 1
    entry = next((tmp_path / "data/models/ctr/log").glob("*.arrow"))
    entry.write_bytes(entry.read_bytes()[:-9] + b"x" * 9)
    assert any(entry.name in problem for problem in store.verify().problems)


def test_a_leftover_of_a_cut_off_load_is_removed_at_start(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    store.close()
    leftover: Path = tmp_path / "data/models/ctr/5/build"
    leftover.mkdir(parents=True)
    (leftover / "base-1.sst").write_bytes(b"half")
    assert open_store().model("ctr").versions == [1]
    assert not leftover.parent.exists()


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_a_snapshot_whose_tables_are_all_empty_is_loaded(open_store, tmp_path, base):
    tables = [{"name": name, "dim": 2, "dtype": "float32", "default": [1, 2], "rows": 0, "shards": []} for name in "ab"]
    document = {"format": 1, "model": "ctr", "version": 1, "tables": tables}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/snapshot.json").write_text(json.dumps(document))
    store = open_store(base=base)
    store.load_snapshot(tmp_path / "empty")
    rows, found = store.model("ctr").lookup("a", [1, 5], return_found=True)
    assert (rows.tolist(), found.tolist()) == ([[1, 2], [1, 2]], [False, False])
    assert store.verify().ok
