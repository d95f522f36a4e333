"""Clients that go on sending behind the request that ends their connection: the answer comes whole, and then the end, never a reset."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.service import http2_client as h2
from tests.service.conftest import GRPC, eventually, settings_for
from tests.service.http.test_half_closes import answered, everything
from tests.service.raw_clients import request
from tests.service.reactor.test_reactor import Own, ctr, planned  # noqa: F401 - a fixture
from tests.service.scenes import KEYS, write_snapshot
from tierstore.engine.store import Store
from tierstore.service.server import ServerThread
from tierstore.wire.http1.frame import MOST_HEAD_BYTES

INFER = "/v2/models/ctr/infer"
MORE = bytes(64 << 10)  # more than a reactor reads with the request
TIMES = 16  # that so much is sent behind the answer's first byte
CLOSE = {"Connection": "close"}
POST = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n".encode()
TENSOR = {"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 2]}

REQUESTS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "by a reactor": (200, lambda: b"".join(planned(2, **CLOSE))),
    "by a reactor, large": (200, lambda: b"".join(planned(40_000, **CLOSE))),
    "by Python": (200, lambda: request(INFER, {"inputs": [TENSOR], "id": "a"}, CLOSE)),
    "by HTTP/1.0": (200, lambda: request("/v2/health/live").replace(b"HTTP/1.1", b"HTTP/1.0")),
    "whose head is too large": (400, lambda: b"GET /v2 HTTP/1.1\r\nX: " + b"x" * (2 * MOST_HEAD_BYTES)),
    "that is no HTTP": (400, lambda: b"nonsense\r\n\r\n"),
    "whose body is too large": (413, lambda: POST + b"Connection: close\r\nContent-Length: 99000000\r\n\r\n"),
    "whose chunks are too many": (413, lambda: POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (99 << 20)),
}


@pytest.mark.parametrize("what", REQUESTS)
def test_who_goes_on_sending_behind_the_last_request_has_its_answer(ctr: Own, what: str) -> None:  # noqa: F811
    _, server, _ = ctr
    status, make = REQUESTS[what]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:
        made.sendall(make())
        first = made.recv(1)
        for _ in range(TIMES):
            made.sendall(MORE)
        assert answered(first + everything(made)) == [status]
    eventually(lambda: server.service.inflight.used_bytes == 0, "nothing is held")


def test_who_neither_sends_nor_closes_is_not_waited_for_long(ctr: Own) -> None:  # noqa: F811
    _, server, _ = ctr
    limit: Any = server.service.connection_limit
    before = limit.open
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:
        made.sendall(request("/v2/health/live", headers=CLOSE))
        assert answered(everything(made)) == [200]
        eventually(lambda: limit.open <= before, "its place is free")
        with contextlib.suppress(ConnectionError):  # the first is answered by a reset
            for _ in range(2):
                made.sendall(MORE)


def test_an_http_2_client_that_goes_on_sending_learns_why_its_connection_ends(ctr: Own) -> None:  # noqa: F811
    _, server, _ = ctr
    with h2.Client(server.port) as client:
        client.send(h2.frame(h2.DATA, 0, 0, b"data of no stream"))
        ended = client.until(h2.GOAWAY)
        assert ended is not None
        assert ended.code != h2.NO_ERROR
        for _ in range(TIMES):
            client.send(MORE)
        assert everything(client.socket) == b""


@pytest.fixture
def with_tls(tmp_path: Path) -> Iterator[tuple[ServerThread, Path]]:
    authority = Authority(tmp_path)
    own = authority.issue("service")
    settings = settings_for(tmp_path, grpc_port=GRPC, tls_cert=own.cert, tls_key=own.key)
    with Store(settings) as store:
        store.load_snapshot(write_snapshot(tmp_path))
        with ServerThread(store, settings) as server:
            yield server, authority.ca


def test_with_tls_too(with_tls: tuple[ServerThread, Path]) -> None:
    server, ca = with_tls
    context = ssl.create_default_context(cafile=str(ca))
    data = [int(key) for key in KEYS]
    document = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [len(data)], "data": data}]}
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as bare,
        context.wrap_socket(bare, server_hostname="127.0.0.1") as made,
    ):
        made.sendall(request(INFER, document, CLOSE))
        first = made.recv(1)
        for _ in range(TIMES):
            made.sendall(MORE)
        assert answered(first + everything(made)) == [200]
