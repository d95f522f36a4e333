"""Calls for rows that memory lacks: compiled threads read them, whatever becomes of the stream and its connection meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

import tierstore  # noqa: E402
from tests.service import http2_client as h2  # noqa: E402
from tests.service.conftest import GRPC, ask_while_versions_change, eventually, settings_for  # noqa: E402
from tierstore.engine.store import Store  # noqa: E402
from tierstore.service.rpc.protobuf import message_class  # noqa: E402
from tierstore.service.server import ServerThread  # noqa: E402

INFER = "/inference.GRPCInferenceService/ModelInfer"
ROWS, DIM = 120_000, 8  # the host tier has room for a third of them
Request, Response = (message_class(f"inference.ModelInfer{kind}") for kind in ("Request", "Response"))


def rows_of(keys: np.ndarray, shift: float = 0.0) -> np.ndarray:
    vectors = (keys[:, None] * 8 + np.arange(DIM) + shift).astype(np.float32)
    vectors[(keys < 0) | (keys >= ROWS)] = 0.25
    return vectors


def write(root: Path, version: int) -> Path:
    where, keys = root / f"ctr-{version}", np.arange(ROWS)
    with tierstore.SnapshotWriter(where, model="ctr", version=version) as writer:
        writer.table("item", dim=DIM, default=[0.25] * DIM).write(keys, rows_of(keys))
        writer.feature("item_id", table="item")
        writer.feature("bag", table="item", combiner="sum")
        writer.feature("hashed", table="item", hash={"mod": ROWS})
    return where


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Store, ServerThread]]:
    with Store(settings_for(tmp_path, host_budget="4MiB", grpc_port=GRPC)) as store, ServerThread(store) as server:
        store.load_snapshot(write(tmp_path, 1))
        eventually(lambda: server.service.reactors_state == "running", "the reactors")
        yield store, server


@pytest.fixture
def infer(served: tuple[Store, ServerThread]) -> Iterator[Any]:
    with grpc.insecure_channel(served[1].grpc_target) as channel:
        call = channel.unary_unary(INFER, lambda message: message.SerializeToString(), Response.FromString)
        yield lambda message: call(message, timeout=60)


def message_of(keys: np.ndarray, feature: str = "item_id", offsets: np.ndarray | None = None, **fields: Any) -> Any:
    made = Request(model_name="ctr", raw_input_contents=[keys.tobytes()], **fields)
    made.inputs.add(name=feature, datatype="INT64", shape=keys.shape)
    if offsets is not None:
        made.inputs.add(name=f"{feature}.offsets", datatype="INT64", shape=offsets.shape)
        made.raw_input_contents.append(offsets.tobytes())
    made.outputs.add(name=feature)
    if feature != "bag":
        made.outputs.add(name=f"{feature}.found")
    return made


def tensors(answer: Any) -> list[np.ndarray]:
    types = {"FP32": np.float32, "BOOL": np.bool_}
    return [
        np.frombuffer(raw, types[output.datatype]).reshape(list(output.shape))
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    ]


@pytest.mark.parametrize("window", [0, h2.MOST_WINDOW])
def test_streams_and_connections_that_end_before_their_rows_are_read(
    served: tuple[Store, ServerThread], infer: Any, window: int
) -> None:
    """Some are reset at once, some lose their connection, some get no window for their answer: nothing is held afterwards."""
    _, server = served
    service, rng = server.service, np.random.default_rng(3)
    infer(message_of(np.arange(3)))
    before = service.reactors.answers
    for _ in range(12):
        with h2.Client(server.grpc_port, h2.settings((h2.INITIAL_WINDOW_SIZE, window))) as client:
            for stream in range(1, 41, 2):
                asked = h2.call(stream, INFER, message_of(rng.integers(0, ROWS, 800)).SerializeToString())
                client.send(asked, h2.reset(stream) if stream % 4 == 1 else b"")
            assert client.is_alive()
    eventually(lambda: service.reactors.cold_readers.idle, "no job is left")
    eventually(lambda: service.inflight.used_bytes == 0, "nothing is held")
    eventually(lambda: service.reactors.unsent_bytes == 0, "nothing waits to leave")
    assert service.reactors.answers - before > 20  # rows are read for nobody whose stream was reset before
    keys = rng.integers(0, ROWS, 100)
    np.testing.assert_array_equal(tensors(infer(message_of(keys)))[0], rows_of(keys))


@pytest.mark.thorough
def test_many_ask_while_versions_change(served: tuple[Store, ServerThread], infer: Any, tmp_path: Path) -> None:
    """Every answer is right, and versions that were left are closed all the same."""
    store, server = served
    store.load_snapshot(write(tmp_path, 2), activate=False)
    wrong = list[Any]()

    def ask(seed: int, over: threading.Event) -> None:
        rng = np.random.default_rng(seed)
        while not over.is_set():
            keys = rng.integers(0, ROWS, 200)
            if not np.array_equal(tensors(infer(message_of(keys)))[0], rows_of(keys)):
                wrong.append(keys)

    ask_while_versions_change(store, ask)
    assert not wrong
    eventually(lambda: server.service.inflight.used_bytes == 0, "nothing is held")
