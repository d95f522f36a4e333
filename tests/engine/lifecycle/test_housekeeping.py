"""Background work of a model: each thing by itself, with a problem that stays until it is solved."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.engine.scenes import eventually
from tests.engine.test_store import folded
from tierstore.engine.versions.version import Version
from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.formats.files import FileSystem
from tierstore.tiers.disk import patches

pytestmark = pytest.mark.usefixtures("quick_loads")


def loaded(store: tierstore.Store, tmp_path, *versions: int) -> None:
    for version in versions:
        where = scenes.write_snapshot(tmp_path, version, stamp=version, rows={"user": 20, "item": 30})
        store.load_snapshot(where)


def test_a_delta_file_that_somebody_removed_does_not_stop_pruning(open_store, tmp_path):
    store = open_store(log_retention_s=0)
    loaded(store, tmp_path, 1)
    for seq in range(1, 6):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
    folded(store)
    log = tmp_path / "data/models/ctr/log"
    next(log.glob("*3-*.arrow")).unlink()
    ctr = store.model("ctr")
    ctr.housekeeping.tasks.run()
    assert (ctr.problem, ctr.state.log.status()) == (None, {"start": 5, "last": 5, "entries": 0})


def test_a_fold_that_fails_keeps_no_version_from_being_dropped_and_says_so_until_it_works(
    open_store, tmp_path, monkeypatch
):
    store = open_store(keep_versions=0)
    loaded(store, tmp_path, 1, 2)
    ctr = store.model("ctr")
    fold = Version.fold

    def failing(self, overlay):
        if self.number == 2:
            raise StorageError("injected failure")
        fold(self, overlay)

    with monkeypatch.context() as patch:
        patch.setattr(Version, "fold", failing)
        store.apply_delta(scenes.stamped(1, {"item": [1]}))
        eventually(lambda: ctr.problem == "deltas are not folded: injected failure", "it is a problem")
        loaded(store, tmp_path, 3)
        assert ctr.state.retiring.wait_closed(2, 30)
        eventually(lambda: ctr.versions == [3], "those before are dropped")
    store.apply_delta(scenes.stamped(2, {"item": [2]}))
    folded(store)
    eventually(lambda: ctr.problem is None, "it is none any more")


def test_a_chore_that_fails_is_named_and_stays_a_problem_while_folds_go_on(open_store, tmp_path, monkeypatch):
    store = open_store(log_retention_s=0)
    loaded(store, tmp_path, 1)
    ctr = store.model("ctr")

    def failing(*args, **options):
        raise StorageError("injected failure")

    with monkeypatch.context() as patch:
        patch.setattr(ctr.state.log, "ages", failing)
        ctr.housekeeping.tasks.run()
        for seq in (1, 2):
            store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
            folded(store)
            assert ctr.problem == "the delta log is not pruned: injected failure"
    ctr.housekeeping.tasks.run()
    assert ctr.problem is None


def test_a_merge_of_changed_rows_that_waits_for_deltas_publishes_nothing_until_it_is_done(
    open_store, tmp_path, monkeypatch
):
    """A publication wakes the thread that folds, which would try again at once, for as long as the view is held."""
    store = open_store(overlay_budget="256KiB")
    loaded(store, tmp_path, 1)
    ctr = store.model("ctr")
    for seq in (1, 2):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
        folded(store)
    folder, rows = ctr.housekeeping._folder, ctr.publisher.current.open_version.rows
    with ctr.view():
        store.apply_delta(scenes.stamped(3, {"item": range(3000)}))
        assert folder.pressed
        monkeypatch.setattr(patches, "LIKE_SIZED", 2)
        assert rows.needs_tidying()
        before = ctr.publisher.served
        for _ in range(3):
            folder.tidy(lambda: False)
        assert ctr.publisher.served is before
        assert rows.needs_tidying()
    folded(store)
    eventually(lambda: not rows.needs_tidying(), "they are merged")


@pytest.mark.parametrize("by", ["hand", "itself"])
def test_a_version_that_is_being_removed_holds_up_no_switch(open_store, tmp_path, by):
    store = open_store(keep_versions=9 if by == "hand" else 1)
    loaded(store, tmp_path, 1, 2, 3)
    ctr = store.model("ctr")
    if by == "hand":
        assert ctr.state.retiring.wait_closed(1, 30)
    removing, go_on = threading.Event(), threading.Event()

    class Slow(FileSystem):
        def rmtree(self, path):
            if path.name.startswith(".trash-1-"):
                removing.set()
                assert go_on.wait(30)
            super().rmtree(path)

    with files.use(Slow()):
        work = (lambda: store.drop("ctr", 1)) if by == "hand" else ctr.housekeeping.tasks.run
        thread = threading.Thread(target=work)
        thread.start()
        if by == "hand" or 1 in ctr.versions:
            assert removing.wait(30)
        try:
            assert store.rollback("ctr") == 2
            assert 1 not in ctr.versions
        finally:
            go_on.set()
            thread.join()
    assert not any(path.name.startswith(".trash-1-") for path in (tmp_path / "data/models/ctr").iterdir())


def test_a_kept_version_that_a_delta_does_not_fit_is_a_problem_until_it_is_dropped(open_store, tmp_path, monkeypatch):
    """The log is kept for it, and grows."""
    monkeypatch.setattr("tierstore.engine.lifecycle.tasks.KEPT_LAG", 0)
    store = open_store(log_retention_s=0)
    loaded(store, tmp_path, 1)
    with tierstore.SnapshotWriter(tmp_path / "wide", model="ctr", version=2) as writer:
        writer.table("item", dim=3).write([1], [[1, 1, 1]])
        writer.feature("item_id", table="item")
    store.load_snapshot(tmp_path / "wide")
    for seq in (1, 2):
        store.apply_delta(scenes.delta(seq, {"item": ([1], np.full((1, 3), seq, np.float32))}))
    folded(store)
    ctr = store.model("ctr")
    scenes.housekeep(store)
    assert ctr.log.status()["entries"] == 2
    assert "version 1: delta 1: table 'item' has vectors of 8 numbers, the delta brings 3" in ctr.problem
    assert "the log is kept for it from delta 1 on: drop it, or activate it with force" in ctr.problem
    assert [one["kind"] for one in store.status()["problems"]] == ["background_work"]
    store.drop("ctr", 1)
    scenes.housekeep(store)
    assert (ctr.problem, ctr.log.status()["entries"]) == (None, 0)
