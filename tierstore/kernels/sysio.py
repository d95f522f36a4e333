"""System calls for kernels: files, sockets, epoll, clocks and memory, and their errors.

Only for use inside `@njit` code; with `nogil` they run beside the interpreter. An address is a number and is not checked, not even with
NUMBA_BOUNDSCHECK. The functions are the C library's, found by name when a kernel is loaded. All but `allocate`, `release` and the clocks return the
result of the system call, or minus the error number.

Files are read by `preadv2` and never by a mapping, so that a failing drive gives an error number and not a signal.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types

from tierstore.kernels.intrinsics import emits

NOWAIT = 8  # RWF_NOWAIT: fail with EAGAIN rather than wait for the drive
WILL_NEED = 3  # POSIX_FADV_WILLNEED
EINTR, EAGAIN = 4, 11

EPOLL_ADD, EPOLL_DEL = 1, 2
# an event has 32 bits of mask and 64 of data, 4 bytes behind them if the structure is packed (x86-64), else 8
EVENT_BYTES, EVENT_DATA = (12, 4) if platform.machine() in ("x86_64", "AMD64") else (16, 8)
READABLE, WRITABLE, FAILED, HUNG_UP, HALF_CLOSED = 0x1, 0x4, 0x8, 0x10, 0x2000  # EPOLLIN, OUT, ERR, HUP, RDHUP
EXCLUSIVE, EDGE = 1 << 28, 1 << 31  # EPOLLEXCLUSIVE, EPOLLET

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_POINTER = _I8.as_pointer()


def _declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    module = builder.module
    declared = module.globals.get(name)
    return declared if declared is not None else ir.Function(module, ir.FunctionType(result, arguments), name)


def _or_error(builder: Any, got: Any) -> Any:
    """`got` (64 bits), or minus `errno` if it is negative."""
    where = builder.call(_declare(builder, "__errno_location", _I32.as_pointer(), []), [])
    failed = builder.neg(builder.sext(builder.load(where), _I64))
    return builder.select(builder.icmp_signed("<", got, _I64(0)), failed, got)


def _call(builder: Any, name: str, result: Any, kinds: list[Any], *args: Any) -> Any:
    """Call `name` with 64-bit numbers, converted to `kinds`; the result is widened, with errors as in `_or_error`."""
    given = []
    for value, kind in zip(args, kinds, strict=True):
        if kind is _POINTER:
            given.append(builder.inttoptr(value, _POINTER))
        else:
            given.append(value if kind is _I64 else builder.trunc(value, kind))
    got = builder.call(_declare(builder, name, result, kinds), given)
    return _or_error(builder, got if result is _I64 else builder.sext(got, _I64))


def _signature(count: int) -> Any:
    return types.int64(*[types.int64] * count)


@emits(_signature(5))
def read_at(builder: Any, fd: Any, address: Any, size: Any, offset: Any, flags: Any) -> Any:
    """`preadv2` of one piece: bytes read (0 at the end of the file)."""
    with builder.goto_entry_block():
        piece = builder.alloca(_I64, 2)  # struct iovec
    builder.store(address, piece)
    builder.store(size, builder.gep(piece, [_I64(1)]))
    pointer = _I64.as_pointer()
    call = _declare(builder, "preadv2", _I64, [_I32, pointer, _I32, _I64, _I32])
    got = builder.call(call, [builder.trunc(fd, _I32), piece, _I32(1), offset, builder.trunc(flags, _I32)])
    return _or_error(builder, got)


@emits(_signature(4))
def advise(builder: Any, fd: Any, offset: Any, size: Any, advice: Any) -> Any:
    """`posix_fadvise`: 0, or an error number."""
    return _call(builder, "posix_fadvise", _I32, [_I32, _I64, _I64, _I32], fd, offset, size, advice)


@emits(_signature(3))
def read(builder: Any, fd: Any, address: Any, size: Any) -> Any:
    """Bytes read, 0 at the end."""
    return _call(builder, "read", _I64, [_I32, _POINTER, _I64], fd, address, size)


@emits(_signature(3))
def write(builder: Any, fd: Any, address: Any, size: Any) -> Any:
    """Bytes written."""
    return _call(builder, "write", _I64, [_I32, _POINTER, _I64], fd, address, size)


@emits(_signature(3))
def receive(builder: Any, fd: Any, address: Any, size: Any) -> Any:
    """`recv` without waiting: bytes received, 0 when the other side has ended."""
    return _call(builder, "recv", _I64, [_I32, _POINTER, _I64, _I32], fd, address, size, _I64(0x40))  # MSG_DONTWAIT


@emits(_signature(4))
def send(builder: Any, fd: Any, address: Any, size: Any, more: Any) -> Any:
    """`send` without waiting or a signal: bytes taken. `more` (0 or 1): others follow at once."""
    flags = builder.or_(_I64(0x4040), builder.shl(more, _I64(15)))  # MSG_NOSIGNAL, MSG_DONTWAIT; MSG_MORE
    return _call(builder, "send", _I64, [_I32, _POINTER, _I64, _I32], fd, address, size, flags)


@emits(_signature(3))
def send_pieces(builder: Any, fd: Any, pieces: Any, count: Any) -> Any:
    """`send` of several pieces (`records.TEXT` end to end, as struct iovec), at most 1,024."""
    with builder.goto_entry_block():
        message = builder.alloca(_I64, 7)  # struct msghdr
    for i, word in enumerate((_I64(0), _I64(0), pieces, count, _I64(0), _I64(0), _I64(0))):
        builder.store(word, builder.gep(message, [_I64(i)]))
    flags = _I64(0x4040)  # MSG_NOSIGNAL, MSG_DONTWAIT
    return _call(builder, "sendmsg", _I64, [_I32, _POINTER, _I32], fd, builder.ptrtoint(message, _I64), flags)


@emits(_signature(1))
def accept(builder: Any, fd: Any) -> Any:
    """`accept4`: the descriptor of a non-blocking connection."""
    flags = _I64(0o2004000)  # NONBLOCK, CLOEXEC
    return _call(builder, "accept4", _I32, [_I32, _POINTER, _POINTER, _I32], fd, _I64(0), _I64(0), flags)


@emits(_signature(1))
def end_sending(builder: Any, fd: Any) -> Any:
    """`shutdown` of the sending side: the other side reads what was sent, and then the end."""
    return _call(builder, "shutdown", _I32, [_I32, _I32], fd, _I64(1))  # SHUT_WR


@emits(_signature(1))
def close(builder: Any, fd: Any) -> Any:
    return _call(builder, "close", _I32, [_I32], fd)


def _set_option(builder: Any, fd: Any, level: int, option: int, *words: int) -> Any:
    with builder.goto_entry_block():
        value = builder.alloca(_I32, len(words))
    for i, word in enumerate(words):
        builder.store(_I32(word), builder.gep(value, [_I64(i)]))
    given = [fd, _I64(level), _I64(option), builder.ptrtoint(value, _I64), _I64(4 * len(words))]
    return _call(builder, "setsockopt", _I32, [_I32, _I32, _I32, _POINTER, _I32], *given)


@emits(_signature(1))
def send_at_once(builder: Any, fd: Any) -> Any:
    """Set TCP_NODELAY."""
    return _set_option(builder, fd, 6, 1, 1)


@emits(_signature(1))
def hold_packets(builder: Any, fd: Any) -> Any:
    """Set TCP_CORK: data wait until packets are full, or until `send_packets`."""
    return _set_option(builder, fd, 6, 3, 1)


@emits(_signature(1))
def send_packets(builder: Any, fd: Any) -> Any:
    """Unset TCP_CORK: waiting data are sent."""
    return _set_option(builder, fd, 6, 3, 0)


@emits(_signature(1))
def drop_on_close(builder: Any, fd: Any) -> Any:
    """SO_LINGER of 0 s: `close` resets the connection and drops unsent data."""
    return _set_option(builder, fd, 1, 13, 1, 0)


@emits(_signature(4))
def epoll_wait(builder: Any, epoll: Any, events: Any, most: Any, timeout_ms: Any) -> Any:
    """How many events were written to the address `events`."""
    return _call(builder, "epoll_wait", _I32, [_I32, _POINTER, _I32, _I32], epoll, events, most, timeout_ms)


@emits(_signature(5))
def epoll_set(builder: Any, epoll: Any, operation: Any, fd: Any, mask: Any, data: Any) -> Any:
    """`epoll_ctl`: report events of `mask` on `fd` with the 64 bits `data` (EPOLL_ADD), or stop (EPOLL_DEL)."""
    with builder.goto_entry_block():
        event = builder.alloca(_I32, 4)
    low, high = builder.trunc(data, _I32), builder.trunc(builder.lshr(data, _I64(32)), _I32)
    first = EVENT_DATA // 4
    for i, word in ((0, builder.trunc(mask, _I32)), (first, low), (first + 1, high)):
        builder.store(word, builder.gep(event, [_I64(i)]))
    kinds = [_I32, _I32, _I32, _POINTER]
    return _call(builder, "epoll_ctl", _I32, kinds, epoll, operation, fd, builder.ptrtoint(event, _I64))


@emits(_signature(3))
def poll(builder: Any, entries: Any, count: Any, timeout_ms: Any) -> Any:
    """How many of `count` entries (struct pollfd, 8 bytes: descriptor int32, events int16, returned events int16) are ready."""
    return _call(builder, "poll", _I32, [_POINTER, _I64, _I32], entries, count, timeout_ms)


def _read_clock(builder: Any, which: int) -> Any:
    with builder.goto_entry_block():
        spec = builder.alloca(_I64, 2)  # struct timespec
    kinds = [_I32, _I64.as_pointer()]
    builder.call(_declare(builder, "clock_gettime", _I32, kinds), [_I32(which), spec])
    seconds, ns = builder.load(spec), builder.load(builder.gep(spec, [_I64(1)]))
    return builder.add(builder.mul(seconds, _I64(1_000_000_000)), ns)


@emits(_signature(0))
def monotonic_ns(builder: Any) -> Any:
    """The clock of `time.monotonic_ns` and, on Linux, of `time.perf_counter_ns`."""
    return _read_clock(builder, 1)


@emits(_signature(0))
def wall_ns(builder: Any) -> Any:
    """The clock of `time.time_ns`."""
    return _read_clock(builder, 0)


@emits(_signature(1))
def allocate(builder: Any, size: Any) -> Any:
    """The address of `size` bytes from `malloc`; 0 if there is no memory."""
    got = builder.call(_declare(builder, "malloc", _POINTER, [_I64]), [size])
    return builder.ptrtoint(got, _I64)


@emits(types.void(types.int64))
def release(builder: Any, address: Any) -> Any:
    """`free`; an address of 0 is allowed."""
    builder.call(_declare(builder, "free", ir.VoidType(), [_POINTER]), [builder.inttoptr(address, _POINTER)])


@emits(types.void(types.int64, types.int64, types.int64))
def move_bytes(builder: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between addresses that may overlap."""
    kinds = [_POINTER, _POINTER, _I64]
    pointers = [builder.inttoptr(address, _POINTER) for address in (target, source)]
    builder.call(_declare(builder, "memmove", _POINTER, kinds), [*pointers, count])


@emits(types.void(types.int64, types.int64))
def clear_bytes(builder: Any, target: Any, count: Any) -> Any:
    """Set `count` bytes to 0."""
    kinds = [_POINTER, _I32, _I64]
    builder.call(_declare(builder, "memset", _POINTER, kinds), [builder.inttoptr(target, _POINTER), _I32(0), count])


@emits(_signature(3))
def same_bytes(builder: Any, one: Any, other: Any, count: Any) -> Any:
    """Whether `count` bytes at two addresses are equal: 1 or 0."""
    kinds = [_POINTER, _POINTER, _I64]
    pointers = [builder.inttoptr(address, _POINTER) for address in (one, other)]
    got = builder.call(_declare(builder, "memcmp", _I32, kinds), [*pointers, count])
    return builder.zext(builder.icmp_signed("==", got, _I32(0)), _I64)
