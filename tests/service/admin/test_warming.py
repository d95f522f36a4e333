"""What a service says while it warms after a start, and that it answers meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import tierstore
from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.scenes import write_snapshot
from tierstore.engine.lifecycle import warm as warming
from tierstore.service.server import ServerThread

ITEM = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 100]}]}


class Warming(FakeStore):
    """A store that is as warm as it is told to be."""

    share = 0.25

    def warm_share(self) -> float:
        return self.share

    def warming(self) -> dict[str, int] | None:
        return {"done": int(100 * self.share), "total": 100}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[Warming, ServerThread, httpx.Client]]:
    settings = settings_for(tmp_path, ready_warm_share=0.5, grpc_port=0)
    store = Warming(settings)
    with ServerThread(store) as server, httpx.Client(base_url=server.url, timeout=60) as http:  # type: ignore[arg-type]
        yield store, server, http


def test_it_is_ready_once_the_wanted_share_is_warm_and_stays_so(scene):
    store, _, http = scene
    answer = http.get("/v2/health/ready")
    assert (answer.status_code, answer.json()) == (400, {"ready": False, "warming": {"done": 25, "total": 100}})
    assert http.get("/v2/health/live").status_code == 200
    assert http.post("/v2/models/ctr/infer", json=ITEM).status_code == 200, "it answers from the start"
    assert "tierstore_ready 0.0" in http.get("/metrics").text
    store.share = 0.5
    answer = http.get("/v2/health/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "warming": {"done": 50, "total": 100}})
    store.share = 0.4
    assert http.get("/v2/health/ready").status_code == 200, "memory that was given to another does not take it back"
    metrics = http.get("/metrics").text
    assert "tierstore_ready 1.0" in metrics
    assert "tierstore_warm_share 0.4" in metrics


def test_grpc_says_the_same(scene):
    grpc = pytest.importorskip("grpc")
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
    from grpc_health.v1 import health_pb2_grpc

    store, server, _ = scene
    states = health_pb2.HealthCheckResponse
    with grpc.insecure_channel(server.grpc_target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        eventually(lambda: health.Check(health_pb2.HealthCheckRequest()).status == states.NOT_SERVING, "not serving")
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == states.NOT_SERVING
        store.share = 0.75
        assert next(watch).status == states.SERVING


def test_a_service_that_starts_again_answers_while_it_warms(tmp_path, monkeypatch):
    monkeypatch.setattr(warming, "SHORT_BATCH", 8)
    settings = settings_for(tmp_path, warm_rate=1, ready_warm_share=1.0)
    with tierstore.open(**settings.model_dump()) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        for _ in range(3):
            store.model("ctr").lookup("item_id", list(range(100)))
    with (
        tierstore.open(**settings.model_dump()) as store,
        ServerThread(store) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        answer = http.get("/v2/health/ready")
        assert answer.status_code == 400
        assert answer.json()["warming"]["done"] < answer.json()["warming"]["total"]
        assert http.post("/v2/models/ctr/infer", json=ITEM).status_code == 200
        state = http.get("/admin/models").json()
        assert not state["service"]["ready"]
        assert state["warming"]["total"] > 0
