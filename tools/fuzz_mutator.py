"""Makes an input of another one: bytes other, or a part of what they hold, with lengths and checksums around it that fit.

What an input holds is told by its bytes, and looked into part by part: a line before a body, an answer of HTTP, JSON (also within a string of
JSON), an archive, tensors behind a header, parts behind their lengths, Redis's protocol.
"""

from __future__ import annotations

import copy
import io
import json
import random
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

from tools.raw_server import http_answer

Joined = Callable[[list[bytes]], bytes]
HEAD_END = b"\r\n\r\n"
ODD_BYTES = [0, 1, 0x20, 0x22, 0x2C, 0x7B, 0x7F, 0x80, 0xFF]
ODD_NUMBERS = [0, 1, -1, -2, -32, 31, 255, 16384, 1 << 16, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 64, -(1 << 63), -(1 << 31)]  # fmt: skip
ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 1e308, 0.5, float("nan"), float("inf"), "", "0",
    "x" * 300, "\0", "\ud800", "..", "../..", "/", "/etc/passwd", "a/b", "é", [], {}, [[]], [0] * 40, {"": 0}, [None], "int64", "NaN",
]  # fmt: skip
ODD_HEADS = [b"HTTP/1.1 " + head for head in (
    b"200 OK\r\nTransfer-Encoding: chunked", b"200 OK\r\nContent-Length: 18446744073709551615", b"200 OK\r\nContent-Length: -1",
    HEAD_END.join([b"100 C", *[b"HTTP/1.1 100 C"] * 49, b"HTTP/1.1 200 OK"]), b"503 No\r\nContent-Length: 3", b"204 No",
)]  # fmt: skip


def spoil(data: bytes, rng: random.Random) -> bytes:
    """Another input made of this one."""
    if rng.random() < 0.25:
        return spoil_bytes(data, rng)
    if re.fullmatch(rb"[*$:]-?\d+", data):
        return data[:1] + str(rng.choice([*ODD_NUMBERS, "x", "", "1e3"])).encode()
    if data[:1] in (b"{", b"[") and (spoiled := _spoil_json(data, rng)) is not None:
        return spoiled
    for split, body in (
        (_answer, 0.7),
        (_archive, 0.0),
        (_tensors, 0.0),
        (_lengths, 0.0),
        (_line, 0.85),
        (_replies, 0.0),
    ):
        if (found := split(data)) is not None:
            parts, join = found
            at = len(parts) - 1 if rng.random() < body else rng.randrange(len(parts))
            parts[at] = spoil(parts[at], rng)
            return join(parts)
    if data[:5] == b"HTTP/" and rng.random() < 0.5:
        return rng.choice(ODD_HEADS)
    return rng.choice([spoil_bytes, spoil_bytes, spoil_numbers])(data, rng)


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """A part missing, twice, or other; a few bytes other; something behind the end."""
    whole, kind = bytearray(data), rng.random()
    at, to = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    if kind < 0.15:
        return data[:at]
    if kind < 0.25:
        return data[:at] + data[to:]
    if kind < 0.35:
        return data[:to] + data[at:]
    if kind < 0.4:
        return data + rng.randbytes(rng.randint(1, 64))
    if kind < 0.45:
        return data[:at] + rng.randbytes(rng.choice([1, 4, 8])) + data[at:]
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        if whole:
            at = rng.randrange(len(whole))
            whole[at] = rng.choice([*ODD_BYTES, rng.randrange(256), whole[at] ^ 1 << rng.randrange(8)])
    return bytes(whole)


def spoil_numbers(data: bytes, rng: random.Random) -> bytes:
    """A number of 8 bytes, or of 4, other: a size, a count, a seq."""
    size = rng.choice([8, 8, 8, 4])
    if len(data) < size:
        return spoil_bytes(data, rng)
    at = rng.randrange(0, len(data) - size + 1, 4) if rng.random() < 0.7 else rng.randrange(len(data) - size + 1)
    number = rng.choice([*ODD_NUMBERS, len(data), len(data) - at, -at, at])
    if rng.random() < 0.3:
        number = int.from_bytes(data[at : at + size], "little") + rng.choice([-1, 1])
    return data[:at] + (number & ((1 << 8 * size) - 1)).to_bytes(size, "little") + data[at + size :]


# --- parts: of data that has them, each by itself, and what puts them together again


def _line(data: bytes) -> tuple[list[bytes], Joined] | None:
    """What is asked for, and a body."""
    found = re.match(rb"[ -~]+\n", data)
    return found and (
        [found[0][:-1], data[found.end() :]],
        lambda parts: parts[0].replace(b"\n", b" ") + b"\n" + parts[1],
    )


def _answer(data: bytes) -> tuple[list[bytes], Joined] | None:
    head, found, body = data.partition(HEAD_END)
    if not found or not data.startswith(b"HTTP/1"):
        return None
    return [head, body], lambda parts: http_answer(parts[1]) if parts[0] == head else HEAD_END.join(parts)


def _archive(data: bytes) -> tuple[list[bytes], Joined] | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            members = {name: old.read(name) for name in old.namelist()}
    except Exception:  # noqa: BLE001 - it is none, or spoiled already
        return None

    def join(parts: list[bytes]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as new:
            for name, content in zip(members, parts, strict=True):
                new.writestr(name, content)
        return out.getvalue()

    return ([*members.values()], join) if members else None


def _tensors(data: bytes) -> tuple[list[bytes], Joined] | None:
    """Of safetensors: a header behind its length, and numbers."""
    size = int.from_bytes(data[:8], "little")
    if data[8:9] != b"{" or 8 + size > len(data):
        return None
    return [data[8 : 8 + size], data[8 + size :]], lambda parts: len(parts[0]).to_bytes(8, "little") + b"".join(parts)


def with_lengths(parts: list[bytes]) -> bytes:
    """Each behind its length, four bytes."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def parts_of(data: bytes) -> list[bytes]:
    """Those of `with_lengths`, as far as there are any."""
    parts = []
    while len(data) >= 4 and len(parts) < 50:
        size = int.from_bytes(data[:4], "big")
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
    return parts


def _lengths(data: bytes) -> tuple[list[bytes], Joined] | None:
    parts = parts_of(data)
    return (parts, with_lengths) if len(parts) > 1 and any(parts) and with_lengths(parts) == data else None


def _replies(data: bytes) -> tuple[list[bytes], Joined] | None:
    return (data.split(b"\r\n"), b"\r\n".join) if re.match(rb"[*$:+-][^\r]*\r\n", data) else None


# --- JSON


def _spoil_json(data: bytes, rng: random.Random) -> bytes | None:
    """One value of a document other, missing, twice or nested. None: it is no document."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(document))
        if not places:
            return json.dumps(rng.choice(ODD_VALUES)).encode()
        _spoil_value(*rng.choice(places), rng)
    try:
        return json.dumps(document).encode()
    except (RecursionError, ValueError):  # too deep; or a value that became a part of itself
        return b'{"a":' * 2000


def _spoil_value(holder: Any, at: Any, rng: random.Random) -> None:
    match rng.randrange(6):
        case 0:
            del holder[at]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(["", "x", str(at).upper(), f"{at} "])] = holder[at]
        case 1:
            holder.insert(at, holder[at])
        case 2:
            value = holder[at]
            for _ in range(rng.choice([1, 2, 900])):
                value = [value]
            holder[at] = value
        case 3 if isinstance(holder[at], int):
            holder[at] += rng.choice([-1, 1, 1 << 32])
        case 3 | 4 if isinstance(holder[at], str):
            holder[at] = spoil(holder[at].encode(errors="replace"), rng).decode(errors="replace")
        case _:
            holder[at] = copy.copy(rng.choice(ODD_VALUES))


def _places(document: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    if depth < 20 and isinstance(document, dict | list):
        for at, value in list(document.items() if isinstance(document, dict) else enumerate(document)):
            yield document, at
            yield from _places(value, depth + 1)
