"""Rate limits of requests, keys and bytes: token buckets for compiled threads and Python, without a lock.

A bucket holds what one second allows, at least one unit. It is stored as a moment: when it will be full again (the generic cell rate algorithm of
ATM, ITU-T I.371). Two callers that draw at the same moment may both pass with what is left for one.

Free functions of addresses, nogil; the memory belongs to the caller.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import FIRST, compiled
from tierstore.kernels.atomics import add_at, raise_at, relaxed_i64
from tierstore.kernels.records import at, define, place

# places of the three units in a bucket
REQUESTS, KEYS, BYTES = range(3)
UNITS = 3
BUCKET = define("Bucket", "the token buckets of one caller or one model: one of requests, one of keys, one of bytes", {
    "full_ns": ((np.int64, (UNITS,)), "the moment at which each bucket is full again, on the monotonic clock in ns"),
    "milli_rate": ((np.int64, (UNITS,)), "the rate of each bucket, in thousandths a second; 0: no limit"),
})  # fmt: skip
_bucket_at = at(BUCKET)
FREE = -1  # result of `empty_at`: no unit is used up
_MOST_NS = 1e17  # the most that one request may cost: three years


@nb.njit
def empty_at(bucket, now_ns):
    """The first unit of which less than one is left, or FREE. `bucket` is an address, or 0 for no limits."""
    if bucket == 0:
        return FREE
    full_at, rates_at = place(_bucket_at(bucket), "full_ns"), place(_bucket_at(bucket), "milli_rate")
    for unit in range(UNITS):
        rate = relaxed_i64(rates_at + 8 * unit)
        if rate > 0:
            drawn_ns = relaxed_i64(full_at + 8 * unit) - now_ns
            room = max(rate - 1000, 0)  # in thousandths, without the one that must be left
            if drawn_ns > 0 and nb.float64(drawn_ns) * nb.float64(rate) > nb.float64(room) * 1e9:
                return unit
    return FREE


@nb.njit
def draw_at(bucket, now_ns, requests, keys, nbytes):
    """Draw from a bucket, even if it is empty then. Negative numbers give back."""
    if bucket == 0:
        return
    full_at, rates_at = place(_bucket_at(bucket), "full_ns"), place(_bucket_at(bucket), "milli_rate")
    for unit in range(UNITS):
        cost = requests if unit == REQUESTS else keys if unit == KEYS else nbytes
        rate = relaxed_i64(rates_at + 8 * unit)
        if rate > 0 and cost != 0:
            raise_at(full_at + 8 * unit, now_ns)
            costs_ns = nb.float64(cost) * 1e12 / nb.float64(rate)
            add_at(full_at + 8 * unit, nb.int64(min(max(costs_ns, -_MOST_NS), _MOST_NS)))


@compiled(types.int64(types.int64, types.int64), when=FIRST)
def empty(bucket: Any, now_ns: Any) -> Any:
    """`empty_at` for Python."""
    return empty_at(bucket, now_ns)


@compiled(types.void(*[types.int64] * 5), when=FIRST)
def draw(bucket: Any, now_ns: Any, requests: Any, keys: Any, nbytes: Any) -> Any:
    """`draw_at` for Python."""
    draw_at(bucket, now_ns, requests, keys, nbytes)
