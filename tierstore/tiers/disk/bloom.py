"""A Bloom filter over int64 keys that reads memory once for each key: may this key have been added?

Split blocks of 256 bits, as in Parquet (parquet-format, BloomFilter.md; the idea is Putze, Sanders and Singler, 2007): the upper half of a key's hash
chooses a block, the lower half one bit in each of its eight words.

Free functions of arrays, nogil. One writer at a time adds, while any number of threads read. Bits are only ever set, a whole word at a time. So a
reader finds every key that was added before it got the array.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels import FIRST, compiled
from tierstore.kernels.atomics import prefetch
from tierstore.kernels.hashing import mix
from tierstore.types import Keys

Filter = npt.NDArray[np.uint32]

WORDS = 8  # words of a block, 4 bytes each
_AHEAD = 16
_U32, _U64 = np.uint32, np.uint64
_SALTS = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31], np.uint32
)

_KEYS = types.Array(types.int64, 1, "C", readonly=True)


@compiled("int64(int64, int64)", inner=True)
def _block_of(key: Any, blocks: Any) -> Any:
    return np.int64(((mix(key) >> _U64(32)) * _U64(blocks)) >> _U64(32)) * WORDS


@compiled("uint32(int64, int64)", inner=True)
def _bit(key: Any, word: Any) -> Any:
    product = _U32(_U32(mix(key)) * _SALTS[word])  # numba widens the product
    return _U32(_U32(1) << (product >> _U32(27)))


@compiled("boolean(int64, uint32[::1])", inner=True)
def holds(key: Any, words: Any) -> Any:
    """Whether a key may have been added."""
    at, there = _block_of(key, len(words) // WORDS), True
    for j in range(WORDS):
        there &= (words[at + j] & _bit(key, j)) != 0
    return there


@compiled(types.int64(_KEYS, types.uint32[::1]))
def _add(keys: Any, words: Any) -> Any:
    blocks, new = len(words) // WORDS, 0
    for key in keys:
        at = _block_of(key, blocks)
        fresh = False
        for j in range(WORDS):
            bit = _bit(key, j)
            if words[at + j] & bit == 0:
                words[at + j] |= bit
                fresh = True
        new += fresh
    return new


@compiled(types.int64(_KEYS, types.uint32[::1], types.boolean[::1]), when=FIRST)
def probe(keys: Any, words: Any, maybe: Any) -> Any:
    blocks, found = len(words) // WORDS, 0
    base = np.int64(words.ctypes.data)
    for i in range(len(keys)):
        if i + _AHEAD < len(keys):
            prefetch(base + 4 * _block_of(keys[i + _AHEAD], blocks))
        if maybe[i]:
            continue
        maybe[i] = holds(keys[i], words)
        found += maybe[i]
    return found


def empty(keys: int, bits_a_key: int) -> Filter:
    """An empty filter for so many keys: uint32 [8 × blocks]."""
    return np.zeros(max(1, -(-keys * bits_a_key // (32 * WORDS))) * WORDS, np.uint32)


def add(words: Filter, keys: Keys) -> int:
    """Add `keys` (int64 [n]). Returns how many were new, as far as the filter can tell."""
    return int(_add(keys, words))


def may_hold(words: Filter, keys: Keys, maybe: npt.NDArray[np.bool_]) -> int:
    """Set maybe[i] if keys[i] may have been added; leave the others. Returns how many were set."""
    return int(probe(keys, words, maybe))
