"""The order in which hot keys are read into the caches: the hottest stretch of them first, and those of a stretch as
their rows lie on the drive.

Hottest first alone would read single pages at random, which drives do slowest. So a stretch is as long as all before it
together, or `PIECE`: a large cache is filled by a few passes over the files, and once n keys are read, the n / 2
hottest are among them. A stretch is handed out in pieces, so that memory is bounded however long it is.

Free functions; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from tierstore.tiers.background import yield_if_background
from tierstore.types import Keys

PIECE = 2 << 20  # keys, about: 16 MiB of them
_RUNS, _RUN = 16, 256  # for each piece of a stretch so many runs of so many keys say where pieces begin
_STEP = 8192  # keys looked at before other threads get the processor


def stretch_after(read: int) -> int:
    """The number of keys of the stretch that follows `read` hotter keys."""
    return max(PIECE, read)


def pieces(
    stretch: Keys, in_order: Callable[[Keys], Keys], give_way: Callable[[], None] = yield_if_background
) -> Iterator[Keys]:
    """All keys of `stretch` int64 [n], which may be mapped, in pieces of about `PIECE`, each `in_order`.

    A piece has the keys of a range, because rows lie by key. `give_way` is called often.
    """
    count = -(-len(stretch) // PIECE)
    if count <= 1:
        yield in_order(stretch)
        return
    runs = np.linspace(0, max(0, len(stretch) - _RUN), _RUNS * count).astype(np.int64)
    sample = np.sort(np.concatenate([stretch[begin : begin + _RUN] for begin in runs]))
    bounds = sample[np.arange(1, count) * len(sample) // count]
    for low, high in pairwise([None, *np.unique(bounds).tolist(), None]):
        yield in_order(_between(stretch, low, high, give_way))


def _between(keys: Keys, low: int | None, high: int | None, give_way: Callable[[], None]) -> Keys:
    """The keys in [low, high) (None: no limit)."""
    found = []
    for begin in range(0, len(keys), _STEP):
        part = keys[begin : begin + _STEP]
        if low is not None:
            part = part[part >= low]
        found.append(part if high is None else part[part < high])
        give_way()
    return np.concatenate(found)
