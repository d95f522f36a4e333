"""Heat: how often a row was looked up lately, and which keys were evicted lately. Admission and eviction use it.

S3-FIFO (Yang et al., SOSP 2023) within each set of the cache. Four of a set's rows are a probation queue, the others the main queue. A row counts its
hits up to 3. A new key replaces the oldest in probation; that one moves on to main if it was hit meanwhile. In main a hand goes round the ways: it
passes rows that have hits left, taking one hit off each, and stops at a row without hits. An evicted key leaves a fingerprint in the set's ghost
ring; a key that comes back while its fingerprint is there goes straight to main. Measurements: docs/decisions/promotion-policy.md. The queue of a row
does not depend on its place: probation is a list of ways, so a row changes queues without being moved.

    policy, 128 bytes a set   0  56 x uint16 fingerprints of keys evicted lately, 0 for none
                            112  uint8 hand of main   113  uint8 hand of the ghosts
                            114  4 x uint8 ways in probation, plus one, oldest first, 0 for none   118  unused

Readers count hits without a lock and without atomics, so a count may be lost to a neighbour's in the same byte: heat is advice, and never decides
whether an answer is right.
"""

from __future__ import annotations

import numba as nb

from tierstore.kernels import BORROWS
from tierstore.kernels.atomics import match32, trailing_zeros
from tierstore.kernels.raw import load_u8, store_u8

POLICY_BYTES = 128
GHOSTS = 56  # fingerprints in a set, of 16 bits
PROBATION = 4  # ways of 56
MAX_HEAT = 3
MOVE_AT = 1  # hits in probation after which a row moves to main
MAIN_HAND, GHOST_HAND, QUEUE = 112, 113, 114  # byte offsets

_BEYOND_32 = (1 << (GHOSTS - 32)) - 1


@nb.njit(inline="always")
def get_heat(counters, base, way):
    """The 2-bit counter of `way` in the counters that start at byte `base`."""
    return (counters[base + (way >> 2)] >> ((way & 3) << 1)) & 3


@nb.njit(inline="always")
def set_heat(counters, base, way, heat):
    shift = (way & 3) << 1
    at = base + (way >> 2)
    counters[at] = (counters[at] & ~(3 << shift)) | (heat << shift)


@nb.njit(inline="always")
def bump_heat(counters, way, read):
    """Count a hit of `way` in the counters at an address; `read` has in its low bits the byte that was just read.

    A full counter is not written, so that the cache line of a hot set stays shared between cores.
    """
    if (read >> (2 * way)) & 3 != MAX_HEAT:
        store_u8(counters, way >> 2, nb.uint8(nb.int64(load_u8(counters, way >> 2)) + (1 << ((way & 3) << 1))))


@nb.njit(inline="always")
def _fingerprint(hashed):
    """A fingerprint, 1..65535: 0 is an empty place."""
    fingerprint = nb.uint16(hashed >> nb.uint64(16))
    return fingerprint if fingerprint != 0 else nb.uint16(1)


@nb.njit(inline="always")
def remove_ghost(policy16, s, hashed):
    """Whether the key was evicted from set `s` lately. Removes its fingerprint."""
    at = s * (POLICY_BYTES // 2)
    matches = match32(policy16, at, _fingerprint(hashed))
    if matches == 0:
        at += 32
        matches = match32(policy16, at, _fingerprint(hashed)) & nb.uint32(_BEYOND_32)
    if matches == 0:
        return False
    policy16[at + trailing_zeros(matches)] = 0
    return True


@nb.njit(inline="always")
def add_ghost(policy, policy16, s, hashed):
    """Write the key's fingerprint over the oldest."""
    at = s * POLICY_BYTES + GHOST_HAND
    hand = nb.int64(policy[at]) % GHOSTS
    policy16[s * (POLICY_BYTES // 2) + hand] = _fingerprint(hashed)
    policy[at] = hand + 1


@nb.njit(inline="always")
def on_probation(policy, s, way):
    at, entry = s * POLICY_BYTES + QUEUE, way + 1
    return policy[at] == entry or policy[at + 1] == entry or policy[at + 2] == entry or policy[at + 3] == entry


@nb.njit(inline="always")
def oldest_on_probation(policy, s):
    """The way of the oldest key in probation if the queue is full, else -1."""
    at = s * POLICY_BYTES + QUEUE
    return nb.int64(policy[at]) - 1 if policy[at + PROBATION - 1] != 0 else -1


@nb.njit(**BORROWS)
def enter_probation(policy, s, way):
    """Put `way` at the end of the queue, if there is room."""
    at = s * POLICY_BYTES + QUEUE
    for entry in range(at, at + PROBATION):
        if policy[entry] == 0:
            policy[entry] = way + 1
            return


@nb.njit(**BORROWS)
def remove_from_probation(policy, s, way):
    """Remove `way` from the queue, if it is there."""
    last = s * POLICY_BYTES + QUEUE + PROBATION - 1
    for entry in range(last - PROBATION + 1, last + 1):
        if policy[entry] == way + 1:
            for later in range(entry, last):
                policy[later] = policy[later + 1]
            policy[last] = 0
            return


@nb.njit(**BORROWS)
def rename_on_probation(policy, s, way, other):
    """Note that the row at `way` has moved to `other`."""
    at = s * POLICY_BYTES + QUEUE
    for entry in range(at, at + PROBATION):
        if policy[entry] == way + 1:
            policy[entry] = other + 1
