"""Plain HTTP over HTTP/2, through the reactors: the same answers as over HTTP/1.1, and connections that live on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import hpack
import httpx
import pytest

from tests.h2_answers import Answers
from tests.service import http2_client as raw
from tests.service.conftest import eventually
from tierstore.service.server import ServerThread

INFER = "/v2/models/one/infer"
DOCUMENT = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 100]}]}
Got = tuple[dict[str, str], bytes]


class Client(Answers):
    """One connection of HTTP/2, as the package h2 has it."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.peer = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.peer.initiate_connection()
        self.closed = False
        self._next = 1
        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.peer.data_to_send())

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> int:
        stream, self._next = self._next, self._next + 2
        fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        fields += [(name.replace("_", "-"), value) for name, value in headers.items()]
        self.peer.send_headers(stream, fields, end_stream=not body)
        while body:
            window = 0 if stream in self.resets else self.peer.local_flow_control_window(stream)
            room = min(window, self.peer.max_outbound_frame_size, len(body))
            if room == 0 and stream not in self.heads:
                self.flush()
                self.read()
                continue
            if stream in self.heads:  # refused before its end
                break
            self.peer.send_data(stream, body[:room], end_stream=room == len(body))
            body = body[room:]
        self.flush()
        return stream

    def read(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            self.closed = True
            return
        self.take(self.peer, data)
        self.flush()

    def answer(self, stream: int) -> Got:
        while stream not in self.ended:
            assert not self.closed
            self.read()
        return self.heads[stream], self.bodies.get(stream, b"")

    def get(self, method: str, path: str, body: bytes = b"", **headers: str) -> Got:
        return self.answer(self.ask(method, path, body, **headers))


@pytest.fixture
def client(server: ServerThread) -> Iterator[Client]:
    made = Client(server.port)
    yield made
    made.socket.close()


def test_answers_are_those_of_http_1(client: Client, http: httpx.Client) -> None:
    for method, path, document in (
        ("GET", "/v2/health/live", None), ("GET", "/v2", None), ("GET", "/v2/models/one", None), ("POST", INFER, DOCUMENT),
        ("GET", "/admin/nothing", None), ("GET", "/v2/models/none", None), ("DELETE", "/v2", None),
    ):  # fmt: skip
        body = b"" if document is None else json.dumps(document).encode()
        expected = http.request(method, path, content=body)
        head, got = client.get(method, path, body)
        assert int(head[":status"]) == expected.status_code
        assert head.get("content-type") == expected.headers.get("content-type")
        assert got == expected.content


def test_many_requests_share_a_connection(client: Client, http: httpx.Client) -> None:
    expected = http.post(INFER, json=DOCUMENT).content
    streams = [client.ask("POST", INFER, json.dumps(DOCUMENT).encode()) for _ in range(60)]
    for stream in reversed(streams):
        head, body = client.answer(stream)
        assert head[":status"] == "200"
        assert body == expected


def test_the_id_of_a_request_is_sent_back(client: Client) -> None:
    head, _ = client.get("POST", INFER, json.dumps(DOCUMENT).encode(), x_request_id="a-b")
    assert head["x-request-id"] == "a-b"


def test_head_has_no_body(client: Client, http: httpx.Client) -> None:
    head, body = client.get("HEAD", "/v2")
    assert head[":status"] == "200"
    assert head["content-length"] == str(len(http.get("/v2").content))
    assert body == b""


def test_another_name_is_refused(client: Client) -> None:
    stream = client.ask("GET", "/v2", host="localhost")
    assert client.answer(stream)[0][":status"] == "200"
    client.peer.send_headers(
        99, [(":method", "GET"), (":scheme", "http"), (":path", "/v2"), (":authority", "evil.example")], end_stream=True
    )
    client.flush()
    assert client.answer(99)[0][":status"] == "403"


def test_a_health_check_needs_no_name(client: Client) -> None:
    """As over HTTP/1."""
    client.peer.config.validate_outbound_headers = False
    for stream, (path, status) in zip((99, 101), (("/v2/health/live", "200"), ("/v2", "403")), strict=True):
        client.peer.send_headers(stream, [(":method", "GET"), (":scheme", "http"), (":path", path)], end_stream=True)
        client.flush()
        assert client.answer(stream)[0][":status"] == status


def test_a_body_beyond_the_limit_is_refused_and_the_connection_lives(client: Client) -> None:
    stream = client.ask("POST", INFER, b"x" * (2 << 20))
    while stream not in client.heads:
        client.read()
    assert client.heads[stream][":status"] == "413"
    assert client.get("GET", "/v2/health/live")[0][":status"] == "200"


def test_what_a_connection_held_is_given_back(server: ServerThread, client: Client) -> None:
    reactors = server.service.reactors
    client.ask("POST", INFER, json.dumps(DOCUMENT).encode())
    stream = client.ask("POST", INFER, b" " * 200_000 + json.dumps(DOCUMENT).encode())
    client.answer(stream)
    client.socket.close()
    eventually(lambda: reactors.unsent_bytes == 0, "nothing is held")
    eventually(lambda: not len(reactors.streams), "no stream is open")


def test_a_connection_that_is_reset_loses_its_streams(server: ServerThread) -> None:
    made = Client(server.port)
    for _ in range(20):
        made.ask("POST", INFER, json.dumps(DOCUMENT).encode())
    made.socket.close()
    reactors = server.service.reactors
    eventually(lambda: not len(reactors.streams), "its streams are lost, or answered")


def test_a_stop_says_goodbye_and_answers_what_has_begun(own: Any) -> None:
    _, server, _ = own
    client = Client(server.port)
    assert client.get("GET", "/v2/health/live")[0][":status"] == "200"
    server.stop()
    while not client.closed:
        client.read()
    assert client.goodbye == 0


def test_requests_before_and_after_a_preface_are_served_on_the_same_port(server: ServerThread) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:
        made.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert made.recv(100).startswith(b"HTTP/1.1 200")
    client = Client(server.port)
    assert client.get("GET", "/v2/health/live")[0][":status"] == "200"
    client.socket.close()


def test_who_waits_to_be_told_to_go_on_is_told_so(server: ServerThread) -> None:
    body = json.dumps(DOCUMENT).encode()
    more = [("expect", "100-continue"), ("content-length", str(len(body)))]
    with raw.Client(server.port) as client:
        client.send(raw.frame(raw.HEADERS, raw.END_HEADERS, 1, raw.head(INFER, "POST", *more)))
        came = client.until(raw.HEADERS, stream=1)
        assert came is not None
        assert came.flags == raw.END_HEADERS, "the answer is not over"
        assert dict(hpack.Decoder().decode(came.payload)) == {":status": "100"}
        client.send(raw.frame(raw.DATA, raw.END_STREAM, 1, body))
        assert client.answer(1)[0][":status"] == "200"


@pytest.mark.parametrize("path", ["/v2", INFER, "/inference.GRPCInferenceService/ModelInfer"])
@pytest.mark.parametrize(
    "kind", ["application/grpcfoo", "application/grpc-web", "application/grpc-web+proto", "application/json"]
)
def test_what_is_not_grpc_is_answered_as_http(client: Client, path: str, kind: str) -> None:
    head, body = client.get("POST", path, json.dumps(DOCUMENT).encode(), content_type=kind)
    assert "grpc-status" not in head
    assert head[":status"] == {"/v2": "405", INFER: "200"}.get(path, "415")
    if head[":status"] == "415":
        assert "application/grpc" in json.loads(body)["detail"]


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"])
def test_what_is_grpc_is_answered_as_grpc(client: Client, kind: str) -> None:
    head, _ = client.get(
        "POST", "/inference.GRPCInferenceService/ServerLive", bytes(5), content_type=kind, te="trailers"
    )
    assert head["content-type"] == "application/grpc"
