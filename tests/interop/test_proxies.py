"""What nginx and haproxy make of requests: what docs/proxies.md says they do, with the files of deploy/proxies and without."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.interop.proxies import PROXIES, started

PATH = "/v2/models/ctr/infer"


@dataclass
class Arrived:
    connection: tuple[str, int]
    version: str
    headers: dict[str, str]
    body: bytes


class Service(ThreadingHTTPServer):
    """Answers everything with nothing, keeps connections, and notes what came."""

    daemon_threads = True

    def __init__(self) -> None:
        self.arrived: list[Arrived] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, Service)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers["content-length"]))
        self.server.arrived.append(Arrived(self.client_address, self.request_version, headers, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()


@pytest.fixture
def proxied(request: pytest.FixtureRequest, service: Service, tmp_path: Path) -> Iterator[http.client.HTTPConnection]:
    """A connection to a proxy in front of `service`."""
    with started(PROXIES[request.param], service.server_port, tmp_path) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        try:
            yield connection
        finally:
            connection.close()


def post(connection: http.client.HTTPConnection, body: bytes, path: str = PATH) -> int:
    connection.request("POST", path, body, {"Inference-Header-Content-Length": "3"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.thorough
@pytest.mark.parametrize("proxied", ["nginx", "haproxy", "haproxy as it comes"], indirect=True)
def test_connections_to_the_service_are_kept(proxied: http.client.HTTPConnection, service: Service) -> None:
    assert [post(proxied, b"{} 1") for _ in range(5)] == [200] * 5
    assert len({one.connection for one in service.arrived}) == 1
    for one in service.arrived:
        assert one.version == "HTTP/1.1"
        assert "connection" not in one.headers
        assert one.headers["host"] == f"{proxied.host}:{proxied.port}", "what the client asked for"
        assert one.headers["inference-header-content-length"] == "3"


@pytest.mark.parametrize("proxied", ["nginx as it comes"], indirect=True)
def test_nginx_as_it_comes_makes_a_connection_for_each_request(
    proxied: http.client.HTTPConnection, service: Service
) -> None:
    assert [post(proxied, b"{} 1") for _ in range(5)] == [200] * 5
    assert len({one.connection for one in service.arrived}) == 5
    assert {(one.version, one.headers["connection"]) for one in service.arrived} == {("HTTP/1.0", "close")}


@pytest.mark.parametrize("proxied", ["nginx", "haproxy", "haproxy as it comes"], indirect=True)
def test_large_requests_pass(proxied: http.client.HTTPConnection, service: Service) -> None:
    body = bytes(range(256)) * (8 << 10)  # 2 MiB
    assert post(proxied, body) == 200
    assert [one.body == body for one in service.arrived] == [True]


@pytest.mark.parametrize("proxied", ["nginx as it comes"], indirect=True)
def test_nginx_as_it_comes_refuses_large_requests(proxied: http.client.HTTPConnection, service: Service) -> None:
    assert post(proxied, bytes(2 << 20)) == 413
    assert not service.arrived


@pytest.mark.parametrize(
    ("proxied", "size", "in_file"),
    [("nginx as it comes", 12 << 10, True), ("nginx", 120 << 10, False)],
    indirect=["proxied"],
)
def test_nginx_writes_no_small_request_to_a_file(
    proxied: http.client.HTTPConnection, tmp_path: Path, size: int, in_file: bool
) -> None:
    assert post(proxied, bytes(size)) == 200
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert ("buffered to a temporary file" in log) == in_file


@pytest.mark.thorough
@pytest.mark.parametrize("proxied", ["nginx", "haproxy"], indirect=True)
@pytest.mark.parametrize("path", ["/admin/models/ctr/deltas", "/metrics", "/", "/upstream/models"])
def test_only_inference_passes(proxied: http.client.HTTPConnection, service: Service, path: str) -> None:
    assert post(proxied, b"{}", path) == 404
    assert not service.arrived
    assert post(proxied, b"{}", "/v1/models/ctr:predict") == 200
