"""HTTP clients that send slowly or do not read: they are ended, hold nothing for good, and do not delay the end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.raw_clients import request
from tests.service.reactor.test_reactor import Own, answer, ctr, learned, planned, reactor_answers  # noqa: F401 - fixtures
from tierstore.service.limits import slow_clients
from tierstore.service.server import ServerThread

INFER = "/v2/models/ctr/infer"
FOREIGN = {"Expect": "nothing"}  # of which reactors know nothing
KEYS = 40_000


@pytest.fixture(params=["reactors", "uvicorn"])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    """A server that waits for its clients a short time only."""
    yield from serving(request.param, tmp_path, monkeypatch)


@pytest.fixture
def by_reactors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    yield from serving("reactors", tmp_path, monkeypatch)


def serving(by: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerThread]:
    for name in ("BODY_S", "STALL_S"):
        monkeypatch.setattr(slow_clients, name, 1.0)
    bounds = {"arrival_timeout_s": 1.0, "idle_timeout_s": 30, "max_connections": 64}
    store = FakeStore(settings_for(path, server=by, grpc_port="off", **bounds))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        yield server


def connect(server: ServerThread) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", server.port))
    made.settimeout(30)
    return made


def drip(connection: socket.socket, seconds: float) -> bytes:
    """Send a byte every now and then. What came, until the connection ended; fails after `seconds`."""
    until, received = time.monotonic() + seconds, b""
    connection.settimeout(0.1)
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionError):  # where it was reset, what had come is still to be read
            connection.sendall(b"x")
        try:
            part = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except ConnectionError:
            return received
        received += part
        if not part:
            return received
    pytest.fail(f"after {seconds} s the connection is still open")


def large_lookup() -> bytes:
    """A look-up whose answer is large, for Python."""
    head, keys = planned(KEYS, **FOREIGN)
    return head + keys


def test_the_next_head_of_a_connection_has_one_too(served: ServerThread) -> None:
    with connect(served) as slow:
        slow.sendall(request("/v2/health/live") + b"GET /v2/health/live HTTP/1.1\r\nX-Slow: ")
        assert drip(slow, 15).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/admin/models/ctr/snapshots", "/admin/models/ctr/deltas", INFER])
def test_a_body_has_a_deadline_however_its_bytes_trickle(served: ServerThread, path: str) -> None:
    with connect(served) as slow:
        slow.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n".encode())
        said = drip(slow, 15)
    assert said.startswith(b"HTTP/1.1 408")
    assert b"\r\nconnection: close\r\n" in said.lower()


def test_a_body_that_is_refused_and_still_trickles_has_one(served: ServerThread) -> None:
    with connect(served) as slow:
        slow.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n".encode())
        assert drip(slow, 15).startswith(b"HTTP/1.1 413")


def test_bytes_count_until_they_have_left(served: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "STALL_S", 60.0)
    budget = served.service.inflight
    with connect(served) as slow:
        slow.sendall(large_lookup() * 6)
        eventually(lambda: budget.used_bytes > 1 << 16, "answers that nobody reads are counted")
        received = 0
        while received < 6 * KEYS * 16:
            received += len(slow.recv(1 << 20))
        eventually(lambda: budget.used_bytes == 0, "all has left")


def test_a_client_that_reads_slowly_is_ended(served: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "SLOWEST_RATE", 1 << 20)
    with connect(served) as slow:
        slow.sendall(large_lookup() * 6)
        until = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while slow.recv(16):
                time.sleep(0.02)
                assert time.monotonic() < until, "at 800 bytes a second it is still open"


def test_the_less_room_there_is_the_sooner_it_is_ended(served: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_clients, "STALL_S", 3600.0)
    monkeypatch.setattr(slow_clients, "PRESSED_STALL_S", 0.2)
    budget = served.service.inflight
    with connect(served) as slow:
        slow.sendall(large_lookup() * 6)
        eventually(lambda: budget.used_bytes > 1 << 16, "an answer that nobody reads")
        held = budget.limit_bytes // 2
        budget.hold(held)
        eventually(lambda: budget.used_bytes == held, "it is ended")
        budget.release(held)


def test_a_reactors_client_that_does_not_read_is_ended_the_sooner_the_less_room_there_is(
    learned: tuple[socket.socket, bytes, ServerThread],  # noqa: F811
) -> None:
    made, message, server = learned
    limits, budget = server.service.reactors._limits, server.service.inflight  # type: ignore[union-attr]
    limits["pressed_stall_ns"] = 1
    with made, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                slow.send(message * 100)
        eventually(lambda: budget.used_bytes, "an answer that nobody reads")
        held = budget.limit_bytes // 2
        budget.hold(held)
        eventually(lambda: budget.used_bytes == held, "it is ended")
        budget.release(held)


def test_while_it_drains_answers_end_their_connections(
    learned: tuple[socket.socket, bytes, ServerThread],  # noqa: F811
) -> None:
    made, message, server = learned
    url = ("127.0.0.1", server.port)
    ways = {"reactor": message, "python": request(INFER, {"inputs": []}), "foreign": request("/v2/health/live")}
    with contextlib.ExitStack() as stack:
        connections = {name: stack.enter_context(socket.create_connection(url, timeout=30)) for name in ways}
        made.sendall(message * 3)
        assert [b"connection: close" in answer(made)[0].lower() for _ in range(3)] == [False] * 3
        server.stop(drain_s=60)
        eventually(lambda: not server.service.ready, "it drains")
        before = reactor_answers(server)
        for name, connection in connections.items():
            connection.sendall(ways[name])
            assert b"connection: close" in answer(connection)[0].lower(), name
            assert connection.recv(1) == b"", name
        assert reactor_answers(server) == before + 1
        made.sendall(message * 3)  # sent ahead: all are answered, the last says so
        assert [b"connection: close" in answer(made)[0].lower() for _ in range(3)] == [False, False, True]
        assert made.recv(1) == b""


@pytest.mark.parametrize("path", ["/admin/models/ctr/labels/deltas", "/admin/jobs/deltas", "/admin/deltas"])
def test_only_deltas_may_be_longer_than_other_bodies(served: ServerThread, path: str) -> None:
    body = b'{"version": 1, "x": "' + b"y" * (2 << 20) + b'"}'

    def pieces() -> Iterator[bytes]:
        yield body

    with httpx.Client(base_url=served.url, timeout=30) as http:
        assert http.put(path, content=body).status_code == 413
        if path.endswith("labels/deltas"):
            assert http.put(path, content=pieces()).status_code == 413, "without a length"


def test_a_health_check_does_not_wait_for_what_others_have_sent(
    by_reactors: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    reactors = by_reactors.service.reactors
    served_order: list[str] = []
    receive = reactors._receiver.request  # type: ignore[union-attr]
    gate = threading.Event()

    def slowly(reply: Any, data: bytes) -> None:
        gate.wait(60)
        time.sleep(0.005)
        served_order.append("look-up")
        receive(reply, data)

    monkeypatch.setattr(reactors._receiver, "request", slowly)  # type: ignore[union-attr]
    message = request(INFER, {"inputs": []})
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(connect(by_reactors)) for _ in range(40)]
        for one in busy:
            one.sendall(message)
        time.sleep(0.5)
        with connect(by_reactors) as probe:
            probe.sendall(request("/v2/health/live"))
            time.sleep(0.2)
            gate.set()
            assert probe.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert len(served_order) < 30
        for one in busy:
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 400")
