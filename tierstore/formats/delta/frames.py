"""The framing of concatenated Arrow IPC streams, read before any of it is decoded.

It finds what the Arrow reader does not: where each stream ends, whether its end marker is there (the
reader accepts a stream that was cut between two messages), and how much memory the compressed buffers
claim to need. Pure functions over bytes; any thread may call them.

Layout: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
and `Message.fbs` of the Arrow project; metadata are FlatBuffers tables.
"""

from __future__ import annotations

import struct

_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # header types of a message

_U16, _U32, _I32, _I64 = (struct.Struct(code) for code in ("<H", "<I", "<i", "<q"))


class BadFrames(ValueError):
    """The bytes are not whole Arrow IPC streams."""


def split_streams(data: memoryview, max_decoded_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """(start, end) of each stream in `data`, which they fill without a gap, each with its end marker; and how many
    bytes they claim to take once decompressed.

    Raises BadFrames if a stream is cut or anything else lies between or after them, or if buffers, once
    decompressed, would take more than `max_decoded_bytes` together.
    """
    try:
        return _split(data, max_decoded_bytes)
    except (struct.error, IndexError, OverflowError) as error:
        raise BadFrames(f"not an Arrow IPC stream: {error}") from error


def _split(data: memoryview, max_decoded_bytes: int) -> tuple[list[tuple[int, int]], int]:
    streams = []
    position, decoded = 0, 0
    while position < len(data):
        start = position
        expected_schema = True
        while True:
            length, position = _prefix(data, position)
            if length == 0:
                break
            if length < 0 or position + length > len(data):
                raise BadFrames(f"the message at byte {start} runs past the end: the stream was cut")
            message = _Table.root(data[position : position + length])
            position += length
            kind, body_length = message.u8(1), message.i64(3)
            if (kind == _SCHEMA) is not expected_schema:
                raise BadFrames("expected a schema message first, and none after it")
            expected_schema = False
            if body_length < 0 or position + body_length > len(data):
                raise BadFrames(f"a message's body of {body_length} bytes runs past the end: the stream was cut")
            decoded += _decoded_bytes(message, kind, data[position : position + body_length])
            if decoded > max_decoded_bytes:
                raise BadFrames(f"would take more than {max_decoded_bytes} bytes in memory: split it")
            position += body_length
        if expected_schema:
            raise BadFrames(f"expected a stream at byte {start}, got an end marker")
        streams.append((start, position))
    return streams, decoded


def _prefix(data: memoryview, position: int) -> tuple[int, int]:
    """(metadata length, position after the prefix); length 0 is the end marker."""
    if position + 8 > len(data):
        raise BadFrames("no end marker: the stream was cut")
    if _U32.unpack_from(data, position)[0] != _CONTINUATION:
        raise BadFrames(f"expected an Arrow IPC message at byte {position}, got other bytes")
    return _I32.unpack_from(data, position + 4)[0], position + 8


def _decoded_bytes(message: _Table, kind: int, body: memoryview) -> int:
    """Bytes of the decoded message: its body, or what its compressed buffers claim."""
    if kind not in (_DICTIONARY, _BATCH):
        return len(body)
    batch = message.table(2)
    if kind == _DICTIONARY and batch is not None:
        batch = batch.table(1)
    if batch is None:
        raise BadFrames("a record batch message without a record batch")
    if batch.table(3) is None:
        return len(body)
    total = 0
    for offset, length in batch.pairs(2):
        if length == 0:
            continue
        if offset < 0 or length < 8 or offset + length > len(body):
            raise BadFrames("a compressed buffer lies outside its message")
        claimed = _I64.unpack_from(body, offset)[0]
        total += length if claimed == -1 else claimed  # -1: this one is not compressed
        if claimed < -1:
            raise BadFrames(f"a compressed buffer claims {claimed} bytes")
    return total


class _Table:
    """A FlatBuffers table: a signed offset to its vtable, which gives each field's place or 0."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data, self._position = data, position
        self._vtable = position - self._at(_I32, position)
        self._vtable_bytes = self._at(_U16, self._vtable)

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        if len(data) < 8:
            raise BadFrames("a message's metadata is too short")
        return cls(data, _U32.unpack_from(data, 0)[0])

    def u8(self, field: int) -> int:
        place = self._place(field)
        return self._data[place] if place else 0

    def i64(self, field: int) -> int:
        place = self._place(field)
        return self._at(_I64, place) if place else 0

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return _Table(self._data, place + self._at(_U32, place)) if place else None

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """A vector of structs of two int64."""
        place = self._place(field)
        if not place:
            return []
        vector = place + self._at(_U32, place)
        count = self._at(_U32, vector)
        # Message.fbs has the structs aligned to 8; the writer puts them so, and the length before them
        raw = self._data[vector + 4 : vector + 4 + 16 * count]
        if len(raw) != 16 * count:
            raise BadFrames("a list of buffers runs past the end of its message")
        return list(struct.iter_unpack("<qq", raw))

    def _place(self, field: int) -> int:
        slot = 4 + 2 * field
        if slot + 2 > self._vtable_bytes:
            return 0
        offset = self._at(_U16, self._vtable + slot)
        return self._position + offset if offset else 0

    def _at(self, kind: struct.Struct, position: int) -> int:
        if position < 0:  # would count from the end
            raise BadFrames("an offset points before its message")
        return int(kind.unpack_from(self._data, position)[0])
