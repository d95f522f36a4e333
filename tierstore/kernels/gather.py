"""Rows of several features in one step: what memory holds of their keys, each into its own place of one buffer.

A call is a feature's look-up as int64 words (`CALL`): where the host tier of its table is, the overlays over it, how rows are
answered, and its padding key. Calls are made once for a view; a request brings keys, and how many of them each call has. Any
thread, without the interpreter lock; the caller holds what the words point to. Nothing survives a crash.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import SOON, compiled
from tierstore.kernels.host_cache.lookup import lookup_at, values_at
from tierstore.kernels.overlay_index import answer_at
from tierstore.kernels.raw import load_u64, store_u8
from tierstore.kernels.sysio import clear_bytes
from tierstore.types import Tier

# words of a call; HOST_AT 0: no host tier; OVERLAYS_AT: addresses of their words; PLACE: which place of the buffer is its own
HOST_AT, OVERLAYS, OVERLAYS_AT, DEFAULT_AT, DIM, OUT_CODE, PADDED, PADDING, PLACE = range(9)
CALL_WORDS = 9
# a place: how many rows, and where in the buffer
ROWS, AT = range(2)

_ABSENT = int(Tier.ABSENT)
_WORDS = types.Array(types.int64, 2, "C")
_KEYS = types.Array(types.int64, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C")


@nb.njit(inline="always")
def _word(at, i):  # type: ignore[no-untyped-def]
    return nb.int64(load_u64(at, i))


@compiled(types.int64(_WORDS, _WORDS, _KEYS, _BYTES, _BYTES), when=SOON)
def gather(calls: Any, places: Any, keys: Any, states: Any, out: Any) -> Any:
    """Answer what memory holds of `keys`, which lie call after call: rows to `out`, a tier for each key to `states` (PENDING: none).

    `places` are int64[places, 2]. Returns how many keys the host tier has answered; -1 if the sizes do not fit, and nothing is done.
    """
    n = nb.int64(0)
    for c in range(calls.shape[0]):
        rows, at = places[calls[c, PLACE], ROWS], places[calls[c, PLACE], AT]
        if rows < 0 or at < 0 or at + rows * calls[c, DIM] * (4 >> calls[c, OUT_CODE]) > out.size:
            return -1
        n += rows
    if n != keys.size or n != states.size:
        return -1
    key, state, hits = nb.int64(keys.ctypes.data), nb.int64(states.ctypes.data), nb.int64(0)
    clear_bytes(state, n)
    for c in range(calls.shape[0]):
        code, dim, default = calls[c, OUT_CODE], calls[c, DIM], calls[c, DEFAULT_AT]
        rows, target = places[calls[c, PLACE], ROWS], nb.int64(out.ctypes.data) + places[calls[c, PLACE], AT]
        if calls[c, PADDED] != 0:
            row_bytes = dim * (4 >> code)
            for i in range(rows):
                if _word(key, i) == calls[c, PADDING]:
                    store_u8(state, i, nb.uint8(_ABSENT))
                    clear_bytes(target + i * row_bytes, row_bytes)
        for i in range(calls[c, OVERLAYS]):
            answer_at(_word(calls[c, OVERLAYS_AT], i), code, dim, default, target, key, rows, state)
        if calls[c, HOST_AT] != 0:
            hits += lookup_at(values_at(calls[c, HOST_AT]), key, rows, state, code, target, default)
        key += 8 * rows
        state += rows
    return hits
