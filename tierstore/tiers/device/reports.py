"""Reports of look-ups, by which kernels, streams and the CPU tell each other how far one is, and their compiled readers.

A report is uint64 in page-locked memory: in its lower half 0, DONE or WHOLE, in its upper half the number of listed keys (`cuda/lookup.cu`). OVER bytes
after it is the word that the caller's stream writes when it is past a look-up that nobody waits for. Any thread; nothing calls the driver.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import acquire_i64, acquire_u32, release_i64
from tierstore.kernels.raw import call_at
from tierstore.tiers.device.driver_calls import SLEEP, YIELD

DONE, WHOLE = 1, 2  # a kernel has listed keys; no row is missing, by the kernel's report or, later, the CPU's
OVER = 8
REPORT_BYTES = 2 * OVER
NOTHING, MISSING, ENDED, SILENT = range(4)  # results of `watch`
_LOOKS = 64  # turns of `watch` before it sleeps in between
_SLEEP_US = 20
_LINGERING = 40  # sleeps before it returns with nothing urgent, as the next call may change that: 3 ms
_SILENT = 4096  # turns before it returns with nothing: a third of a second
_WORDS = types.int64[::1]


@compiled(types.int64(types.int64), when=LAST)
def said(at: Any) -> Any:
    """The report at an address, whole; 0: it has not come."""
    return acquire_i64(at)


@compiled(types.void(types.int64, types.int64), when=LAST)
def say(at: Any, value: Any) -> None:
    """Write a report, after everything that this thread has written before."""
    release_i64(at, value)


def begin(at: int) -> None:
    """Clear the report at an address, and the word after it: nothing has come."""
    say(at, 0)
    say(at + OVER, 0)


@compiled(types.int64(_WORDS), when=LAST)
def ended(reports: Any) -> Any:
    """The place of a look-up that its stream is past, or -1. `reports`: the addresses of their reports, or 0."""
    for i in range(reports.size):
        if reports[i] != 0 and acquire_u32(reports[i] + OVER) != 0:
            return i
    return -1


@compiled(types.int64(_WORDS, _WORDS), when=LAST)
def watch(calls: Any, reports: Any) -> Any:
    """Wait until there is something to do for look-ups.

    Returns MISSING: one has listed keys. ENDED: streams are past some, for a while already, or no place is free. NOTHING: none has been under way for
    a while. SILENT: nothing has happened for long.
    """
    lingered = 0
    for k in range(_SILENT):
        under_way, over = 0, 0
        for i in range(reports.size):
            at = reports[i]
            if at != 0:
                under_way += 1
                if acquire_u32(at) == DONE:
                    return MISSING
                if acquire_u32(at + OVER) != 0:
                    over += 1
        if over != 0 or under_way == 0:
            lingered += k >= _LOOKS
            if under_way == reports.size or lingered > _LINGERING:
                return ENDED if over != 0 else NOTHING
        if k < _LOOKS:
            call_at(calls[YIELD], 0, 0, 0, 0, 0, 0)
        else:
            call_at(calls[SLEEP], _SLEEP_US, 0, 0, 0, 0, 0)
    return SILENT
