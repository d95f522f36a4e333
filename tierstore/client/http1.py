"""HTTP/1.1 as a client speaks it, without a socket: what goes out, and answers put together from what comes in.

An answer's body is received straight into the memory that its receiver names. Who owns the connection asks `buffer`
where the next bytes shall go and tells `received` how many came. Source: RFC 9112. Of its framings, a body in chunks or
one that ends with the connection is gathered first; services like ours send neither, proxies may.

One connection, one `Incoming`, one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tierstore.errors import TierstoreError

HEAD_BYTES = 32 << 10  # of an answer: status line and headers
_LINE_BYTES = 4 << 10  # of a chunk's size and extensions, or a trailer
_NO_BODY = (204, 304)


class Receiver(Protocol):
    """Takes one answer. `start` comes first; then bytes are put where `buffer` says, `nbytes` of them in all."""

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None: ...
    def buffer(self) -> memoryview: ...
    def received(self, n: int) -> None: ...


class Malformed(TierstoreError):
    """What came is not HTTP/1.1."""


def request_head(method: str, target: str, fields: str, body_bytes: int) -> bytes:
    """A request's head. `fields` are whole header lines, each with its line end."""
    length = f"Content-Length: {body_bytes}\r\n" if body_bytes or method != "GET" else ""
    return f"{method} {target} HTTP/1.1\r\n{fields}{length}\r\n".encode("latin-1")


class Incoming:
    """The answers of one connection, one after the other. Its buffer for heads is made once."""

    def __init__(self) -> None:
        self._memory = bytearray(HEAD_BYTES)
        self._view = memoryview(self._memory)
        self._receiver: Receiver | None = None
        self._got = 0  # bytes in _memory
        self._left: int | None = None  # of the body, where it goes to the receiver directly
        self._gathered: bytearray | None = None  # a body whose length is not known beforehand
        self._chunks: _Chunks | None = None
        self._status = 0
        self._headers: dict[str, str] = {}
        self.begun = False  # whether a byte of the answer has come
        self.reusable = False  # whether the connection may carry another request

    @property
    def idle(self) -> bool:
        return self._receiver is None

    def expect(self, receiver: Receiver) -> None:
        """Before each request: where its answer goes."""
        self._receiver, self._got, self._left, self._gathered, self._chunks = receiver, 0, None, None, None
        self.begun, self.reusable = False, False

    def forget(self) -> None:
        """Write no more into the receiver's memory; the connection has to be closed then."""
        self._receiver, self.reusable = None, False

    def buffer(self) -> memoryview:
        """Where the next bytes are to be put; never empty."""
        if self._left is not None and self._receiver is not None:
            return self._receiver.buffer()
        return self._view[self._got :]

    def received(self, n: int) -> bool:
        """Tell that `n` bytes are in `buffer`. True when the answer is complete. Raises Malformed."""
        if self._receiver is None:
            raise Malformed("the service sent something that was not asked for")
        self.begun = True
        if self._left is not None:
            self._left -= n
            self._receiver.received(n)
            return self._left == 0 and self._end()
        if self._gathered is not None:
            return self._gather(self._view[:n])
        self._got += n
        return self._head(max(0, self._got - n - 3))

    def closed(self) -> bool:
        """Tell that the service has closed the connection. True if that was the end of the answer."""
        if self._gathered is not None and self._chunks is None and self._receiver is not None:
            return self._deliver()
        return False

    def _head(self, since: int) -> bool:
        end = self._memory.find(b"\r\n\r\n", since, self._got)
        if end < 0:
            if self._got == HEAD_BYTES:
                raise Malformed(f"an answer's head has more than {HEAD_BYTES} bytes")
            return False
        status, version, headers = _parse(bytes(self._view[:end]).decode("latin-1"))
        rest = bytes(self._view[end + 4 : self._got])
        self._got = 0
        if 100 <= status < 200:  # an interim answer: the one that counts follows
            self._view[: len(rest)] = rest
            self._got = len(rest)
            return bool(rest) and self._head(0)
        connection = headers.get("connection", "").lower()
        self.reusable = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        self._status, self._headers = status, headers
        assert self._receiver is not None
        if status in _NO_BODY:
            self._receiver.start(status, headers, 0)
            self.reusable = self.reusable and not rest
            return self._end()
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._gathered, self._chunks = bytearray(), _Chunks()
            return self._gather(memoryview(rest))
        length = headers.get("content-length")
        if length is None:
            self._gathered, self.reusable = bytearray(rest), False
            return False
        if not length.isdigit():
            raise Malformed(f"Content-Length is {length!r}")
        self._left = int(length)
        self._receiver.start(status, headers, self._left)
        return self._feed(memoryview(rest))

    def _feed(self, data: memoryview) -> bool:
        """Hand bytes that came together with the head to the receiver."""
        assert self._receiver is not None
        assert self._left is not None
        if len(data) > self._left:
            data, self.reusable = data[: self._left], False
        while data:
            into = self._receiver.buffer()
            n = min(len(into), len(data))
            into[:n] = data[:n]
            self._left -= n
            self._receiver.received(n)
            data = data[n:]
        return self._left == 0 and self._end()

    def _gather(self, data: memoryview) -> bool:
        assert self._gathered is not None
        if self._chunks is None:
            self._gathered += data
            return False
        return self._chunks.take(data, self._gathered) and self._deliver()

    def _deliver(self) -> bool:
        assert self._receiver is not None
        assert self._gathered is not None
        if self._chunks is not None and self._chunks.surplus:
            self.reusable = False
        self._left = len(self._gathered)
        self._receiver.start(self._status, self._headers, self._left)
        return self._feed(memoryview(self._gathered))

    def _end(self) -> bool:
        self._receiver = None
        return True


def _parse(head: str) -> tuple[int, str, dict[str, str]]:
    """(status, version, headers by lower-case name) of an answer's head."""
    first, *lines = head.split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or len(status) != 3 or not status.isdigit():
        raise Malformed(f"expected an answer of HTTP/1.1, came {first[:80]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(status), version, headers


class _Chunks:
    """The chunked transfer coding, decoded as it comes."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._left = 0  # of the chunk
        self._state = "size"
        self.surplus = False

    def take(self, data: memoryview, into: bytearray) -> bool:
        """Decode `data` to the end of `into`. True after the last chunk."""
        while data:
            if self._state == "data":
                n = min(self._left, len(data))
                into += data[:n]
                self._left -= n
                data = data[n:]
                if not self._left:
                    self._state = "end"
                continue
            end = bytes(data[:_LINE_BYTES]).find(b"\n")
            n = len(data) if end < 0 else end + 1
            self._line += data[:n]
            data = data[n:]
            if len(self._line) > _LINE_BYTES:
                raise Malformed("a chunk's size takes too many bytes")
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
            self._left = int(line.partition(b";")[0], 16)
        except ValueError:
            raise Malformed(f"a chunk's size is {line[:40]!r}") from None
        if self._left < 0:
            raise Malformed("a chunk's size is negative")
        self._state = "data" if self._left else "trailer"
