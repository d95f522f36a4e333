"""Compiled calls of a GPU driver, by the addresses of its functions: put work into a stream, and wait for a kernel.

`calls` int64[ADDRESSES] has the addresses, then the context for all calls. Nothing is allocated and the interpreter is not entered. Any thread may
call; two threads that put work into one stream must agree on its order. Every function returns 0, or the driver's error.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from llvmlite import ir
from numba import types

from tierstore.kernels import LAST, compiled
from tierstore.kernels.atomics import acquire_u32
from tierstore.kernels.intrinsics import emits
from tierstore.kernels.raw import call_at

(
    LAUNCH, COPY, RECORD, WAIT, QUERY, PUSH, POP, MODE, REGISTER, UNREGISTER, MAPPED, COPY_DOWN, WAIT_VALUE, WRITE_VALUE,
    YIELD, SLEEP, CONTEXT, ADDRESSES,
) = range(18)  # fmt: skip
NOBODY = -1  # in place of a stream
UNSAID = -1  # result of `wait`: the stream has done all its work, and the expected word is not there
_NOT_READY = 600
_FIRST_OF_CAPTURES, _LAST_OF_CAPTURES = 900, 909  # errors of calls that are refused because a graph is being captured
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: calls of this thread do not disturb captures of other threads
_SPINS = 4096  # reads of the word before the thread lets other threads run in between: 10 us
_LOOKS = 64  # further reads before the driver is asked for the state of the stream
_EAGER = 64  # such questions before the thread sleeps in between
_SLEEP_US = 20
_I64 = ir.IntType(64)
_WORDS = types.int64[::1]


@emits(types.int64(*[types.int64] * 6))
def launch_at(builder: Any, function: Any, kernel: Any, blocks: Any, threads: Any, stream: Any, arguments: Any) -> Any:
    """cuLaunchKernel of a line of blocks, without shared memory. 32-bit integers are passed in words, as the ABI requires."""
    one, nothing, kind = ir.Constant(_I64, 1), ir.Constant(_I64, 0), ir.FunctionType(_I64, [_I64] * 11)
    passed = [kernel, blocks, one, one, threads, one, one, nothing, stream, arguments, nothing]
    return builder.call(builder.inttoptr(function, kind.as_pointer()), passed)


@compiled(types.int64(_WORDS, types.int64, types.int64, types.int64, types.int64, types.int64, _WORDS), when=LAST)
def launch(calls: Any, kernel: Any, blocks: Any, threads: Any, stream: Any, arguments: Any, scratch: Any) -> Any:
    """Put a kernel into a stream. `arguments`: the address of pointers to its arguments, which the driver reads before this returns."""
    status = types.int32(call_at(calls[PUSH], calls[CONTEXT], 0, 0, 0, 0, 0))
    if status == 0:
        status = types.int32(launch_at(calls[LAUNCH], kernel, blocks, threads, stream, arguments))
        call_at(calls[POP], scratch.ctypes.data, 0, 0, 0, 0, 0)
    return types.int64(status)


@compiled(types.int64(_WORDS, *[types.int64] * 5, _WORDS), when=LAST)
def call(calls: Any, which: Any, one: Any, two: Any, three: Any, four: Any, scratch: Any) -> Any:
    """Call a function of at most four arguments in the context, without disturbing another thread's capture."""
    status = types.int32(call_at(calls[PUSH], calls[CONTEXT], 0, 0, 0, 0, 0))
    if status == 0:
        scratch[1] = _RELAXED
        call_at(calls[MODE], scratch.ctypes.data + 8, 0, 0, 0, 0, 0)
        status = types.int32(call_at(calls[which], one, two, three, four, 0, 0))
        call_at(calls[MODE], scratch.ctypes.data + 8, 0, 0, 0, 0, 0)
        call_at(calls[POP], scratch.ctypes.data, 0, 0, 0, 0, 0)
    return types.int64(status)


@compiled(types.int64(_WORDS, types.int64, _WORDS, _WORDS, _WORDS), when=LAST)
def follow(calls: Any, stream: Any, others: Any, events: Any, scratch: Any) -> Any:
    """Make later work of a stream wait for the work in other streams, by an event for each."""
    status = types.int32(call_at(calls[PUSH], calls[CONTEXT], 0, 0, 0, 0, 0))
    if status == 0:
        status = come_after(calls, stream, others, events)
        call_at(calls[POP], scratch.ctypes.data, 0, 0, 0, 0, 0)
    return types.int64(status)


@nb.njit
def come_after(calls: Any, stream: Any, others: Any, events: Any) -> Any:
    """`follow` in a context that is current already. NOBODY among `others` is skipped."""
    status = types.int32(0)
    for k in range(len(others)):
        if status == 0 and others[k] != NOBODY:
            status = types.int32(call_at(calls[RECORD], events[k], others[k], 0, 0, 0, 0))
            if status == 0:
                status = types.int32(call_at(calls[WAIT], stream, events[k], 0, 0, 0, 0))
    return status


@compiled(types.int64(_WORDS, types.int64, types.int64, _WORDS), when=LAST)
def wait(calls: Any, word: Any, stream: Any, scratch: Any) -> Any:
    """Wait until the uint32 at an address is not 0. Returns UNSAID, or an error, if the stream's work has ended without that."""
    for _ in range(_SPINS):
        if acquire_u32(word) != 0:
            return 0
    queries = 0
    while True:
        for _ in range(_LOOKS):
            if acquire_u32(word) != 0:
                return 0
            call_at(calls[YIELD], 0, 0, 0, 0, 0, 0)
        status = call(calls, QUERY, stream, 0, 0, 0, scratch)
        if acquire_u32(word) != 0:
            return 0
        if status == 0:
            return UNSAID
        if status != _NOT_READY and not _FIRST_OF_CAPTURES <= status <= _LAST_OF_CAPTURES:
            return status
        queries += 1
        if queries > _EAGER:
            call_at(calls[SLEEP], _SLEEP_US, 0, 0, 0, 0, 0)
