"""Several worker processes over one store: exact, as consistent as one process, and none of them is missed."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engine.scenes import stamped, vectors, write_snapshot
from tierstore.engine.store import Store
from tierstore.errors import TierstoreError
from tierstore.service.process import fleet
from tierstore.service.server import ServerThread

from .conftest import GRPC, eventually, load, settings_for

WORKERS = 2
READERS = 6
ITEM = b'{"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [1]}]}'
KEYS = np.arange(40, dtype=np.int64)


class Scene:
    """A service of worker processes over a store in this process, and connections to every one of them."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.store = stack.enter_context(
            Store(
                settings_for(root, workers=WORKERS, keep_versions=4, fold_grace_s=0.0, lookup_threads=2, grpc_port=GRPC)
            )
        )
        self.store.load_snapshot(write_snapshot(root))
        self.server = stack.enter_context(ServerThread(self.store))
        self.admin = stack.enter_context(httpx.Client(base_url=self.server.url, timeout=30))
        self.seq = 0

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.admin.get("/admin/models").json()["service"]["workers"]
        return workers

    def connect(self, stack: ExitStack) -> list[httpx.Client]:
        """Connections that reach every worker, at least READERS of them."""
        clients: list[httpx.Client] = []

        def reached() -> bool:
            clients.append(stack.enter_context(httpx.Client(base_url=self.server.url, timeout=30)))
            ask(clients[-1], {"item_id": KEYS[:1]})
            return len(clients) >= READERS and all(worker["connections"] > 1 for worker in self.workers())

        eventually(reached, "connections to every worker")
        return clients

    def apply(self, **options: Any) -> int:
        """The next delta: it stamps the KEYS of both tables."""
        self.seq += 1
        body = stamped(self.seq, {"user": KEYS, "item": KEYS}, **options)
        answer = self.admin.post("/admin/models/ctr/deltas", content=body)
        assert answer.status_code == 200, answer.text
        return self.seq

    def folded(self) -> bool:
        status = self.admin.get("/admin/models/ctr").json()
        return status["overlays"] == 0 and status["folded_watermark"] == self.seq


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Every test leaves version 1 active, and no delta."""
    with ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("workers"), stack)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """For tests that apply deltas and kill."""
    with ExitStack() as stack:
        yield Scene(tmp_path_factory.mktemp("workers"), stack)


def ask(
    client: httpx.Client, keys: dict[str, np.ndarray], version: int | None = None
) -> tuple[int, dict[str, np.ndarray]]:
    """(version that answered, rows by feature)."""
    path = "/v2/models/ctr" + ("" if version is None else f"/versions/{version}") + "/infer"
    inputs = [{"name": name, "datatype": "INT64", "shape": [len(of)], "data": of.tolist()} for name, of in keys.items()]
    answer = client.post(path, json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    document = answer.json()
    rows = {out["name"]: np.array(out["data"], np.float32).reshape(out["shape"]) for out in document["outputs"]}
    return int(document["model_version"]), rows


def stamps(rows: dict[str, np.ndarray]) -> set[int]:
    """Which stamps (mod 16) the KEYS of both tables have in an answer."""
    found = set()
    for of in rows.values():
        assert (of == of[:, :1]).all()
        found |= set(((of[:, 0] - KEYS % 64) / 64).tolist())
    return found


class Readers:
    """Threads that ask without pause, a connection each; `check` judges answers. Failures are raised at the end."""

    def __init__(
        self, clients: list[httpx.Client], read: Callable[[httpx.Client], None], *, may_break: bool = False
    ) -> None:
        self.answers = [0] * len(clients)
        self.broken = 0
        self._errors: list[BaseException] = []
        self._stop = threading.Event()

        def run(number: int) -> None:
            while not self._stop.is_set():
                try:
                    read(clients[number])
                    self.answers[number] += 1
                except httpx.TransportError as error:
                    if not may_break:
                        self._errors.append(error)
                        return
                    self.broken += 1
                except BaseException as error:  # noqa: BLE001 - raised in `__exit__`
                    self._errors.append(error)
                    return

        self._threads = [threading.Thread(target=run, args=(number,)) for number in range(len(clients))]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def all_answered(self, more: int = 3) -> None:
        """Wait until every reader has had `more` answers from now on."""
        goals = [have + more for have in self.answers]
        eventually(
            lambda: self._errors or all(have >= goal for have, goal in zip(self.answers, goals, strict=True)),
            "answers to every reader",
        )

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def test_look_ups_are_exact_and_counted_once(shared: Scene) -> None:
    rng = np.random.default_rng(0)
    asked = 0
    with ExitStack() as stack:
        clients = shared.connect(stack)
        before = shared.admin.get("/admin/models/ctr").json()["tables"]["item"]["lookup_keys"]
        requests = _requests(shared)
        for round_ in range(4):
            for client in clients:
                keys = rng.integers(0, 1200, 300)
                version, rows = ask(client, {"item_id": keys})
                expected = vectors("item", 0, keys)
                expected[keys >= 1000] = 0  # the table ends there
                assert version == 1
                np.testing.assert_array_equal(rows["item_id"], expected, err_msg=f"round {round_}")
                asked += len(keys)
        after = shared.admin.get("/admin/models/ctr").json()["tables"]["item"]["lookup_keys"]
        assert sum(after.values()) - sum(before.values()) == asked
        assert after["host"] > before["host"]
        assert _requests(shared) - requests == 4 * len(clients)


def _requests(scene: Scene) -> int:
    (line,) = re.findall(
        r'tierstore_request_seconds_count\{outcome="ok",protocol="oip_http"\} (\S+)', scene.admin.get("/metrics").text
    )
    return int(float(line))


def test_a_delta_is_seen_by_every_worker_once_acknowledged_and_never_in_part(scene: Scene) -> None:
    acknowledged = 0

    def read(client: httpx.Client) -> None:
        least = acknowledged
        _, rows = ask(client, {"user_id": KEYS, "item_id": KEYS})
        (stamp,) = stamps(rows)
        assert (stamp - least) % 16 <= 8, f"a delta older than {least}: {stamp}"

    with ExitStack() as stack:
        clients = scene.connect(stack)
        with Readers(clients, read) as readers:
            for _ in range(40):
                acknowledged = scene.apply()
                read(scene.admin)
            readers.all_answered()
        eventually(scene.folded, "every delta is folded")
        for client in clients:
            read(client)


def test_switch_and_rollback_under_load_fail_no_request(shared: Scene) -> None:
    def read(client: httpx.Client) -> None:
        version, rows = ask(client, {"user_id": KEYS, "item_id": KEYS})
        assert stamps(rows) == {version - 1}, f"rows of {stamps(rows)} in an answer of version {version}"

    assert load(shared.admin, write_snapshot(shared.root, 2, stamp=1), activate=False)["state"] == "done"
    with ExitStack() as stack, Readers(shared.connect(stack), read) as readers:
        for round_ in range(3):
            assert shared.admin.post("/admin/models/ctr/activate", json={"version": 2}).status_code == 200, round_
            assert ask(shared.admin, {"item_id": KEYS})[0] == 2
            readers.all_answered()
            assert shared.admin.post("/admin/models/ctr/rollback").status_code == 200, round_
            assert ask(shared.admin, {"item_id": KEYS})[0] == 1
            readers.all_answered()


def test_a_killed_worker_is_not_missed(scene: Scene) -> None:
    def read(client: httpx.Client) -> None:
        (stamp,) = stamps(ask(client, {"user_id": KEYS, "item_id": KEYS})[1])
        assert (stamp - scene.seq) % 16 in (0, 15, 14, 13, 12)

    restarts = sum(worker["restarts"] for worker in scene.workers())
    with ExitStack() as stack, Readers(scene.connect(stack), read, may_break=True) as readers:
        for killed in range(2):
            victim = scene.workers()[killed % WORKERS]["pid"]
            scene.apply()
            os.kill(victim, signal.SIGKILL)
            readers.all_answered()  # while it is away
            scene.apply()
            eventually(scene.folded, "folding goes on")
            eventually(
                lambda gone=victim: all(w["ready"] and w["pid"] != gone for w in scene.workers()), "it is started again"
            )
        readers.all_answered()
    assert 0 < readers.broken <= 2 * len(readers.answers)  # those whose connection it had, once
    assert sum(worker["restarts"] for worker in scene.workers()) == restarts + 2


def test_a_worker_that_stands_still_holds_up_nobody_else_and_is_missed_by_nobody_once_killed(scene: Scene) -> None:
    victim = scene.workers()[0]["pid"]
    os.kill(victim, signal.SIGSTOP)
    for _ in range(2):  # acknowledged without it
        scene.seq += 1
        scene.store.apply_delta(stamped(scene.seq, {"user": KEYS, "item": KEYS}))
    with httpx.Client(base_url=scene.server.url) as client:  # it accepts no connection
        assert stamps(ask(client, {"user_id": KEYS, "item_id": KEYS})[1]) == {scene.seq % 16}
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: scene.store.status("ctr")["models"]["ctr"]["overlays"] == 0, "what it held is given back")


def test_there_is_one_cache_in_memory(shared: Scene) -> None:
    pids = [worker["pid"] for worker in shared.workers()]
    files = [_shared_files(pid, "tierstore-item") for pid in pids]
    assert files[0].keys() == files[1].keys()
    (file,) = files[0]
    of_all = [of[file] for of in (*files, _shared_files("self", "tierstore-item"))]
    assert all(of_all), "each of them has touched it"
    budget = shared.admin.get("/admin/models/ctr").json()["tables"]["item"]["tier_budget_bytes"]["host"]
    assert sum(of_all) <= budget + (4 << 10)


def _shared_files(pid: int | str, name: str) -> dict[str, int]:
    """The process's share (PSS, which adds up over processes) of each mapped file of that name, by inode."""
    shares: dict[str, int] = {}
    inode = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if re.match(r"[0-9a-f]+-[0-9a-f]+$", words[0]):
            inode = words[4] if f"memfd:{name}" in line else None
        elif inode is not None and words[0] == "Pss:":
            shares[inode] = int(words[1]) << 10
    return shares


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v2/models/ctr/infer", b"{", 400),
        ("POST", "/v2/models/ctr/infer", b"x" * (2 << 20), 413),
        ("POST", "/v2/models/none/infer", b"x" * (512 << 10), 404),
        ("POST", "/v2/models/ctr/versions/1/infer", b"{}", 400),
        ("POST", "/v2/models/ctr/versions/9/infer", ITEM, 404),
        ("GET", "/v2/models/ctr/infer", None, 405),
        ("POST", "/v2/models/infer", ITEM, 405),
        ("POST", "/v2/models//infer", ITEM, 404),
        ("POST", "/v1/models/:predict", b"{}", 404),
        ("GET", "/v2/health/ready", None, 200),
        ("GET", "/v2/models/ctr/versions/1/ready", None, 200),
        ("HEAD", "/v2", None, 200),
        ("GET", "/docs", None, 200),
        ("GET", "/nothing", None, 404),
        ("POST", "/admin/models/ctr/deltas", b"not a delta", 400),
        ("DELETE", "/admin/models/ctr/versions/1", None, 409),
    ],
)
def test_what_a_worker_does_not_answer_itself_is_answered_as_by_one_process(
    shared: Scene, method: str, path: str, body: bytes | None, status: int
) -> None:
    answer = shared.admin.request(method, path, content=body)
    assert answer.status_code == status, answer.text
    assert ask(shared.admin, {"item_id": KEYS})[0] == 1  # on the same connection


def test_a_body_without_a_length_is_passed_on(shared: Scene) -> None:
    answer = shared.admin.post("/admin/models/ctr/deltas", content=iter([b"not ", b"a delta"]))
    assert answer.status_code == 400, answer.text


def test_a_foreign_page_is_refused_by_a_worker(shared: Scene) -> None:
    for path in ("/v2/models/ctr/infer", "/metrics"):
        assert shared.admin.post(path, headers={"Origin": "https://evil.example"}).status_code == 403


def test_workers_that_do_not_come_up_are_an_error_and_leave_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(settings_for(tmp_path, workers=WORKERS)) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        monkeypatch.setattr(fleet.sys, "executable", "/bin/false")
        with pytest.raises(TierstoreError, match="do not come up"):
            ServerThread(store).start()
        assert store.told == []
        store.apply_delta(stamped(1, {"item": KEYS}))
        np.testing.assert_array_equal(store.model("ctr").lookup("item_id", KEYS), vectors("item", 1, KEYS))


def test_a_canary_answers_from_every_worker_and_a_request_id_means_the_same_in_all(shared: Scene) -> None:
    if 2 not in shared.store.model("ctr").versions:
        load(shared.admin, write_snapshot(shared.root, 2, stamp=2), activate=False)
    before = _of_version_2(shared)
    with ExitStack() as stack:
        clients = shared.connect(stack)
        shared.admin.post("/admin/models/ctr/canary", json={"version": 2, "share": 0.5}).raise_for_status()
        ids = [f"r{number}" for number in range(10)]
        chosen = []
        for client in clients:
            path = "/v2/models/ctr/infer"
            answers = [client.post(path, content=ITEM, headers={"x-request-id": each}).json() for each in ids]
            chosen.append([answer["model_version"] for answer in answers])
            assert client.post("/v2/models/ctr/versions/canary/infer", content=ITEM).json()["model_version"] == "2"
            assert client.post("/v2/models/ctr/versions/nobody/infer", content=ITEM).status_code == 404
        assert set(chosen[0]) == {"1", "2"}
        assert all(each == chosen[0] for each in chosen)
        shared.admin.post("/admin/models/ctr/withdraw").raise_for_status()
        for client in clients:
            assert client.post("/v2/models/ctr/infer", content=ITEM).json()["model_version"] == "1"
            assert client.post("/v2/models/ctr/versions/canary/infer", content=ITEM).status_code == 404
    assert _of_version_2(shared) - before == chosen[0].count("2") * len(chosen) + len(chosen)


def _of_version_2(scene: Scene) -> float:
    counted = scene.admin.get("/metrics").text
    found = re.findall(r'tierstore_model_requests_total\{model="ctr",outcome="ok",version="2"\} (\S+)', counted)
    return float(found[0]) if found else 0.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_owner(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "tierstore", "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    environment = {**os.environ, "TIERSTORE_DRAIN_S": "0"}
    with subprocess.Popen([*command, "--workers", "2"], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().split()[-1]
        workers = [each["pid"] for each in httpx.get(f"{url}/admin/models").json()["service"]["workers"]]
        assert len(workers) == 2
        owner.send_signal(number)
        assert owner.wait(30) == (0 if number == signal.SIGTERM else -number)
    eventually(lambda: not any(_lives(pid) for pid in workers), "the workers are gone")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- gRPC


@pytest.fixture
def rpc(shared: Scene) -> Iterator[list[Any]]:
    """Clients on connections of their own, which reach workers as the kernel likes."""
    triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    with ExitStack() as stack:
        # a connection a client, where grpcio would share one
        yield [
            stack.enter_context(
                triton.InferenceServerClient(
                    shared.server.grpc_target, channel_args=[("grpc.use_local_subchannel_pool", 1)]
                )
            )
            for _ in range(READERS)
        ]


def keys_tensor() -> Any:
    import tritonclient.grpc as triton

    given = triton.InferInput("item_id", [len(KEYS)], "INT64")
    given.set_data_from_numpy(KEYS)
    return given


def test_grpc_look_ups_are_answered_by_workers_and_counted_once(
    shared: Scene, rpc: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.server.service.dataplane, "open", lambda *_: pytest.fail("the owner was asked"))

    def successes() -> int:
        (model,) = rpc[0].get_inference_statistics("ctr").model_stats
        return int(model.inference_stats.success.count)

    before = successes()
    for client in rpc:
        answer = client.infer("ctr", [keys_tensor()], str(1))
        np.testing.assert_array_equal(answer.as_numpy("item_id"), vectors("item", 0, KEYS))
    assert successes() - before == len(rpc)


def test_grpc_calls_that_a_worker_does_not_answer_come_from_the_owner(rpc: list[Any]) -> None:
    from tritonclient.utils import InferenceServerException

    for client in rpc:
        assert client.is_server_ready()
        assert client.is_model_ready("ctr")
        assert list(client.get_model_metadata("ctr").versions) == ["1"]
        for model, version, code in (("nobody", "", "NOT_FOUND"), ("ctr", "9", "NOT_FOUND"), ("ctr", "x y", "INVALID")):
            with pytest.raises(InferenceServerException) as caught:
                client.infer(model, [keys_tensor()], version)
            assert code in caught.value.status()
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error, put=answers.put: put((result, error)))
        client.async_stream_infer("ctr", [keys_tensor()])
        result, error = answers.get(timeout=60)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("item_id"), vectors("item", 0, KEYS))
        client.stop_stream()


def test_health_is_watched_through_a_worker(shared: Scene) -> None:
    grpc = pytest.importorskip("grpc", reason="extra grpc is not installed")
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(shared.server.grpc_target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
