"""A dense part that reads rows where the device tier has left them: the way to a GPU, here over a stand-in for one.

The "device" is CPU memory and ONNX Runtime's provider that of the processor; what is bound, when, and who keeps it is
the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine import scenes
from tests.predict import onnx_models as om
from tests.tiers.cuda_shim.backend import ShimDevice
from tierstore.engine.store import Store
from tierstore.errors import InferenceError, InvalidInput, StorageError
from tierstore.predict import runtime
from tierstore.predict.provider import CPU_PROVIDER, DenseProvider
from tierstore.predict.session import DenseSession, Slot
from tierstore.service.dataplane.inference import DataPlane, Request
from tierstore.service.dataplane.tensors import TensorSpec
from tierstore.tiers.device import gpu
from tierstore.tiers.device.lookup import LookUp

pytestmark = pytest.mark.usefixtures("quick_loads")

WEIGHTS = {
    "user_id": np.linspace(-1, 1, 4),
    "item_id": np.linspace(0, 2, 8),
    "clicked": np.linspace(2, -1, 8),
    "hour": np.ones(3),
}
OFFSETS = np.arange(0, 1200, 4)
USERS, ITEMS, CLICKED = np.arange(300), np.arange(0, 900, 3), np.arange(1200) % 1100
HOUR = np.linspace(0, 1, 900, dtype=np.float32).reshape(300, 3)


class Bound:
    """What was lent to runs, and where it lies."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.owners: list[Any] = []


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    seen = Bound()
    bind = Slot.bind

    def spy(slot: Slot, name: str, address: int, owner: Any) -> None:
        assert name not in slot.hidden
        assert owner.ctypes.data == address
        seen.names.append(name)
        seen.owners.append(owner)
        bind(slot, name, address, owner)

    monkeypatch.setattr(Slot, "bind", spy)
    return seen


@pytest.fixture
def with_device(open_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Store]:
    monkeypatch.setattr(gpu, "find_backend", lambda: (ShimDevice(number=0), None))
    monkeypatch.setattr(gpu, "MIN_BUDGET", 100 << 10)
    monkeypatch.setattr(runtime, "provider_of", lambda settings: DenseProvider(CPU_PROVIDER, "cpu", "gpu:0"))
    return lambda **options: open_store(**{"device_budget": "4MiB"} | options)


def ask(store: Store, **more: Any) -> Any:
    return store.model("ctr").predict(
        {"user_id": USERS, "item_id": ITEMS, "clicked": (CLICKED, OFFSETS), "hour": HOUR, **more}
    )


def expected(store: Store) -> np.ndarray:
    ctr = store.model("ctr")
    total = ctr.lookup("user_id", USERS) @ WEIGHTS["user_id"] + ctr.lookup("item_id", ITEMS) @ WEIGHTS["item_id"]
    return total + ctr.lookup_bags("clicked", CLICKED, OFFSETS) @ WEIGHTS["clicked"] + HOUR @ WEIGHTS["hour"]


def test_scores_are_those_of_rows_that_stayed_on_the_device(
    with_device: Callable[..., Store], tmp_path: Path, bound: Bound
) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.linear(WEIGHTS)))
    for seq in (1, 2):
        np.testing.assert_allclose(ask(store)[:, 0], expected(store), rtol=1e-4, atol=1e-4)
        assert set(bound.names) == {"user_id", "item_id", "clicked"}
        bound.names.clear()
        store.apply_delta(scenes.stamped(seq, {"item": range(0, 900, 2)}))
    assert np.shape(ask(store, user_id=USERS[:0], item_id=ITEMS[:0], clicked=(CLICKED[:0], OFFSETS[:0]), hour=HOUR[:0])) == (0, 1)  # fmt: skip
    assert bound.names == []


def test_a_request_of_the_service_takes_the_same_way(
    with_device: Callable[..., Store], tmp_path: Path, bound: Bound
) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.linear(WEIGHTS)))
    inputs = {"user_id": USERS, "item_id": ITEMS, "clicked": CLICKED, "clicked.offsets": OFFSETS, "hour": HOUR}
    specs = [
        TensorSpec(name, "FP32" if name == "hour" else "INT64", tuple(array.shape)) for name, array in inputs.items()
    ]
    with DataPlane(store, max_response=1 << 30).open("ctr", None, Request(specs, [])) as inference:
        arrays = [np.empty(spec.shape, np.float32) for spec in inference.plan.specs]
        inference.run([array.reshape(-1) for array in inputs.values()], arrays)
    assert sorted(bound.names) == ["clicked", "item_id", "user_id"]
    np.testing.assert_allclose(arrays[0][:, 0], expected(store), rtol=1e-4, atol=1e-4)


def test_the_device_works_on_all_features_at_once_and_gets_everything_back_where_one_fails(
    with_device: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_device(device_budget="64MiB")
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.linear(WEIGHTS)))
    right, seen = expected(store), []
    begin, finish = LookUp.begin, LookUp.finish
    monkeypatch.setattr(LookUp, "begin", lambda look_up: (seen.append("begin"), begin(look_up))[1])
    monkeypatch.setattr(LookUp, "finish", lambda look_up, *args: (seen.append("finish"), finish(look_up, *args))[1])
    np.testing.assert_allclose(ask(store)[:, 0], right, rtol=1e-4, atol=1e-4)
    assert seen[:4] == ["begin"] * 3 + ["finish"]
    assert seen.count("finish") == 3

    def fail(*_: Any) -> bool:
        raise StorageError("the disk failed")

    monkeypatch.setattr(LookUp, "finish", fail)
    with pytest.raises(StorageError, match="the disk failed"):
        ask(store)
    # the promoter takes one now and then
    scenes.eventually(lambda: not store.status()["device"]["workspaces_taken"], "all workspaces are back")
    monkeypatch.setattr(LookUp, "finish", finish)
    np.testing.assert_allclose(ask(store)[:, 0], right, rtol=1e-4, atol=1e-4)


def test_a_slot_keeps_rows_until_they_are_read_and_no_longer(
    with_device: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.linear(WEIGHTS)))
    slots: list[Slot] = []
    run = DenseSession.run

    def spy(session: DenseSession, plan: Any, slot: Slot, *more: Any) -> Any:
        assert set(slot.bound) == {"user_id", "item_id", "clicked"}
        slots.append(slot)
        return run(session, plan, slot, *more)

    monkeypatch.setattr(DenseSession, "run", spy)
    ask(store)
    ask(store)
    assert slots[0] is slots[1]
    assert not slots[0].bound


def test_outputs_of_no_fixed_size_come_from_rows_on_the_device(
    with_device: Callable[..., Store], tmp_path: Path, bound: Bound
) -> None:
    nodes = [om.node("ReduceSum", "user_id", "sum", keepdims=0), om.node("NonZero", "user_id", "places")]
    graph = om.build(nodes, {"user_id": (om.FLOAT, ["n", 4])}, {"sum": (om.FLOAT, []), "places": (om.INT64, [2, "k"])})
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=graph))
    answer = store.model("ctr").predict({"user_id": USERS})
    rows = store.model("ctr").lookup("user_id", USERS)
    np.testing.assert_array_equal(answer["places"], np.nonzero(rows))
    np.testing.assert_allclose(answer["sum"], rows.sum(), rtol=1e-4)
    assert bound.names == ["user_id"]


def test_an_output_that_breaks_its_word_is_known_the_second_time(
    with_device: Callable[..., Store], tmp_path: Path, bound: Bound, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.engine.deltas.dense_parts.warm", lambda *_: None)
    ports = {"user_id": (om.FLOAT, ["n", 4])}
    graph = om.build([om.node("Concat", "user_id user_id", "twice", axis=0)], ports, {"twice": (om.FLOAT, ["n", 4])})
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=graph))
    with pytest.raises(InferenceError, match="not relied on any more"):
        store.model("ctr").predict({"user_id": USERS})
    rows = store.model("ctr").lookup("user_id", USERS)
    np.testing.assert_array_equal(store.model("ctr").predict({"user_id": USERS}), np.concatenate([rows, rows]))
    assert set(bound.names) == {"user_id"}


def test_data_that_the_graph_cannot_take_are_still_the_callers_fault(
    with_device: Callable[..., Store], tmp_path: Path
) -> None:
    nodes = [om.node("Gather", "user_id which", "row", axis=0)]
    ports = {"user_id": (om.FLOAT, ["n", 4]), "which": (om.INT64, ["m"])}
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.build(nodes, ports, {"row": (om.FLOAT, ["m", 4])})))
    ctr = store.model("ctr")
    assert ctr.predict({"user_id": USERS, "which": [5]}).tolist() == ctr.lookup("user_id", [5]).tolist()
    with pytest.raises(InvalidInput, match="cannot be run on these inputs"):
        ctr.predict({"user_id": USERS, "which": [5000]})


def test_many_threads_lend_rows_to_one_session(with_device: Callable[..., Store], tmp_path: Path) -> None:
    store = with_device()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.linear({"user_id": np.ones(4)})))
    rows = store.model("ctr").lookup("user_id", np.arange(400)).sum(1)
    wrong: list[int] = []

    def work(first: int) -> None:
        for n in range(1, 20):
            keys = np.arange(first, first + 5 * n)
            came = store.model("ctr").predict({"user_id": keys})[:, 0]
            if not np.allclose(came, rows[keys], atol=1e-4):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 50, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
