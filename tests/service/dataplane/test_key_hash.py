"""Features with a hash: whoever is asked, and however often, the row is that of the hashed key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import tierstore
from tests.hashed_keys import FEATURES, IDS, PADDING, ROWS, UNSIGNED, vectors, write_hashed, xxh3
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.upstream.scenes import Scene
from tests.service.wires import Wire
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("hashed")
    with Store(settings_for(root, grpc_port=GRPC)) as store:
        store.load_snapshot(write_hashed(root / "s"))
        with ServerThread(store) as server:
            eventually(lambda: server.service.reactors_state == "running", "the reactors")
            store.model("ctr").lookup("row", np.arange(ROWS))  # all rows are in memory from here on
            yield server


def tensor(wire: Wire, name: str, keys: Any) -> Any:
    if isinstance(keys, list):
        return wire.tensor(name, np.array([word.encode() for word in keys], object), "BYTES")
    return wire.tensor(name, keys, "UINT64" if keys.dtype == np.uint64 else "INT64")


def test_over_triton_s_protocols(wire: Wire, server: ServerThread) -> None:
    before = server.service.reactors.answers
    for feature, (_, keys, rows) in FEATURES.items():
        for _ in range(4):  # the first is planned by Python, and reactors learn from it
            found = [wire.wanted(feature), wire.wanted(f"{feature}.found")]
            answer = wire.client.infer("ctr", [tensor(wire, feature, keys)], outputs=found)
            np.testing.assert_array_equal(answer.as_numpy(feature), vectors(rows), feature)
            assert answer.as_numpy(f"{feature}.found").all()
    one_request = [tensor(wire, name, keys) for name, (_, keys, _) in FEATURES.items()]
    for _ in range(3):
        answer = wire.client.infer("ctr", one_request)
        for name, (_, _, rows) in FEATURES.items():
            np.testing.assert_array_equal(answer.as_numpy(name), vectors(rows), name)
    assert server.service.reactors.answers - before >= 3 * len(FEATURES) + 2


def test_any_keys_have_the_rows_that_python_gives_them(wire: Wire, server: ServerThread) -> None:
    """Compiled threads hash as `formats/key_hash.py` and `formats/trainer_hash.py` do."""
    rng, before = np.random.default_rng(4), server.service.reactors.answers
    for size in (1, 2, 700, 9000):
        codes = rng.integers(-(1 << 63), 1 << 63, size, np.int64, endpoint=False) >> rng.integers(0, 64, size)
        for feature, (how, some, _) in FEATURES.items():
            keys: Any = [f"w{code}" for code in codes.tolist()] if isinstance(some, list) else codes.view(some.dtype)
            expected = tierstore.row_numbers(keys, how)
            answer = wire.client.infer("ctr", [tensor(wire, feature, keys)], outputs=[wire.wanted(feature)])
            np.testing.assert_array_equal(answer.as_numpy(feature), vectors(expected), feature)
    assert server.service.reactors.answers - before >= 3 * len(FEATURES)


@pytest.mark.parametrize(("feature", "keys"), [("by_seed", UNSIGNED), ("unsigned", IDS), ("by_rest", UNSIGNED)])
def test_numbers_of_the_other_type_are_taken_where_they_are_of_both(wire: Wire, feature: str, keys: np.ndarray) -> None:
    """Before and after reactors have learned it: what only one type has is refused, and not taken for another number."""
    both = keys[[0, 1, 3]]
    rows = [FEATURES[feature][2][i] for i in (0, 1, 3)]
    for _ in range(3):
        answer = wire.client.infer("ctr", [tensor(wire, feature, both)], outputs=[wire.wanted(feature)])
        np.testing.assert_array_equal(answer.as_numpy(feature), vectors(rows))
        with pytest.raises(InferenceServerException, match=r"expected u?int64 keys"):
            wire.client.infer("ctr", [tensor(wire, feature, keys)], outputs=[wire.wanted(feature)])


def test_bags_and_their_padding_are_by_row(wire: Wire) -> None:
    offsets = wire.tensor("bag.offsets", np.array([0, 3], np.int64), "INT64")
    by_row = FEATURES["by_seed"][2]
    wanted = [sum(row for row in part if row != PADDING) for part in (by_row[:3], by_row[3:])]
    for _ in range(3):
        answer = wire.client.infer("ctr", [tensor(wire, "bag", IDS), offsets])
        np.testing.assert_array_equal(answer.as_numpy("bag"), vectors(wanted))


def test_keys_of_another_type_are_refused(wire: Wire) -> None:
    with pytest.raises(InferenceServerException, match="it hashes string keys; expected BYTES, got INT64"):
        wire.client.infer("ctr", [tensor(wire, "word", IDS)])
    kinds = {"HttpWire": lambda one: one["datatype"], "GrpcWire": lambda one: one.datatype}
    document = wire.client.get_model_metadata("ctr")
    inputs = document["inputs"] if isinstance(document, dict) else document.inputs
    names = [one["name"] if isinstance(one, dict) else one.name for one in inputs]
    types = dict(zip(names, map(kinds[type(wire).__name__], inputs), strict=True))
    assert (types["word"], types["by_seed"], types["unsigned"]) == ("BYTES", "INT64", "UINT64")
    assert (types["keras_word"], types["keras_id"], types["keras_unsigned"]) == ("BYTES", "INT64", "UINT64")


def test_over_tensorflow_serving_and_the_clients(server: ServerThread) -> None:
    for feature, (_, keys, rows) in FEATURES.items():
        values = keys if isinstance(keys, list) else keys.tolist()
        answer = httpx.post(
            f"{server.url}/v1/models/ctr:predict", json={"signature_name": "lookup", "inputs": {feature: values}}
        )
        assert answer.json()["outputs"] == vectors(rows).tolist(), answer.text
        with tierstore.Client(server.url) as client:
            np.testing.assert_array_equal(client.lookup("ctr", feature, keys), vectors(rows))
            entries = client.explain("ctr", feature, keys)["keys"]
            assert [(entry["code"], entry["found"]) for entry in entries] == [(row, True) for row in rows]
            assert entries[1]["key"] == values[1]


@pytest.mark.parametrize("values", [False, True])
def test_over_tensorflow_serving_s_grpc(server: ServerThread, values: bool) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    from tests.service.tfserving import test_grpc as tfs

    def tensors(name: str, keys: Any) -> dict[str, Any]:
        return {name: tfs.tensor(keys, values=values)}

    with grpc.insecure_channel(server.grpc_target) as channel:
        method = "/tensorflow.serving.PredictionService/Predict"
        call = channel.unary_unary(method, lambda m: m.SerializeToString(), tfs.PredictResponse.FromString)

        def predict(inputs: dict[str, Any], **more: Any) -> dict[str, np.ndarray]:
            return tfs.arrays(call(tfs.request(inputs, **more), timeout=30))

        for feature, (_, keys, rows) in FEATURES.items():
            for _ in range(3):
                answer = predict(tensors(feature, keys), picked=(feature, f"{feature}.found"))
                np.testing.assert_array_equal(answer[feature], vectors(rows), feature)
                assert answer[f"{feature}.found"].all()
        every = {
            name: tensor for name, (_, keys, _) in FEATURES.items() for name, tensor in tensors(name, keys).items()
        }
        answer = predict(every)
        for name, (_, _, rows) in FEATURES.items():
            np.testing.assert_array_equal(answer[name], vectors(rows), name)
        by_row = FEATURES["by_seed"][2]
        wanted = [sum(row for row in part if row != PADDING) for part in (by_row[:3], by_row[3:])]
        bags = tensors("bag", IDS) | {"bag.offsets": tfs.tensor(np.array([0, 3]), values=values)}
        np.testing.assert_array_equal(predict(bags)["bag"], vectors(wanted))
        matrix = tfs.tensor(IDS.reshape(2, 3), values=values)
        np.testing.assert_array_equal(predict({"bag": matrix})["bag"], vectors(wanted))
        half = predict(tensors("by_seed", IDS), signature_name="lookup_float16")["by_seed"]
        np.testing.assert_array_equal(half, vectors(by_row).astype(np.float16))
        for feature, keys, says in (
            ("word", IDS, "it hashes string keys; expected"),
            ("by_seed", UNSIGNED, "expected int64 keys, -2"),
            ("unsigned", IDS, "expected uint64 keys, 0 to"),
        ):
            with pytest.raises(grpc.RpcError, match=says) as refused:
                predict(tensors(feature, keys))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.thorough
def test_a_front_hashes_as_its_nodes_do(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    try:
        for own in ((0, 3), (4, 7)):
            scene.node(own).store.load_snapshot(write_hashed(tmp_path / f"s{own[0]}"))
        front = scene.front()
        for _ in range(2):
            for feature, (_, keys, rows) in FEATURES.items():
                np.testing.assert_array_equal(front.model("ctr").lookup(feature, keys), vectors(rows))
    finally:
        scene.close()


@pytest.mark.thorough
def test_predictions_read_the_rows_of_hashed_keys(tmp_path: Path) -> None:
    """Also those that compiled threads begin, which have the rows of the keys themselves, too."""
    pytest.importorskip("onnxruntime", reason="needs the extra `dense`")
    from tests.predict.onnx_models import linear

    with tierstore.SnapshotWriter(tmp_path / "s", model="ctr", version=1) as writer:
        writer.table("item", dim=4).write(np.arange(ROWS), vectors(np.arange(ROWS)))
        writer.feature("by_seed", table="item", hash=FEATURES["by_seed"][0])
        writer.feature("row", table="item")
        writer.warmup("item", np.arange(ROWS))
        writer.dense(linear({"by_seed": [1.0, 0, 0, 0], "row": [0, 0, 100.0, 0]}))
    keys = np.arange(6)
    rows = [xxh3(int(key).to_bytes(8, "little"), 9) % ROWS for key in keys]
    wanted = [row + 100 * key for row, key in zip(rows, keys.tolist(), strict=True)]
    with Store(settings_for(tmp_path)) as store:
        store.load_snapshot(tmp_path / "s")
        inputs = {"by_seed": keys, "row": keys}
        assert store.model("ctr").predict(inputs).ravel().tolist() == wanted
        with ServerThread(store) as server, tierstore.Client(server.url) as client:
            eventually(lambda: server.service.reactors_state == "running", "the reactors")
            for _ in range(8):
                assert np.asarray(client.predict("ctr", inputs)).ravel().tolist() == wanted
            assert server.service.reactors.answers >= 6, server.service.reactors.handed_on
