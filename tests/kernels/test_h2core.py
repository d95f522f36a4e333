"""The machine of HTTP/2 beside the package h2 as the client: the same requests, bodies and answers, however frames are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import numpy as np
import pytest

from tierstore.kernels import h2core, h2words
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
        self.session = h2core.begin(most_body, address_of(self._table))
        self._held = b""
        self.now = SECOND
        self.sent = b""
        self.failed = False
        self.events: list[tuple[str, int, bytes]] = []
        self.requests: dict[int, tuple[bytes, bytes]] = {}  # head, body
        self._lend()

    def close(self) -> None:
        h2core.free(self.session)

    def word(self, which: int, at: int | None = None) -> int:
        import ctypes

        return ctypes.c_int64.from_address((self.session if at is None else at) + 8 * which).value

    def _lend(self) -> None:
        h2core.lend(self.session, address_of(self._out), len(self._out))
        self._collect()

    def _collect(self) -> None:
        while n := self.word(h2words.OUT_BYTES):
            self.sent += self._out[:n].tobytes()
            h2core.lend(self.session, address_of(self._out), len(self._out))
            h2core.push_all(self.session)

    def feed(self, data: bytes) -> None:
        import ctypes

        self._held += data
        while not self.failed:
            memory = np.frombuffer(self._held + b"\xaa", np.uint8).copy()
            used, event = h2core.take(
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
                h2core.close_stream(self.session, row)
            elif event == h2words.SENDABLE:
                h2core.push_all(self.session)
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
        row = self._row(stream)
        if not row:
            return False
        head, tail = encode_head(status, headers), b"" if trailers is None else encode(trailers)
        memory = np.frombuffer(head + data + tail + b"\0", np.uint8)
        assert h2core.respond(self.session, row, address_of(memory), len(head), len(data), len(tail), h2words.ENDS)
        h2core.push_all(self.session)
        self._collect()
        return True

    def answer_call(self, stream: int, message: bytes) -> bool:
        row = self._row(stream)
        if not row:
            return False
        memory = np.frombuffer(message + b"\0", np.uint8)
        assert h2core.respond_to_call(self.session, row, address_of(memory), len(message))
        h2core.push_all(self.session)
        self._collect()
        return True

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


class Answers:
    """What a client has got of each stream."""

    def __init__(self) -> None:
        self.heads: dict[int, dict[bytes, bytes]] = {}
        self.bodies: dict[int, bytes] = {}
        self.trailers: dict[int, dict[bytes, bytes]] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.goodbye: int | None = None

    def take(self, peer: h2.connection.H2Connection, data: bytes, credit: bool = True) -> None:
        for event in peer.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.heads[event.stream_id] = dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                if credit:
                    peer.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.TrailersReceived):
                self.trailers[event.stream_id] = dict(event.headers)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.resets[event.stream_id] = event.error_code
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.goodbye = event.error_code


def talk(machine: Machine, peer: h2.connection.H2Connection, answers: Answers, cut: random.Random | None = None) -> None:
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
    for _ in range(40):
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
            replies[stream] = cut.randbytes(cut.choice((0, 1, 20000, 100_000)))
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
        peer.increment_flow_control_window(1, 1)
        machine.feed(peer.data_to_send())
    answers.take(peer, machine.take_sent())
    assert 1 in answers.ended
