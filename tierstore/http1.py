"""HTTP/1.1 on the side of who asks, without a socket: heads of requests, and answers parsed as their bytes arrive.

The body of an answer is received straight into the memory that its receiver names. The owner of the connection calls
`buffer` for the place of the next bytes, and then `received` with their number. A chunked body, or
one that ends with the connection, is collected first; our service sends neither, proxies may.

Source: RFC 9112, and as strict as a server is with requests: what two readers could take for two things is malformed.
Lines end with CR LF, a length is digits alone and comes once, `chunked` is the only transfer coding.

One connection, one `Incoming`, one thread at a time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from tierstore.errors import TierstoreError

if TYPE_CHECKING:
    import numpy as np
else:
    from tierstore.lazy import np

HEAD_BYTES = 32 << 10  # of an answer: status line and headers
_LINE_BYTES = 4 << 10  # of a chunk's size and extensions, or a trailer
_NO_BODY = (204, 304)
_SMALL_BYTES = 64 << 10
_BEGINNING = b"HTTP/1."
_TLS = ("\x15\x03", "\x16\x03")  # records of alerts and handshakes
_STATUS_LINE = re.compile(r"(HTTP/1\.[01]) ([1-9][0-9]{2})(?: [\t -~\x80-\xff]*)?")
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIELD = re.compile(rf"({_TOKEN}):([\t -~\x80-\xff]*)")
_CHUNK_SIZE = re.compile(rf'([0-9A-Fa-f]{{1,15}})(?:;{_TOKEN}(?:=(?:{_TOKEN}|"[^"\\\x00-\x1f]*"))?)*')
_MOST_DIGITS = 18


class Receiver(Protocol):
    """Receives one answer. `start` is called first; then `nbytes` bytes in all are written where `buffer` says."""

    def start(self, status: int, headers: Mapping[str, str], nbytes: int) -> None: ...
    def buffer(self) -> memoryview: ...
    def received(self, n: int) -> None: ...


class MalformedAnswer(TierstoreError):
    """The answer is not HTTP/1.1."""


def decimal(text: str) -> int | None:
    """A number of ASCII digits alone, of at most 18; None for anything else, such as `+5`, `1_0` or `²`."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def body_memory(nbytes: int) -> memoryview:
    """Memory for a body, of which the system gives each page once it is written to: a length that is only
    announced costs nothing. MemoryError.
    """
    return memoryview(bytearray(nbytes)) if nbytes <= _SMALL_BYTES else np.empty(nbytes, np.uint8).data


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
        """Report that `n` bytes were written to `buffer`. True when the answer is complete.

        Raises MalformedAnswer, and what the receiver raises; also where there is no memory for what it announces.
        """
        try:
            return self._received(n)
        except MemoryError as error:
            raise MalformedAnswer("there is no memory for the announced bytes of the answer") from error

    def _received(self, n: int) -> bool:
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
        while True:
            end = self._memory.find(b"\r\n\r\n", since, self._filled)
            if end < 0:
                if not _BEGINNING.startswith(self._memory[: min(self._filled, len(_BEGINNING))]):
                    raise _no_http(self._memory[: self._filled].decode("latin-1"))
                if self._filled == HEAD_BYTES:
                    raise MalformedAnswer(f"expected an answer's head of at most {HEAD_BYTES} bytes, got more")
                return False
            version, status, headers = _parse(bytes(self._view[:end]).decode("latin-1"))
            remainder = bytes(self._view[end + 4 : self._filled])
            self._filled = 0
            if status >= 200:
                break
            if status == 101:
                raise MalformedAnswer("the service changes to another protocol, which no request asked for")
            since, self._filled = 0, len(remainder)  # an interim answer: the final one follows
            self._view[: len(remainder)] = remainder
        connection = [word.strip() for word in headers.get("connection", "").lower().split(",")]
        self.reusable = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        self._status, self._headers = status, headers
        if status in _NO_BODY:
            self._start(0)
            self.reusable = self.reusable and not remainder
            return self._end()
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise MalformedAnswer(
                    f"expected Transfer-Encoding chunked without Content-Length, got {coding[:40]!r}"
                    + ("" if length is None else f" and Content-Length {length[:40]!r}")
                )
            self._collected, self._chunks = bytearray(), _Chunks()
            return self._collect(memoryview(remainder))
        if length is None:
            self._collected, self.reusable = bytearray(), False
            return self._collect(memoryview(remainder))
        nbytes = decimal(length)
        if nbytes is None:
            raise MalformedAnswer(f"expected one number in Content-Length, got {length[:40]!r}")
        self._check(nbytes)
        self._start(nbytes)
        return self._feed(memoryview(remainder))

    def _check(self, nbytes: int) -> None:
        if nbytes > self._most:
            raise MalformedAnswer(f"expected an answer of at most {self._most} bytes, got {nbytes} or more")

    def _start(self, nbytes: int) -> None:
        assert self._receiver is not None
        self._receiver.start(self._status, self._headers, nbytes)
        self._remaining = nbytes

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

    def _deliver(self) -> bool:
        assert self._collected is not None
        if self._chunks is not None and self._chunks.surplus:
            self.reusable = False
        self._start(len(self._collected))
        return self._feed(memoryview(self._collected))

    def _end(self) -> bool:
        self._receiver = None
        return True


def _no_http(got: str) -> MalformedAnswer:
    tls = ": that is TLS, is it an https url?" if got.startswith(_TLS) else ""
    return MalformedAnswer(f"expected an answer of HTTP/1.1, got {got[:80]!r}{tls}")


def _parse(head: str) -> tuple[str, int, dict[str, str]]:
    """(version, status, headers by lower-case name) of an answer's head; lines of one name are one list."""
    first, *lines = head.split("\r\n")
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise _no_http(first)
    headers: dict[str, str] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise MalformedAnswer(f"expected a header `name: value`, got {line[:80]!r}")
        name, value = field[1].lower(), field[2].strip(" ")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return status_line[1], int(status_line[2]), headers


class _Chunks:
    """The chunked transfer coding, decoded as it arrives."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._remaining = 0  # of the chunk
        self._trailer_bytes = 0
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
            if self._line[-2:] != b"\r\n":
                raise MalformedAnswer(
                    f"expected CR LF at the end of a line between chunks, got {bytes(self._line[-40:])!r}"
                )
            line, self._line = self._line[:-2].decode("latin-1"), bytearray()
            if self._took(line):
                self.surplus = bool(data)
                return True
        return False

    def _took(self, line: str) -> bool:
        """Take a line between chunks. True for the last one."""
        if self._state == "end":
            if line:
                raise MalformedAnswer(f"expected the end of a chunk, got {line[:40]!r}")
            self._state = "size"
        elif self._state == "trailer":
            self._trailer_bytes += len(line)
            if self._trailer_bytes > HEAD_BYTES or (line and _FIELD.fullmatch(line) is None):
                raise MalformedAnswer(f"expected trailers of at most {HEAD_BYTES} bytes, got {line[:40]!r}")
            return not line
        else:
            size = _CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise MalformedAnswer(f"expected a chunk's size, got {line[:40]!r}")
            self._remaining = int(size[1], 16)
            self._state = "data" if self._remaining else "trailer"
        return False
