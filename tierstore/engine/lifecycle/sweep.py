"""Removal of what crashes left behind, on a thread of its own, as it may be as large as a version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from tierstore.errors import StorageError
from tierstore.formats import files
from tierstore.tiers.background import become_background

log = logging.getLogger(__name__)


def sweep(leftovers: Callable[[], Iterable[tuple[str, Path]]], ended: Callable[[], bool]) -> None:
    """Remove leftovers, which come with their model's name, until `ended`."""
    become_background()
    for model, path in leftovers():
        if ended():
            return
        try:
            files.remove_leftover(path)
        except StorageError as error:  # a helper of a killed process may write there; the next start sweeps again
            log.warning("model %s: %s", model, error)
