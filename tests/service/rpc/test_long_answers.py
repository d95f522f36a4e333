"""Long answers of compiled look-ups over gRPC, whose data leave from where they were gathered: right for any reader, window and frame."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

import tierstore
from tests.service import http2_client as h2
from tests.service.conftest import eventually, settings_for
from tierstore.engine.store import Store
from tierstore.service.rpc.protobuf import message_class
from tierstore.service.server import ServerThread

INFER = "/inference.GRPCInferenceService/ModelInfer"
MAX_FRAME_SIZE = 5
ROWS, DIM = 10_000, 200
SIZES = (2000, 300, 5000, 40, 1000, 4000)  # of 40 × 800 bytes, which are copied, to 4 MB
Request, Response = (message_class(f"inference.ModelInfer{kind}") for kind in ("Request", "Response"))
keys = [np.random.default_rng(size).integers(0, ROWS, size) for size in SIZES]


def rows_of(asked: np.ndarray) -> np.ndarray:
    return (asked[:, None] * 1000 + np.arange(DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("long")
    with tierstore.SnapshotWriter(root / "wide-1", model="wide", version=1) as writer:
        writer.table("item", dim=DIM).write(np.arange(ROWS), rows_of(np.arange(ROWS)))
        writer.warmup("item", np.arange(ROWS))
        writer.feature("item_id", table="item")
    with (
        Store(settings_for(root, host_budget="64MiB", ready_warm_share=1.0, warm_rate=10**9)) as store,
        ServerThread(store) as server,
    ):
        store.load_snapshot(root / "wide-1")
        eventually(lambda: httpx.get(f"{server.url}/v2/health/ready").is_success, "all rows are in memory")
        eventually(lambda: server.service.reactors_state == "running", "the reactors")
        yield server


def call(stream: int, asked: np.ndarray) -> bytes:
    """The frames of a call for rows."""
    message = Request(model_name="wide", raw_input_contents=[asked.tobytes()])
    message.inputs.add(name="item_id", datatype="INT64", shape=asked.shape)
    return h2.call(stream, INFER, message.SerializeToString())


@pytest.mark.parametrize("receive_buffer", [0, 4096])
@pytest.mark.parametrize("largest", [1 << 14, 1 << 20])
@pytest.mark.parametrize("window", [h2.FIRST_WINDOW, h2.MOST_WINDOW])
def test_rows_of_many_calls_on_one_connection(
    server: ServerThread, receive_buffer: int, largest: int, window: int
) -> None:
    """`window`: of a stream; it is opened further as data come. A small receive buffer makes the socket take parts of what leaves."""
    settings = h2.settings((h2.INITIAL_WINDOW_SIZE, window), (MAX_FRAME_SIZE, largest))
    with h2.Client(server.port, settings, receive_buffer) as client:
        client.send(call(1, keys[0][:10]))  # the first one is Python's, and reactors learn from it
        assert client.answer(1)[0]["grpc-status"] == "0"
        before = server.service.reactors.answers
        streams = range(3, 3 + 2 * len(SIZES), 2)
        client.send(*map(call, streams, keys))
        time.sleep(0.2 if receive_buffer else 0)  # until the socket is full
        bodies, ended = dict.fromkeys(streams, b""), set[int]()
        while len(ended) < len(SIZES):
            came = client.next()
            assert came is not None, "the connection has ended"
            assert came.kind in (h2.HEADERS, h2.DATA, h2.SETTINGS, h2.WINDOW_UPDATE), came
            assert len(came.payload) <= largest
            if came.kind == h2.DATA:
                bodies[came.stream] += came.payload
                if window == h2.FIRST_WINDOW and came.payload:
                    client.send(h2.credit(came.stream, len(came.payload)))
            if came.ends:
                ended.add(came.stream)
        assert server.service.reactors.answers - before == len(SIZES), repr(server.service.reactors.handed_on)
    for stream, asked in zip(streams, keys, strict=True):
        compressed, size = struct.unpack(">BI", bodies[stream][:5])
        assert (compressed, size) == (0, len(bodies[stream]) - 5)
        (rows,) = Response.FromString(bodies[stream][5:]).raw_output_contents
        np.testing.assert_array_equal(np.frombuffer(rows, np.float32).reshape(len(asked), -1), rows_of(asked))
    eventually(lambda: server.service.reactors.unsent_bytes == 0, "nothing is held")
