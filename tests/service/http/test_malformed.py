"""What is no HTTP, or breaks off, or asks for what is not there: each is told it with a 4xx, and the server goes on."""

from __future__ import annotations

import gzip
import socket
import zlib
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tests.service.oip.test_malformed import HEADER_LENGTH, INFER, given_input, infer, refused
from tierstore.service.server import ServerThread
from tierstore.wire.http1.frame import MOST_HEAD_BYTES as HEAD_BYTES


@pytest.mark.parametrize(
    ("coding", "body", "status", "words"),
    [
        ("gzip", gzip.compress(bytes(64 << 20)), 413, ["decoded body"]),
        ("deflate", zlib.compress(bytes(64 << 20)), 413, ["decoded body"]),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-4], 400, ["cut short"]),
        ("gzip", b"no gzip at all", 400, ["not valid gzip"]),
        ("gzip", b"", 400, ["cut short"]),
        ("gzip", gzip.compress(b"{}", mtime=0) + b"junk", 400, ["not valid gzip"]),
        ("gzip", gzip.compress(b"", mtime=0) * 1000, 400, ["gzip members"]),
        ("br", b"{}", 415, ["use gzip or deflate"]),
    ],
)
def test_compressed_bodies_have_bounds_too(
    http: httpx.Client, coding: str, body: bytes, status: int, words: list[str]
) -> None:
    refused(http.post(INFER, content=body, headers={"Content-Encoding": coding}), status, *words)


def test_an_answer_is_coded_only_where_one_as_it_is_was_refused(http: httpx.Client) -> None:
    for accept, coding in (("gzip, deflate, br", None), ("gzip", None), ("br", None), ("gzip, identity;q=0", "gzip")):
        answer = infer(http, {"inputs": [given_input()]}, **{"Accept-Encoding": accept})
        assert answer.headers.get("content-encoding") == coding
        assert answer.json()["outputs"][0]["shape"] == [2, 4]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", INFER, 405),
        ("POST", "/v2", 405),
        ("DELETE", "/v2/models/ctr", 405),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models", 404),
        ("GET", "/v2/models/ctr/versions", 404),
        ("GET", "/v2/models/ctr/versions/1/2/3", 404),
        ("GET", "/v2/models/ctr/versions/abc", 404),
        ("GET", "/v2/models/ctr/versions/a%20b", 400),
        ("GET", "/v2/models/ctr/versions/99999999999999999999", 400),
        ("GET", "/v2/models/ctr/versions/9999999999999999999", 404),
        ("GET", "/v2/models/%2e%2e", 404),
        ("POST", "/v2/models//infer", 404),
        ("POST", "/v2/models/a%2Fb/infer", 404),
        ("POST", "/v2/repository/models/nobody/load", 404),
        ("POST", "/v2/repository/models/nobody/unload", 404),
    ],
)
def test_paths_and_methods(http: httpx.Client, method: str, path: str, status: int) -> None:
    refused(http.request(method, path), status)


@pytest.mark.parametrize(
    "path", [f"{INFER}/", "/v2//models/ctr/infer", "/v2/models/ctr/versions/1/2/", "/v2/no//thing"]
)
def test_a_path_that_is_none_is_named_as_it_was_sent(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"inputs": [given_input()]})
    refused(answer, 404)
    assert answer.json()["error"] == f"no such path: {path!r}"


HEAD = b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: localhost\r\n"


def exchange(server: ServerThread, data: bytes, *, ends: bool = True) -> bytes:
    """What comes back for raw bytes, behind which the client `ends` its side, until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(data)
        if ends:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (4 * HEAD_BYTES) + b"\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"x: y\r\n" * (HEAD_BYTES // 2) + b"\r\n",
        b"GET /" + b"x" * (4 * HEAD_BYTES),
    ],
)
def test_what_is_no_http_is_answered_400_and_closed(server: ServerThread, http: httpx.Client, data: bytes) -> None:
    try:
        answer = exchange(server, data)
    except OSError:  # closed while we were still sending
        answer = b"HTTP/1.1 400"
    assert answer.startswith(b"HTTP/1.1 400"), answer[:200]
    assert http.get("/v2/health/live").status_code == 200


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade"])
def test_a_wish_for_another_protocol_is_passed_over(server: ServerThread, name: bytes) -> None:
    body = b'{"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [1]}]}'
    wanted = HEAD + b"Connection: Upgrade, HTTP2-Settings, close\r\n%b: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n" % name
    answer = exchange(server, wanted + b"Content-Length: %d\r\n\r\n" % len(body) + body, ends=False)
    assert answer.startswith(b"HTTP/1.1 200"), answer[:200]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_who_waits_to_be_told_to_go_on_is_told_so_unless_its_protocol_lacks_that(
    server: ServerThread, version: bytes
) -> None:
    """RFC 9110, 10.1.1: an expectation of HTTP/1.0 is passed over, and 15.2: it has no interim answers."""
    body = b'{"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [1]}]}'
    head = HEAD.replace(b"1.1", version) + b"Expect: 100-continue\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client, client.makefile("rb") as answer:
        client.sendall(head % len(body))
        if version == b"1.1":
            assert answer.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert answer.readline() == b"\r\n"
        else:
            eventually(lambda: server.service.connection_limit.open > 0, "its head has come")  # type: ignore[union-attr]
        client.sendall(body)
        assert answer.read().startswith(b"HTTP/1.1 200"), "and nothing before it"


# --- names


@pytest.mark.parametrize("path", ["/v2", "/v2/models/ctr/infer"])
@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost", "localhost", 200),
        ("HTTP://127.0.0.1:8000", "localhost", 200),
        ("http://[::1]:8000", "localhost", 200),
        ("http://localhost", "evil.example", 200),  # it is the target that counts (RFC 9112, 3.2.2)
        ("http://evil.example", "localhost", 403),
        ("http://evil.example:80", "evil.example", 403),
        ("http://localhost@evil.example", "localhost", 403),
        ("http://evil.example@localhost", "localhost", 200),
        ("https://evil.example", "localhost", 403),
    ],
)
def test_the_name_in_the_target_is_the_one_that_a_service_is_asked_under(
    server: ServerThread, path: str, target: str, host: str, status: int
) -> None:
    body = (
        b'{"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [1]}]}' if "infer" in path else b""
    )
    method = "POST" if body else "GET"
    head = (
        f"{method} {target}{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    answer = exchange(server, head.encode() + body, ends=False)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:300]


def test_a_target_with_a_name_takes_the_place_of_no_host(server: ServerThread) -> None:
    for hosts in (b"", b"Host: localhost\r\nHost: localhost\r\n"):
        answer = exchange(
            server, b"GET http://localhost/v2 HTTP/1.1\r\n%bConnection: close\r\n\r\n" % hosts, ends=False
        )
        assert answer.startswith(b"HTTP/1.1 40"), answer[:300]


def test_a_client_that_goes_away_in_the_middle_holds_nothing(server: ServerThread, http: httpx.Client) -> None:
    exchange(
        server,
        b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500000\r\n\r\n" + b"x" * 100_000,
    )
    assert http.get("/v2/health/live").status_code == 200
    eventually(lambda: server.service.inflight.used_bytes == 0, "its bytes are given back")


@pytest.mark.parametrize(
    "started",
    [b"", b"PO", HEAD, HEAD + b"Content-Length: 9\r\n\r\n", HEAD + b"Content-Length: 9\r\n\r\n{"],
    ids=["nothing", "a line", "a head", "no body", "a body"],
)
def test_a_request_that_stops_in_the_middle_keeps_no_connection(tmp_path: Path, started: bytes) -> None:
    settings = settings_for(tmp_path, idle_timeout_s=0.05, arrival_timeout_s=0.05)
    with ServerThread(FakeStore(settings)) as server:  # type: ignore[arg-type]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(started)
            with connection.makefile("rb") as answer:  # where a head has come, it is told that its body has not
                assert answer.read().startswith(b"HTTP/1.1 408") == (b"\r\n\r\n" in started)
        eventually(lambda: server.service.connection_limit.open == 0, "the connection is gone")  # type: ignore[union-attr]


@settings(max_examples=few_or_many(40, 150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.binary(max_size=200),
    coding=st.sampled_from(["", "gzip", "deflate", "identity", "x"]),
    length=st.none() | st.integers(0, 250),
)
def test_no_bytes_make_the_server_fail(http: httpx.Client, body: bytes, coding: str, length: int | None) -> None:
    headers = ({"Content-Encoding": coding} if coding else {}) | (
        {} if length is None else {HEADER_LENGTH: str(length)}
    )
    assert 400 <= http.post("/v2/models/ctr/infer", content=body, headers=headers).status_code < 500
    assert http.post("/v2/models/names/infer", content=body, headers=headers).status_code < 500
    assert http.post("/v2/repository/models/nobody/load", content=body, headers=headers).status_code < 500
