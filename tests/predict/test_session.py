"""Runs of a dense part: what it answers, where it reads and writes, and what is refused."""

from __future__ import annotations

import gc
import re
import threading
import weakref

import numpy as np
import pytest

from tests.predict import onnx_models as om
from tierstore.errors import InferenceError, InvalidInput
from tierstore.predict.session import DenseCounts, DenseSession, Slot
from tierstore.predict.warmup import warm


def run(session: DenseSession, leads=None, given=None, wanted=(), rows=None):
    """Outputs by name, rows of features being `rows`."""
    given = given or {}
    plan = session.plan(leads or {}, {name: array.shape for name, array in given.items()}, wanted)
    slot = session.acquire(plan, list(leads or {}))
    for name, values in (rows or {}).items():
        session.rows_of(slot, name).reshape(-1)[:] = np.asarray(values).reshape(-1)
    outputs = [
        np.full(shape, 7, session.bindings.outputs[name].dtype) if session.is_fixed(name, shape) else None
        for name, shape in zip(plan.outputs, plan.shapes, strict=True)
    ]
    answer = session.run(plan, slot, given, outputs)
    session.release(slot)
    return dict(zip(plan.outputs, answer, strict=True))


def test_rows_and_tensors_add_up_as_in_numpy(load):
    draw = np.random.default_rng(1)
    weights = {"user_id": draw.normal(size=4), "clicked": draw.normal(size=8), "hour": draw.normal(size=2)}
    session = load(om.linear(weights, 0.5))
    user, bag, hour = (draw.normal(size=(3, n)).astype(np.float32) for n in (4, 8, 2))
    score = run(session, {"user_id": (3,), "clicked": (3,)}, {"hour": hour}, rows={"user_id": user, "clicked": bag})[
        "score"
    ]
    expected = user @ weights["user_id"] + bag @ weights["clicked"] + hour @ weights["hour"] + 0.5
    np.testing.assert_allclose(score[:, 0], expected, rtol=1e-5)


def test_scores_are_written_where_the_caller_says_and_rows_read_where_the_look_up_put_them(load):
    session = load(om.linear({"user_id": [1, 1, 1, 1]}))
    plan = session.plan({"user_id": (2,)}, {})
    slot = session.acquire(plan, ["user_id"])
    session.rows_of(slot, "user_id")[:] = [[1, 2, 3, 4], [5, 6, 7, 8]]
    out = np.zeros((2, 1), np.float32)
    assert session.run(plan, slot, {}, [out])[0] is out
    assert out[:, 0].tolist() == [10, 26]
    session.rows_of(slot, "user_id")[:] = 1  # the same binding, other rows
    session.run(plan, slot, {}, [out])
    assert out[:, 0].tolist() == [4, 4]


def test_buffers_are_used_again_and_stay_within_their_bound(load, monkeypatch):
    monkeypatch.setattr("tierstore.predict.runtime.KEPT_BYTES", 4096)
    session = load(om.linear({"user_id": np.ones(4)}))
    plan = session.plan({"user_id": (16,)}, {})
    slot = session.acquire(plan, ["user_id"])
    array = session.rows_of(slot, "user_id")
    assert array.ctypes.data % 64 == 0
    session.release(slot)
    assert session.buffer_bytes == 256
    again = session.acquire(plan, ["user_id"])
    assert again is slot
    assert session.rows_of(again, "user_id") is array
    assert session.buffer_bytes == 0
    for n in range(1, 200):
        plan = session.plan({"user_id": (n,)}, {})
        session.release(session.acquire(plan, ["user_id"]))
        assert session.buffer_bytes <= 4096
    huge = session.plan({"user_id": (1000,)}, {})
    session.release(session.acquire(huge, ["user_id"]))
    assert 0 < session.buffer_bytes <= 4096, "one that does not fit pushes none out"
    for _ in range(2000):  # those of no rows take no bytes
        session.release(Slot())
    assert len(session._free) <= 1024


@pytest.mark.parametrize(
    ("shape", "lead", "bound"),
    [
        (["n", 8], (3,), (3, 8)),
        (["batch", 16], (3, 2), (3, 16)),
        (["batch", "any"], (3, 2), (3, 16)),
        (["batch", "k", 8], (3, 2), (3, 2, 8)),
        (None, (3, 2), (3, 2, 8)),
    ],
)
def test_rows_of_keys_take_the_shape_that_the_graph_declares(load, shape, lead, bound):
    session = load(
        om.build([om.node("Identity", "item_id", "same")], {"item_id": (om.FLOAT, shape)}, {"same": (om.FLOAT, shape)})
    )
    rows = np.arange(np.prod(bound), dtype=np.float32)
    same = run(session, {"item_id": lead}, rows={"item_id": rows})["same"]
    assert same.shape == bound
    assert same.reshape(-1).tolist() == rows.tolist()


def test_a_row_of_one_number_may_be_taken_without_its_dimension(load):
    session = load(
        om.build([om.node("Neg", "bias_id", "minus")], {"bias_id": (om.FLOAT, ["n"])}, {"minus": (om.FLOAT, ["n"])})
    )
    assert run(session, {"bias_id": (2,)}, rows={"bias_id": [1, 2]})["minus"].tolist() == [-1, -2]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_batches_of_any_size(load, n):
    session = load(om.linear({"user_id": np.ones(4)}))
    assert run(session, {"user_id": (n,)}, rows={"user_id": np.ones((n, 4))})["score"].tolist() == [[4.0]] * n


def test_strings_go_in_and_out(load):
    nodes = [
        om.node("Identity", "word", "echo"),
        om.helper.make_node("LabelEncoder", ["word"], ["code"], domain="ai.onnx.ml", keys_strings=["ja", "nein"], values_int64s=[1, 2], default_int64=-1),
    ]  # fmt: skip
    session = load(
        om.build(nodes, {"word": (om.STRING, ["n"])}, {"echo": (om.STRING, ["n"]), "code": (om.INT64, ["n"])})
    )
    answer = run(session, given={"word": np.array(["ja", "é", ""], object)})
    assert answer["echo"].tolist() == ["ja", "é", ""]
    assert answer["code"].tolist() == [1, -1, -1]
    assert answer["code"].dtype == np.int64
    assert run(session, given={"word": np.array([], object)}, wanted=("code",))["code"].tolist() == []


def test_outputs_whose_size_depends_on_the_data(load):
    session = load(
        om.build([om.node("NonZero", "x", "where")], {"x": (om.FLOAT, ["n"])}, {"where": (om.INT64, [1, None])})
    )
    plan = session.plan({}, {"x": (4,)})
    assert plan.shapes == ((1, -1),)
    assert run(session, given={"x": np.array([0, 1, 0, 2], np.float32)})["where"].tolist() == [[1, 3]]


def test_half_precision_rows_and_a_number_without_dimensions(load):
    nodes = [om.node("Cast", "user_id", "wide", to=om.FLOAT), om.node("Mul", "wide factor", "scaled")]
    session = load(
        om.build(nodes, {"user_id": (om.HALF, ["n", 4]), "factor": (om.FLOAT, [])}, {"scaled": (om.FLOAT, ["n", 4])})
    )
    assert session.bindings.features["user_id"].dtype == "float16"
    answer = run(session, {"user_id": (1,)}, {"factor": np.array([3], np.float32)}, rows={"user_id": [1, 2, 3, 4]})
    assert answer["scaled"].tolist() == [[3, 6, 9, 12]]


def test_a_tree_ensemble_made_by_hand(load):
    ensemble = om.helper.make_node(
        "TreeEnsembleRegressor", ["user_id"], ["score"], domain="ai.onnx.ml",
        n_targets=1, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[2, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], nodes_missing_value_tracks_true=[0, 0, 0],
        nodes_hitrates=[1.0, 1.0, 1.0], target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[-1.0, 2.0],
    )  # fmt: skip
    session = load(om.build([ensemble], {"user_id": (om.FLOAT, ["n", 4])}, {"score": (om.FLOAT, ["n", 1])}))
    rows = [[0, 0, 0.4, 0], [0, 0, 0.6, 0]]
    assert run(session, {"user_id": (2,)}, rows={"user_id": rows})["score"].tolist() == [[-1], [2]]


def test_a_boosted_model_of_lightgbm_answers_as_it_does_there(load):
    lightgbm, tools = pytest.importorskip("lightgbm"), pytest.importorskip("onnxmltools")
    from onnxmltools.convert.common.data_types import FloatTensorType

    draw = np.random.default_rng(3)
    x, y = draw.normal(size=(300, 4)).astype(np.float32), draw.integers(0, 2, 300)
    model = lightgbm.LGBMClassifier(n_estimators=5, num_leaves=7, verbose=-1, n_jobs=1).fit(x, y)
    inputs = [("user_id", FloatTensorType([None, 4]))]
    for zipmap in (False, True):
        session = load(
            tools.convert_lightgbm(model, initial_types=inputs, zipmap=zipmap, target_opset=15).SerializeToString()
        )
        names = [tensor.name for tensor in session.signature.outputs]
        assert ("probabilities" in names) is not zipmap, "maps are not served, the labels beside them are"
        warm(session, lambda _, lead: np.zeros((*lead, 4), np.float32), lambda: None)
        assert "label" in session.loose, "the converter declares [1], whatever the batch"
        answer = run(session, {"user_id": (300,)}, rows={"user_id": x})
        assert answer["label"].tolist() == model.predict(x).tolist()
        if not zipmap:
            np.testing.assert_allclose(answer["probabilities"], model.predict_proba(x), atol=1e-5)


def test_shapes_that_do_not_agree_are_told_with_both_names(load):
    session = load(om.linear({"user_id": np.ones(4), "hour": np.ones(2)}))
    with pytest.raises(InvalidInput, match=r"inputs 'user_id' and 'hour' must agree in dimension 'batch': got 3 and 2"):
        session.plan({"user_id": (3,)}, {"hour": (2, 2)})
    with pytest.raises(InvalidInput, match=r"'hour': the dense part takes shape \[batch, 2\], got \[3, 5\]"):
        session.plan({"user_id": (3,)}, {"hour": (3, 5)})
    with pytest.raises(InvalidInput, match=r"'user_id': the dense part takes shape \[batch, 4\], got \[3, 8\]"):
        session.plan({"user_id": (3, 2)}, {"hour": (3, 2)})
    with pytest.raises(InvalidInput, match="needs the inputs hour as well; got user_id"):
        session.plan({"user_id": (3,)}, {})


def test_a_structure_plans_sizes_as_its_bindings_do(load):
    shapes = {"user_id": ["batch", 4], "item_id": ["batch", 16], "hour": ["batch", 2], "day": [3, "k"], "any": None}
    nodes = [om.node("Identity", name, f"same_{name}") for name in shapes]
    session = load(
        om.build(
            nodes,
            {name: (om.FLOAT, shape) for name, shape in shapes.items()},
            {f"same_{name}": (om.FLOAT, shape) for name, shape in shapes.items()},
        )
    )
    draw = np.random.default_rng(6)
    refused = 0
    for _ in range(300):
        n, k = draw.integers(0, 4, 2).tolist()
        leads = {"user_id": (n,), "item_id": (n, 2)}
        given = {"hour": (n, 2), "day": (3, k), "any": (5, k)}
        if draw.random() < 0.3:
            of = leads if draw.random() < 0.4 else given
            name = draw.choice(list(of))
            of[name] = (*of[name][:-1], of[name][-1] + 1)
        try:
            expected = session.bindings.plan(leads, given, tuple(session.bindings.outputs), session.loose)
        except InvalidInput as error:
            refused += 1
            with pytest.raises(InvalidInput, match=re.escape(str(error))):
                session.plan(leads, given)
            continue
        plan = session.plan(leads, given)
        assert plan.inputs == expected.inputs
        assert plan.shapes == expected.shapes
        assert plan.places.tolist() == expected.places.tolist()
        assert (plan.buffer_bytes, plan.output_bytes) == (expected.buffer_bytes, expected.output_bytes)
    assert refused > 20


def test_data_that_the_graph_cannot_take_are_the_callers_fault(load, capfd):
    counts = DenseCounts()
    model = om.build(
        [om.node("Gather", "table at", "x", axis=0)],
        {"at": (om.INT64, ["n"])},
        {"x": (om.FLOAT, ["n"])},
        {"table": np.ones(4, np.float32)},
    )
    session = load(model, counts)
    with pytest.raises(InvalidInput, match="indices element out of data bounds"):
        run(session, given={"at": np.array([9], np.int64)})
    assert run(session, given={"at": np.array([3], np.int64)})["x"].tolist() == [1]
    figures = counts.as_dict()
    assert (figures["runs"], figures["failed"]) == (2, 1)
    assert figures["seconds"] > 0
    assert capfd.readouterr().err == "", "what is raised is not printed too"


def test_an_output_that_does_not_keep_its_word_is_found_out_by_warm_up(load):
    model = om.build(
        [om.node("Concat", "x x", "twice", axis=0)], {"x": (om.FLOAT, ["n"])}, {"twice": (om.FLOAT, ["n"])}
    )
    session = load(model)
    x = np.arange(2, dtype=np.float32)
    with pytest.raises(InferenceError, match="shape"):
        run(session, given={"x": x})
    session.probe(session.plan({}, {"x": (2,)}), {"x": x})
    assert session.loose == {"twice"}
    assert run(session, given={"x": x})["twice"].tolist() == [0, 1, 0, 1]


def test_many_threads_share_a_session(load):
    session = load(om.linear({"user_id": np.ones(4)}))
    wrong: list[object] = []

    def work(number: int) -> None:
        for size in range(1, 40):
            score = run(session, {"user_id": (size,)}, rows={"user_id": np.full((size, 4), number)})["score"]
            if not (score == 4 * number).all():
                wrong.append((number, size, score))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_session_goes_with_its_last_user(load):
    session = load(om.linear({"user_id": np.ones(4)}))
    run(session, {"user_id": (2,)}, rows={"user_id": np.ones((2, 4))})
    gone = weakref.ref(session._session)
    del session
    gc.collect()
    assert gone() is None
