"""HTTP/2 header blocks (HPACK, RFC 7541) written by Python: fields that enter no table, so that a block depends on
no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from tierstore.wire.http2.hpack import STATIC

Fields = Iterable[tuple[bytes, bytes]]

_PLACES = {name.encode(): place for place, (name, _) in reversed(list(enumerate(STATIC, 1)))}
_STATUSES = {int(value): bytes((0x80 | place,)) for place, (name, value) in enumerate(STATIC, 1) if name == ":status"}
# fields of a connection and not of a stream (RFC 9113, 8.2.2)
_OF_CONNECTIONS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}


def _integer(value: int, mask: int) -> bytes:
    """An integer whose prefix is the bits of `mask`."""
    if value < mask:
        return bytes((value,))
    written, value = bytearray((mask,)), value - mask
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    written.append(value)
    return bytes(written)


@lru_cache(256)
def _name(name: bytes) -> bytes:
    place = _PLACES.get(name)
    return b"\0" + _integer(len(name), 127) + name if place is None else _integer(place, 15)


def _field(name: bytes, value: bytes) -> bytes:
    return _name(name) + _integer(len(value), 127) + value


def encode(fields: Fields) -> bytes:
    """`fields` as a header block, without those of connections."""
    return b"".join(
        _field(lowered, value) for name, value in fields if (lowered := name.lower()) not in _OF_CONNECTIONS
    )


def encode_head(status: int, fields: Fields) -> bytes:
    """The header block of an answer."""
    return (_STATUSES.get(status) or _field(b":status", b"%d" % status)) + encode(fields)
