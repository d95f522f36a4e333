"""Heat: how often a row was asked for lately, and which keys were put out lately; what promotion is decided by.

S3-FIFO (Yang et al., SOSP 2023) within each set of the cache. Of a set's ways the first few are a
probation queue, the others the main queue, both rings that stay in place and have a hand. A row counts
its hits up to 3. A new key takes the place of the oldest in probation; that one moves on to main if it
was asked for meanwhile. In main the hand passes over rows that have hits left, taking one off each, and
stops at one that has none. Who is put out leaves a fingerprint in the set's ghost ring; a key that comes
back while its fingerprint is there goes straight to main. Figures: docs/decisions/promotion-policy.md.

Readers count hits without a lock and without atomics, so that a count may be lost to a neighbour's in
the same byte: heat is advice, and never decides whether an answer is right.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels.atomics import match32, trailing_zeros

PROBATION = 2  # ways of 32
GHOSTS = 28  # fingerprints of 16 bits a set
GHOST_BYTES = 64
MAX_HEAT = 3
MOVE_AT = 1  # hits in probation that earn a place in main


@nb.njit(inline="always")
def get_heat(counters, base, way):  # type: ignore[no-untyped-def]
    """The 2-bit counter of `way` among those that start at byte `base`."""
    return (counters[base + (way >> 2)] >> ((way & 3) << 1)) & 3


@nb.njit(inline="always")
def set_heat(counters, base, way, heat):  # type: ignore[no-untyped-def]
    shift = (way & 3) << 1
    at = base + (way >> 2)
    counters[at] = (counters[at] & ~(3 << shift)) | (heat << shift)


@nb.njit(inline="always")
def bump_heat(counters, base, way):  # type: ignore[no-untyped-def]
    """Count a hit. A counter at its end is not written, so that the line of a hot set stays shared between cores."""
    shift = (way & 3) << 1
    at = base + (way >> 2)
    byte = counters[at]
    if (byte >> shift) & 3 != MAX_HEAT:
        counters[at] = byte + (1 << shift)


@nb.njit(inline="always")
def _fingerprint(hashed):  # type: ignore[no-untyped-def]
    """1..65535: 0 is an empty place."""
    fingerprint = nb.uint16(hashed >> nb.uint64(16))
    return fingerprint if fingerprint != 0 else nb.uint16(1)


@nb.njit(inline="always")
def take_ghost(ghosts, s, hashed):  # type: ignore[no-untyped-def]
    """Was the key put out of set `s` lately? Its fingerprint is removed."""
    matches = match32(ghosts, s * (GHOST_BYTES // 2), _fingerprint(hashed))
    if matches == 0:
        return False
    ghosts[s * (GHOST_BYTES // 2) + trailing_zeros(matches)] = 0
    return True


@nb.njit(inline="always")
def add_ghost(ghosts, s, hand, hashed):  # type: ignore[no-untyped-def]
    """Leave the key's fingerprint in the place of the oldest. Returns where the hand stands now."""
    ghosts[s * (GHOST_BYTES // 2) + hand] = _fingerprint(hashed)
    return hand + 1 if hand + 1 < GHOSTS else 0


@nb.njit(inline="always")
def next_victim(counters, base, hand, ways):  # type: ignore[no-untyped-def]
    """The way of the main queue that is put out next, from `hand` on. Those passed over lose a hit."""
    way = max(hand, PROBATION)
    for _ in range(MAX_HEAT * ways):  # ends sooner unless readers count all the while
        heat = get_heat(counters, base, way)
        if heat == 0:
            break
        set_heat(counters, base, way, heat - 1)
        way = way + 1 if way + 1 < ways else PROBATION
    return way
