"""Row numbers of keys, for features with a hash: what a model does that was trained on `hash(key) % rows`.

    no seed    code mod N; codes of int64 keys as signed numbers, and the remainder is never negative
    a seed     XXH3-64 with that seed of the eight bytes of the code, little-endian, mod N

The code is the key, or of a string its XXH3-64 (`keys.py`). What this answers is in models that were trained with it,
so it never changes. Pure functions; any thread.
"""

from __future__ import annotations

import numpy as np

from tierstore.kernels.xxh3 import hash_strings
from tierstore.types import KeyHash, Keys, KeyType

_64 = (1 << 64) - 1
# of XXH3 for eight bytes: words of its default secret, at bytes 8 and 16, and the factor
FLIPPED = 0x1CAD21F72C81017C ^ 0xDB979083E96DD4DE
MULTIPLIER = 0x9FB21C651E98DF25


def rows_of(codes: Keys, how: KeyHash) -> Keys:
    """The row number, 0 to `mod` - 1, of each of `codes` int64 [n] of keys of the type `how.key`: int64 [n]."""
    if how.seed is None and how.key is KeyType.INT64:
        return codes % np.int64(how.mod)
    hashes = codes.view(np.uint64)
    if how.seed is not None:
        keyed = hashes ^ np.uint64(seed_bits(how.seed))
        hashes = hash_strings(keyed.view(np.uint8), np.arange(0, 8 * len(codes) + 1, 8)).view(np.uint64)
    rows: Keys = (hashes % np.uint64(how.mod)).view(np.int64)
    return rows


def form_of(how: KeyHash | None) -> tuple[int, int, int]:
    """(form, mod, bits of the seed as int64), for compiled code; 0 where there is none.

    `form`: as in `lookup/plans.py`, 0 no hash, 1 and 2 the rest of a signed and an unsigned number, 3 with a seed.
    """
    if how is None:
        return 0, 0, 0
    form = 3 if how.seed is not None else 1 if how.key is KeyType.INT64 else 2
    return form, how.mod, int(np.uint64(seed_bits(how.seed or 0)).view(np.int64))


def seed_bits(seed: int) -> int:
    """XXH3-64 of eight bytes with `seed` is that of the bytes xor this, without a seed.

    The algorithm swaps the halves of the eight bytes and takes them xor (a word of its secret - the seed),
    and of the seed nothing else.
    """
    low = seed & 0xFFFFFFFF
    seed ^= int.from_bytes(low.to_bytes(4, "little"), "big") << 32
    bits = ((FLIPPED - seed) & _64) ^ FLIPPED
    return (bits >> 32 | bits << 32) & _64
