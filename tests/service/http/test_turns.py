"""Requests that Python serves begin in turns: however many are sent ahead of their answers, health checks come first."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.raw_clients import request
from tierstore.service.http.connection import PIPELINED, HttpConnection
from tierstore.service.http.request import HttpRequest
from tierstore.service.http.turns import IN_A_TURN, Turns
from tierstore.service.server import ServerThread

HEALTH = "/v2/health/live"
CLIENTS = 200
SEVERAL_TURNS = 8
SLOW_S = 0.001


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerThread]:
    with ServerThread(FakeStore(settings_for(tmp_path))) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the requests that Python has answered, in order."""
    paths: list[str] = []
    after = HttpConnection.answered

    def answered(self: HttpConnection, request: HttpRequest) -> None:
        paths.append(request.scope["path"])
        after(self, request)

    monkeypatch.setattr(HttpConnection, "answered", answered)
    return paths


@contextlib.contextmanager
def standing(server: ServerThread) -> Iterator[None]:
    """The event loop stands still."""
    stands, goes_on = threading.Event(), threading.Event()
    loop = server._http._loop
    assert loop is not None
    loop.call_soon_threadsafe(lambda: (stands.set(), goes_on.wait(60)))
    assert stands.wait(60)
    try:
        yield
    finally:
        goes_on.set()


def handed_on(server: ServerThread) -> int:
    return sum(server._http._reactors.handed_on.values())


def connect(server: ServerThread, sent: bytes) -> socket.socket:
    """A connection that has sent this; a reactor has handed it to Python, whether that has taken it or not."""
    before = handed_on(server)
    one = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    one.sendall(sent)
    eventually(lambda: handed_on(server) > before, "a reactor has handed it on")
    return one


@contextlib.contextmanager
def many_sent_ahead(server: ServerThread, *, begun: bool) -> Iterator[None]:
    """Connections with as many requests as may be sent ahead; with `begun` Python serves all of the connections."""
    with contextlib.ExitStack() as clients:
        with standing(server):
            for _ in range(CLIENTS):
                clients.enter_context(connect(server, request("/v2") * PIPELINED))
        if begun:
            eventually(lambda: len(server._http._server.connections) == CLIENTS, "Python has all of them")
        yield


@pytest.mark.parametrize("begun", [False, True])
def test_a_health_check_passes_requests_that_were_sent_ahead(
    server: ServerThread, answered: list[str], begun: bool
) -> None:
    """Few more of them are answered before it."""
    with many_sent_ahead(server, begun=begun):
        with standing(server):
            before = len(answered)
            check = connect(server, request(HEALTH))
        with check:
            assert check.recv(100).startswith(b"HTTP/1.1 200")
        eventually(lambda: HEALTH in answered, "it is noted too")
        assert answered.index(HEALTH) - before <= SEVERAL_TURNS * IN_A_TURN


def test_a_stop_does_not_wait_for_requests_that_were_sent_ahead(
    server: ServerThread, answered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    after = HttpConnection.answered

    def slowly(self: HttpConnection, request: HttpRequest) -> None:
        time.sleep(SLOW_S)  # so that a fast machine has not answered all of them by then
        after(self, request)

    monkeypatch.setattr(HttpConnection, "answered", slowly)
    with many_sent_ahead(server, begun=True):
        server.close()
    assert answered
    assert len(answered) < CLIENTS * PIPELINED / 2


def test_requests_begin_in_their_order_and_so_many_a_turn() -> None:
    async def run() -> None:
        turns, begun = Turns(), []
        for number in range(2 * IN_A_TURN + 1):
            turns.put(lambda number=number: begun.append(number))  # type: ignore[misc]
        turns.put(lambda: begun.append(HEALTH), health=True)
        assert begun == list(range(IN_A_TURN))
        await asyncio.sleep(0)
        assert begun[IN_A_TURN:] == [HEALTH, *range(IN_A_TURN, 2 * IN_A_TURN)]
        turns.put(lambda: begun.append("last"))
        await asyncio.sleep(0)
        assert begun[2 * IN_A_TURN + 1 :] == [2 * IN_A_TURN, "last"]

    uvloop.run(run())


def test_a_request_that_fails_to_begin_keeps_no_other_waiting() -> None:
    async def run() -> None:
        turns, begun = Turns(), []
        asyncio.get_running_loop().set_exception_handler(lambda *_: begun.append("failed"))
        for _ in range(IN_A_TURN):
            turns.put(lambda: None)
        turns.put(lambda: begun[0])
        turns.put(lambda: begun.append("begun"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert begun == ["failed", "begun"]

    uvloop.run(run())
