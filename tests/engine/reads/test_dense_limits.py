"""Dense parts that do not end or grow without measure are refused before they serve; those that do so later are ended."""

from __future__ import annotations

import subprocess
import threading
import time

import numpy as np
import pytest

from tests.engine import scenes
from tests.predict import onnx_models as om
from tierstore.errors import Closed, DeltaError, LoadCancelled, Overloaded, RunLimit, SnapshotError, TierstoreError
from tierstore.predict import making, sandbox

pytestmark = pytest.mark.usefixtures("quick_loads")

ENDLESS = {"user_id": np.array([1])}
GOOD = om.linear({"user_id": np.ones(4)})
ENDLESS_TO_MAKE = om.folding(5000, 400)  # minutes
TRY_GRAPH = sandbox.try_graph  # before `quick_loads` replaces it
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


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (om.laughing(40), "nodes, with each call of a local function replaced"),
        (om.concatenating(28), "a string of the graph is joined from"),
    ],
)
def test_a_graph_that_explodes_is_refused_and_holds_nobody_up(open_store, tmp_path, model, reason):
    """40 local functions, each calling the one before twice; a string that is joined with itself 28 times."""
    store = limited(open_store)
    with pytest.raises(SnapshotError, match=reason):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=model))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, dense=GOOD))
    with pytest.raises(DeltaError, match=reason):
        store.apply_delta(scenes.delta(1, dense=model))
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
    with making._creating, pytest.raises(LoadCancelled):
        store.load_snapshot(snapshot, cancelled=CancelledWhileItWaits())


@pytest.fixture
def tried(monkeypatch) -> list[subprocess.Popen[bytes]]:
    """Graphs are tried in processes of their own: these."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(*files: int) -> subprocess.Popen[bytes]:
        processes.append(real_start(*files))
        return processes[-1]

    real_start = sandbox._start
    monkeypatch.setattr(sandbox, "try_graph", TRY_GRAPH)
    monkeypatch.setattr(sandbox, "_start", start)
    return processes


def test_new_weights_and_starts_cost_no_process(open_store, tmp_path, tried):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=om.linear({"user_id": np.ones(4)})))
    assert len(tried) == 1
    for start, weight in enumerate((2.0, 3.0), 1):
        store.apply_delta(scenes.delta(start, dense=om.linear({"user_id": np.full(4, weight)})))
        assert store.model("ctr").predict({"user_id": np.array([1])}).shape == (1, 1)
        store.close()
        store = open_store()
    store.apply_delta(scenes.delta(3, dense=GOOD))
    assert len(tried) == 1


def test_a_load_whose_graph_is_never_ready_can_be_cancelled(open_store, tmp_path, tried):
    class Cancelled(threading.Event):
        def is_set(self) -> bool:
            return bool(tried)

    store = open_store()
    with pytest.raises(LoadCancelled):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 1, dense=ENDLESS_TO_MAKE), cancelled=Cancelled())


def test_deltas_whose_graphs_are_never_ready_hold_no_other_model_up_and_a_close_ends_them(open_store, tmp_path, tried):
    store = open_store()
    for model in ("ctr", "cvr"):
        store.load_snapshot(scenes.write_snapshot(tmp_path, 1, model=model, dense=GOOD))
    errors: list[TierstoreError] = []

    def apply(weight: float) -> None:
        try:
            store.apply_delta(scenes.delta(1, rows(weight), dense=ENDLESS_TO_MAKE))
        except TierstoreError as error:
            errors.append(error)

    before = len(tried)
    threads = [threading.Thread(target=apply, args=[float(number)]) for number in range(4)]
    for thread in threads:
        thread.start()
    scenes.eventually(
        lambda: len(errors) == 4 - sandbox.AT_ONCE and len(tried) == before + sandbox.AT_ONCE, "two trials"
    )
    assert store.apply_delta(scenes.delta(1, model="cvr", dense=om.linear({"user_id": np.zeros(4)}))).applied
    store.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in errors] == [Overloaded] * 2 + [Closed] * 2


def rows(value: float) -> dict[str, object]:
    return {"user": ([1], np.full((1, scenes.DIM["user"]), value, np.float32))}


def rows_of(value: float) -> bytes:
    return scenes.delta(1, rows(value))


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
