"""What a server of a cluster answers and is no answer: one error, in time, that names where it came from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import xxhash

from tierstore.engine.placements.cluster.shared_model import SharedModel, model_names
from tierstore.errors import RemoteUnavailable, StorageError, TierstoreError
from tierstore.tiers.cluster.commands import call, command
from tierstore.tiers.cluster.redis_keys import slot_of
from tierstore.tiers.cluster.row_requests import MOST_FIELDS
from tierstore.tiers.cluster.table import ClusterTable
from tierstore.tiers.cluster.topology import Cluster, connect
from tierstore.tiers.cluster.write import Writer
from tierstore.tiers.connection_pools import Options
from tools.raw_server import RawRedis, RawServer, words_of

pytest.importorskip("redis", reason="the extra `redis` is not installed")

OPTIONS = Options(timeout_s=2.0, connect_timeout_s=2.0, suspect_s=0.01)


@pytest.fixture
def server() -> Iterator[RawRedis]:
    with RawRedis() as made:
        yield made


@pytest.fixture
def cluster(server: RawRedis) -> Iterator[Cluster]:
    server.answer = b"-ERR unknown command\r\n"  # what it runs it does not say, and at once
    made = connect(f"redis://127.0.0.1:{server.port}", OPTIONS)
    server.answer = b""
    yield made
    made.close()


def bulk(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def slots(low: bytes = b":0", high: bytes = b":16383", host: bytes = b"$9\r\n127.0.0.1", port: bytes = b":1") -> bytes:
    return b"*1\r\n*3\r\n%s\r\n%s\r\n*2\r\n%s\r\n%s\r\n" % (low, high, host, port)


@pytest.mark.parametrize(
    "answer",
    [
        slots(high=b":%d" % ((1 << 63) - 1)),
        slots(low=b":-%d" % (1 << 62)),
        slots(high=b"$1\r\nx"),
        slots(port=b":70000"),
        slots(port=b"$1\r\nx"),
        slots(host=b"$2\r\n\xff\xfe"),
        slots(host=b"*1\r\n:1"),
        b"*1\r\n*2\r\n:0\r\n:1\r\n",
        b"*1\r\n:5\r\n",
        b":5\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"*x\r\n",
        b"$x\r\n",
        b"?\r\n",
        b"*1\r\n" * 5000,
        b"-MOVED 1 x\r\n",
        b"-ASK\r\n",
        b"",
    ],
)
def test_a_map_of_slots_that_is_none_is_an_error(server: RawRedis, answer: bytes) -> None:
    server.slots = answer
    began = time.monotonic()
    with pytest.raises((RemoteUnavailable, StorageError), match=str(server.port)):
        connect(f"redis://127.0.0.1:{server.port}", Options(timeout_s=0.3, connect_timeout_s=0.3))
    assert time.monotonic() - began < 30


REPLIES = {
    "no number": b":x\r\n",
    "no size": b"$x\r\n",
    "a list without end": b"*1\r\n" * 5000,
    "moved to nowhere": b"-MOVED 1 nowhere\r\n",
    "moved to no port": b"-MOVED 1 127.0.0.1:70000\r\n",
    "moved to a port of another alphabet": "-MOVED 1 127.0.0.1:²\r\n".encode("latin-1"),
    "asked for ever": b"-ASK 1 127.0.0.1:%d\r\n",
    "an asking that is none": b"-ASK x\r\n",
    "another kind": b"+OK\r\n",
    "nothing": b"$-1\r\n",
    "not a list": b":-7\r\n",
    "not text": bulk(b"\xff", b"\xff"),
    "an odd number": bulk(b"a"),
}
QUESTIONS: dict[str, Callable[[Cluster], object]] = {
    "rows": lambda cluster: _fetch(cluster),
    "pointer": lambda cluster: SharedModel(cluster, "ctr").pointer(),
    "versions": lambda cluster: SharedModel(cluster, "ctr").versions(),
    "log": lambda cluster: SharedModel(cluster, "ctr").read(1, 4),
    "reports": lambda cluster: SharedModel(cluster, "ctr").beat("n", None),
    "append": lambda cluster: SharedModel(cluster, "ctr").append(2, "0" * 16, b"", None),
    "lease": lambda cluster: SharedModel(cluster, "ctr").lease(),
    "names": lambda cluster: model_names(cluster),
    "call": lambda cluster: call(cluster, slot_of(b"0"), [command(b"HLEN", b"ts:{0}:m:1:t")], timeout_s=0.3),
    "count": lambda cluster: _writer(cluster, lambda writer: writer.counts("item")),
    "states": lambda cluster: _writer(cluster, lambda writer: writer.states()),
    "write": lambda cluster: _writer(cluster, lambda writer: writer.apply_delta(1, 2, [])),
    "finish": lambda cluster: _writer(cluster, lambda writer: writer.finish(seq=1)),
}


def _writer(cluster: Cluster, question: Callable[[Writer], object]) -> object:
    with Writer(cluster, "ctr", 1, {"item": 8}, [b"0"], timeout_s=0.3) as writer:
        return question(writer)


def _fetch(cluster: Cluster) -> None:
    table = ClusterTable(cluster, "ctr", 1, "item", [b"0"], 8)
    table.fetch(np.arange(3), np.zeros((3, 8), np.uint8), np.zeros(3, np.uint8), deadline_s=time.monotonic() + 1.0)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
def test_a_reply_that_is_none_is_an_error_in_time(
    server: RawRedis, cluster: Cluster, question: Callable[[Cluster], object], reply: bytes
) -> None:
    server.answer = reply % server.port if b"%d" in reply else reply
    began = time.monotonic()
    with suppress(TierstoreError):
        question(cluster)
    assert time.monotonic() - began < 30


def fields(**values: bytes) -> bytes:
    return bulk(*(word for name, value in values.items() for word in (name.encode(), value)))


def entry(name: bytes, data: bytes, digest: bytes | None = None) -> bytes:
    held = xxhash.xxh3_64_hexdigest(data).encode() if digest is None else digest
    return b"*1\r\n*2\r\n$%d\r\n%s\r\n" % (len(name), name) + fields(digest=held, data=data, ms=b"5")


@pytest.mark.parametrize(
    ("question", "reply"),
    [
        ("pointer", fields(seq=b"-1")),
        ("pointer", fields(seq=b"%d" % (1 << 63))),
        ("pointer", fields(generation=b"1e3")),
        ("pointer", fields(share=b"nan")),
        ("pointer", fields(share=b"7")),
        ("pointer", fields(**{"mark:x": b"1"})),
        ("pointer", fields(**{"mark:1": b"-5"})),
        ("pointer", fields(server=b"\xff")),
        ("versions", fields(**{"1": b"[]"})),
        ("versions", fields(**{"1": b"[" * 100_000})),
        ("versions", fields(**{"1": b'{"state": "ready"}'})),
        ("versions", fields(**{"1": b'{"state": "ready", "record": []}'})),
        ("versions", fields(**{"-1": b'{"state": "loading"}'})),
        ("log", entry(b"1-0", b"abc")),
        ("log", entry(b"-2-0", b"abc")),
        ("log", entry(b"2-0", b"abc", b"0" * 16)),
        ("log", b"*1\r\n*1\r\n$3\r\n2-0\r\n"),
        ("reports", fields(node=b"5")),
        ("lease", b"$5\r\nowner\r\n"),
        ("lease", b"$8\r\nowner -1\r\n"),
        ("names", bulk(b"\xff")),
    ],
)
def test_what_a_cluster_has_of_a_model_and_makes_no_sense_is_an_error(
    server: RawRedis, cluster: Cluster, question: str, reply: bytes
) -> None:
    server.answer = reply
    with pytest.raises(RemoteUnavailable, match="is invalid"):
        QUESTIONS[question](cluster)


def test_what_makes_sense_is_read(server: RawRedis, cluster: Cluster) -> None:
    shared = SharedModel(cluster, "ctr")
    server.answer = fields(seq=b"3", generation=b"4", current=b"1", share=b"0.5", **{"mark:1": b"2"})
    pointer: Any = shared.pointer()
    assert (pointer.seq, pointer.generation, pointer.current, pointer.share, pointer.marks) == (3, 4, 1, 0.5, {1: 2})
    server.answer = entry(b"2-0", b"abc")
    assert [(of.seq, of.data, of.ms) for of in shared.read(1, 4)] == [(2, b"abc", 5)]
    server.answer = fields(**{"10": b'{"state": "loading"}', "9": b'{"state": "ready", "record": {"loaded_at_s": 5}}'})
    assert list(shared.versions()) == [9, 10]


def test_a_reply_that_comes_before_its_request_was_sent_ends_the_connection() -> None:
    keys = np.arange(1_000_000)
    marks, nil = bulk(b"5", b"5"), b"$-1\r\n"
    steps = [min(MOST_FIELDS, len(keys) - at) for at in range(0, len(keys), MOST_FIELDS)]
    replies = [marks + b"".join(b"*%d\r\n" % step + nil * step for step in steps) + marks]
    is_over = threading.Event()

    def is_whole(request: bytes) -> bool:
        if not replies:
            is_over.wait(30)  # and reads no more of it meanwhile
        return bool(replies) and (b"HMGET" in request or words_of(request) is not None)

    redis = RawRedis()
    redis.server = RawServer(
        lambda request: replies.pop() if b"HMGET" in request else redis._answer(request), is_whole, lambda _: True
    )
    redis.port = redis.server.port
    with redis:
        made = connect(f"redis://127.0.0.1:{redis.port}", OPTIONS)
        table = ClusterTable(made, "ctr", 1, "item", [b"0"], 8)
        state = np.zeros(len(keys), np.uint8)
        with pytest.raises(RemoteUnavailable, match="its answer is not rows"):
            table.fetch(keys, np.zeros((len(keys), 8), np.uint8), state, deadline_s=time.monotonic() + 20.0)
        assert not state.any()
        is_over.set()
        made.close()
