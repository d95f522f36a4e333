"""Bodies that take much more memory than they have bytes: what they may take is reserved before it is taken.

The sizes that are compared are the kernel's: what a process that does nothing else grows by while it decodes one.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest

from tests.compiled import h2_session
from tests.h2_machine import sessions
from tests.service import http2_client as h2
from tierstore.errors import InvalidInput, Overloaded, TooLarge
from tierstore.service.http.messages import decode_body, parsed_bytes
from tierstore.service.rpc import oip, protobuf, tfserving
from tierstore.service.rpc.messages import WireMessage
from tierstore.service.rpc.protobuf import Parts, length_delimited
from tierstore.wire.http2 import layout as http2_layout

SIZE = 8 << 20

JSON = {
    "empty objects": (b"{},", b"[%s0]"),
    "empty lists": (b"[],", b"[%s0]"),
    "objects of one entry": (b'{"":0},', b"[%s0]"),
    "short strings": (b'"xy",', b"[%s0]"),
    "strings of wide characters": ("\"\U0001f600\",".encode(), b"[%s0]"),
    "a long string with one wide character": (b"a", "[\"%s\U0001f600\"]".encode()),
    "small numbers": (b"1,", b"[%s0]"),
    "fractions": (b"0.5,", b"[%s0]"),
}  # fmt: skip


def of_json(kind: str) -> bytes:
    unit, whole = JSON[kind]
    return whole % (unit * (SIZE // len(unit)))


def field(number: int, content: bytes) -> bytes:
    return length_delimited(bytes([number << 3 | 2]), len(content)) + content


PROTOBUF = {
    "inputs": ("inference.ModelInferRequest", b"\x2a\x00" * (SIZE // 2)),
    "outputs": ("inference.ModelInferRequest", b"\x32\x00" * (SIZE // 2)),
    "parameters": ("inference.ModelInferRequest", b"\x22\x00" * (SIZE // 2)),
    "numbers one by one": ("inference.ModelInferRequest", None),
    "inputs of TensorFlow": ("tensorflow.serving.PredictRequest", b"\x12\x00" * (SIZE // 2)),
    "strings of TensorFlow": ("tensorflow.serving.PredictRequest", None),
}  # fmt: skip


def of_protobuf(kind: str) -> tuple[str, bytes]:
    name, data = PROTOBUF[kind]
    if kind == "numbers one by one":
        data = field(5, field(5, field(3, bytes(SIZE))))
    if kind == "strings of TensorFlow":
        data = field(2, field(1, b"a") + field(2, b"\x42\x00" * (SIZE // 2)))
    assert data is not None
    return name, data


def grown(code: str, data: bytes) -> int:
    """By how much a process grows while it runs `code` on `data`."""
    imports, _, expression = code.partition(" --- ")
    script = f"""
import re, sys
data = sys.stdin.buffer.read()
{imports}
def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here on
before = kib("VmRSS")
held = {expression}
print((kib("VmHWM") - before) << 10)
"""
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True, timeout=120)
    return int(done.stdout)


@pytest.mark.parametrize("kind", JSON)
def test_json_takes_no_more_than_is_reserved_for_it(kind: str) -> None:
    data = of_json(kind)
    assert 0 < grown("import orjson --- orjson.loads(data)", data) <= parsed_bytes(memoryview(data))


@pytest.mark.parametrize("kind", PROTOBUF)
def test_a_message_takes_no_more_than_is_reserved_for_it(kind: str) -> None:
    name, data = of_protobuf(kind)
    times = tfserving._PARSED_TIMES if name.startswith("tensorflow") else oip._PARSED_TIMES
    code = f"from tierstore.service.rpc.protobuf import message_class; kind = message_class({name!r})"
    assert 0 < grown(f"{code} --- kind.FromString(data)", data) <= protobuf.parsed_bytes(data, times)


def test_tensors_as_bytes_are_reserved_once_and_what_is_beside_them_as_often_as_it_may_grow() -> None:
    tensor = field(4, bytes(SIZE))
    message = field(2, field(1, b"a") + field(2, tensor)) * 2
    nbytes = protobuf.parsed_bytes(message, 80, (2, 2, 4))
    assert 2 * SIZE <= nbytes < 2 * SIZE + 80 * 100
    hidden = field(2, b"\x0a\x00" * SIZE)
    assert protobuf.parsed_bytes(hidden, 80, (2, 2, 4)) >= 80 * 2 * SIZE - 100


def test_raw_tensors_without_end_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at most 4,096"):
        Parts(b"\x3a\x00" * 5000)


@pytest.mark.parametrize("coding", [b"gzip", b"deflate"])
def test_a_compressed_body_is_reserved_before_it_is_decoded(coding: bytes) -> None:
    coder = zlib.compressobj(9, zlib.DEFLATED, 31 if coding == b"gzip" else 15)
    body = coder.compress(bytes(32 << 20)) + coder.flush()
    assert len(body) < 64 << 10
    reserved = 0

    def reserve(nbytes: int) -> None:
        nonlocal reserved
        if reserved + nbytes > 4 << 20:
            raise Overloaded("no more")
        reserved += nbytes

    with pytest.raises(Overloaded):
        decode_body(memoryview(body), coding, 64 << 20, reserve)
    assert reserved > 3 << 20
    assert len(decode_body(memoryview(body), coding, 64 << 20, lambda nbytes: None)) == 32 << 20


LOOK_UP = h2.head("/v2/models/ctr/infer", "POST")
LARGE = b"\x40" + h2.block([("x-large", "v" * 3900)])[1:]  # of which the table keeps a copy, as entry 62
AGAIN = b"\xbe"
CONNECTIONS = 64


class Watched:
    """A decoder of zlib that takes no more at once than a part: what it has not used it copies."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def decompress(self, data: bytes | memoryview, most: int) -> bytes:
        assert len(data) <= 256 << 10
        part: bytes = self._decoder.decompress(data, most)
        return part


@pytest.mark.parametrize("coding", [b"gzip", b"deflate"])
@pytest.mark.parametrize("over", ["http", "grpc"])
def test_what_is_compressed_is_decoded_a_part_at_a_time(
    monkeypatch: pytest.MonkeyPatch, over: str, coding: bytes
) -> None:
    """Else each part copies all that follows it: the time would grow with the square of the length."""
    noise = np.random.default_rng(1).bytes(3 << 20)
    data = noise + bytes(3 << 20) + noise[:5]
    coder = zlib.compressobj(1, zlib.DEFLATED, 31 if coding == b"gzip" else 15)
    packed = coder.compress(data) + coder.flush()
    decoder, reserved = zlib.decompressobj, list[int]()
    monkeypatch.setattr(zlib, "decompressobj", lambda wbits: Watched(decoder(wbits)))

    def decode(packed: bytes, limit: int) -> bytes:
        if over == "grpc":
            return WireMessage(packed, coding, limit).decode(reserved.append)
        return bytes(decode_body(memoryview(packed), coding, limit, reserved.append))

    assert decode(packed, len(data)) == data
    assert len(data) <= sum(reserved) <= len(data) + (512 << 10)
    with pytest.raises(TooLarge, match=f"more than the {len(data) - 1} bytes"):
        decode(packed, len(data) - 1)
    for cut in (0, 1, 1000, len(packed) // 2, len(packed) - 1):
        with pytest.raises(InvalidInput, match="is cut short"):
            decode(packed[:cut], len(data))
    with pytest.raises(InvalidInput, match=f"is not valid {coding.decode()}"):
        decode(packed[:-1] + bytes([packed[-1] ^ 1]), len(data))
    assert decode(packed * 2, 2 * len(data)) == data * 2
    with pytest.raises(InvalidInput, match=f"is not valid {coding.decode()}"):
        decode(packed + b"what follows", len(data))
    coder = zlib.compressobj(1, zlib.DEFLATED, 31 if coding == b"gzip" else 15)
    small = coder.compress(b"x") + coder.flush()
    assert decode(small * 16, 99) == b"x" * 16
    with pytest.raises(InvalidInput, match=r"more than 16 (gzip )?members"):
        decode(small * 17, 99)


def opened(fields: bytes) -> bytes:
    """As many requests as a connection may have, the first one's fields with LARGE before them; none of them ends."""
    return b"".join(
        h2.frame(h2.HEADERS, h2.END_HEADERS, stream, LOOK_UP + (LARGE if stream == 1 else b"") + fields)
        for stream in range(1, 2 * http2_layout.MOST_STREAMS, 2)
    )


HTTP2 = {
    "a field of the table many times": opened(AGAIN * 255),  # 1 MB each
    "lists that are just small enough": opened(AGAIN * 3),
    "a block without an end": h2.frame(h2.HEADERS, 0, 1, LOOK_UP)
    + h2.frame(h2.CONTINUATION, 0, 1, LARGE) * (http2_layout.MOST_BLOCK_BYTES // len(LARGE) - 1),
    "requests without an end": opened(b""),
    "bodies without an end": opened(b"")
    + b"".join(h2.frame(h2.DATA, 0, stream, bytes(16000)) for stream in range(1, 2 * http2_layout.MOST_STREAMS, 2)),
}
WORST = ("a field of the table many times", "bodies without an end")


@pytest.mark.parametrize(
    "kind", [kind if kind in WORST else pytest.param(kind, marks=pytest.mark.thorough) for kind in HTTP2]
)
def test_a_connection_of_http_2_takes_no_more_than_counts_and_a_fixed_part(kind: str) -> None:
    data = h2.settings() + HTTP2[kind]
    (session,) = sessions(data, 1)
    counted = http2_layout.SESSION.view(session).held
    h2_session.free(session)
    fixed = (
        http2_layout.SESSION_BYTES
        + http2_layout.STREAM_BYTES * http2_layout.MOST_STREAMS
        + http2_layout.MOST_BLOCK_BYTES
        + (1 << 14)
    )
    grew = grown(f"from tests.h2_machine import sessions; sessions(data, 1) --- sessions(data, {CONNECTIONS})", data)
    assert CONNECTIONS * counted // 2 <= grew <= CONNECTIONS * (2 * counted + fixed)
    assert fixed < 1 << 17
