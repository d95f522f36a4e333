"""Clients of gRPC that send no message, or do not read: they hold no threads, and are ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402

from tests.service.conftest import eventually, settings_for  # noqa: E402
from tests.service.fake_store import FakeStore  # noqa: E402
from tests.service.rpc.test_messages import ask_without_reading, keys_request  # noqa: E402
from tierstore.reactor import layout as kernel  # noqa: E402
from tierstore.service import server as server_module  # noqa: E402
from tierstore.service.context import ADMIN_THREADS  # noqa: E402
from tierstore.service.protocols.oip import documents  # noqa: E402
from tierstore.service.rpc import calls  # noqa: E402
from tierstore.service.rpc import health as health_module  # noqa: E402
from tierstore.service.rpc.caller import RpcCaller  # noqa: E402
from tierstore.service.server import ServerThread  # noqa: E402
from tierstore.wire.http2 import layout as http2_layout  # noqa: E402

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVICE = "/inference.GRPCInferenceService/"
ANSWER_S = 20.0
Code = grpc.StatusCode


@pytest.fixture
def served(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    """A server that looks for late clients ten times a second."""
    store = FakeStore(settings_for(tmp_path, grpc_port=0))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        yield server


class Silent:
    """Requests that never come, until `close`."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self._ended.wait(120)
        return iter(())

    def close(self) -> None:
        self._ended.set()


@pytest.fixture
def silent() -> Iterator[Silent]:
    messages = Silent()
    yield messages
    messages.close()


def messages_of(silent: Silent, first: list[Any]) -> Iterator[Any]:
    yield from first
    yield from silent


@pytest.mark.parametrize("method", [CHECK, WATCH, SERVICE + "ServerReady", SERVICE + "ModelMetadata"])
def test_calls_without_a_message_keep_no_other_call_waiting(served: ServerThread, silent: Silent, method: str) -> None:
    with grpc.insecure_channel(served.grpc_target) as theirs, grpc.insecure_channel(served.grpc_target) as channel:
        held = [theirs.stream_stream(method)(messages_of(silent, [])) for _ in range(3 * ADMIN_THREADS)]
        time.sleep(0.5)  # they have come
        health, stub = health_pb2_grpc.HealthStub(channel), service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S).status
        assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=ANSWER_S).ready
        assert stub.ModelReady(service_pb2.ModelReadyRequest(name="ctr"), timeout=ANSWER_S).ready
        for call in held:
            call.cancel()


@pytest.fixture
def hasty(tmp_path: Any) -> Iterator[ServerThread]:
    """A server where a message has a short time to arrive."""
    store = FakeStore(settings_for(tmp_path, grpc_port=0, arrival_timeout_s=0.3))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        yield server


@pytest.mark.parametrize("method", [CHECK, SERVICE + "ModelInfer", SERVICE + "ModelReady"])
def test_a_message_has_a_deadline(hasty: ServerThread, silent: Silent, method: str) -> None:
    with grpc.insecure_channel(hasty.grpc_target) as channel:
        call = channel.stream_unary(method).future(messages_of(silent, []), timeout=60)
        assert call.code() == Code.RESOURCE_EXHAUSTED  # as its library has it
        assert "ENHANCE_YOUR_CALM" in call.details() or "RST_STREAM" in call.details()
        assert channel.unary_unary(SERVICE + "ModelInfer")(keys_request(8), timeout=60)


def open_streams(server: ServerThread) -> int:
    """Streams that are open on connections of reactors."""
    rows = server._http._reactors.conns
    sessions = rows["session"][rows["state"] == kernel.HTTP2].tolist()
    return sum(http2_layout.SESSION.view(session).open for session in sessions)


@pytest.mark.parametrize("method", [CHECK, SERVICE + "ModelInfer", WATCH])
def test_a_stop_does_not_wait_for_messages_that_do_not_come(
    served: ServerThread, silent: Silent, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 60)  # then all that is left is ended
    served.service.reactors._limits["finish_ns"] = 500_000_000  # type: ignore[union-attr]
    with grpc.insecure_channel(served.grpc_target) as channel:
        call = channel.stream_stream(method)(messages_of(silent, []), timeout=120)
        eventually(lambda: open_streams(served), "the call has come")
        began = time.monotonic()
        served.close()
        assert time.monotonic() - began < 30
        assert call.code() in {Code.CANCELLED, Code.UNAVAILABLE}


def test_a_stop_waits_for_a_message_that_is_on_its_way(served: ServerThread, silent: Silent) -> None:
    def messages() -> Iterator[bytes]:
        yield from silent
        yield keys_request(8)

    with grpc.insecure_channel(served.grpc_target) as channel:
        assert channel.unary_unary(SERVICE + "ModelInfer")(keys_request(8), timeout=60)
        call = channel.stream_unary(SERVICE + "ModelInfer").future(messages(), timeout=60)
        eventually(lambda: open_streams(served), "it has come")
        closing = threading.Thread(target=served.close)
        closing.start()
        eventually(lambda: not served.service.ready, "the server ends")
        silent.close()
        assert call.result()
        closing.join(60)
        assert not closing.is_alive()


def test_idle_streams_make_room_for_others(
    served: ServerThread, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST_STREAMS", 2)
    request = service_pb2.ModelInferRequest.FromString(keys_request(2))
    with grpc.insecure_channel(served.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        idle = []
        for _ in range(2):
            idle.append(stub.ModelStreamInfer(messages_of(silent, [request]), timeout=60))
            assert next(idle[-1]).infer_response.model_name == "ctr"
        flows = served.service.calls._flows
        eventually(
            lambda: not any(flow.busy for flow in list(flows.values())), "the service has seen that both are idle"
        )
        monkeypatch.setattr(calls, "IDLE_S", 0.0)
        answers = list(stub.ModelStreamInfer(iter([request]), timeout=60))
        assert [answer.infer_response.model_name for answer in answers] == ["ctr"]
        assert idle[0].code() == Code.UNAVAILABLE  # the one that was idle longest
        assert "open it again" in idle[0].details()


def test_loads_keep_no_other_call_waiting(served: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(documents, "load", lambda *_: gate.wait(60))
    with grpc.insecure_channel(served.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        wanted = service_pb2.RepositoryModelLoadRequest(model_name="ctr")
        loads = [stub.RepositoryModelLoad.future(wanted, timeout=60) for _ in range(2 * ADMIN_THREADS)]
        try:
            switches = served.service.switch_pool
            eventually(lambda: switches.waiting >= ADMIN_THREADS, "all of them wait")
            assert stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=ANSWER_S).ready
            assert stub.ModelReady(service_pb2.ModelReadyRequest(name="ctr"), timeout=ANSWER_S).ready
        finally:
            gate.set()
        for load in loads:
            load.result()


def test_a_host_with_many_watchers_makes_room_for_another_host(
    served: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "MAX_WATCHERS", 3)
    monkeypatch.setattr(RpcCaller, "host", "192.0.2.7")
    wanted = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(served.grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        crowd = []
        for _ in range(3):
            crowd.append(stub.Watch(wanted, timeout=60))
            assert next(crowd[-1]).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(wanted, timeout=60))
        assert caught.value.code() == Code.RESOURCE_EXHAUSTED, "none of its own makes room"
        monkeypatch.setattr(RpcCaller, "host", "192.0.2.8")
        assert next(stub.Watch(wanted, timeout=60)).status == health_pb2.HealthCheckResponse.SERVING
        assert crowd[0].code() == Code.UNAVAILABLE  # the oldest of the others
        assert not any(call.done() for call in crowd[1:])


def test_a_watcher_that_does_not_read_and_leaves_holds_nobody_up(served: ServerThread) -> None:
    health = served.service.calls.health  # type: ignore[union-attr]
    with ask_without_reading(served, b"", WATCH):
        eventually(lambda: health.watchers == 1, "it watches")
    eventually(lambda: health.watchers == 0, "it has left")
    with grpc.insecure_channel(served.grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
