"""Answers of nodes as a front's kernels read them: in pieces over real sockets, late, cut short, and of other forms."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counts import few_or_many
from tierstore.kernels.codec import address_of
from tierstore.tiers.upstream import reads as kernel
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.layout import ABSENT, FOREIGN, THERE
from tierstore.types import Tier

ROW_BYTES = 12
STATES = [THERE, ABSENT, FOREIGN, THERE, THERE, FOREIGN]
ROWS = np.arange(3 * ROW_BYTES, dtype=np.uint8).reshape(3, ROW_BYTES)
BODY = b"".join(map(bytes, wire.encode_rows(7, np.array(STATES, np.uint8), ROWS)))


def answer(body: bytes = BODY, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, headers, len(body), body)


def exchange(
    pieces: Sequence[bytes], *, closes: bool = True, room: int = 4096, wait_s: float = 20.0
) -> tuple[dict[str, int], bytes]:
    """(the words of a connection, the body) after the other side has sent `pieces`, each by itself."""
    ours, theirs = socket.socketpair()
    request, buffer = np.frombuffer(b"a request", np.uint8), np.zeros(room, np.uint8)
    node = kernel.NODE.make(
        fd=ours.fileno(), send_at=address_of(request), send_bytes=len(request), buffer_at=address_of(buffer), buffer_bytes=len(buffer),
        body_bytes=-1,
    )  # fmt: skip

    def serve() -> None:
        assert theirs.recv(100) == b"a request"
        for piece in pieces:
            theirs.sendall(piece)
        if closes:
            theirs.shutdown(socket.SHUT_WR)

    with ours, theirs:
        thread = threading.Thread(target=serve)
        thread.start()
        kernel.exchange(address_of(node), np.empty(1, np.int64), time.monotonic_ns() + int(wait_s * 1e9))
        thread.join()
    named = {name: int(node[name.lower()]) for name in ("STATUS", "HTTP_STATUS", "BODY_AT", "BODY_BYTES", "CLOSES")}
    begin = named["BODY_AT"]
    return named, buffer[begin : begin + max(0, named["BODY_BYTES"])].tobytes()


@given(st.lists(st.integers(1, 60), max_size=12))
@settings(max_examples=few_or_many(12, 40))
def test_an_answer_in_pieces(sizes: list[int]) -> None:
    whole, pieces = answer(headers=b"Date: today\r\nCONNECTION: Close\r\n"), []
    for size in sizes:
        pieces.append(whole[:size])
        whole = whole[size:]
    words, body = exchange([*(piece for piece in pieces if piece), *([whole] if whole else [])], closes=False)
    assert (words["STATUS"], words["HTTP_STATUS"], words["CLOSES"], body) == (kernel.DONE, 200, 1, BODY)


def test_an_error_has_a_body_too() -> None:
    words, body = exchange([answer(b'{"error": "no"}', b"503 Service Unavailable")])
    assert (words["STATUS"], words["HTTP_STATUS"], words["CLOSES"], body) == (kernel.DONE, 503, 0, b'{"error": "no"}')


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", kernel.CLOSED),
        (answer()[:-1], kernel.CLOSED),
        (answer() + b"x", kernel.UNEXPECTED),
        (b"SSH-2.0-x\r\n\r\n", kernel.UNEXPECTED),
        (b"HTTP/1.1 2x0 OK\r\nContent-Length: 0\r\n\r\n", kernel.UNEXPECTED),
        (b"HTTP/1.1 200 OK\r\n\r\n", kernel.UNEXPECTED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", kernel.UNEXPECTED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", kernel.UNEXPECTED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999\r\n\r\n", kernel.UNEXPECTED),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 5000, kernel.UNEXPECTED),
    ],
)
def test_what_is_no_answer(data: bytes, status: int) -> None:
    assert exchange([data])[0]["STATUS"] == status


def test_a_node_that_does_not_answer_is_left_in_time() -> None:
    assert exchange([answer()[:30]], closes=False, wait_s=0.05)[0]["STATUS"] == kernel.TIMED_OUT


def scatter(body: bytes, keys: int = len(STATES)) -> tuple[int, np.ndarray, np.ndarray, np.ndarray, int]:
    places = np.arange(keys)[::-1] * 2  # every other row, the last first
    rows, state = np.full((2 * keys, ROW_BYTES + 4), 0xEE, np.uint8), np.zeros(2 * keys, np.uint8)
    data, seq = np.frombuffer(body + b"\0", np.uint8), np.zeros(1, np.int64)
    foreign = kernel.scatter(
        address_of(data), len(body), places, address_of(rows), rows.strides[0], ROW_BYTES, address_of(state), seq
    )
    return int(foreign), places, rows, state, int(seq[0])


def test_rows_and_states_go_to_their_places() -> None:
    foreign, places, rows, state, seq = scatter(BODY)
    assert (foreign, seq) == (2, 7)
    assert places[:2].tolist() == [6, 0]
    expected = {10: Tier.REMOTE, 8: Tier.ABSENT, 4: Tier.REMOTE, 2: Tier.REMOTE}
    assert state.tolist() == [expected.get(place, Tier.PENDING) for place in range(12)]
    for place, row in zip((10, 4, 2), ROWS, strict=True):
        assert rows[place].tobytes() == row.tobytes() + b"\xee" * 4
    assert (np.delete(rows, [10, 4, 2], 0) == 0xEE).all()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        BODY[:-1],
        BODY + b"x",
        struct.pack("<qq", 7, 5) + BODY[16:],
        BODY[:16] + b"\0" + BODY[17:],
        BODY[:16] + b"\4" + BODY[17:],
        BODY[:17] + b"\1" + BODY[18:],
    ],
)
def test_what_is_no_answer_with_rows_stores_nothing(body: bytes) -> None:
    foreign, _, rows, state, _ = scatter(body)
    assert foreign == kernel.MALFORMED
    assert not state.any()
    assert (rows == 0xEE).all()
