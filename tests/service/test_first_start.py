"""A service that starts before its kernels are compiled: Python answers until reactors do."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.certificates import Authority
from tests.mounts import ROOT, bare, needs_mounts, read_only
from tests.service.conftest import eventually, settings_for
from tests.service.raw_clients import request
from tests.service.scenes import write_small
from tierstore import kernels
from tierstore.engine.store import Store
from tierstore.kernels import ahead
from tierstore.service import server as server_module
from tierstore.service.server import ServerThread

ROWS = 3


class Compiling:
    """Stands for the processes that compile; the test says when they end."""

    def __init__(self) -> None:
        self.http, self.done, self.error = threading.Event(), threading.Event(), None

    def end(self, error: str | None = None) -> None:
        self.error: str | None = error
        self.http.set()
        self.done.set()


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    compilation = Compiling()
    monkeypatch.setattr(server_module.ahead, "start", lambda *_: compilation)
    return compilation


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(settings_for(tmp_path, max_connections=4)) as store:
        store.load_snapshot(write_small(tmp_path, "ctr", "item", 1))
        yield store


def state(server: ServerThread, of: str = "reactors") -> Any:
    return httpx.get(f"{server.url}/admin/models").json()["service"][of]


def look_up(client: tierstore.Client, store: Store) -> None:
    keys = np.arange(ROWS)
    np.testing.assert_array_equal(client.lookup("ctr", "item_id", keys), store.model("ctr").lookup("item_id", keys))


def of_reactors(server: ServerThread) -> tuple[int, int]:
    """The connections that reactors have, and the requests and connections that they have handed to Python."""
    reactors = server._http._reactors
    return int(reactors.words["open"]), sum(reactors.handed_on.values())


def test_python_answers_until_the_kernels_are_compiled(store: Store, compiling: Compiling) -> None:
    with ServerThread(store) as server, tierstore.Client(server.url) as client:
        for _ in range(3):
            look_up(client, store)
        assert (state(server), of_reactors(server)) == ("compiling", (0, 0))
        compiling.end()
        eventually(lambda: state(server) == "running", "reactors have started")

        def received() -> bool:
            look_up(client, store)  # on the connection that Python has had since before
            opened, handed = of_reactors(server)
            return opened > 0 and handed > 0

        eventually(received, "a reactor has received the connection and a request on it")


def test_an_idle_connection_is_given_to_reactors_as_it_is(store: Store, compiling: Compiling) -> None:
    with (
        ServerThread(store) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as asked,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as silent,
    ):
        asked.sendall(request("/v2"))
        assert asked.recv(1 << 16).startswith(b"HTTP/1.1 200")
        limit: Any = server.service.connection_limit
        eventually(lambda: limit.open == 2, "both to be counted")
        compiling.end()
        eventually(lambda: of_reactors(server)[0] == limit.open == 2, "reactors to have both")
        for number, one in enumerate((asked, silent)):
            one.sendall(request("/v2"))
            answer = one.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" not in answer.lower()
            assert of_reactors(server)[1] == number + 1, "a reactor has handed it on"


def test_a_request_under_way_at_the_hand_over_is_answered_or_ended_in_its_time(
    tmp_path: Path, compiling: Compiling
) -> None:
    with Store(settings_for(tmp_path)) as store, ServerThread(store) as server:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as slow,
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as half,
        ):
            slow.sendall(request("/v2")[:-1])
            half.sendall(request("/v2")[:9])
            limit: Any = server.service.connection_limit
            eventually(lambda: limit.open == 2, "both to be counted")
            compiling.end()
            eventually(lambda: state(server) == "running", "reactors have started")
            slow.sendall(request("/v2")[-1:])
            answer = slow.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" in answer.lower()
            server._http._plain_servers[0]._bounds.arrival_s = 0.0
            half.sendall(b"x")
            assert half.recv(1) == b""
        eventually(lambda: limit.open == 0, "nothing is left of them")


def test_a_service_that_starts_compiles_no_kernel_of_reactors_itself(
    store: Store, compiling: Compiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading an address would: other processes do that meanwhile."""
    there = kernels.compiled_c.address.func

    def address(self: kernels.compiled_c) -> int:
        assert self._when < kernels.HTTP or compiling.http.is_set(), self._function
        assert self._when < kernels.LAST or compiling.done.is_set(), self._function
        return int(there(self))

    monkeypatch.setattr(kernels.compiled_c, "address", property(address))
    with ServerThread(store) as server, tierstore.Client(server.url) as client:
        look_up(client, store)
        assert state(server) == "compiling"
        compiling.end()
        eventually(lambda: state(server) == "running", "reactors have started")


def frame_of(server: ServerThread) -> bytes:
    """What a connection that speaks HTTP/2 from its start is sent first: the type of a frame, if it is answered by one."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
        return connection.recv(9)[3:4]


def test_reactors_serve_http1_before_the_kernels_of_http2_are_compiled(
    compiling: Compiling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Store(settings_for(tmp_path, grpc_port=0)) as store,
        ServerThread(store) as server,
        tierstore.Client(server.url) as client,
    ):
        store.load_snapshot(write_small(tmp_path, "ctr", "item", 1))
        compiling.http.set()
        eventually(lambda: state(server) == "running", "reactors have started")
        look_up(client, store)
        assert of_reactors(server)[0] > 0
        assert frame_of(server) != b"\4"
        assert state(server, "http2") == "compiling"
        assert not is_open(server.grpc_port)
        assert not server.service.ready, "the gRPC port that was asked for is not open"
        compiling.end()
        eventually(lambda: server.service.ready, "all is served")
        assert is_open(server.grpc_port)
        assert frame_of(server) == b"\4", "settings"
        assert state(server, "http2") == "running"
        look_up(client, store)


def test_http1_goes_on_where_http2_cannot_be_compiled(
    compiling: Compiling, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with ServerThread(store) as server, tierstore.Client(server.url) as client:
        compiling.http.set()
        eventually(lambda: state(server) == "running", "reactors have started")
        compiling.end("no memory")
        eventually(lambda: "no memory; gRPC is not served" in caplog.text, "the service has noticed")
        look_up(client, store)
        assert (state(server), state(server, "http2")) == ("running", "failed")


def test_python_goes_on_where_they_cannot_be_compiled(
    store: Store, compiling: Compiling, caplog: pytest.LogCaptureFixture
) -> None:
    with ServerThread(store) as server, tierstore.Client(server.url) as client:
        compiling.end("no compiler")
        eventually(lambda: state(server) == "failed", "the service has noticed")
        look_up(client, store)
        assert of_reactors(server) == (0, 0)
    assert "look-ups over HTTP stay with Python: no compiler" in caplog.text


@pytest.fixture(params=["plain", "TLS"])
def for_grpc(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ServerThread, httpx.Client]]:
    """A service with a gRPC port, whose kernels are being compiled, and a client of it."""
    more, verify = {}, True
    if request.param == "TLS":
        (tmp_path / "certificates").mkdir()
        authority = Authority(tmp_path / "certificates")
        own = authority.issue("service", "IP:127.0.0.1")
        more, verify = {"tls_cert": own.cert, "tls_key": own.key}, ssl.create_default_context(cafile=authority.ca)
    with (
        Store(settings_for(tmp_path, grpc_port=0, **more)) as store,
        ServerThread(store) as server,
        httpx.Client(base_url=server.url, verify=verify, timeout=60) as client,
    ):
        yield server, client


def is_open(port: int | None) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=60):
        return True
    return False


def test_the_grpc_port_is_opened_when_it_can_be_served_and_the_service_is_ready_then(
    compiling: Compiling, for_grpc: tuple[ServerThread, httpx.Client]
) -> None:
    server, client = for_grpc
    assert client.get("/v2/health/live").status_code == 200
    answer = client.get("/v2/health/ready")
    assert (answer.status_code, answer.json()) == (400, {"ready": False, "compiling": True})
    assert not is_open(server.grpc_port)
    compiling.end()
    eventually(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready")
    assert is_open(server.grpc_port)


def test_health_is_answered_where_others_have_it(
    compiling: Compiling, for_grpc: tuple[ServerThread, httpx.Client]
) -> None:
    _, client = for_grpc
    live, ready = ("/healthz", "/livez"), ("/health", "/ready", "/readyz")
    assert [client.get(path).status_code for path in (*live, *ready)] == [200, 200, 400, 400, 400]
    compiling.end()
    eventually(lambda: client.get("/health").status_code == 200, "it is ready")
    assert [client.get(path).status_code for path in (*live, *ready)] == [200] * 5


def test_where_they_cannot_be_compiled_the_service_is_ready_without_grpc(
    compiling: Compiling, for_grpc: tuple[ServerThread, httpx.Client], caplog: pytest.LogCaptureFixture
) -> None:
    server, client = for_grpc
    compiling.end("no compiler")
    eventually(lambda: client.get("/v2/health/ready").status_code == 200, "it is ready")
    assert not is_open(server.grpc_port)
    assert "no compiler; gRPC is not served" in caplog.text


def test_without_a_grpc_port_readiness_waits_for_no_compiler(store: Store, compiling: Compiling) -> None:
    with ServerThread(store) as server:
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200
    assert not compiling.done.is_set()


@pytest.mark.parametrize(("port", "awaits"), [(None, False), (0, True), ("off", False)])
def test_a_port_that_nobody_named_keeps_no_first_start_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: Any, awaits: bool
) -> None:
    class Made(Exception):
        pass

    def make(*_: Any, awaits_grpc: bool) -> None:
        assert awaits_grpc is awaits
        raise Made

    monkeypatch.setattr(server_module, "HttpService", make)
    for process_wide in ("tune_allocator", "raise_file_limit"):
        monkeypatch.setattr(server_module, process_wide, lambda: None)
    with pytest.raises(Made):
        server_module.serve(settings_for(tmp_path, port=0, grpc_port=port))


def test_a_stop_does_not_wait_for_the_compiler(store: Store, compiling: Compiling) -> None:
    with ServerThread(store) as server, tierstore.Client(server.url) as client:
        look_up(client, store)
        server.stop()
        server._thread.join(60)
        assert not server._thread.is_alive()
        with pytest.raises(tierstore.Unreachable):
            client.lookup("ctr", "item_id", np.arange(ROWS), timeout_s=5)
    assert not compiling.done.is_set()


def test_connections_are_limited_meanwhile(store: Store, compiling: Compiling) -> None:
    with ServerThread(store) as server:
        clients = [httpx.Client(base_url=server.url, timeout=60) for _ in range(5)]
        try:
            codes = [client.get("/v2/health/live").status_code for client in clients]
            assert codes == [200] * 4 + [503]
            clients[0].close()
            eventually(lambda: clients[4].get("/v2/health/live").status_code == 200, "there is room for another")
        finally:
            for client in clients:
                client.close()
    assert not compiling.done.is_set()


READY = """
import os, signal, sys
from tierstore.config import load_settings
from tierstore.service.server import serve

def announce(*_):
    print(*sys.modules)
    os.kill(os.getpid(), signal.SIGTERM)

serve(load_settings(data=sys.argv[1], port=0, grpc_port="off", drain_s=0), announce=announce)
"""
# the admin interface; what pyarrow and numba import where they may need it; the predictor, other machines, pages for people
NOT_NEEDED = {"fastapi", "pandas", "numba.typed.typeddict", "onnxruntime", "grpc", "redis", "obstore", "rich"}


def test_a_start_imports_what_look_ups_need_and_no_more(store: Store) -> None:
    ahead.compile_all(2)
    store.close()
    command = [sys.executable, "-c", READY, str(store.settings.data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert loaded >= {"numba", "pyarrow", "uvloop", "tierstore.service.admin.application"}
    assert loaded & NOT_NEEDED == set()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users may read; those of pytest may not be read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.thorough
@needs_mounts
def test_a_user_without_home_on_a_read_only_root_starts_with_nothing_compiled(open_folder: Path) -> None:
    data, package = open_folder / "data", open_folder / "fresh"
    with tierstore.open(data) as store:
        store.load_snapshot(write_small(open_folder, "ctr", "item", 1))
        rows = store.model("ctr").lookup("item_id", np.arange(ROWS))
    shutil.copytree(ROOT / "tierstore", package / "tierstore", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "tierstore", "serve", "--port", "0", "--grpc-port", "off", "--data", str(data)]
    if user := other_user():
        subprocess.run(["chown", "-R", "10001:10001", data], check=True)
        command = [*user, *command]
    with subprocess.Popen(
        read_only(command, data, open_folder), env=bare(PYTHONPATH=str(package)), stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        try:
            url = re.search(r"http://\S+", service.stdout.readline())
            assert url is not None
            with tierstore.Client(url[0]) as client:
                np.testing.assert_array_equal(client.lookup("ctr", "item_id", np.arange(ROWS), timeout_s=60), rows)
        finally:
            service.kill()
    assert list((data / "kernels").glob("*/*.nbc"))


def other_user() -> list[str]:
    """The command that runs another as a user without name or HOME; empty where that user cannot read this Python."""
    user = ["setpriv", "--reuid=10001", "--regid=10001", "--clear-groups"]
    with suppress(OSError):
        if subprocess.run([*user, sys.executable, "-c", ""], check=False, capture_output=True).returncode == 0:
            return user
    return []


def test_who_may_not_raise_a_priority_again_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process was started by `nice`, without the right to be less nice."""

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    compilation = object.__new__(ahead.Compilation)
    compilation.first, compilation._is_first, compilation.nice = threading.Event(), False, 0
    compilation._running = [SimpleNamespace(pid=os.getpid())]  # type: ignore[list-item]
    monkeypatch.setattr(os, "setpriority", refused)
    compilation._reach(kernels.FIRST)
    assert compilation.first.is_set()


def test_a_start_waits_for_reactors_no_longer_once_theirs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a stop while the kernels of HTTP/2 were compiled."""
    compilation = object.__new__(ahead.Compilation)
    compilation.http = threading.Event()
    kept: list[int] = []
    monkeypatch.setattr(kernels, "set_complete", kept.append)
    compilation._reach(kernels.HTTP)
    assert (kept, compilation.http.is_set()) == ([kernels.HTTP], True)
