"""Connections of HTTP/2 with spoiled frames for `fuzz_http2`, and what the compiled machine and a server of h2 make of each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from tests.h2_machine import Machine
from tierstore.wire.http2 import layout as http2_layout
from tools.fuzz_http2_requests import (
    PREFACE_BYTES,
    Fields,
    Request,
    check,
    client,
    frame,
    frames_of,
    recut,
    request,
)


@dataclass
class Outcome:
    """What a server made of the bytes of a connection."""

    requests: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # those that were whole: head, body
    refused: dict[int, int] = field(default_factory=dict)  # streams, by the error
    error: int | None = None  # of the connection
    why: str = ""  # what h2 says of it

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
            if kind == http2_layout.RST_STREAM:
                made.refused.setdefault(stream, int.from_bytes(payload, "big"))
            elif kind == http2_layout.HEADERS:
                made.refused.setdefault(stream, 431)
            elif kind == http2_layout.GOAWAY:
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
    server.receive_data(http2_layout.PREFACE.tobytes())
    heads: dict[int, Fields] = {}
    bodies: dict[int, bytes] = {}
    while data and made.error is None:
        end = http2_layout.FRAME_HEAD + int.from_bytes(data[:3], "big")
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
            made.error, made.why = int(error.error_code), str(error)
        data = data[end:]
    for kind, _, stream, payload in frames_of(server.data_to_send()):
        if kind == http2_layout.RST_STREAM:
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
            name = rng.choice((http2_layout.WINDOW_UPDATE, http2_layout.RST_STREAM, http2_layout.SETTINGS, http2_layout.PING, http2_layout.GOAWAY, http2_layout.PRIORITY, http2_layout.DATA, http2_layout.CONTINUATION, http2_layout.PUSH_PROMISE))  # fmt: skip
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
    if ours.is_well or other.is_well:
        how = _laxer(other) if ours.is_well else _stricter(data, ours)
        if how in ("laxer", "stricter") and (rest := _rest(data)):
            whole = data + rest
            again = alike(whole, by_machine(whole), by_h2(whole))
            return "one of them waits for all of a wrong frame or block" if again.startswith("both refuse") else how
        return how
    if ours.error is None or other.error is None or ours.error == other.error:
        return "both refuse"
    if _begins_wrong(data, ours):  # which h2 has not noticed
        return "both refuse"
    if {ours.error, other.error} <= WRONG_FRAMES:
        return "both refuse, by other words"
    return f"the errors {ours.error} and {other.error}"


def _begins_wrong(data: bytes, ours: Outcome) -> bool:
    """Whether they were refused for what they begin with."""
    return (
        data[3] != http2_layout.SETTINGS or bool(data[4] & http2_layout.ACK)
    ) and ours.error == http2_layout.PROTOCOL_ERROR


def _rest(data: bytes) -> bytes:
    """What its last frame and the block of headers that it is in lack."""
    at = kind = flags = stream = 0
    while at + http2_layout.FRAME_HEAD <= len(data):
        kind, flags, stream = data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9], "big")
        at += http2_layout.FRAME_HEAD + int.from_bytes(data[at : at + 3], "big")
    rest = bytes(max(0, at - len(data)))
    if (
        kind in (http2_layout.HEADERS, http2_layout.PUSH_PROMISE, http2_layout.CONTINUATION)
        and not flags & http2_layout.END_HEADERS
    ):
        rest += frame(http2_layout.CONTINUATION, http2_layout.END_HEADERS, stream, b"")
    return rest


def _laxer(other: Outcome) -> str:
    """Why bytes that h2 refuses are taken."""
    return next((how for said, how in LAXER.items() if other.why.startswith(said)), "laxer")


def _stricter(data: bytes, ours: Outcome) -> str:
    """Why bytes that h2 takes are refused."""
    if _begins_wrong(data, ours):
        return "h2 does not ask for SETTINGS first"
    refused = {*ours.refused.values()}
    if ours.error is None and refused == {431}:
        return "h2 takes larger lists of headers"
    if ours.error is None and refused and refused <= {431, http2_layout.PROTOCOL_ERROR}:
        return "h2 takes any bytes in heads"
    newest = 0
    for kind, _, stream, _ in frames_of(data):
        newest = max(newest, stream) if kind == http2_layout.HEADERS else newest
        if kind == http2_layout.RST_STREAM and stream > newest and ours.error == http2_layout.PROTOCOL_ERROR:
            return "h2 lets streams be reset that have not begun"
    return "stricter"


# errors of one wrong frame, which has more than one thing wrong, or one that h2 has no other word for
WRONG_FRAMES = {
    http2_layout.PROTOCOL_ERROR,
    http2_layout.STREAM_CLOSED,
    http2_layout.FRAME_SIZE_ERROR,
    http2_layout.COMPRESSION_ERROR,
}
LAXER = {  # by the beginning of what h2 says
    "Received frame with invalid padding.": "h2 refuses frames that are padding alone",
    "Request header block has multiple Host headers.": "h2 refuses more than one Host",
    "Setting 8 has invalid value": "h2 looks at settings that no server heeds",
    "2": "h2 refuses windows of streams that a server might begin",
}
ALIKE = {
    *LAXER.values(),
    "h2 takes any bytes in heads",
    "both well",
    "both refuse",
    "both refuse, by other words",
    "h2 does not ask for SETTINGS first",
    "h2 takes larger lists of headers",
    "h2 lets streams be reset that have not begun",
    "one of them waits for all of a wrong frame or block",
}
