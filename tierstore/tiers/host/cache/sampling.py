"""Samples of looked-up keys: look-ups note keys in memory that any number of threads write.

A key is noted while its hash (`hashing.mix`) is below a bound, so either every look-up of a key is noted or none is: spatial sampling (Waldspurger,
Park, Garthwaite, Ahmad, FAST 2015). When the memory is full, the thread that finds it full sets the bound to 0, and nothing is noted until another
bound is set. So the cost is bounded, however many look-ups there are.

A thread that is interrupted in `note` may write its key among those of a later sample: one key more or less.

    words of 8 bytes    0  the bound, 0 for nothing is noted    1  how many keys are noted at most
                        8  how many were noted, or found it full    9  keys that were looked up meanwhile
                        16  the keys
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import add_at
from tierstore.kernels.hashing import mix
from tierstore.kernels.raw import load_u8, load_u64, store_u64
from tierstore.types import Tier

BELOW, MOST = 0, 1  # read by look-ups, rarely written
NOTED, SEEN = 8, 9  # in another cache line
FIRST_KEY = 16
_HOST = int(Tier.HOST)
_READ = {"readonly": True}


@nb.njit
def note(sample, key):
    """Note a key whose hash is below the bound."""
    at = add_at(sample + 8 * NOTED, 1)
    if at < nb.int64(load_u64(sample, MOST)):
        store_u64(sample, FIRST_KEY + at, nb.uint64(key))
    else:
        store_u64(sample, BELOW, nb.uint64(0))


@nb.njit
def count_seen(sample, seen, left_at, starts_at, bags, n):
    """Count keys as looked up, except those of bags that are left (uint8[bags] at an address): they are looked up again."""
    for bag in range(bags):
        if load_u8(left_at, bag) != 0:
            end = nb.int64(load_u64(starts_at, bag + 1)) if bag + 1 < bags else n
            seen -= end - nb.int64(load_u64(starts_at, bag))
    add_at(sample + 8 * SEEN, seen)


@compiled(
    types.void(types.int64, types.Array(types.int64, 1, "C", **_READ), types.Array(types.uint8, 1, "C")), when=LAST
)
def note_answered(sample: Any, keys: Any, states: Any) -> Any:
    """Note and count the keys whose state is HOST, after a GPU has looked them up."""
    below, seen = load_u64(sample, BELOW), 0
    for i in range(keys.size if below != nb.uint64(0) else 0):
        if states[i] == _HOST:
            seen += 1
            if mix(keys[i]) < below:
                note(sample, keys[i])
    if seen != 0:
        add_at(sample + 8 * SEEN, seen)
