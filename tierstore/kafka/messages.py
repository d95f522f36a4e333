"""A delta as Kafka messages: one, or several parts where it is larger than a message may be.

Headers of a message, in UTF-8: `model`, `seq`, `part` (from 1), `parts`, and `digest`, the XXH3-64 of the whole delta
in 16 hex digits. A message without `part` is a whole delta, and needs no header. `traceparent` and `tracestate` say in
which trace it was written (W3C Trace Context). Pure functions and values; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import xxhash

from tierstore.arguments import check_name
from tierstore.errors import DeltaError, InvalidInput
from tierstore.formats.delta.reader import Delta, read_delta
from tierstore.formats.names import MAX_ORDINAL

MAX_PARTS = 100_000
_DECIMAL = re.compile("[0-9]{1,19}")
_DIGEST = re.compile("[0-9a-f]{16}")

Headers = list[tuple[str, bytes]]


class KafkaMessage(NamedTuple):
    """A message as it was read. timestamp_ms: since 1970, 0 where the broker gives none. is_null: it has
    no value at all, a tombstone.
    """

    partition: int
    offset: int
    value: bytes
    headers: Sequence[tuple[str, bytes | None]]
    timestamp_ms: int
    key: bytes | None = None
    is_null: bool = False


@dataclass(frozen=True, slots=True)
class MessageHeaders:
    """What a message says of itself. digest: of the whole delta, or None where the message
    does not say it. trace: headers.
    """

    model: str
    seq: int
    part: int
    parts: int
    digest: str | None
    trace: dict[str, str] = field(default_factory=dict)


def digest_of(data: bytes | memoryview) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))


def headers_of(message: KafkaMessage) -> MessageHeaders:
    """Read the headers, and where there are none the delta's own metadata. DeltaError, which says what is wrong."""
    headers = {name: value for name, value in message.headers if value is not None}
    model, seq = _text(headers, "model"), _number(headers, "seq", MAX_ORDINAL)
    part, parts = _number(headers, "part", MAX_PARTS), _number(headers, "parts", MAX_PARTS)
    digest = _text(headers, "digest")
    if digest is not None and _DIGEST.fullmatch(digest) is None:
        raise DeltaError(f"header `digest`: expected 16 hex digits, got {digest[:40]!r}")
    if (part is None) != (parts is None) or (part or 1) > (parts or 1):
        raise DeltaError(f"headers `part` and `parts`: expected a part of that many, got {part} of {parts}")
    if model is None or seq is None:
        if parts is not None and parts > 1:
            raise DeltaError("headers: expected `model` and `seq` on a part of a delta")
        model, seq = _own_head(message.value)
    try:
        check_name("model", model)
    except InvalidInput as error:
        raise DeltaError(f"header `model`: {error}") from error
    if (parts or 1) == 1:
        digest = check_digest(message.value, digest)
    trace = {name: value.decode("latin-1") for name, value in headers.items() if name in ("traceparent", "tracestate")}
    return MessageHeaders(model, seq, part or 1, parts or 1, digest, trace)


def check_digest(data: bytes, expected: str | None) -> str:
    """The digest of a delta. DeltaError where another one is expected."""
    digest = digest_of(data)
    if expected not in (None, digest):
        raise DeltaError(
            f"header `digest`: expected {expected} of the whole delta, got {digest}: it was changed on its way"
        )
    return digest


def read_checked(data: bytes, model: str | None, seq: int | None) -> Delta:
    """The delta, which has to be the one that the headers say. DeltaError."""
    delta = read_delta(data)
    if model is not None and (delta.model, delta.seq) != (model, seq):
        raise DeltaError(
            f"the headers say delta {seq} of {model!r}, the message holds delta {delta.seq} of {delta.model!r}"
        )
    return delta


def split(model: str, seq: int, data: bytes, most: int) -> Iterator[tuple[Headers, memoryview]]:
    """The messages of a delta, each of at most `most` bytes."""
    parts = max(1, -(-len(data) // most))
    digest, view = digest_of(data), memoryview(data)
    for part in range(parts):
        text = {"model": model, "seq": str(seq), "part": str(part + 1), "parts": str(parts), "digest": digest}
        yield (
            [(name, value.encode()) for name, value in text.items()],
            view[part * most : (part + 1) * most],
        )


def _text(headers: dict[str, bytes], name: str) -> str | None:
    value = headers.get(name)
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        raise DeltaError(f"header `{name}` is not UTF-8") from None


def _number(headers: dict[str, bytes], name: str, most: int) -> int | None:
    text = _text(headers, name)
    if text is None:
        return None
    if _DECIMAL.fullmatch(text) is None or not 1 <= int(text) <= most:
        raise DeltaError(f"header `{name}`: expected a decimal number from 1 to {most}, got {text[:40]!r}")
    return int(text)


def _own_head(value: bytes) -> tuple[str, int]:
    try:
        metadata = pa.ipc.open_stream(pa.py_buffer(value)).schema.metadata or {}
        model, seq = metadata[b"model"].decode(), metadata[b"seq"].decode()
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        raise DeltaError(
            f"expected headers `model` and `seq`, or an Arrow stream with that metadata: {error}"
        ) from error
    if _DECIMAL.fullmatch(seq) is None or not 1 <= int(seq) <= MAX_ORDINAL:
        raise DeltaError(f"schema metadata 'seq': expected a decimal number from 1 to {MAX_ORDINAL}, got {seq[:40]!r}")
    return model, int(seq)
