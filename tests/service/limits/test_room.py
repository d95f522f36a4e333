"""Where all connections are taken, those that ask for nothing make room for those that do."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.http.test_half_closes import everything
from tests.service.limits.test_overload import ITEM, PATH
from tests.service.raw_clients import request
from tierstore.client import Client
from tierstore.engine.store import Store
from tierstore.errors import TierstoreError
from tierstore.service.limits.silent import SILENT_S
from tierstore.service.server import ServerThread

LIMIT = 4
MANY = 200
MOST_UNDECIDED = 32
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
ACKNOWLEDGED = bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])


@pytest.fixture(params=["reactors", "uvicorn"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FakeStore, ServerThread]]:
    yield from serving(tmp_path, request.param)


@pytest.fixture
def by_reactors(tmp_path: Path) -> Iterator[tuple[FakeStore, ServerThread]]:
    yield from serving(tmp_path, "reactors")


def serving(path: Path, by: str) -> Iterator[tuple[FakeStore, ServerThread]]:
    store = FakeStore(settings_for(path, max_connections=LIMIT, server=by, grpc_port="off"))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        yield store, server


def connect(server: ServerThread, host: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 30, source_address=(host, 0))


def status_of(server: ServerThread) -> int:
    """Of a new connection's first request; 0: it was closed."""
    with connect(server) as one, contextlib.suppress(ConnectionError):
        one.sendall(request("/v2"))
        return int([*one.recv(1 << 16).split(b" "), b"0", b"0"][1])
    return 0


def has_ended(one: socket.socket) -> bool:
    """Whether the service has closed it; what came before is read."""
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while one.recv(1 << 16):  # frames of HTTP/2
            pass
        return True
    return False


def say_nothing(_: socket.socket) -> None:
    """The client has connected, and that is all."""


def begin_a_head(one: socket.socket) -> None:
    one.sendall(request("/v2")[:9])


def be_answered(one: socket.socket) -> None:
    one.sendall(request("/v2"))
    assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")


def begin_http2(one: socket.socket) -> None:
    one.sendall(PREFACE)
    seen = b""
    while ACKNOWLEDGED not in seen:
        seen += one.recv(1 << 16)


@pytest.mark.parametrize("do", [say_nothing, begin_a_head, be_answered, begin_http2])
def test_silent_connections_make_room(
    served: tuple[FakeStore, ServerThread], do: Callable[[socket.socket], None]
) -> None:
    _, server = served
    if do is begin_http2 and server.service.settings.server == "uvicorn":
        return  # it speaks none
    limit = server.service.connection_limit
    assert limit is not None
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(LIMIT)]
        for one in silent:
            do(one)
        eventually(lambda: limit.open == LIMIT, "all to be counted")
        assert status_of(server) == 503, "they have been silent for a moment only"
        began = time.monotonic()
        eventually(lambda: status_of(server) == 200, "one to make room")
        assert time.monotonic() - began < 9, "less than a head, or an idle connection, has"
        eventually(lambda: any(map(has_ended, silent)), "one of them to end")
        eventually(lambda: limit.open == LIMIT - 1, "the place is free again")
        assert limit.made_room == 1


def test_who_has_its_last_answer_and_does_not_close_makes_room_at_once(
    by_reactors: tuple[FakeStore, ServerThread],
) -> None:
    _, server = by_reactors
    with contextlib.ExitStack() as stack:
        ended = [stack.enter_context(connect(server)) for _ in range(LIMIT)]
        for one in ended:
            one.sendall(request("/v2", headers={"Connection": "close"}))
            assert everything(one).startswith(b"HTTP/1.1 200")
        assert server.service.connection_limit.open == LIMIT  # type: ignore[union-attr]
        assert status_of(server) == 200


def test_the_address_that_has_most_of_them_makes_room(served: tuple[FakeStore, ServerThread]) -> None:
    _, server = served
    with contextlib.ExitStack() as stack:
        oldest = stack.enter_context(connect(server))
        be_answered(oldest)
        many = [stack.enter_context(connect(server, "127.0.0.2")) for _ in range(LIMIT - 1)]
        for one in many:
            be_answered(one)
        time.sleep(1.5 * SILENT_S)  # none of them has begun a moment ago
        assert status_of(server) == 200
        assert many[0].recv(1) == b"", "the one that has been silent longest"
        be_answered(oldest)


def test_who_waits_or_sends_keeps_his_place(served: tuple[FakeStore, ServerThread]) -> None:
    store, server = served
    store.model("ctr").gate.clear()
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connect(server)) for _ in range(2)]
        for one in waiting:
            one.sendall(request(PATH, ITEM))
        sending = [stack.enter_context(connect(server)) for _ in range(2)]
        message = request(PATH, ITEM)
        for one in sending:
            one.sendall(message[:-5])
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            assert status_of(server) == 503
            time.sleep(0.05)  # paces the asking
        store.model("ctr").gate.set()
        for one in sending:
            one.sendall(message[-5:])
        for one in waiting + sending:
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert server.service.connection_limit.made_room == 0  # type: ignore[union-attr]


def test_a_connection_that_is_refused_takes_no_place_and_gives_none(served: tuple[FakeStore, ServerThread]) -> None:
    store, server = served
    store.model("ctr").gate.clear()
    limit = server.service.connection_limit
    assert limit is not None
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connect(server)) for _ in range(LIMIT)]
        for one in waiting:
            one.sendall(request(PATH, ITEM))
        eventually(lambda: limit.open == LIMIT, "all to be counted")
        stack.enter_context(connect(server))
        eventually(lambda: limit.refused == 1, "one too many, which says nothing")
        time.sleep(1.5 * SILENT_S)  # it is silent by now
        assert status_of(server) == 503
        assert (limit.open, limit.made_room) == (LIMIT, 0)
        store.model("ctr").gate.set()
        for one in waiting:
            assert one.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_connections_that_say_nothing_make_room_for_those_that_do(authority: Authority, tmp_path: Path) -> None:
    own = authority.issue("full")
    settings = settings_for(tmp_path, tls_cert=own.cert, tls_key=own.key, max_connections=3)
    with Store(settings) as store, ServerThread(store, settings) as server:
        limit = server.service.connection_limit
        silent = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(3)]
        eventually(lambda: limit.open == 3, "the connections to be counted")
        began = time.monotonic()

        def is_served() -> bool:
            with Client(server.url, ca=authority.ca, retries=0) as client:
                try:
                    return client.ready()
                except TierstoreError:
                    return False

        assert not is_served(), "they have begun just now"
        eventually(is_served, "the oldest to make room")
        assert time.monotonic() - began < 9, "less than the time that a handshake has"
        assert silent[0].recv(1) == b"", "the oldest"
        for sock in silent:
            sock.close()
        eventually(lambda: limit.open == 0, "all to be counted off")


def test_connections_that_are_idle_after_their_handshake_make_room(authority: Authority, tmp_path: Path) -> None:
    own = authority.issue("idle")
    settings = settings_for(tmp_path, tls_cert=own.cert, tls_key=own.key, max_connections=3)
    context = ssl.create_default_context(cafile=str(authority.ca))
    with Store(settings) as store, ServerThread(store, settings) as server, contextlib.ExitStack() as stack:
        assert server.service.reactors is not None
        eventually(lambda: server.service.reactors.running, "reactors to serve")  # type: ignore[union-attr]
        made = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(3)]
        idle = [stack.enter_context(context.wrap_socket(one, server_hostname="127.0.0.1")) for one in made]
        limit = server.service.connection_limit
        eventually(lambda: limit.open == 3 and server.service.reactors.open == 3, "reactors to have them")  # type: ignore[union-attr]

        def is_served() -> bool:
            with Client(server.url, ca=authority.ca, retries=0) as client, contextlib.suppress(TierstoreError):
                return client.ready()
            return False

        eventually(is_served, "the oldest to make room")
        assert idle[0].recv(1) == b"", "the oldest"
        assert limit.made_room == 1


def test_of_connections_beyond_the_limit_few_are_accepted_before_python_has_decided(
    by_reactors: tuple[FakeStore, ServerThread],
) -> None:
    """Descriptors are left for what else the process opens: an operator's connection, a file."""
    _, server = by_reactors
    files, held, gate = "/proc/self/fd", threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        gate.wait(60)

    reactors: Any = server.service.reactors
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT):
            be_answered(stack.enter_context(connect(server)))
        server._http._loop.call_soon_threadsafe(hold)  # type: ignore[union-attr]
        stack.callback(gate.set)
        assert held.wait(60)
        before = len(os.listdir(files))
        others = [stack.enter_context(connect(server)) for _ in range(MANY)]
        turns = reactors._lines["turns"] + 3
        eventually(lambda: (reactors._lines["turns"] >= turns).all(), "the reactors have done what they do")
        assert len(os.listdir(files)) - before - MANY <= MOST_UNDECIDED + server.service.settings.threads
        gate.set()
        for one in others:
            one.settimeout(30)
            with contextlib.suppress(ConnectionError):
                one.sendall(request("/v2"))
                assert one.recv(1 << 16)[:12] in (b"HTTP/1.1 503", b"HTTP/1.1 200", b"")
    eventually(lambda: status_of(server) == 200, "there is room again")
