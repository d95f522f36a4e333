"""The bytes of inference messages, as far as protobuf would copy tensors: a request taken apart, an answer joined.

Pure functions over the protocol buffers wire format (https://protobuf.dev/programming-guides/encoding); any thread.
Tensors of a request are views of the message as it came, those of an answer are copied once, into the message that is
sent. What describes them is parsed and built by protobuf (`codec.py`).
"""

from __future__ import annotations

from tierstore.errors import InvalidInput

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# One byte each: field number, and the wire type of bytes.
REQUEST_ID = 3 << 3 | _BYTES
_RAW_INPUT = 7 << 3 | _BYTES
RESPONSE_ID = b"\x1a"
RAW_OUTPUT = b"\x32"
_LONGEST_VARINT = 10


class Parts:
    """A ModelInferRequest taken apart: `meta` is the message without its id and its raw tensors.

    `places` are where the raw tensors begin and end.
    """

    __slots__ = ("id", "meta", "places", "raw")

    def __init__(self, message: bytes) -> None:
        self.id = b""
        self.raw: list[memoryview] = []
        self.places: list[tuple[int, int]] = []
        pieces: list[memoryview] = []
        view = memoryview(message)
        at = begun = 0
        end = len(message)
        while at < end:
            tag, start = message[at], at
            if tag in (_RAW_INPUT, REQUEST_ID):
                size, at = _varint(message, at + 1)
                stop = at + size
                if stop > end:
                    raise _malformed()
                if tag == _RAW_INPUT:
                    self.raw.append(view[at:stop])
                    self.places.append((at, stop))
                else:
                    self.id = message[at:stop]
                if begun < start:
                    pieces.append(view[begun:start])
                at = begun = stop
            else:
                at = _skip(message, at)
                if at > end:
                    raise _malformed()
        if begun < end:
            pieces.append(view[begun:])
        self.meta = b"".join(pieces)


class Frame:
    """All of a message but its raw tensors. One as long, with the same bytes there, differs from it in their data alone.

    That is so because a message is taken apart by these bytes only: where each raw tensor ends is said before it.
    """

    __slots__ = ("_gaps", "_length", "_places")

    def __init__(self, message: bytes, places: list[tuple[int, int]]) -> None:
        """`places` are where its raw tensors begin and end, in order."""
        self._length, self._places = len(message), places
        begins, ends = [0, *(stop for _, stop in places)], [*(start for start, _ in places), len(message)]
        self._gaps = [(begin, message[begin:end]) for begin, end in zip(begins, ends, strict=True) if begin < end]

    def raw_of(self, message: bytes) -> list[memoryview] | None:
        """The raw tensors of a message that it fits; None where it does not."""
        if len(message) != self._length:
            return None
        for begin, piece in self._gaps:
            if not message.startswith(piece, begin):
                return None
        view = memoryview(message)
        return [view[start:stop] for start, stop in self._places]


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
    """What stands before a field of `size` bytes."""
    return tag + varint(size)
