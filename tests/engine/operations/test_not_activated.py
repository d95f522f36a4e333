"""A load whose switch fails: what was built and verified is kept, not active, and can be activated."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tierstore.engine.data.budget import HostBudget
from tierstore.engine.versions.version import Version
from tierstore.errors import (
    ConfigError,
    DeltaError,
    LoadCancelled,
    SnapshotError,
    StorageError,
    TierstoreError,
    explained,
)

pytestmark = pytest.mark.usefixtures("quick_loads")

ROWS = {"user": 20, "item": 30}


def refuse_memory(patch: pytest.MonkeyPatch) -> None:
    def admit(self, *args):
        raise ConfigError("cannot reserve 99 bytes for table item: no memory; lower host_budget")

    patch.setattr(HostBudget, "admit", admit)


def fail_while_warming(patch: pytest.MonkeyPatch) -> None:
    def warm(self, like, progress):
        raise StorageError("injected failure")

    patch.setattr(Version, "warm", warm)


def fail_with_a_defect(patch: pytest.MonkeyPatch) -> None:
    def warm(self, like, progress):
        raise MemoryError

    patch.setattr(Version, "warm", warm)


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("fault", [refuse_memory, fail_while_warming, fail_with_a_defect])
def test_it_is_kept_and_can_be_activated(open_store, tmp_path, monkeypatch, fault: Callable[..., None], first: bool):
    store = open_store()
    if not first:
        store.load_snapshot(scenes.write_snapshot(tmp_path, 1, stamp=1, rows=ROWS))
    source = scenes.write_snapshot(tmp_path, 2, stamp=2, rows=ROWS)
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises((TierstoreError, MemoryError)) as failed:
            store.load_snapshot(source)
    assert "version 2 of 'ctr' is loaded all the same, and kept; it is not active" in explained(failed.value)
    ctr = store.model("ctr")
    assert (ctr.active_version, ctr.versions) == (None if first else 1, [2] if first else [1, 2])
    store.close()
    store = open_store()
    store.activate("ctr", 2)
    assert store.model("ctr").lookup("item_id", [7])[0, 0] == scenes.vector("item", 2, 7)[0]
    assert store.verify().ok


def test_a_load_that_is_cancelled_while_it_switches_is_kept(open_store, tmp_path):
    store, cancelled = open_store(), threading.Event()

    def note(step):
        if step.phase == "warm":
            cancelled.set()

    with pytest.raises(LoadCancelled, match="cancelled"):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 1, rows=ROWS), progress=note, cancelled=cancelled)
    assert store.model("ctr").versions == [1]
    assert store.model("ctr").active_version is None


def test_a_load_that_is_cancelled_while_it_builds_leaves_nothing(open_store, tmp_path):
    store, cancelled = open_store(), threading.Event()
    with pytest.raises(LoadCancelled, match="cancelled"):
        store.load_snapshot(
            scenes.write_snapshot(tmp_path, 1, rows=ROWS), progress=lambda _: cancelled.set(), cancelled=cancelled
        )
    assert store.models() == []


def test_a_snapshot_that_does_not_fit_the_log_is_kept_and_can_be_forced(open_store, tmp_path):
    """Its rows are right; what deltas bring does not fit them."""
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, rows=ROWS))
    store.apply_delta(scenes.delta(1, {"item": ([3], np.ones((1, 8), np.float32))}))
    where = tmp_path / "narrow"
    with tierstore.SnapshotWriter(where, model="ctr", version=2, delta_seq=0) as writer:
        writer.table("item", dim=2).write(np.arange(5), np.ones((5, 2), np.float32))
        writer.feature("item_id", table="item")
    with pytest.raises(DeltaError):
        store.load_snapshot(where)
    assert store.model("ctr").active_version == 1
    assert store.model("ctr").versions == [1, 2]
    store.activate("ctr", 2, force=True)
    assert store.model("ctr").lookup("item_id", [3]).shape == (1, 2)


def test_a_snapshot_whose_own_request_fails_is_refused_whole(open_store, tmp_path):
    """It can never serve: the next try, mended, comes under the same number."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    from tests.predict import onnx_models

    store = open_store()
    dense = onnx_models.linear({"user_id": np.ones(4)})
    bad = scenes.write_snapshot(tmp_path / "bad", 1, rows=ROWS, dense=dense, requests=[{"user_id": np.zeros((2, 2))}])
    with pytest.raises(SnapshotError):
        store.load_snapshot(bad)
    assert store.models() == []
    store.load_snapshot(scenes.write_snapshot(tmp_path / "good", 1, rows=ROWS, dense=dense))
