"""Sizes for a person."""

from __future__ import annotations


def size_text(nbytes: float) -> str:
    """`nbytes` for a person: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
