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
        assert rows.compaction_due()
        before = ctr.publisher.served
        for _ in range(3):
            folder.compact(lambda: False)
        assert ctr.publisher.served is before
        assert rows.compaction_due()
    folded(store)
    eventually(lambda: not rows.compaction_due(), "they are merged")


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


@pytest.fixture
def beside_wide(open_store, tmp_path, monkeypatch):
    """A store whose version 1 lacks two deltas that are for the rows of version 2 alone, which is active."""
    monkeypatch.setattr("tierstore.engine.lifecycle.tasks.KEPT_LAG", 0)
    store = open_store(log_retention_s=0)

    def load(version: int, dim: int, *, activate: bool = True) -> None:
        with tierstore.SnapshotWriter(tmp_path / str(version), model="ctr", version=version) as writer:
            writer.table("item", dim=dim).write([1], [[1] * dim])
            writer.feature("item_id", table="item")
        store.load_snapshot(tmp_path / str(version), activate=activate)

    def send() -> None:
        for seq in (1, 2):
            store.apply_delta(scenes.delta(seq, {"item": ([1], np.full((1, 3), seq, np.float32))}))
        folded(store)
        scenes.housekeep(store)

    return store, load, send


def test_a_kept_version_that_a_delta_does_not_fit_is_a_problem_until_it_is_dropped(beside_wide):
    """The log is kept for it, and grows: a rollback may go to it."""
    store, load, send = beside_wide
    load(1, 8)
    load(2, 3)
    send()
    ctr = store.model("ctr")
    assert ctr.log.status()["entries"] == 2
    assert "version 1: delta 1: table 'item' has vectors of 8 numbers, the delta brings 3" in ctr.problem
    assert "the log is kept for it from delta 1 on: drop it, or activate it with force" in ctr.problem
    assert [one["kind"] for one in store.status()["problems"]] == ["background_work"]
    store.drop("ctr", 1)
    scenes.housekeep(store)
    assert (ctr.problem, ctr.log.status()["entries"]) == (None, 0)


@pytest.mark.parametrize("how", ["withdrawn", "left by a rollback", "never served"])
def test_the_log_does_not_grow_for_a_rejected_version_that_a_delta_does_not_fit(beside_wide, how):
    store, load, send = beside_wide
    load(1, 8, activate=False) if how == "never served" else None
    load(2, 3)
    if how != "never served":
        load(3, 8, activate=how == "left by a rollback")
    if how == "left by a rollback":
        assert store.rollback("ctr") == 2
    elif how == "withdrawn":
        store.canary("ctr", 3, 0.5)
        store.withdraw("ctr")
    send()
    scenes.housekeep(store)  # it is pruned before versions are caught up
    ctr = store.model("ctr")
    assert (ctr.problem, ctr.log.status()["entries"]) == (None, 0)


@pytest.fixture
def prune(monkeypatch):
    """Have a store's log forget what nothing needs, whatever its age; returns after which delta it begins then."""

    def prune(store: tierstore.Store) -> int | None:
        with monkeypatch.context() as patch:
            patch.setattr(store.shared.placement, "log_retention_s", 0)
            scenes.housekeep(store)
        return store.model("ctr").log.start

    return prune


def test_the_log_is_not_kept_to_build_a_rejected_version_again(open_store, tmp_path, prune):
    store = open_store(keep_versions=9)
    loaded(store, tmp_path, 1)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2), activate=False)
    store.canary("ctr", 2)
    store.apply_delta(scenes.stamped(1, {"item": [1]}))
    store.rollback("ctr", to_seq=0)
    assert store.model("ctr").catalogue.is_outdated(2)
    store.apply_delta(scenes.stamped(2, {"item": [2]}))
    folded(store)
    assert prune(store) == 2


def test_the_log_reaches_back_to_what_a_rollback_would_go_to(open_store, tmp_path):
    """Whatever was rejected, and caught up, since."""
    store = open_store(log_retention_s=0, keep_versions=9)
    loaded(store, tmp_path, 1, 2, 3)
    assert store.rollback("ctr") == 2
    for seq in range(1, 6):
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
        folded(store)
        scenes.housekeep(store)
    store.drop("ctr", 3)
    scenes.housekeep(store)
    assert store.model("ctr").log.status()["start"] == 0
    assert store.rollback("ctr") == 1
    rows = store.model("ctr").lookup("item_id", [1, 5])
    assert rows.tolist() == [scenes.vector("item", seq, seq).tolist() for seq in (1, 5)]


def test_a_version_that_cannot_be_built_again_does_not_hold_the_log_for_that(open_store, tmp_path, prune):
    """It holds undone deltas, and the log does not reach back to its snapshot; by force it serves with them."""
    store = open_store(keep_versions=9)
    loaded(store, tmp_path, 1)

    def send(seq: int) -> None:
        store.apply_delta(scenes.stamped(seq, {"item": [seq]}))
        folded(store)

    send(1)
    send(2)
    assert prune(store) == 2
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=2))
    store.activate("ctr", 1)
    send(3)
    store.activate("ctr", 2)
    store.rollback("ctr", to_seq=2)
    assert store.model("ctr").catalogue.is_outdated(1)
    send(4)
    assert prune(store) == 3, "it has these"
