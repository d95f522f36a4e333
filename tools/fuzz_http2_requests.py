"""Requests of HTTP/2 for `fuzz_http2`, the client of h2 that sends them, and its frames cut in other ways."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import hpack

from tests.h2_machine import STREAMING, UNARY
from tierstore.wire.http2 import layout as http2_layout

Fields = list[tuple[bytes, bytes]]

PREFACE_BYTES = len(http2_layout.PREFACE)
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


class Wrong(AssertionError):
    """What was not as it has to be."""


def check(what: bool, *said: object) -> None:
    if not what:
        raise Wrong(*said)


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
        end = http2_layout.FRAME_HEAD + int.from_bytes(data[:3], "big")
        yield data[3], data[4], int.from_bytes(data[5:9], "big"), data[http2_layout.FRAME_HEAD : end]
        data = data[end:]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def parts_of(rng: random.Random, data: bytes, most: int) -> list[bytes]:
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, most - 1)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def recut(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """Other frames of the same meaning, and some of none between them."""
    for kind, flags, stream, payload in frames_of(data):
        if rng.random() < 0.06 and kind != http2_layout.CONTINUATION:
            other = rng.choice((stream + 2, 1, 77))
            depends = rng.choice((0, other + 2)).to_bytes(4, "big")
            yield rng.choice((
                frame(http2_layout.PING, 0, 0, rng.randbytes(8)), frame(rng.randrange(16, 256), rng.randrange(256), stream, rng.randbytes(5)),
                frame(http2_layout.PRIORITY, 0, other | 1, depends + b"\7"),
            ))  # fmt: skip
        if (
            kind == http2_layout.HEADERS
            and flags & http2_layout.END_HEADERS
            and len(payload) < 16_000
            and rng.random() < 0.5
        ):
            first, *others = parts_of(rng, payload, 5)
            before, after, flags = b"", b"", flags & ~http2_layout.END_HEADERS if others else flags
            if rng.random() < 0.3:
                flags |= http2_layout.HAS_PRIORITY
                before = rng.choice((0, stream + 2)).to_bytes(4, "big") + b"\x10"
            if rng.random() < 0.3:
                flags |= http2_layout.PADDED
                after = bytes(rng.choice((0, 1, 200)))
                before = bytes((len(after),)) + before
            yield frame(kind, flags, stream, before + first + after)
            for number, part in enumerate(others, 1):
                end = http2_layout.END_HEADERS if number == len(others) else 0
                yield frame(http2_layout.CONTINUATION, end, stream, part)
        elif kind == http2_layout.DATA and not flags & http2_layout.PADDED and rng.random() < 0.3:
            *others, last = parts_of(rng, payload, 4)
            for part in others:
                yield frame(kind, flags & ~http2_layout.END_STREAM, stream, part)
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
    return http2_layout.PROTOCOL_ERROR
