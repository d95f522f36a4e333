"""Features with a hash: whoever is asked, and however often, the row is that of the hashed key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import xxhash
from tritonclient.utils import InferenceServerException

import tierstore
from tests.service.conftest import GRPC, settings_for
from tests.service.upstream.scenes import Scene
from tests.service.wires import Wire
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread

ROWS = 50
IDS = np.array([0, 17, -1, 1 << 62, -(1 << 63), 17], np.int64)
UNSIGNED = IDS.view(np.uint64)
WORDS = ["a", "", "ü", "shoe", "a" * 300, "a"]


def xxh3(content: bytes, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(content, seed)


# written from docs/formats.md: by feature its hash, its keys and their rows
FEATURES: dict[str, tuple[dict[str, Any], Any, list[int]]] = {
    "by_seed": (
        {"mod": ROWS, "seed": 9},
        IDS,
        [xxh3(int(key).to_bytes(8, "little", signed=True), 9) % ROWS for key in IDS],
    ),
    "by_rest": ({"mod": ROWS}, IDS, [int(key) % ROWS for key in IDS]),
    "unsigned": ({"mod": ROWS, "key": "uint64"}, UNSIGNED, [int(key) % ROWS for key in UNSIGNED]),
    "word": ({"mod": ROWS, "key": "string"}, WORDS, [xxh3(word.encode()) % ROWS for word in WORDS]),
    "seeded_word": (
        {"mod": ROWS, "seed": 3, "key": "string"},
        WORDS,
        [xxh3(xxh3(word.encode()).to_bytes(8, "little"), 3) % ROWS for word in WORDS],
    ),
}
PADDING = FEATURES["by_seed"][2][1]  # the row of 17


def vectors(rows: Any, shift: float = 0.0) -> np.ndarray:
    return np.repeat(np.asarray(rows, np.float32)[:, None] + shift, 4, axis=1)


def write(where: Path, version: int = 1) -> Path:
    with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
        writer.table("item", dim=4).write(np.arange(ROWS), vectors(np.arange(ROWS)))
        for name, (how, _, _) in FEATURES.items():
            writer.feature(name, table="item", hash=how)
        writer.feature("bag", table="item", combiner="sum", hash=FEATURES["by_seed"][0], padding_key=PADDING)
        writer.feature("row", table="item")
    return where


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("hashed")
    with Store(settings_for(root, grpc_port=GRPC)) as store:
        store.load_snapshot(write(root / "s"))
        with ServerThread(store) as server:
            yield server


def tensor(wire: Wire, name: str, keys: Any) -> Any:
    if isinstance(keys, list):
        return wire.tensor(name, np.array([word.encode() for word in keys], object), "BYTES")
    return wire.tensor(name, keys, "UINT64" if keys.dtype == np.uint64 else "INT64")


def test_over_triton_s_protocols(wire: Wire) -> None:
    for feature, (_, keys, rows) in FEATURES.items():
        for _ in range(4):  # the first is planned by Python; others could be learned from it
            found = [wire.wanted(feature), wire.wanted(f"{feature}.found")]
            answer = wire.client.infer("ctr", [tensor(wire, feature, keys)], outputs=found)
            np.testing.assert_array_equal(answer.as_numpy(feature), vectors(rows), feature)
            assert answer.as_numpy(f"{feature}.found").all()
    one_request = [tensor(wire, name, keys) for name, (_, keys, _) in FEATURES.items()]
    for _ in range(3):
        answer = wire.client.infer("ctr", one_request)
        for name, (_, _, rows) in FEATURES.items():
            np.testing.assert_array_equal(answer.as_numpy(name), vectors(rows), name)


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


@pytest.mark.thorough
def test_a_front_hashes_as_its_nodes_do(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    try:
        for own in ((0, 3), (4, 7)):
            scene.node(own).store.load_snapshot(write(tmp_path / f"s{own[0]}"))
        front = scene.front()
        for _ in range(2):
            for feature, (_, keys, rows) in FEATURES.items():
                np.testing.assert_array_equal(front.model("ctr").lookup(feature, keys), vectors(rows))
    finally:
        scene.close()


@pytest.mark.thorough
def test_predictions_read_the_rows_of_hashed_keys(tmp_path: Path) -> None:
    """Again and again: a compiled thread that has learned the request would read the rows of the keys themselves, which it has too."""
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
            for _ in range(8):
                assert np.asarray(client.predict("ctr", inputs)).ravel().tolist() == wanted
