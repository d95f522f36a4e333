"""Predictions: scores and rows of one moment, over every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.callers import (
    BAD,
    OIP,
    Answer,
    Caller,
    Refused,
    TfsColumns,
    TfsGrpc,
    TritonGrpc,
    TritonHttp,
    TritonJson,
    over_all,
)
from tests.service.conftest import GRPC, settings_for
from tests.service.fake_store import ITEMS, VERSION
from tests.service.scenes import KEYS, items, write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import MissingExtra
from tierstore.predict import runtime
from tierstore.service.server import ServerThread

WEIGHTS = {"item_id": [1.0, 0.5, 0.25, 0.125], "clicked": [1.0, 1.0, 1.0, 1.0], "hour": [1.0, -1.0]}
HOUR = np.arange(16, dtype=np.float32).reshape(8, 2) ** 2
KEYS8 = KEYS[:8]


def rich() -> bytes:
    """Outputs of every kind: of a known shape, of one that the data decide, strings, half floats."""
    nodes = [
        om.node("ReduceSum", "item_id axis", "total", keepdims=1),
        om.node("NonZero", "flags", "at"),
        om.node("Identity", "word", "echo"),
        om.node("Cast", "item_id", "half", to=om.HALF),
    ]
    inputs: om.Ports = {"item_id": (om.FLOAT, ["n", 4]), "flags": (om.INT64, ["m"]), "word": (om.STRING, ["n"])}
    outputs: om.Ports = {
        "total": (om.FLOAT, ["n", 1]),
        "at": (om.INT64, [1, None]),
        "echo": (om.STRING, ["n"]),
        "half": (om.HALF, ["n", 4]),
    }
    return om.build(nodes, inputs, outputs, {"axis": np.array([1])})


def pages() -> bytes:
    """A graph that gives back tensors of any size in every dimension."""
    ports: om.Ports = {"page": (om.FLOAT, ["n", "h", "w"])}
    return om.build([om.node("Identity", "page", "same")], ports, {"same": (om.FLOAT, ["n", "h", "w"])})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """The models `ctr`, a sum over two features and an input of its own, `rich` and `pages`."""
    root = tmp_path_factory.mktemp("predict")
    with in_process(), Store(settings_for(root, grpc_port=GRPC)) as store:
        store.load_snapshot(write_snapshot(root, dense=om.linear(WEIGHTS, 0.5)))
        store.load_snapshot(write_snapshot(root, model="rich", dense=rich()))
        store.load_snapshot(write_snapshot(root, model="pages", dense=pages()))
        with ServerThread(store) as server:
            yield server


INPUTS = {"item_id": KEYS8, "clicked": KEYS8.reshape(8, 1), "hour": HOUR}


def scores(inputs: dict[str, np.ndarray] = INPUTS) -> np.ndarray:
    """Of bags of one key."""
    total = sum(items(inputs[name].ravel()) @ WEIGHTS[name] for name in ("item_id", "clicked"))
    return np.asarray(total + inputs["hour"] @ WEIGHTS["hour"] + 0.5).reshape(-1, 1)


def score(answer: Answer) -> np.ndarray:
    ((name, array),) = answer.items()
    assert name in ("", "score")
    assert array.dtype == np.float32
    return array


@over_all()
def test_scores_are_the_default_answer(caller: Caller) -> None:
    for _ in range(3):
        answer = caller.ask("ctr", INPUTS)
        assert answer.version in (None, VERSION)
        np.testing.assert_allclose(score(answer), scores(), rtol=1e-5)


@over_all()
def test_requests_of_one_structure_and_any_size_are_answered_each_by_its_own(caller: Caller) -> None:
    draw = np.random.default_rng(4)
    for number, n in enumerate([8, 3, 0, 1, 57, 8, 200]):
        if n == 0 and "empty shapes" in caller.lacks:
            continue
        inputs = {name: draw.choice(KEYS, n) for name in ("item_id", "clicked")}
        inputs["hour"] = draw.normal(size=(n, 2)).astype(np.float32)
        answer = score(caller.ask("ctr", dict([*inputs.items()][:: -1 if number % 2 else 1])))
        np.testing.assert_allclose(answer.reshape(n, 1), scores(inputs), rtol=1e-4)


@over_all()
def test_rows_may_be_requested_with_scores(caller: Caller) -> None:
    for _ in range(3):
        answer = caller.ask("ctr", INPUTS, ["item_id", "score", "item_id.found"])
        np.testing.assert_allclose(answer["score"], scores(), rtol=1e-5)
        np.testing.assert_array_equal(answer["item_id"], items(KEYS8))
        assert answer["item_id.found"].tolist() == [key in ITEMS for key in KEYS8.tolist()]


@over_all("lengths that differ", "loose tensors")
def test_rows_of_a_feature_that_the_graph_does_not_read_may_be_requested_with_scores(caller: Caller) -> None:
    answer = caller.ask("ctr", INPUTS | {"big": np.array([5], np.uint64)}, ["score", "big"])
    np.testing.assert_allclose(answer["score"], scores(), rtol=1e-5)
    np.testing.assert_array_equal(answer["big"], [[5.0, 10.0]])


@over_all()
def test_rows_may_be_half_floats_beside_scores(caller: Caller) -> None:
    inputs = {name: array[:4] for name, array in INPUTS.items()}
    answer = caller.ask("ctr", inputs, ["item_id", "score"], half=True)
    np.testing.assert_array_equal(answer["item_id"], items(KEYS8[:4]).astype(np.float16))
    np.testing.assert_allclose(answer["score"], scores(inputs), rtol=1e-3 if "types" in caller.lacks else 1e-5)


@over_all()
def test_rows_alone_need_nothing_of_the_dense_part(caller: Caller) -> None:
    (answer,) = caller.ask("ctr", {"item_id": KEYS8}, ["item_id"]).values()
    np.testing.assert_array_equal(answer, items(KEYS8))


@over_all()
def test_ragged_bags_with_weights_are_pooled_into_the_graph(caller: Caller) -> None:
    keys, offsets = np.array([1, 2, 3, 4]), np.array([0, 3, 3])
    weights = np.array([1, 2, 1, 5], np.float32)
    bags = [np.average(items(keys[:3]), axis=0, weights=weights[:3]), np.zeros(4), items(keys[3:])[0]]
    expected = items(keys[:3]) @ WEIGHTS["item_id"] + np.array(bags).sum(1) + 0.5
    inputs = {"item_id": keys[:3], "clicked": keys, "clicked.offsets": offsets, "clicked.weights": weights}
    for _ in range(3):
        answer = score(caller.ask("ctr", inputs | {"hour": np.zeros((3, 2), np.float32)}))
        np.testing.assert_allclose(answer[:, 0], expected, rtol=1e-5)


@over_all("lengths that differ")
def test_outputs_of_every_kind_and_of_sizes_that_the_data_decide(caller: Caller) -> None:
    words, keys = np.array(["a", "", "né"], object), np.array([1, 2, 3])
    inputs = {"item_id": keys, "flags": np.array([0, 1, 0, 1, 1]), "word": words}
    answer = caller.ask("rich", inputs, ["total", "at", "echo", "half", "item_id"])
    rows = items(keys)
    np.testing.assert_array_equal(answer["total"][:, 0], rows.sum(1))
    assert answer["at"].tolist() == [[1, 3, 4]]
    assert answer["echo"].tolist() == words.tolist()
    np.testing.assert_array_equal(answer["item_id"], rows)
    assert answer["half"].astype(np.float32).tolist() == rows.tolist()
    assert answer["half"].dtype == np.float16 or "types" in caller.lacks
    fixed = caller.ask("rich", inputs, ["total", "half"])
    np.testing.assert_array_equal(fixed["total"][:, 0], rows.sum(1))


@over_all()
def test_what_does_not_fit_is_the_clients_error(caller: Caller) -> None:
    item = {"item_id": KEYS8}
    for inputs, outputs, says in (
        (item, None, "needs the inputs clicked, hour as well; got item_id|no dense part|hour"),
        (INPUTS | {"day": HOUR}, None, "unknown input 'day'|'day'"),
        (INPUTS, ["nothing"], "'nothing'|takes hour and gives score"),
    ):
        with pytest.raises(Refused, match=says) as refused:
            caller.ask("ctr", inputs, outputs)
        assert refused.value.kind == BAD


@over_all("lengths that differ")
def test_sizes_that_disagree_are_the_clients_error(caller: Caller) -> None:
    with pytest.raises(Refused, match=r"must agree in dimension 'batch'") as refused:
        caller.ask("ctr", INPUTS | {"hour": HOUR[:3]})
    assert refused.value.kind == BAD


@over_all(callers=OIP)
def test_datatypes_that_do_not_fit_are_the_clients_error(caller: TritonHttp) -> None:
    hour = HOUR.astype(np.float64)
    for inputs, outputs, says in (
        (INPUTS | {"hour": hour}, None, "'hour': the dense part takes FP32 of shape .*, got FP64"),
        (INPUTS, [caller.wanted("score", dtype="FP16")], "'score' is FP32, not 'FP16'"),
    ):
        with pytest.raises(InferenceServerException, match=says):
            caller.client.infer("ctr", [caller.tensor(*each) for each in inputs.items()], outputs=outputs)
    nothing = caller.tensor("page", np.empty((0, 1, 1), np.float32))
    nothing.set_shape([0, 2**31 - 1, 2**31 - 1])  # no element, and no array of that shape
    with pytest.raises(InferenceServerException, match="'page': the sizes beside 0 are too large"):
        caller.client.infer("pages", [nothing])


@pytest.mark.parametrize("kind", [TritonHttp, TritonGrpc])
def test_strings_that_are_no_text_are_the_clients_error(server: ServerThread, kind: type[TritonHttp]) -> None:
    caller = kind(server)
    not_text = caller.triton.InferInput("word", [8], "BYTES").set_data_from_numpy(np.array([b"\xff"] * 8, object))
    with pytest.raises(InferenceServerException, match="'word': the dense part's strings are UTF-8"):
        caller.client.infer("rich", [caller.tensor("item_id", KEYS8), not_text, caller.tensor("flags", KEYS8)])
    caller.close()


@over_all()
def test_a_number_that_is_none_goes_in_and_comes_out(caller: Caller) -> None:
    if isinstance(caller, TritonJson):
        return  # its JSON has no word for it: `null`, below
    hour = HOUR.copy()
    hour[0, 1], hour[1, 0] = np.nan, -np.inf
    answer = score(caller.ask("ctr", INPUTS | {"hour": hour}))
    assert np.isnan(answer[0, 0])
    assert answer[1, 0] == -np.inf
    np.testing.assert_allclose(answer[2:], scores()[2:], rtol=1e-5)


def test_metadata_names_inputs_and_outputs_of_the_dense_part(server: ServerThread) -> None:
    wire = TritonHttp(server)
    model = wire.client.get_model_metadata("ctr")
    assert {"name": "hour", "datatype": "FP32", "shape": [-1, 2]} in model["inputs"]
    assert model["outputs"][0] == {"name": "score", "datatype": "FP32", "shape": [-1, 1]}
    config = wire.client.get_model_config("rich")
    assert {"name": "echo", "data_type": "TYPE_STRING", "dims": [-1]} in config["output"]
    assert {"name": "at", "data_type": "TYPE_INT64", "dims": [1, -1]} in config["output"]
    assert {"name": "word", "data_type": "TYPE_STRING", "dims": [-1], "optional": True} in config["input"]
    wire.close()


def metrics(url: str) -> dict[tuple[str, ...], float]:
    text = httpx.get(f"{url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


@over_all(callers=[TritonHttp, TritonGrpc, TfsColumns, TfsGrpc])
def test_time_in_look_ups_and_in_onnx_runtime_is_counted_apart(caller: Caller) -> None:
    url = caller.server.url
    caller.ask("ctr", INPUTS)
    before = metrics(url)
    for _ in range(3):
        caller.ask("ctr", INPUTS)
    caller.ask("ctr", {"item_id": KEYS8}, ["item_id"])  # no prediction
    after = metrics(url)

    def grown(*name: str) -> float:
        return after[name] - before[name]

    assert grown("tierstore_predicts_total", "ctr") == 3
    parts = {p: grown("tierstore_predict_seconds_total", "ctr", p) for p in ("total", "queue", "lookup", "dense")}
    assert min(parts.values()) > 0
    assert parts["lookup"] + parts["dense"] + parts["queue"] < parts["total"]
    assert grown("tierstore_dense_runs_total", "ctr") == 3
    assert 0 < grown("tierstore_dense_seconds_total", "ctr") <= parts["dense"] * 1.01
    assert after["tierstore_dense_buffer_bytes", "ctr"] <= after[("tierstore_dense_buffer_limit_bytes",)]
    assert before[("tierstore_inflight_bytes",)] == 0


def test_a_dense_part_that_is_not_served_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "missing_extra", lambda: "install tierstore[dense]")
    with in_process(), Store(settings_for(tmp_path)) as store:
        store.load_snapshot(write_snapshot(tmp_path, dense=om.linear(WEIGHTS)))
        with ServerThread(store) as server:
            wire = TritonHttp(server)
            assert "tierstore[dense]" in wire.client.get_model_metadata("ctr")["parameters"]["dense"]
            assert wire.ask("ctr", {"item_id": KEYS8}).keys() == {"item_id"}
            with pytest.raises(Refused, match=r"kept but not served: install tierstore\[dense\]"):
                wire.ask("ctr", {"item_id": KEYS8}, ["score"])
            wire.close()
            with tierstore.Client(server.url) as client:
                with pytest.raises(
                    MissingExtra, match=r"the dense part is kept, not served: install tierstore\[dense\]"
                ):
                    client.predict("ctr", {"item_id": KEYS8})
                assert list(client.predict("ctr", {"item_id": KEYS8}, outputs=["item_id"])) == ["item_id"]


def test_a_missing_number_is_null_in_both_directions(server: ServerThread, tmp_path: Path) -> None:
    graph = om.build(
        [om.node("Add", "item_id hour", "score")],
        {"item_id": (om.FLOAT, ["batch", 4]), "hour": (om.FLOAT, ["batch", 1])},
        {"score": (om.FLOAT, ["batch", 4])},
    )
    server.service.store.load_snapshot(write_snapshot(tmp_path, model="lacking", dense=graph))
    keys = {"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 2]}
    hours = {"name": "hour", "datatype": "FP32", "shape": [2, 1], "data": [None, 1.0]}
    with httpx.Client(base_url=server.url) as http:
        answer = http.post("/v2/models/lacking/infer", json={"inputs": [keys, hours]})
        assert answer.status_code == 200, answer.text
        scores = answer.json()["outputs"][0]["data"]
        assert scores[:4] == [None] * 4
        assert None not in scores[4:]
        hours |= {"datatype": "INT64", "data": [None, 1]}
        assert http.post("/v2/models/lacking/infer", json={"inputs": [keys, hours]}).status_code == 400
