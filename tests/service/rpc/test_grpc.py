"""The gRPC front beside what tritonclient does everywhere (`dataplane/test_answers.py`, `oip/test_tritonclient.py`): streams, statuses, bounds, deadlines, malformed messages."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("grpc_reflection", reason="grpcio is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
import grpc
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import VERSION, FakeStore
from tests.service.scenes import KEYS, items
from tierstore.errors import ConfigError
from tierstore.service import server as serving
from tierstore.service.rpc import calls
from tierstore.service.server import ServerThread, grpc_port_by_default

Code = grpc.StatusCode
SOON_S = 0.3  # of a call that does not wait for long


@pytest.fixture
def client(server: ServerThread) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc_target) as client:
        yield client


@pytest.fixture
def channel(server: ServerThread) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_target) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def keys_tensor(keys: np.ndarray = KEYS) -> Any:
    return triton.InferInput("item_id", list(keys.shape), "INT64").set_data_from_numpy(keys)


def request(model: str = "ctr", **fields: Any) -> Any:
    """A ModelInferRequest for the rows of KEYS, raw."""
    given = service_pb2.ModelInferRequest.InferInputTensor(name="item_id", datatype="INT64", shape=[len(KEYS)])
    options = {"inputs": [given], "raw_input_contents": [KEYS.tobytes()]} | fields
    return service_pb2.ModelInferRequest(model_name=model, **options)


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """(status, message) of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **kwargs)
    return caught.value.code(), caught.value.details()


# --- tritonclient


def test_a_stream_answers_in_order_and_outlives_an_error(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("ctr", [keys_tensor()], request_id="a")
    client.async_stream_infer("nobody", [keys_tensor()], request_id="b")
    client.async_stream_infer("ctr", [keys_tensor(KEYS + 1)], request_id="c", enable_empty_final_response=True)
    for request_id, keys in (("a", KEYS), ("b", None), ("c", KEYS + 1)):
        result, error = answers.get(timeout=60)
        if keys is None:
            assert "no model 'nobody'" in str(error)
        else:
            assert result.get_response().id == request_id
            np.testing.assert_array_equal(result.as_numpy("item_id"), items(keys))
            assert result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


# --- messages


def with_contents() -> Any:
    wanted = request()
    wanted.inputs[0].contents.int64_contents.append(5)
    return wanted


def typed(datatype: str, place: str, values: list[Any], shape: list[int]) -> Any:
    given = service_pb2.ModelInferRequest.InferInputTensor(name="item_id", datatype=datatype, shape=shape)
    getattr(given.contents, place).extend(values)
    return service_pb2.ModelInferRequest(model_name="ctr", inputs=[given])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (request(raw_input_contents=[KEYS.tobytes()] * 2), "expected 1, one an input"),
        (request(raw_input_contents=[b"1234567"]), "takes 64 bytes, got 7"),
        (with_contents(), "has contents, and the request has raw_input_contents"),
        (typed("INT64", "int64_contents", [1, 2], [3]), "takes 3 elements; got 2 in int64_contents"),
        (typed("INT64", "int64_contents", [1], [-1]), "integer from 0"),
        (typed("INT8", "int_contents", [300], [1]), "does not fit INT8"),
        (typed("FP16", "fp32_contents", [1.0], [1]), "sent in raw_input_contents"),
        (typed("FP8", "fp32_contents", [1.0], [1]), "unknown datatype 'FP8'"),
        (request(model_version="new one"), "a version is a number"),
        (request(inputs=[]), "no inputs"),
        (request(inputs=[], raw_input_contents=[]), "no inputs"),
        (
            request(inputs=[service_pb2.ModelInferRequest.InferInputTensor(datatype="INT64", shape=[8])]),
            "every input needs a name",
        ),
        (
            request(outputs=[service_pb2.ModelInferRequest.InferRequestedOutputTensor()]),
            "every output needs a name",
        ),
        (
            request(parameters={"timeout": service_pb2.InferParameter(string_param="soon")}),
            "expected a number of microseconds",
        ),
    ],
)
def test_what_is_wrong_with_a_request_is_said(stub: Any, wanted: Any, words: str) -> None:
    code, details = refusal(stub.ModelInfer, wanted)
    assert code == Code.INVALID_ARGUMENT
    assert words in details


def test_no_bytes_are_an_internal_error(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    whole = request(id="r", model_version=str(VERSION)).SerializeToString()
    random = np.random.default_rng(3)
    broken = [whole[:n] for n in range(len(whole))] + [b"\x1a\x02\xff\xfe" + whole, b"\xff" * 32, b"\x0b" + whole]
    for _ in range(300):
        changed = bytearray(whole)
        changed[random.integers(len(whole))] = random.integers(256)
        broken.append(bytes(changed))
    seen = set()
    for future in [call.future(message) for message in broken]:
        seen.add(future.code())
    assert seen <= {Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND}
    assert Code.INVALID_ARGUMENT in seen


def test_fields_may_come_in_any_order_and_unknown_ones_are_passed_over(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    raw = service_pb2.ModelInferRequest(raw_input_contents=[KEYS.tobytes()]).SerializeToString()
    remaining = request(raw_input_contents=[], id="first").SerializeToString()
    unknown = b"\xa0\x06\x05" + b"\xa5\x06abcd" + b"\xa1\x06abcdefgh" + b"\xa2\x06\x03abc"
    answer = service_pb2.ModelInferResponse.FromString(call(raw + unknown + remaining + b"\x1a\x03two"))
    assert answer.id == "two"
    np.testing.assert_array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(-1, 4), items(KEYS))


def test_a_message_beyond_the_bound_is_refused(stub: Any) -> None:
    code, _ = refusal(stub.ModelInfer, request(raw_input_contents=[bytes(3 << 20)]))
    assert code == Code.RESOURCE_EXHAUSTED
    count = 270_000  # of empty strings: few bytes to ask, many to answer
    given = service_pb2.ModelInferRequest.InferInputTensor(name="user", datatype="BYTES", shape=[count])
    code, details = refusal(stub.ModelInfer, request(inputs=[given], raw_input_contents=[bytes(4 * count)]))
    assert code == Code.INVALID_ARGUMENT
    assert "max_response" in details


# --- bounds and deadlines


@pytest.fixture
def waiting(
    fake: tuple[FakeStore, ServerThread],
) -> Iterator[tuple[FakeStore, ServerThread, Any, Any]]:
    """A server with room for two look-ups, of which the first is at work until the gate of `ctr` is opened."""
    store, server = fake
    gate = store.model("ctr").gate
    gate.clear()
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        first = stub.ModelInfer.future(request(), timeout=60)
        eventually(lambda: server.service.inflight.used_bytes, "a look-up at work")
        yield store, server, stub, first
        gate.set()


def test_excess_is_refused_at_once_and_other_calls_are_answered(waiting: Any) -> None:
    store, server, stub, first = waiting
    second = stub.ModelInfer.future(request(), timeout=60)
    eventually(lambda: server.service.lookup_pool.waiting, "a full queue")
    code, details = refusal(stub.ModelInfer, request(), timeout=60)
    assert code == Code.RESOURCE_EXHAUSTED
    assert "1 calls wait" in details
    assert stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60).live
    store.model("ctr").gate.set()
    assert first.result().model_name == second.result().model_name == "ctr"
    text = httpx.get(f"{server.url}/metrics").text
    assert "tierstore_lookup_rejected_total 1.0" in text
    assert "tierstore_grpc_streams_limit" in text
    assert 'tierstore_request_seconds_count{outcome="ok",protocol="oip_grpc"}' in text
    assert 'tierstore_request_seconds_count{outcome="overloaded",protocol="oip_grpc"} 1.0' in text


@pytest.mark.parametrize("how", ["deadline", "cancel", "timeout"])
def test_no_work_is_done_for_what_nobody_waits_for(waiting: Any, how: str) -> None:
    store, server, stub, first = waiting
    shed, began_s = server.service.shed, time.monotonic()
    wanted = request()
    if how == "timeout":
        wanted.parameters["timeout"].int64_param = int(SOON_S * 1e6)
    second = stub.ModelInfer.future(wanted, timeout=SOON_S if how == "deadline" else 60)
    eventually(lambda: server.service.lookup_pool.waiting or second.done(), "a call that waits")
    if how == "cancel":
        second.cancel()
        stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60)  # over the same connection, behind it
    eventually(lambda: second.done() if how != "timeout" else time.monotonic() > began_s + 2 * SOON_S, "its end")
    store.model("ctr").gate.set()
    first.result()
    expected = Code.CANCELLED if how == "cancel" else Code.DEADLINE_EXCEEDED
    assert second.code() == expected
    eventually(lambda: not server.service.lookup_pool.waiting, "room in the queue")
    stub.ModelInfer(request(), timeout=60)
    assert shed.of("gone") + shed.of("deadline") == 1


def test_a_stream_too_many_is_refused(fake: tuple[FakeStore, ServerThread], monkeypatch: pytest.MonkeyPatch) -> None:
    _, server = fake
    monkeypatch.setattr(calls, "MOST_STREAMS", 1)
    monkeypatch.setattr(calls, "IDLE_S", 3600)
    ended = threading.Event()

    def requests() -> Iterator[Any]:
        yield request()
        ended.wait(60)

    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        first = stub.ModelStreamInfer(requests())
        assert next(first).infer_response.model_name == "ctr"
        assert refusal(lambda: list(stub.ModelStreamInfer(iter([request()]))))[0] == Code.RESOURCE_EXHAUSTED
        ended.set()
        assert list(first) == []
    eventually(lambda: not server.service.calls._flows, "no stream")


# --- health, reflection, start and end


def test_health_is_reported_and_watched_until_the_server_drains(fake: tuple[FakeStore, ServerThread]) -> None:
    _, server = fake
    serving_status = health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(server.grpc_target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name in ("", "inference.GRPCInferenceService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == serving_status
        assert refusal(health.Check, health_pb2.HealthCheckRequest(service="x"))[0] == Code.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == serving_status
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="x"))
        assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        server.stop(drain_s=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not stub.ServerReady(service_pb2.ServerReadyRequest()).ready
        assert stub.ModelInfer(request()).model_name == "ctr"
        server.close()
        assert watch.code() in (Code.UNAVAILABLE, Code.CANCELLED)
        assert refusal(stub.ModelInfer, request())[0] == Code.UNAVAILABLE


def test_a_stop_ends_idle_streams_at_once_and_answers_what_is_under_way(
    fake: tuple[FakeStore, ServerThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "FINISH_S", 10)
    store, server = fake
    idle, flows = threading.Event(), server.service.calls._flows
    ended = Code.UNAVAILABLE, "the service ends; send the remaining requests to another one"

    def requests(*first: Any) -> Iterator[Any]:
        yield from first
        idle.wait(60)

    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        silent, answered = stub.ModelStreamInfer(requests()), stub.ModelStreamInfer(requests(request()))
        assert next(answered).infer_response.model_name == "ctr"
        eventually(lambda: [flow.busy for flow in flows.values()] == [False] * 2, "two idle streams")
        store.model("ctr").gate.clear()
        busy = stub.ModelStreamInfer(requests(request()))
        eventually(lambda: sorted(flow.busy for flow in flows.values()) == [False, False, True], "one under way")
        closing = threading.Thread(target=server.close)
        closing.start()
        assert refusal(next, silent) == refusal(next, answered) == ended
        store.model("ctr").gate.set()
        assert next(busy).infer_response.model_name == "ctr"
        assert refusal(next, busy) == ended
        closing.join(60)
        idle.set()


def test_a_stop_sends_the_stream_of_a_triton_client_elsewhere(fake: tuple[FakeStore, ServerThread]) -> None:
    _, server = fake
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(server.grpc_target) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ctr", [keys_tensor()])
        assert answers.get(timeout=60)[1] is None
        server.close()
        error = answers.get(timeout=60)[1]
        assert (error.status(), error.message().split(";")[0]) == ("StatusCode.UNAVAILABLE", "the service ends")


def test_a_client_without_our_protos_learns_them_by_reflection(channel: grpc.Channel) -> None:
    from google.protobuf import message_factory
    from google.protobuf.descriptor_pool import DescriptorPool

    database = ProtoReflectionDescriptorDatabase(channel)
    assert {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    } <= set(database.get_services())
    method = DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService").FindMethodByName("ModelInfer")
    kinds = [message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)]
    call = channel.unary_unary(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=kinds[0].SerializeToString,
        response_deserializer=kinds[1].FromString,
    )
    answer = call(kinds[0].FromString(request().SerializeToString()))
    assert (answer.model_name, list(answer.outputs[0].shape)) == ("ctr", [8, 4])


def test_a_port_in_use_is_an_error_that_says_so(server: ServerThread, tmp_path: Any) -> None:
    store = FakeStore(settings_for(tmp_path, grpc_port=server.grpc_port))
    with pytest.raises(ConfigError, match=f"port {server.grpc_port} for gRPC"):
        ServerThread(store)  # type: ignore[arg-type]


def test_the_port_by_default(tmp_path: Any) -> None:
    def port(**settings: object) -> object:
        return grpc_port_by_default(settings_for(tmp_path, **settings)).grpc_port

    assert port(port=8000) == 8001
    assert port(port=0) == 0
    assert port(grpc_port=9) == 9
    assert port(grpc_port="off") == "off"


def test_a_program_that_embeds_the_service_may_have_grpc(tmp_path: Any) -> None:
    with ServerThread(FakeStore(settings_for(tmp_path))) as server:  # type: ignore[arg-type]
        assert server.grpc_target is None
