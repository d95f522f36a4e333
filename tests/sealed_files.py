"""Sealed files, as tests write them: keys and rows at once."""

from __future__ import annotations

from pathlib import Path

from tierstore.tiers.disk.sealed_file import SealedFile, write_sealed_parts
from tierstore.types import Keys, Rows


def write_sealed(path: Path, table_id: int, keys: Keys, rows: Rows) -> SealedFile:
    return write_sealed_parts(path, table_id, rows.shape[1], [(keys, rows)])
