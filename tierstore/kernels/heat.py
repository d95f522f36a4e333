"""Heat: how often a key was asked for lately, in 4-bit counters that saturate and age.

Resident rows have one counter each in their set's head. For keys that are not resident every set has
a count-min sketch of its own (Cormode and Muthukrishnan 2005, with the conservative update of Estan
and Varghese 2002): one cache line of 128 counters, two of which a key counts in. A sketch a set
instead of one for the table costs one cache line a miss, ages a set at a time without a pause for
anybody, and can be split and merged with its set.

Readers count without a lock and without atomics, so that a count may be lost to a neighbour's: heat
is advice, and never decides whether an answer is right.
"""

from __future__ import annotations

import numba as nb

SKETCH_BYTES = 64
MAX_HEAT = 15

_LOW_BITS = nb.uint64(0x7777777777777777)


@nb.njit(inline="always")
def get_heat(nibbles, base, i):  # type: ignore[no-untyped-def]
    """Counter `i` of those that start at byte `base`."""
    return (nibbles[base + (i >> 1)] >> ((i & 1) << 2)) & 15


@nb.njit(inline="always")
def set_heat(nibbles, base, i, heat):  # type: ignore[no-untyped-def]
    shift = (i & 1) << 2
    at = base + (i >> 1)
    nibbles[at] = (nibbles[at] & (240 >> shift)) | (heat << shift)


@nb.njit(inline="always")
def bump_heat(nibbles, base, i):  # type: ignore[no-untyped-def]
    """Count one more, up to MAX_HEAT; a counter that stands there is not written, so that hot lines stay shared."""
    shift = (i & 1) << 2
    at = base + (i >> 1)
    byte = nibbles[at]
    if ((byte >> shift) & 15) < MAX_HEAT:
        nibbles[at] = byte + (1 << shift)


@nb.njit(inline="always")
def sketch_count(sketch, base, hashed):  # type: ignore[no-untyped-def]
    """How often the key was counted, at least as much as truly."""
    return min(
        get_heat(sketch, base, nb.int64((hashed >> nb.uint64(16)) & nb.uint64(127))),
        get_heat(sketch, base, nb.int64((hashed >> nb.uint64(23)) & nb.uint64(127))),
    )


@nb.njit(inline="always")
def sketch_raise(sketch, base, hashed, to):  # type: ignore[no-untyped-def]
    """Let the key's count be at least `to` (at most MAX_HEAT)."""
    i = nb.int64((hashed >> nb.uint64(16)) & nb.uint64(127))
    if get_heat(sketch, base, i) < to:
        set_heat(sketch, base, i, to)
    i = nb.int64((hashed >> nb.uint64(23)) & nb.uint64(127))
    if get_heat(sketch, base, i) < to:
        set_heat(sketch, base, i, to)


@nb.njit(inline="always")
def sketch_bump(sketch, base, hashed):  # type: ignore[no-untyped-def]
    """Count the key once more."""
    count = sketch_count(sketch, base, hashed)
    if count < MAX_HEAT:
        sketch_raise(sketch, base, hashed, count + 1)


@nb.njit(inline="always")
def halve(words, first, count):  # type: ignore[no-untyped-def]
    """Halve the 16 counters in each of `count` uint64 words: the past counts half."""
    for i in range(first, first + count):
        words[i] = (words[i] >> nb.uint64(1)) & _LOW_BITS


@nb.njit(inline="always")
def merge_counters(nibbles, into, other, count):  # type: ignore[no-untyped-def]
    """Let each of `count` counters from byte `into` be the greater of itself and its like from byte `other`."""
    for i in range(count):
        heat = get_heat(nibbles, other, i)
        if heat > get_heat(nibbles, into, i):
            set_heat(nibbles, into, i, heat)
