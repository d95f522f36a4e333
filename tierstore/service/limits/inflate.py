"""Decoding of what came compressed, within limits. Any thread."""

from __future__ import annotations

import zlib
from collections.abc import Callable

MOST_MEMBERS = 16  # that follow each other, as some writers of gzip make them
_PART_BYTES = 64 << 10  # that are read, and that are decoded, at a time


def inflate(data: memoryview, wbits: int, limit: int, reserve: Callable[[int], None]) -> tuple[bytearray, int]:
    """Decode up to `MOST_MEMBERS` streams that follow each other: the decoded bytes, and how many of `data` were read.

    It ends early once there are more than `limit` decoded bytes. `reserve` is called for bytes before they are decoded,
    a part at a time; its error ends the decoding. EOFError if `data` is cut short, zlib.error if it is malformed.
    """
    decoded, reserved, position = bytearray(), 0, 0
    remaining: bytes | memoryview = b""  # zlib copies what it has not used, so it gets a part only
    for _ in range(MOST_MEMBERS):
        stream = zlib.decompressobj(wbits)
        while not stream.eof:
            if not remaining:
                remaining = data[position : position + _PART_BYTES]
                position += len(remaining)
            if reserved < len(decoded) + _PART_BYTES:
                reserve(_PART_BYTES)
                reserved += _PART_BYTES
            part = stream.decompress(remaining, _PART_BYTES)
            if not part and not remaining and not stream.eof:
                raise EOFError
            decoded += part
            if len(decoded) > limit:
                return decoded, position
            remaining = stream.unconsumed_tail
        remaining = stream.unused_data
        if not remaining and position == len(data):
            break
    return decoded, position - len(remaining)
