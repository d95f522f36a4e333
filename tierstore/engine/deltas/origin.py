"""The origin of a logged delta, and which versions passed over its dense part: the end of its file in the delta log.

Written with the delta, in one step. Pure functions over bytes. The layout is in `schema/layout.md`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import xxhash

from tierstore.engine.serving.undone import Age
from tierstore.errors import Corruption

Origin = Mapping[str, Any]  # a JSON object; only its source knows its content, except for the fields below

PASSED_OVER_BY = "dense_passed_over_by"  # versions that served and did not accept the delta's dense part
RUN = "run"  # the first seq of the deltas that were logged together with it, where it is not that one
UNDONE = "undone"  # the age of what was undone when the delta was logged, of the first delta since it changed

_MAGIC = b"TIERORIG"  # no delta ends with it: a delta ends with the end mark of its last Arrow stream
_END = struct.Struct("<QQ8s")  # XXH3-64 of the document, its length, the magic


def encode(origin: Origin) -> bytes:
    """The bytes behind a delta in its file."""
    document = json.dumps(origin, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return document + _END.pack(xxhash.xxh3_64_intdigest(document), len(document), _MAGIC)


def with_passed_over(origin: Origin | None, versions: Collection[int]) -> Origin | None:
    """`origin` with the versions that did not accept the delta's dense part."""
    return {**(origin or {}), PASSED_OVER_BY: sorted(versions)} if versions else origin


def passed_over_by(origin: Origin | None) -> Collection[int]:
    """The versions that did not accept the dense part of a delta of that origin."""
    versions = (origin or {}).get(PASSED_OVER_BY)
    return versions if isinstance(versions, list) else ()


def with_undone(origin: Origin | None, age: Age) -> Origin:
    """`origin` with the age of what is undone."""
    return {**(origin or {}), UNDONE: age}


def undone_in(origin: Origin | None) -> Age:
    """The age of what was undone that an origin names; the lowest where it names none."""
    age = (origin or {}).get(UNDONE)
    return (int(age[0]), int(age[1])) if isinstance(age, list) and len(age) == 2 else (0, 0)


def with_run(origin: Origin | None, first: int) -> Origin:
    """`origin` of a delta that was logged together with those from `first` on."""
    return {**(origin or {}), RUN: first}


def run_in(origin: Origin | None, seq: int) -> int:
    """The first of the deltas that were logged together with delta `seq`, which has that origin."""
    first = (origin or {}).get(RUN)
    return first if isinstance(first, int) else seq


def split(data: bytes, path: Path) -> tuple[bytes, Origin | None]:
    """Split the content of a file: (the delta, its origin or None). Corruption if the origin is damaged."""
    if not data.endswith(_MAGIC):
        return data, None
    begin = len(data) - _END.size
    digest, length, _ = _END.unpack_from(data, begin)
    return data[: begin - length], _parse(data[begin - length : begin] if length <= begin else b"", digest, path)


def read(path: Path) -> Origin | None:
    """The origin at the end of a file, without reading the delta. OSError, Corruption."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _END.size:
            return None
        file.seek(size - _END.size)
        digest, length, magic = _END.unpack(file.read(_END.size))
        if magic != _MAGIC:
            return None
        file.seek(max(0, size - _END.size - length))
        return _parse(file.read(length) if length <= size - _END.size else b"", digest, path)


def _parse(document: bytes, digest: int, path: Path) -> Origin:
    if not document or xxhash.xxh3_64_intdigest(document) != digest:
        raise Corruption(f"the origin of the delta in {path} does not match its digest; restore the file")
    parsed = json.loads(document)
    if not isinstance(parsed, dict):
        raise Corruption(f"the origin of the delta in {path}: expected a JSON object")
    return parsed
