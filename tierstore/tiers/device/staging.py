"""Promotion to a device table, compiled: the ring of offered keys, the choice among them, and rows staged where a kernel reads them.

`ring` int64[2 + capacity] has the number of keys popped, the number put, then the keys; the caller holds its lock. Everything runs without the
interpreter. The caller keeps alive the memory of all addresses.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import copy_bytes
from tierstore.kernels.codec import AS_STORED
from tierstore.kernels.hashing import mix
from tierstore.kernels.overlay_index import answer_at, overlay_at
from tierstore.tiers.host.cache.layout import BOOLS, KEYS
from tierstore.tiers.host.cache.lookup import lookup_at, values_at
from tierstore.types import Tier

POPPED, PUT, RING_WORDS = 0, 1, 2
_HOST = int(Tier.HOST)
_WORDS = types.int64[::1]
_STATES = types.Array(types.uint8, 1, "C", readonly=True)
_ROWS = types.Array(types.uint8, 2, "C", readonly=True)
_U64 = np.uint64


@compiled(types.int64(_WORDS, KEYS, _STATES), when=LAST)
def offer(ring: Any, keys: Any, states: Any) -> Any:
    """Put keys whose state is HOST into a ring. Returns how many found no room."""
    room, dropped = ring.size - RING_WORDS - (ring[PUT] - ring[POPPED]), 0
    for i in range(keys.size):
        if states[i] == _HOST:
            if room == 0:
                dropped += 1
                continue
            ring[RING_WORDS + ring[PUT] % (ring.size - RING_WORDS)] = keys[i]
            ring[PUT] += 1
            room -= 1
    return dropped


@compiled(types.int64(_WORDS, _WORDS), when=LAST)
def pop(ring: Any, keys: Any) -> Any:
    """Pop the oldest keys from a ring into `keys`, as many as fit. Returns their number."""
    n = min(keys.size, ring[PUT] - ring[POPPED])
    for i in range(n):
        keys[i] = ring[RING_WORDS + (ring[POPPED] + i) % (ring.size - RING_WORDS)]
    ring[POPPED] += n
    return n


@nb.njit
def _was_offered(seen: Any, key: Any) -> Any:
    """Whether a key was offered before: a direct-mapped table of fingerprints, which forgets what is overwritten."""
    hashed = mix(key)
    slot, fingerprint = np.int64(hashed >> _U64(24)) & (seen.size - 1), np.uint16(hashed >> _U64(48)) | np.uint16(1)
    before = seen[slot] == fingerprint
    seen[slot] = fingerprint
    return before


@compiled(types.int64(_WORDS, types.uint16[::1], types.boolean, _WORDS, *[types.int64] * 4), when=LAST)
def choose(keys: Any, seen: Any, is_full: Any, overlays: Any, host: Any, dim: Any, row_bytes: Any, rows: Any) -> Any:
    """Keep in `keys` the distinct keys that the host tier has and no overlay has. Returns their number; their stored rows are at `rows`.

    If the table `is_full`, only keys that were offered before are kept: `seen` uint16[a power of two]. `overlays`: addresses of their words.
    """
    keys.sort()
    n, last = 0, keys[0] if keys.size else 0
    for i in range(keys.size):
        key = keys[i]
        if i == 0 or key != last:
            last = key
            if not is_full or _was_offered(seen, key):
                keys[n] = key
                n += 1
    states, absent = np.zeros(n, np.uint8), np.empty(row_bytes, np.uint8)
    at, states_at, absent_at = np.int64(keys.ctypes.data), np.int64(states.ctypes.data), np.int64(absent.ctypes.data)
    for k in range(overlays.size):
        answer_at(overlay_at(overlays[k]), AS_STORED, dim, absent_at, rows, row_bytes, at, n, states_at)
    lookup_at(values_at(host), at, n, states_at, AS_STORED, rows, absent_at)
    chosen = 0
    for i in range(n):
        if states[i] == _HOST:
            if chosen < i:
                keys[chosen] = keys[i]
                copy_bytes(rows + chosen * row_bytes, rows + i * row_bytes, row_bytes)
            chosen += 1
    return chosen if absent.size >= 0 else 0  # keeps the arrays alive until here


@compiled(types.void(_ROWS, types.int64, types.int64), when=LAST)
def spread(rows: Any, to: Any, stride: Any) -> None:
    """Copy rows uint8[n, row_bytes] to an address, `stride` bytes apart."""
    n, row_bytes, at = rows.shape[0], rows.shape[1], np.int64(rows.ctypes.data)
    if row_bytes == stride:
        copy_bytes(to, at, n * stride)
    else:
        for i in range(n):
            copy_bytes(to + i * stride, at + i * row_bytes, row_bytes)


@compiled(types.int64(KEYS, *[types.int64] * 6, BOOLS, _WORDS, types.uint32[::1], types.boolean[::1]), when=LAST)
def stage(
    keys: Any, depth: Any, sets_per_region: Any, rows: Any, row_bytes: Any, rows_to: Any, stride: Any, deleted: Any,
    keys_to: Any, runs_to: Any, deleted_to: Any
) -> Any:  # fmt: skip
    """Write keys sorted by set (in their order within a set), with the beginnings of the sets' runs, and the end, to `runs_to`.

    Their rows, at a stride, and `deleted` go with them, if given. Returns the number of sets.
    """
    n, runs = keys.size, 0
    sets = np.empty(n, np.int64)
    for i in range(n):
        hashed = mix(keys[i])
        within = ((hashed >> _U64(32)) * _U64(sets_per_region)) >> _U64(32)
        sets[i] = np.int64((hashed & ((_U64(1) << _U64(depth)) - _U64(1))) * _U64(sets_per_region) + within)
    order = np.argsort(sets, kind="mergesort")
    for k in range(n):
        i = order[k]
        if k == 0 or sets[i] != sets[order[k - 1]]:
            runs_to[runs] = k
            runs += 1
        keys_to[k] = keys[i]
        if rows != 0:
            copy_bytes(rows_to + k * stride, rows + i * row_bytes, row_bytes)
        if deleted.size != 0:
            deleted_to[k] = deleted[i]
    runs_to[runs] = n
    return runs
