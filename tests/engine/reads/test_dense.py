"""The dense part of a model: scores equal a reference, and graph and rows change together or not at all."""

from __future__ import annotations

import gc
import shutil
import threading
import time
import weakref

import numpy as np
import pytest

import tierstore
from tests.engine import scenes
from tests.predict import onnx_models as om
from tierstore.errors import DeltaError, InvalidInput, MissingExtra, NotReady, SnapshotError
from tierstore.predict import runtime

pytestmark = pytest.mark.usefixtures("quick_loads")

DIMS = {"user_id": 4, "item_id": 8, "clicked": 8}
TELLTALE = {"user_id": 4, "clicked": 8}


def folded(store) -> None:
    """Wait until every delta is folded."""
    publisher = store.model("ctr").publisher
    with publisher.changed:
        assert publisher.changed.wait_for(lambda: not publisher.current.overlays, timeout=60)


def state(store, version: int = 1) -> str:
    return next(v["dense"] for v in store.status("ctr")["models"]["ctr"]["versions"] if v["version"] == version)


def served(stamp: int, seq: int = 0, **options):
    """A snapshot's or delta's rows 0 to 9 of both tables and its graph, all naming `stamp`."""
    rows = {t: (range(10), np.full((10, scenes.DIM[t]), stamp, np.float32)) for t in ("user", "item")}
    return scenes.delta(seq, rows, dense=om.telltale(stamp, TELLTALE), **options)


def answered(answer) -> int:
    """The stamp of an answer, all of which must be of one state."""
    assert not answer["off"].any(), answer
    (stamp,) = {int(s) for s in answer["stamp"].reshape(-1)}
    return stamp


KEYS = np.arange(1, 10)
ASK = {"user_id": KEYS, "clicked": (KEYS, np.arange(9))}


def test_scores_equal_numpy_on_rows_from_every_tier(open_store, tmp_path):
    store = open_store(host_budget="300KiB", fold_grace_s=3600)
    draw = np.random.default_rng(5)
    weights = {name: draw.normal(size=dim) for name, dim in DIMS.items()} | {"hour": draw.normal(size=3)}
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.linear(weights, 2.0)))
    store.apply_delta(scenes.stamped(1, {"user": range(0, 500, 3), "item": range(0, 1000, 3)}))
    model = store.model("ctr")
    user, item = draw.integers(0, 600, 700), draw.integers(0, 1200, 700)  # some are absent
    offsets = np.sort(draw.integers(0, 2000, 700))
    offsets[0] = 0
    clicked, hour = draw.integers(0, 1000, 2000), draw.normal(size=(700, 3)).astype(np.float32)
    of_bags = draw.uniform(0.5, 2, 2000).astype(np.float32)
    with model.view() as view:
        rows = {"user_id": view.lookup("user_id", user), "item_id": view.lookup("item_id", item)}
        rows["clicked"] = view.lookup_bags("clicked", clicked, offsets, weights=of_bags)
        scores = view.predict({"user_id": user, "item_id": item, "clicked": (clicked, offsets, of_bags), "hour": hour})
    expected = sum(rows[name] @ weights[name] for name in DIMS) + hour @ weights["hour"] + 2.0
    assert scores.shape == (700, 1)
    np.testing.assert_allclose(scores[:, 0], expected, rtol=1e-4)
    counts = store.status("ctr")["models"]["ctr"]["dense"]
    assert counts["runs"] >= 1
    assert counts["seconds"] > 0
    assert state(store) == "served"


def test_keys_in_rows_are_bags_of_a_pooled_feature_and_stay_apart_in_another(store, tmp_path):
    nodes = [om.node("Identity", "item_id", "items"), om.node("Identity", "clicked", "bags")]
    shapes = {"items": (om.FLOAT, ["batch", "k", 8]), "bags": (om.FLOAT, ["batch", 8])}
    inputs = {"item_id": (om.FLOAT, ["batch", "k", 8]), "clicked": (om.FLOAT, ["batch", 8])}
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.build(nodes, inputs, shapes)))
    model = store.model("ctr")
    keys = np.arange(1, 7).reshape(2, 3)
    answer = model.predict({"item_id": keys, "clicked": keys})
    assert list(answer) == ["items", "bags"]
    rows = model.lookup("item_id", keys.reshape(-1))
    np.testing.assert_array_equal(answer["items"], rows.reshape(2, 3, 8))
    np.testing.assert_allclose(answer["bags"], rows.reshape(2, 3, 8).mean(1))
    assert list(model.predict({"item_id": keys, "clicked": keys}, outputs=["bags"])) == ["bags"]
    ones = model.predict({"item_id": keys, "clicked": [1, 2]}, outputs=["bags"])
    np.testing.assert_array_equal(ones["bags"], model.lookup("item_id", [1, 2]))
    weighted = model.predict({"item_id": keys, "clicked": (keys, None, [[1, 0, 0], [0, 0, 1]])}, outputs=["bags"])
    np.testing.assert_array_equal(weighted["bags"], model.lookup("item_id", [1, 6]))
    jagged = model.predict({"item_id": keys, "clicked": Jagged()}, outputs=["bags"])
    np.testing.assert_allclose(jagged["bags"], model.lookup_bags("clicked", [1, 2, 3], [0, 1]))
    assert [tensor.name for tensor in model.signature.inputs] == ["item_id", "clicked"]


class Jagged:
    """The faces of TorchRec's JaggedTensor: two bags, whose offsets have an end."""

    def values(self):
        return np.array([1, 2, 3])

    def offsets(self):
        return np.array([0, 1, 3])

    def weights_or_none(self):
        return None


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"user_id": [1]}, "needs the inputs clicked, hour as well; got user_id"),
        ({"user_id": [1], "clicked": [1, 2], "hour": [[0.0]]}, "'user_id' and 'clicked' must agree in dimension 'batch': got 1 and 2"),
        ({"user_id": [1, 2], "clicked": ([1, 2, 3], [0, 2, 3]), "hour": [[0.0]] * 2}, "got 2 and 3; offsets of bags have no end entry"),
        ({"user_id": [1], "clicked": [1], "hour": [[0.0, 1.0]]}, r"'hour': the dense part takes shape \[batch, 1\], got \[1, 2\]"),
        ({"user_id": [1], "clicked": [1], "hour": [["x"]]}, "'hour': expected FP32"),
        ({"user_id": [1], "clicked": [1], "hour": [[0.0]], "day": [1]}, "no input 'day'; its inputs are user_id, clicked, hour"),
        ({"user_id": [1.5], "clicked": [1], "hour": [[0.0]]}, "expected int64 keys"),
        ({"user_id": (1, 2), "clicked": [1], "hour": [[0.0]]}, "'user_id'"),
        ({"user_id": ([1], [0]), "clicked": [1], "hour": [[0.0]]}, "no combiner"),
        ({"user_id": [[[1]]], "clicked": [1], "hour": [[0.0]]}, r"\[n\] or \[batch, k\], got \[1, 1, 1\]"),
        ({"user_id": [1], "clicked": ([[1]], [0]), "hour": [[0.0]]}, "with offsets the keys are flat"),
        ({"user_id": [1], "clicked": ([1], [5]), "hour": [[0.0]]}, "offset"),
        ({"user_id": [1], "clicked": ([1], [0], [1.0], 4), "hour": [[0.0]]}, "expected keys, "),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_told(dense_store, inputs, message):
    with pytest.raises(InvalidInput, match=message):
        dense_store.model("ctr").predict(inputs)


@pytest.fixture(scope="module")
def dense_store(tmp_path_factory, quick_loads):
    root = tmp_path_factory.mktemp("dense")
    weights = {"user_id": np.ones(4), "clicked": np.ones(8), "hour": np.ones(1)}
    with tierstore.open(root / "data", host_budget="4MiB", load_workers=1, disk_threads=2) as store:
        store.load_snapshot(scenes.write_snapshot(root, dense=om.linear(weights)))
        yield store


def test_an_output_that_there_is_not_is_told(dense_store):
    with pytest.raises(InvalidInput, match="no output 'click'; the dense part has score"):
        dense_store.model("ctr").predict({"user_id": [1], "clicked": [1], "hour": [[0.0]]}, outputs=["click"])


def test_without_a_dense_part_nothing_is_predicted(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path))
    assert store.model("ctr").signature is None
    with pytest.raises(InvalidInput, match="no dense part"):
        store.model("ctr").predict({"user_id": [1]})


def test_without_the_extra_a_dense_part_is_kept_and_the_extra_named(open_store, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "missing_extra", lambda: "install tierstore[dense] (no module)")
        store = open_store()
        store.load_snapshot(scenes.write_snapshot(tmp_path, dense=b"not looked into"))
        store.apply_delta(served(1, seq=1))
        assert state(store) == "kept, not served: install tierstore[dense] (no module)"
        with pytest.raises(MissingExtra, match=r"tierstore\[dense\]"):
            store.model("ctr").predict(ASK)
        assert store.model("ctr").lookup("user_id", [1])[0, 0] == 1
        folded(store)
        store.close()
    assert answered(open_store().model("ctr").predict(ASK)) == 1


def test_after_a_start_a_dense_part_that_cannot_be_served_is_said_so_and_rows_are_answered(
    open_store, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "missing_extra", lambda: "install tierstore[dense] (no module)")
        store = open_store()
        store.load_snapshot(scenes.write_snapshot(tmp_path, dense=b"not looked into"))
        store.close()
    store = open_store()
    assert state(store).startswith("kept, not served: the dense part is not an ONNX model")
    with pytest.raises(NotReady, match="not an ONNX model"):
        store.model("ctr").predict(ASK)
    assert len(store.model("ctr").lookup("user_id", [1])) == 1
    store.apply_delta(served(1, seq=1))
    assert answered(store.model("ctr").predict(ASK)) == 1
    folded(store)
    assert answered(store.model("ctr").predict(ASK)) == 1


@pytest.mark.parametrize(
    ("dense", "reason"),
    [
        (b"no graph", "not an ONNX model"),
        (om.linear({"user_id": np.ones(5)}), r"input 'user_id': .* dim 4; expected .*declares \[batch, 5\]"),
    ],
)
def test_a_dense_part_that_cannot_be_served_is_refused_and_changes_nothing(open_store, tmp_path, dense, reason):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE)))
    store.apply_delta(served(1, seq=1))
    with pytest.raises(SnapshotError, match=reason) as refused:
        store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=1, dense=dense))
    assert refused.value.file == "dense.onnx"
    with pytest.raises(DeltaError, match=reason):
        store.apply_delta(scenes.delta(2, {"user": ([1], np.zeros((1, 4), np.float32))}, dense=dense))
    model = store.model("ctr")
    assert (model.versions, model.state.log.status()["last"]) == ([1], 1)
    assert answered(model.predict(ASK)) == 1
    store.apply_delta(served(2, seq=2))
    assert answered(model.predict(ASK)) == 2


def test_a_delta_for_a_version_that_does_not_serve_must_fit_that_one(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE)))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2), activate=False)
    with pytest.raises(DeltaError, match="does not fit version 2"):
        store.apply_delta(scenes.delta(1, dense=om.linear({"user_id": np.ones(5)}), base_version=2))
    store.apply_delta(served(3, seq=1, base_version=2))
    assert store.model("ctr").signature.outputs[0].name == "stamp"
    with store.model("ctr").view() as view:
        assert view.session is view.open_version.heads[""].session, "the delta is not for this version"
    store.activate("ctr", 2)
    assert answered(store.model("ctr").predict(ASK)) == 3


@pytest.mark.parametrize("grace_s", [0.0, 3600.0], ids=["folded", "in the overlay"])
def test_the_newest_dense_part_serves_through_deltas_restarts_and_rollbacks(open_store, tmp_path, grace_s):
    store = open_store(fold_grace_s=grace_s)
    model = store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE))) and store.model("ctr")
    for seq in (1, 2):
        store.apply_delta(served(seq, seq=seq))
        assert answered(model.predict(ASK)) == seq
    store.apply_delta(scenes.stamped(3, {"item": [500]}))  # one without a dense part
    assert answered(model.predict(ASK)) == 2
    if not grace_s:
        folded(store)
        assert answered(model.predict(ASK)) == 2
    store.close()
    store = open_store(fold_grace_s=grace_s)
    model = store.model("ctr")
    assert answered(model.predict(ASK)) == 2, "after a restart"
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=3, dense=om.telltale(7, TELLTALE)))
    store.apply_delta(served(4, seq=4))
    assert answered(model.predict(ASK)) == 4
    store.rollback("ctr")
    assert answered(model.predict(ASK)) == 4, "the delta was for both"
    assert model.active_version == 1


@pytest.mark.parametrize("grace_s", [0.0, 3600.0], ids=["folded", "in the log alone"])
def test_a_store_that_was_never_closed_comes_back_with_the_newest_dense_part(open_store, tmp_path, grace_s):
    """What is on disk the moment after an acknowledgement is what a crash leaves."""
    store = open_store(fold_grace_s=grace_s)
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE)))
    for seq in (1, 2):
        store.apply_delta(served(seq, seq=seq))
        if not grace_s:
            folded(store)
    image = tmp_path / "left"
    shutil.copytree(tmp_path / "data", image)
    with tierstore.open(image, host_budget="4MiB", load_workers=1) as again:
        assert answered(again.model("ctr").predict(ASK)) == 2


def test_a_new_dense_part_is_ready_before_the_delta_is_logged(store, tmp_path, monkeypatch):
    """While it is made ready, look-ups and predictions go on, and the log does not have it."""
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE)))
    store.apply_delta(served(1, seq=1))
    model, started, go_on = store.model("ctr"), threading.Event(), threading.Event()
    load = type(store.shared.dense).load

    def slow(*args, **options):
        started.set()
        assert go_on.wait(60)
        return load(*args, **options)

    monkeypatch.setattr(type(store.shared.dense), "load", slow)
    producer = threading.Thread(target=store.apply_delta, args=(served(2, seq=2),))
    producer.start()
    assert started.wait(60)
    assert answered(model.predict(ASK)) == 1
    assert model.state.log.status()["last"] == 1
    folded(store)  # folding goes on too
    go_on.set()
    producer.join(60)
    assert answered(model.predict(ASK)) == 2


def test_the_session_of_a_dense_part_goes_with_its_last_view(store, tmp_path):
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE)))
    with store.model("ctr").view() as view:
        first = weakref.ref(view.session)
        store.apply_delta(served(1, seq=1))
        assert view.session.signature.outputs[0].name == "stamp"
    del view
    folded(store)
    gc.collect()
    assert first() is None
    with store.model("ctr").view() as view:
        second = weakref.ref(view.session)
    del view
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=1, dense=om.telltale(7, TELLTALE)))
    store.model("ctr").state.retiring.wait_closed(1, 60)
    gc.collect()
    assert second() is None


def test_recorded_requests_run_before_a_version_serves(open_store, tmp_path):
    store = open_store()
    inputs = [
        {"user_id": KEYS, "clicked": (KEYS, np.arange(9))},
        {"user_id": [1], "clicked": ([1, 2], [0], [0.5, 1.5])},
    ]
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE), requests=inputs))
    with store.model("ctr").view() as view:
        assert view.session.warmed == 2
    store.apply_delta(served(1, seq=1))
    with store.model("ctr").view() as view:
        assert view.session.warmed == 2, "so does a new dense part"
    with pytest.raises(DeltaError, match=r"recorded request fails: .* no input 'user_id'; its inputs are item_id"):
        store.apply_delta(scenes.delta(2, dense=om.linear({"item_id": np.ones(8)})))
    bad = {"user_id": [1], "clicked": [1, 2]}
    with pytest.raises(SnapshotError, match=r"00000\.npz: the recorded request fails: .*must agree"):
        store.load_snapshot(
            scenes.write_snapshot(tmp_path, 2, delta_seq=1, dense=om.telltale(0, TELLTALE), requests=[bad])
        )
    assert answered(store.model("ctr").predict(ASK)) == 1
    store.close()
    with open_store().model("ctr").view() as view:
        assert view.session.warmed == 2, "and after a restart"


def test_swaps_and_new_dense_parts_under_load_fail_no_request_and_mix_no_answer(store, tmp_path):
    """Every row and the graph name one number; an answer of two states would show it."""
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE)))
    store.apply_delta(served(1, seq=1))
    model, over = store.model("ctr"), threading.Event()
    wrong: list[object] = []
    seen: list[set[int]] = []

    def work(number: int) -> None:
        mine: set[int] = set()
        seen.append(mine)
        while not over.is_set():
            try:
                mine.add(answered(model.predict(ASK)))
            except BaseException as error:  # noqa: BLE001 - reported below
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for seq in range(2, 8):
        if seq == 5:
            where = scenes.write_snapshot(tmp_path, 2, delta_seq=4, dense=om.telltale(4, TELLTALE))
            store.load_snapshot(where, activate=False)
        store.apply_delta(served(seq, seq=seq))
        if seq >= 6:
            store.activate("ctr", 2 if seq == 6 else 1)
        until = time.monotonic() + 30
        while not wrong and not all(seq in mine for mine in seen) and time.monotonic() < until:
            over.wait(0.001)
    over.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert all({6, 7} <= mine for mine in seen)


def test_a_canary_has_its_own_dense_part_and_a_delta_brings_one_to_both(open_store, tmp_path):
    store = open_store()
    store.load_snapshot(scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE)))
    store.apply_delta(served(1, seq=1))
    store.load_snapshot(scenes.write_snapshot(tmp_path, 2, delta_seq=1, dense=om.telltale(0, TELLTALE)), activate=False)
    store.apply_delta(served(2, seq=2, base_version=2))
    store.canary("ctr", 2, 0.5)
    model = store.model("ctr")
    assert [answered(model.predict(ASK, version=number)) for number in (1, 2)] == [1, 2]
    with pytest.raises(DeltaError, match="the dense part cannot be served: the dense part is not an ONNX model"):
        store.apply_delta(scenes.delta(3, dense=b"no graph"))
    store.apply_delta(served(3, seq=3))
    with model.view(1) as active, model.view(2) as canary:
        assert active.session is not canary.session
    assert [answered(model.predict(ASK, version=number)) for number in (1, 2)] == [3, 3]
    assert {answered(model.predict(ASK)) for _ in range(20)} == {3}
    assert state(store, 2) == "served"
    store.promote("ctr")
    assert answered(model.predict(ASK)) == 3
    store.close()
    assert answered(open_store().model("ctr").predict(ASK)) == 3
