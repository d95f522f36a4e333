"""Answers of HTTP/1.1 however they arrive, and what is none."""

from __future__ import annotations

import resource

import httptools
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierstore.client.replies import DocumentReply
from tierstore.http1 import HEAD_BYTES, Incoming, MalformedAnswer, request_head

BODY = b"0123456789" * 7
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 70\r\nX-One:  a b \r\n\r\n" + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"a;x=y\r\n0123456789\r\n3C\r\n" + BODY[10:] + b"\r\n0\r\nTrailer: t\r\n\r\n"
)


def take(incoming: Incoming, data: bytes, step: int) -> bool:
    """Let `data` arrive in pieces; True once the answer is complete, which must be with the last byte."""
    done = False
    while data:
        assert not done, f"{len(data)} bytes were not waited for"
        into = incoming.buffer()
        n = min(len(into), step, len(data))
        into[:n] = data[:n]
        done = incoming.received(n)
        data = data[n:]
    return done


def expecting() -> tuple[Incoming, DocumentReply]:
    incoming, reply = Incoming(), DocumentReply()
    incoming.expect(reply)
    return incoming, reply


@pytest.mark.parametrize("step", [1, 3, 40, 1 << 20])
@pytest.mark.parametrize(
    "raw", [PLAIN, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, PLAIN.replace(b"200 OK", b"200")]
)
def test_an_answer_may_arrive_in_any_pieces(raw: bytes, step: int) -> None:
    incoming, reply = expecting()
    for _ in range(2):  # on one connection, one after the other
        assert take(incoming, raw, step)
        assert (reply.status, bytes(reply.body)) == (200, BODY)
        assert incoming.reusable
        assert incoming.idle
        reply = DocumentReply()
        incoming.expect(reply)


def test_interim_answers_are_passed_over_however_many_come_at_once() -> None:
    incoming, reply = expecting()
    assert take(incoming, b"HTTP/1.1 103 x\r\n\r\n" * 1500 + PLAIN, HEAD_BYTES - len(PLAIN))
    assert bytes(reply.body) == BODY


def test_a_field_in_several_lines_is_one_list() -> None:
    incoming, reply = expecting()
    take(incoming, PLAIN.replace(b"X-One", b"X-One: 1\r\nConnection: close\r\nConnection: x\r\nx-one"), 1 << 20)
    assert reply.headers["x-one"] == "1, a b"
    assert not incoming.reusable


def test_a_length_is_no_memory_until_its_bytes_come() -> None:
    """A node may say what it likes; what it has not sent costs nothing."""
    before = resident_bytes()
    for _ in range(3):
        incoming, _ = expecting()
        assert not take(incoming, b"HTTP/1.1 200 OK\r\nContent-Length: 300000000\r\n\r\nabc", 1 << 20)
        assert resident_bytes() < before + (64 << 20)


@given(st.data())
def test_an_answer_that_is_taken_is_taken_by_another_parser_too(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([PLAIN, CHUNKED])))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, raw.index(b"\r\n\r\n") + 12 if b"\r\n\r\n" in raw else len(raw) - 1))
        some = data.draw(
            st.sampled_from([b"", b"\r", b"\n", b" ", b"\t", b"\0", b"\xb2", b"+", b"0x", b"_", b":", b",", b"9"])
        )
        raw[at : at + data.draw(st.integers(0, 1))] = some
    incoming, reply = expecting()
    try:
        assume(take(incoming, bytes(raw), 1 << 20) and incoming.reusable and reply.status not in (204, 304))
    except (MalformedAnswer, AssertionError):
        return
    other = Other()
    parser = httptools.HttpResponseParser(other)
    parser.feed_data(bytes(raw))
    assert bytes(other.body) == bytes(reply.body)


class Other:
    """What httptools makes of an answer."""

    def __init__(self) -> None:
        self.body = bytearray()

    def on_body(self, part: bytes) -> None:
        self.body += part


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_headers_go_by_lower_case_names() -> None:
    incoming, reply = expecting()
    take(incoming, PLAIN, 1 << 20)
    assert reply.headers["x-one"] == "a b"


@pytest.mark.parametrize(
    ("raw", "reusable"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nand more", False),
    ],
)
def test_a_connection_is_used_again_only_where_that_is_sound(raw: bytes, reusable: bool) -> None:
    incoming, reply = expecting()
    assert take(incoming, raw, 1 << 20)
    assert bytes(reply.body) == b""
    assert incoming.reusable is reusable


def test_a_body_may_end_with_the_connection() -> None:
    incoming, reply = expecting()
    assert not take(incoming, b"HTTP/1.1 200 OK\r\n\r\n" + BODY, 30)
    assert incoming.closed()
    assert bytes(reply.body) == BODY
    assert not incoming.reusable


@pytest.mark.parametrize("cut", [0, 10, 60, -1])
def test_a_connection_that_ends_early_is_no_answer(cut: int) -> None:
    for raw in (PLAIN, CHUNKED):
        incoming, _ = expecting()
        assert not take(incoming, raw[:cut], 1 << 20)
        assert not incoming.closed()


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\x15\x03\x01\0\x02\x02F",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 \xb2\xb2\xb2 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
        *(
            b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n\r\nabcde"
            for fields in (
                "Content-Length: ²".encode("latin-1"),
                b"Content-Length: 5\xa0",
                b"Content-Length: +5",
                b"Content-Length: 1_0",
                b"Content-Length:",
                b"Content-Length: 5, 5",
                b"Content-Length: 5\r\nContent-Length: 5",
                b"Content-Length: 5\r\nContent-Length: 4",
                b"Content-Length: 5\r\nTransfer-Encoding: chunked",
                b"Content-Length: " + b"9" * 18,
                b"Content-Length: " + b"9" * 5000,
                b"Content-Length : 5",
                b"X: a\r\n b\r\nContent-Length: 5",
                b"X: a\nContent-Length: 5",
                b"X: a\rb\r\nContent-Length: 5",
                b"X: \0\r\nContent-Length: 5",
                b"no colon\r\nContent-Length: 5",
                b": x\r\nContent-Length: 5",
                b"Transfer-Encoding: notchunked",
                b"Transfer-Encoding: chunked, gzip",
                b"Transfer-Encoding: gzip",
                b"Transfer-Encoding:",
                b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            )
        ),
        *(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
            for body in (
                b"+0x2\r\nab\r\n0\r\n\r\n",
                b"0x2\r\nab\r\n0\r\n\r\n",
                b"1_0\r\n",
                b" 2\r\n",
                b"\r\n",
                b"2\nab\r\n0\r\n\r\n",
                b"2\r\nabXX\r\n0\r\n\r\n",
                b"2\r\nab\n0\r\n\r\n",
                b"f" * 17 + b"\r\n",
                b"0\r\n" + b"Trailer: t\r\n" * 5000,
            )
        ),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 5000,
        b"HTTP/1.1 200 OK\r\n" + b"x" * HEAD_BYTES,
    ],
)
def test_what_is_not_http_is_said_to_be_malformed(raw: bytes) -> None:
    incoming, _ = expecting()
    with pytest.raises(MalformedAnswer):
        take(incoming, raw, 1 << 20)


def test_bytes_without_a_request_are_refused() -> None:
    with pytest.raises(MalformedAnswer, match="no request asked for"):
        Incoming().received(1)


def test_a_request_says_how_long_it_is() -> None:
    assert request_head("GET", "/a", "Host: x\r\n", 0) == b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
    assert request_head("POST", "/a", "", 0) == b"POST /a HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
