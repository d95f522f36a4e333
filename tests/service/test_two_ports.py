"""A service on two ports: each answers HTTP/1.1, HTTP/2 and gRPC, with the same bounds and the same rules."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service import http2_client as h2
from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.scenes import KEYS, items
from tierstore.errors import ConfigError
from tierstore.reactor import layout as kernel
from tierstore.service import addresses
from tierstore.service.addresses import Ports
from tierstore.service.server import ServerThread

ROOT = Path(__file__).parents[2]
FEW_FILES = 400  # that a process may open
INFER = "/v2/models/ctr/infer"
LOOK_UP = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [len(KEYS)], "data": KEYS.tolist()}]}


@pytest.fixture(params=["port", "grpc_port"])
def port(server: ServerThread, request: pytest.FixtureRequest) -> int:
    found = getattr(server, request.param)
    assert isinstance(found, int)
    return found


def test_each_answers_http_1(port: int) -> None:
    answer = httpx.post(f"http://127.0.0.1:{port}{INFER}", json=LOOK_UP)
    (output,) = answer.json()["outputs"]
    np.testing.assert_array_equal(np.reshape(output["data"], output["shape"]), items(KEYS))


def test_each_answers_http_2(port: int) -> None:
    with h2.Client(port) as client:
        client.send(h2.get(1, "/v2/health/live"))
        assert client.answer(1)[0][":status"] == "200"


def test_each_refuses_a_name_that_is_not_its_own(port: int) -> None:
    answer = httpx.get(f"http://127.0.0.1:{port}/v2", headers={"Host": "elsewhere.example"})
    assert answer.status_code == 403


def test_look_ups_over_grpc_are_answered_by_reactors_at_each(server: ServerThread, port: int) -> None:
    triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    keys = triton.InferInput("item_id", [len(KEYS)], "INT64")
    keys.set_data_from_numpy(KEYS)
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:

        def is_direct() -> bool:
            before = server.service.reactors.answers  # type: ignore[union-attr]
            np.testing.assert_array_equal(client.infer("ctr", [keys]).as_numpy("item_id"), items(KEYS))
            answers: int = server.service.reactors.answers  # type: ignore[union-attr]
            return answers == before + 1

        eventually(is_direct, "the reactors have a plan")


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[ServerThread]:
    """A server for four connections."""
    with ServerThread(FakeStore(settings_for(tmp_path, grpc_port=0, max_connections=4))) as server:  # type: ignore[arg-type]
        yield server


def test_connections_of_both_count_together(narrow: ServerThread) -> None:
    assert narrow.grpc_port is not None
    clients = [
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) for port in (narrow.port, narrow.grpc_port)
    ]
    kept = [h2.Client(port) for port in (narrow.port, narrow.grpc_port)]
    try:
        assert [client.get("/v2/health/live").status_code for client in clients] == [200, 200]
        for number, session in enumerate(kept):
            session.send(h2.get(1, "/v2/health/live"))
            assert session.answer(1)[0][":status"] == "200", number
        for port in (narrow.port, narrow.grpc_port):
            assert httpx.get(f"http://127.0.0.1:{port}/v2/health/live", timeout=60).status_code == 503
            with socket.create_connection(("127.0.0.1", port), timeout=60) as further:
                further.sendall(h2.PREFACE + h2.settings())
                assert further.recv(9)[:5] == b"HTTP/", "no words of HTTP/2"
        clients[0].close()
        eventually(
            lambda: httpx.get(f"http://127.0.0.1:{narrow.grpc_port}/v2/health/live").status_code == 200, "there is room"
        )
    finally:
        for client in (*clients, *kept):
            client.__exit__(None, None, None) if isinstance(client, h2.Client) else client.close()


def test_a_client_whose_machine_is_gone_is_looked_for(narrow: ServerThread) -> None:
    """Connections are probed by TCP where nothing comes: those that watch the health may be silent for days."""
    assert narrow.grpc_port is not None
    reactors = narrow._http._reactors
    for port in (narrow.port, narrow.grpc_port):
        with h2.Client(port) as client:
            client.send(h2.get(1, "/v2/health/live"))
            assert client.answer(1)[0][":status"] == "200"
            (fd,) = np.flatnonzero(reactors.conns["state"] == kernel.HTTP2).tolist()
            with socket.socket(fileno=os.dup(fd)) as ours:
                assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                silent_s = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                probe_s = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
                assert silent_s + probe_s * ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 50
        eventually(lambda: not (reactors.conns["state"] == kernel.HTTP2).any(), "its end")


def test_a_client_of_http_2_that_ends_its_side_is_gone(narrow: ServerThread) -> None:
    """It gets no answer, and what waits for a thread on its behalf is not begun."""
    assert narrow.grpc_port is not None
    service: Any = narrow.service
    gate = service.store.model("ctr").gate
    gate.clear()
    try:
        with h2.Client(narrow.grpc_port) as client:
            body = b'{"inputs":[{"name":"item_id","datatype":"INT64","shape":[1],"data":[7]}]}'
            for stream in (1, 3, 5):  # two threads, and one that waits
                client.send(
                    h2.frame(h2.HEADERS, h2.END_HEADERS, stream, h2.head(INFER, "POST")),
                    h2.frame(h2.DATA, h2.END_STREAM, stream, body),
                )
            eventually(lambda: service.lookup_pool.waiting == 1, "one that waits")
            client.socket.shutdown(socket.SHUT_WR)
            assert client.until(h2.HEADERS) is None
            eventually(lambda: not len(narrow._http._reactors.streams), "Python has heard of it")
    finally:
        gate.set()
    eventually(lambda: not service.lookup_pool.under_way(), "the end of all work")
    assert 1 <= service.shed.of("gone") <= 3, "the one that waits for sure; those at the gate may be found out as well"
    eventually(lambda: service.inflight.used_bytes == 0, "nothing is held")


def test_a_taken_port_frees_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[socket.socket] = []
    bind_tcp = addresses.bind_tcp

    def bind(*where: Any, **more: Any) -> socket.socket:
        bound.append(bind_tcp(*where, **more))
        return bound[-1]

    monkeypatch.setattr(addresses, "bind_tcp", bind)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {taken} for gRPC: .*choose another with grpc_port"):
            Ports(settings_for(tmp_path, grpc_port=taken))
    assert [sock.fileno() for sock in bound] == [-1]


def is_answered(admin: Path) -> bool:
    """Whether the operator's socket answers."""
    with socket.socket(socket.AF_UNIX) as made, contextlib.suppress(ConnectionResetError):
        made.settimeout(20)
        made.connect(str(admin))
        made.sendall(b"GET /admin/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return made.recv(64).startswith(b"HTTP/1.1 200 ")
    return False


@pytest.mark.thorough
def test_connections_leave_descriptors_for_the_operator(tmp_path: Path) -> None:
    """As many prefaces of HTTP/2 as the process may open files: health and the operator's socket are answered all the same."""
    command = [sys.executable, "-m", "tierstore", "serve", "--data", "data", "--port", "0", "--grpc-port", "off"]
    process = subprocess.Popen(
        [*command, "--admin-listen", "unix:admin"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, FEW_FILES)),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait, 60)
        stack.callback(process.terminate)
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[-1].rpartition(":")[2])
        assert is_answered(tmp_path / "admin")  # what it needs is imported from here on
        for number in range(FEW_FILES):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            with contextlib.suppress(OSError):  # it was refused
                one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert number % 20 or is_answered(tmp_path / "admin")
        assert is_answered(tmp_path / "admin")

        def is_healthy() -> bool:
            with (
                socket.create_connection(("127.0.0.1", port), timeout=20) as health,
                contextlib.suppress(ConnectionError),
            ):
                health.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                return health.recv(64).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 "))
            return False

        eventually(is_healthy, "those that are silent make room")
