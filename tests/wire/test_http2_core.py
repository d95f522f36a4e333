"""The machine of HTTP/2 beside the package h2 as the client: the same requests, bodies and answers, however frames are cut."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.settings
import pytest

from tests.h2_answers import Answers
from tests.h2_machine import SECOND, STREAMING, UNARY, Machine
from tierstore.service.reactor.hpack import encode
from tierstore.wire.http2 import layout as http2_layout
from tools.fuzz_http2 import Fuzzer

COUNT = int(os.environ.get("HTTP2_EXCHANGES", 1500))


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
    assert data.startswith(http2_layout.PREFACE.tobytes())
    return data[len(http2_layout.PREFACE) :]


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
    head = b"POST " + STREAMING + b"\nlocalhost:8000\ncontent-type:application/grpc\nte:trailers\n"
    assert machine.events == [
        ("opened", 1, head),
        ("data", 1, b"one"),
        ("data", 1, b"two"),
        ("ended", 1, b""),
    ]


def test_exchanges_are_as_the_reference_has_them_however_they_are_cut() -> None:
    fuzzer = Fuzzer(int(os.environ.get("HTTP2_SEED", 7)))
    fuzzer.run(COUNT)
    assert fuzzer.different == []
    for kind in ("both well", "both refuse", "refused as they have to be", "reset by the client"):
        assert fuzzer.counts[kind] > COUNT // 400, fuzzer.counts


@pytest.mark.parametrize("late", [False, True], ids=["at first", "later"])
def test_a_client_whose_table_is_smaller_is_told_that_none_is_used(machine: Machine, late: bool) -> None:
    """The package h2 ends a connection whose next header block does not begin with that."""
    peer = client(initial={} if late else {h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
    answers = begin(machine, peer)
    for stream, size in ((1, 100), (3, 50), (5, 4096), (7, 0)):
        if late:
            peer.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: size})
        peer.send_headers(stream, headers(), end_stream=True)
        talk(machine, peer, answers)
        machine.answer_call(stream, b"done")
        answers.take(peer, machine.take_sent())
        assert answers.trailers[stream] == {b"grpc-status": b"0"}


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


SETTINGS = frame(http2_layout.SETTINGS, 0, 0)
HEAD = encode([
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", UNARY.encode()), (b":authority", b"localhost"),
    (b"content-type", b"application/grpc"),
])  # fmt: skip
REQUEST = frame(http2_layout.HEADERS, 5, 1, HEAD)


def goodbye(sent: bytes) -> int | None:
    """The error of the GOAWAY in what a machine has sent."""
    while sent:
        size, kind = int.from_bytes(sent[:3], "big"), sent[3]
        if kind == http2_layout.GOAWAY:
            return int.from_bytes(sent[13:17], "big")
        sent = sent[9 + size :]
    return None


def reset_of(sent: bytes, stream: int) -> int | None:
    """The error of a stream's RST_STREAM in what a machine has sent."""
    while sent:
        size, kind = int.from_bytes(sent[:3], "big"), sent[3]
        if kind == http2_layout.RST_STREAM and int.from_bytes(sent[5:9], "big") == stream:
            return int.from_bytes(sent[9:13], "big")
        sent = sent[9 + size :]
    return None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (REQUEST, http2_layout.PROTOCOL_ERROR),  # before SETTINGS
        (SETTINGS + frame(http2_layout.SETTINGS, 0, 1), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.SETTINGS, 1, 0, b"x"), http2_layout.FRAME_SIZE_ERROR),
        (frame(http2_layout.SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"), http2_layout.FLOW_CONTROL_ERROR),
        (frame(http2_layout.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.DATA, 0, 0, b"x"), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.DATA, 0, 3, b"x"), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.HEADERS, 5, 2, HEAD), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.HEADERS, 5, 1, b"\xff\xff\xff\xff\xff\xff"), http2_layout.COMPRESSION_ERROR),
        (SETTINGS + frame(http2_layout.HEADERS, 0xD, 1, b"\xff" + HEAD[:20]), http2_layout.PROTOCOL_ERROR),  # padding
        (SETTINGS + frame(http2_layout.CONTINUATION, 4, 1, HEAD), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.HEADERS, 1, 1, HEAD) + frame(http2_layout.PING, 0, 0, b"12345678"), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.PING, 0, 0, b"1234567"), http2_layout.FRAME_SIZE_ERROR),
        (SETTINGS + frame(http2_layout.RST_STREAM, 0, 1, b"\0\0\0\0"), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), http2_layout.FLOW_CONTROL_ERROR),
        (SETTINGS + frame(http2_layout.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), http2_layout.PROTOCOL_ERROR),
        (SETTINGS + frame(http2_layout.PING, 0, 0, b"x" * 16385), http2_layout.FRAME_SIZE_ERROR),
        (SETTINGS + REQUEST + frame(http2_layout.HEADERS, 5, 3, HEAD) + frame(http2_layout.HEADERS, 5, 1, HEAD), None),
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
        [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b"host", b"a"), (b"host", b"b")],
        [
            (b":method", b"GET"),
            (b":scheme", b"http"),
            (b":path", b"/"),
            (b":authority", b"a"),
            (b"host", b"a"),
            (b"host", b"a"),
        ],
        [(b":method", b"G T"), (b":scheme", b"http"), (b":path", b"/")],
    ],
)
def test_a_malformed_head_resets_its_stream(machine: Machine, fields: list[tuple[bytes, bytes]]) -> None:
    machine.feed(SETTINGS + frame(http2_layout.HEADERS, 5, 1, encode(fields)) + frame(http2_layout.HEADERS, 5, 3, HEAD))
    sent = machine.take_sent()
    assert reset_of(sent, 1) == http2_layout.PROTOCOL_ERROR
    assert list(machine.requests) == [3]
    assert machine.state.open == 1


def test_no_more_streams_are_open_at_a_time_than_are_announced(machine: Machine) -> None:
    heads = [frame(http2_layout.HEADERS, 4, 2 * k + 1, HEAD) for k in range(http2_layout.MOST_STREAMS + 1)]
    machine.feed(SETTINGS + b"".join(heads))
    assert machine.state.open == http2_layout.MOST_STREAMS
    assert reset_of(machine.take_sent(), 2 * http2_layout.MOST_STREAMS + 1) == http2_layout.REFUSED_STREAM


def test_streams_that_are_begun_and_reset_in_flood_end_the_connection(machine: Machine) -> None:
    machine.feed(SETTINGS)
    for k in range(http2_layout.MOST_RESETS + 1):
        assert not machine.failed
        machine.feed(
            frame(http2_layout.HEADERS, 4, 2 * k + 1, HEAD)
            + frame(http2_layout.RST_STREAM, 0, 2 * k + 1, b"\0\0\0\x08")
        )
    assert goodbye(machine.take_sent()) == http2_layout.ENHANCE_YOUR_CALM


def test_resets_of_another_second_do_not_count(machine: Machine) -> None:
    machine.feed(SETTINGS)
    for k in range(http2_layout.MOST_RESETS + 10):
        machine.now += SECOND // 100
        machine.feed(
            frame(http2_layout.HEADERS, 4, 2 * k + 1, HEAD)
            + frame(http2_layout.RST_STREAM, 0, 2 * k + 1, b"\0\0\0\x08")
        )
    assert not machine.failed


def began(stream: int) -> bytes:
    return frame(http2_layout.HEADERS, 5, stream, HEAD)


def test_a_client_whose_calls_are_answered_may_take_others_back(machine: Machine) -> None:
    """As one does whose deadlines pass while the service is busy: more of its calls than in any flood, but not of them all."""
    machine.feed(SETTINGS)
    for k in range(4 * http2_layout.MOST_RESETS):
        machine.feed(began(2 * k + 1))
        if k % 4:
            machine.feed(frame(http2_layout.RST_STREAM, 0, 2 * k + 1, b"\0\0\0\x08"))
        else:
            machine.answer(2 * k + 1, 200, [], b"")
    assert not machine.failed


def test_what_was_answered_before_counts_for_a_while(machine: Machine) -> None:
    machine.feed(SETTINGS)
    for k in range(http2_layout.MOST_RESETS):
        machine.feed(began(2 * k + 1))
        machine.answer(2 * k + 1, 200, [], b"")
    machine.now += 10 * SECOND
    first = 2 * http2_layout.MOST_RESETS + 1
    for k in range(3 * http2_layout.MOST_RESETS):
        machine.feed(began(first + 2 * k) + frame(http2_layout.RST_STREAM, 0, first + 2 * k, b"\0\0\0\x08"))
    assert not machine.failed


def test_however_many_were_answered_a_flood_of_resets_ends_the_connection(machine: Machine) -> None:
    machine.feed(SETTINGS)
    for k in range(20_000):
        machine.feed(began(2 * k + 1))
        machine.answer(2 * k + 1, 200, [], b"")
    first, most = 40_001, http2_layout.MOST_RESETS + http2_layout.MOST_SAVED_RESETS
    for k in range(most):
        machine.feed(began(first + 2 * k) + frame(http2_layout.RST_STREAM, 0, first + 2 * k, b"\0\0\0\x08"))
    assert not machine.failed
    machine.feed(began(first + 2 * most) + frame(http2_layout.RST_STREAM, 0, first + 2 * most, b"\0\0\0\x08"))
    assert goodbye(machine.take_sent()) == http2_layout.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "one",
    [
        frame(http2_layout.PING, 0, 0, b"12345678"), SETTINGS, frame(http2_layout.PRIORITY, 0, 5, b"\0\0\0\0\1"), frame(77, 0, 0, b"?"),
        frame(http2_layout.DATA, 0, 1),
    ],
    ids=["ping", "settings", "priority", "unknown", "empty data"],
)  # fmt: skip
def test_frames_of_control_in_flood_end_the_connection(machine: Machine, one: bytes) -> None:
    machine.feed(SETTINGS + frame(http2_layout.HEADERS, 4, 1, HEAD))
    for _ in range(http2_layout.MOST_CONTROLS // 100 + 1):
        machine.feed(one * 100)
    assert goodbye(machine.take_sent()) == http2_layout.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("part", [b"", b"\0\1a\1b", b"\0\1a" + b"\x7f\xf0\x0f" + b"x" * 2159])
def test_a_header_block_without_end_ends_the_connection(machine: Machine, part: bytes) -> None:
    machine.feed(SETTINGS + frame(http2_layout.HEADERS, 0, 1, HEAD))
    for _ in range(http2_layout.MOST_CONTINUATIONS + 1):
        machine.feed(frame(http2_layout.CONTINUATION, 0, 1, part))
    assert goodbye(machine.take_sent()) == http2_layout.ENHANCE_YOUR_CALM


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
    assert machine.state.held < 1000
    machine.answer(1, 413, [(b"content-length", b"0")], b"")
    answers.take(peer, machine.take_sent())
    assert answers.heads[1][b":status"] == b"413"
    assert answers.resets == {1: http2_layout.NO_ERROR}
    assert machine.state.open == 0


def test_more_than_the_window_is_an_error(machine: Machine) -> None:
    machine.feed(SETTINGS + frame(http2_layout.HEADERS, 4, 1, HEAD))
    row = machine.row(1)
    row.receive = 5
    machine.feed(frame(http2_layout.DATA, 0, 1, b"123456"))
    assert reset_of(machine.take_sent(), 1) == http2_layout.FLOW_CONTROL_ERROR


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
    machine.feed(SETTINGS + frame(http2_layout.HEADERS, 4, 1, HEAD))
    assert machine.answer(1, 200, [], b"early")
    trailers = encode([(b"checksum", b"1")])
    machine.feed(frame(http2_layout.HEADERS, 5, 1, trailers) + frame(http2_layout.HEADERS, 5, 3, HEAD))
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
    machine.feed(SETTINGS + frame(http2_layout.HEADERS, 4, 1, encode(fields)))
    assert machine.row(1).timeout_ms == min(expected_ms, 1 << 40)


def test_a_streaming_call_that_ends_with_its_head_has_no_length(machine: Machine) -> None:
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", STREAMING), (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"), (b"content-length", b"1"),
    ]  # fmt: skip
    machine.feed(SETTINGS + frame(http2_layout.HEADERS, 5, 1, encode(fields)))
    assert reset_of(machine.take_sent(), 1) == http2_layout.PROTOCOL_ERROR
    assert machine.events == [("reset", 1, b"")]


LARGEST = b"\x7f\xff\xff\xff"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (frame(http2_layout.WINDOW_UPDATE, 0, 0, LARGEST), True),
        (
            frame(http2_layout.SETTINGS, 0, 0, b"\0\4" + LARGEST)
            + frame(http2_layout.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"),
            False,
        ),
        (
            frame(http2_layout.WINDOW_UPDATE, 0, 1, b"\0\0\0\1")
            + frame(http2_layout.SETTINGS, 0, 0, b"\0\4" + LARGEST),
            True,
        ),
        (frame(http2_layout.SETTINGS, 0, 0, b"\0\4\x80\0\0\0"), True),
    ],
    ids=["connection", "stream", "all streams", "settings"],
)
def test_a_window_beyond_its_limit_is_an_error(machine: Machine, data: bytes, error: bool) -> None:
    """Of the connection, or of the stream alone, which another one does not notice."""
    machine.feed(SETTINGS + REQUEST + data + frame(http2_layout.HEADERS, 5, 3, HEAD))
    assert machine.failed == error
    sent = machine.take_sent()
    assert (goodbye(sent) if error else reset_of(sent, 1)) == http2_layout.FLOW_CONTROL_ERROR
    assert (3 in machine.requests) != error


def test_of_a_window_that_is_set_more_than_once_the_last_holds(machine: Machine) -> None:
    machine.feed(SETTINGS + frame(http2_layout.HEADERS, 5, 1, HEAD))
    machine.feed(frame(http2_layout.SETTINGS, 0, 0, b"\0\4\0\0\0\0" + b"\0\4\0\0\0\7"))
    assert machine.row(1).window == 7
