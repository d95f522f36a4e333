"""Requests through the reactors: what they answer, what they hand on, and that nobody can tell but by the time it takes."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tierstore
from tests.service.conftest import ask_while_versions_change, eventually, load
from tests.service.raw_clients import request
from tests.service.scenes import write_small
from tierstore.engine.store import Store
from tierstore.service.exchange import Exchange
from tierstore.service.reactor import allowed, cold_reads
from tierstore.service.server import ServerThread

Own = tuple[Store, ServerThread, httpx.Client]
OIP, TFS = "/v2/models/ctr/infer", "/v1/models/ctr:predict"
KEYS: dict[str, dict[str, Any]] = {  # what reactors leave to Python, for a member that they cannot skip
    OIP: {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [2], "data": [1, 100]}], "other": []},
    TFS: {"instances": [1, 100], "other": []},
}


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The look-ups that Python had."""
    came: list[object] = []
    admit = Exchange.admit
    monkeypatch.setattr(Exchange, "admit", lambda self, *failed: (came.append(self), admit(self, *failed)))
    return came


@pytest.fixture
def ctr(own: Own, tmp_path: Path) -> Own:
    """A model of one feature, which has been asked."""
    _, _, http = own
    load(http, write_small(tmp_path, "ctr", "item", 1))
    for path, document in KEYS.items():
        assert http.post(path, json=document).status_code == 200
    return own


@contextmanager
def connection(server: ServerThread) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield made


def answer(made: socket.socket) -> tuple[bytes, bytes]:
    """(head without its date, body) of one answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += made.recv(1)
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    assert length is not None
    while len(body) < int(length[1]):
        body += made.recv(int(length[1]) - len(body))
    return re.sub(rb"(?i)date: [^\r]*", b"date", head), body


@pytest.mark.parametrize("path", KEYS)
def test_an_answer_is_the_same_to_the_byte_however_its_request_came(
    ctr: Own, by_python: list[object], path: str
) -> None:
    _, server, _ = ctr
    message = request(path, KEYS[path])
    with connection(server) as whole, connection(server) as parts:
        whole.sendall(message)
        expected = answer(whole)
        assert len(by_python) == 1
        parts.sendall(message[:-10])
        eventually(lambda: server.service.reactors.unfinished == 1, "its first part has come")
        first = server.service.request_times.requests
        parts.sendall(message[-10:])
        assert answer(parts) == expected
        assert len(by_python) == 2
        assert server.service.request_times.requests == first + 1
    assert expected[0].startswith(b"HTTP/1.1 200 OK\r\n")


def begin(server: ServerThread, made: socket.socket, **headers: object) -> bytes:
    """Send the head of a look-up, have the service read it, and give the body."""
    head, _, body = request(OIP, KEYS[OIP], headers).partition(b"\r\n\r\n")
    made.sendall(head + b"\r\n\r\n")
    eventually(lambda: server.service.reactors.unfinished == 1, "its head has come")
    return body


def test_its_time_counts_from_its_head(ctr: Own, by_python: list[object]) -> None:
    _, server, _ = ctr
    with connection(server) as made:
        body = begin(server, made, **{"X-Request-Timeout-Ms": 20})
        since = time.monotonic()
        eventually(lambda: time.monotonic() > since + 0.02, "that time has passed")
        made.sendall(body)
        assert answer(made)[0].startswith(b"HTTP/1.1 504")
    assert len(by_python) == 1, "Python refuses it"


def test_a_body_that_comes_apart_from_its_head_is_waited_for(ctr: Own, by_python: list[object]) -> None:
    _, server, _ = ctr
    with connection(server) as made:
        body = begin(server, made)
        made.sendall(body)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")
    assert len(by_python) == 1


def test_one_that_waits_for_its_body_when_the_service_ends_is_finished(ctr: Own) -> None:
    _, server, _ = ctr
    with connection(server) as made:
        body = begin(server, made)
        server.stop()
        eventually(lambda: server._http._handoff.ending, "the service is told to end")
        made.sendall(body)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("path", "protocol"), [(OIP, "oip_http"), (TFS, "tfs_http")])
def test_it_is_counted_once_whether_it_was_answered_or_refused(
    ctr: Own, by_python: list[object], path: str, protocol: str
) -> None:
    _, server, http = ctr
    service = server.service

    def counted() -> dict[str, int]:
        times = {
            outcome: sum(h.counts)
            for (name, outcome), h in service.request_times.histograms.items()
            if name == protocol
        }
        stats = service.inference_stats.of("ctr", 1)
        return times | {"success": stats.success, "fail": stats.failed}

    before = counted()
    assert http.post(path, json=KEYS[path]).status_code == 200
    assert http.post(path, json={}).status_code == 400
    assert http.post(path.replace("ctr", "other"), json=KEYS[path]).status_code == 404
    assert len(by_python) == 2  # one was refused before
    after = counted()
    more = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    assert more == {"ok": 1, "bad_input": 1, "not_found": 1, "success": 1, "fail": 1}
    eventually(lambda: service.inflight.used_bytes == 0, "its bytes are given back")


def test_requests_that_are_sent_ahead_are_answered_in_their_order(ctr: Own, by_python: list[object]) -> None:
    _, server, _ = ctr
    cold = {"inputs": [{"name": "item_id", "datatype": "INT64", "shape": [1], "data": [50]}]}
    with connection(server) as made:
        made.sendall(
            request(OIP, KEYS[OIP]) + request(OIP, cold) + request(OIP, KEYS[OIP]) + request("/v2/health/live")
        )
        bodies = [answer(made)[1] for _ in range(4)]
    shapes = [json.loads(body)["outputs"][0]["shape"][0] for body in bodies[:3]]
    assert shapes == [2, 1, 2]
    assert bodies[3] == b'{"live":true}'
    assert len(by_python) == 3


@pytest.mark.parametrize(
    ("version", "header"), [("1.1", "Connection: close\r\n"), ("1.0", "")], ids=["close", "HTTP/1.0"]
)
def test_a_connection_that_is_to_be_closed_is_closed(
    ctr: Own, by_python: list[object], version: str, header: str
) -> None:
    _, server, _ = ctr
    body = json.dumps(KEYS[OIP]).encode()
    head = f"POST {OIP} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{header}\r\n"
    with connection(server) as made:
        made.sendall(head.encode() + body)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")
        assert made.recv(1) == b""
    assert len(by_python) == 1


def test_a_client_that_expects_100_continue_gets_it(ctr: Own) -> None:
    _, server, _ = ctr
    message = request(OIP, KEYS[OIP], {"Expect": "100-continue"})
    head, _, body = message.partition(b"\r\n\r\n")
    with connection(server) as made:
        made.sendall(head + b"\r\n\r\n")
        assert made.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        made.sendall(body)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")


# --- by plan


def planned(n: int, *, feature: str = "item_id", path: str = OIP, **headers: object) -> tuple[bytes, bytes]:
    """(what stands before the keys, as many zeros as keys take) of a binary look-up."""
    tensor = {"name": feature, "datatype": "INT64", "shape": [n], "parameters": {"binary_data_size": 8 * n}}
    output = {"name": feature, "parameters": {"binary_data": True}}
    found = {"name": f"{feature}.found", "parameters": {"binary_data": True}}
    text = json.dumps({"inputs": [tensor], "outputs": [output, found]}).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(text) + 8 * n}"]
    lines += [f"Inference-Header-Content-Length: {len(text)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text, bytes(8 * n)


def reactor_answers(server: ServerThread) -> int:
    """Look-ups that were answered without Python."""
    return int(server.service.reactors.answers)


def test_look_ups_of_our_own_client_are_answered_without_python(ctr: Own) -> None:
    _, server, _ = ctr
    keys = np.array(KEYS[OIP]["inputs"][0]["data"])
    with tierstore.Client(server.url) as client:
        feature = KEYS[OIP]["inputs"][0]["name"]
        eventually(
            lambda: client.lookup("ctr", feature, keys) is not None and reactor_answers(server), "a reactor answers"
        )
        before = reactor_answers(server)
        for _ in range(10):
            client.lookup("ctr", feature, keys, timeout_s=20)
        assert reactor_answers(server) == before + 10


@pytest.fixture
def learned(ctr: Own) -> tuple[socket.socket, bytes, ServerThread]:
    """A connection, a look-up of four keys in memory that the reactors know how to answer, and their server."""
    _, server, _ = ctr
    head, keys = planned(4)
    made = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.sendall(head + keys)
    first = answer(made)

    def by_reactor() -> bool:
        before = reactor_answers(server)
        made.sendall(head + keys)
        assert answer(made) == first
        return reactor_answers(server) > before

    eventually(by_reactor, "the plan is known")
    return made, head + keys, server


def test_a_learned_look_up_never_comes_to_python(
    learned: tuple[socket.socket, bytes, ServerThread], by_python: list[object]
) -> None:
    made, message, server = learned
    with made:
        before = reactor_answers(server)
        made.sendall(message)
        expected = answer(made)
        for size in (1, 7, 100, len(message) - 1):  # in pieces of every kind
            for begin in range(0, len(message), size):
                made.sendall(message[begin : begin + size])
            assert answer(made) == expected
        made.sendall(message * 50)
        assert [answer(made) for _ in range(50)] == [expected] * 50
        assert by_python == []
        assert reactor_answers(server) == before + 55


def test_a_reactor_answers_a_further_name_of_the_service_however_many_were_used(
    learned: tuple[socket.socket, bytes, ServerThread],
) -> None:
    made, message, server = learned
    with made:
        for port in range(1, allowed.MOST + 10):
            made.sendall(request("/v2/health/live", headers={}).replace(b"localhost", b"127.0.0.1:%d" % port))
            assert answer(made)[0].startswith(b"HTTP/1.1 200")
        before = reactor_answers(server)
        for _ in range(3):
            made.sendall(message.replace(b"localhost", b"127.0.0.2"))
            assert answer(made)[0].startswith(b"HTTP/1.1 200")
        assert reactor_answers(server) >= before + 2, "only the first is Python's"


def test_what_a_reactor_answers_is_counted_like_any(learned: tuple[socket.socket, bytes, ServerThread]) -> None:
    made, message, server = learned
    service, store = server.service, server.service.store

    def counted() -> tuple[int, int, int, int]:
        service.refresh()
        stats = service.inference_stats.of("ctr", 1)
        keys = store.status()["models"]["ctr"]["tables"]["item"]["lookup_keys"]
        return stats.success, service.request_times.requests, sum(keys.values()), sum(stats.seconds.counts)

    with made:
        time.sleep(0.2)  # Python counts its last answer behind it
        before = counted()
        for _ in range(10):
            made.sendall(message)
            answer(made)
        assert [now - then for now, then in zip(counted(), before, strict=True)] == [10, 10, 40, 10]


@pytest.mark.thorough
def test_a_version_that_was_left_is_closed_though_reactors_go_on(
    learned: tuple[socket.socket, bytes, ServerThread], tmp_path: Path
) -> None:
    made, message, server = learned
    store = server.service.store
    model = store.model("ctr")
    old = model.publisher.served.active.open_version
    with made:
        store.load_snapshot(write_small(tmp_path, "ctr", "item", 2))
        made.sendall(message)
        answer(made)
        eventually(lambda: not model.publisher.reads(old), "nobody reads the old version")


def test_a_client_that_does_not_read_is_let_go_and_holds_nothing(
    learned: tuple[socket.socket, bytes, ServerThread],
) -> None:
    made, message, server = learned
    reactors = server.service.reactors
    reactors._limits["stall_ns"] = 0
    reactors._limits["slowest_rate"] = 1 << 40
    made.close()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.settimeout(60)
        sent = 0
        with suppress(OSError):
            while sent < 1 << 28:  # until it is reset
                sent += slow.send(message * 100)
        assert sent < 1 << 28
    eventually(lambda: server.service.inflight.used_bytes == 0, "its answers are let go")
    eventually(lambda: reactors.open == 1, "only the fixture's own client is left")


def test_a_request_whose_answer_would_go_beyond_what_may_be_in_flight_is_refused(
    learned: tuple[socket.socket, bytes, ServerThread],
) -> None:
    made, message, server = learned
    budget = server.service.inflight
    eventually(lambda: budget.used_bytes == 0, "earlier answers have left")
    held = budget.limit_bytes
    with made:
        budget.hold(held)
        made.sendall(message)
        assert answer(made)[0].startswith(b"HTTP/1.1 503")
        budget.release(held)
        made.sendall(message)
        assert answer(made)[0].startswith(b"HTTP/1.1 200")


@pytest.mark.thorough
def test_a_request_that_arrives_too_slowly_ends_its_connection(
    learned: tuple[socket.socket, bytes, ServerThread],
) -> None:
    made, message, server = learned
    server.service.reactors._limits["arrival_ns"] = 200_000_000
    with made, suppress(ConnectionError, BrokenPipeError):
        for byte in range(len(message)):  # a byte every now and then is no reason to wait for ever
            made.sendall(message[byte : byte + 1])
            until = time.monotonic() + 0.05
            with suppress(TimeoutError):
                made.settimeout(max(0.001, until - time.monotonic()))
                assert made.recv(1) == b""
                break
        else:
            pytest.fail("it was let in")


def test_connections_are_shared_out_among_the_reactors(ctr: Own) -> None:
    _, server, http = ctr
    http.close()
    reactors = server.service.reactors
    eventually(lambda: reactors.idle, "no connection is left")
    made = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4 * reactors.threads)]
    eventually(lambda: reactors.open == len(made), "all are accepted")
    assert set(reactors._lines["load"].tolist()) == {4}
    for each in made:
        each.close()
    eventually(lambda: reactors.idle, "all are gone")


def test_a_connection_stays_with_its_reactor_and_is_counted_once(
    learned: tuple[socket.socket, bytes, ServerThread], by_python: list[object]
) -> None:
    made, message, server = learned
    reactors = server.service.reactors
    with made:
        for _ in range(20):
            made.sendall(request("/v2/health/live"))
            assert answer(made)[0].startswith(b"HTTP/1.1 200")
            made.sendall(message)
            assert answer(made)[0].startswith(b"HTTP/1.1 200")
    assert by_python == []
    eventually(lambda: reactors.open == 1, "only the fixture's own client is left")


# --- rows that memory does not hold


def ask(made: socket.socket, server: ServerThread, keys: list[int], **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """(rows, found) of keys of the feature `item_id`."""
    head, _ = planned(len(keys), **more)
    made.sendall(head + np.array(keys, np.int64).tobytes())
    top, body = answer(made)
    assert top.startswith(b"HTTP/1.1 200"), body
    data = body[-17 * len(keys) :]
    return np.frombuffer(data, np.float32, 4 * len(keys)).reshape(-1, 4), np.frombuffer(
        data, np.bool_, offset=16 * len(keys)
    )


def test_what_readers_have_offered_to_the_cache_can_be_waited_for(
    learned: tuple[socket.socket, bytes, ServerThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, server = learned
    cold, epochs = server.service.reactors.cold_readers, server.service.store.epochs
    go_on, begun, offer = threading.Event(), threading.Event(), cold_reads._Promoter._offer

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(30)
        offer(*arguments)

    monkeypatch.setattr(cold_reads._Promoter, "_offer", slow)
    with made, ThreadPoolExecutor(1) as thread:
        ask(made, server, [70, 71, 72, 73])
        assert begun.wait(30)
        waiting = thread.submit(epochs.await_offers)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        go_on.set()
        waiting.result(30)
        assert cold.shared["offered"] == 0
    server.stop()
    epochs.await_offers()  # there is nobody to wait for


@pytest.mark.thorough
def test_many_ask_for_cold_rows_at_once_while_the_version_is_switched(
    learned: tuple[socket.socket, bytes, ServerThread], tmp_path: Path
) -> None:
    """Every answer is right, and versions that were left are closed all the same."""
    made, _, server = learned
    made.close()
    store = server.service.store
    expected = {key: store.model("ctr").lookup("item_id", [key])[0] for key in range(100)}
    store.load_snapshot(write_small(tmp_path, "ctr", "item", 2), activate=False)
    wrong = []

    def look_up(seed: int, over: threading.Event) -> None:
        random = np.random.default_rng(seed)
        with connection(server) as mine:
            while not over.is_set():
                keys = random.integers(0, 100, 32)
                rows, found = ask(mine, server, keys.tolist())
                if not found.all() or not all(
                    np.array_equal(rows[i], expected[key]) for i, key in enumerate(keys.tolist())
                ):
                    wrong.append(keys)

    ask_while_versions_change(store, look_up)
    assert not wrong
    eventually(lambda: server.service.inflight.used_bytes == 0, "nothing is held")
