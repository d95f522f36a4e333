"""What nodes answer each other: whatever is none is one error that names the node, and takes no memory that did not come."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from tierstore.errors import Corruption, RemoteUnavailable, TierstoreError
from tierstore.tiers.connection_pools import ConnectionPools, Options
from tierstore.tiers.upstream import reads as kernel
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.connections import UpstreamNode
from tierstore.tiers.upstream.options import NodeAddress
from tierstore.tiers.upstream.peer import Peer
from tierstore.tiers.upstream.table import _Read
from tierstore.tiers.upstream.wire import LoggedDelta, decode_entries, encode_entries
from tools.raw_server import RawServer, http_answer, is_whole_http


class Node:
    """A node that answers everything with `answer`."""

    def __init__(self) -> None:
        self.answer = b""
        self.server = RawServer(lambda _: self.answer, is_whole_http)
        pools: ConnectionPools[Any, Any] = ConnectionPools(Options(), "the test")
        self.node = UpstreamNode(NodeAddress("127.0.0.1", self.server.port), pools, None, None)
        self.peer = Peer(self.node)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    with made.server:
        yield made


def entry(seq: int, data: bytes, **other: Any) -> bytes:
    """A delta as it is sent, with another size or digest where that is given."""
    digest = other.get("digest", xxhash.xxh3_64_hexdigest(data).encode())
    return struct.pack("<qq", seq, other.get("size", len(data))) + digest + data


def test_deltas_come_as_they_were_sent() -> None:
    sent = [LoggedDelta(seq, xxhash.xxh3_64_hexdigest(data), data) for seq, data in ((7, b"abc"), (8, b""), (9, b"d"))]
    assert decode_entries(b"".join(encode_entries(sent)), 6, 3) == sent
    assert decode_entries(b"", 6, 3) == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (entry(7, b"abc")[:-1], "whole deltas"),
        (entry(7, b"abc") + b"x", "whole deltas"),
        (entry(7, b"", size=-32), "whole deltas"),
        (entry(7, b"", size=-1), "whole deltas"),
        (entry(7, b"abc", size=-(1 << 63)), "whole deltas"),
        (entry(7, b"abc", size=(1 << 63) - 1), "whole deltas"),
        (entry(7, b"abc") + entry(8, b"", size=-67), "whole deltas"),
        (entry(8, b"abc"), "delta 7"),
        (entry(-7, b"abc"), "delta 7"),
        (entry(7, b"abc") + entry(7, b"abc"), "delta 8"),
        (entry(7, b"abc", digest=b"0" * 16), "does not match its digest"),
        (entry(7, b"abc", digest=b"\xff" * 16), "does not match its digest"),
        (entry(7, b"a") + entry(8, b"b") + entry(9, b"c") + entry(10, b"d"), "at most 3"),
    ],
)
def test_what_is_no_list_of_deltas_is_refused_within_little_memory(body: bytes, why: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Corruption, match=why):
            decode_entries(body, 6, 3)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


QUESTIONS: dict[str, Callable[[Peer], object]] = {
    "logs": lambda peer: peer.logs(),
    "digest": lambda peer: peer.digest("ctr", 1, 2),
    "deltas": lambda peer: peer.deltas("ctr", 1, 8, 1 << 20),
    "image": lambda peer: peer.image("ctr"),
    "read": lambda peer: peer.read("ctr", "files/0-1", 0, 1 << 16),
}
LOG: dict[str, Any] = {"active": 1, "start": 0, "last": 3, "damage": None, "rollbacks": [[1, 2]]}


def logs(**other: Any) -> bytes:
    return json.dumps({"node": "n", "copying": False, "models": {"ctr": LOG | other}}).encode()


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 62),
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 100 C\r\n\r\n" * 5000,
        http_answer(b"[" * 100_000, 500),
        http_answer(b'{"error": "' + b"x" * 100_000 + b'"}', 500),
        b"",
    ],
)
def test_an_answer_of_no_use_is_an_error_that_names_the_node(
    node: Node, question: Callable[[Peer], object], answer: bytes
) -> None:
    node.answer = answer
    with pytest.raises(RemoteUnavailable) as caught:
        question(node.peer)
    assert str(node.node) in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "coding", [b"Transfer-Encoding: chunked\r\n\r\nfffffff\r\n", b"\r\n"], ids=["chunked", "until closed"]
)
def test_a_body_without_a_length_is_read_up_to_a_bound(node: Node, coding: bytes) -> None:
    node.answer = b"HTTP/1.1 200 OK\r\n" + coding + b"x" * (4 << 20)
    with pytest.raises(RemoteUnavailable, match="65536"):
        node.peer.read("ctr", "files/0-1", 0, 1 << 16)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"[]",
        b"null",
        b'"x"',
        b"{}",
        b"{",
        logs(last=float("inf")),
        logs(last=1e300),
        logs(last=-1),
        logs(last=1 << 63),
        logs(start=4),
        logs(active="1"),
        logs(rollbacks=[[1, 2, 3]]),
        logs(rollbacks=[[float("nan"), 2]]),
        logs(rollbacks=7),
        logs(damage=[]),
        logs().replace(b"ctr", b"../ctr"),
        logs().replace(b'"n"', b"[]"),
        b'{"node": "n", "copying": false, "models": []}',
        b'{"number": 1' + b"0" * 5000 + b"}",
        b'{"number": 1, "done": Infinity, "total": 1}',
        b'{"number": 1, "backup": {"format": 1}}',
        b'{"digest": 5}',
        b'\xff\xfe{"digest": null}',
        b'{"digest": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("question", [QUESTIONS["logs"], QUESTIONS["digest"], QUESTIONS["image"]])
def test_a_document_of_another_form_is_an_error_that_names_the_node(
    node: Node, question: Callable[[Peer], object], body: bytes
) -> None:
    node.answer = http_answer(body)
    with pytest.raises(RemoteUnavailable) as caught:
        question(node.peer)
    assert str(node.node) in str(caught.value)


def test_what_a_later_release_adds_is_passed_over(node: Node) -> None:
    node.answer = http_answer(logs(more=[1]))
    found = node.peer.logs()
    assert (found.node, found.copying, found.models["ctr"].rollbacks) == ("n", False, ((1, 2),))
    assert (found.models["ctr"].start, found.models["ctr"].last) == (0, 3)


def test_more_bytes_than_were_asked_for_are_refused_before_they_are_read(node: Node) -> None:
    node.answer = http_answer(b"x" * 2000)
    with pytest.raises(RemoteUnavailable, match="at most 1000 bytes, got 2000"):
        node.peer.read("ctr", "files/0-1", 0, 1000)


def test_deltas_that_are_none_name_the_node(node: Node) -> None:
    node.answer = http_answer(entry(2, b"", size=-32))
    with pytest.raises(TierstoreError, match=r"127\.0\.0\.1.*whole deltas"):
        node.peer.deltas("ctr", 1, 8, 1 << 20)
    assert wire.DIGEST_BYTES == 16


@pytest.mark.parametrize("sent", [99, 100])
def test_a_connection_is_kept_only_where_its_request_was_sent_whole(sent: int) -> None:
    (node,), noted = kernel.NODE.new(1), list[bool]()
    node["status"], node["send_bytes"], node["sent"] = kernel.DONE, 100, sent
    connection: Any = SimpleNamespace(answered=lambda *, closes: noted.append(closes))
    _Read._reply(connection, node, np.empty(0, np.uint8))
    assert noted == [sent < 100]
