"""Rows of several features in one step: what memory holds of their keys, each into its own place of one buffer.

Calls are made once for a view; a request brings keys, and how many of them each call has. Any
thread, without the interpreter lock; the caller holds what they point to. Nothing survives a crash.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from numba import types

from tierstore.kernels import SOON, compiled
from tierstore.kernels.overlay_index import answer_at, overlay_at
from tierstore.kernels.raw import load_i64, store_u8
from tierstore.kernels.records import at, define
from tierstore.kernels.sysio import clear_bytes
from tierstore.tiers.host.cache.lookup import HOST_TABLE, lookup_at, values_of
from tierstore.types import Tier

CALL = define("GatherCall", "a feature's look-up into one buffer", {
    "host": (HOST_TABLE, "of the table, or 0"),
    "overlays overlays_at": "rows of deltas that lie over it: how many, and where each says what it has",
    "default_at": "the default row, as it is answered",
    "dim out_code": "of an answer: its numbers; 0: float32, 1: float16",
    "padded padding": "whether there is a padding key, and its code",
    "place": "which place of the buffer is its own",
})  # fmt: skip
_call_at = at(CALL)
# a place: how many rows, and where in the buffer
ROWS, AT = range(2)

_ABSENT = int(Tier.ABSENT)
_PLACES = types.Array(types.int64, 2, "C")
_KEYS = types.Array(types.int64, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C")


@compiled(types.int64(types.int64, types.int64, _PLACES, _KEYS, _BYTES, _BYTES), when=SOON)
def gather(calls: Any, count: Any, places: Any, keys: Any, states: Any, out: Any) -> Any:
    """Answer what memory holds of `keys`, which lie call after call: rows to `out`, a tier for each key to `states` (PENDING: none).

    `count` calls lie at address `calls`; `places` are int64[places, 2]. Returns how many keys the host tier has answered; -1 if the
    sizes do not fit, and nothing is done.
    """
    n = nb.int64(0)
    for c in range(count):
        call = _call_at(calls, c)
        rows, at = places[call.place, ROWS], places[call.place, AT]
        if rows < 0 or at < 0 or at + rows * call.dim * (4 >> call.out_code) > out.size:
            return -1
        n += rows
    if n != keys.size or n != states.size:
        return -1
    key, state, hits = nb.int64(keys.ctypes.data), nb.int64(states.ctypes.data), nb.int64(0)
    clear_bytes(state, n)
    for c in range(count):
        call = _call_at(calls, c)
        code, dim, default = call.out_code, call.dim, call.default_at
        rows, target = places[call.place, ROWS], nb.int64(out.ctypes.data) + places[call.place, AT]
        if call.padded != 0:
            row_bytes = dim * (4 >> code)
            for i in range(rows):
                if load_i64(key, i) == call.padding:
                    store_u8(state, i, nb.uint8(_ABSENT))
                    clear_bytes(target + i * row_bytes, row_bytes)
        for i in range(call.overlays):
            answer_at(overlay_at(load_i64(call.overlays_at, i)), code, dim, default, target, key, rows, state)
        if call.host != 0:
            hits += lookup_at(values_of(call.host), key, rows, state, code, target, default)
        key += 8 * rows
        state += rows
    return hits
