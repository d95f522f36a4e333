"""The release that wrote a record of ours. Constants and a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore import __version__ as __version__
from tierstore.errors import Corruption

WRITER = "written_by"  # the field of a record that names the release


def of_another_release(path: str | Path, found: object, expected: str, document: Mapping[str, Any]) -> Corruption:
    """The error for a record of ours in a format that is not known."""
    by = document.get(WRITER)
    writer = f"tierstore {by}" if isinstance(by, str) else "another release"
    return Corruption(
        f"{path} was written by {writer}, this is {__version__}: expected format {expected}, got {found!r}; start "
        "that release again"
    )
