"""TensorFlow Serving's REST interface, beside what all protocols answer alike (`dataplane/test_answers.py`): its words, forms and documents."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.predict import onnx_models as om
from tests.service.conftest import eventually, load
from tests.service.fake_store import DEFAULT, ITEMS, USERS, VERSION
from tests.service.scenes import rows, write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

LOW, HIGH = -(1 << 63), (1 << 63) - 1
KEYS = [5, 0, 100, LOW, HIGH, 5]


def items(keys: list[int]) -> np.ndarray:
    return rows("item", [ITEMS.get(key, DEFAULT) for key in keys])


def users(keys: list[str]) -> np.ndarray:
    return rows("user", [USERS.get(key, 0.0) for key in keys])


def predict(http: httpx.Client, body: dict[str, Any], path: str = "ctr") -> Any:
    """The answer to a predict request that is to succeed."""
    response = http.post(f"/v1/models/{path}:predict", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def refusal(http: httpx.Client, body: Any, path: str = "ctr", status: int = 400) -> str:
    """The message of a predict request that is to be refused."""
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    response = http.post(f"/v1/models/{path}:predict", content=content)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    return str(response.json()["error"])


# --- predict


def test_one_output_is_a_bare_list_and_several_are_objects(http: httpx.Client) -> None:
    answer = predict(http, {"inputs": {"item_id": KEYS}})
    assert answer.keys() == {"outputs"}
    np.testing.assert_array_equal(np.array(answer["outputs"], np.float32), items(KEYS))
    assert predict(http, {"inputs": {"item_id": [1], "user": ["u1"]}})["outputs"].keys() == {"item_id", "user"}
    answer = predict(http, {"instances": [{"item_id": key} for key in KEYS]})
    assert answer.keys() == {"predictions"}
    np.testing.assert_array_equal(np.array(answer["predictions"], np.float32), items(KEYS))
    rows_of = predict(http, {"instances": [{"item_id": 7, "user": "u1"}] * 3})["predictions"]
    assert [row.keys() for row in rows_of] == [{"item_id", "user"}] * 3


def test_values_without_a_name_are_for_the_only_input(http: httpx.Client) -> None:
    assert predict(http, {"instances": [1, 2]}, "one")["predictions"] == items([1, 2]).tolist()
    assert predict(http, {"inputs": [1, 2]}, "one")["outputs"] == items([1, 2]).tolist()
    assert predict(http, {"instances": ["u1", {"b64": "dTI="}]}, "names")["predictions"] == users(["u1", "u2"]).tolist()


def test_strings_may_come_in_base64(http: httpx.Client) -> None:
    coded = [{"b64": base64.b64encode(name.encode()).decode()} for name in ("u1", "λ")]
    assert predict(http, {"inputs": {"user": [*coded, "u2"]}})["outputs"] == users(["u1", "λ", "u2"]).tolist()
    assert predict(http, {"instances": [{"user": coded[1]}]})["predictions"] == users(["λ"]).tolist()
    assert "not base64" in refusal(http, {"inputs": {"user": [{"b64": "dTE"}]}})
    assert "expected strings" in refusal(http, {"inputs": {"user": [{"b64": "dTE=", "x": 1}]}})
    assert "expected strings" in refusal(http, {"inputs": {"user": [{"b64": "dTE="}, 5]}})


def test_infinities_have_their_words(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Any) -> None:
    _, _, http = own
    load(http, write_snapshot(tmp_path, shift=50_000.0))
    for form, key in (("inputs", "outputs"), ("instances", "predictions")):
        wanted: Any = {"item_id": [1]} if form == "inputs" else [{"item_id": 1}]
        answer = http.post("/v1/models/ctr:predict", json={form: wanted, "signature_name": "lookup_float16"})
        assert "Infinity" in answer.text
        row = json.loads(answer.text)[key][0]
        assert row[:1] == [50016.0]
        assert row[1:] == [math.inf] * 3
    # the Open Inference Protocol is JSON, which has none
    tensor = {"name": "item_id", "datatype": "INT64", "shape": [1], "data": [1]}
    wanted = {"inputs": [tensor], "outputs": [{"name": "item_id", "parameters": {"dtype": "FP16"}}]}
    answer = http.post("/v2/models/ctr/infer", json=wanted)
    assert json.loads(answer.text, parse_constant=pytest.fail)["outputs"][0]["data"] == [50016.0, None, None, None]


def test_bodies_and_answers_may_be_compressed(http: httpx.Client) -> None:
    body = gzip.compress(json.dumps({"inputs": {"item_id": KEYS}}).encode())
    headers = {"content-encoding": "gzip", "accept-encoding": "gzip, identity;q=0"}
    response = http.post("/v1/models/ctr:predict", content=body, headers=headers)
    assert response.headers["content-encoding"] == "gzip"
    assert response.json()["outputs"] == items(KEYS).tolist()


WRONG: list[tuple[Any, str]] = [
    ("", "not valid JSON"),
    ("[1]", "JSON object"),
    ('{"inputs": [NaN, }', "not valid JSON"),
    ('{"inputs": ' + "[" * 100_000 + '"NaN"' + "]" * 100_000 + "}", "nested|recursion|valid JSON"),
    ({}, "got neither"),
    ({"inputs": {"item_id": [1]}, "instances": [1]}, "got both"),
    ({"instances": []}, "at least one"),
    ({"instances": {"item_id": 1}}, "expected a list"),
    ({"instances": [1, 2]}, "model with one input"),
    ({"inputs": [1, 2]}, "model with one input"),
    ({"instances": [{"nope": 1}]}, "unknown input 'nope'.*item_id"),
    ({"inputs": {"item_id": 5}}, "expected a list"),
    ({"inputs": {"item_id": [[1], [2, 3]]}}, "unevenly"),
    ({"inputs": {"item_id": [5.0]}}, "holds float"),
    ({"inputs": {"item_id": [1, 1 << 63]}}, "'item_id': element 1.*9223372036854775808.*does not fit INT64"),
    ({"inputs": {"clicked": [1, 2], "clicked.weights": [1, 1e39]}}, r"'clicked.weights': element 1.*1e\+39.*does not fit FP32"),
    ({"instances": [{"clicked": [1, 2], "clicked.weights": [1, 2]}, {"clicked": [1, 2], "clicked.weights": [-1e39, 2]}]}, r"'clicked.weights': element \[1, 0\].*-1e\+39"),
    ('{"inputs": {"clicked": [1, 2], "clicked.weights": [1, 1e400]}}', "1e400|JSON.*infinity"),
    ('{"inputs": {"clicked": [1, 2], "clicked.weights": [NaN, 1e400]}}', "1e400 is beyond FP64"),
    ({"inputs": {"user": [None]}}, "holds NoneType"),
    ({"instances": [{"item_id": 1}, 5]}, "got both"),
    ({"instances": [{"item_id": 1}, {"user": "u"}]}, "lacks input 'item_id'"),
    ({"instances": [{"item_id": 1}, {"item_id": 2, "user": "u"}]}, "same inputs"),
    ({"instances": [{"item_id": [1]}, {"item_id": [1, 2]}]}, "unevenly"),
    ({"instances": [{"item_id": [1]}, {"item_id": 1}]}, "unevenly"),
    ({"instances": [{"clicked": [1], "clicked.offsets": 0}]}, "leave it out"),
    ({"instances": [{"clicked": [1], "clicked.weights": [1]}, {"clicked": [1, 2], "clicked.weights": [1]}]}, "one weight"),
    ({"instances": [{"clicked": [1]}, {"clicked": [[1, 2], [3]]}]}, "holds list"),
    ({"instances": [{"clicked": [1]}, {"clicked": [1, 2]}], "output_filter": ["clicked", "clicked.found"]}, "no rows"),
    ({"inputs": {"item_id": [1]}, "output_filter": ["item_id", "item_id"]}, "twice"),
    ({"inputs": {"item_id": [1]}, "output_filter": "item_id"}, "output_filter"),
    ({"inputs": {"item_id": [1]}, "output_filter": [["item_id"]]}, "output_filter"),
    ({"inputs": {"item_id": [1]}, "signature_name": "nope"}, "unknown signature 'nope'.*serving_default"),
    ({"inputs": {"item_id": [1]}, "signature_name": 5}, "unknown signature"),
]  # fmt: skip


def test_what_is_wrong_is_said(http: httpx.Client) -> None:
    for body, says in WRONG:
        message = refusal(http, body)
        assert re.search(says, message), message


# --- status and metadata


def test_model_status(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Any) -> None:
    _, _, http = own
    load(http, write_snapshot(tmp_path))
    load(http, write_snapshot(tmp_path, VERSION + 1))

    def entry(version: int, state: str) -> dict[str, Any]:
        return {"version": str(version), "state": state, "status": {"error_code": "OK", "error_message": ""}}

    both = [entry(VERSION + 1, "AVAILABLE"), entry(VERSION, "END")]
    assert http.get("/v1/models/ctr").json() == {"model_version_status": both}
    assert http.get(f"/v1/models/ctr/versions/{VERSION}").json() == {"model_version_status": both[1:]}
    assert http.get("/v1/models/ctr/versions/0").json() == {"model_version_status": both}
    for path in ("nope", "ctr/versions/7", "ctr/labels/nope", "nope/metadata", "ctr/versions/7/metadata"):
        response = http.get(f"/v1/models/{path}")
        assert response.status_code == 404, path
        assert response.json().keys() == {"error"}


def test_metadata(http: httpx.Client) -> None:
    document = http.get(f"/v1/models/ctr/versions/{VERSION}/metadata").json()
    assert document["model_spec"] == {"name": "ctr", "signature_name": "", "version": str(VERSION)}
    assert document == http.get("/v1/models/ctr/metadata").json()
    signatures = document["metadata"]["signature_def"]["signature_def"]
    assert signatures.keys() == {"serving_default", "lookup", "lookup_float16"}
    default = signatures["serving_default"]
    assert default["method_name"] == "tensorflow/serving/predict"
    assert default["inputs"]["user"]["dtype"] == "DT_STRING"
    assert default["inputs"]["clicked.weights"]["dtype"] == "DT_FLOAT"
    assert default["inputs"]["item_id"] == {
        "dtype": "DT_INT64",
        "tensor_shape": {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False},
        "name": "item_id:0",
    }
    assert signatures["lookup"]["outputs"]["item_id"]["tensor_shape"]["dim"][1] == {"size": "4", "name": ""}
    assert signatures["lookup_float16"]["outputs"]["item_id"]["dtype"] == "DT_HALF"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "", 400),
        ("POST", "/ctr", 405),
        ("GET", "/ctr:predict", 405),
        ("POST", "/ctr:classify", 400),
        ("POST", "/ctr/versions/1:regress", 400),
        ("POST", "/ctr:explain", 404),
        ("POST", "/nope:predict", 404),
        ("POST", "/ctr/versions/x:predict", 404),
        ("GET", "/ctr/nope", 404),
        ("GET", "/ctr%2Fnope:x", 404),
    ],
)
def test_other_paths_are_refused(http: httpx.Client, method: str, path: str, status: int) -> None:
    response = http.request(method, "/v1/models" + path)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}


def test_requests_are_counted(http: httpx.Client, server: ServerThread) -> None:
    def counts() -> tuple[int, int]:
        answered = server.service.request_times.histograms.get(("tfs_http", "ok"))
        successes = server.service.inference_stats.of("ctr", VERSION).success
        return 0 if answered is None else sum(answered.counts), successes

    before = counts()
    predict(http, {"inputs": {"item_id": [1]}})
    # an answer that had to wait for a row is counted once it was sent
    eventually(lambda: counts() == (before[0] + 1, before[1] + 1), "it is counted")
    eventually(lambda: server.service.inflight.used_bytes == 0, "its bytes are given back")


def test_a_version_that_cannot_be(http: httpx.Client) -> None:
    body = {"inputs": {"item_id": [1]}}
    assert predict(http, body, "ctr/versions/0")["outputs"] == items([1]).tolist()
    assert "64 bits" in refusal(http, body, f"ctr/versions/{1 << 63}")
    assert "no label" in refusal(http, body, f"ctr/labels/{VERSION}", 404)


def test_labels_and_a_canary_in_documents(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Any) -> None:
    store, server, http = own
    load(http, write_snapshot(tmp_path))
    load(http, write_snapshot(tmp_path, VERSION + 1), activate=False)
    store.canary("ctr", VERSION + 1, share=0.5)
    store.label("ctr", "spring", VERSION + 1)
    states = http.get("/v1/models/ctr").json()["model_version_status"]
    assert [entry["state"] for entry in states] == ["AVAILABLE", "AVAILABLE"]
    (one,) = http.get("/v1/models/ctr/labels/spring").json()["model_version_status"]
    assert one["version"] == str(VERSION + 1)
    for label in ("stable", "canary"):
        predict(http, {"inputs": {"item_id": [3]}}, f"ctr/labels/{label}")
        metadata = http.get(f"/v1/models/ctr/labels/{label}/metadata").json()
        assert metadata["model_spec"]["version"] == str(VERSION + (label == "canary"))
    assert len(server.service.signatures) == 2


def test_what_is_kept_but_not_served_is_not_there(own: tuple[Store, ServerThread, httpx.Client], tmp_path: Any) -> None:
    store, _, http = own
    load(http, write_snapshot(tmp_path))
    store.deactivate("ctr")
    refusal(http, {"inputs": {"item_id": [3]}}, status=404)
    assert http.get("/v1/models/ctr").json()["model_version_status"][0]["state"] == "END"


def test_a_dense_part_in_the_words_of_tensorflow_serving(
    own: tuple[Store, ServerThread, httpx.Client], tmp_path: Any
) -> None:
    """Signatures tell scores from vectors, strings come as base64 where their name says so, and a delta may change it all."""
    store, _, http = own
    nodes = [om.node("Identity", "word", "echo_bytes"), om.node("ReduceSum", "item_id axis", "total", keepdims=0)]
    inputs: om.Ports = {"item_id": (om.FLOAT, ["n", 4]), "word": (om.STRING, ["n"])}
    outputs: om.Ports = {"echo_bytes": (om.STRING, ["n"]), "total": (om.FLOAT, ["n"])}
    load(http, write_snapshot(tmp_path, dense=om.build(nodes, inputs, outputs, {"axis": np.array([1])})))
    given = {"word": ["λ", {"b64": "dTE="}], "item_id": [1, 2]}
    answer = predict(http, {"inputs": given})["outputs"]
    assert answer == {"echo_bytes": [{"b64": "zrs="}, {"b64": "dTE="}], "total": items([1, 2]).sum(1).tolist()}
    assert predict(http, {"inputs": {"item_id": [1]}, "signature_name": "lookup"})["outputs"] == items([1]).tolist()
    document = http.get("/v1/models/ctr/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert document["serving_default"]["outputs"].keys() == {"echo_bytes", "total"}
    assert document["serving_default"]["inputs"]["word"]["dtype"] == "DT_STRING"
    assert document["lookup"]["outputs"].keys() == {"item_id", "clicked", "user", "big"}
    with tierstore.DeltaWriter(tmp_path / "1", model="ctr", seq=1) as writer:
        writer.dense(om.linear({"item_id": [1, 0, 0, 0], "day": [2.0]}))
    store.apply_delta((tmp_path / "1").read_bytes())
    assert predict(http, {"inputs": {"item_id": [7], "day": [[3.0]]}}) == {"outputs": [[13.0]]}
    assert "day" in refusal(http, {"inputs": given})
