"""Look-ups that come whole are answered without a task of their own: nobody can tell but by the time it takes."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tierstore.engine.store import Store
from tierstore.service.http import call as calling
from tierstore.service.http.face import HttpFace
from tierstore.service.http.infer import InferCall
from tierstore.service.http.messages import CONNECTION
from tierstore.service.plane.dataplane import DataPlane
from tierstore.service.server import ServerThread

from .conftest import eventually, load
from .raw_clients import request
from .scenes import write_small

Own = tuple[Store, ServerThread, httpx.Client]
OIP, TFS = "/v2/models/ctr/infer", "/v1/models/ctr:predict"
KEYS: dict[str, dict[str, Any]] = {
    OIP: {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 100]}]},
    TFS: {"instances": [1, 100]},
}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each look-up that was offered: whether it was answered at once."""
    answered: list[bool] = []
    ask = HttpFace.at_once

    def noted(self: HttpFace, *request: Any) -> Any:
        response = ask(self, *request)
        answered.append(response is not None)
        return response

    monkeypatch.setattr(HttpFace, "at_once", noted)
    return answered


@pytest.fixture
def ctr(own: Own, tmp_path: Path) -> Own:
    """A model of one feature, whose rows are in memory."""
    _, server, http = own
    load(http, write_small(tmp_path, "ctr", "item", 1))
    for path, document in KEYS.items():
        eventually(lambda: _is_direct(server, http, path, document), "its rows are in memory")  # noqa: B023
    return own


def _is_direct(server: ServerThread, http: httpx.Client, path: str, document: dict[str, Any]) -> bool:
    """Whether a request was answered without the pool."""
    before = sum(server.service.shed._waits["lookup"].counts) if server.service.shed._waits else 0
    assert http.post(path, json=document).status_code == 200
    return (sum(server.service.shed._waits["lookup"].counts) if server.service.shed._waits else 0) == before


@contextmanager
def connection(server: ServerThread) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield made


def answer(made: socket.socket) -> tuple[bytes, bytes]:
    """(head without its date, body) of one answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += made.recv(1)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    assert length is not None
    while len(body) < int(length[1]):
        body += made.recv(int(length[1]) - len(body))
    return re.sub(rb"(?i)date: [^\r]*", b"date", head), body


@pytest.mark.parametrize("path", KEYS)
def test_an_answer_is_the_same_to_the_byte_however_its_request_came(ctr: Own, at_once: list[bool], path: str) -> None:
    _, server, _ = ctr
    message = request(path, KEYS[path])
    with connection(server) as whole, connection(server) as parts:
        whole.sendall(message)
        expected = answer(whole)
        assert at_once == [True]
        parts.sendall(message[:-10])
        here = server._http._server.server_state.connections
        eventually(lambda: any(each.cycle and each.cycle.more_body for each in list(here)), "its first part has come")
        first = server.service.request_times.requests
        parts.sendall(message[-10:])
        assert answer(parts) == expected
        assert at_once == [True]
        assert server.service.request_times.requests == first + 1
    assert expected[0].startswith(b"HTTP/1.1 200 OK\r\n")


def begin(server: ServerThread, made: socket.socket, **headers: object) -> bytes:
    """Send the head of a look-up, have the service read it, and give the body."""
    head, _, body = request(OIP, KEYS[OIP], headers).partition(b"\r\n\r\n")
    made.sendall(head + b"\r\n\r\n")
    here = server._http._server.server_state.connections
    eventually(lambda: any(each._held == [] for each in list(here)), "its head has come")
    return body


def test_its_time_counts_from_its_head(ctr: Own, at_once: list[bool]) -> None:
    _, server, _ = ctr
    with connection(server) as made:
        body = begin(server, made, **{"X-Request-Timeout-Ms": 20})
        since = time.monotonic()
        eventually(lambda: time.monotonic() > since + 0.02, "that time has passed")
        made.sendall(body)
        assert answer(made)[0].startswith(b"HTTP/1.1 504")
    assert at_once == [True]


def test_a_body_that_comes_apart_from_its_head_is_waited_for(ctr: Own, at_once: list[bool]) -> None:
    _, server, _ = ctr
    with connection(server) as made:
        body = begin(server, made)
        made.sendall(body)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")
    assert at_once == [True]


def test_one_that_waits_for_its_body_when_the_service_ends_is_finished(ctr: Own) -> None:
    _, server, _ = ctr
    with connection(server) as made:
        body = begin(server, made)
        server.stop()
        here = server._http._server.server_state.connections
        eventually(lambda: all(each._held is None for each in list(here)), "the service is told to end")
        made.sendall(body)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("path", "protocol"), [(OIP, "oip_http"), (TFS, "tfs_http")])
def test_it_is_counted_once_whether_it_was_answered_or_refused(
    ctr: Own, at_once: list[bool], path: str, protocol: str
) -> None:
    _, server, http = ctr
    service = server.service

    def counted() -> dict[str, int]:
        times = {
            outcome: sum(h.counts)
            for (name, outcome), h in service.request_times.histograms.items()
            if name == protocol
        }
        stats = service.infer_stats.of("ctr", 1)
        return times | {"success": stats.success, "fail": stats.failed}

    before = counted()
    assert http.post(path, json=KEYS[path]).status_code == 200
    assert http.post(path, json={}).status_code == 400
    assert http.post(path.replace("ctr", "other"), json=KEYS[path]).status_code == 404
    assert at_once == [True, True, True]
    after = counted()
    more = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    assert more == {"ok": 1, "bad_input": 1, "not_found": 1, "success": 1, "fail": 1}
    assert service.inflight.used_bytes == 0


def test_requests_that_are_sent_ahead_are_answered_in_their_order(ctr: Own, at_once: list[bool]) -> None:
    _, server, _ = ctr
    cold = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [50]}]}
    with connection(server) as made:
        made.sendall(
            request(OIP, KEYS[OIP]) + request(OIP, cold) + request(OIP, KEYS[OIP]) + request("/v2/health/live")
        )
        bodies = [answer(made)[1] for _ in range(4)]
    shapes = [json.loads(body)["outputs"][0]["shape"][0] for body in bodies[:3]]
    assert shapes == [2, 1, 2]
    assert bodies[3] == b""
    assert at_once == [True], "one a read; what comes behind it waits for its turn"


@pytest.mark.parametrize(
    ("version", "header"), [("1.1", "Connection: close\r\n"), ("1.0", "")], ids=["close", "HTTP/1.0"]
)
def test_a_connection_that_is_to_be_closed_is_closed(ctr: Own, at_once: list[bool], version: str, header: str) -> None:
    _, server, _ = ctr
    body = json.dumps(KEYS[OIP]).encode()
    head = f"POST {OIP} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{header}\r\n"
    with connection(server) as made:
        made.sendall(head.encode() + body)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")
        assert made.recv(1) == b""
    assert at_once == []


def test_a_client_that_asks_first_is_told_to_go_on(ctr: Own) -> None:
    _, server, _ = ctr
    message = request(OIP, KEYS[OIP], {"Expect": "100-continue"})
    head, _, body = message.partition(b"\r\n\r\n")
    with connection(server) as made:
        made.sendall(head + b"\r\n\r\n")
        assert made.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        made.sendall(body)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")


def test_what_a_thread_has_to_finish_is_not_begun_again(
    ctr: Own, at_once: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    begin = InferCall.begin
    monkeypatch.setattr(InferCall, "begin", lambda self, body: (begun.append(self), begin(self, body))[1])
    _, _, http = ctr
    cold = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [60]}]}
    assert http.post(OIP, json=cold).status_code == 200
    assert (at_once, len(begun)) == ([False], 1)


def test_a_large_request_that_is_known_opens_its_view_once(ctr: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, http = ctr
    opened: list[object] = []
    view = DataPlane.open
    monkeypatch.setattr(
        DataPlane, "open", lambda self, *asked, **more: (opened.append(1), view(self, *asked, **more))[1]
    )
    monkeypatch.setattr(calling, "DIRECT_WORK_BYTES", 1)
    tensor = {"name": "item_id", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [tensor]}).encode()
    for expected in (2, 3, 4):  # the first time it is tried on the loop
        lengths = {"Inference-Header-Content-Length": str(len(header))}
        assert http.post(OIP, content=header + bytes(16), headers=lengths).status_code == 200
        assert len(opened) == expected


TRAILERS = [b"Origin: http://elsewhere.example", b"X-Request-Timeout-Ms: none", b"Content-Encoding: gzip"]


def with_trailers(*trailers: bytes) -> bytes:
    """A look-up whose body comes in a chunk, up to the line that ends it."""
    body = json.dumps(KEYS[OIP]).encode()
    head = f"POST {OIP} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"%x\r\n%s\r\n0\r\n" % (len(body), body) + b"".join(each + b"\r\n" for each in trailers)


def test_a_trailer_does_not_pass_for_a_header(ctr: Own, at_once: list[bool]) -> None:
    _, server, _ = ctr
    with connection(server) as made:
        for trailer in TRAILERS:
            made.sendall(with_trailers(trailer) + b"\r\n")
            assert answer(made)[0].startswith(b"HTTP/1.1 200")
    assert at_once == [True] * len(TRAILERS)


def test_trailers_without_end_end_the_connection(ctr: Own) -> None:
    _, server, _ = ctr
    many = (b"a: " + b"b" * (32 << 10) + b"\r\n") * 1000
    with connection(server) as made, pytest.raises(OSError, match=r"reset|[Pp]ipe"):
        made.sendall(with_trailers() + many)


def test_what_comes_behind_one_answered_at_once_has_all_the_time_it_takes(
    ctr: Own, at_once: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a timer that was set when the one before it was answered, for a connection that is idle."""
    _, server, _ = ctr
    timers: list[object] = []
    work = HttpFace._answer

    async def noted(self: HttpFace, scope: Any, *rest: Any) -> Any:
        timers.append(scope[CONNECTION].timeout_keep_alive_task)
        return await work(self, scope, *rest)

    monkeypatch.setattr(HttpFace, "_answer", noted)
    with connection(server) as made:
        made.sendall(request(OIP, KEYS[OIP]) * 2)
        assert answer(made) == answer(made)
    assert at_once == [True]
    assert timers == [None]


def test_a_body_never_passes_for_a_request(ctr: Own, at_once: list[bool]) -> None:
    """Nor where the wish for another protocol is not seen in time, so that the parser passes over the body."""
    _, server, _ = ctr
    wish = b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    head, _, body = request(OIP, KEYS[OIP]).partition(b"\r\n\r\n")
    with connection(server) as made:
        made.sendall(request(OIP, KEYS[OIP]) + head + wish + body)  # behind another one
        assert answer(made)[0].startswith(b"HTTP/1.1 200")
        with suppress(ConnectionError):
            assert made.recv(1) == b""
    with connection(server) as made:
        made.sendall(head + wish[:-10])
        here = server._http._server.server_state.connections
        eventually(lambda: any(each._head_bytes for each in list(here)), "a part of its head has come")
        with suppress(ConnectionError):
            made.sendall(wish[-10:] + request("/v2/health/live"))
            assert made.recv(1) == b""
    assert at_once == [True]
