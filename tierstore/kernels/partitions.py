"""Which partition a key's code is in, and codes put in order by it. `schema/built.md` has the function.

Free functions of arrays, nogil; any thread.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import FIRST, compiled

_U64 = np.uint64
_CODES = types.Array(types.int64, 1, "C", readonly=True)
_OWN = types.Array(types.boolean, 1, "C", readonly=True)
_I64S = types.int64[::1]


@nb.njit(inline="always")
def partition_at(code, count):  # type: ignore[no-untyped-def]
    """The partition of one code: the finalizer of MurmurHash3 (Appleby, public domain), modulo `count`."""
    x = _U64(code) + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(33))) * _U64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> _U64(33))) * _U64(0xC4CEB9FE1A85EC53)
    return np.int64((x ^ (x >> _U64(33))) % _U64(count))


@compiled(types.void(_CODES, _CODES, _I64S, _I64S), when=FIRST)
def group(codes: Any, wanted: Any, order: Any, starts: Any) -> Any:
    """The places `wanted` of `codes` by partition: those of p are order[starts[p]:starts[p + 1]], in their order in `wanted`."""
    count = len(starts) - 1
    of = np.empty(len(wanted), np.int64)
    starts[:] = 0
    for i in range(len(wanted)):
        of[i] = partition_at(codes[wanted[i]], count)
        starts[of[i] + 1] += 1
    for p in range(count):
        starts[p + 1] += starts[p]
    at = starts[:-1].copy()
    for i in range(len(wanted)):
        order[at[of[i]]] = wanted[i]
        at[of[i]] += 1


@compiled(types.int64[::1](_CODES, types.int64), when=FIRST)
def partitions_of(codes: Any, count: Any) -> Any:
    """The partition of each code, int64[n]."""
    of = np.empty(len(codes), np.int64)
    for i in range(len(codes)):
        of[i] = partition_at(codes[i], count)
    return of


@compiled(types.boolean[::1](_CODES, _OWN), when=FIRST)
def are_own(codes: Any, is_own: Any) -> Any:
    """Of each code, whether `is_own` (bool[partitions]) of its partition."""
    own = np.empty(len(codes), np.bool_)
    for i in range(len(codes)):
        own[i] = is_own[partition_at(codes[i], len(is_own))]
    return own
