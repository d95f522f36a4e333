"""The checksum of a shard, as `snapshot.json` carries it. Pure reading; any thread may call it."""

from __future__ import annotations

from pathlib import Path

import xxhash

from tierstore.formats.names import HUGECTR_KEYS, HUGECTR_VECTORS

_BLOCK = 4 << 20


def checksum(path: Path) -> str:
    """XXH3-64 of a shard file as 16 hex digits; of a HugeCTR folder, over `key` and then `emb_vector`."""
    digest = xxhash.xxh3_64()
    block = memoryview(bytearray(_BLOCK))
    for part in parts(path):
        with open(part, "rb", buffering=0) as file:
            while n := file.readinto(block):
                digest.update(block[:n])
    return digest.hexdigest()


def parts(path: Path) -> list[Path]:
    """The files that a shard consists of, in the order in which its checksum takes them."""
    return [path / HUGECTR_KEYS, path / HUGECTR_VECTORS] if path.is_dir() else [path]
