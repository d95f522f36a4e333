"""TensorFlow Serving's interface to models with a dense part: scores by rows, by columns and over gRPC."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.conftest import GRPC, settings_for
from tests.service.fake_store import DEFAULT, ITEMS
from tests.service.scenes import rows, write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

WEIGHTS = {"item_id": [1.0, 0.5, 0.25, 0.125], "clicked": [1.0, 1.0, 1.0, 1.0], "hour": [1.0, -1.0]}
KEYS, BAGS = [5, 0, 100], [[1, 2], [], [3]]
HOURS = [[1.0, 2.0], [0.0, 0.5], [4.0, 8.0]]


def rich() -> bytes:
    """Strings, half floats, and a shape that the data decide."""
    nodes = [
        om.node("NonZero", "flags", "at"),
        om.node("Identity", "word", "echo_bytes"),
        om.node("Cast", "item_id", "half", to=om.HALF),
    ]
    inputs: om.Ports = {"item_id": (om.FLOAT, ["n", 4]), "flags": (om.INT64, ["m"]), "word": (om.STRING, ["n"])}
    outputs: om.Ports = {
        "at": (om.INT64, [1, None]),
        "echo_bytes": (om.STRING, ["n"]),
        "half": (om.HALF, ["n", 4]),
    }
    return om.build(nodes, inputs, outputs)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, ServerThread]]:
    """The models `ctr`, a sum over two features and an input of its own, and `rich`."""
    root = tmp_path_factory.mktemp("tfs_predict")
    with in_process(), Store(settings_for(root, grpc_port=GRPC)) as store:
        store.load_snapshot(write_snapshot(root, dense=om.linear(WEIGHTS, 0.5)))
        store.load_snapshot(write_snapshot(root, model="rich", dense=rich()))
        with ServerThread(store) as server:
            yield store, server


@pytest.fixture
def web(served: tuple[Store, ServerThread]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1].url, timeout=60) as client:
        yield client


def predict(web: httpx.Client, body: dict[str, Any], model: str = "ctr") -> Any:
    response = web.post(f"/v1/models/{model}:predict", content=json.dumps(body))
    assert response.status_code == 200, response.text
    return json.loads(response.text)


def items(keys: list[int]) -> np.ndarray:
    return rows("item", [ITEMS.get(key, DEFAULT) for key in keys])


def scores() -> np.ndarray:
    clicked = np.array([items(bag).mean(0) if bag else np.zeros(4) for bag in BAGS])
    total = items(KEYS) @ WEIGHTS["item_id"] + clicked @ WEIGHTS["clicked"] + np.array(HOURS) @ WEIGHTS["hour"]
    return np.asarray(total + 0.5).reshape(3, 1)


COLUMNS = {"hour": HOURS, "item_id": KEYS, "clicked": [1, 2, 3], "clicked.offsets": [0, 2, 2]}
ROWS = [{"clicked": bag, "hour": hour, "item_id": key} for bag, hour, key in zip(BAGS, HOURS, KEYS, strict=True)]


def test_scores_are_the_default_answer_in_both_forms(web: httpx.Client) -> None:
    np.testing.assert_allclose(predict(web, {"inputs": COLUMNS})["outputs"], scores(), rtol=1e-6)
    np.testing.assert_allclose(predict(web, {"instances": ROWS})["predictions"], scores(), rtol=1e-6)


def test_a_number_that_is_none_goes_in_and_comes_out(web: httpx.Client) -> None:
    hours = [[1.0, float("nan")], [float("-inf"), 0.0], HOURS[2]]
    answer = np.array(predict(web, {"inputs": COLUMNS | {"hour": hours}})["outputs"])
    assert np.isnan(answer[0, 0])
    assert answer[1, 0] == -np.inf
    np.testing.assert_allclose(answer[2], scores()[2], rtol=1e-6)


def test_vectors_come_from_a_model_with_a_dense_part(web: httpx.Client) -> None:
    body = {"inputs": {"item_id": KEYS}, "signature_name": "lookup"}
    assert predict(web, body)["outputs"] == items(KEYS).tolist()
    picked = predict(web, {"instances": ROWS, "output_filter": ["score", "item_id"]})["predictions"]
    np.testing.assert_allclose([row["score"] for row in picked], scores(), rtol=1e-6)
    np.testing.assert_array_equal([row["item_id"] for row in picked], items(KEYS))
    body = {"inputs": COLUMNS, "output_filter": ["score", "item_id"], "signature_name": "lookup_float16"}
    assert predict(web, body)["outputs"]["item_id"] == items(KEYS).tolist()


def test_outputs_of_every_kind(web: httpx.Client) -> None:
    inputs = {"word": ["λ", {"b64": "dTE="}], "flags": [0, 3, 0, 5], "item_id": [1, 2]}
    answer = predict(web, {"inputs": inputs}, "rich")["outputs"]
    assert answer == {"at": [[1, 3]], "echo_bytes": [{"b64": "zrs="}, {"b64": "dTE="}], "half": items([1, 2]).tolist()}


def test_what_the_dense_part_lacks_is_said(web: httpx.Client) -> None:
    for inputs, says in (({"item_id": KEYS}, "needs the inputs"), (COLUMNS | {"nope": [1]}, "unknown input 'nope'")):
        response = web.post("/v1/models/ctr:predict", json={"inputs": inputs})
        assert response.status_code == 400
        assert says in response.json()["error"]
        assert "hour" in response.json()["error"]


def test_metadata_distinguishes_scores_from_vectors(web: httpx.Client) -> None:
    document = web.get("/v1/models/ctr/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert document["serving_default"]["outputs"].keys() == {"score"}
    assert document["serving_default"]["inputs"]["hour"]["dtype"] == "DT_FLOAT"
    assert document["lookup"]["outputs"].keys() == {"item_id", "clicked", "user", "big"}


def test_a_delta_may_bring_another_dense_part(tmp_path: Path) -> None:
    with in_process(), Store(settings_for(tmp_path)) as store:
        store.load_snapshot(write_snapshot(tmp_path, dense=om.linear(WEIGHTS)))
        with ServerThread(store) as server, httpx.Client(base_url=server.url) as web:
            assert "outputs" in predict(web, {"inputs": COLUMNS})
            delta = io.BytesIO()
            with tierstore.DeltaWriter(delta, model="ctr", seq=1, event_time=datetime.now(UTC)) as writer:
                writer.dense(om.linear({"item_id": [1, 0, 0, 0], "day": [2.0]}))
            store.apply_delta(delta.getvalue())
            answer = predict(web, {"inputs": {"item_id": [7], "day": [[3.0]]}})
            assert answer == {"outputs": [[13.0]]}
            assert web.post("/v1/models/ctr:predict", json={"inputs": COLUMNS}).status_code == 400


def test_scores_over_grpc(served: tuple[Store, ServerThread]) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    from tests.service.tfserving.test_grpc import PredictResponse, arrays, request

    with grpc.insecure_channel(served[1].grpc_target) as channel:
        ask = channel.unary_unary(
            "/tensorflow.serving.PredictionService/Predict", lambda m: m.SerializeToString(), PredictResponse.FromString
        )
        inputs = {
            "clicked": np.array([1, 2, 3]),
            "clicked.offsets": np.array([0, 2, 2]),
            "item_id": np.array(KEYS),
            "hour": np.array(HOURS, np.float32),
        }
        answer = arrays(ask(request(inputs), timeout=30))
        np.testing.assert_allclose(answer["score"], scores(), rtol=1e-6)
        words = {"word": np.array(["λ", "u1"]), "flags": np.array([0, 3, 5]), "item_id": np.array([1, 2])}
        answer = ask(request(words, model="rich"), timeout=30).outputs
        assert [text.decode() for text in answer["echo_bytes"].string_val] == ["λ", "u1"]
        assert [dim.size for dim in answer["at"].tensor_shape.dim] == [1, 2]
        assert np.frombuffer(answer["half"].tensor_content, np.float16).reshape(2, 4).tolist() == items([1, 2]).tolist()
