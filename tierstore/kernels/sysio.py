"""System calls for kernels: positioned reads into memory, and what they say when they fail.

For use inside `@njit` code alone; with `nogil` they run beside the interpreter. An address is a number and is not
checked, not even with NUMBA_BOUNDSCHECK. The functions are the C library's, found by name when a kernel is loaded.

Reads go through `preadv2` and never through a mapping, so that a failing drive is an error number and not a signal.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

NOWAIT = 8  # RWF_NOWAIT: fail with EAGAIN rather than wait for the drive
WILL_NEED = 3  # POSIX_FADV_WILLNEED

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    module = builder.module
    known = module.globals.get(name)
    return known if known is not None else ir.Function(module, ir.FunctionType(result, arguments), name)


@intrinsic
def read_at(typingctx: Any, fd: Any, address: Any, size: Any, offset: Any, flags: Any) -> Any:
    """`preadv2` of one piece: bytes read (0 at the end of the file), or minus the error number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fd, address, size, offset, flags = args
        with builder.goto_entry_block():
            piece = builder.alloca(_I64, 2)  # struct iovec
        builder.store(address, piece)
        builder.store(size, builder.gep(piece, [_I64(1)]))
        pointer = _I64.as_pointer()
        call = _declare(builder, "preadv2", _I64, [_I32, pointer, _I32, _I64, _I32])
        got = builder.call(call, [builder.trunc(fd, _I32), piece, _I32(1), offset, builder.trunc(flags, _I32)])
        where = builder.call(_declare(builder, "__errno_location", _I32.as_pointer(), []), [])
        failed = builder.neg(builder.sext(builder.load(where), _I64))
        return builder.select(builder.icmp_signed("<", got, _I64(0)), failed, got)

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def advise(typingctx: Any, fd: Any, offset: Any, size: Any, advice: Any) -> Any:
    """`posix_fadvise`: 0, or an error number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fd, offset, size, advice = args
        call = _declare(builder, "posix_fadvise", _I32, [_I32, _I64, _I64, _I32])
        said = builder.call(call, [builder.trunc(fd, _I32), offset, size, builder.trunc(advice, _I32)])
        return builder.sext(said, _I64)

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen
