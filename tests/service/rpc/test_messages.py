"""Calls of look-ups over gRPC: those that wait, those without a message, what answers hold until they have left."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
from tritonclient.grpc import service_pb2  # noqa: E402

from tests.service.conftest import eventually  # noqa: E402
from tests.service.fake_store import VERSION, FakeStore  # noqa: E402
from tierstore.service.server import ServerThread  # noqa: E402

INFER = "/inference.GRPCInferenceService/ModelInfer"


def keys_request(count: int) -> bytes:
    made = service_pb2.ModelInferRequest(model_name="ctr", raw_input_contents=[np.arange(count).tobytes()])
    made.inputs.add(name="item_id", datatype="INT64", shape=[count])
    message: bytes = made.SerializeToString()
    return message


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_call_with_another_number_of_messages(fake: tuple[FakeStore, ServerThread], count: int, learns: bool) -> None:
    _, server = fake
    if not learns:
        server.service.plans = None
    with grpc.insecure_channel(server.grpc_target) as channel:
        call = channel.stream_unary(INFER).future(iter([keys_request(8)] * count), timeout=60)
        assert call.code() == (grpc.StatusCode.OK if count else grpc.StatusCode.UNIMPLEMENTED)


# --- what waits


def test_a_call_that_waits_is_finished_when_the_server_ends(fake: tuple[FakeStore, ServerThread]) -> None:
    store, server = fake
    gate = store.model("ctr").gate
    gate.clear()
    with grpc.insecure_channel(server.grpc_target) as channel:
        waiting = channel.unary_unary(INFER).future(keys_request(8), timeout=60)
        eventually(lambda: server.service.lookup_pool.busy, "a call at work")
        ending = threading.Thread(target=server.close)
        ending.start()
        eventually(lambda: not server.service.ready, "the server to end")
        gate.set()
        assert service_pb2.ModelInferResponse.FromString(waiting.result()).model_name == "ctr"
        ending.join(60)
        assert not ending.is_alive()


# --- who does not read


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header without indexing (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def ask_without_reading(server: ServerThread, wanted: bytes, path: str = INFER) -> socket.socket:
    """A connection over which something was asked for, and whose client takes no byte of an answer."""
    headers = {
        b":method": b"POST", b":scheme": b"http", b":path": path.encode(), b":authority": b"localhost",
        b"content-type": b"application/grpc", b"te": b"trailers",
    }  # fmt: skip
    connection = socket.create_connection(("127.0.0.1", server.grpc_port))
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, struct.pack(">HI", 4, 0))  # SETTINGS_INITIAL_WINDOW_SIZE
        + frame(1, 4, 1, b"".join(literal(*header) for header in headers.items()))
        + frame(0, 1, 1, b"\0" + struct.pack(">I", len(wanted)) + wanted)
    )
    return connection


@pytest.mark.parametrize("end", ["reads", "leaves"])
def test_an_answer_counts_as_in_progress_until_it_has_left(fake: tuple[FakeStore, ServerThread], end: str) -> None:
    _, server = fake
    budget, counts = server.service.inflight, server.service.inference_stats.of("ctr", VERSION)
    wanted = keys_request(8)
    with ask_without_reading(server, wanted) as connection:
        eventually(lambda: counts.success == 1, "the answer")
        held = len(wanted) + 8 * 16
        eventually(lambda: budget.used_bytes == held, "the message and the answer alone to count")
        with grpc.insecure_channel(server.grpc_target) as channel:
            channel.unary_unary(INFER)(wanted, timeout=60)
        eventually(lambda: budget.used_bytes == held, "the other answer to have left")
        if end == "reads":
            connection.sendall(frame(8, 0, 1, struct.pack(">I", 1 << 20)))  # WINDOW_UPDATE
            eventually(lambda: budget.used_bytes == 0, "the answer to have left")
    eventually(lambda: budget.used_bytes == 0, "the client's end to be noticed")
