"""The keys that a version held in memory when it last served, in a file for each cache of a table, hottest first.

Any thread. They only say what to warm: a damaged or missing file costs time, and no answer. A crash leaves the file as
it was saved last.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tierstore.formats import files
from tierstore.tiers.background import yield_if_background
from tierstore.types import Keys

log = logging.getLogger(__name__)

_MAPPED = 1 << 20  # larger files are mapped rather than read as a whole
_COPIED = 1 << 20
STEP = 8192  # keys: half a millisecond
_NONE = np.empty(0, np.int64)


def load_keys(path: Path) -> list[Keys]:
    """The keys in a file, mapped if they are many; none if the file is bad, which is no reason not to serve."""
    try:
        mapped = "r" if path.stat().st_size > _MAPPED else None
        keys = np.load(path, mmap_mode=mapped, allow_pickle=False)  # type: ignore[arg-type]
        return [keys.astype(np.int64, copy=False).reshape(-1)]
    except FileNotFoundError:
        return []
    except Exception as error:  # noqa: BLE001 - NumPy raises all kinds of errors for a damaged file
        log.warning("%s is passed over: %s", path, error)
        return []


def save_keys(path: Path, parts: Iterable[Sequence[Keys]]) -> None:
    """Publish the keys of all parts; each part has one array for each degree of heat, hottest first.

    Holds at most one part: keys wait in scratch files, one for each degree, until all are there. StorageError.
    """
    files.make_dir(path.parent)
    count = 0
    with files.publish(path) as file, contextlib.ExitStack() as stack:
        degrees: list[BinaryIO] = []
        for part in parts:
            while len(degrees) < len(part):
                degrees.append(stack.enter_context(files.scratch(path.parent)))
            for degree, keys in zip(degrees, part, strict=False):
                degree.write(keys.data)
                count += len(keys)
            yield_if_background()
        header = {"descr": "<i8", "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        for degree in degrees:
            degree.seek(0)
            shutil.copyfileobj(degree, file, _COPIED)
            yield_if_background()


def distinct_keys(sources: Sequence[Keys], limit: int, step: int = STEP) -> Keys:
    """The first `limit` distinct keys of all sources, in their order; in short steps, for a background thread."""
    kept = _NONE
    for keys in sources:
        if len(kept) >= limit:
            break
        present = np.sort(kept)
        new = []
        for begin in range(0, len(keys), step):
            part = keys[begin : begin + step]
            if len(present):
                part = part[present[np.minimum(np.searchsorted(present, part), len(present) - 1)] != part]
            new.append(part)
            yield_if_background()
        fresh = np.concatenate([_NONE, *new])
        if not np.all(np.diff(np.sort(fresh))):  # a file may name a key twice
            fresh = fresh[np.sort(np.unique(fresh, return_index=True)[1])]
        kept = np.concatenate([kept, fresh])
    return kept[:limit]
