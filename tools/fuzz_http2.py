"""The compiled machine of HTTP/2 beside the packages h2 and hpack: the same headers, messages and errors, and nothing is left behind.

`python -m tools.fuzz_http2 --count 100000 --seed 1`, from the root of the repository. An exchange is a request and what became of it.

A connection is a function of the seed and its number. In most of them a client, which is h2, sends what the protocol allows: header blocks
with Huffman codes and without, tables that are resized, blocks and data cut into any frames, padding, priorities, pings, unknown
frames, streams interleaved, reset, and answered before they have ended, windows from one byte on. Requests have to come as they
were sent, and answers as they were given; in the end nothing is open and no byte is held. In the others the bytes of such a client are spoiled, and go to a server of h2 as well.
What h2 takes the machine has to take, as the same requests; what h2 refuses it has to refuse, and with the same error. What may
differ, and why, is in `ALIKE`.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hpack

from tests.h2_answers import Answers
from tests.h2_machine import SECOND, STREAMING, UNARY, Machine
from tierstore.kernels import h2words

Fields = list[tuple[bytes, bytes]]
Settings = h2.settings.SettingCodes

PREFACE_BYTES = len(h2words.PREFACE)
NAMES = [
    b"user-agent",
    b"x-a",
    b"x-request-id",
    b"cookie",
    b"accept",
    b"x-bin",
    b"a",
    b"traceparent",
    b"x-" + b"n" * 70,
]
LETTERS = [bytes((i,)) for i in (*range(33, 127), 0xE4, 0xFF)]
TURNS = 20_000  # of a connection that moves bytes to and fro; more is a connection that hangs


class Wrong(AssertionError):
    """What was not as it has to be."""


def check(what: bool, *said: object) -> None:
    if not what:
        raise Wrong(*said)


# --- a client that is right


class Coder(hpack.Encoder):
    """Header blocks with Huffman codes or without, and tables that are resized meanwhile."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def encode(self, headers: Any, huffman: bool = True) -> bytes:
        while self._rng.random() < 0.05:
            others = {0, 40, 200, 1000, 4096} - {
                self.header_table_size
            }  # told of the same size again, it forgets the one before
            self.header_table_size = self._rng.choice(sorted(others))
        block: bytes = super().encode(headers, huffman=self._rng.random() < 0.5)
        return block


def client(rng: random.Random) -> h2.connection.H2Connection:
    made = h2.connection.H2Connection(
        h2.config.H2Configuration(
            client_side=True, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
    )
    made.encoder = Coder(rng)
    made.initiate_connection()
    return made


def frames_of(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each."""
    while data:
        end = h2words.FRAME_HEAD + int.from_bytes(data[:3], "big")
        yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[h2words.FRAME_HEAD : end]
        data = data[end:]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def parts_of(rng: random.Random, data: bytes, most: int) -> list[bytes]:
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, most - 1)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def recut(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """Other frames of the same meaning, and some of none between them."""
    for kind, flags, stream, payload in frames_of(data):
        if rng.random() < 0.06 and kind != h2words.CONTINUATION:
            other = rng.choice((stream + 2, 1, 77))
            depends = rng.choice((0, other + 2)).to_bytes(4, "big")
            yield rng.choice((
                frame(h2words.PING, 0, 0, rng.randbytes(8)), frame(rng.randrange(16, 256), rng.randrange(256), stream, rng.randbytes(5)),
                frame(h2words.PRIORITY, 0, other | 1, depends + b"\7"), frame(h2words.SETTINGS, 0, 0, b"\0\x99\1\2\3\4"),
            ))  # fmt: skip
        if kind == h2words.HEADERS and flags & h2words.END_HEADERS and len(payload) < 16_000 and rng.random() < 0.5:
            first, *others = parts_of(rng, payload, 5)
            before, after, flags = b"", b"", flags & ~h2words.END_HEADERS if others else flags
            if rng.random() < 0.3:
                flags |= h2words.HAS_PRIORITY
                before = rng.choice((0, stream + 2)).to_bytes(4, "big") + b"\x10"
            if rng.random() < 0.3:
                flags |= h2words.PADDED
                after = bytes(rng.choice((0, 1, 200)))
                before = bytes((len(after),)) + before
            yield frame(kind, flags, stream, before + first + after)
            for number, part in enumerate(others, 1):
                end = h2words.END_HEADERS if number == len(others) else 0
                yield frame(h2words.CONTINUATION, end, stream, part)
        elif kind == h2words.DATA and not flags & h2words.PADDED and rng.random() < 0.3:
            *others, last = parts_of(rng, payload, 4)
            for part in others:
                yield frame(kind, flags & ~h2words.END_STREAM, stream, part)
            yield frame(kind, flags, stream, last)
        else:
            yield frame(kind, flags, stream, payload)


@dataclass
class Request:
    """What is asked on a stream, what is to come of it there, and what is answered."""

    fields: Fields
    body: bytes
    trailers: Fields | None
    refused: int | None = None  # the status or, below 100, the error of what has to be refused
    sent: int = 0
    complete: bool = False  # the client has sent its end
    reset: bool = False
    answer: tuple[int, Fields, bytes, Fields | None] | None = None
    answered: bool = False

    @property
    def head(self) -> bytes:
        """The text that the machine keeps of it."""
        of = dict(self.fields)
        first = of[b":method"] + b" " + of[b":path"] + b"\n" + of.get(b":authority", of.get(b"host", b"")) + b"\n"
        return first + b"".join(name + b":" + value + b"\n" for name, value in self.fields if name[:1] != b":")

    @property
    def streams(self) -> bool:
        of = dict(self.fields)
        return of[b":path"] == STREAMING and of.get(b"content-type") == b"application/grpc"


def fields_of(rng: random.Random, most: int) -> Fields:
    """Names that differ, and values of any letters."""
    names = rng.sample(NAMES, rng.randint(0, most))
    letters = [rng.choice(LETTERS) for _ in range(12)]
    return [(name, b"".join(rng.choices(letters, k=rng.choice((0, 1, 5, 30, 200))))) for name in names]


def request(rng: random.Random, most_bytes: int) -> Request:
    path = rng.choice((UNARY.encode(), UNARY.encode(), STREAMING, b"/v2", b"/a%20b?c=d"))
    fields = [(b":method", rng.choice((b"POST", b"POST", b"GET"))), (b":scheme", b"http"), (b":path", path)]
    rng.shuffle(fields)
    fields += rng.choice(
        ([(b":authority", b"localhost")], [(b"host", b"a:1")], [(b":authority", b"b"), (b"host", b"b")])
    )
    if rng.random() < 0.8:
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    if rng.random() < 0.3:
        fields.append(
            (b"grpc-timeout", b"%d" % rng.randrange(1, 10**8) + rng.choice((b"H", b"M", b"S", b"m", b"u", b"n")))
        )
    fields += fields_of(rng, 4)
    body = rng.randbytes(rng.choice((0, 1, 5, 64, 64, 1000, most_bytes)))
    made = Request(fields, body, fields_of(rng, 2) or None if rng.random() < 0.08 else None)
    if rng.random() < 0.1:
        fields.append((b"content-length", b"%d" % len(body)))
    elif rng.random() < 0.03:
        made.refused = spoil_fields(rng, made)
    return made


def spoil_fields(rng: random.Random, made: Request) -> int:
    """Make a head one that has to be refused; returns by what."""
    fields, kind = made.fields, rng.randrange(9)
    if kind == 0:
        fields.extend((b"name%d" % i, b"v" * 3000) for i in range(6))
        return 431
    if kind == 1:
        fields.append((b"content-length", b"%d" % (len(made.body) + 1)))
    elif kind == 2:
        del fields[rng.randrange(3)]
    elif kind == 3:
        fields.insert(0, rng.choice(fields[:3]))
    elif kind == 4:
        fields.append(rng.choice(((b":status", b"200"), (b":path", b"/"))))
    elif kind == 5:
        fields.append((rng.choice((b"connection", b"transfer-encoding", b"upgrade", b"keep-alive")), b"close"))
    elif kind == 6:
        fields.append((rng.choice((b"Upper", b"a b", b"x:")), b"1"))
    elif kind == 7:
        fields.append((b"x-bad", rng.choice((b"a\nb", b"\0", b" a", b"a ", b"\x7f"))))
    else:
        fields.append((b"te", b"gzip"))
    return h2words.PROTOCOL_ERROR


class Talk:
    """One connection of a client that is right."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._machine = Machine(room=rng.choice((1 << 12, 1 << 14, 1 << 17)))
        self._peer, self._got = client(rng), Answers()
        self._window = rng.choice((1, 100, 65535, 65535, 65535, 1 << 20))
        self._tiny = self._window <= 100
        self._requests: dict[int, Request] = {}
        self._open: list[int] = []
        self._came: dict[int, tuple[bytes, bytes, bool]] = {}  # of methods that stream: head, data, whether ended
        self._seen = 0

    def run(self, exchanges: int) -> Counter[str]:
        rng, peer = self._rng, self._peer
        try:
            self._machine.feed(peer.data_to_send()[PREFACE_BYTES:])
            self._got.take(peer, self._machine.take_sent())
            peer.update_settings({Settings.INITIAL_WINDOW_SIZE: self._window})
            self._move()
            at_once, next_stream = rng.choice((1, 4, 90)), 1
            while next_stream < 2 * exchanges or self._open:
                if next_stream < 2 * exchanges and len(self._open) < at_once and rng.random() < 0.6:
                    self._begin(next_stream)
                    next_stream += 2
                for stream in rng.sample(self._open, min(len(self._open), rng.choice((1, 3)))):
                    self._go_on(stream)
                if rng.random() < 0.02:
                    self._change_settings()
                if rng.random() < 0.5:
                    self._move()
                    self._close_up()
            check(self._machine.word(h2words.OPEN) == 0, "streams are open")
            check(self._machine.word(h2words.HELD) == 0, "bytes are held", self._machine.word(h2words.HELD))
            check(self._machine.word(h2words.WAITING) == 0, "blocks wait")
            check(not self._machine.failed and self._got.goodbye is None, "the connection was ended", self._got.goodbye)
        finally:
            self._machine.close()
        counts = Counter(exchanges=len(self._requests))
        counts["refused as they have to be"] = sum(one.refused is not None for one in self._requests.values())
        counts["reset by the client"] = sum(one.reset for one in self._requests.values())
        return counts

    def _change_settings(self) -> None:
        rng = self._rng
        changed = {
            Settings.MAX_FRAME_SIZE: rng.choice((16384, 70000)),
            Settings.HEADER_TABLE_SIZE: rng.choice((0, 100, 4096)),
        }
        if not self._tiny:
            changed[Settings.INITIAL_WINDOW_SIZE] = rng.choice((1000, 65535, 1 << 20))
        which = rng.choice(list(changed))
        self._peer.update_settings({which: changed[which]})

    def _begin(self, stream: int) -> None:
        made = self._requests[stream] = request(self._rng, 300 if self._tiny else 20_000)
        made.complete = not made.body and made.trailers is None
        fields: Any = [
            hpack.NeverIndexedHeaderTuple(*one) if self._rng.random() < 0.1 else hpack.HeaderTuple(*one)
            for one in made.fields
        ]
        self._peer.send_headers(stream, fields, end_stream=made.complete)
        self._open.append(stream)
        self._machine.now += SECOND // 50

    def _go_on(self, stream: int) -> None:
        """Send some more of a request, reset it, or have it answered."""
        rng, one, peer = self._rng, self._requests[stream], self._peer
        if stream in self._got.resets or stream in self._got.ended:
            return
        if rng.random() < 0.01 and one.refused is None and not one.reset:
            peer.reset_stream(stream, rng.choice((0, 8)))
            one.reset = True
            return
        if one.reset:
            return
        if not one.complete:
            left = len(one.body) - one.sent
            room = min(peer.local_flow_control_window(stream), peer.max_outbound_frame_size)
            size = min(left, room, rng.choice((0, 1, 64, 3000, 16384)))
            last = size == left and one.trailers is None
            padding = rng.choice((None, None, None, 0, 7)) if room - size > 8 else None
            if size or last or rng.random() < 0.1:
                data = one.body[one.sent : one.sent + size]
                peer.send_data(stream, data, end_stream=last, pad_length=padding)
                one.sent += size
                one.complete = last
            elif not left and one.trailers is not None:
                peer.send_headers(stream, one.trailers, end_stream=True)
                one.complete = True
        known = stream in self._machine.requests or stream in self._came
        if known and one.refused is None and not one.answered and rng.random() < 0.6:
            self._answer(stream, one)

    def _answer(self, stream: int, one: Request) -> None:
        rng = self._rng
        data = rng.randbytes(rng.choice((0, 1, 20)) if self._tiny else rng.choice((0, 1, 64, 64, 1000, 30_000)))
        one.answered = True
        if not one.streams and rng.random() < 0.5:
            one.answer = 200, [(b"content-type", b"application/grpc")], b"\0" + len(data).to_bytes(4, "big") + data, [(b"grpc-status", b"0")]  # fmt: skip
            gone = not self._machine.answer_call(stream, data)
        else:
            trailers = fields_of(rng, 3) if rng.random() < 0.6 else None
            one.answer = rng.choice((200, 200, 404, 503, 418)), fields_of(rng, 4), data, trailers or None
            status, fields, data, trailers = one.answer
            cuts = parts_of(rng, data, 3)
            gone = False
            for number, part in enumerate(cuts):
                ends = number == len(cuts) - 1
                head = (status, fields) if number == 0 else (0, [])
                gone |= not self._machine.answer(stream, *head, part, trailers if ends else None, ends=ends)
        check(not gone or stream in self._reset_there(), stream, "was gone when it was answered")

    def _reset_there(self) -> set[int]:
        return {stream for kind, stream, _ in self._machine.events if kind == "reset"}

    def _move(self) -> None:
        """Move bytes both ways until neither side has any."""
        rng = self._rng
        for _ in range(TURNS):
            data = self._peer.data_to_send()
            if not data:
                return
            cut = b"".join(recut(rng, data))
            while cut:
                size = rng.choice((1, 9, 10, 100, 5000, len(cut), len(cut), len(cut)))
                self._machine.feed(cut[:size])
                cut = cut[size:]
            check(not self._machine.failed, "the machine ended the connection")
            self._take_events()
            self._got.take(self._peer, self._machine.take_sent())
        raise Wrong("a connection without end")

    def _take_events(self) -> None:
        for kind, stream, data in self._machine.events[self._seen :]:
            head, body, ended = self._came.get(stream, (b"", b"", False))
            if kind == "opened":
                self._came[stream] = data, b"", False
            elif kind == "data":
                self._came[stream] = head, body + data, ended
            elif kind == "ended":
                self._came[stream] = head, body, True
        self._seen = len(self._machine.events)

    def _close_up(self) -> None:
        """Look at what has come to an end."""
        for stream in list(self._open):
            one = self._requests[stream]
            if one.reset:
                check(self._machine.row(stream) == 0, stream, "is open though it was reset")
            elif one.refused is not None:
                if not (one.complete or stream in self._got.resets or stream in self._got.ended):
                    continue
                check(stream not in self._machine.requests, stream, one.fields, "was taken")
                if one.refused == 431:
                    check(self._got.heads.get(stream) == {b":status": b"431"}, stream, self._got.heads.get(stream))
                else:
                    check(self._got.resets.get(stream) == one.refused, stream, one.fields, self._got.resets.get(stream))
            elif not self._is_answered(stream, one):
                continue
            self._open.remove(stream)

    def _is_answered(self, stream: int, one: Request) -> bool:
        """Whether a stream is at its end, of which all has to be right then."""
        early = not one.complete
        if one.complete and not one.answered:
            if one.streams:
                check(self._came.get(stream) == (one.head, one.body, True), stream, one, self._came.get(stream))
            else:
                check(self._machine.requests.get(stream) == (one.head, one.body), stream, one, self._machine.requests.get(stream))  # fmt: skip
        if stream in self._got.resets:
            check(early and stream in self._got.ended, stream, "was reset", self._got.resets[stream])
        if not one.answered or stream not in self._got.ended:
            return False
        assert one.answer is not None
        status, fields, data, trailers = one.answer
        check(
            self._got.heads[stream] == {b":status": b"%d" % status, **dict(fields)},
            stream,
            one,
            self._got.heads[stream],
        )
        check(self._got.bodies.get(stream, b"") == data, stream, "another body")
        check(self._got.trailers.get(stream) == (None if trailers is None else dict(trailers)), stream, one, self._got.trailers.get(stream))  # fmt: skip
        return True


# --- a client that is not


@dataclass
class Outcome:
    """What a server made of the bytes of a connection."""

    requests: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # those that were whole: head, body
    refused: dict[int, int] = field(default_factory=dict)  # streams, by the error
    error: int | None = None  # of the connection

    @property
    def is_well(self) -> bool:
        return self.error is None and not self.refused


def by_machine(data: bytes) -> Outcome:
    machine, made = Machine(), Outcome()
    try:
        machine.feed(data)
        came: dict[int, tuple[bytes, bytes]] = {}
        for kind, stream, more in machine.events:
            if kind == "opened":
                came[stream] = more, b""
            elif kind == "data":
                came[stream] = came[stream][0], came[stream][1] + more
            elif kind == "ended" and stream in came:
                made.requests[stream] = came[stream]
        made.requests |= machine.requests
        for kind, _, stream, payload in frames_of(machine.take_sent()):
            if kind == h2words.RST_STREAM:
                made.refused.setdefault(stream, int.from_bytes(payload, "big"))
            elif kind == h2words.HEADERS:
                made.refused.setdefault(stream, 431)
            elif kind == h2words.GOAWAY:
                made.error = int.from_bytes(payload[4:8], "big")
        check(machine.failed == (made.error is not None), "an error without GOAWAY")
    finally:
        machine.close()
    return made


def by_h2(data: bytes) -> Outcome:
    """Fed frame by frame, as it looks at no more once one was wrong."""
    server, made = (
        h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None)),
        Outcome(),
    )
    server.initiate_connection()
    server.receive_data(h2words.PREFACE.tobytes())
    heads: dict[int, Fields] = {}
    bodies: dict[int, bytes] = {}
    while data and made.error is None:
        end = h2words.FRAME_HEAD + int.from_bytes(data[:3], "big")
        try:
            for event in server.receive_data(data[:end]):
                if isinstance(event, h2.events.RequestReceived):
                    heads[event.stream_id], bodies[event.stream_id] = list(event.headers), b""
                elif isinstance(event, h2.events.DataReceived):
                    bodies[event.stream_id] += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    one = Request(heads[event.stream_id], bodies[event.stream_id], None)
                    made.requests[event.stream_id] = one.head, one.body
                elif isinstance(event, h2.events.StreamReset):
                    if not event.remote_reset:
                        made.refused.setdefault(event.stream_id, int(event.error_code))
                    elif event.stream_id not in made.requests:
                        heads.pop(event.stream_id, None)
        except h2.exceptions.StreamClosedError as error:
            made.refused.setdefault(error.stream_id, int(error.error_code))
        except h2.exceptions.ProtocolError as error:
            made.error = int(error.error_code)
        data = data[end:]
    for kind, _, stream, payload in frames_of(server.data_to_send()):
        if kind == h2words.RST_STREAM:
            made.refused.setdefault(stream, int.from_bytes(payload, "big"))
    return made


def spoiled(rng: random.Random) -> bytes:
    """The frames of a client, some of them changed, without the preface."""
    peer = client(rng)
    for number in range(rng.randint(1, 6)):
        one = request(rng, 2000)
        ends = not one.body and one.trailers is None
        peer.send_headers(2 * number + 1, one.fields, end_stream=ends)
        if one.body:
            peer.send_data(2 * number + 1, one.body, end_stream=one.trailers is None)
        if one.trailers is not None:
            peer.send_headers(2 * number + 1, one.trailers, end_stream=True)
    frames = list(recut(rng, peer.data_to_send()[PREFACE_BYTES:]))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at = rng.randrange(len(frames))
        changed, kind = bytearray(frames[at]), rng.random()
        if kind < 0.35:
            for _ in range(rng.choice((1, 1, 3))):
                place = rng.randrange(len(changed)) if rng.random() < 0.6 else rng.randrange(3, 9)
                changed[place] = rng.choice((0, 1, 4, 5, 8, 32, 255, rng.randrange(256), changed[place] ^ 1))
            frames[at] = bytes(changed)
        elif kind < 0.5:
            del frames[at]
        elif kind < 0.6:
            frames.insert(rng.randrange(len(frames) + 1), frames[at])
        elif kind < 0.7:
            frames.append(frames.pop(at))
        else:
            stream = rng.choice((0, 1, 1, 3, 5, 2, 99))
            name = rng.choice((h2words.WINDOW_UPDATE, h2words.RST_STREAM, h2words.SETTINGS, h2words.PING, h2words.GOAWAY, h2words.PRIORITY, h2words.DATA, h2words.CONTINUATION, h2words.PUSH_PROMISE))  # fmt: skip
            payload = rng.choice((b"", b"\0\0\0\0", b"\0\0\0\1", b"\x7f\xff\xff\xff", b"\0\4\x7f\xff\xff\xff", b"\0\4\x80\0\0\0", b"\0\5\0\0\x40\0", b"\0\5\0\0\0\1", b"\0\2\0\0\0\2", bytes(8), b"\0\0\0\1\7", b"x" * 5))  # fmt: skip
            frames.insert(rng.randrange(len(frames) + 1), frame(name, rng.choice((0, 0, 1, 4, 5, 8)), stream, payload))
        if not frames:
            break
    return b"".join(frames)


def _fields(one: tuple[bytes, bytes]) -> tuple[list[bytes], bytes]:
    """A request whose fields have an order: h2 puts cookies behind the others."""
    head, body = one
    return sorted(head.split(b"\n")), body


def alike(data: bytes, ours: Outcome, other: Outcome) -> str:
    """How what two servers made of the same bytes goes together; what is not in `ALIKE` may not be."""
    if any(_fields(one) != _fields(ours.requests.get(stream, one)) for stream, one in other.requests.items()):
        return "other requests"
    if ours.is_well and other.is_well:
        return "both well" if ours.requests.keys() == other.requests.keys() else "other requests"
    if ours.is_well:
        return "laxer"
    if other.is_well:
        return _stricter(data, ours)
    if ours.error is None or other.error is None or ours.error == other.error:
        return "both refuse"
    return CODES.get((ours.error, other.error), f"the errors {ours.error} and {other.error}")


def _stricter(data: bytes, ours: Outcome) -> str:
    """Why bytes that h2 takes are refused."""
    *_, last = frames_of(data)
    if (data[3] != h2words.SETTINGS or data[4] & h2words.ACK) and ours.error == h2words.PROTOCOL_ERROR:
        return "h2 does not ask for SETTINGS first"
    if (
        len(last[3]) < int.from_bytes(data[len(data) - len(last[3]) - 9 :][:3], "big")
        and ours.error == h2words.FRAME_SIZE_ERROR
    ):
        return "h2 waits for all of a frame that is too large"
    return "stricter"


# of the machine and h2, where they differ
CODES = {
    (h2words.COMPRESSION_ERROR, h2words.PROTOCOL_ERROR): "h2 has no error of header blocks",
    (h2words.PROTOCOL_ERROR, h2words.FRAME_SIZE_ERROR): "h2 looks at a frame's size before its place",
}
ALIKE = {
    "both well",
    "both refuse",
    "h2 does not ask for SETTINGS first",
    "h2 waits for all of a frame that is too large",
    *CODES.values(),
}


class Fuzzer:
    """Counts exchanges, and keeps what was wrong."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.counts: Counter[str] = Counter()
        self.different: list[str] = []

    def run(self, count: int, until: float = float("inf"), first: int = 0) -> int:
        """Make so many exchanges; returns the number of the next connection."""
        number = first
        while self.counts["exchanges"] < count and time.monotonic() < until:
            self.one(number)
            number += 1
        return number

    def one(self, number: int) -> None:
        rng = random.Random(f"{self._seed}-{number}")
        self.counts["connections"] += 1
        try:
            if rng.random() < 0.85:
                self.counts.update(Talk(rng).run(rng.choice((1, 10, 60))))
            else:
                self._spoiled(rng, number)
        except (Wrong, h2.exceptions.H2Error, hpack.HPACKError) as error:
            self.different.append(f"seed {self._seed} connection {number}: {type(error).__name__} {str(error)[:1500]}")

    def _spoiled(self, rng: random.Random, number: int) -> None:
        data = spoiled(rng)
        ours, other = by_machine(data), by_h2(data)
        how = alike(data, ours, other)
        self.counts[how] += 1
        self.counts["exchanges"] += len(ours.requests | other.requests)
        if how not in ALIKE:
            self.different.append(
                f"seed {self._seed} connection {number}: {how}\n  {data.hex()}\n  ours {ours}\n  h2   {other}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="exchanges")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one connection, by its number")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin none after that")
    options = parser.parse_args()
    began, fuzzer = time.monotonic(), Fuzzer(options.seed)
    if options.only is not None:
        fuzzer.one(options.only)
    else:
        fuzzer.run(options.count, began + options.seconds)
    for line in fuzzer.different:
        print(line)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{time.monotonic() - began:.0f} s, {memory} MiB at most")
    print(", ".join(f"{name}: {count}" for name, count in sorted(fuzzer.counts.items())))
    raise SystemExit(1 if fuzzer.different else 0)


if __name__ == "__main__":
    main()
