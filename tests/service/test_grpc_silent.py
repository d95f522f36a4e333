"""Clients of gRPC that send no message, or do not read: they hold no threads, and are ended."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

grpc = pytest.importorskip("grpc", reason="extra grpc is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402

from tierstore.service import server as server_module  # noqa: E402
from tierstore.service.limits import slow_clients  # noqa: E402
from tierstore.service.oip import documents  # noqa: E402
from tierstore.service.rpc import grpcio_health as health_module  # noqa: E402
from tierstore.service.rpc import waiting  # noqa: E402
from tierstore.service.rpc.caller import RpcCaller  # noqa: E402
from tierstore.service.rpc.messages import ENDS  # noqa: E402
from tierstore.service.rpc.server import ADMIN_THREADS, WATCHES  # noqa: E402
from tierstore.service.server import ServerThread  # noqa: E402

from .conftest import eventually, settings_for  # noqa: E402
from .fake_store import FakeStore  # noqa: E402
from .test_grpc_direct import ask_without_reading, frame, keys_request  # noqa: E402

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVICE = "/inference.GRPCInferenceService/"
ANSWER_S = 20.0
Code = grpc.StatusCode


@pytest.fixture
def served(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    """A server that looks for late clients ten times a second."""
    monkeypatch.setattr(slow_clients, "CHECK_S", 0.1)
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
def silent_watches(served: ServerThread, silent: Silent, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """As many calls that have not said what they watch as there may be; they last until they are ended."""
    monkeypatch.setattr(health_module, "REQUEST_S", 3600.0)
    with grpc.insecure_channel(served.grpc_target) as theirs:
        yield [theirs.stream_stream(WATCH)(messages_of(silent, [])) for _ in range(WATCHES)]


def test_silent_watch_calls_make_room_for_others(
    served: ServerThread, silent_watches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = served.service.grpc._health.late  # type: ignore[union-attr]
    eventually(lambda: len(late) == WATCHES, "all of them have a thread")
    monkeypatch.setattr(waiting, "EVICTED_AFTER_S", 0.0)
    with grpc.insecure_channel(served.grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        assert next(call).status == health_pb2.HealthCheckResponse.SERVING
    eventually(lambda: any(call.done() for call in silent_watches), "one has ended")
    assert [call.code() for call in silent_watches if call.done()] == [Code.CANCELLED]


def test_a_stop_does_not_wait_for_silent_watch_calls(
    served: ServerThread, silent_watches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 30)  # then all that is left is ended
    health = served.service.grpc._health  # type: ignore[union-attr]
    eventually(lambda: health.late, "the first has come")
    began = time.monotonic()
    served.close()
    assert time.monotonic() - began < 20
    assert not health.late


@pytest.mark.parametrize("method", [CHECK, SERVICE + "ModelInfer", SERVICE + "ModelReady"])
def test_a_message_has_a_deadline(
    served: ServerThread, silent: Silent, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(slow_clients, "BODY_S", 0.3)
    with grpc.insecure_channel(served.grpc_target) as channel:
        call = channel.stream_unary(method).future(messages_of(silent, []), timeout=60)
        assert call.code() == Code.DEADLINE_EXCEEDED
        assert "did not arrive" in call.details()
        assert channel.unary_unary(SERVICE + "ModelInfer")(keys_request(8), timeout=60)


@pytest.mark.parametrize("method", [CHECK, SERVICE + "ModelInfer", WATCH])
def test_a_stop_does_not_wait_for_messages_that_do_not_come(
    served: ServerThread, silent: Silent, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(server_module, "FINISH_S", 30)  # then all that is left is ended
    monkeypatch.setattr(waiting, "EVICTED_AFTER_S", 0.2)
    with grpc.insecure_channel(served.grpc_target) as channel:
        call = channel.stream_stream(method)(messages_of(silent, []), timeout=60)
        eventually(lambda: received(served, method), "the call has come")
        began = time.monotonic()
        served.close()
        assert time.monotonic() - began < 20
        if method == WATCH:  # the connection may end before the call's own end has come
            assert call.code() in {Code.CANCELLED, Code.UNAVAILABLE}
        else:
            assert (call.code(), call.details()) == (Code.UNAVAILABLE, ENDS)


def received(server: ServerThread, method: str) -> int:
    """The calls without a message."""
    rpc: Any = server.service.grpc
    return len(rpc._health.late) if method == WATCH else sum(len(pool.receiving) for pool in rpc._pools)


def test_a_stop_waits_for_a_message_that_is_on_its_way(
    served: ServerThread, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "EVICTED_AFTER_S", 3600.0)
    method = SERVICE + "ModelInfer"

    def messages() -> Iterator[bytes]:
        yield from silent
        yield keys_request(8)

    with grpc.insecure_channel(served.grpc_target) as channel:
        call = channel.stream_unary(method).future(messages(), timeout=60)
        eventually(lambda: received(served, method), "the call has come")
        closing = threading.Thread(target=served.close)
        closing.start()
        eventually(lambda: served.service.grpc._direct.closing, "the server ends")  # type: ignore[union-attr]
        silent.close()
        assert call.result()
        closing.join(60)


def test_calls_without_a_message_make_room_for_look_ups(
    fake: tuple[FakeStore, ServerThread], silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server = fake
    pool = server.service.grpc.lookup_pool  # type: ignore[union-attr]
    with grpc.insecure_channel(server.grpc_target) as channel:
        held = [
            channel.stream_unary(SERVICE + "ModelInfer").future(messages_of(silent, []), timeout=60) for _ in range(2)
        ]
        eventually(lambda: pool.full, "no room")
        monkeypatch.setattr(waiting, "EVICTED_AFTER_S", 0.0)
        assert channel.unary_unary(SERVICE + "ModelInfer")(keys_request(8), timeout=60)
        eventually(lambda: any(call.done() for call in held), "the one that has waited longest ends")
        assert {call.code() for call in held if call.done()} == {Code.DEADLINE_EXCEEDED}


def test_idle_streams_make_room_for_others(
    served: ServerThread, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = served.service.grpc._pools.streams  # type: ignore[union-attr]
    monkeypatch.setattr(streams, "threads", 2)
    request = service_pb2.ModelInferRequest.FromString(keys_request(2))
    with grpc.insecure_channel(served.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        idle = []
        for _ in range(2):
            idle.append(stub.ModelStreamInfer(messages_of(silent, [request]), timeout=60))
            assert next(idle[-1]).infer_response.model_name == "ctr"
        monkeypatch.setattr(waiting, "EVICTED_AFTER_S", 0.0)
        answers = list(stub.ModelStreamInfer(iter([request]), timeout=60))
        assert [answer.infer_response.model_name for answer in answers] == ["ctr"]
        assert idle[0].code() == Code.UNAVAILABLE  # the one that was idle longest
        assert "open it again" in idle[0].details()


def test_a_client_that_does_not_read_is_ended_and_holds_nothing(
    served: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_clients, "STALL_S", 0.3)
    budget = served.service.inflight
    with ask_without_reading(served, keys_request(2000)) as connection:
        eventually(lambda: budget.used_bytes, "an answer that nobody reads")
        eventually(lambda: budget.used_bytes == 0, "the end of the call")
        connection.settimeout(60)


def test_loads_keep_no_other_call_waiting(served: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(documents, "load", lambda *_: gate.wait(60))
    with grpc.insecure_channel(served.grpc_target) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        wanted = service_pb2.RepositoryModelLoadRequest(model_name="ctr")
        loads = [stub.RepositoryModelLoad.future(wanted, timeout=60) for _ in range(2 * ADMIN_THREADS)]
        try:
            switches = served.service.grpc._pools.switches  # type: ignore[union-attr]
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
    monkeypatch.setattr(RpcCaller, "address", lambda _: "192.0.2.7:4711")
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
        monkeypatch.setattr(RpcCaller, "address", lambda _: "192.0.2.8:4711")
        assert next(stub.Watch(wanted, timeout=60)).status == health_pb2.HealthCheckResponse.SERVING
        assert crowd[0].code() == Code.CANCELLED  # the oldest of the others
        assert not any(call.done() for call in crowd[1:])


def test_a_watcher_that_does_not_read_and_leaves_holds_nobody_up(served: ServerThread) -> None:
    health = served.service.grpc._health  # type: ignore[union-attr]
    with ask_without_reading(served, b"", WATCH):
        eventually(lambda: health.watchers == 1, "it watches")
        health.report(False)
    eventually(lambda: health.watchers == 0, "it has left")
    with grpc.insecure_channel(served.grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_connections_are_bounded_and_leave_files_for_http(tmp_path: Any) -> None:
    store = FakeStore(settings_for(tmp_path, grpc_port=0, max_connections=8))
    with ServerThread(store) as server, contextlib.ExitStack() as opened:  # type: ignore[arg-type]
        most = server.service.grpc.most_connections  # type: ignore[union-attr]
        assert most == 4
        waiting_ones = []
        for _ in range(3 * most):
            made = opened.enter_context(socket.create_connection(("127.0.0.1", server.grpc_port), timeout=60))
            made.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
            waiting_ones.append(made)
        ended = [made for made in waiting_ones if not first_byte(made)]
        assert len(ended) == 2 * most
        assert httpx.get(f"{server.url}/v2/health/live", timeout=60).status_code == 200


def first_byte(connection: socket.socket) -> bytes:
    """What comes first; nothing where the connection is ended."""
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""
