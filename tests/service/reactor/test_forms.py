"""Heads and bodies that come in odd pieces or shapes, which the reactors leave to the full server."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.service.conftest import load
from tests.service.raw_clients import request
from tests.service.reactor.test_reactor import KEYS, OIP, Own, answer, connection
from tests.service.scenes import write_small
from tierstore.service.server import ServerThread


@pytest.fixture
def server(own: Own, tmp_path: Path) -> ServerThread:
    _, server, http = own
    load(http, write_small(tmp_path, "ctr", "item", 1))
    return server


TRAILERS = [b"Origin: http://elsewhere.example", b"X-Request-Timeout-Ms: none", b"Content-Encoding: gzip"]


def with_trailers(*trailers: bytes) -> bytes:
    """A look-up whose body comes in a chunk, up to the line that ends it."""
    body = json.dumps(KEYS[OIP]).encode()
    head = f"POST {OIP} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"%x\r\n%s\r\n0\r\n" % (len(body), body) + b"".join(each + b"\r\n" for each in trailers)


def test_a_trailer_does_not_pass_for_a_header(server: ServerThread) -> None:
    with connection(server) as made:
        for trailer in TRAILERS:
            made.sendall(with_trailers(trailer) + b"\r\n")
            assert answer(made)[0].startswith(b"HTTP/1.1 200")


def test_trailers_without_end_end_the_connection(server: ServerThread) -> None:
    many = (b"a: " + b"b" * (32 << 10) + b"\r\n") * 1000
    with connection(server) as made:
        made.sendall(with_trailers() + many)
        assert answer(made)[0].startswith(b"HTTP/1.1 400 ")
        assert made.recv(1) == b""


def test_a_wish_for_another_protocol_is_passed_over(server: ServerThread) -> None:
    """However it is cut: the body never passes for the next request."""
    wish = b"\r\nConnection: Upgrade\r\nuPGrade: h2c\r\n\r\n"
    head, _, body = request(OIP, KEYS[OIP]).partition(b"\r\n\r\n")
    with connection(server) as made:
        made.sendall(request(OIP, KEYS[OIP]) + head + wish + body)  # behind another one
        expected = answer(made)
        assert answer(made) == expected
    for cut in range(1, len(wish)):
        with connection(server) as made:
            made.sendall(head + wish[:cut])
            time.sleep(0.005)
            made.sendall(wish[cut:] + body)
            assert answer(made) == expected, cut


@pytest.mark.thorough
def test_requests_may_be_cut_anywhere(server: ServerThread) -> None:
    """Behind the body of another one too, on a connection that the reactors do not read."""
    odd = request(OIP, KEYS[OIP]).replace(b"\r\n", b"\r\nX-Unheard-Of: 1\r\n", 1)
    live = request("/v2/health/live")
    with connection(server) as made:
        made.sendall(odd)
        expected = answer(made)
    for cut in range(len(live) - 5, len(live)):
        with connection(server) as made:
            made.sendall(odd[:-3])
            time.sleep(0.005)
            made.sendall(odd[-3:] + live[:cut])
            assert answer(made) == expected
            made.sendall(live[cut:])
            assert answer(made)[0].startswith(b"HTTP/1.1 200"), cut


def test_what_comes_behind_a_request_that_ends_its_connection_is_dropped(server: ServerThread) -> None:
    head, _, body = request(OIP, KEYS[OIP]).partition(b"\r\n\r\n")
    for behind in (b"no request", b"a" * (80 << 10), request(OIP, KEYS[OIP])):
        with connection(server) as made:
            made.sendall(head + b"\r\nConnection: close\r\n\r\n" + body + behind)
            assert answer(made)[0].startswith(b"HTTP/1.1 200")
            with suppress(ConnectionError):
                assert made.recv(1000) == b""
