"""The messages of the gRPC protocols: their classes, and their bytes where protobuf would copy tensors.

The classes are in a pool of their own, loaded when this module is imported. The descriptors are `protocols.binpb`,
which `tools/make_protocols.py` makes from `schema/grpc/*.proto`. In a pool of their own they collide with no other
copy in the same process (a client's, TensorFlow's), and without generated code they depend on no particular release of
protobuf.

A request is split, and a response joined, by the wire format (https://protobuf.dev/programming-guides/encoding):
tensors of a request are views of the received message, those of a response are copied once, into the message that is
sent. Protobuf parses and builds the remaining fields. Pure functions; any thread.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

from tierstore.errors import InvalidInput

FILE = "protocols.binpb"


def _load() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for standard in (any_pb2, wrappers_pb2):
        pool.AddSerializedFile(standard.DESCRIPTOR.serialized_pb)
    shipped = descriptor_pb2.FileDescriptorSet.FromString(files(__package__).joinpath(FILE).read_bytes())
    for file in shipped.file:  # each comes after those that it imports
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _load()


def message_class(name: str) -> Any:
    """The class of a message, by its full name: `message_class("inference.ModelInferRequest")`."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def service_descriptor(name: str) -> Any:
    """The descriptor of a service, by its full name."""
    return POOL.FindServiceByName(name)


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# One byte each: field number, and the wire type of bytes.
REQUEST_ID = 3 << 3 | _BYTES
_RAW_INPUT = 7 << 3 | _BYTES
RESPONSE_ID = b"\x1a"
RAW_OUTPUT = b"\x32"
_LONGEST_VARINT = 10
_FIRST = b"\n"  # of bytes, number 1
_MOST_RAW = 4096  # raw tensors of a request
_SMALL = 64 << 10  # handling so small a message takes less than a thread needs anyway
_MOST_FIELDS = 4096  # fields that are read one by one


def parsed_bytes(message: bytes, times: int, raw: tuple[int, ...] = ()) -> int:
    """The most memory that protobuf takes for a message, besides its own bytes; 0 if that is little.

    `times` is the worst that a byte of it may become. `raw`: the numbers of the fields that lead to one whose bytes
    are only copied.
    """
    if len(message) <= _SMALL:
        return 0
    beside = _bytes_beside(message, 0, len(message), raw, [_MOST_FIELDS]) if raw else len(message)
    return times * beside + len(message) - beside


def _bytes_beside(message: bytes, at: int, end: int, path: tuple[int, ...], fields: list[int]) -> int:
    """The number of bytes [at, end) outside of the field at `path`."""
    beside = 0
    while at < end:
        start, fields[0] = at, fields[0] - 1
        if fields[0] < 0:
            return beside + end - at
        if message[at] != path[0] << 3 | _BYTES:
            at = _skip(message, at)
            beside += at - start
        else:
            size, at = _varint(message, at + 1)
            beside += at - start
            if len(path) > 1:
                beside += _bytes_beside(message, at, min(end, at + size), path[1:], fields)
            at += size
    return beside


class Parts:
    """The parts of a ModelInferRequest: `meta` is the message without its id and its raw tensors."""

    __slots__ = ("id", "meta", "raw")

    def __init__(self, message: bytes) -> None:
        self.id = b""
        self.raw: list[memoryview] = []
        pieces: list[memoryview] = []
        view = memoryview(message)
        at = piece_start = 0
        end = len(message)
        while at < end:
            tag, start = message[at], at
            if tag in (_RAW_INPUT, REQUEST_ID):
                size, at = _varint(message, at + 1)
                stop = at + size
                if stop > end:
                    raise _malformed()
                if tag == _RAW_INPUT:
                    if len(self.raw) == _MOST_RAW:
                        raise InvalidInput(f"raw_input_contents: expected at most {_MOST_RAW:,}")
                    self.raw.append(view[at:stop])
                else:
                    self.id = message[at:stop]
                if piece_start < start:
                    pieces.append(view[piece_start:start])
                at = piece_start = stop
            else:
                at = _skip(message, at)
                if at > end:
                    raise _malformed()
        if piece_start < end:
            pieces.append(view[piece_start:])
        self.meta = b"".join(pieces)


def first_field(message: bytes) -> bytes:
    """Field 1, of bytes, of a message that begins with it, as serializers write it; empty otherwise, or if it is
    cut.
    """
    if not message.startswith(_FIRST):
        return b""
    try:
        size, at = _varint(message, 1)
    except InvalidInput:
        return b""
    return message[at : at + size] if at + size <= len(message) else b""


def first_text(message: bytes) -> str | None:
    """The text of `first_field`; None if it is not text."""
    try:
        return first_field(message).decode() or None
    except UnicodeDecodeError:
        return None


def _skip(message: bytes, at: int) -> int:
    """Where the field at `at` ends; beyond the message's end if it is cut."""
    tag, at = _varint(message, at)
    match tag & 7:
        case 2:
            size, at = _varint(message, at)
            return at + size
        case 0:
            return _varint(message, at)[1]
        case 1:
            return at + 8
        case 5:
            return at + 4
    raise _malformed()


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends) of the varint at `at`."""
    value = shift = 0
    try:
        while (byte := message[at]) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift > 7 * _LONGEST_VARINT:
                raise _malformed()
    except IndexError:
        raise _malformed() from None
    return value | byte << shift, at + 1


def _malformed() -> InvalidInput:
    return InvalidInput("the message is not a inference.ModelInferRequest: malformed")


def varint(value: int) -> bytes:
    """`value`, not negative, as a varint."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def length_delimited(tag: bytes, size: int) -> bytes:
    """The bytes in front of a field of `size` bytes."""
    return tag + varint(size)
