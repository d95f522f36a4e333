"""The same bytes through the reactors and straight to the full HTTP server have the same answers (`tools/fuzz_reactor.py`)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.counts import few_or_many
from tests.engine.quick_build import in_process
from tools.fuzz_reactor import Fuzzer, Seen, Server, _is_overtaken, split_requests

COUNT = int(os.environ.get("FUZZ_EXCHANGES", few_or_many(600, 6000)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with in_process(), Server(tmp_path_factory.mktemp("both")) as server:
        yield server


@pytest.mark.counted
def test_reactors_and_the_full_server_answer_the_same_bytes_alike(server: Server) -> None:
    fuzzer = Fuzzer(server.ports, seed=int(os.environ.get("FUZZ_SEED", 20)))
    fuzzer.run(iter(range(COUNT)))
    assert not fuzzer.different
    assert fuzzer.counts["exchanges"] == COUNT
    # it is about something: both ways were taken, and every kind of end
    assert server.by_reactors > COUNT // 10
    for kind in ("open", "closed", "waiting", "half-closed", "status 200", "status 400", "status 403", "status 404"):
        assert fuzzer.counts[kind] > COUNT // 400, fuzzer.counts
    assert fuzzer.counts["the same"] > COUNT // 2


@pytest.mark.counted
def test_clients_that_end_their_side_are_answered_alike(server: Server) -> None:
    count = COUNT // 3
    fuzzer = Fuzzer(server.ports, seed=int(os.environ.get("FUZZ_SEED", 21)), half_closes=1.0)
    fuzzer.run(iter(range(count)))
    assert not fuzzer.different
    assert fuzzer.counts["half-closed"] == fuzzer.counts["closed"] == count
    assert fuzzer.counts["status 200"] > count // 4, fuzzer.counts
    assert fuzzer.counts["the same"] > count // 2


def test_what_may_differ() -> None:
    """What is let pass is no more than answers that were overtaken by the end of their connection."""
    ok, wrong, last = [(status, (), b"") for status in (200, 404, 400)]
    closing = (400, (("content-type", "text/plain; charset=utf-8"),), b"")
    assert _is_overtaken(Seen([closing], "closed"), Seen([ok, wrong, closing], "closed"))
    assert _is_overtaken(Seen([ok, closing], "closed"), Seen([ok, wrong, closing], "closed"))
    assert not _is_overtaken(Seen([wrong, closing], "closed"), Seen([ok, wrong, closing], "closed"))
    assert not _is_overtaken(Seen([last], "closed"), Seen([ok, wrong, last], "closed"))
    assert not _is_overtaken(Seen([ok], "open"), Seen([ok, wrong], "open"))
    assert not _is_overtaken(Seen([ok], "closed"), Seen([ok], "open"))


def test_requests_are_cut_where_the_full_servers_parser_ends_them() -> None:
    get, post = b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
    chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"
    wish = b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    parts = [get, post, chunked, wish, post, b"x y z"]
    assert split_requests(b"".join(parts)) == parts
