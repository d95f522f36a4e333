"""The machine of HTTP/2 beside the package h2 as the client: the same requests, bodies and answers, however frames are cut."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.settings
import numpy as np
import pytest

from tests.h2_answers import Answers
from tierstore.kernels import h2session, h2words
from tierstore.kernels.codec import address_of
from tierstore.service.reactor.hpack import encode, encode_head

SECOND = 1_000_000_000
UNARY = "/inference.GRPCInferenceService/ModelInfer"
STREAMING = b"/inference.GRPCInferenceService/ModelStreamInfer"


class Machine:
    """A session that is fed bytes, keeps what comes of it, and answers when it is told to."""

    def __init__(self, most_body: int = 1 << 20, room: int = 1 << 17) -> None:
        self._path = np.frombuffer(STREAMING, np.uint8)
        self._table = np.array([1, address_of(self._path), len(self._path)], np.int64)
        self._out, self._work = np.zeros(room, np.uint8), np.zeros(h2words.WORK_BYTES, np.uint8)
        self.session = h2session.begin(most_body, address_of(self._table))
        self._held, self._told = b"", np.zeros((h2words.MOST_STREAMS, 2), np.int64)
        self.now = SECOND
        self.sent = b""
        self.failed = False
        self.events: list[tuple[str, int, bytes]] = []
        self.requests: dict[int, tuple[bytes, bytes]] = {}  # head, body
        self._lend()

    def close(self) -> None:
        h2session.free(self.session)

    def word(self, which: int, at: int | None = None) -> int:
        return ctypes.c_int64.from_address((self.session if at is None else at) + 8 * which).value

    def _lend(self) -> None:
        h2session.bind_frames(self.session, address_of(self._out), len(self._out))
        self._collect()

    def _collect(self) -> None:
        while n := self.word(h2words.OUT_BYTES):
            self.sent += self._out[:n].tobytes()
            h2session.bind_frames(self.session, address_of(self._out), len(self._out))
            h2session.push_all(self.session, self._told)

    def feed(self, data: bytes) -> None:
        self._held += data
        while not self.failed:
            memory = np.frombuffer(self._held + b"\xaa", np.uint8).copy()
            used, event = h2session.advance(
                self.session, address_of(memory), len(self._held), address_of(self._work), self.now
            )
            if not used:
                return
            self._held = self._held[used:]
            row = self.word(h2words.EVENT_ROW)
            at, size = self.word(h2words.EVENT_AT), self.word(h2words.EVENT_BYTES)
            stream = self.word(h2words.ID, row) if row else 0
            if event == h2words.REQUEST:
                head = ctypes.string_at(self.word(h2words.AT, row), self.word(h2words.HEAD_BYTES, row))[8:]
                self.requests[stream] = head, ctypes.string_at(at, size)
                self.events.append(("request", stream, b""))
            elif event == h2words.OPENED:
                self.events.append(("opened", stream, b""))
                if self.word(h2words.STATE, row) & h2words.ENDED:
                    self.events.append(("ended", stream, b""))
            elif event == h2words.CAME:
                if size:
                    self.events.append(("data", stream, ctypes.string_at(at, size)))
                if self.word(h2words.STATE, row) & h2words.ENDED:
                    self.events.append(("ended", stream, b""))
            elif event == h2words.RESET:
                self.events.append(("reset", stream, b""))
                h2session.close_stream(self.session, stream, -1)
            elif event == h2words.SENDABLE:
                h2session.push_all(self.session, self._told)
            elif event == h2words.FAILED:
                self.failed = True
            self._collect()

    def _row(self, stream: int) -> int:
        at = self.word(h2words.STREAMS_AT)
        for k in range(self.word(h2words.STREAMS_ROOM)):
            row = at + 8 * h2words.STREAM_WORDS * k
            if self.word(h2words.ID, row) == stream:
                return row
        return 0

    def answer(self, stream: int, status: int, headers: Any, data: bytes, trailers: Any = None) -> bool:
        head, tail = encode_head(status, headers), b"" if trailers is None else encode(trailers)
        memory = np.frombuffer(head + data + tail + b"\0", np.uint8)
        places = np.array([(address_of(memory), len(memory) - 1)], np.int64)
        made = h2session.respond(self.session, stream, places, len(head), len(data), len(tail), h2words.ENDS)
        h2session.push_all(self.session, self._told)
        self._collect()
        return bool(made)

    def answer_call(self, stream: int, message: bytes) -> bool:
        memory = np.frombuffer(message + b"\0", np.uint8)
        made = h2session.respond_to_call(self.session, stream, address_of(memory), len(message))
        h2session.push_all(self.session, self._told)
        self._collect()
        return bool(made)

    def take_sent(self) -> bytes:
        data, self.sent = self.sent, b""
        return data


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()


def client(**settings: Any) -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
    made.local_settings = h2.settings.Settings(client=True, initial_values=settings.get("initial"))
    made.initiate_connection()
    return made


def first_bytes(peer: h2.connection.H2Connection) -> bytes:
    data = peer.data_to_send()
    assert data.startswith(h2words.PREFACE.tobytes())
    return data[len(h2words.PREFACE) :]


def headers(path: str = UNARY, **more: str) -> list[tuple[str, str]]:
    return [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost:8000"),
        ("content-type", "application/grpc"), ("te", "trailers"), *((name.replace("_", "-"), value) for name, value in more.items()),
    ]  # fmt: skip


def talk(
    machine: Machine, peer: h2.connection.H2Connection, answers: Answers, cut: random.Random | None = None
) -> None:
    """Move bytes both ways until neither has any."""
    while data := peer.data_to_send():
        while data:
            n = len(data) if cut is None else cut.choice((1, 2, 9, 10, 100, 5000, len(data)))
            machine.feed(data[:n])
            data = data[n:]
        answers.take(peer, machine.take_sent())


def begin(machine: Machine, peer: h2.connection.H2Connection) -> Answers:
    answers = Answers()
    machine.feed(first_bytes(peer))
    answers.take(peer, machine.take_sent())
    talk(machine, peer, answers)
    return answers


def test_a_request_comes_with_its_head_and_its_body(machine: Machine) -> None:
    peer = client()
    answers = begin(machine, peer)
    peer.send_headers(1, headers(x_request_id="a:b", grpc_timeout="20S"))
    peer.send_data(1, b"\0\0\0\0\3abc", end_stream=True)
    talk(machine, peer, answers)
    head, body = machine.requests[1]
    assert head == (
        b"POST " + UNARY.encode() + b"\nlocalhost:8000\ncontent-type:application/grpc\nte:trailers\n"
        b"x-request-id:a:b\ngrpc-timeout:20S\n"
    )
    assert body == b"\0\0\0\0\3abc"
    machine.answer_call(1, b"done")
    answers.take(peer, machine.take_sent())
    assert answers.heads[1] == {b":status": b"200", b"content-type": b"application/grpc"}
    assert answers.bodies[1] == b"\0\0\0\0\4done"
    assert answers.trailers[1] == {b"grpc-status": b"0"}
    assert 1 in answers.ended


def test_a_method_that_streams_is_told_as_it_comes(machine: Machine) -> None:
    peer = client()
    answers = begin(machine, peer)
    peer.send_headers(1, headers(STREAMING.decode()))
    peer.send_data(1, b"one")
    talk(machine, peer, answers)
    peer.send_data(1, b"two", end_stream=True)
    talk(machine, peer, answers)
    assert machine.events == [("opened", 1, b""), ("data", 1, b"one"), ("data", 1, b"two"), ("ended", 1, b"")]


@pytest.mark.parametrize("seed", range(8))
def test_exchanges_are_as_the_reference_has_them_however_they_are_cut(seed: int) -> None:
    cut = random.Random(seed)
    for _ in range(20):
        machine, peer = Machine(room=cut.choice((1024, 1 << 14, 1 << 17))), client()
        answers = begin(machine, peer)
        window = cut.choice((0, 1, 100, 65535, 1 << 20))
        peer.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        if cut.random() < 0.3:
            peer.update_settings({h2.settings.SettingCodes.MAX_FRAME_SIZE: cut.choice((16384, 70000))})
        talk(machine, peer, answers, cut)
        sent: dict[int, bytes] = {}
        replies: dict[int, bytes] = {}
        reset: set[int] = set()
        waiting: dict[int, bytes] = {}
        for k in range(cut.randrange(1, 12)):
            stream = 2 * k + 1
            body = cut.randbytes(cut.choice((0, 1, 5, 1000, 16384, 60000)))
            sent[stream] = body
            peer.send_headers(
                stream,
                headers(x_request_id="r" * cut.randrange(30), user_agent=cut.choice(("a", "b" * 300))),
                end_stream=not body,
            )
            waiting[stream] = body
            while waiting and cut.random() < 0.8:
                which = cut.choice(list(waiting))
                room = min(peer.local_flow_control_window(which), peer.max_outbound_frame_size, len(waiting[which]))
                n = min(cut.choice((0, 1, 3000, 16384)), room)
                part, waiting[which] = waiting[which][:n], waiting[which][n:]
                if sent[which]:
                    padding = cut.choice((None, None, 7)) if n + 8 < room else None
                    peer.send_data(which, part, end_stream=not waiting[which], pad_length=padding)
                if not waiting[which]:
                    del waiting[which]
                if cut.random() < 0.3:
                    talk(machine, peer, answers, cut)
            if cut.random() < 0.1:
                peer.reset_stream(stream, 8)
                reset.add(stream)
                waiting.pop(stream, None)
        for which, body in waiting.items():
            if sent[which]:
                for at in range(0, len(body), 9000):
                    peer.send_data(which, body[at : at + 9000], end_stream=at + 9000 >= len(body))
        talk(machine, peer, answers, cut)
        for stream, body in sent.items():
            if stream in reset:
                continue
            assert machine.requests[stream][1] == body
            replies[stream] = cut.randbytes(cut.choice((0, 1, 300) if window <= 100 else (0, 1, 20000, 100_000)))
            assert machine.answer_call(stream, replies[stream])
        answers.take(peer, machine.take_sent())
        for _ in range(10000):  # windows of one byte too
            talk(machine, peer, answers, cut)
            if len(answers.ended) == len(replies):
                break
            if window <= 100:
                window = 1 << 20
                peer.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        assert not machine.failed
        for stream, reply in replies.items():
            assert answers.bodies[stream] == b"\0" + len(reply).to_bytes(4, "big") + reply
            assert answers.trailers[stream] == {b"grpc-status": b"0"}
        assert machine.word(h2words.OPEN) == 0
        assert machine.word(h2words.HELD) == 0
        assert machine.word(h2words.WAITING) == 0
        machine.close()


def test_a_window_of_one_byte_lets_one_byte_leave_at_a_time(machine: Machine) -> None:
    peer = client(initial={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1})
    answers = begin(machine, peer)
    peer.send_headers(1, headers(), end_stream=True)
    talk(machine, peer, answers)
    machine.answer_call(1, b"abcdef")
    for expected in range(1, 12):
        data = machine.take_sent()
        answers.take(peer, data, credit=False)
        assert len(answers.bodies[1]) == expected
        if 1 in answers.ended:
            break
        peer.increment_flow_control_window(1, 1)
        machine.feed(peer.data_to_send())
    assert answers.bodies[1] == b"\0\0\0\0\6abcdef"
    assert 1 in answers.ended


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


SETTINGS = frame(h2words.SETTINGS, 0, 0)
HEAD = encode([
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", UNARY.encode()), (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
])  # fmt: skip
REQUEST = frame(h2words.HEADERS, 5, 1, HEAD)


def goodbye(sent: bytes) -> int | None:
    """The error of the GOAWAY in what a machine has sent."""
    while sent:
        size, kind = int.from_bytes(sent[:3], "big"), sent[3]
        if kind == h2words.GOAWAY:
            return int.from_bytes(sent[13:17], "big")
        sent = sent[9 + size :]
    return None


def reset_of(sent: bytes, stream: int) -> int | None:
    """The error of a stream's RST_STREAM in what a machine has sent."""
    while sent:
        size, kind = int.from_bytes(sent[:3], "big"), sent[3]
        if kind == h2words.RST_STREAM and int.from_bytes(sent[5:9], "big") == stream:
            return int.from_bytes(sent[9:13], "big")
        sent = sent[9 + size :]
    return None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (REQUEST, h2words.PROTOCOL_ERROR),  # before SETTINGS
        (SETTINGS + frame(h2words.SETTINGS, 0, 1), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.SETTINGS, 1, 0, b"x"), h2words.FRAME_SIZE_ERROR),
        (frame(h2words.SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"), h2words.FLOW_CONTROL_ERROR),
        (frame(h2words.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.DATA, 0, 0, b"x"), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.DATA, 0, 3, b"x"), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.HEADERS, 5, 2, HEAD), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.HEADERS, 5, 1, b"\xff\xff\xff\xff\xff\xff"), h2words.COMPRESSION_ERROR),
        (SETTINGS + frame(h2words.HEADERS, 0xD, 1, b"\xff" + HEAD[:20]), h2words.PROTOCOL_ERROR),  # padding
        (SETTINGS + frame(h2words.CONTINUATION, 4, 1, HEAD), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.HEADERS, 1, 1, HEAD) + frame(h2words.PING, 0, 0, b"12345678"), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.PING, 0, 0, b"1234567"), h2words.FRAME_SIZE_ERROR),
        (SETTINGS + frame(h2words.RST_STREAM, 0, 1, b"\0\0\0\0"), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), h2words.FLOW_CONTROL_ERROR),
        (SETTINGS + frame(h2words.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), h2words.PROTOCOL_ERROR),
        (SETTINGS + frame(h2words.PING, 0, 0, b"x" * 16385), h2words.FRAME_SIZE_ERROR),
        (SETTINGS + REQUEST + frame(h2words.HEADERS, 5, 3, HEAD) + frame(h2words.HEADERS, 5, 1, HEAD), None),
    ],
)  # fmt: skip
def test_an_error_of_the_connection_ends_it(machine: Machine, data: bytes, error: int | None) -> None:
    machine.feed(data)
    assert machine.failed == (error is not None)
    assert goodbye(machine.take_sent()) == error


@pytest.mark.parametrize(
    "fields",
    [
        [(b":method", b"GET"), (b":scheme", b"http")],
        [(b":method", b"GET"), (b":path", b"/")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":path", b"/")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":status", b"200")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b"a", b"b"), (b":path", b"/")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"te", b"gzip")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"content-length", b"7")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"a", b"b\n:c")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/\nx"), (b"a", b"b")],
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a"), (b"host", b"b")],
        [(b":method", b"G T"), (b":scheme", b"http"), (b":path", b"/")],
    ],
)
def test_a_malformed_head_resets_its_stream(machine: Machine, fields: list[tuple[bytes, bytes]]) -> None:
    machine.feed(SETTINGS + frame(h2words.HEADERS, 5, 1, encode(fields)) + frame(h2words.HEADERS, 5, 3, HEAD))
    sent = machine.take_sent()
    assert reset_of(sent, 1) == h2words.PROTOCOL_ERROR
    assert list(machine.requests) == [3]
    assert machine.word(h2words.OPEN) == 1


def test_no_more_streams_are_open_at_a_time_than_are_announced(machine: Machine) -> None:
    heads = [frame(h2words.HEADERS, 4, 2 * k + 1, HEAD) for k in range(h2words.MOST_STREAMS + 1)]
    machine.feed(SETTINGS + b"".join(heads))
    assert machine.word(h2words.OPEN) == h2words.MOST_STREAMS
    assert reset_of(machine.take_sent(), 2 * h2words.MOST_STREAMS + 1) == h2words.REFUSED_STREAM


def test_streams_that_are_begun_and_reset_in_flood_end_the_connection(machine: Machine) -> None:
    machine.feed(SETTINGS)
    for k in range(h2words.MOST_RESETS + 1):
        assert not machine.failed
        machine.feed(
            frame(h2words.HEADERS, 4, 2 * k + 1, HEAD) + frame(h2words.RST_STREAM, 0, 2 * k + 1, b"\0\0\0\x08")
        )
    assert goodbye(machine.take_sent()) == h2words.ENHANCE_YOUR_CALM


def test_resets_of_another_second_do_not_count(machine: Machine) -> None:
    machine.feed(SETTINGS)
    for k in range(h2words.MOST_RESETS + 10):
        machine.now += SECOND // 100
        machine.feed(
            frame(h2words.HEADERS, 4, 2 * k + 1, HEAD) + frame(h2words.RST_STREAM, 0, 2 * k + 1, b"\0\0\0\x08")
        )
    assert not machine.failed


@pytest.mark.parametrize(
    "one",
    [
        frame(h2words.PING, 0, 0, b"12345678"), SETTINGS, frame(h2words.PRIORITY, 0, 5, b"\0\0\0\0\1"), frame(77, 0, 0, b"?"),
        frame(h2words.DATA, 0, 1),
    ],
    ids=["ping", "settings", "priority", "unknown", "empty data"],
)  # fmt: skip
def test_frames_of_control_in_flood_end_the_connection(machine: Machine, one: bytes) -> None:
    machine.feed(SETTINGS + frame(h2words.HEADERS, 4, 1, HEAD))
    for _ in range(h2words.MOST_CONTROLS // 100 + 1):
        machine.feed(one * 100)
    assert goodbye(machine.take_sent()) == h2words.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("part", [b"", b"\0\1a\1b", b"\0\1a" + b"\x7f\xf0\x0f" + b"x" * 2159])
def test_a_header_block_without_end_ends_the_connection(machine: Machine, part: bytes) -> None:
    machine.feed(SETTINGS + frame(h2words.HEADERS, 0, 1, HEAD))
    for _ in range(h2words.MOST_CONTINUATIONS + 1):
        machine.feed(frame(h2words.CONTINUATION, 0, 1, part))
    assert goodbye(machine.take_sent()) == h2words.ENHANCE_YOUR_CALM


def test_a_header_list_that_is_too_large_is_refused_and_the_table_goes_on(machine: Machine) -> None:
    peer = client()
    answers = begin(machine, peer)
    for k in range(6):
        peer.send_headers(2 * k + 1, [*headers(), *((f"name{i}", "v" * 3000) for i in range(6))], end_stream=True)
        talk(machine, peer, answers)
        assert answers.heads[2 * k + 1] == {b":status": b"431"}
    peer.send_headers(21, headers(x_request_id="last"), end_stream=True)
    talk(machine, peer, answers)
    assert machine.requests[21][0].endswith(b"x-request-id:last\n")


def test_a_body_beyond_the_limit_is_dropped_and_told(machine: Machine) -> None:
    peer = client()
    answers = begin(machine, peer)
    peer.send_headers(1, headers())
    talk(machine, peer, answers)
    for _ in range(70):
        peer.send_data(1, b"x" * 16384)
        talk(machine, peer, answers)
    assert machine.events == [("request", 1, b"")]
    assert machine.requests[1][1] == b""
    assert machine.word(h2words.HELD) < 1000
    machine.answer(1, 413, [(b"content-length", b"0")], b"")
    answers.take(peer, machine.take_sent())
    assert answers.heads[1][b":status"] == b"413"
    assert answers.resets == {1: h2words.NO_ERROR}
    assert machine.word(h2words.OPEN) == 0


def test_more_than_the_window_is_an_error(machine: Machine) -> None:
    machine.feed(SETTINGS + frame(h2words.HEADERS, 4, 1, HEAD))
    row = machine._row(1)
    ctypes.c_int64.from_address(row + 8 * h2words.RECEIVE).value = 5
    machine.feed(frame(h2words.DATA, 0, 1, b"123456"))
    assert reset_of(machine.take_sent(), 1) == h2words.FLOW_CONTROL_ERROR


def test_every_mutation_of_an_exchange_ends_well_or_with_an_error() -> None:
    peer = client()
    first = first_bytes(peer)
    for k in range(5):
        peer.send_headers(2 * k + 1, headers(x_request_id="abc", grpc_timeout="1S"), end_stream=k % 2 == 0)
        if k % 2:
            peer.send_data(2 * k + 1, b"\0\0\0\0\5hello", end_stream=True)
    data = first + peer.data_to_send()
    change = random.Random(5)
    for _ in range(600):
        machine = Machine()
        changed = bytearray(data)
        for _ in range(change.choice((1, 1, 2, 8))):
            changed[change.randrange(len(changed))] = change.choice((0, 1, 4, 255, change.randrange(256)))
        machine.feed(bytes(changed[: change.choice((len(changed), change.randrange(len(changed))))]))
        for stream in list(machine.requests):
            machine.answer_call(stream, b"x" * 100)
        machine.close()


def test_trailers_under_way_to_a_stream_that_was_answered_end_nothing_else(machine: Machine) -> None:
    machine.feed(SETTINGS + frame(h2words.HEADERS, 4, 1, HEAD))
    assert machine.answer(1, 200, [], b"early")
    trailers = encode([(b"checksum", b"1")])
    machine.feed(frame(h2words.HEADERS, 5, 1, trailers) + frame(h2words.HEADERS, 5, 3, HEAD))
    assert not machine.failed
    assert list(machine.requests) == [3]


@pytest.mark.parametrize(
    ("timeout", "expected_ms"),
    [("1n", 1), ("5S", 5000), ("99999999H", 99_999_999 * 3_600_000), ("3m", 3), ("2u", 1), ("1H", 3_600_000)],
)
def test_a_timeout_is_read_in_its_unit(machine: Machine, timeout: str, expected_ms: int) -> None:
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", UNARY.encode()), (b"content-type", b"application/grpc"),
        (b"grpc-timeout", timeout.encode()),
    ]  # fmt: skip
    machine.feed(SETTINGS + frame(h2words.HEADERS, 4, 1, encode(fields)))
    assert machine.word(h2words.TIMEOUT_MS, machine._row(1)) == min(expected_ms, 1 << 40)


def test_of_a_window_that_is_set_more_than_once_the_last_holds(machine: Machine) -> None:
    machine.feed(SETTINGS + frame(h2words.HEADERS, 5, 1, HEAD))
    machine.feed(frame(h2words.SETTINGS, 0, 0, b"\0\4\0\0\0\0" + b"\0\4\0\0\0\7"))
    assert machine.word(h2words.WINDOW, machine._row(1)) == 7
