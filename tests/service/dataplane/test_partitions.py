"""A node with some partitions of the keys, asked in every protocol: its own keys are answered, others are refused and never absent."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator

import numpy as np
import pytest

import tierstore
from tests.predict import onnx_models as om
from tests.service.callers import ELSEWHERE, Caller, Refused, over_all
from tests.service.conftest import GRPC, eventually, settings_for
from tierstore.engine.store import Store
from tierstore.errors import WrongPartition
from tierstore.formats.keys import as_codes, partition_of
from tierstore.service.server import ServerThread
from tierstore.types import KeyType

ROWS, DIM, COUNT, OWN = 60_000, 16, 8, "2-3/8"
WEIGHTS = np.full(DIM, 0.5)
WORDS = [f"w{i}" for i in range(300)]


def is_own(codes: np.ndarray) -> np.ndarray:
    return np.isin(partition_of(codes, COUNT), [2, 3])


MINE, OTHERS = (np.flatnonzero(is_own(np.arange(ROWS)) == own) for own in (True, False))
ABSENT = ROWS + np.flatnonzero(is_own(np.arange(ROWS, ROWS + 400)))[:8]  # keys of its own that there are not
_OF_WORDS = is_own(as_codes(WORDS, KeyType.STRING))
MY_WORDS = [word for word, own in zip(WORDS, _OF_WORDS, strict=True) if own]
OTHER_WORD = next(word for word, own in zip(WORDS, _OF_WORDS, strict=True) if not own)
REFUSED = r"are not on this node.*of 8: it has partitions 2-3"


def vectors(keys: np.ndarray) -> np.ndarray:
    return np.asarray(keys, np.float32)[:, None] + np.arange(DIM, dtype=np.float32) / 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """Memory for a small part of the rows, so that most are read from the files of partitions."""
    pytest.importorskip("onnxruntime", reason="the extra dense is not installed")
    root = tmp_path_factory.mktemp("partitions")
    with tierstore.SnapshotWriter(root / "s", model="ctr", version=1) as writer:
        writer.table("item", dim=DIM).write(np.arange(ROWS), vectors(np.arange(ROWS)))
        writer.table("word", dim=1, key="string").write(WORDS, np.arange(300, dtype=np.float32)[:, None])
        writer.feature("item_id", table="item")
        writer.feature("clicked", table="item", combiner="sum")
        writer.feature("word", table="word")
        writer.dense(om.linear({"item_id": WEIGHTS, "clicked": WEIGHTS}))
        writer.request({"item_id": np.arange(4), "clicked": np.arange(4)})  # which have keys of other nodes
        writer.request({"item_id": MINE[:2], "clicked": MINE[:2]})
    tierstore.build_snapshot(root / "s", root / "built", partitions=COUNT, load_workers=1)
    with Store(settings_for(root, grpc_port=GRPC, partition=OWN, host_budget="512KiB")) as store:
        store.load_snapshot(root / "built")
        with ServerThread(store) as server:
            yield server


@over_all()
def test_keys_of_other_nodes_are_refused_over_every_protocol(caller: Caller) -> None:
    def refused(inputs: dict[str, np.ndarray], output: str) -> None:
        with pytest.raises(Refused, match=REFUSED) as refusal:
            caller.ask("ctr", inputs, [output])
        assert refusal.value.kind == ELSEWHERE

    rng = np.random.default_rng(1)
    for _ in range(8):
        keys = rng.choice(MINE, 50)
        (answer,) = caller.ask("ctr", {"item_id": keys}, ["item_id"]).values()
        np.testing.assert_array_equal(answer, vectors(keys))
        (bag,) = caller.ask("ctr", {"clicked": keys[None]}, ["clicked"]).values()
        np.testing.assert_allclose(bag, vectors(keys).sum(0)[None], rtol=1e-6)
        (absent,) = caller.ask("ctr", {"item_id": ABSENT}, ["item_id"]).values()
        assert not absent.any()
        keys[rng.integers(50)] = rng.choice(OTHERS)
        refused({"item_id": keys}, "item_id")
        refused({"clicked": keys[None]}, "clicked")
    (words,) = caller.ask("ctr", {"word": np.array(MY_WORDS, object)}, ["word"]).values()
    assert words[:, 0].tolist() == [float(word[1:]) for word in MY_WORDS]
    refused({"word": np.array([OTHER_WORD], object)}, "word")
    for _ in range(2):
        (scores,) = caller.ask("ctr", {"item_id": MINE[:4], "clicked": MINE[:4]}).values()  # of rows and of bags
        np.testing.assert_allclose(scores[:, 0], vectors(MINE[:4]).sum(axis=1), rtol=1e-5)
        refused({"item_id": MINE[:4], "clicked": OTHERS[:4]}, "score")


def test_the_client_raises_it_as_what_it_is_and_bags_are_whole(server: ServerThread) -> None:
    offsets = np.array([0, 3, 3, 40])
    with tierstore.Client(server.url) as client:
        keys = MINE[100:200]
        bags = client.lookup_bags("ctr", "clicked", keys, offsets)
        np.testing.assert_allclose(bags[2], vectors(keys[3:40]).sum(axis=0), rtol=1e-6)
        for call in (
            lambda keys: client.lookup("ctr", "item_id", keys),
            lambda keys: client.lookup_bags("ctr", "clicked", keys, offsets),
            lambda keys: client.predict("ctr", {"item_id": keys, "clicked": MINE[:100]}),
        ):
            call(keys)
            with pytest.raises(WrongPartition, match=REFUSED):
                call(np.append(keys[:-1], OTHERS[3]))
        status = client.status()["models"]["ctr"]
        assert status["partitions"] == {"count": 8, "own": [[2, 3]]}
        assert status["tables"]["item"]["rows"] == len(MINE)


def test_rows_of_partitions_are_read_without_python_and_other_keys_are_refused(server: ServerThread) -> None:
    from tests.service.reactor.test_reactor import reactor_answers

    rng = np.random.default_rng(2)
    tensor = {"name": "item_id", "datatype": "INT64", "shape": [64], "parameters": {"binary_data_size": 512}}
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in ("item_id", "item_id.found")]
    text = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    lines = ["POST /v2/models/ctr/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(text) + 512}"]
    head = "\r\n".join([*lines, f"Inference-Header-Content-Length: {len(text)}"]).encode() + b"\r\n\r\n" + text
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:

        def ask(keys: np.ndarray) -> None:
            made.sendall(head + keys.astype(np.int64).tobytes())
            status, body = _answer(made)
            if is_own(keys).all():
                assert status == 200, body
                there = keys < ROWS
                rows = np.frombuffer(body[-64 * (4 * DIM + 1) :], np.float32, 64 * DIM).reshape(64, DIM)
                np.testing.assert_array_equal(rows[there], vectors(keys[there]))
                np.testing.assert_array_equal(np.frombuffer(body[-64:], np.bool_), there)
            else:
                assert status == 421
                assert b"it has partitions 2-3" in body

        def by_reactor() -> bool:
            before = reactor_answers(server)
            ask(rng.choice(MINE, 64))
            return reactor_answers(server) > before

        eventually(by_reactor, "the plan is known")

        def from_disk() -> int:
            tables = server.service.store.status()["models"]["ctr"]["tables"]
            return int(tables["item"]["lookup_keys"]["disk"])

        disk, before, cold = from_disk(), reactor_answers(server), 0
        for i in range(120):
            keys = rng.choice(np.append(MINE, ABSENT), 64)
            if i % 4 == 3:
                keys[rng.integers(64)] = rng.choice(OTHERS)
            cold += i % 4 != 3
            ask(keys)
        assert reactor_answers(server) == before + cold, "all of its own keys, and none of others', without Python"
        eventually(lambda: from_disk() > disk + 1000, "most rows came from the files")


def _answer(made: socket.socket) -> tuple[int, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += made.recv(1)
    length = int(data.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += made.recv(length - len(body))
    return int(data.split()[1]), body


def test_a_delta_that_is_visible_and_one_that_is_folded(server: ServerThread) -> None:
    """Rows of deltas, and of keys that deltas may have changed, in a table of partitions."""
    store = server.service.store
    model = store.model("ctr")
    changed = np.concatenate([MINE[:40], OTHERS[:40]])
    buffer = io.BytesIO()
    with tierstore.DeltaWriter(buffer, model="ctr", seq=1, event_time=0) as writer:
        writer.upsert("item", changed[1:], vectors(changed[1:]))  # as they are, so that other tests see no change
    with tierstore.Client(server.url) as client:
        with model.view():
            client.apply_delta(buffer.getvalue())
            np.testing.assert_array_equal(client.lookup("ctr", "item_id", MINE[:80]), vectors(MINE[:80]))
            with pytest.raises(WrongPartition):
                client.lookup("ctr", "item_id", OTHERS[1:2])
        eventually(lambda: not model.publisher.served.active.overlays, "it is folded")
        np.testing.assert_array_equal(client.lookup("ctr", "item_id", MINE[:80]), vectors(MINE[:80]))
        with pytest.raises(WrongPartition):
            client.lookup("ctr", "item_id", OTHERS[1:2])
