"""Partitions of keys: the partition of a code, codes grouped by partition, and codes found among sorted others. `schema/built.md` defines the function.

Free functions of arrays, nogil; any thread.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import FIRST, HTTP, compiled

_U64 = np.uint64
_CODES = types.Array(types.int64, 1, "C", readonly=True)
_OWN = types.Array(types.boolean, 1, "C", readonly=True)
_I64S = types.int64[::1]


@nb.njit(inline="always")
def partition_at(code, count):
    """The partition of one code: the finalizer of MurmurHash3 (Appleby, public domain), modulo `count`."""
    x = _U64(code) + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(33))) * _U64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> _U64(33))) * _U64(0xC4CEB9FE1A85EC53)
    return np.int64((x ^ (x >> _U64(33))) % _U64(count))


@compiled(types.void(_CODES, _CODES, _CODES, _I64S, _I64S), when=FIRST)
def group(codes: Any, wanted: Any, group_of: Any, order: Any, starts: Any) -> Any:
    """Sort the places `wanted` of `codes` by group: group g has order[starts[g]:starts[g + 1]], in the order of `wanted`.

    `group_of` int64[partitions]: the group for the codes of a partition, or -1 for none; those places come last. `starts` int64[groups + 1].
    """
    groups, count = len(starts) - 1, len(group_of)
    of = np.empty(len(wanted), np.int64)
    starts[:] = 0
    for i in range(len(wanted)):
        of[i] = group_of[partition_at(codes[wanted[i]], count)]
        if of[i] >= 0:
            starts[of[i] + 1] += 1
    for g in range(groups):
        starts[g + 1] += starts[g]
    at = starts.copy()
    for i in range(len(wanted)):
        g = of[i] if of[i] >= 0 else groups
        order[at[g]] = wanted[i]
        at[g] += 1


@compiled(types.int64(_CODES, _CODES, _I64S), when=HTTP)
def match_sorted(ours: Any, theirs: Any, where: Any) -> Any:
    """Set where[i] to the place of ours[i] in `theirs`, if it is there. Both ascending. Returns how many are there."""
    j = found = 0
    for i in range(len(ours)):
        while j < len(theirs) and theirs[j] < ours[i]:
            j += 1
        if j == len(theirs):
            break
        if theirs[j] == ours[i]:
            where[i] = j
            found += 1
    return found


@compiled(types.int64[::1](_CODES, types.int64), when=FIRST)
def partitions_of(codes: Any, count: Any) -> Any:
    """The partition of each code, int64[n]."""
    of = np.empty(len(codes), np.int64)
    for i in range(len(codes)):
        of[i] = partition_at(codes[i], count)
    return of


@compiled(types.boolean[::1](_CODES, _OWN), when=FIRST)
def are_own(codes: Any, is_own: Any) -> Any:
    """Whether `is_own` (bool[partitions]) is set for the partition of each code."""
    own = np.empty(len(codes), np.bool_)
    for i in range(len(codes)):
        own[i] = is_own[partition_at(codes[i], len(is_own))]
    return own
