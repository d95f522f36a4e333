"""A call that would wait too long is refused at once: by the queue, and, where a reactor can tell, without the interpreter."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import numpy as np
import pytest

from tests.engine.quick_build import in_process
from tests.predict import onnx_models as om
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.scenes import KEYS, write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import Overloaded
from tierstore.reactor import layout as kernel
from tierstore.service.limits.call_queue import CallQueue
from tierstore.service.limits.shedding import WAITS_TOO_LONG, Caller, Shed, Waits
from tierstore.service.limits.worker_pool import WorkerPool
from tierstore.service.server import ServerThread

PATH = "/v2/models/ctr/infer"
WEIGHTS = {"item_id": [1.0, 0.5, 0.25, 0.125]}

# --- the rule


def test_a_call_waits_for_those_before_it_as_long_as_the_last_ones_took() -> None:
    waits = Waits("lookup", Shed(), 60.0)
    assert waits.expected_s(pending=50, threads=2) == 0.0  # nothing is known yet
    for _ in range(1000):
        waits.ran(0.1)
    assert [round(waits.expected_s(pending, 2), 6) for pending in (0, 1, 2, 3, 9)] == [0.0, 0.0, 0.025, 0.075, 0.375]
    for _ in range(300):
        waits.ran(0.3)
    assert waits.expected_s(9, 2) == pytest.approx(1.125, rel=0.05)


def test_a_call_that_fails_has_taken_its_time_too() -> None:
    waits = Waits("lookup", Shed(), 60.0)
    with pytest.raises(ZeroDivisionError):
        waits.timed(lambda: 1 / 0)
    assert waits.expected_s(3, 2) > 0


@pytest.mark.parametrize(
    ("wait_s", "remaining_s", "admitted"),
    [(0.0, -1.0, True), (0.9, 2.0, True), (1.1, 2.0, False), (4.9, None, True), (5.1, None, False), (5.1, 60.0, False)],
)
def test_a_call_may_wait_for_half_of_its_time_and_at_most_for_the_limit(
    wait_s: float, remaining_s: float | None, admitted: bool
) -> None:
    counts = Shed()
    waits = Waits("lookup", counts, 5.0)
    if admitted:
        waits.admit(wait_s, remaining_s)
    else:
        with pytest.raises(Overloaded, match="too many calls wait for a thread"):
            waits.admit(wait_s, remaining_s)
    assert counts.of("queue_wait") == (not admitted)


def test_a_pool_refuses_what_would_wait_too_long_and_says_what_reactors_need_to_know_that() -> None:
    waits = Waits("lookup", Shed(), 3600.0)
    pool, words = WorkerPool("lookup", threads=1, queue_limit=9, waits=waits), kernel.SHARED.new()
    pool.serve_jobs(words, lambda number: None)
    gate = threading.Event()

    async def run() -> None:
        for _ in range(1000):
            waits.ran(10.0)
        held = pool.run(gate.wait, 60)
        hasty, patient = Caller(0), Caller(0)
        for caller, seconds in ((hasty, 8), (patient, 60)):
            caller.deadline_ns = time.perf_counter_ns() + seconds * 10**9
        with pytest.raises(Overloaded):
            pool.run(int, caller=hasty)
        later = pool.run(int, caller=patient)
        assert words["other_queued"] == 2
        assert words["call_ns"] == pytest.approx(10e9, rel=0.01)
        gate.set()
        await asyncio.gather(held, later)
        assert words["other_queued"] == 0

    asyncio.run(run())
    pool.close()


def test_jobs_of_reactors_fill_a_pool_too() -> None:
    waits, words = Waits("lookup", Shed(), 60.0), kernel.SHARED.new()
    pool = WorkerPool("lookup", threads=1, queue_limit=1, waits=waits, with_jobs=True)
    served: list[int] = []

    def serve(number: int) -> None:
        served.append(number)
        pool.jobs_done(1)

    pool.serve_jobs(words, serve)

    async def run() -> None:
        words["queued"] = 2  # as reactors count them before they write
        assert (pool.busy, pool.waiting) == (1, 1)
        with pytest.raises(Overloaded, match="1 calls wait"):
            pool.run(int)
        assert pool.jobs is not None
        pool.jobs.give_back([7, 8])
        while pool.under_way():
            await asyncio.sleep(0.001)
        assert await pool.run(int, "5") == 5

    asyncio.run(run())
    assert served == [7, 8]
    pool.close()


def test_jobs_are_taken_from_between_calls() -> None:
    """Calls keep their order among one another; jobs that are not wanted come back."""
    jobs = CallQueue(8)
    jobs.put("one")
    jobs.give_back([3, 4])
    jobs.put("two")
    assert jobs.jobs(4) == [3, 4]
    jobs.give_back([4])
    assert [jobs.get(), jobs.get(), jobs.get()] == ["one", "two", 4]
    assert jobs.jobs(4) == []
    jobs.close()


# --- over HTTP


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, ServerThread]]:
    """A model that predicts, and one look-up thread."""
    pytest.importorskip("onnxruntime", reason="the extra `dense` is not installed")
    root = tmp_path_factory.mktemp("early")
    settings = settings_for(root, grpc_port=GRPC, lookup_threads=1, max_queue_s=100, lookup_queue=4)
    with in_process(), Store(settings) as store:
        store.load_snapshot(write_snapshot(root, dense=om.linear(WEIGHTS, 0.5)))
        with ServerThread(store) as server:
            yield store, server


@contextmanager
def thread_held(server: ServerThread, calls: int = 1) -> Iterator[None]:
    """The look-up thread is at work, on so many calls that take 40 s, as far as the queue knows."""
    pool, gate, begun = server.service.lookup_pool, threading.Event(), Future[None]()

    def begin() -> None:
        try:
            for _ in range(calls):
                pool.run(gate.wait, 60)
            for _ in range(1000):
                pool.waits.ran(40.0)
            pool._count(0)
        except BaseException as error:
            begun.set_exception(error)
            raise
        begun.set_result(None)

    server._http._loop.call_soon_threadsafe(begin)  # type: ignore[union-attr]
    begun.result(60)
    try:
        yield
    finally:
        gate.set()
        eventually(lambda: not pool.under_way(), "the thread is idle")
        pool.waits.call_s = 0.0


def prediction(
    parameters: dict[str, Any] | None = None, outputs: Any = None, keys: Any = KEYS[:4], request_id: str | None = None
) -> dict[str, Any]:
    """Arguments for httpx: a prediction with its keys as binary data."""
    tensor = {
        "name": "item_id",
        "datatype": "INT64",
        "shape": [len(keys)],
        "parameters": {"binary_data_size": 8 * len(keys)},
    }
    document: dict[str, Any] = {"inputs": [tensor], "parameters": {"binary_data_output": True} | (parameters or {})}
    if outputs is not None:
        document["outputs"] = outputs
    if request_id is not None:
        document["id"] = request_id
    text = json.dumps(document).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return {"content": text + np.asarray(keys, np.int64).tobytes(), "headers": headers}


def in_memory(server: ServerThread, http: httpx.Client, wanted: dict[str, Any]) -> None:
    """Ask until the rows are in memory, so that no thread is needed."""
    waits = server.service.shed._waits

    def is_direct() -> bool:
        before = sum(waits["lookup"].counts) if "lookup" in waits else 0
        assert http.post(PATH, **wanted).status_code == 200
        return (sum(waits["lookup"].counts) if "lookup" in waits else 0) == before

    eventually(is_direct, "the rows are in memory")


def refused_here(server: ServerThread) -> int:
    """Requests that reactors have refused."""
    counts = server.service.plans.versions.words.view(kernel.VERSION_COUNTS.dtype)
    return int(counts["refusals"].sum() + counts["full_refusals"].sum())


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture
def http(served: tuple[Store, ServerThread]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[1].url, timeout=60) as client:
        assert client.post(PATH, **prediction()).status_code == 200  # so that its path is known
        yield client


def test_a_reactor_refuses_as_python_does_and_all_is_counted(
    served: tuple[Store, ServerThread], http: httpx.Client
) -> None:
    _, server = served
    names = (
        'tierstore_shed_total{reason="queue_wait"}',
        'tierstore_request_seconds_count{outcome="overloaded",protocol="oip_http"}',
    )
    before = [metric(http, name) for name in names]
    here, asked = refused_here(server), 200
    with thread_held(server):
        answers = [http.post(PATH, **prediction({"timeout": 30_000_000})) for _ in range(asked)]
        here = refused_here(server) - here
        counts = [metric(http, name) for name in names]
    assert {answer.status_code for answer in answers} == {503}
    assert here == asked
    said = {json.dumps(sorted((k, v) for k, v in answer.headers.items() if k != "date")) for answer in answers}
    assert len(said) == 1
    assert answers[0].headers["retry-after"] == "1"
    assert {answer.content for answer in answers} == {json.dumps({"error": WAITS_TOO_LONG}).replace(": ", ":").encode()}
    assert [now - then for now, then in zip(counts, before, strict=True)] == [asked, asked]
    stats = http.get("/v2/models/ctr/stats").json()["model_stats"][0]["inference_stats"]
    assert stats["fail"]["count"] >= asked
    assert http.post(PATH, **prediction({"timeout": 30_000_000})).status_code == 200


def test_a_full_queue_refuses_whatever_the_deadline_and_is_counted_as_such(
    served: tuple[Store, ServerThread], http: httpx.Client
) -> None:
    _, server = served
    names = ('tierstore_shed_total{reason="queue_full"}', "tierstore_lookup_rejected_total")
    before, here = [metric(http, name) for name in names], refused_here(server)
    with thread_held(server, calls=5):
        answers = {http.post(PATH, **prediction()).status_code for _ in range(50)}
        after = [metric(http, name) for name in names]
    assert answers == {503}
    assert refused_here(server) > here
    assert [now - then for now, then in zip(after, before, strict=True)] == [50, 50]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parameters", "headers"),
    [({"timeout": 30_000_000}, {}), ({}, {"X-Request-Timeout-Ms": "30000"}), ({"timeout": 10**9}, {"x-envoy-expected-rq-timeout-ms": "30000"})],
)  # fmt: skip
def test_the_earliest_timeout_counts(
    served: tuple[Store, ServerThread], http: httpx.Client, parameters: dict[str, Any], headers: dict[str, str]
) -> None:
    wanted = prediction(parameters)
    wanted["headers"] |= headers
    here = refused_here(served[1])
    with thread_held(served[1]):
        assert {http.post(PATH, **wanted).status_code for _ in range(50)} == {503}
    assert refused_here(served[1]) > here


def test_what_may_wait_is_queued_and_answered(served: tuple[Store, ServerThread], http: httpx.Client) -> None:
    """There is one call before the first, which would wait 20 s, and the second 60 s."""
    _, server = served
    here, pool = refused_here(server), server.service.lookup_pool
    answers: list[httpx.Response] = []
    asking = []
    with thread_held(server):
        for wanted in (prediction({"timeout": 60_000_000}), prediction({"timeout": 200_000_000})):
            asking.append(threading.Thread(target=lambda wanted=wanted: answers.append(http.post(PATH, **wanted))))
            asking[-1].start()
            eventually(lambda: pool.waiting == len(asking), "it waits")
    for thread in asking:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert refused_here(server) == here


def test_a_look_up_on_the_same_path_is_answered_while_predictions_are_refused(
    served: tuple[Store, ServerThread], http: httpx.Client
) -> None:
    rows = prediction(outputs=[{"name": "item_id"}])
    in_memory(served[1], http, rows)  # and a reactor has a plan from now on
    with thread_held(served[1]):
        assert http.post(PATH, **prediction({"timeout": 30_000_000})).status_code == 503
        assert http.post(PATH, **rows).status_code == 200
        fresh = prediction(outputs=[{"name": "item_id"}], keys=KEYS[:3])
        answers = [http.post(PATH, **fresh).status_code for _ in range(300)]
    assert set(answers[answers.index(200) :]) == {200}  # once one of them was Python's, it has a plan


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["id", "timeout", "json", "string keys"])
def test_look_ups_of_every_form_are_answered_while_predictions_are_refused(
    served: tuple[Store, ServerThread], http: httpx.Client, form: str
) -> None:
    if form == "string keys":
        text = b"\x05\0\0\0alice"
        tensor = {"name": "user", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(text)}}
        document: dict[str, Any] = {"inputs": [tensor], "outputs": [{"name": "user"}]}
        document["parameters"] = {"binary_data_output": True}
        data = json.dumps(document).encode()
        wanted: dict[str, Any] = {
            "content": data + text,
            "headers": {"Inference-Header-Content-Length": str(len(data))},
        }
    else:
        more = {"timeout": 60_000_000} if form == "timeout" else {"binary_data_output": False} if form == "json" else {}
        wanted = prediction(more, outputs=[{"name": "item_id"}], request_id="one" if form == "id" else None)
    in_memory(served[1], http, wanted)
    here = refused_here(served[1])
    with thread_held(served[1]):
        assert {http.post(PATH, **wanted).status_code for _ in range(50)} == {200}
        assert http.post(PATH, **prediction({"timeout": 30_000_000})).status_code == 503
    assert refused_here(served[1]) == here + 1


def raw(wanted: dict[str, Any], *more: str, port: int) -> bytes:
    """A prediction as it goes over the wire, under the name that reactors know."""
    lines = [f"POST {PATH} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(wanted['content'])}", *more]
    lines += [f"{name}: {value}" for name, value in wanted["headers"].items()]
    return "\r\n".join([*lines, "", ""]).encode() + wanted["content"]


def read_answer(stream: BinaryIO) -> tuple[int, dict[str, str]]:
    """The status of the next answer, and its headers."""
    status = int(stream.readline().split()[1])
    headers = dict(iter(lambda: stream.readline().decode().rstrip().lower().partition(": ")[::2], ("", "")))
    stream.read(int(headers["content-length"]))
    return status, headers


def test_requests_sent_together_are_answered_in_their_order(
    served: tuple[Store, ServerThread], http: httpx.Client
) -> None:
    _, server = served
    rows = prediction(outputs=[{"name": "item_id"}])
    in_memory(server, http, rows)
    hasty, here = prediction({"timeout": 30_000_000}), refused_here(server)
    with (
        thread_held(server),
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as client,
        client.makefile("rb") as answers,
    ):
        client.sendall((raw(hasty, port=server.port) * 2 + raw(rows, port=server.port)) * 20)
        assert [read_answer(answers)[0] for _ in range(60)] == [503, 503, 200] * 20
    assert refused_here(server) > here


def test_a_refusal_while_the_service_drains_ends_its_connection(
    served: tuple[Store, ServerThread], http: httpx.Client
) -> None:
    _, server = served
    hasty, here = raw(prediction({"timeout": 30_000_000}), port=server.port), refused_here(server)
    with thread_held(server), ExitStack() as open_:
        clients = [
            open_.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(50)
        ]
        for client in clients:  # that they are connected
            client.sendall(hasty)
            assert client.recv(1000).startswith(b"HTTP/1.1 503")
        server._http.stop(60)
        eventually(lambda: server.service.draining, "it drains")
        for client in clients:
            client.sendall(hasty)
            with client.makefile("rb") as answers:
                status, headers = read_answer(answers)
                assert (status, headers["connection"], answers.read()) == (503, "close", b"")
    assert refused_here(server) > here


def test_who_is_routed_by_an_id_is_left_to_python(
    served: tuple[Store, ServerThread], http: httpx.Client, tmp_path: Path
) -> None:
    store, server = served
    store.load_snapshot(write_snapshot(tmp_path, 2, dense=om.linear(WEIGHTS, 0.5)), activate=False)
    store.canary("ctr", 2, 0.5)
    hasty = prediction({"timeout": 30_000_000})
    routed = hasty | {"headers": hasty["headers"] | {"X-Request-Id": "somebody", "X-Request-Timeout-Ms": "30000"}}
    assert {http.post(PATH, **hasty).status_code for _ in range(20)} == {200}  # both versions
    here = refused_here(server)
    with thread_held(server):
        assert {http.post(PATH, **routed).status_code for _ in range(50)} == {503}
        assert refused_here(server) == here
        assert {http.post(PATH, **hasty).status_code for _ in range(50)} == {503}
    assert refused_here(server) > here


def test_a_deadline_that_has_passed_while_the_body_came_is_told_as_such(
    served: tuple[Store, ServerThread], http: httpx.Client
) -> None:
    _, server = served
    wanted, here = raw(prediction(), "X-Request-Timeout-Ms: 50", port=server.port), refused_here(server)
    with thread_held(server):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(wanted[:-8])
                time.sleep(0.2)
                client.sendall(wanted[-8:])
                with client.makefile("rb") as answers:
                    assert read_answer(answers)[0] == 504
    assert refused_here(server) == here


def test_over_grpc_too(served: tuple[Store, ServerThread]) -> None:
    triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    _, server = served
    wanted = triton.InferInput("item_id", [4], "INT64")
    wanted.set_data_from_numpy(KEYS[:4])
    with triton.InferenceServerClient(server.grpc_target) as client:
        assert client.infer("ctr", [wanted], client_timeout=60).as_numpy("score").shape == (4, 1)
        pool = server.service.lookup_pool
        waits: Any = pool.waits
        gate = threading.Event()
        for _ in range(1000):
            waits.ran(40.0)
        ended: list[object] = []
        for _ in range(pool.threads):
            server._http._loop.call_soon_threadsafe(pool.start, lambda *of: ended.append(of), gate.wait, 60)  # type: ignore[union-attr]
        eventually(lambda: pool.busy == pool.threads, "all threads at work")
        try:
            with pytest.raises(Exception, match="too many calls wait for a thread"):
                client.infer("ctr", [wanted], client_timeout=30)
        finally:
            gate.set()
            waits.call_s = 0.0
        eventually(lambda: len(ended) == pool.threads, "their end")
        waits.call_s = 0.0
        assert client.infer("ctr", [wanted], client_timeout=60).as_numpy("score").shape == (4, 1)
