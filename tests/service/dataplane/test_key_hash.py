"""Features with a hash: whoever is asked, and however often, the row is that of the hashed key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.hashed_keys import FEATURES, IDS, PADDING, ROWS, UNSIGNED, vectors, write_hashed, xxh3
from tests.service.callers import BAD, Caller, Refused, TritonGrpc, TritonHttp, over_all
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.upstream.scenes import Scene
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


def array(keys: Any) -> np.ndarray:
    return np.array(keys, object) if isinstance(keys, list) else keys


@over_all()
def test_the_row_is_that_of_the_hashed_key(caller: Caller) -> None:
    before = caller.server.service.reactors.answers
    for feature, (_, keys, rows) in FEATURES.items():
        for _ in range(4):  # the first is planned by Python, and reactors learn from it
            answer = caller.ask("ctr", {feature: array(keys)}, [feature, f"{feature}.found"])
            np.testing.assert_array_equal(answer[feature], vectors(rows), feature)
            assert answer[f"{feature}.found"].all()
    one_request = {name: array(keys) for name, (_, keys, _) in FEATURES.items()}
    for _ in range(3):
        answer = caller.ask("ctr", one_request)
        for name, (_, _, rows) in FEATURES.items():
            np.testing.assert_array_equal(answer[name], vectors(rows), name)
    (half,) = caller.ask("ctr", {"by_seed": IDS}, half=True).values()
    np.testing.assert_array_equal(half, vectors(FEATURES["by_seed"][2]).astype(np.float16))
    if caller.compiled:
        assert caller.server.service.reactors.answers - before >= len(FEATURES)


@over_all(callers=[TritonHttp, TritonGrpc])
def test_any_keys_have_the_rows_that_python_gives_them(caller: Caller) -> None:
    """Compiled threads hash as `formats/key_hash.py` and `formats/trainer_hash.py` do."""
    rng, before = np.random.default_rng(4), caller.server.service.reactors.answers
    for size in (1, 2, 700, 9000):
        codes = rng.integers(-(1 << 63), 1 << 63, size, np.int64, endpoint=False) >> rng.integers(0, 64, size)
        for feature, (how, some, _) in FEATURES.items():
            keys: Any = [f"w{code}" for code in codes.tolist()] if isinstance(some, list) else codes.view(some.dtype)
            answer = caller.ask("ctr", {feature: array(keys)}, [feature])
            np.testing.assert_array_equal(answer[feature], vectors(tierstore.row_numbers(keys, how)), feature)
    assert caller.server.service.reactors.answers - before >= 3 * len(FEATURES)


@over_all()
@pytest.mark.parametrize(("feature", "keys"), [("by_seed", UNSIGNED), ("unsigned", IDS), ("by_rest", UNSIGNED)])
def test_numbers_of_the_other_type_are_taken_where_they_are_of_both(
    caller: Caller, feature: str, keys: np.ndarray
) -> None:
    """Before and after reactors have learned it: what only one type has is refused, and not taken for another number."""
    both = keys[[0, 1, 3]]
    rows = [FEATURES[feature][2][i] for i in (0, 1, 3)]
    for _ in range(3):
        (answer,) = caller.ask("ctr", {feature: both}, [feature]).values()
        np.testing.assert_array_equal(answer, vectors(rows))
        with pytest.raises(Refused, match=r"expected u?int64 keys|does not fit U?INT64") as refused:
            caller.ask("ctr", {feature: keys}, [feature])
        assert refused.value.kind == BAD


@over_all()
def test_bags_and_their_padding_are_by_row(caller: Caller) -> None:
    by_row = FEATURES["by_seed"][2]
    wanted = [sum(row for row in part if row != PADDING) for part in (by_row[:3], by_row[3:])]
    for bags in ({"bag": IDS, "bag.offsets": np.array([0, 3])}, {"bag": IDS.reshape(2, 3)}):
        for _ in range(3):
            (answer,) = caller.ask("ctr", bags).values()
            np.testing.assert_array_equal(answer, vectors(wanted))


@over_all()
def test_keys_of_another_type_are_refused(caller: Caller) -> None:
    with pytest.raises(Refused, match=r"string keys|holds int") as refused:
        caller.ask("ctr", {"word": IDS})
    assert refused.value.kind == BAD


def test_metadata_has_the_type_that_is_hashed(server: ServerThread) -> None:
    caller = TritonHttp(server)
    types = {one["name"]: one["datatype"] for one in caller.client.get_model_metadata("ctr")["inputs"]}
    caller.close()
    for name, datatype in (("word", "BYTES"), ("by_seed", "INT64"), ("unsigned", "UINT64")):
        keras = {"word": "keras_word", "by_seed": "keras_id", "unsigned": "keras_unsigned"}[name]
        assert types[name] == types[keras] == datatype


@pytest.mark.parametrize("feature", FEATURES)
def test_explain_hashes_too(server: ServerThread, feature: str) -> None:
    _, keys, rows = FEATURES[feature]
    with tierstore.Client(server.url) as client:
        entries = client.explain("ctr", feature, keys)["keys"]
    assert [(entry["code"], entry["found"]) for entry in entries] == [(row, True) for row in rows]
    assert entries[1]["key"] == (keys if isinstance(keys, list) else keys.tolist())[1]


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
