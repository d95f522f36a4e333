"""Atomic loads and stores, fences, prefetch and vector compares for numba kernels.

Only for use inside `@njit` code. Most take a C-contiguous array and the index of an element (or of the first of several), the others take addresses.
They compile to LLVM instructions, so their order is kept on every machine, and nothing here is specific to one.

Neither index nor address is checked, not even with NUMBA_BOUNDSCHECK: the caller must pass valid ones.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from tierstore.kernels.intrinsics import emits

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to element `index` (any integer width, taken as it is) of a C-contiguous array."""
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(data, [index])


def _load(ordering: str, array: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, ordering, array.dtype.bitwidth // 8)

    return array.dtype(array, types.intp), codegen


@intrinsic
def load_acquire(typingctx: Any, array: Any, index: Any) -> Any:
    """`array[index]`; nothing that follows in the program is read before it."""
    return _load("acquire", array)


@intrinsic
def load_relaxed(typingctx: Any, array: Any, index: Any) -> Any:
    """`array[index]`, read once and whole, in no particular order."""
    return _load("monotonic", array)


def _store(ordering: str, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, ordering, array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


def _load_at(builder: Any, address: Any, ordering: str, bits: int) -> Any:
    pointer = builder.inttoptr(address, ir.IntType(bits).as_pointer())
    return builder.zext(builder.load_atomic(pointer, ordering, bits // 8), _I64)


@emits(types.int64(types.int64))
def acquire_u32(builder: Any, address: Any) -> Any:
    """The uint32 at a multiple of 4, widened; nothing that follows in the program is read before it."""
    return _load_at(builder, address, "acquire", 32)


@emits(types.int64(types.int64))
def relaxed_u32(builder: Any, address: Any) -> Any:
    """The uint32 at a multiple of 4, widened; read once and whole, in no particular order."""
    return _load_at(builder, address, "monotonic", 32)


@emits(types.int64(types.int64))
def acquire_i64(builder: Any, address: Any) -> Any:
    """The int64 at a multiple of 8; nothing that follows in the program is read before it."""
    return _load_at(builder, address, "acquire", 64)


@emits(types.int64(types.int64))
def relaxed_i64(builder: Any, address: Any) -> Any:
    """The int64 at a multiple of 8; read once and whole, in no particular order."""
    return _load_at(builder, address, "monotonic", 64)


@intrinsic
def store_release(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index] = value`; everything before it in the program is written before it."""
    return _store("release", array, index, value)


@intrinsic
def store_relaxed(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index] = value`, written once and whole, in no particular order."""
    return _store("monotonic", array, index, value)


def _change_at(builder: Any, address: Any, operation: str, value: Any) -> Any:
    return builder.atomic_rmw(operation, builder.inttoptr(address, _I64.as_pointer()), value, "seq_cst")


@emits(types.int64(types.int64, types.int64))
def add_at(builder: Any, address: Any, value: Any) -> Any:
    """Atomically add to the int64 at a multiple of 8, in one order for all threads. Returns the value before."""
    return _change_at(builder, address, "add", value)


@emits(types.int64(types.int64, types.int64))
def swap_at(builder: Any, address: Any, value: Any) -> Any:
    """Atomically replace the int64 at a multiple of 8, in one order for all threads. Returns the value before."""
    return _change_at(builder, address, "xchg", value)


@emits(types.int64(types.int64, types.int64))
def raise_at(builder: Any, address: Any, value: Any) -> Any:
    """Atomically raise the int64 at a multiple of 8 to at least `value`. Returns the value before."""
    return _change_at(builder, address, "max", value)


@emits(types.void(types.int64, types.int64))
def release_i64(builder: Any, address: Any, value: Any) -> Any:
    """Store an int64 at a multiple of 8; everything before it in the program is written before it."""
    pointer = builder.inttoptr(address, _I64.as_pointer())
    builder.store_atomic(value, pointer, "release", 8)


@emits(types.void())
def fence_acquire(builder: Any) -> Any:
    """Reads before the fence stay before all reads and writes after it."""
    builder.fence("acquire")


@emits(types.void())
def fence_release(builder: Any) -> Any:
    """Reads and writes before the fence stay before all writes after it."""
    builder.fence("release")


@emits(types.void())
def fence_all(builder: Any) -> Any:
    """A fence in one order for all threads: of two threads that each write, fence and read, at least one sees the other's write."""
    builder.fence("seq_cst")


def _prefetch(builder: Any, address: Any, locality: int) -> None:
    pointer = builder.inttoptr(address, _I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_I8.as_pointer()], kind)
    builder.call(function, [pointer, _I32(0), _I32(locality), _I32(1)])


@emits(types.void(types.int64))
def prefetch(builder: Any, address: Any) -> Any:
    """Ask for the cache line of an address; harmless whatever the address."""
    _prefetch(builder, address, 3)


@emits(types.void(types.int64))
def prefetch_far(builder: Any, address: Any) -> Any:
    """`prefetch` into the second-level cache, which can load more lines at a time than the first."""
    _prefetch(builder, address, 2)


@intrinsic
def stack_bytes(typingctx: Any, size: Any) -> Any:
    """The address of `size` bytes (a constant) on the stack, at a multiple of 64; gone when the function returns."""
    if not isinstance(size, types.IntegerLiteral):
        raise RequireLiteralValue("the size must be a constant")
    count = size.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(_I8, count))
        room.align = 64
        return builder.ptrtoint(room, _I64)

    return types.int64(size), codegen


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector with `value` in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


@intrinsic
def match32(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """A bit mask: bit i is set if `array[index + i] == value`, for i in 0..31, by one or two vector compares."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(args[2].type, 32)
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
        loaded.align = 1
        return builder.bitcast(builder.icmp_unsigned("==", loaded, _splat(builder, args[2], 32)), _I32)

    return types.uint32(array, types.intp, array.dtype), codegen


@emits(types.int64(types.int64, types.int64))
def match8_at(builder: Any, address: Any, value: Any) -> Any:
    """`match32` for the eight int64 at `address`, a multiple of 64."""
    vector = ir.VectorType(_I64, 8)
    loaded = builder.load(builder.inttoptr(address, vector.as_pointer()))
    loaded.align = 64
    same = builder.icmp_unsigned("==", loaded, _splat(builder, value, 8))
    return builder.zext(builder.bitcast(same, _I8), _I64)


@emits(types.int64(types.uint32))
def trailing_zeros(builder: Any, word: Any) -> Any:
    """The number of low zero bits of a uint32 (32 for 0)."""
    return builder.zext(builder.cttz(word, ir.Constant(ir.IntType(1), 0)), _I64)


@emits(types.void(types.int64, types.int64, types.int64))
def copy_bytes(builder: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes from address `source` to address `target`; the two do not overlap."""
    pointers = [builder.inttoptr(address, _I8.as_pointer()) for address in (target, source)]
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I8.as_pointer(), _I64, ir.IntType(1)])
    function = builder.module.declare_intrinsic("llvm.memcpy", [_I8.as_pointer(), _I8.as_pointer(), _I64], kind)
    builder.call(function, [*pointers, count, ir.Constant(ir.IntType(1), 0)])


@emits(types.void(types.int64, types.int64))
def copy_line(builder: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes from address `source` to address `target`, at any alignment, in registers."""
    line = ir.VectorType(_I64, 8)
    loaded = builder.load(builder.inttoptr(source, line.as_pointer()))
    loaded.align = 1
    builder.store(loaded, builder.inttoptr(target, line.as_pointer())).align = 1
