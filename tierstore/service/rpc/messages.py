"""gRPC messages on an HTTP/2 stream: their prefix, their coding, a call's deadline, and its status in trailers.

Source: gRPC over HTTP/2 (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md). Pure functions, `Messages`,
which belongs to one stream, and `WireMessage`, which one thread decodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress

from tierstore.errors import InvalidInput, Overloaded, TierstoreError
from tierstore.service.error_status import MessageTooLarge, Unserved, grpc_status, message_of
from tierstore.service.limits.inflate import MOST_MEMBERS, inflate
from tierstore.service.limits.shedding import WAITS_TOO_LONG
from tierstore.service.reactor.hpack import encode_head

PREFIX_BYTES = 5  # before a message: whether it is compressed, and its length
CONTENT_TYPE = b"application/grpc"
CODES = {
    name: number
    for number, name in enumerate(
        (
            "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
            "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
            "UNIMPLEMENTED",
            "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
        )
    )
}  # fmt: skip
ENDS = "the service ends; send the remaining requests to another one"
IDLE = "this stream was idle, and another one needed its place; open it again"
MOST_DETAILS = 2048  # bytes of a status' text; up to three times as many once encoded
ACCEPTED = (b"grpc-accept-encoding", b"identity,deflate,gzip")
_CODINGS = {b"gzip": 31, b"deflate": 15}  # with zlib's wbits
MOST_SHORT = 256 << 10  # the most bytes of a message that the event loop itself reads


def prefixed(message: bytes) -> bytes:
    """`message` as it is sent on a stream."""
    return prefix_of(message) + message


def prefix_of(message: bytes) -> bytes:
    return b"\x00" + len(message).to_bytes(4, "big")


def status_of(code: str, details: str) -> list[tuple[bytes, bytes]]:
    """A status as trailers. The text is cut: with a longer one a client may see no status at all."""
    trailers = [(b"grpc-status", b"%d" % CODES[code])]
    if details:
        text = details.encode(errors="replace")
        if len(text) > MOST_DETAILS:
            text = text[:MOST_DETAILS].decode(errors="ignore").encode() + "…".encode()
        trailers.append((b"grpc-message", _encoded(text)))
    return trailers


def status_alone(code: str, details: str) -> list[tuple[bytes, bytes]]:
    """The headers of an answer with only a status."""
    return [(b"content-type", CONTENT_TYPE), *status_of(code, details)]


def _encoded(text: bytes) -> bytes:
    """Percent-encoded: everything but printable ASCII, and the sign itself."""
    return b"".join(b"%c" % byte if 0x20 <= byte < 0x7F and byte != 0x25 else b"%%%02X" % byte for byte in text)


_TOO_LONG = Overloaded(WAITS_TOO_LONG)
REFUSAL = encode_head(200, status_alone(grpc_status(_TOO_LONG), message_of(_TOO_LONG)))  # by a reactor, of a prediction


class WireMessage:
    """A message as it came. It is compressed until `decode`, which takes time: the thread that answers calls it."""

    __slots__ = ("_coding", "_data", "_most")

    def __init__(self, data: bytes, coding: bytes | None = None, limit: int = 0) -> None:
        """`coding`: how it is compressed, or None. `limit`: the most bytes that it may decode to."""
        self._data, self._coding = data, coding
        self._most = limit, "are allowed (max_request)"

    def __len__(self) -> int:
        """The number of bytes that it takes now."""
        return len(self._data)

    @property
    def plain(self) -> bytes:
        """The bytes; none as long as they are compressed."""
        return b"" if self._coding is not None else self._data

    def decode(self, reserve: Callable[[int], None]) -> bytes:
        """Return the bytes, decoded if need be. `reserve` is called with bytes before they are decoded.

        MessageTooLarge, InvalidInput for malformed bytes.
        """
        if self._coding is not None:
            self._data, self._coding = self._decoded(self._coding, reserve), None
        return self._data

    def short(self) -> bytes:
        """Return the bytes, for a method that answers on the event loop. MessageTooLarge above MOST_SHORT."""
        if len(self._data) <= MOST_SHORT:  # also of a compressed one, which may be long and decode to little
            self._most = MOST_SHORT, "this method takes"
            self.decode(lambda nbytes: None)
        if len(self._data) > MOST_SHORT:
            raise MessageTooLarge(f"a message of {len(self._data)} bytes, this method takes {MOST_SHORT}")
        return self._data

    def if_short(self) -> bytes:
        """Return the bytes of a message that has failed, for its model and its id; none if decoding takes long."""
        if self._coding is not None:
            with suppress(TierstoreError):
                self.short()
        return self.plain

    def _decoded(self, coding: bytes, reserve: Callable[[int], None]) -> bytes:
        name, (limit, why) = coding.decode(), self._most
        try:
            decoded, read = inflate(memoryview(self._data), _CODINGS[coding], limit, reserve)
        except EOFError:
            raise InvalidInput(f"a message in {name} is cut short") from None
        except zlib.error as error:
            raise InvalidInput(f"a message is not valid {name}: {error}") from error
        if len(decoded) > limit:
            raise MessageTooLarge(f"a message decodes to more than the {limit} bytes that {why}")
        if read < len(self._data):
            raise InvalidInput(f"a message in {name} is made of more than {MOST_MEMBERS} members")
        return bytes(decoded)


class Messages:
    """Messages taken from the data of one stream. `limit` is the most bytes of one, as it arrives and decoded. One
    thread.
    """

    def __init__(self, coding: bytes | None, limit: int) -> None:
        """`coding` is the value of `grpc-encoding`. Unserved for an unknown one."""
        self._coding = None if coding in (None, b"identity") else coding
        if self._coding is not None and self._coding not in _CODINGS:
            raise Unserved(f"grpc-encoding {self._coding[:40].decode('latin-1')!r} is not known; use gzip or deflate")
        self._limit = limit
        self._data = bytearray()

    def __len__(self) -> int:
        """Bytes that have come and are not taken yet."""
        return len(self._data)

    def add(self, data: bytes) -> None:
        self._data += data

    @property
    def is_whole(self) -> bool:
        """Whether the next message has come."""
        data = self._data
        return len(data) >= PREFIX_BYTES and len(data) >= PREFIX_BYTES + _size_of(data)

    def next(self) -> WireMessage | None:
        """The next message; None: it has not come yet. MessageTooLarge, InvalidInput for malformed bytes."""
        message = self.first(self._data)
        if message is not None:
            del self._data[: PREFIX_BYTES + len(message)]
        return message

    def first(self, data: bytes | bytearray) -> WireMessage | None:
        """The message that begins `data`; None: it is incomplete. Errors as of `next`."""
        if len(data) < PREFIX_BYTES:
            return None
        size = _size_of(data)
        if size > self._limit:
            raise MessageTooLarge(f"a message of {size} bytes, {self._limit} are allowed (max_request)")
        if len(data) < PREFIX_BYTES + size:
            return None
        compressed = data[0]
        if compressed > 1 or (compressed and self._coding is None):
            raise InvalidInput("a message is marked as compressed, and no grpc-encoding says how")
        with memoryview(data) as view:
            message = bytes(view[PREFIX_BYTES : PREFIX_BYTES + size])
        return WireMessage(message, self._coding if compressed else None, self._limit)


def _size_of(data: bytes | bytearray) -> int:
    return int.from_bytes(data[1:PREFIX_BYTES], "big")
