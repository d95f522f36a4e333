"""However many ask at once: threads, queues, connections and memory stay bounded, nothing hangs, refusals say so."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.quick_build import in_process
from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.raw_clients import Answer, burst, connections, many_files, request, statuses
from tests.service.scenes import write_snapshot
from tierstore import open_files
from tierstore.engine.store import Store
from tierstore.service import process
from tierstore.service.http import connection_limit
from tierstore.service.limits import slow_clients
from tierstore.service.limits.worker_pool import WorkerPool
from tierstore.service.server import ServerThread

PATH = "/v2/models/ctr/infer"
ITEM = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 100]}]}
CLIENTS = 1000
THREADS, QUEUE = 2, 20
TIME_LIMIT_S = 60


def resident_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) << 10


def within(answers: object) -> object:
    """What a coroutine gives; one that takes too long hangs."""

    async def run() -> object:
        async with asyncio.timeout(TIME_LIMIT_S):
            return await answers  # type: ignore[misc]

    return asyncio.run(run())


def metric(server: ServerThread, name: str, *, by: httpx.Client | None = None, **labels: str) -> float:
    """`by`: a client whose connection is open; else it takes a new one."""
    text = (by.get("/metrics") if by is not None else httpx.get(f"{server.url}/metrics", timeout=60)).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} with {labels}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[FakeStore, ServerThread]]:
    """Look-ups wait while the gate of `ctr` is closed."""
    settings = settings_for(tmp_path, lookup_threads=THREADS, lookup_queue=QUEUE)
    store = FakeStore(settings)
    with many_files(), ServerThread(store) as server:  # type: ignore[arg-type]
        try:
            yield store, server
        finally:
            store.model("ctr").gate.set()


def test_a_thousand_at_once_are_answered_or_refused_and_nothing_grows(served: tuple[FakeStore, ServerThread]) -> None:
    store, server = served
    gate, pool = store.model("ctr").gate, server.service.lookup_pool
    gate.clear()
    message = request(PATH, ITEM)
    within(burst(server.port, 10, request("/v2/health/live")))
    threads, resident = threading.active_count(), resident_bytes()
    most_threads = 0

    async def run() -> object:
        nonlocal most_threads
        asking = asyncio.ensure_future(burst(server.port, CLIENTS, message))
        # all but those that are at work or wait are answered while nothing moves: at once, that is
        while pool.rejected < CLIENTS - THREADS - QUEUE:
            most_threads = max(most_threads, threading.active_count())
            assert pool.waiting <= QUEUE
            await asyncio.sleep(0.001)
        gate.set()
        return await asking

    answers = within(run())
    assert statuses(answers) == {200: THREADS + QUEUE, 503: CLIENTS - THREADS - QUEUE}  # type: ignore[arg-type]
    refused = [answer for answer in answers if answer.status == 503]  # type: ignore[attr-defined]
    assert all(answer.headers["retry-after"] == "1" and "lookup" in answer.document["error"] for answer in refused)
    assert most_threads <= threads
    assert resident_bytes() - resident < 64 << 20, "64 KiB a connection would do"
    assert metric(server, "tierstore_shed_total", reason="queue_full") == len(refused)
    assert metric(server, "tierstore_queue_seconds_count", pool="lookup") == THREADS + QUEUE
    eventually(lambda: server.service.inflight.used_bytes == 0, "everything is given back")


@pytest.mark.parametrize("batch_max_items", [0, 64])
def test_a_thousand_predictions_at_once_are_right_or_refused(tmp_path: Path, batch_max_items: int) -> None:
    from tests.predict import onnx_models as om  # skips without the extra

    options = {"lookup_threads": THREADS, "lookup_queue": QUEUE, "batch_max_items": batch_max_items}
    snapshot = write_snapshot(tmp_path, dense=om.linear({"item_id": [1.0, 0.0, 0.0, 0.0]}))
    document = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 7]}]}
    with many_files(), in_process(), Store(settings_for(tmp_path, **options)) as store:
        store.load_snapshot(snapshot)
        with ServerThread(store) as server:
            within(burst(server.port, 10, request(PATH, document)))
            threads, resident = threading.active_count(), resident_bytes()
            answers: list[Answer] = within(burst(server.port, CLIENTS, request(PATH, document)))  # type: ignore[assignment]
            assert threading.active_count() <= threads
            assert resident_bytes() - resident < 64 << 20
            assert set(statuses(answers)) <= {200, 503}
            scores = [answer.document["outputs"][0]["data"] for answer in answers if answer.status == 200]
            assert len(scores) >= THREADS + QUEUE
            assert all(score == [1.0, 7.0] for score in scores)
            server.service.refresh()  # counts of reactors too
            assert server.service.shed.of("queue_full") == CLIENTS - len(scores)
            eventually(lambda: server.service.inflight.used_bytes == 0, "everything is given back")


HEALTH = ["/v2/health/live", "/v2/health/ready"]
HEALTH_CALLS = [
    "/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady",
    "/grpc.health.v1.Health/Check",
]  # fmt: skip


def test_health_is_answered_while_every_thread_of_every_pool_is_held(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
    with ServerThread(FakeStore(settings_for(tmp_path, grpc_port=0))) as server:  # type: ignore[arg-type]
        service, gate, running = server.service, threading.Event(), threading.Semaphore(0)
        pools = [pool for pool in vars(service).values() if isinstance(pool, WorkerPool)]
        assert service.lookup_pool in pools

        def held() -> None:
            running.release()
            gate.wait(TIME_LIMIT_S)

        def hold() -> None:
            for pool in pools:
                for _ in range(pool.threads):
                    pool.start(lambda *_: None, held)

        server._http._loop.call_soon_threadsafe(hold)  # type: ignore[union-attr]
        try:
            for _ in range(sum(pool.threads for pool in pools)):
                assert running.acquire(timeout=TIME_LIMIT_S)
            with httpx.Client(base_url=server.url, timeout=TIME_LIMIT_S) as http:
                assert [http.get(path).status_code for path in HEALTH] == [200, 200]
            with grpc.insecure_channel(server.grpc_target) as channel:
                for path in HEALTH_CALLS:
                    channel.unary_unary(path)(b"", timeout=TIME_LIMIT_S)
            assert not gate.is_set()
        finally:
            gate.set()


def test_connections_ask_again_and_again_while_the_service_is_full(served: tuple[FakeStore, ServerThread]) -> None:
    store, server = served
    store.model("ctr").gate.clear()
    pool = server.service.lookup_pool

    async def run() -> object:
        asking = asyncio.ensure_future(burst(server.port, 50, request(PATH, ITEM), each=20))
        while pool.rejected < 28 * 20:
            await asyncio.sleep(0.001)
        store.model("ctr").gate.set()
        return await asking

    counted = statuses(within(run()))  # type: ignore[arg-type]
    assert set(counted) == {200, 503}
    assert sum(counted.values()) == 1000


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v2/models/ctr", "application/json"), ("/v1/models/ctr", "application/json"), ("/admin/models", "application/problem+json"), ("/metrics", "application/problem+json")],
)  # fmt: skip
def test_connections_beyond_the_limit_are_refused_in_the_words_of_their_protocol(
    tmp_path: Path, path: str, kind: str
) -> None:
    store = FakeStore(settings_for(tmp_path, max_connections=2))
    with ServerThread(store) as server, ExitStack() as stack:  # type: ignore[arg-type]

        async def run() -> None:
            async with connections(server.port) as connect:
                first = [await connect() for _ in range(2)]
                assert [(await one.ask(request("/v2"))).status for one in first] == [200, 200]
                extra = await connect()
                answer = await extra.ask(request(path))
                assert (answer.status, answer.headers["content-type"]) == (503, kind)
                assert answer.headers["retry-after"] == "1"
                assert answer.headers["connection"] == "close"
                assert "2 connections are open" in answer.document["error" if path.startswith("/v") else "detail"]
                assert (await extra.ask(request(path))).status == 0, "it is closed then"
                assert (await first[0].ask(request("/v2"))).status == 200

        within(run())
        eventually(lambda: server.service.connection_limit.open == 0, "they have left")  # type: ignore[union-attr]
        http = stack.enter_context(httpx.Client(base_url=server.url))
        assert http.get("/v2").status_code == 200
        assert metric(server, "tierstore_shed_total", by=http, reason="connections") == 1
        assert metric(server, "tierstore_connections_limit", by=http) == 2


def test_a_refusal_reaches_a_client_that_is_sending_its_body(tmp_path: Path) -> None:
    store = FakeStore(settings_for(tmp_path, max_connections=1))
    with ServerThread(store) as server:  # type: ignore[arg-type]

        async def run() -> None:
            async with connections(server.port) as connect:
                first = await connect()
                await first.ask(request("/v2"))
                extra = await connect()
                answer = await extra.ask(request(PATH, ITEM | {"x": "y" * 500_000}))
                assert answer.status == 503

        within(run())


def test_refused_connections_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "REFUSED_AT_ONCE", 3)
    store = FakeStore(settings_for(tmp_path, max_connections=1))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        entrance = server.service.connection_limit
        assert entrance is not None

        async def run() -> None:
            async with connections(server.port) as connect:
                first = await connect()
                await first.ask(request("/v2"))
                idle = [await connect() for _ in range(3)]
                while entrance.refused < 3:
                    await asyncio.sleep(0.001)
                assert (await (await connect()).ask(request("/v2"))).status == 0
                assert [(await one.ask(request("/v2"))).status for one in idle] == [503] * 3

        within(run())
        eventually(lambda: (entrance.open, entrance.refused) == (0, 0), "all have left")


def test_a_refused_connection_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "TURN_OFF_S", 0.01)
    store = FakeStore(settings_for(tmp_path, max_connections=1))
    with (
        ServerThread(store) as server,  # type: ignore[arg-type]
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as first,
    ):
        first.sendall(request("/v2"))  # it has its place before the other comes
        assert first.recv(1) == b"H"
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as extra:
            assert extra.recv(1) == b""


def test_connections_use_half_of_the_files_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: (100, 1000))
    assert process.allowed_connections(2048) == 50
    assert process.allowed_connections(10) == 10


AHEAD = 100  # requests


def test_a_client_that_sends_far_ahead_is_answered_in_order_and_not_read_meanwhile(
    served: tuple[FakeStore, ServerThread],
) -> None:
    store, server = served
    store.model("ctr").gate.clear()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as one:
        one.sendall(request(PATH, ITEM) + request("/v2") * AHEAD)
        eventually(lambda: server.service.lookup_pool.busy == 1, "the first one is worked on")
        assert server.service.reactors.handed_on["other_request"] == 0  # type: ignore[union-attr]
        store.model("ctr").gate.set()
        seen = b""
        while seen.count(b"HTTP/1.1 200") < 1 + AHEAD:
            seen += one.recv(1 << 16)
