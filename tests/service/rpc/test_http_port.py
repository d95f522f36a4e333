"""gRPC on the HTTP port, with the clients that people have: what they get there is what they get on the gRPC port."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
import tritonclient.grpc as triton  # noqa: E402
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402

from tests.service.conftest import eventually, settings_for  # noqa: E402
from tests.service.fake_store import FakeStore  # noqa: E402
from tests.service.rpc.test_messages import keys_request  # noqa: E402
from tests.service.scenes import KEYS  # noqa: E402
from tierstore.service.server import ServerThread  # noqa: E402

INFER = "/inference.GRPCInferenceService/ModelInfer"
Code = grpc.StatusCode


@pytest.fixture
def target(server: ServerThread) -> str:
    eventually(lambda: server.service.reactors_state == "running", "the reactors")
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def client(target: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(target) as made:
        yield made


def keys_tensor(keys: np.ndarray = KEYS) -> Any:
    made = triton.InferInput("item_id", list(keys.shape), "INT64")
    made.set_data_from_numpy(keys)
    return made


def test_documents_errors_and_request_ids(client: triton.InferenceServerClient, target: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_model_metadata("ctr").name == "ctr"
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer("nothing", [keys_tensor()])
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with grpc.insecure_channel(target) as channel:
        _, call = channel.unary_unary(INFER).with_call(
            keys_request(4), metadata=[("x-request-id", "seven")], timeout=60
        )
        assert ("x-request-id", "seven") in [tuple(entry) for entry in call.trailing_metadata()]
        missing = channel.unary_unary("/inference.GRPCInferenceService/Nothing").future(b"", timeout=60)
        assert missing.code() == Code.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("authority", "code"),
    [("localhost:1", None), ("127.0.0.1", None), ("[::1]:8001", None), ("evil.example", Code.PERMISSION_DENIED), ("a b", Code.PERMISSION_DENIED)],
)  # fmt: skip
def test_the_names_of_the_service_are_those_of_http(
    server: ServerThread, target: str, authority: str, code: Code | None
) -> None:
    over_http = httpx.get(f"{server.url}/v2", headers={"host": authority})
    assert over_http.status_code == (200 if code is None else 403)
    with grpc.insecure_channel(target, options=[("grpc.default_authority", authority)]) as channel:
        stub, health = service_pb2_grpc.GRPCInferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        request = service_pb2.ModelInferRequest.FromString(keys_request(8))
        calls: list[Callable[[], Any]] = [
            lambda: stub.ModelInfer(request, timeout=60),
            lambda: stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=60),
            lambda: [*stub.ModelStreamInfer(iter([request]), timeout=60)],
            lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=60),
        ]
        for call in calls:
            if code is None:
                assert call()
                continue
            with pytest.raises(grpc.RpcError, match="allowed_host") as caught:
                call()
            assert caught.value.code() == code


def test_each_metric_comes_once(server: ServerThread) -> None:
    names = re.findall(r"^# TYPE (\S+)", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    assert {"tierstore_grpc_calls", "tierstore_grpc_streams_limit", "tierstore_grpc_health_watchers"} <= set(names)
    assert len(names) == len(set(names))


def test_a_deadline_ends_a_call_and_its_work(tmp_path: Any) -> None:
    store = FakeStore(settings_for(tmp_path, lookup_threads=1))
    with ServerThread(store) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:  # type: ignore[arg-type]
        eventually(lambda: server.service.reactors_state == "running", "the reactors")
        gate, stub = store.model("ctr").gate, service_pb2_grpc.GRPCInferenceServiceStub(channel)
        gate.clear()
        first = stub.ModelInfer.future(service_pb2.ModelInferRequest.FromString(keys_request(8)), timeout=60)
        eventually(lambda: server.service.lookup_pool.busy, "a call at work")
        second = stub.ModelInfer.future(service_pb2.ModelInferRequest.FromString(keys_request(9000)), timeout=0.2)
        assert second.code() == Code.DEADLINE_EXCEEDED
        gate.set()
        assert first.result().model_name == "ctr"
        eventually(lambda: not server.service.lookup_pool.under_way(), "the end of all work")
        shed = server.service.shed
        assert shed.of("gone") + shed.of("deadline") == 1
