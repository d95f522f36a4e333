"""The number of rows that the status tells, beside a set of the keys that there are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine import scenes
from tierstore.engine.data.row_count import SAMPLE
from tierstore.formats import files

pytestmark = pytest.mark.usefixtures("quick_loads")

ROWS = {"user": 50, "item": 20_000}


def counted(store, table: str = "item", model: str = "ctr") -> tuple[int, bool]:
    """(rows, exact), once all deltas are folded."""

    def folded() -> bool:
        status = store.status(model)["models"][model]
        return status["folded_watermark"] == status["watermark"]

    scenes.eventually(folded, "deltas are folded")
    entry = store.status(model)["models"][model]["tables"][table]
    return entry["rows"], entry["rows_exact"]


def change(there: set[int], upserts: np.ndarray, deletes: np.ndarray) -> dict[str, object]:
    """What `scenes.delta` is to be given, noted in `there`. A key in both is deleted."""
    there |= set(upserts.tolist())
    there -= set(deletes.tolist())
    return {"upserts": {"item": (upserts, scenes.vectors("item", 1, upserts))}, "deletes": {"item": deletes}}


@pytest.mark.parametrize("base", ["sealed", "rocksdb"])
def test_small_deltas_are_counted_exactly_through_switches_and_restarts(open_store, tmp_path, base):
    store = open_store(keep_versions=9, base=base)
    for version in (1, 2):
        store.load_snapshot(scenes.write_snapshot(tmp_path, version, rows=ROWS))
    assert (counted(store), counted(store, "user")) == ((20_000, True), (50, True))
    there, rng = set(range(20_000)), np.random.default_rng(1)
    for seq in range(1, 25):
        upserts, deletes = (rng.integers(19_900, 20_100, rng.integers(0, 40)) for _ in range(2))
        store.apply_delta(scenes.delta(seq, **change(there, np.unique(upserts), np.unique(deletes))))
        assert counted(store) == (len(there), True)
        if seq == 9:
            store.rollback("ctr")
        if seq == 17:
            store.close()
            store = open_store(keep_versions=9, base=base)
    assert counted(store) == (len(there), True)
    assert counted(store, "user") == (50, True)
    store.activate("ctr", 2)
    assert counted(store) == (len(there), True)


def test_large_deltas_are_estimated_and_say_so_until_all_rows_are_counted(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=ROWS))
    there, rng = set(range(20_000)), np.random.default_rng(2)
    for seq in range(1, 5):
        upserts = rng.choice(40_000, 8000, replace=False)
        deletes = rng.choice(40_000, 3000, replace=False)
        store.apply_delta(scenes.delta(seq, **change(there, np.sort(upserts), np.sort(deletes))))
        rows, exact = counted(store)
        assert not exact
        # the error of a share of 512 drawn is 0.022 at most, of each of the two; five times that
        assert abs(rows - len(there)) < 5 * 0.022 * (8000 + 3000) * np.sqrt(seq)
    assert rows != 20_000
    assert store.verify().ok
    assert counted(store) == (len(there), True)
    store.apply_delta(scenes.delta(5, **change(there, np.arange(50_000, 50_000 + SAMPLE), np.empty(0, np.int64))))
    assert counted(store) == (len(there), True)
    store.close()
    store = open_store()
    assert counted(store) == (len(there), True)
    store.apply_delta(scenes.delta(6, **change(there, np.arange(60_000, 60_001 + SAMPLE), np.empty(0, np.int64))))
    assert counted(store) == (len(there), False), "all of those that are asked for are new"
    store.close()
    assert counted(open_store()) == (len(there), False)


def test_a_fold_that_fails_after_the_disk_has_it_is_counted_once(open_store, tmp_path, monkeypatch):
    store = open_store()
    dense = scenes.some_dense()
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=ROWS, dense=dense))
    rename, failures = files.rename, [2]

    def failing(source, target):
        if target.name == "dense.onnx" and failures[0]:
            failures[0] -= 1
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(files, "rename", failing)
    keys = np.arange(19_990, 20_010)
    store.apply_delta(scenes.delta(1, {"item": (keys, scenes.vectors("item", 1, keys))}, dense=dense))
    assert counted(store) == (20_010, True)
    assert failures == [0]


def test_counts_of_a_release_that_did_not_record_them_are_estimates(open_store, tmp_path, monkeypatch):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, rows=ROWS))
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.engine.data.row_count.record", lambda watermark, counts: {})
        store.apply_delta(scenes.stamped(1, {"item": [30_000]}))
        counted(store)
    store.close()
    store = open_store()
    assert counted(store) == (20_000, False)
    store.verify()
    assert counted(store) == (20_001, True)
