"""A client of HTTP/2 that sends what it is told to, frame by frame, right or not. Header blocks are the package `hpack`'s."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
INITIAL_WINDOW_SIZE = 4
NO_ERROR, REFUSED_STREAM, ENHANCE_YOUR_CALM = 0, 7, 11
MOST_WINDOW = (1 << 31) - 1
FIRST_WINDOW = (1 << 16) - 1
DEADLINE_S = 30.0


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", which, value) for which, value in pairs))


def credit(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def reset(stream: int, code: int = 8) -> bytes:
    return frame(RST_STREAM, 0, stream, struct.pack(">I", code))


def block(fields: Iterable[tuple[str, str]]) -> bytes:
    """A header block that any table reads, and that changes none."""
    return b"".join(
        b"\x00" + hpack.hpack.encode_integer(len(name), 7) + name.encode() + hpack.hpack.encode_integer(len(value), 7) + value.encode()
        for name, value in fields
    )  # fmt: skip


def head(path: str, method: str = "GET", *more: tuple[str, str]) -> bytes:
    """The header block of a request."""
    return block([(":method", method), (":scheme", "http"), (":path", path), (":authority", "localhost"), *more])


def call(stream: int, path: str, message: bytes, *more: tuple[str, str]) -> bytes:
    """The frames of a call of gRPC, none larger than any server takes; with `more` fields in its head."""
    data = struct.pack(">BI", 0, len(message)) + message
    fields = head(path, "POST", ("content-type", "application/grpc"), ("te", "trailers"), *more)
    parts = [data[at : at + (1 << 14)] for at in range(0, len(data), 1 << 14)]
    frames = [frame(DATA, END_STREAM if part is parts[-1] else 0, stream, part) for part in parts]
    return b"".join([frame(HEADERS, END_HEADERS, stream, fields), *frames])


def get(stream: int, path: str) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, head(path))


@dataclass
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> int:
        """Of RST_STREAM and GOAWAY."""
        return int.from_bytes(self.payload[4:8] if self.kind == GOAWAY else self.payload, "big")

    @property
    def ends(self) -> bool:
        return self.kind in (DATA, HEADERS) and bool(self.flags & END_STREAM)


class Client:
    """A connection, with a large window for all its streams. It does not answer what the server sends, unless it is told to."""

    def __init__(self, port: int, first: bytes = settings(), receive_buffer: int = 0, ca: Path | None = None) -> None:
        """`ca`: the authority of the server's certificate, where there is TLS."""
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if ca is not None:
            context = ssl.create_default_context(cafile=str(ca))
            context.set_alpn_protocols(["h2"])
            self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self._received = b""
        self._decoder = hpack.Decoder()
        self.send(PREFACE, first, credit(0, MOST_WINDOW - FIRST_WINDOW))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.settimeout(DEADLINE_S)
        self.socket.sendall(b"".join(frames))

    def send_until_ended(self, message: bytes, most_bytes: int) -> bool:
        """Send the same again and again. Whether the server ended the connection before so many bytes."""
        try:
            for _ in range(0, most_bytes, len(message)):
                self.send(message)
        except OSError:
            return True
        return False

    def has_ended(self) -> bool:
        """Whether the server has ended its side by now. What came before stays."""
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while part := self.socket.recv(1 << 16):
                self._received += part
            return True
        return False

    def next(self, timeout_s: float = DEADLINE_S) -> Frame | None:
        """The next frame; None at the end of the connection. Raises TimeoutError."""
        until = time.monotonic() + timeout_s
        while len(self._received) < 9 or len(self._received) < 9 + int.from_bytes(self._received[:3], "big"):
            self.socket.settimeout(max(until - time.monotonic(), 0.001))
            try:
                part = self.socket.recv(1 << 16)
            except ConnectionError:
                part = b""
            if not part:
                return None
            self._received += part
        whole, size = self._received, 9 + int.from_bytes(self._received[:3], "big")
        self._received = whole[size:]
        return Frame(whole[3], whole[4], int.from_bytes(whole[5:9], "big"), whole[9:size])

    def until(self, *kinds: int, stream: int | None = None, timeout_s: float = DEADLINE_S) -> Frame | None:
        """The next frame of these kinds, of a stream where one is given; None if the connection ends before it."""
        until = time.monotonic() + timeout_s
        while (came := self.next(until - time.monotonic())) is not None:
            if came.kind in kinds and stream in (None, came.stream):
                return came
        return None

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """(header fields, body) of a whole answer."""
        fields: dict[str, str] = {}
        body = b""
        while True:
            came = self.next()
            assert came is not None, "the connection has ended"
            assert came.kind != GOAWAY or came.code == NO_ERROR, came
            if came.kind == HEADERS:
                assert came.flags & END_HEADERS
                decoded: Any = self._decoder.decode(came.payload)
                fields |= dict(decoded) if came.stream == stream else {}
            if came.stream != stream:
                continue
            assert came.kind in (DATA, HEADERS), came
            body += came.payload if came.kind == DATA else b""
            if came.ends:
                return fields, body

    def is_alive(self) -> bool:
        """Whether the server still answers a PING."""
        self.send(frame(PING, 0, 0, b"alive?!!"))
        while (came := self.until(PING, GOAWAY)) is not None and came.kind == PING:
            if came.payload == b"alive?!!":
                return True
        return False
