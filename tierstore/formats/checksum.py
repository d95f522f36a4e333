"""The files of a shard, and its checksum as `snapshot.json` carries it. Pure reading; any thread may call it."""

from __future__ import annotations

from pathlib import Path

import xxhash

from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS
from tierstore.formats.regular import open_regular

_BLOCK = 4 << 20


def checksum(path: Path) -> str:
    """XXH3-64 of a shard file as 16 hex digits; of a directory over its `parts`, one after the other."""
    digest = xxhash.xxh3_64()
    block = memoryview(bytearray(_BLOCK))
    for part in parts(path):
        with open_regular(part) as file:
            while n := file.readinto(block):
                digest.update(block[:n])
    return digest.hexdigest()


def is_hugectr(path: Path) -> bool:
    """Whether a directory holds a HugeCTR/HPS sparse model, or what is left of one."""
    return (path / HUGECTR_KEYS).exists() or (path / HUGECTR_VECTORS).exists()


def parts(path: Path) -> list[Path]:
    """The files that a shard consists of, in the order in which its checksum takes them.

    Of a directory: `key` and `emb_vector`, or else every file in it and in directories below, in the order of their
    paths, but for those whose name, or a directory's above them, begins with `_` or `.`: markers and checksums.
    """
    if not path.is_dir():
        return [path]
    if is_hugectr(path):
        return [path / HUGECTR_KEYS, path / HUGECTR_VECTORS]
    found = (file.relative_to(path) for file in path.rglob("*") if not file.is_dir())
    return [path / file for file in sorted(found) if not any(part.startswith(("_", ".")) for part in file.parts)]
