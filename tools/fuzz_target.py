"""What `tools/fuzz.py` can be aimed at, and how inputs are spoiled."""

from __future__ import annotations

import copy
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class Failure(Exception):
    """An input had an outcome that it must not have."""


class Target(ABC):
    """Something that reads inputs. A context manager, used by one thread."""

    name: str

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Whole inputs."""

    @abstractmethod
    def run(self, data: bytes) -> str:
        """The outcome of an input, in words. Raises Failure, or anything else that is a fault."""

    def spoil(self, data: bytes, rng: random.Random) -> bytes:
        """Another input made of this one."""
        return spoil_bytes(data, rng)

    def __enter__(self) -> Target:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


# --- changes

ODD_BYTES = [0, 1, 0x20, 0x22, 0x2C, 0x7B, 0x7F, 0x80, 0xFF]
ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 1e308, 0.5, float("nan"), float("inf"), "", "0",
    "x" * 300, "\0", "\ud800", "..", "../..", "/", "/etc/passwd", "a/b", "é", [], {}, [[]], [0] * 40, {"": 0}, [None], "int64", "NaN",
]  # fmt: skip


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


ODD_NUMBERS = [0, 1, -1, -32, 31, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, -(1 << 63), -(1 << 31)]


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


def spoil_json(data: bytes, rng: random.Random) -> bytes:
    """One value of a document other, missing, twice or nested; or its bytes spoiled."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return spoil_bytes(data, rng)
    if rng.random() < 0.25:
        return spoil_bytes(data, rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = list(_places(document))
        if not places:
            return json.dumps(rng.choice(ODD_VALUES)).encode()
        holder, at = rng.choice(places)
        _spoil_value(holder, at, rng)
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
        case 3 if isinstance(holder[at], str):
            holder[at] = spoil_bytes(holder[at].encode(errors="replace"), rng).decode(errors="replace")
        case _:
            holder[at] = copy.copy(rng.choice(ODD_VALUES))


def _places(document: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    if depth < 20 and isinstance(document, dict | list):
        for at, value in list(document.items() if isinstance(document, dict) else enumerate(document)):
            yield document, at
            yield from _places(value, depth + 1)
