"""Dense parts that do not end or grow without measure are refused before they serve; those that do so later are ended."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.predict import onnx_models as om
from tierstore.errors import DeltaError, LoadCancelled, Overloaded, RunLimit, SnapshotError, TierstoreError
from tierstore.predict import limits

from . import scenes

pytestmark = pytest.mark.usefixtures("quick_loads")

ENDLESS = {"user_id": np.array([1])}
GOOD = om.linear({"user_id": np.ones(4)})
BAD = [(om.looping(), "longer than the 0.5 s"), (om.swelling(800_000_000), "no memory")]


def limited(open_store, **settings):
    return open_store(**{"dense_timeout_s": 0.5, "dense_memory": "64MiB"} | settings)


@pytest.mark.parametrize(("model", "reason"), BAD)
def test_a_snapshot_with_such_a_graph_is_refused(open_store, tmp_path, model, reason):
    store = limited(open_store)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=GOOD))
    with pytest.raises(SnapshotError, match=f"within its limits: .*{reason}"):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 2, dense=model))
    assert store.model("ctr").active_version == 1


@pytest.mark.parametrize(("model", "reason"), BAD)
def test_a_delta_with_such_a_graph_is_refused(open_store, tmp_path, model, reason):
    store = limited(open_store)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=GOOD))
    with pytest.raises(DeltaError, match=f"within its limits: .*{reason}"):
        store.apply_delta(scenes.delta(1, dense=model))
    assert store.apply_delta(scenes.delta(1, dense=GOOD)).applied


def test_a_graph_that_explodes_is_refused_and_holds_nobody_up(open_store, tmp_path):
    """40 local functions, each calling the one before twice: ONNX Runtime would never be done with it."""
    store = limited(open_store)
    with pytest.raises(SnapshotError, match="nodes, with each call of a local function replaced"):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=om.laughing(40)))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, dense=GOOD))
    with pytest.raises(DeltaError, match="nodes, with each call of a local function replaced"):
        store.apply_delta(scenes.delta(1, dense=om.laughing(40)))
    assert store.apply_delta(scenes.delta(1, dense=GOOD)).applied


class CancelledWhileItWaits(threading.Event):
    """Set once it has been looked at a few times: then the load waits for its session."""

    looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks > 4


def test_a_load_that_waits_for_another_ones_session_can_be_cancelled(open_store, tmp_path):
    store = limited(open_store)
    snapshot = scenes.write_snapshot(tmp_path, 1, dense=GOOD)
    with limits._creating, pytest.raises(LoadCancelled):
        store.load_snapshot(snapshot, cancelled=CancelledWhileItWaits())


def rows_of(value: float) -> bytes:
    return scenes.delta(1, {"user": ([1], np.full((1, scenes.DIM["user"]), value, np.float32))})


def test_a_run_that_proves_endless_later_is_ended_and_the_rows_are_served(open_store, tmp_path):
    store = limited(open_store)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=om.looping(always=False)))
    store.apply_delta(rows_of(99.0))
    with pytest.raises(RunLimit):
        store.model("ctr").predict(ENDLESS)
    assert store.model("ctr").lookup("user_id", [1])[0, 0] == 99
    assert store.model("ctr").predict({"user_id": np.array([10**9])}).shape == (1, 4)


def test_a_close_ends_what_runs(open_store, tmp_path):
    store = limited(open_store, dense_timeout_s=3600)
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=om.looping(always=False)))
    store.apply_delta(rows_of(99.0))
    errors: list[TierstoreError] = []

    def predict() -> None:
        try:
            store.model("ctr").predict(ENDLESS)
        except TierstoreError as error:
            errors.append(error)

    thread = threading.Thread(target=predict)
    thread.start()
    scenes.eventually(lambda: store.shared.dense.limits._running, "the run")
    began_s = time.monotonic()
    store.close()
    thread.join(60)
    assert time.monotonic() - began_s < 60
    assert [type(error) for error in errors] == [RunLimit]


def test_memory_that_a_request_asks_for_is_bounded(open_store, tmp_path):
    inputs: om.Ports = {"user_id": (om.FLOAT, ["batch", 4]), "size": (om.INT64, [1])}
    nodes = [
        om.node("ReduceSum", "user_id", "sum", keepdims=0),
        om.node("Expand", "sum size", "large"),
        om.node("ReduceMax", "large", "score", keepdims=1),
    ]
    store = limited(open_store)
    model = om.build(nodes, inputs, {"score": (om.FLOAT, [1])})
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=model))
    with pytest.raises(Overloaded, match="no memory"):
        store.model("ctr").predict({"user_id": [1], "size": np.array([800_000_000])})
    assert store.model("ctr").predict({"user_id": [1], "size": np.array([8])}).shape == (1,)
