"""Calls of gRPC from a client that costs as little as one over HTTP/1.1: frames of HTTP/2 on a plain socket."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import hpack

from benchmarks.wire_lookup import connect, read_exactly
from tests.service import http2_client as h2

METHOD = "/inference.GRPCInferenceService/ModelInfer"
_FRAME_BYTES = 1 << 14


class Frames:
    """One connection on which calls are frames that the client has made before, and answers bytes that it counts."""

    def __init__(self, port: int, method: str = METHOD) -> None:
        self._socket, self._stream, self._credit, self._space = connect(port), -1, b"", memoryview(b"")
        window = h2.settings((h2.INITIAL_WINDOW_SIZE, h2.MOST_WINDOW))
        self._socket.sendall(h2.PREFACE + window + h2.credit(0, h2.MOST_WINDOW >> 1))
        encoder = hpack.Encoder()
        said = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost",
                "te": "trailers", "content-type": "application/grpc", "user-agent": "grpc-benchmark"}  # fmt: skip
        self._heads = [encoder.encode(said) for _ in range(2)]  # the second one is of names in the table

    def close(self) -> None:
        self._socket.close()

    def send(self, message: bytes) -> None:
        self._stream += 2
        data = struct.pack(">BI", 0, len(message)) + message
        parts = [data[at : at + _FRAME_BYTES] for at in range(0, len(data), _FRAME_BYTES)]
        frames = [h2.frame(h2.DATA, part is parts[-1], self._stream, part) for part in parts]
        head = h2.frame(h2.HEADERS, h2.END_HEADERS, self._stream, self._heads[self._stream > 1])
        self._socket.sendall(b"".join([self._credit, head, *frames]))

    def _frames(self) -> Iterator[tuple[int, bytearray]]:
        """(kind, payload) of the frames of an answer."""
        while True:
            head = bytearray(9)
            read_exactly(self._socket, memoryview(head))
            payload = bytearray(int.from_bytes(head[:3], "big"))
            read_exactly(self._socket, memoryview(payload))
            if int.from_bytes(head[5:], "big") == self._stream:
                yield head[3], payload
                if head[3] == h2.HEADERS and head[4] & h2.END_STREAM:
                    return

    def measure(self) -> None:
        """Read an answer to its end. Those that follow are as long."""
        size = sum(9 + len(payload) for _, payload in self._frames())
        self._space = memoryview(bytearray(size))
        self._credit = h2.credit(0, size)

    def message(self) -> bytes:
        """Read an answer, and return its message."""
        data = b"".join(payload for kind, payload in self._frames() if kind == h2.DATA)
        self._credit = h2.credit(0, len(data)) if data else b""
        return data[5:]

    def read(self) -> None:
        read_exactly(self._socket, self._space)
