"""HTTP/1.1 on the side of who asks, without a socket: heads of requests, and answers parsed as their bytes arrive.

The body of an answer is received straight into the memory that its receiver names. The owner of the connection calls
`buffer` for the place of the next bytes, and then `received` with their number. Source: RFC 9112. A chunked body, or
one that ends with the connection, is collected first; our service sends neither, proxies may.

One connection, one `Incoming`, one thread at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

from tierstore.errors import TierstoreError

HEAD_BYTES = 32 << 10  # of an answer: status line and headers
_LINE_BYTES = 4 << 10  # of a chunk's size and extensions, or a trailer
_NO_BODY = (204, 304)


class Receiver(Protocol):
    """Receives one answer. `start` is called first; then `nbytes` bytes in all are written where `buffer` says."""

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None: ...
    def buffer(self) -> memoryview: ...
    def received(self, n: int) -> None: ...


class MalformedAnswer(TierstoreError):
    """The answer is not HTTP/1.1."""


def request_head(method: str, target: str, fields: str, body_bytes: int) -> bytes:
    """A request's head. `fields` are whole header lines, each with its line end."""
    length = f"Content-Length: {body_bytes}\r\n" if body_bytes or method != "GET" else ""
    return f"{method} {target} HTTP/1.1\r\n{fields}{length}\r\n".encode("latin-1")


class Incoming:
    """The answers of one connection, one after the other. The buffer for heads is allocated once."""

    def __init__(self) -> None:
        self._memory = bytearray(HEAD_BYTES)
        self._view = memoryview(self._memory)
        self._receiver: Receiver | None = None
        self._filled = 0  # bytes of _memory
        self._remaining: int | None = None  # bytes of the body, where the receiver gets it directly
        self._collected: bytearray | None = None  # a body whose length the head does not say
        self._chunks: _Chunks | None = None
        self._most = sys.maxsize
        self._status = 0
        self._headers: dict[str, str] = {}
        self.started = False  # whether a byte of the answer was received
        self.reusable = False  # whether the connection may carry another request

    @property
    def idle(self) -> bool:
        return self._receiver is None

    def expect(self, receiver: Receiver, most: int = sys.maxsize) -> None:
        """Name the receiver of the next answer, whose body may have `most` bytes; called before each request."""
        self._most = most
        self._receiver, self._filled, self._remaining, self._collected, self._chunks = receiver, 0, None, None, None
        self.started, self.reusable = False, False

    def forget(self) -> None:
        """Write no more into the receiver's memory. The connection has to be closed after this."""
        self._receiver, self.reusable = None, False

    def buffer(self) -> memoryview:
        """The memory for the next bytes; never empty."""
        if self._remaining is not None and self._receiver is not None:
            return self._receiver.buffer()
        return self._view[self._filled :]

    def received(self, n: int) -> bool:
        """Report that `n` bytes were written to `buffer`. True when the answer is complete. Raises Malformed."""
        if self._receiver is None:
            raise MalformedAnswer("the service sent bytes that no request asked for")
        self.started = True
        if self._remaining is not None:
            self._remaining -= n
            self._receiver.received(n)
            return self._remaining == 0 and self._end()
        if self._collected is not None:
            return self._collect(self._view[:n])
        self._filled += n
        return self._head(max(0, self._filled - n - 3))

    def closed(self) -> bool:
        """Report that the service has closed the connection. True if that completed the answer."""
        if self._collected is not None and self._chunks is None and self._receiver is not None:
            return self._deliver()
        return False

    def _head(self, since: int) -> bool:
        while (end := self._memory.find(b"\r\n\r\n", since, self._filled)) >= 0:
            status, version, headers = _parse(bytes(self._view[:end]).decode("latin-1"))
            remainder = bytes(self._view[end + 4 : self._filled])
            if not 100 <= status < 200:
                self._filled = 0
                return self._begin(status, version, headers, remainder)
            self._view[: len(remainder)] = remainder  # behind an interim answer: the final one follows
            self._filled, since = len(remainder), 0
        if self._filled == HEAD_BYTES:
            raise MalformedAnswer(f"expected an answer's head of at most {HEAD_BYTES} bytes, got more")
        return False

    def _begin(self, status: int, version: str, headers: dict[str, str], remainder: bytes) -> bool:
        """The head of the final answer was read, and `remainder` of what is behind it."""
        connection = headers.get("connection", "").lower()
        self.reusable = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        self._status, self._headers = status, headers
        assert self._receiver is not None
        if status in _NO_BODY:
            self._receiver.start(status, headers, 0)
            self.reusable = self.reusable and not remainder
            return self._end()
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._collected, self._chunks = bytearray(), _Chunks()
            return self._collect(memoryview(remainder))
        length = headers.get("content-length")
        if length is None:
            self._collected, self.reusable = bytearray(), False
            return self._collect(memoryview(remainder))
        if not length.isdigit():
            raise MalformedAnswer(f"expected a number in Content-Length, got {length!r}")
        self._remaining = int(length)
        self._check(self._remaining)
        self._receiver.start(status, headers, self._remaining)
        return self._feed(memoryview(remainder))

    def _feed(self, data: memoryview) -> bool:
        """Give the receiver the bytes that arrived together with the head."""
        assert self._receiver is not None
        assert self._remaining is not None
        if len(data) > self._remaining:
            data, self.reusable = data[: self._remaining], False
        while data:
            buffer = self._receiver.buffer()
            n = min(len(buffer), len(data))
            buffer[:n] = data[:n]
            self._remaining -= n
            self._receiver.received(n)
            data = data[n:]
        return self._remaining == 0 and self._end()

    def _collect(self, data: memoryview) -> bool:
        assert self._collected is not None
        if self._chunks is None:
            self._collected += data
            done = False
        else:
            done = self._chunks.decode(data, self._collected)
        self._check(len(self._collected))
        return done and self._deliver()

    def _check(self, nbytes: int) -> None:
        if nbytes > self._most:
            raise MalformedAnswer(f"expected an answer of at most {self._most} bytes, got {nbytes} or more")

    def _deliver(self) -> bool:
        assert self._receiver is not None
        assert self._collected is not None
        if self._chunks is not None and self._chunks.surplus:
            self.reusable = False
        self._remaining = len(self._collected)
        self._receiver.start(self._status, self._headers, self._remaining)
        return self._feed(memoryview(self._collected))

    def _end(self) -> bool:
        self._receiver = None
        return True


def _parse(head: str) -> tuple[int, str, dict[str, str]]:
    """(status, version, headers by lower-case name) of an answer's head."""
    first, *lines = head.split("\r\n")
    version, _, remainder = first.partition(" ")
    status = remainder[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or len(status) != 3 or not status.isdigit():
        raise MalformedAnswer(f"expected an answer of HTTP/1.1, got {first[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(status), version, headers


class _Chunks:
    """The chunked transfer coding, decoded as it arrives."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._remaining = 0  # of the chunk
        self._state = "size"
        self.surplus = False

    def decode(self, data: memoryview, into: bytearray) -> bool:
        """Append what `data` holds of the body to `into`. True after the last chunk."""
        while data:
            if self._state == "data":
                n = min(self._remaining, len(data))
                into += data[:n]
                self._remaining -= n
                data = data[n:]
                if not self._remaining:
                    self._state = "end"
                continue
            end = bytes(data[:_LINE_BYTES]).find(b"\n")
            n = len(data) if end < 0 else end + 1
            self._line += data[:n]
            data = data[n:]
            if len(self._line) > _LINE_BYTES:
                raise MalformedAnswer(f"expected a chunk's size within {_LINE_BYTES} bytes, got a longer line")
            if end < 0:
                continue
            line, self._line = bytes(self._line).strip(), bytearray()
            if self._state == "end":
                self._state = "size"
            elif self._state == "trailer":
                if not line:
                    self.surplus = bool(data)
                    return True
            else:
                self._size(line)
        return False

    def _size(self, line: bytes) -> None:
        try:
            self._remaining = int(line.partition(b";")[0], 16)
        except ValueError:
            raise MalformedAnswer(f"expected a chunk's size, got {line[:40]!r}") from None
        if self._remaining < 0:
            raise MalformedAnswer("a chunk's size is negative")
        self._state = "data" if self._remaining else "trailer"
