"""Servers of Redis that tests start: one whose port was taken meanwhile has another at once, or says so."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_cluster import SERVER, Server, ServerEnded, free_ports

pytest.importorskip("redis", reason="needs redis-py: pip install 'tierstore[redis]'")
pytestmark = pytest.mark.skipif(SERVER is None, reason="needs redis-server or valkey-server")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens who never answers."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def started(port: int, bus_port: int, where: Path) -> Server:
    server = Server(0, port, bus_port, where)
    server.start()
    return server


@pytest.mark.parametrize("which", ["port", "bus port"])
def test_a_server_whose_port_was_taken_has_others(tmp_path: Path, taken: int, which: str) -> None:
    ports = [taken, *free_ports(1)]
    server = started(*(ports if which == "port" else reversed(ports)), tmp_path)
    try:
        assert taken not in (server.port, server.bus_port)
        assert server.call("PING")
    finally:
        server.kill()


def test_a_server_that_others_know_keeps_its_port_or_says_why_not(tmp_path: Path) -> None:
    server = started(*free_ports(2), tmp_path)
    port = server.port
    server.kill()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(
            ServerEnded, match=rf"the server on 127\.0\.0\.1:{port} ended with 1.*(?s:.)*[Aa]ddress already in use"
        ),
    ):
        server.start()
    server.start()
    assert server.port == port
    server.kill()
