"""Heads that come in many pieces: each is answered as if it had come whole, once its end has come."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import pytest

from tests.service import http2_client as h2
from tests.service.http.test_half_closes import answered, everything
from tests.service.raw_clients import request
from tierstore.service.server import ServerThread
from tierstore.wire.http1.frame import MOST_HEAD_BYTES

LIVE = "/v2/health/live"
CLOSE = {"Connection": "close"}


def sent(server: ServerThread, pieces: Iterable[bytes]) -> list[int]:
    """The statuses of all answers to these pieces, each in a packet of its own."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            made.sendall(piece)
        return answered(everything(made))


def every_byte(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def test_one_that_comes_byte_by_byte_is_answered_with_those_behind_it(server: ServerThread) -> None:
    one, last = request(LIVE, headers={"X-A": "b" * 300}), request(LIVE, headers=CLOSE)
    assert sent(server, every_byte(one + one + last)) == [200, 200, 200]


@pytest.mark.parametrize("at", range(1, 6))
def test_its_end_may_come_in_two_pieces_with_the_next_request_behind_it(server: ServerThread, at: int) -> None:
    one, last = request(LIVE), request(LIVE, headers=CLOSE)
    assert sent(server, [one[:9], one[9:-at], one[-at:] + last[:20], last[20:]]) == [200, 200]
    assert sent(server, [one[:-at], one[-at:] + one + last]) == [200, 200, 200]


def test_one_that_is_malformed_in_a_later_piece_is_refused_once_its_end_has_come(server: ServerThread) -> None:
    begins = f"GET {LIVE} HTTP/1.1\r\nHost: localhost\r\n".encode()
    assert sent(server, [begins[:10], begins[10:], b"no header\r\n", b"X: y\r\n", b"\r\n"]) == [400]
    assert sent(server, [begins, b"Content-Length: 5\r\nContent-Length: 6\r\n", b"\r\nabcde"]) == [400]


def test_one_that_never_ends_is_refused_as_too_large(server: ServerThread) -> None:
    line = b"X: " + b"y" * 995 + b"\r\n"
    lines = [line] * (MOST_HEAD_BYTES // len(line) + 1)
    assert sent(server, [f"GET {LIVE} HTTP/1.1\r\n".encode(), *lines]) == [400]


def test_a_body_behind_it_may_hold_empty_lines(server: ServerThread) -> None:
    body = b"\r\n\r\n" * 5
    head = b"POST /v2/models/none/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    (status,) = sent(server, every_byte(head % len(body) + body))
    assert status in (400, 404)


def test_the_preface_of_http_2_may_come_byte_by_byte(server: ServerThread) -> None:
    with h2.Client(server.port) as client:
        client.send(h2.get(1, LIVE))
        assert client.until(h2.HEADERS) is not None
    first = h2.PREFACE + h2.settings() + h2.get(1, LIVE)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in every_byte(first):
            made.sendall(piece)
        made.shutdown(socket.SHUT_WR)
        assert h2.frame(h2.SETTINGS, h2.ACK) in everything(made)
