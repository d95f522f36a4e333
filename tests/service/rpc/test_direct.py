"""Messages of look-ups over gRPC, good ones and seeded mutations of them; which wait for a thread; what answers hold.

Two servers over one store get the same messages: one as it is, and one whose reactors learn nothing.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
from tritonclient.grpc import service_pb2  # noqa: E402

from tests.counts import few_or_many  # noqa: E402
from tests.engine.quick_build import in_process  # noqa: E402
from tests.service.conftest import eventually, settings_for  # noqa: E402
from tests.service.fake_store import VERSION, FakeStore  # noqa: E402
from tests.service.scenes import KEYS, items, write_snapshot  # noqa: E402
from tierstore.engine.store import Store  # noqa: E402
from tierstore.service.rpc.protobuf import (  # noqa: E402
    Parts,
    message_class,
)
from tierstore.service.server import ServerThread  # noqa: E402

INFER = "/inference.GRPCInferenceService/ModelInfer"
PREDICT = "/tensorflow.serving.PredictionService/Predict"
MUTATIONS = few_or_many(400, 2000)
Code = grpc.StatusCode
PredictRequest = message_class("tensorflow.serving.PredictRequest")
ANSWERS = {INFER: service_pb2.ModelInferResponse, PREDICT: message_class("tensorflow.serving.PredictResponse")}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerThread, ServerThread]]:
    """(as it is, one whose reactors learn nothing), over one store."""
    root = tmp_path_factory.mktemp("direct")
    with in_process(), Store(settings_for(root, grpc_port=0)) as store:
        store.load_snapshot(write_snapshot(root))
        with ServerThread(store) as learns, ServerThread(store) as python:
            python.service.plans = None
            yield learns, python


@pytest.fixture
def channels(servers: tuple[ServerThread, ServerThread]) -> Iterator[list[Any]]:
    made = [grpc.insecure_channel(server.grpc_target) for server in servers]
    yield made
    for channel in made:
        channel.close()


def outcomes(channel: Any, path: str, messages: Sequence[bytes]) -> list[Any]:
    """(status, what was said, answer) of each message."""
    call, answer = channel.unary_unary(path), ANSWERS[path]
    found = []
    for first in range(0, len(messages), 50):
        for future in [call.future(each, timeout=60) for each in messages[first : first + 50]]:
            code = future.code()
            found.append((code, future.details(), answer.FromString(future.result()) if code == Code.OK else None))
    return found


def alike(channels: list[Any], path: str, messages: Sequence[bytes]) -> list[Any]:
    """The outcomes, which are those of both servers."""
    ours, theirs = (outcomes(channel, path, messages) for channel in channels)
    for each, one, other in zip(messages, ours, theirs, strict=True):
        assert one == other, each
        assert one[0] != Code.INTERNAL
    return ours


# --- messages


def infer_request(tensors: dict[str, tuple[str, np.ndarray]], outputs: dict[str, dict[str, str]], **more: Any) -> Any:
    """Raw tensors by name, with their datatypes; the wanted outputs with their parameters."""
    wanted = service_pb2.ModelInferRequest(model_name="ctr", **more)
    for name, (datatype, array) in tensors.items():
        wanted.inputs.add(name=name, datatype=datatype, shape=array.shape)
        wanted.raw_input_contents.append(array.tobytes())
    for name, parameters in outputs.items():
        output = wanted.outputs.add(name=name)
        for key, value in parameters.items():
            output.parameters[key].string_param = value
    return wanted


def infer_requests() -> list[bytes]:
    users = np.frombuffer(b"".join(struct.pack("<I", len(name)) + name for name in (b"u3", b"", b"nobody")), np.uint8)
    typed = service_pb2.ModelInferRequest(model_name="ctr")
    typed.inputs.add(name="item_id", datatype="INT64", shape=[3]).contents.int64_contents.extend([5, 0, -1])
    strings = infer_request({}, {"user": {}})
    strings.inputs.add(name="user", datatype="BYTES", shape=[3])
    strings.raw_input_contents.append(users.tobytes())
    keys = "INT64", KEYS
    bags = {
        "clicked": keys,
        "clicked.offsets": ("INT64", np.array([0, 3, 3])),
        "clicked.weights": ("FP32", np.linspace(0, 2, len(KEYS), dtype=np.float32)),
    }
    made = [
        infer_request({"item_id": keys}, {}),
        infer_request({"item_id": keys}, {"item_id": {}}, id="a name"),
        infer_request({"item_id": keys}, {"item_id": {"dtype": "FP16"}, "item_id.found": {}}, model_version=str(VERSION)),
        infer_request({"item_id": ("INT64", KEYS.reshape(2, 4))}, {}, model_version="stable"),
        infer_request(bags, {"clicked": {"combiner": "sum"}}),
        infer_request(bags | {"item_id": keys, "big": ("UINT64", np.array([5, 1 << 63], np.uint64))}, {}),
        typed,
        strings,
    ]  # fmt: skip
    return [each.SerializeToString() for each in made]


def predict_requests() -> list[bytes]:
    made = []
    for array in (KEYS, KEYS.reshape(2, 4)):
        wanted = PredictRequest(output_filter=["item_id"])
        wanted.model_spec.name = "ctr"
        tensor = wanted.inputs["item_id"]
        tensor.dtype, tensor.tensor_content = 9, array.tobytes()
        for size in array.shape:
            tensor.tensor_shape.dim.add(size=size)
        made.append(wanted)
        repeated = PredictRequest()
        repeated.CopyFrom(wanted)
        repeated.inputs["item_id"].ClearField("tensor_content")
        repeated.inputs["item_id"].int64_val.append(7)  # stands for all
        made.append(repeated)
    return [each.SerializeToString() for each in made]


def mutations(messages: list[bytes], count: int, seed: int) -> list[bytes]:
    """Changed bytes, cuts, insertions, pieces moved or doubled, and pieces of others."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        changed = bytearray(messages[i % len(messages)])
        for _ in range(rng.integers(1, 3)):
            a, b = sorted(rng.integers(0, len(changed) + 1, 2).tolist())
            other = messages[rng.integers(len(messages))]
            match rng.integers(8):
                case 0 | 1:
                    changed[max(0, a - 1)] = int(rng.integers(256))
                case 2:
                    changed[max(0, b - 1)] ^= 1 << rng.integers(8)
                case 3:
                    del changed[a:b]
                case 4:
                    changed[a:a] = rng.bytes(rng.integers(1, 12))
                case 5:
                    changed += changed[a:b]
                case 6:
                    changed[a:] = other[a:]
                case 7:
                    changed += other
            if not changed:
                changed = bytearray(other)
        made.append(bytes(changed))
    return made


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "good", "seed"), [(INFER, infer_requests(), 11), (INFER, infer_requests(), 12), (PREDICT, predict_requests(), 13)]
)  # fmt: skip
def test_every_message_has_the_same_outcome_both_ways(
    channels: list[Any], path: str, good: list[bytes], seed: int
) -> None:
    assert {code for code, *_ in alike(channels, path, good)} == {Code.OK}
    # known now, and met again between others
    messages = [each for pair in zip(mutations(good, MUTATIONS, seed), good * MUTATIONS) for each in pair]  # noqa: B905
    codes = [code for code, *_ in alike(channels, path, messages)]
    assert codes[1::2] == [Code.OK] * MUTATIONS
    assert {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND} <= set(codes[::2])


def test_a_request_of_a_known_structure_is_answered_with_its_own_data(channels: list[Any]) -> None:
    """Other data, of which some look like the fields around them."""
    rng = np.random.default_rng(5)
    good = [each for each in infer_requests() if len(Parts(each).raw) == 1]
    messages = []
    for i in range(400):
        changed = bytearray(good[i % len(good)])
        (raw,) = Parts(bytes(changed)).raw
        start = bytes(changed).rindex(raw)
        stop = start + len(raw)
        if i % 3:
            changed[start:stop] = rng.choice(KEYS, (stop - start + 7) // 8).tobytes()[: stop - start]
        else:
            changed[start:stop] = (b"\x3a\x08" * (stop - start))[: stop - start]  # a raw tensor's tag and length
        messages.append(bytes(changed))
    assert Code.OK in {code for code, *_ in alike(channels, INFER, messages)}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_call_with_another_number_of_messages(channels: list[Any], count: int) -> None:
    wanted = infer_requests()[0]
    codes = []
    for channel in channels:
        call = channel.stream_unary(INFER).future(iter([wanted] * count), timeout=60)
        codes.append(call.code())
    assert codes[0] == codes[1] == (Code.OK if count else Code.UNIMPLEMENTED)


# --- who answers


class Handed:
    """The calls that were handed to the look-up threads."""

    def __init__(self, server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self._handed = server.service.lookup_pool.start
        monkeypatch.setattr(server.service.lookup_pool, "start", self._start)

    def _start(self, *call: Any, **more: Any) -> None:
        self.calls.append(call)
        self._handed(*call, **more)


def keys_request(count: int) -> bytes:
    made: bytes = infer_request({"item_id": ("INT64", np.arange(count))}, {}).SerializeToString()
    return made


def test_threads_are_for_what_waits_and_what_is_long(
    fake: tuple[FakeStore, ServerThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server = fake
    handed = Handed(server, monkeypatch)
    with grpc.insecure_channel(server.grpc_target) as channel:
        call = channel.unary_unary(INFER)
        for _ in range(3):
            call(keys_request(8), timeout=60)
        assert not handed.calls
        call(keys_request(9000), timeout=60)
        assert len(handed.calls) == 1
        gate = store.model("ctr").gate
        gate.clear()
        waiting = call.future(keys_request(8), timeout=60)
        eventually(lambda: len(handed.calls) == 2, "a call that waits")
        gate.set()
        answer = service_pb2.ModelInferResponse.FromString(waiting.result())
        rows = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(-1, 4)
        np.testing.assert_array_equal(rows, items(np.arange(8)))


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
