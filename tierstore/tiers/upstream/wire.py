"""Messages between a front and upstream nodes: paths, and rows as bytes. Pure functions.

A request for rows is a POST with the body `<line: 16 characters> <upto: int64> <floor: int64> <codes: int64[n], ascending>`, all little-endian: it
asks for rows as of `upto` that have at least the delta `floor`. Its answer is `<seq: int64> <n: int64> <states: uint8[n]> <zeros up to a multiple of
64 bytes> <rows>`: the seq of all rows, one state for each code, and the rows of the codes that exist, end to end, as stored. Kernels write and read
both (`lookup/front_rows.py`, `reads.py`; `layout.py` has the constants).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.errors import Corruption
from tierstore.tiers.upstream.layout import ANSWER_HEAD_BYTES, LINE_BYTES, ROWS_STEP
from tierstore.types import Keys, Rows

PREFIX = "/upstream"
OCTETS = "application/octet-stream"
MOST_KEYS = 65536  # in a request
MOST_BYTES = 16 << 20  # of the rows in an answer
_HEAD = struct.Struct("<qq")
_REQUEST = struct.Struct(f"<{LINE_BYTES}sqq")
_ENTRY = struct.Struct("<qQ")  # a delta's seq and bytes; its digest and its bytes follow
DIGEST_BYTES = 16
MOST_LOG_BYTES = 16 << 20  # of an answer with deltas, without its last delta


def keys_at_once(row_bytes: int) -> int:
    """The most codes of a request."""
    return max(1, min(MOST_KEYS, MOST_BYTES // row_bytes))


def rows_path(model: str, version: int, table: str) -> str:
    return f"{PREFIX}/models/{model}/versions/{version}/tables/{table}/rows"


def explain_path(model: str, version: int, table: str) -> str:
    """The path that explains codes: a POST of JSON, `{"line", "upto", "codes"}`."""
    return f"{PREFIX}/models/{model}/versions/{version}/tables/{table}/explain"


def rows_begin(keys: int) -> int:
    """Where the rows begin in an answer for so many codes."""
    return -(-(ANSWER_HEAD_BYTES + keys) // ROWS_STEP) * ROWS_STEP


def encode_rows(seq: int, states: npt.NDArray[np.uint8], rows: Rows) -> list[bytes | memoryview]:
    """The answer, in parts. `rows` uint8[number of THERE in `states`, row_bytes], in the order of the codes."""
    n = len(states)
    gap = bytes(rows_begin(n) - ANSWER_HEAD_BYTES - n)
    parts: list[bytes | memoryview] = [_HEAD.pack(seq, n) + states.tobytes() + gap]
    if rows.size:
        parts.append(np.ascontiguousarray(rows).data.cast("B"))
    return parts


def answer_bytes(keys: int, row_bytes: int) -> int:
    """The most bytes of an answer for so many codes."""
    return rows_begin(keys) + keys * row_bytes


class RowsRequest(NamedTuple):
    upto: int
    floor: int
    line: str
    codes: Keys


MOST_REQUEST_BYTES = _REQUEST.size + 8 * MOST_KEYS


def encode_request(request: RowsRequest) -> bytes:
    head = _REQUEST.pack(request.line.encode(), request.upto, request.floor)
    return head + np.ascontiguousarray(request.codes, "<i8").tobytes()


def decode_request(body: bytes | bytearray | memoryview) -> RowsRequest:
    """Parse a request. ValueError if it is malformed, or its codes are not ascending and distinct."""
    size = len(body) - _REQUEST.size
    if size % 8 or not 0 <= size <= 8 * MOST_KEYS:
        raise ValueError(
            f"expected at most {MOST_KEYS} codes of 8 bytes after {_REQUEST.size} bytes, got {len(body)} bytes"
        )
    line, upto, floor = _REQUEST.unpack_from(body)
    codes: Keys = np.frombuffer(body, "<i8", offset=_REQUEST.size)
    if len(codes) > 1 and not (codes[1:] > codes[:-1]).all():
        raise ValueError("expected codes that are ascending and distinct")
    return RowsRequest(upto, floor, line.decode("ascii", "replace"), codes)


class LoggedDelta(NamedTuple):
    """A delta as it is in the log."""

    seq: int
    digest: str
    data: bytes


def encode_entries(entries: list[LoggedDelta]) -> list[bytes | memoryview]:
    """Deltas as bytes, in parts."""
    parts: list[bytes | memoryview] = []
    for seq, digest, data in entries:
        parts += [_ENTRY.pack(seq, len(data)), digest.encode().ljust(DIGEST_BYTES), data]
    return parts


def decode_entries(body: bytes | bytearray | memoryview, after: int, count: int) -> list[LoggedDelta]:
    """At most `count` deltas, from `after + 1` on, each checked against its digest. Corruption for anything else."""
    entries = list[LoggedDelta]()
    at, text = 0, memoryview(body)
    while at < len(body):
        data_at, expected = at + _ENTRY.size + DIGEST_BYTES, after + 1 + len(entries)
        seq, size = _ENTRY.unpack_from(body, at) if data_at <= len(body) else (0, 0)
        if size > len(body) - data_at:
            raise Corruption(f"expected whole deltas, got {len(body)} bytes that end within one")
        if len(entries) == count or seq != expected:
            raise Corruption(f"expected delta {expected}, and at most {count} from {after + 1} on, got delta {seq}")
        data, digest = bytes(text[data_at : data_at + size]), xxhash.xxh3_64_hexdigest(text[data_at : data_at + size])
        if digest.encode() != text[at + _ENTRY.size : data_at]:
            raise Corruption(f"delta {seq} was damaged on its way: it does not match its digest")
        entries.append(LoggedDelta(seq, digest, data))
        at = data_at + size
    return entries
