"""Samples of the keys that look-ups of a table ask for (`tiers/host/cache/sampling.py`), collected now and then by one thread."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tierstore.kernels.codec import address_of
from tierstore.kernels.hashing import mix_all
from tierstore.tiers.host.cache.sampling import BELOW, FIRST_KEY, MOST, NOTED, SEEN
from tierstore.types import Keys

SAMPLE_KEYS = 8192  # the most keys noted at once
ALL = (1 << 64) - 1  # a bound above all hashes


class Sampled(NamedTuple):
    """A sample of look-ups since the sample before: keys int64[n], roughly in the order of look-ups, out of `seen` keys."""

    keys: Keys
    seen: int


class AccessSample:
    """The memory where look-ups of one table note keys, over all its versions. `collect` is for one thread."""

    def __init__(self, keys: int = SAMPLE_KEYS) -> None:
        self._words = np.zeros(FIRST_KEY + keys, np.uint64)
        self._most, self._bound = keys, 0

    @property
    def address(self) -> int:
        """The address for kernels; its user must keep this object alive."""
        return address_of(self._words)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    def end_if_busy(self, most: int) -> None:
        """Note nothing more until the next `collect`, if more than so many keys were looked up since the last one."""
        if self._words[SEEN] > most:
            self._words[BELOW] = 0

    def collect(self, bound: int, most: int = SAMPLE_KEYS) -> Sampled:
        """The sample since the last call. From now on keys are noted whose hash is below `bound`, `most` at most; 0 for none."""
        words = self._words
        words[BELOW] = 0
        noted = words[FIRST_KEY : FIRST_KEY + min(int(words[NOTED]), int(words[MOST]))].view(np.int64).copy()
        seen, before = int(words[SEEN]), self._bound
        words[NOTED] = words[SEEN] = 0
        words[MOST], self._bound = min(most, self._most), bound
        words[BELOW] = bound
        # a thread that read the earlier bound noted keys by it
        return Sampled(noted[mix_all(noted) < np.uint64(before)], seen)


NOTHING = AccessSample(0)  # for tables that are not sampled; nobody collects from it
