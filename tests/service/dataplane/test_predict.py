"""Predictions through the service: unchanged clients get scores and rows of one moment, over HTTP and gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

import tierstore
from tests.engine import scenes as engine_scenes
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.conftest import GRPC, settings_for
from tests.service.fake_store import VERSION
from tests.service.scenes import KEYS, items, write_snapshot
from tests.service.wires import GrpcWire, HttpWire, Wire
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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, ServerThread]]:
    """The models `ctr`, a sum over two features and an input of its own, `rich` and `pages`."""
    root = tmp_path_factory.mktemp("predict")
    with in_process(), Store(settings_for(root, grpc_port=GRPC)) as store:
        store.load_snapshot(write_snapshot(root, dense=om.linear(WEIGHTS, 0.5)))
        store.load_snapshot(write_snapshot(root, model="rich", dense=rich()))
        store.load_snapshot(write_snapshot(root, model="pages", dense=pages()))
        with ServerThread(store) as server:
            yield store, server


@pytest.fixture(params=[HttpWire, GrpcWire])
def wire(request: pytest.FixtureRequest, served: tuple[Store, ServerThread]) -> Iterator[Wire]:
    if request.param is GrpcWire:
        pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    wire: Wire = request.param(served[1])
    yield wire
    wire.client.close()


def wanted(wire: Wire, **binary: bool) -> list[Any]:
    return [
        wire.tensor("item_id", KEYS8, "INT64", **binary),
        wire.tensor("clicked", KEYS8.reshape(8, 1), "INT64", **binary),
        wire.tensor("hour", HOUR, "FP32", **binary),
    ]


def scores() -> np.ndarray:
    rows = items(KEYS8)
    return (rows @ WEIGHTS["item_id"] + rows @ WEIGHTS["clicked"] + HOUR @ WEIGHTS["hour"] + 0.5).reshape(8, 1)


@pytest.mark.parametrize("binary", [True, False])
def test_scores_are_the_default_answer(wire: Wire, binary: bool) -> None:
    answer = wire.client.infer("ctr", wanted(wire, binary=binary), outputs=None)
    assert wire.answered(answer) == (str(VERSION), "", ["score"])
    np.testing.assert_allclose(answer.as_numpy("score"), scores(), rtol=1e-5)
    assert answer.as_numpy("score").dtype == np.float32


def test_requests_of_one_structure_and_any_size_are_answered_each_by_its_own(wire: Wire) -> None:
    draw = np.random.default_rng(4)
    for number, n in enumerate([8, 3, 0, 1, 57, 8, 200]):
        items_asked, clicked = draw.choice(KEYS, n), draw.choice(KEYS, n)
        hour = draw.normal(size=(n, 2)).astype(np.float32)
        inputs = [
            wire.tensor("item_id", items_asked, "INT64"),
            wire.tensor("clicked", clicked, "INT64"),
            wire.tensor("hour", hour, "FP32"),
        ]
        if number % 2:
            inputs.reverse()
        answer = wire.client.infer("ctr", inputs, outputs=None, request_id=f"{number}")
        assert wire.answered(answer) == (str(VERSION), f"{number}", ["score"])
        expected = (
            items(items_asked) @ WEIGHTS["item_id"] + items(clicked) @ WEIGHTS["clicked"] + hour @ WEIGHTS["hour"]
        )
        np.testing.assert_allclose(answer.as_numpy("score"), expected.reshape(n, 1) + 0.5, rtol=1e-4)
    with pytest.raises(InferenceServerException, match=r"inputs .* must agree in dimension 'batch'"):
        wire.client.infer(
            "ctr",
            [
                wire.tensor("item_id", KEYS[:3], "INT64"),
                wire.tensor("clicked", KEYS[:2], "INT64"),
                wire.tensor("hour", HOUR[:3], "FP32"),
            ],
        )


@pytest.mark.parametrize("binary", [True, False])
def test_rows_may_be_requested_with_scores(wire: Wire, binary: bool) -> None:
    inputs = [*wanted(wire), wire.tensor("big", np.array([5], np.uint64), "UINT64")]
    names = ["item_id", "score", "item_id.found", "big"]
    answer = wire.client.infer("ctr", inputs, outputs=[wire.wanted(name, binary=binary) for name in names])
    np.testing.assert_allclose(answer.as_numpy("score"), scores(), rtol=1e-5)
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS8))
    assert answer.as_numpy("item_id.found").tolist() == [key in engine_keys() for key in KEYS8.tolist()]
    assert answer.as_numpy("big").shape == (1, 2)
    halves = wire.client.infer("ctr", inputs, outputs=[wire.wanted("item_id", dtype="FP16"), wire.wanted("score")])
    np.testing.assert_array_equal(halves.as_numpy("item_id"), items(KEYS8).astype(np.float16))
    np.testing.assert_allclose(halves.as_numpy("score"), scores(), rtol=1e-5)


def engine_keys() -> set[int]:
    from tests.service.fake_store import ITEMS

    return set(ITEMS)


def test_rows_alone_need_nothing_of_the_dense_part(wire: Wire) -> None:
    answer = wire.client.infer("ctr", [wire.tensor("item_id", KEYS8, "INT64")], outputs=[wire.wanted("item_id")])
    np.testing.assert_array_equal(answer.as_numpy("item_id"), items(KEYS8))


def test_ragged_bags_with_weights_are_pooled_into_the_graph(wire: Wire) -> None:
    keys, offsets = np.array([1, 2, 3, 4]), np.array([0, 3, 3])
    weights = np.array([1, 2, 1, 5], np.float32)
    inputs = [
        wire.tensor("item_id", np.array([1, 2, 3]), "INT64"),
        wire.tensor("clicked", keys, "INT64"),
        wire.tensor("clicked.offsets", offsets, "INT64"),
        wire.tensor("clicked.weights", weights, "FP32"),
        wire.tensor("hour", np.zeros((3, 2), np.float32), "FP32"),
    ]
    bags = [np.average(items(keys[:3]), axis=0, weights=weights[:3]), np.zeros(4), items(keys[3:])[0]]
    expected = items(np.array([1, 2, 3])) @ WEIGHTS["item_id"] + np.array(bags).sum(1) + 0.5
    np.testing.assert_allclose(wire.client.infer("ctr", inputs).as_numpy("score")[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("binary", [True, False])
def test_outputs_of_every_kind_and_of_sizes_that_the_data_decide(wire: Wire, binary: bool) -> None:
    words = np.array(["a", "", "né"], object)
    inputs = [
        wire.tensor("item_id", np.array([1, 2, 3]), "INT64"),
        wire.tensor("flags", np.array([0, 1, 0, 1, 1]), "INT64"),
        wire.tensor("word", words, "BYTES"),
    ]
    names = ["total", "at", "echo", "half", "item_id"]
    answer = wire.client.infer("rich", inputs, outputs=[wire.wanted(name, binary=binary) for name in names])
    rows = items(np.array([1, 2, 3]))
    np.testing.assert_array_equal(answer.as_numpy("total")[:, 0], rows.sum(1))
    assert answer.as_numpy("at").tolist() == [[1, 3, 4]]
    echo = [word if isinstance(word, str) else word.decode() for word in answer.as_numpy("echo").tolist()]
    assert echo == words.tolist()
    np.testing.assert_array_equal(answer.as_numpy("item_id"), rows)
    assert answer.as_numpy("half").astype(np.float32).tolist() == rows.tolist()
    fixed = wire.client.infer("rich", inputs, outputs=[wire.wanted("total"), wire.wanted("half")])
    np.testing.assert_array_equal(fixed.as_numpy("total")[:, 0], rows.sum(1))


def test_what_does_not_fit_is_the_clients_error(wire: Wire) -> None:
    item, clicked, hour = wanted(wire)
    short = wire.tensor("hour", HOUR[:3], "FP32")
    wide = wire.tensor("hour", HOUR.astype(np.float64), "FP64")
    for inputs, outputs, words in (
        ([item], None, "needs the inputs clicked, hour as well; got item_id"),
        ([item, clicked, short], None, "'item_id' and 'hour' must agree in dimension 'batch': got 8 and 3"),
        ([item, clicked, wide], None, "'hour': the dense part takes FP32 of shape .*, got FP64"),
        ([item, clicked, hour], [wire.wanted("score", dtype="FP16")], "'score' is FP32, not 'FP16'"),
        ([item, clicked, hour], [wire.wanted("nothing")], "takes hour and gives score"),
        ([item, wire.tensor("day", KEYS8, "INT64")], None, "unknown input 'day'"),
    ):
        with pytest.raises(InferenceServerException, match=words) as refused:
            wire.client.infer("ctr", inputs, outputs=outputs)
        assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    nothing = wire.tensor("page", np.empty((0, 1, 1), np.float32), "FP32")
    nothing.set_shape([0, 2**31 - 1, 2**31 - 1])  # no element, and no array of that shape
    with pytest.raises(InferenceServerException, match="'page': the sizes beside 0 are too large") as refused:
        wire.client.infer("pages", [nothing])
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    not_text = wire.tensor("word", np.array([b"\xff"] * 8, object), "BYTES")
    with pytest.raises(InferenceServerException, match="'word': the dense part's strings are UTF-8"):
        wire.client.infer("rich", [item, not_text, wire.tensor("flags", KEYS8, "INT64")])


def test_metadata_names_inputs_and_outputs_of_the_dense_part(served: tuple[Store, ServerThread]) -> None:
    wire = HttpWire(served[1])
    model = wire.client.get_model_metadata("ctr")
    assert {"name": "hour", "datatype": "FP32", "shape": [-1, 2]} in model["inputs"]
    assert model["outputs"][0] == {"name": "score", "datatype": "FP32", "shape": [-1, 1]}
    config = wire.client.get_model_config("rich")
    assert {"name": "echo", "data_type": "TYPE_STRING", "dims": [-1]} in config["output"]
    assert {"name": "at", "data_type": "TYPE_INT64", "dims": [1, -1]} in config["output"]
    assert {"name": "word", "data_type": "TYPE_STRING", "dims": [-1], "optional": True} in config["input"]
    wire.client.close()


def metrics(url: str) -> dict[tuple[str, ...], float]:
    text = httpx.get(f"{url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_time_in_look_ups_and_in_onnx_runtime_is_counted_apart(wire: Wire, served: tuple[Store, ServerThread]) -> None:
    url = served[1].url
    wire.client.infer("ctr", wanted(wire))
    before = metrics(url)
    for _ in range(3):
        wire.client.infer("ctr", wanted(wire))
    wire.client.infer("ctr", wanted(wire)[:1], outputs=[wire.wanted("item_id")])  # no prediction
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
            wire = HttpWire(server)
            assert "tierstore[dense]" in wire.client.get_model_metadata("ctr")["parameters"]["dense"]
            item = wire.tensor("item_id", KEYS8, "INT64")
            assert wire.answered(wire.client.infer("ctr", [item]))[2] == ["item_id"]
            with pytest.raises(InferenceServerException, match=r"kept but not served: install tierstore\[dense\]"):
                wire.client.infer("ctr", [item], outputs=[wire.wanted("score")])
            wire.client.close()
            with tierstore.Client(server.url) as client:
                with pytest.raises(
                    MissingExtra, match=r"the dense part is kept, not served: install tierstore\[dense\]"
                ):
                    client.predict("ctr", {"item_id": KEYS8})
                assert list(client.predict("ctr", {"item_id": KEYS8}, outputs=["item_id"])) == ["item_id"]


TELLTALE = {"user_id": 4, "clicked": 8}
MESSAGES = np.arange(1, 10)


def stamped(stamp: int, seq: int) -> bytes:
    rows = {t: (range(10), np.full((10, engine_scenes.DIM[t]), stamp, np.float32)) for t in ("user", "item")}
    return engine_scenes.delta(seq, rows, dense=om.telltale(stamp, TELLTALE))


def ask(client: httpx.Client) -> int:
    """The one number that rows and graph of an answer name."""
    shape = {"user_id": [9], "clicked": [9, 1]}
    inputs = [{"name": n, "datatype": "INT64", "shape": s, "data": MESSAGES.tolist()} for n, s in shape.items()]
    answer = client.post("/v2/models/ctr/infer", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    assert not any(outputs["off"]), answer.text
    (stamp,) = set(outputs["stamp"])
    return int(stamp)


def test_deltas_and_switches_under_load_fail_no_request_and_mix_no_answer(tmp_path: Path) -> None:
    over, wrong, seen = threading.Event(), [], [set() for _ in range(3)]  # type: ignore[var-annotated]
    with in_process(), Store(settings_for(tmp_path, lookup_threads=2)) as store:
        store.load_snapshot(engine_scenes.write_snapshot(tmp_path, dense=om.telltale(0, TELLTALE)))
        store.apply_delta(stamped(1, 1))

        def work(mine: set[int], url: str) -> None:
            try:
                with httpx.Client(base_url=url, timeout=30) as client:
                    while not over.is_set():
                        mine.add(ask(client))
            except BaseException as error:  # noqa: BLE001 - reported below
                wrong.append(error)

        with ServerThread(store) as server:
            threads = [threading.Thread(target=work, args=(mine, server.url)) for mine in seen]
            for thread in threads:
                thread.start()
            try:
                with httpx.Client(base_url=server.url, timeout=60) as admin:
                    for seq in range(2, 7):
                        if seq == 4:
                            where = engine_scenes.write_snapshot(
                                tmp_path, 2, delta_seq=3, dense=om.telltale(3, TELLTALE)
                            )
                            store.load_snapshot(where, activate=False)
                        sent = admin.post("/admin/models/ctr/deltas", content=stamped(seq, seq))
                        assert sent.status_code == 200, sent.text
                        assert ask(admin) == seq
                        if seq >= 5:
                            store.activate("ctr", 2 if seq == 5 else 1)
                            assert ask(admin) == seq
                        for _ in range(20_000):
                            if wrong or all(seq in mine for mine in seen):
                                break
                            over.wait(0.001)
            finally:
                over.set()
                for thread in threads:
                    thread.join(60)
    assert wrong == []
    assert all({5, 6} <= mine for mine in seen)


def test_the_embedded_store_and_the_service_give_the_same_scores(served: tuple[Store, ServerThread]) -> None:
    store, _ = served
    keys = KEYS8
    np.testing.assert_allclose(
        store.model("ctr").predict({"item_id": keys, "clicked": keys, "hour": HOUR}), scores(), rtol=1e-5
    )


def test_a_missing_number_is_null_in_both_directions(served: tuple[Store, ServerThread], tmp_path: Path) -> None:
    graph = om.build(
        [om.node("Add", "item_id hour", "score")],
        {"item_id": (om.FLOAT, ["batch", 4]), "hour": (om.FLOAT, ["batch", 1])},
        {"score": (om.FLOAT, ["batch", 4])},
    )
    store, server = served
    store.load_snapshot(write_snapshot(tmp_path, model="lacking", dense=graph))
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
