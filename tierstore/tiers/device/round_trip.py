"""A GPU look-up without the interpreter: keys are staged, one kernel is launched and waited for, states come back.

`order` int64[ORDER_WORDS] belongs to a table: a lock, held while work is put into the table's stream, and the addresses for launches. `frame`
int64[FRAME_WORDS] belongs to a workspace: its memory, the caller's request, the offsets of the workspace's parts, and kernel arguments that the
driver reads. The workspace begins with the look-up's report (`reports.py`). Nothing is allocated.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import acquire_u32, copy_bytes, release_i64, swap_at
from tierstore.kernels.codec import AS_STORED
from tierstore.kernels.overlay_index import answer_at, overlay_at
from tierstore.kernels.raw import call_at, store_i64
from tierstore.kernels.sysio import clear_bytes
from tierstore.tiers.device.driver_calls import (
    CONTEXT,
    COPY,
    COPY_DOWN,
    LAUNCH,
    POP,
    PUSH,
    WAIT_VALUE,
    WRITE_VALUE,
    YIELD,
    come_after,
    launch_at,
    wait,
)
from tierstore.tiers.device.reports import OVER, REPORT_BYTES, WHOLE
from tierstore.tiers.host.cache.layout import KEYS
from tierstore.types import Tier

# Words of `order`. TABLE, HOST and NO_HOST are addresses of `struct Table` and `struct Host`; TABLE is 0 if the table is not in use. HOST_OF identifies
# the host tier of HOST.
LOCK, TABLE, HOST, HOST_OF, NO_HOST, STREAM, COUNTERS, ORDER_WORDS = range(8)

# words of `frame`: its memory on the CPU and on the device; the look-up; then offsets, argument cells, their addresses, scratch
PINNED, DEVICE, EVENTS = 0, 1, 2
JOB = 4
(
    KERNEL, SECOND, WHEN, CALLER, ALSO, OF, OUT, HALF, WIDTH, STRIDE, DIM, BEGIN, COMBINER, THERE, PADDING, PADDED, BAGS, OFFSETS, WEIGHTED,
    WEIGHTS, FILTERS,
) = range(JOB, JOB + 21)  # fmt: skip
JOB_WORDS = 21
AT = JOB + JOB_WORDS
(
    AT_KEYS, AT_OFFSETS, AT_WEIGHTS, AT_FILTERS, AT_BEFORE, AT_STATE, AT_MISSING, AT_PLACES, AT_ROWS, AT_SOURCE, AT_KEPT,
    AT_WHOLE,
) = range(AT, AT + 12)  # fmt: skip
COPIED = AT_WHOLE + 1  # whether keys, offsets and weights were copied to device memory
_CELLS, _MOST = COPIED + 1, 24
_ARGUMENTS = _CELLS + _MOST
_SCRATCH = _ARGUMENTS + _MOST
FRAME_WORDS = _SCRATCH + 2

WAITED, BEGUN, PUT_OFF = range(3)  # WHEN: whether `look_up` waits, leaves that to `finish`, or nobody waits
NOT_IN_USE, FAILED = -1, -16  # FAILED - status: an error from `driver_calls.py`
ALIGN = 16  # the widest access of a kernel
COPIED_FROM = 1 << 17  # bytes; from here on a copy is faster than a kernel's reads of page-locked memory: 16,384 keys
TEAM, WARP, THREADS = 8, 32, 256  # lanes: for one key, or for two at a time; for one bag; of a block
_PUTTING = 2048  # teams that put rows, at most
_HOST = int(Tier.HOST)
_WORDS = types.int64[::1]
_WEIGHTS = types.Array(types.float32, 1, "C", readonly=True)


@compiled(types.boolean(_WORDS), when=LAST)
def try_lock(order: Any) -> Any:
    """Take a table's lock if it is free."""
    return swap_at(order.ctypes.data, 1) == 0


@compiled(types.void(_WORDS), when=LAST)
def unlock(order: Any) -> None:
    """Release a table's lock."""
    release_i64(order.ctypes.data, 0)


@nb.njit
def _cut(frame: Any, n: Any, bags: Any) -> Any:
    """Note the offsets of a workspace's parts, for `n` keys in `bags`."""
    pooled = bags != 0
    width = n * frame[DIM] * 4 if pooled else 0
    sizes = (
        # read by kernels, in place or after one copy up; `before` if some keys are answered already
        n * 8 if frame[THERE] == 0 else 0, bags * 8 if frame[OFFSETS] == 0 else 0, n * 4 if pooled and frame[WEIGHTS] == 0 else 0,
        frame[FILTERS], n,
        # only in CPU memory, `rows` first for those of deltas; but the device's `rows` are rows that a kernel has read in the host tier
        n, n * 8, n * 4, n * frame[WIDTH],
        # only on the device
        n * 8 if pooled else 0, width, bags,
    )  # fmt: skip
    at: Any = REPORT_BYTES
    for k in range(len(sizes)):
        frame[AT + k] = at
        at += (sizes[k] + ALIGN - 1) // ALIGN * ALIGN


@compiled(types.int64(_WORDS, _WORDS, _WORDS, KEYS, types.uint8[::1], KEYS, _WEIGHTS, _WORDS), when=LAST)
def look_up(
    calls: Any, order: Any, frame: Any, keys: Any, state: Any, offsets: Any, weights: Any, overlays: Any
) -> Any:
    """Answer the `keys` that the overlays, the device or the host tier below has; see `lookup.py`.

    `keys`: not read if THERE gives their device address, as OFFSETS and WEIGHTS do for those. `state` uint8[n] is written if no key is listed.
    `offsets`: of BAGS bags, within the whole look-up; without bags no pooling. `weights`: empty for ones, which WEIGHTED says too. `overlays`: addresses,
    newest first; with THERE their filters take FILTERS bytes. Returns twice the number of listed keys, plus 1 if the host tier has answered any; or NOT_IN_USE; or FAILED - status.

    If WHEN is BEGUN or PUT_OFF, the return, 0, is at once. Then `finish` must be called, or all is in the caller's stream: see `_put_off`; and
    another thread may have ended the look-up before the return.
    """
    n, here, when = state.size, frame[PINNED], frame[WHEN]
    _cut(frame, n, frame[BAGS])
    if frame[THERE] == 0:
        copy_bytes(here + frame[AT_KEYS], np.int64(keys.ctypes.data), n * 8)
    told, at = np.int64(0), here + frame[AT_FILTERS]
    if overlays.size != 0:
        clear_bytes(here + frame[AT_BEFORE], n)
    for k in range(overlays.size):
        overlay = overlay_at(overlays[k])
        if frame[THERE] != 0:
            store_i64(at, 0, overlay.filter_words)
            copy_bytes(at + 8, overlay.filter_at, overlay.filter_words * 8)
            at += 8 + overlay.filter_words * 8
        else:
            told += answer_at(
                overlay, AS_STORED, frame[DIM], 0, here + frame[AT_ROWS], frame[STRIDE], here + frame[AT_KEYS], n, here + frame[AT_BEFORE],
            )  # fmt: skip
    if frame[FILTERS] != 0:
        store_i64(at, 0, 0)
    for b in range(offsets.size):
        store_i64(here + frame[AT_OFFSETS], b, offsets[b] - frame[BEGIN])
    if weights.size != 0:
        copy_bytes(here + frame[AT_WEIGHTS], np.int64(weights.ctypes.data), n * 4)
    clear_bytes(here + frame[AT_STATE], n)  # those of listed keys stay PENDING
    clear_bytes(here, REPORT_BYTES)
    _lock(calls, order)
    status = NOT_IN_USE if order[TABLE] == 0 else _put(calls, order, frame, n, told != 0)
    launched = status == 0
    if launched and when == PUT_OFF:
        status = _put_off(calls, order, frame, n)
    release_i64(order.ctypes.data, 0)
    if status == 0:
        return finish(calls, order, frame, state) if when == WAITED else 0
    if launched:  # the stream may wait for rows already
        wait(calls, here, order[STREAM], frame[_SCRATCH:])
        release_i64(here, WHOLE)
    return status if status == NOT_IN_USE else FAILED - status


@compiled(types.int64(_WORDS, _WORDS, _WORDS, types.uint8[::1]), when=LAST)
def finish(calls: Any, order: Any, frame: Any, state: Any) -> Any:
    """Wait for the kernel of a look-up. Returns as `look_up`."""
    status = wait(calls, frame[PINNED], order[STREAM], frame[_SCRATCH:])
    return _answered(frame, state) if status == 0 else FAILED - status


@compiled(types.int64(_WORDS, _WORDS, _WORDS, types.uint8[::1], types.int64), when=LAST)
def answer_listed(calls: Any, order: Any, frame: Any, state: Any, listed: Any) -> Any:
    """Answer the `listed` keys of a look-up with the rows at AT_ROWS, and wait for that. Returns 0, NOT_IN_USE, or FAILED - status."""
    here = frame[PINNED]
    store_i64(here, 0, listed << 32)
    _lock(calls, order)
    status = NOT_IN_USE
    if order[TABLE] != 0:
        status = types.int32(call_at(calls[PUSH], calls[CONTEXT], 0, 0, 0, 0, 0))
        if status == 0:
            threads = _second_arguments(order, frame, state.size, listed, order[COUNTERS], here)
            status = _launch(calls, frame, frame[SECOND], threads, order[STREAM])
            call_at(calls[POP], frame.ctypes.data + _SCRATCH * 8, 0, 0, 0, 0, 0)
    release_i64(order.ctypes.data, 0)
    if status == 0:
        status = wait(calls, here, order[STREAM], frame[_SCRATCH:])
    if status == 0:
        copy_bytes(np.int64(state.ctypes.data), here + frame[AT_STATE], state.size)
    return status if status == 0 or status == NOT_IN_USE else FAILED - status


@nb.njit
def _lock(calls: Any, order: Any) -> Any:
    while swap_at(order.ctypes.data, 1) != 0:
        call_at(calls[YIELD], 0, 0, 0, 0, 0, 0)


@nb.njit
def _launch(calls: Any, frame: Any, kernel: Any, threads: Any, stream: Any) -> Any:
    """Put a kernel, with the arguments in `frame`, into a stream, in a context that is current. Returns 0 or the driver's error."""
    blocks = (threads + THREADS - 1) // THREADS
    return types.int32(launch_at(calls[LAUNCH], kernel, blocks, THREADS, stream, frame.ctypes.data + _ARGUMENTS * 8))


@nb.njit
def _put(calls: Any, order: Any, frame: Any, n: Any, told: Any) -> Any:
    """Put the kernel into the table's stream, after the work in the caller's stream. Returns 0 or the driver's error."""
    stream, scratch = order[STREAM], np.int64(frame.ctypes.data) + _SCRATCH * 8
    status = types.int32(call_at(calls[PUSH], calls[CONTEXT], 0, 0, 0, 0, 0))
    if status != 0:
        return types.int64(status)
    status = come_after(calls, stream, frame[CALLER : CALLER + 2], frame[EVENTS : EVENTS + 2])
    where, end = frame[PINNED], frame[AT_STATE] if told else frame[AT_BEFORE]
    # but for filters, of which few keys read few words
    frame[COPIED] = end - frame[FILTERS] >= COPIED_FROM or (frame[FILTERS] != 0 and n * 8 >= COPIED_FROM)
    if status == 0 and frame[COPIED]:
        status = types.int32(call_at(calls[COPY], frame[DEVICE], frame[PINNED], end, stream, 0, 0))
        where = frame[DEVICE]
    if status == 0:
        status = _launch(calls, frame, frame[KERNEL], _arguments(order, frame, n, where, told), stream)
    call_at(calls[POP], scratch, 0, 0, 0, 0, 0)
    return types.int64(status)


@nb.njit
def _put_off(calls: Any, order: Any, frame: Any, n: Any) -> Any:
    """Put into the caller's stream: a wait for the first kernel, and until no row is missing; the second kernel; and a word when all is over.

    All of it is there before the CPU knows which rows are missing. Afterwards the CPU only writes to memory: work that were put into a stream
    later might be behind the wait that it is to end, as the driver runs several streams one after another. The CPU may write between two of these calls.
    """
    here, stream, scratch = frame[PINNED], frame[CALLER], np.int64(frame.ctypes.data) + _SCRATCH * 8
    status = types.int32(call_at(calls[PUSH], calls[CONTEXT], 0, 0, 0, 0, 0))
    if status != 0:
        return types.int64(status)
    status = come_after(calls, stream, order[STREAM : STREAM + 1], frame[EVENTS : EVENTS + 1])
    if status == 0:
        status = types.int32(call_at(calls[WAIT_VALUE], stream, here, WHOLE, 0, 0, 0))
    if status == 0:
        status = _launch(
            calls, frame, frame[SECOND], _second_arguments(order, frame, n, n, np.int64(0), np.int64(0)), stream
        )
    if status == 0 and frame[THERE] != 0 and n != 0:  # for the CPU, in place of rows that are not needed any more
        status = types.int32(call_at(calls[COPY_DOWN], here + frame[AT_ROWS], frame[THERE], n * 8, stream, 0, 0))
    if status == 0:
        status = types.int32(call_at(calls[WRITE_VALUE], stream, here + OVER, 1, 0, 0, 0))
    call_at(calls[POP], scratch, 0, 0, 0, 0, 0)
    return types.int64(status)


@nb.njit
def _starts_and_weights(frame: Any, where: Any) -> Any:
    """Where kernels read offsets, and weights, 0 for ones; those of the CPU are in the workspace, which they read at `where`."""
    offsets = frame[OFFSETS] if frame[OFFSETS] != 0 else where + frame[AT_OFFSETS]
    factors = frame[WEIGHTS] if frame[WEIGHTS] != 0 else where + frame[AT_WEIGHTS]
    return offsets, factors if frame[WEIGHTED] != 0 else np.int64(0)


@nb.njit
def _second_arguments(order: Any, frame: Any, n: Any, listed: Any, counters: Any, report: Any) -> Any:
    """Write the arguments of `put_rows` or `pool_waiting`. Returns the number of threads, for `listed` keys at most. `report`: 0 for none."""
    here, there, cells, pointers = frame[PINNED], frame[DEVICE], frame[_CELLS:], frame[_ARGUMENTS:]
    rows, bags = here + frame[AT_ROWS], frame[BAGS]
    for k in range(_MOST):
        pointers[k] = np.int64(frame.ctypes.data) + (_CELLS + k) * 8
    if bags == 0:
        put = (rows, here + frame[AT_PLACES], here + 4, frame[OUT], frame[DIM], frame[HALF], counters, report)
        for k in range(len(put)):
            cells[k] = put[k]
        return min(listed, _PUTTING) * TEAM
    offsets, factors = _starts_and_weights(frame, there if frame[COPIED] != 0 else here)
    pool = (
        n, offsets, bags, factors, frame[COMBINER], there + frame[AT_SOURCE], there + frame[AT_KEPT], there + frame[AT_WHOLE], rows,
        frame[OUT], frame[HALF], counters, report,
    )  # fmt: skip
    pointers[0] = order[TABLE]
    for k in range(len(pool)):
        cells[1 + k] = pool[k]
    return bags * WARP


@nb.njit
def _arguments(order: Any, frame: Any, n: Any, where: Any, told: Any) -> Any:
    """Write the arguments of `look_up` or `pool` (`cuda/lookup.cu`). Returns the number of threads."""
    here, there, cells, pointers = frame[PINNED], frame[DEVICE], frame[_CELLS:], frame[_ARGUMENTS:]
    for k in range(_MOST):
        pointers[k] = np.int64(frame.ctypes.data) + (_CELLS + k) * 8
    pointers[0] = order[TABLE]
    pointers[1] = order[HOST] if frame[OF] != 0 and order[HOST_OF] == frame[OF] else order[NO_HOST]
    common = (
        frame[THERE] if frame[THERE] != 0 else where + frame[AT_KEYS], where + frame[AT_BEFORE] if told else 0, here + frame[AT_STATE], n, here + frame[AT_MISSING],
        here + frame[AT_PLACES], there + frame[AT_ROWS], here + frame[AT_ROWS], frame[PADDING], frame[PADDED],
        where + frame[AT_FILTERS] if frame[FILTERS] != 0 else 0,
    )  # fmt: skip
    for k in range(len(common)):
        cells[2 + k] = common[k]
    last = (frame[OUT], frame[HALF], order[COUNTERS], here)
    k, bags = 2 + len(common), frame[BAGS]
    if bags != 0:
        offsets, factors = _starts_and_weights(frame, where)
        pool = (
            offsets, bags, factors, frame[COMBINER], there + frame[AT_SOURCE],
            there + frame[AT_KEPT], there + frame[AT_WHOLE],
        )  # fmt: skip
        for j in range(len(pool)):
            cells[k + j] = pool[j]
        k += len(pool)
    for j in range(len(last)):
        cells[k + j] = last[j]
    return bags * WARP if bags != 0 else (n + 1) // 2 * TEAM


@nb.njit
def _answered(frame: Any, state: Any) -> Any:
    """The result of a finished kernel, as `look_up` returns it. Copies the states if no key is listed."""
    here = frame[PINNED]
    listed = np.int64(acquire_u32(here + 4))
    if listed != 0:
        return 2 * listed
    copy_bytes(np.int64(state.ctypes.data), here + frame[AT_STATE], state.size)
    below = False
    for i in range(state.size):
        below |= state[i] == _HOST
    return np.int64(below)
