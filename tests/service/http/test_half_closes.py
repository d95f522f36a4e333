"""HTTP/1.1 clients that end their own side behind their requests: each request that came whole is answered, and one whose client is gone is not worked on."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.raw_clients import request
from tests.service.reactor.test_reactor import Own, ctr, planned  # noqa: F401 - a fixture
from tierstore.service.server import ServerThread

INFER = "/v2/models/ctr/infer"
LIVE = "/v2/health/live"
TIMES = 20


def in_json(keys: int) -> dict[str, Any]:
    tensor = {"name": "item_id", "datatype": "INT64", "shape": [keys], "data": [1] * keys}
    return {"inputs": [tensor], "id": "a"}


def chunked(keys: int) -> bytes:
    """A look-up that reactors do not know."""
    body = json.dumps(in_json(keys)).encode()
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def connect(server: ServerThread) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def everything(made: socket.socket) -> bytes:
    received = b""
    while part := made.recv(1 << 18):
        received += part
    return received


def answered(data: bytes) -> list[int]:
    """The statuses of whole answers, one behind the other, which are all that `data` is; interim ones do not count."""
    statuses = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        match = re.match(rb"HTTP/1\.[01] (\d{3}) ", head)
        assert match is not None, head[:200]
        if match[1] == b"100":
            continue
        length = re.search(rb"(?i)content-length: (\d+)", head)
        assert length is not None, head
        assert len(data) >= int(length[1]), "the last one is cut"
        data = data[int(length[1]) :]
        statuses.append(int(match[1]))
    return statuses


def ask(server: ServerThread, data: bytes) -> list[int]:
    """What comes for `data`, behind which the client ends its side."""
    with connect(server) as made:
        made.sendall(data)
        made.shutdown(socket.SHUT_WR)
        return answered(everything(made))


REQUESTS: dict[str, Callable[[], bytes]] = {
    "by a reactor": lambda: b"".join(planned(2)),
    "by a reactor, large": lambda: b"".join(planned(20_000)),
    "of a form that reactors leave to Python": lambda: request(INFER, in_json(2)),
    "of many keys": lambda: request(INFER, in_json(20_000)),
    "in chunks": lambda: chunked(2),
    "in chunks, large": lambda: chunked(20_000),
    "by HTTP/1.0": lambda: request(LIVE).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "for the admin interface": lambda: request("/admin/models"),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_a_client_that_ends_its_side_behind_a_request_is_answered(ctr: Own, what: str) -> None:  # noqa: F811
    _, server, _ = ctr
    data = REQUESTS[what]()
    assert [ask(server, data) for _ in range(TIMES)] == [[200]] * TIMES


def test_all_that_was_sent_ahead_of_the_end_is_answered(ctr: Own) -> None:  # noqa: F811
    _, server, _ = ctr
    ahead = {
        "checks of health": request(LIVE) * 2,
        "what Python answers": request(INFER, in_json(2)) * 8,
        "in chunks": chunked(2) * 8,
        "of every kind": b"".join(make() for name, make in REQUESTS.items() if "1.0" not in name),
    }
    for what, data in ahead.items():
        for _ in range(TIMES):
            got = ask(server, data)
            assert got == [200] * len(got), what
            assert len(got) == data.count(b" HTTP/1.1\r\n"), what


@pytest.mark.parametrize(
    "part", [request(LIVE)[:-2], request(INFER, in_json(9))[:-9], chunked(9)[:-9]], ids=["head", "body", "chunk"]
)
@pytest.mark.parametrize(
    "before", [request(LIVE), request(INFER, in_json(2)) * 2, chunked(2) * 2], ids=["health", "python", "chunked"]
)
def test_what_is_cut_short_by_the_end_takes_no_answer_away(ctr: Own, before: bytes, part: bytes) -> None:  # noqa: F811
    _, server, _ = ctr
    for _ in range(TIMES // 4):
        assert ask(server, before + part) == [200] * before.count(b" HTTP/1.1\r\n")
    eventually(lambda: server.service.inflight.used_bytes == 0, "what had come of it is let go")


# --- while a request waits


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[FakeStore, ServerThread]]:
    """A store whose look-ups wait for its gate, with one thread."""
    store = FakeStore(settings_for(tmp_path, lookup_threads=1))
    with ServerThread(store) as server:  # type: ignore[arg-type]
        store.model("ctr").gate.clear()
        with connect(server) as first:
            first.sendall(request(INFER, in_json(2)))
            eventually(lambda: server.service.lookup_pool.busy == 1, "the thread is at work")
            try:
                yield store, server
            finally:
                store.model("ctr").gate.set()
            first.shutdown(socket.SHUT_WR)
            assert answered(everything(first)) == [200]


WAITING = {
    "of a known form": lambda: request(INFER, in_json(9000)),
    "in chunks": lambda: chunked(9000),
}


@pytest.mark.parametrize("what", WAITING)
def test_who_waits_for_long_is_asked_whether_it_is_there_and_then_answered(
    held: tuple[FakeStore, ServerThread], what: str
) -> None:
    store, server = held
    with connect(server) as made:
        made.sendall(WAITING[what]())
        eventually(lambda: server.service.lookup_pool.waiting == 1, "it waits")
        made.shutdown(socket.SHUT_WR)
        assert made.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        store.model("ctr").gate.set()
        assert answered(everything(made)) == [200]
    assert server.service.shed.of("gone") == 0


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("ends_first", [False, True])
@pytest.mark.parametrize("what", WAITING)
def test_who_is_gone_is_not_worked_for(
    held: tuple[FakeStore, ServerThread], what: str, ends_first: bool, resets: bool
) -> None:
    store, server = held
    with connect(server) as made:
        made.sendall(WAITING[what]())
        if ends_first:
            made.shutdown(socket.SHUT_WR)
        eventually(lambda: server.service.lookup_pool.waiting == 1, "it waits")
        if resets:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    python = server.service.connection_limit
    assert python is not None
    conns = server.service.reactors.conns  # type: ignore[union-attr]
    eventually(lambda: conns["lost"].any(), "the reactor knows it")
    store.model("ctr").gate.set()
    eventually(lambda: server.service.shed.of("gone") == 1, "it was left out")
    eventually(lambda: server.service.inflight.used_bytes == 0, "what it held is given back")


def test_a_client_of_http_1_0_gets_no_interim_answer(held: tuple[FakeStore, ServerThread]) -> None:
    store, server = held
    answers: list[bytes] = []
    with connect(server) as made, connect(server) as other:
        made.sendall(request(INFER, in_json(9000)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        eventually(lambda: server.service.lookup_pool.waiting == 1, "it waits")
        made.shutdown(socket.SHUT_WR)
        other.sendall(request(INFER, in_json(9000)))
        eventually(lambda: server.service.lookup_pool.waiting == 2, "the other one waits")
        other.shutdown(socket.SHUT_WR)
        assert other.recv(12) == b"HTTP/1.1 100"  # so the first one would have had its own
        thread = threading.Thread(target=lambda: answers.append(everything(made)))
        thread.start()
        store.model("ctr").gate.set()
        thread.join(60)
        with suppress(OSError):
            everything(other)
    assert answered(answers[0]) == [200]
    assert b" 100 " not in answers[0]
