"""HTTP/2 clients that flood, stall, withhold or cut: they are ended or bounded, and others are answered as before."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hpack
import pytest

from tests.certificates import Authority
from tests.service import http2_client as h2
from tests.service.conftest import eventually, settings_for
from tests.service.fake_store import FakeStore
from tierstore.service.limits import slow_clients
from tierstore.service.server import ServerThread
from tierstore.wire.http2 import layout as http2_layout

ARRIVAL_S = 1.5
KEYS = 40_000
LIVE, ABOUT, LONG, INFER = "/v2/health/live", "/v2", "/openapi.json", "/v2/models/ctr/infer"
LOOK_UP = b'{"inputs":[{"name":"item_id","datatype":"INT64","shape":[1],"data":[7]}]}'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A server that waits for its clients a short time only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_clients, "STALL_S", 1.0)
        store = FakeStore(
            settings_for(tmp_path_factory.mktemp("http2"), arrival_timeout_s=ARRIVAL_S, idle_timeout_s=60)
        )
        with ServerThread(store) as server:  # type: ignore[arg-type]
            eventually(lambda: serves_http2(server), "reactors have begun")
            yield server


@pytest.fixture(scope="module")
def served_with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerThread, Path]]:
    """Another with TLS, and the authority of its certificate."""
    root = tmp_path_factory.mktemp("http2-tls")
    (root / "certificates").mkdir()
    authority = Authority(root / "certificates")
    own = authority.issue("service")
    settings = settings_for(root, tls_cert=own.cert, tls_key=own.key, arrival_timeout_s=ARRIVAL_S)
    with ServerThread(FakeStore(settings)) as server:  # type: ignore[arg-type]
        yield server, authority.ca


def serves_http2(server: ServerThread) -> bool:
    with h2.Client(server.port) as client:
        return client.next() is not None


@pytest.fixture(autouse=True)
def _others_are_served(served: ServerThread) -> Iterator[None]:
    """Whatever a test does: afterwards nothing is held, and a request is answered at once."""
    yield
    with h2.Client(served.port) as client:
        client.send(h2.get(1, LIVE))
        assert client.answer(1)[0][":status"] == "200"
    eventually(lambda: served.service.inflight.used_bytes == 0, "nothing is held")


def ended_with(client: h2.Client) -> int | None:
    """The error code with which the server ended a connection; None where what it had to say was dropped with what was not read."""
    came = client.until(h2.GOAWAY)
    while client.next() is not None:
        pass
    return None if came is None else came.code


def opened(*streams: int, method: str = "POST") -> bytes:
    """Requests that do not end."""
    return b"".join(h2.frame(h2.HEADERS, h2.END_HEADERS, stream, h2.head(ABOUT, method)) for stream in streams)


def large_look_up(stream: int) -> bytes:
    """A look-up whose answer has 640,000 bytes."""
    tensor = {"name": "item_id", "datatype": "INT64", "shape": [KEYS], "parameters": {"binary_data_size": 8 * KEYS}}
    wanted = [{"name": "item_id", "parameters": {"binary_data": True}}]
    document = json.dumps({"inputs": [tensor], "outputs": wanted}).encode()
    body = document + bytes(8 * KEYS)
    parts = [body[at : at + http2_layout.FRAME_BYTES] for at in range(0, len(body), http2_layout.FRAME_BYTES)]
    fields = h2.head(INFER, "POST", ("inference-header-content-length", str(len(document))))
    return h2.frame(h2.HEADERS, h2.END_HEADERS, stream, fields) + b"".join(
        h2.frame(h2.DATA, h2.END_STREAM if number == len(parts) else 0, stream, part)
        for number, part in enumerate(parts, 1)
    )


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (b"", h2.settings()),
        (b"", h2.frame(h2.SETTINGS, h2.ACK)),
        (b"", h2.frame(h2.PING, payload=bytes(8))),
        (b"", h2.frame(h2.PING, h2.ACK, payload=bytes(8))),
        (b"", h2.frame(h2.PRIORITY, 0, 1, struct.pack(">IB", 0, 1))),
        (b"", h2.frame(99, 0, 0, b"unheard of")),
        (b"", h2.frame(h2.GOAWAY, 0, 0, bytes(8))),
        (opened(1), h2.frame(h2.DATA, 0, 1)),
        (opened(1) + h2.reset(1), h2.frame(h2.DATA, 0, 1, b"late")),
        (h2.frame(h2.HEADERS, 0, 1, h2.head(LIVE)), h2.frame(h2.CONTINUATION, 0, 1)),
        (h2.frame(h2.HEADERS, 0, 1, h2.head(LIVE)), h2.frame(h2.CONTINUATION, 0, 1, h2.block([("x", "y" * 16000)]))),
    ],
    ids=["settings", "acks", "pings", "answers to no ping", "priorities", "unknown", "goaways", "empty data", "data for nobody",
         "continuations", "a head without an end"],
)  # fmt: skip
def test_a_flood_of_small_frames_ends_its_connection(served: ServerThread, before: bytes, message: bytes) -> None:
    with h2.Client(served.port) as client:
        client.send(before)
        ended: list[bool] = []
        thread = threading.Thread(
            target=lambda: ended.append(client.send_until_ended(message * 100, 1 << 27)), daemon=True
        )
        thread.start()
        assert ended_with(client) in (h2.ENHANCE_YOUR_CALM, None)
        thread.join(h2.DEADLINE_S)
        assert ended == [True]


def test_requests_that_are_taken_back_at_once_end_their_connection(served: ServerThread) -> None:
    with h2.Client(served.port) as client:
        for stream in range(1, 1 << 17, 2):
            client.send(h2.get(stream, ABOUT) + h2.reset(stream))
            if client.has_ended():
                break
        assert ended_with(client) in (h2.ENHANCE_YOUR_CALM, None)
    assert stream < 2 * 20 * http2_layout.MOST_RESETS


def test_a_client_may_take_back_now_and_then(served: ServerThread) -> None:
    with h2.Client(served.port) as client:
        for stream in range(1, 400, 2):
            client.send(h2.get(stream, ABOUT) + h2.reset(stream))
        assert client.is_alive()


def test_no_more_streams_are_begun_than_were_announced(served: ServerThread) -> None:
    most = http2_layout.MOST_STREAMS
    with h2.Client(served.port) as client:
        client.send(opened(*range(1, 2 * most, 2)), h2.get(2 * most + 1, ABOUT))
        came = client.until(h2.RST_STREAM)
        assert came is not None
        assert (came.stream, came.code) == (2 * most + 1, h2.REFUSED_STREAM)
        client.send(h2.frame(h2.DATA, h2.END_STREAM, 1))
        assert client.answer(1)[0][":status"] in ("404", "405")
        client.send(h2.get(2 * most + 3, ABOUT))  # in its place
        assert client.answer(2 * most + 3)[0][":status"] == "200"


def test_requests_that_do_not_end_are_reset_and_their_connection_lives(served: ServerThread) -> None:
    with h2.Client(served.port) as client:
        client.send(opened(1, 3, 5))
        resets = [client.until(h2.RST_STREAM, timeout_s=10 * ARRIVAL_S) for _ in range(3)]
        assert {came.stream for came in resets if came} == {1, 3, 5}
        client.send(h2.get(7, ABOUT))
        assert client.answer(7)[0][":status"] == "200"


@pytest.mark.parametrize("cut", [h2.PREFACE[:10], h2.PREFACE + h2.settings()[:5], h2.PREFACE + h2.settings() + h2.get(1, LIVE)[:-1],
                                 h2.PREFACE + h2.settings() + h2.frame(h2.HEADERS, 0, 1, h2.head(LIVE))])  # fmt: skip
def test_what_is_cut_off_has_a_deadline(served: ServerThread, cut: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20 * ARRIVAL_S) as made:
        made.sendall(cut)
        try:
            while made.recv(1 << 16):
                pass
        except ConnectionError:
            pass  # the end all the same; a timeout is not


@pytest.mark.parametrize("with_tls", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_busy_connection_outlives_the_time_for_one_request(
    served: ServerThread, served_with_tls: tuple[ServerThread, Path], with_tls: bool
) -> None:
    """Each part that comes ends within a frame, as large reads of a busy connection do."""
    port, ca = (served_with_tls[0].port, served_with_tls[1]) if with_tls else (served.port, None)
    with h2.Client(port, ca=ca) as client:
        until, stream, late = time.monotonic() + 2 * ARRIVAL_S, 1, b""
        while time.monotonic() < until:
            message = late + h2.frame(h2.HEADERS, h2.END_HEADERS, stream, h2.head(INFER, "POST"))
            message += h2.frame(h2.DATA, h2.END_STREAM, stream, LOOK_UP)
            following = h2.frame(h2.PING, payload=bytes(8))
            client.send(message + following[:5])
            late = following[5:]
            time.sleep(0.005)
            assert client.answer(stream)[0][":status"] == "200"
            stream += 2


def test_trailers_that_come_after_an_early_answer_do_no_harm(served: ServerThread) -> None:
    with h2.Client(served.port) as client:
        client.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.head(INFER, "POST", ("content-length", "999999999"))))
        assert client.answer(1)[0][":status"] == "413"
        client.send(
            h2.frame(h2.DATA, 0, 1, b"x" * 100),
            h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, h2.block([("a", "b")])),
        )
        client.send(h2.get(3, ABOUT))
        assert client.answer(3)[0][":status"] == "200"


def test_a_window_of_one_byte_at_a_time_is_enough(served: ServerThread) -> None:
    with h2.Client(served.port, h2.settings((h2.INITIAL_WINDOW_SIZE, 1))) as client:
        client.send(h2.get(1, ABOUT))
        body, came = b"", client.until(h2.DATA)
        while came is not None and not came.ends:
            assert len(came.payload) == 1
            body += came.payload
            client.send(h2.credit(1, 1))
            came = client.until(h2.DATA)
        assert came is not None
        body += came.payload
        client.send(h2.settings((h2.INITIAL_WINDOW_SIZE, h2.FIRST_WINDOW)), h2.get(3, ABOUT))
        assert client.answer(3)[1] == body


def test_an_answer_whose_window_stays_shut_is_reset_and_let_go(served: ServerThread) -> None:
    with h2.Client(served.port, h2.settings((h2.INITIAL_WINDOW_SIZE, 0))) as client:
        streams = range(1, 2 * http2_layout.MOST_STREAMS, 2)
        client.send(*(h2.get(stream, LONG) for stream in streams))
        eventually(lambda: served.service.inflight.used_bytes > 1 << 20, "answers that cannot leave are counted")
        resets = [client.until(h2.RST_STREAM) for _ in streams]
        assert {came.stream for came in resets if came} == set(streams)
        eventually(lambda: served.service.inflight.used_bytes == 0, "nothing is held")
        assert client.is_alive()


def test_a_client_that_does_not_read_is_ended_and_holds_nothing(served: ServerThread) -> None:
    with h2.Client(served.port, h2.settings((h2.INITIAL_WINDOW_SIZE, h2.MOST_WINDOW)), receive_buffer=4096) as client:
        client.send(*(large_look_up(stream) for stream in range(1, 2 * 24, 2)))
        eventually(lambda: served.service.inflight.used_bytes > 1 << 20, "answers that nobody reads are counted")
        eventually(lambda: served.service.inflight.used_bytes == 0, "nothing is held")
        with pytest.raises(OSError):  # noqa: PT012 - whichever of them finds out
            for _ in range(1000):
                client.send(h2.frame(h2.PING, payload=bytes(8)))
                time.sleep(0.01)


def test_a_list_of_fields_that_is_too_large_is_refused_and_the_table_stays_right(served: ServerThread) -> None:
    encoder = hpack.Encoder()
    fields = [(":method", "GET"), (":scheme", "http"), (":path", ABOUT), (":authority", "localhost")]
    with h2.Client(served.port) as client:
        large = encoder.encode([*fields, ("x-one", "1" * 3000), *[("x-two", "2" * 500)] * 40], huffman=False)
        assert len(large) < http2_layout.FRAME_BYTES
        client.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, large))
        assert client.answer(1)[0][":status"] == "431"
        again = encoder.encode([*fields, ("x-two", "2" * 500)])
        assert len(again) < 20  # by its entries alone
        client.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 3, again))
        assert client.answer(3)[0][":status"] == "200"


@pytest.mark.parametrize("way", ["reset", "gone"])
def test_a_client_that_goes_while_python_answers_holds_nothing(served: ServerThread, way: str) -> None:
    gate = served.service.store.model("ctr").gate  # type: ignore[attr-defined]
    gate.clear()
    try:
        with h2.Client(served.port) as client:
            client.send(
                h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.head(INFER, "POST")),
                h2.frame(h2.DATA, h2.END_STREAM, 1, LOOK_UP),
            )
            eventually(lambda: served.service.inflight.used_bytes, "the request is Python's")
            if way == "reset":
                client.send(h2.reset(1), h2.get(3, LIVE))
                assert client.answer(3)[0][":status"] == "200"
    finally:
        gate.set()
    eventually(lambda: served.service.inflight.used_bytes == 0, "nothing is held")


def test_random_frames_harm_nobody(served: ServerThread) -> None:
    rng = random.Random(11)
    right = [h2.get(1, ABOUT), opened(3), h2.frame(h2.DATA, h2.END_STREAM, 3, b"{}"), h2.settings((h2.INITIAL_WINDOW_SIZE, 10)),
             h2.credit(0, 5), h2.credit(1, 100_000), h2.reset(3), h2.frame(h2.PING, payload=bytes(8)),
             h2.frame(h2.HEADERS, 0, 5, h2.head(LIVE)), h2.frame(h2.CONTINUATION, h2.END_HEADERS, 5, b"")]  # fmt: skip
    for _ in range(300):
        message = bytearray(b"".join(rng.choice(right) for _ in range(rng.randint(1, 8))))
        for _ in range(rng.choice([0, 1, 1, 3, 10])):
            message[rng.randrange(len(message))] = rng.randrange(256)
        with h2.Client(served.port) as client:
            client.send(bytes(message[: rng.choice([len(message), rng.randrange(len(message) + 1)])]))


def test_a_stop_lets_an_answer_end_and_begins_no_more(tmp_path: Path) -> None:
    store = FakeStore(settings_for(tmp_path))
    gate = store.model("ctr").gate
    gate.clear()
    with ServerThread(store) as server:  # type: ignore[arg-type]
        eventually(lambda: serves_http2(server), "reactors have begun")
        with h2.Client(server.port) as client:
            client.send(
                h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.head(INFER, "POST")),
                h2.frame(h2.DATA, h2.END_STREAM, 1, LOOK_UP),
            )
            eventually(lambda: server.service.inflight.used_bytes, "the request is Python's")
            server.stop()
            came = client.until(h2.GOAWAY)
            assert came is not None
            assert (came.payload[:4], came.code) == (struct.pack(">I", 1), h2.NO_ERROR)
            client.send(h2.get(3, ABOUT))
            refused = client.until(h2.RST_STREAM, h2.HEADERS)
            assert refused is not None
            assert (refused.kind, refused.stream, refused.code) == (h2.RST_STREAM, 3, h2.REFUSED_STREAM)
            gate.set()
            assert client.answer(1)[0][":status"] == "200"
            assert client.next() is None
