"""Where requests end: the kernel beside llhttp, however their bytes come."""

from __future__ import annotations

import random
from typing import Any

import httptools
import numpy as np
import pytest

from tests.compiled import frames
from tierstore.kernels.codec import address_of
from tierstore.reactor import layout as words
from tierstore.wire.http1 import frame as http1_frame
from tierstore.wire.http1 import head as http1_head
from tierstore.wire.http1.frame import BAD, CHUNKED, CUT, GOOD

SEEDS = 300
LARGE = 1 << 20


class Request:
    """What llhttp makes of bytes."""

    def __init__(self, data: bytes) -> None:
        self.body, self.complete, self.is_bad = b"", False, False
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.is_bad = not self.complete

    def on_headers_complete(self) -> None:
        self.keeps = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def frame(data: bytes) -> tuple[int, Any]:
    memory = np.frombuffer(data + b"?", np.uint8).copy()
    head = http1_head.HEAD.new(1)
    return int(frames.frame(address_of(memory), len(data), address_of(head))), head[0]


def head_of(rng: random.Random, framing: bytes) -> bytes:
    method = rng.choice([b"GET", b"POST", b"DELETE", b"PATCH", b"OPTIONS"])
    target = rng.choice([b"/", b"/v2?a=b", b"*", b"http://localhost/x", b"/%2e%2e", b"/v2/models/ctr/infer"])
    lines = [b"Host: localhost", b"X-Some: \xe9 \t x", b"Connection: keep-alive, Upgrade", framing]
    lines += rng.sample([b"Connection: close", b"X-Empty:", b"Content-Type: a/b", b'ETag:"x" '], 2)
    rng.shuffle(lines)
    version = rng.choice([b"1.1", b"1.1", b"1.0"])
    return b"%b %b HTTP/%b\r\n%b\r\n\r\n" % (method, target, version, b"\r\n".join(line for line in lines if line))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_head_ends_where_llhttp_ends_it(seed: int) -> None:
    rng = random.Random(seed)
    length = rng.randrange(50)
    head = head_of(rng, rng.choice([b"", b"Content-Length: %d" % length]))
    verdict, found = frame(head)
    assert verdict == GOOD
    theirs = Request(head + bytes(length))
    assert (int(found["head_bytes"]), int(found["body_bytes"])) == (len(head), len(theirs.body))
    assert bool(found["closing"]) == (not theirs.keeps or b"HTTP/1.0" in head)
    for cut in range(len(head)):
        assert frame(head[:cut])[0] == CUT, head[:cut]


@pytest.mark.parametrize(
    "head",
    [
        b"GET\r\n\r\n",
        b" GET / HTTP/1.1\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.2\r\n\r\n",
        b"GET / HTTP/1.1\n\n",
        b"GET /\x80 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA b: c\r\n\r\n",
        b"GET / HTTP/1.1\r\nA : c\r\n\r\n",
        b"GET / HTTP/1.1\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_may_be_read_in_two_ways_is_no_request(head: bytes) -> None:
    assert frame(head)[0] == BAD


@pytest.mark.parametrize(
    ("lines", "expects"),
    [
        (b"HTTP/1.1\r\nExpect: 100-Continue\r\n", 1),
        (b"HTTP/1.1\r\nExpect: more\r\n", 0),
        (b"HTTP/1.0\r\nExpect: 100-continue\r\n", 0),
    ],
)
def test_who_waits_to_be_told_to_go_on(lines: bytes, expects: int) -> None:
    verdict, found = frame(b"POST / " + lines + b"Content-Length: 3\r\n\r\n")
    assert (verdict, int(found["expects"])) == (GOOD, expects)


def chunks_of(rng: random.Random, body: bytes) -> bytes:
    made, at = b"", 0
    while at < len(body):
        size = rng.choice([1, 2, 15, 16, 300, 5000])
        part = body[at : at + size]
        made += (
            rng.choice([b"%x", b"%X", b"0%x"]) % len(part)
            + rng.choice([b"", b"", b";a=b", b';c="d"'])
            + b"\r\n"
            + part
            + b"\r\n"
        )
        at += size
    return made + rng.choice([b"0", b"000"]) + b"\r\n" + rng.choice([b"", b"", b"X-Trailer: a\r\nY: b\r\n"]) + b"\r\n"


def decode(parts: list[bytes], head: int, most: int = LARGE) -> tuple[int, bytes]:
    """(what came of it, the bytes that are there then) of a request whose head has so many bytes."""
    conns = words.CONNECTION_RECORD.new(1)
    conns["chunks_head"], conns["chunks_at"], conns["chunk_left"] = head, head, http1_frame.SIZE_LINE
    data, came = b"", http1_frame.MORE
    for part in parts:
        memory = np.frombuffer(data + part + b"?", np.uint8).copy()
        came, size = frames.decode(address_of(conns), address_of(memory), len(data) + len(part), most)
        data = memory[:size].tobytes()
        if came != http1_frame.MORE:
            break
    return came, data


@pytest.mark.parametrize("seed", range(SEEDS))
def test_chunks_are_taken_out_of_a_body_however_they_come(seed: int) -> None:
    rng = random.Random(seed)
    head = head_of(rng, b"Transfer-Encoding: chunked").replace(b"HTTP/1.0", b"HTTP/1.1")
    body = rng.randbytes(rng.choice([0, 1, 40, 7000]))
    behind = b"GET / HTTP/1.1\r\n"
    data = head + chunks_of(rng, body) + behind
    verdict, found = frame(data)
    assert (verdict, int(found["body_bytes"])) == (GOOD, CHUNKED)
    assert Request(data).body == body
    cuts = sorted(rng.sample(range(len(head), len(data) - len(behind)), min(20, len(data) - len(behind) - len(head))))
    parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert decode(parts, len(head)) == (http1_frame.DONE, head + body + behind)


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n",
        b"\r\n",
        b"-1\r\n",
        b"1\r\nab\r\n",
        b"1\nab",
        b"1 x\r\na\r\n",
        b"1\r\na\rb",
        b"fffffffffffffffff\r\n",
        b"0\r\nA\x00: b\r\n\r\n",
    ],
)
def test_what_are_no_chunks_is_seen(chunks: bytes) -> None:
    assert decode([b"", chunks], 0)[0] == http1_frame.MALFORMED


def test_lines_beside_the_data_of_chunks_have_a_bound() -> None:
    ones, trailers = b"1\r\na\r\n" * 5000, b"a: b\r\n" * 20_000
    assert decode([ones, b"0\r\n\r\n"], 0) == (http1_frame.DONE, b"a" * 5000)
    assert decode([b"1\r\na\r\n0\r\n", trailers], 0)[0] == http1_frame.MALFORMED
    assert decode([b"1;" + b"x" * 70_000], 0)[0] == http1_frame.MALFORMED


def test_a_body_in_chunks_has_a_bound() -> None:
    assert decode([b"a\r\n" + b"x" * 10 + b"\r\n1\r\n"], 0, most=10)[0] == http1_frame.LARGE
    assert decode([b"a\r\n" + b"x" * 10 + b"\r\n0\r\n\r\n"], 0, most=10)[0] == http1_frame.DONE
