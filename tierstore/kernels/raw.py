"""Numbers at an address: loads and stores at any alignment, half precision, and wide multiplication.

Only for use inside `@njit` code. `base` is an address, `index` counts elements of the type in the name. Nothing is checked, not even with
NUMBA_BOUNDSCHECK: the caller must pass valid addresses. Memory is little-endian, as on every machine that tierstore runs on.

Half precision uses bit patterns and integer arithmetic: CPUs without F16C would need a library call that the just-in-time compiler cannot resolve,
and the integer form vectorizes to about the same speed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tierstore.kernels.intrinsics import emits

_I8, _I16, _I32, _I64, _I128 = (ir.IntType(bits) for bits in (8, 16, 32, 64, 128))
_F32 = ir.FloatType()
_16_F32 = ir.VectorType(_F32, 16)

_INFINITE = 0x7F800000  # magnitude bits of binary32; from here on a value is Inf or NaN
_F16_LIMIT = 0x477FF000  # 65520, the least magnitude that rounds to Inf in binary16


def _element(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.gep(builder.inttoptr(base, kind.as_pointer()), [index])


def _load(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    value = builder.load(_element(builder, base, index, kind))
    value.align = 1
    return value


def _store(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, value: ir.Value) -> None:
    builder.store(value, _element(builder, base, index, value.type)).align = 1


def _const(value: int) -> ir.Constant:
    return ir.Constant(_I32, value)


def _sixteen(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector with a float32 in each of its 16 places."""
    undefined = ir.Constant(_16_F32, ir.Undefined)
    first = builder.insert_element(undefined, value, _const(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, 16), [0] * 16))


@emits(types.uint64(types.int64, types.int64))
def load_u64(builder: Any, base: Any, index: Any) -> Any:
    return _load(builder, base, index, _I64)


@emits(types.void(types.int64, types.int64, types.uint64))
def store_u64(builder: Any, base: Any, index: Any, value: Any) -> Any:
    _store(builder, base, index, value)


@emits(types.int64(types.int64, types.int64))
def load_i64(builder: Any, base: Any, index: Any) -> Any:
    return _load(builder, base, index, _I64)


@emits(types.void(types.int64, types.int64, types.int64))
def store_i64(builder: Any, base: Any, index: Any, value: Any) -> Any:
    _store(builder, base, index, value)


@emits(types.uint8(types.int64, types.int64))
def load_u8(builder: Any, base: Any, index: Any) -> Any:
    return _load(builder, base, index, _I8)


@emits(types.void(types.int64, types.int64, types.uint8))
def store_u8(builder: Any, base: Any, index: Any, value: Any) -> Any:
    _store(builder, base, index, value)


@emits(types.float32(types.int64, types.int64))
def load_f32(builder: Any, base: Any, index: Any) -> Any:
    return _load(builder, base, index, _F32)


@emits(types.void(types.int64, types.int64, types.float32))
def store_f32(builder: Any, base: Any, index: Any, value: Any) -> Any:
    _store(builder, base, index, value)


@emits(types.float32(types.int64, types.int64))
def load_bf16(builder: Any, base: Any, index: Any) -> Any:
    bits = builder.zext(_load(builder, base, index, _I16), _I32)
    return builder.bitcast(builder.shl(bits, _const(16)), _F32)


@emits(types.void(types.int64, types.int64, types.float32))
def store_bf16(builder: Any, base: Any, index: Any, value: Any) -> Any:
    """Store a bfloat16, rounded to nearest even by carrying into the kept half. The caller has refused NaN."""
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _const(16)), _const(1))
    rounded = builder.add(builder.add(bits, odd), _const(0x7FFF))
    _store(builder, base, index, builder.trunc(builder.lshr(rounded, _const(16)), _I16))


def _widened(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Convert binary16 to binary32, one value or a vector.

    Exact, and free of subnormal binary32 arithmetic, which some libraries switch off for the process.
    """

    def of(kind: ir.Type) -> ir.Type:
        return ir.VectorType(kind, halves.type.count) if isinstance(halves.type, ir.VectorType) else kind

    def const(value: float, kind: ir.Type = _I32) -> ir.Constant:
        return ir.Constant(of(kind), value if of(kind) is kind else [value] * halves.type.count)

    bits = builder.zext(halves, of(_I32))
    magnitude = builder.shl(builder.and_(bits, const(0x7FFF)), const(13))
    sign = builder.shl(builder.and_(bits, const(0x8000)), const(16))
    normal = builder.add(magnitude, const(112 << 23))
    lifted = builder.bitcast(builder.add(magnitude, const(113 << 23)), of(_F32))
    subnormal = builder.bitcast(builder.fsub(lifted, const(2.0**-14, _F32)), of(_I32))
    value = builder.select(builder.icmp_unsigned("<", magnitude, const(1 << 23)), subnormal, normal)
    special = builder.icmp_unsigned(">=", magnitude, const(0x7C00 << 13))
    value = builder.select(special, builder.or_(magnitude, const(_INFINITE)), value)
    return builder.bitcast(builder.or_(value, sign), of(_F32))


@emits(types.float32(types.int64, types.int64))
def load_f16(builder: Any, base: Any, index: Any) -> Any:
    return _widened(builder, _load(builder, base, index, _I16))


@emits(types.UniTuple(types.float32, 2)(types.int64))
def load_two_f16(builder: Any, base: Any) -> Any:
    """Load the first two float16, at the cost of one."""
    both = _widened(builder, _load(builder, base, ir.Constant(_I64, 0), ir.VectorType(_I16, 2)))
    return cgutils.pack_array(builder, [builder.extract_element(both, _const(i)) for i in range(2)])


@emits(types.void(types.int64, types.int64, types.float32))
def store_f16(builder: Any, base: Any, index: Any, value: Any) -> Any:
    """Store a float16, rounded to nearest even; 65520 and more becomes Inf, NaN stays NaN."""
    bits = builder.bitcast(value, _I32)
    magnitude = builder.and_(bits, _const(0x7FFFFFFF))
    sign = builder.and_(builder.lshr(bits, _const(16)), _const(0x8000))
    odd = builder.and_(builder.lshr(magnitude, _const(13)), _const(1))
    rebiased = builder.add(builder.add(magnitude, odd), _const(0xFFF - (112 << 23)))
    normal = builder.lshr(rebiased, _const(13))
    # adding 0.5 moves the units of a subnormal binary16 to the last mantissa bits, rounded by the addition
    lifted = builder.bitcast(builder.fadd(builder.bitcast(magnitude, _F32), ir.Constant(_F32, 0.5)), _I32)
    subnormal = builder.sub(lifted, _const(126 << 23))
    finite = builder.select(builder.icmp_unsigned("<", magnitude, _const(113 << 23)), subnormal, normal)
    nan = builder.icmp_unsigned(">", magnitude, _const(_INFINITE))
    special = builder.select(nan, _const(0x7E00), _const(0x7C00))
    huge = builder.icmp_unsigned(">=", magnitude, _const(_F16_LIMIT))
    half = builder.or_(builder.select(huge, special, finite), sign)
    _store(builder, base, index, builder.trunc(half, _I16))


@emits(types.void(types.int64, types.int64, types.float32))
def add_scaled_16(builder: Any, target: Any, source: Any, factor: Any) -> Any:
    """`target += factor * source` for the 16 float32 at two addresses, with the products rounded before they are added."""
    zero = ir.Constant(_I64, 0)
    product = builder.fmul(_sixteen(builder, factor), _load(builder, source, zero, _16_F32))
    _store(builder, target, zero, builder.fadd(_load(builder, target, zero, _16_F32), product))


@emits(types.void(types.int64, types.int64, types.float32, types.float32))
def store_scaled_halves_16(builder: Any, target: Any, source: Any, scale: Any, offset: Any) -> Any:
    """Store `offset + scale * code` as 16 float32 at `target`, for the 16 four-bit codes at `source`, lower half of a byte first."""
    kind, zero = ir.VectorType(_I8, 8), ir.Constant(_I64, 0)
    codes = _load(builder, source, zero, kind)
    lower, upper = builder.and_(codes, ir.Constant(kind, [15] * 8)), builder.lshr(codes, ir.Constant(kind, [4] * 8))
    in_turn = ir.Constant(ir.VectorType(_I32, 16), [k // 2 + 8 * (k % 2) for k in range(16)])
    numbers = builder.uitofp(builder.shuffle_vector(lower, upper, in_turn), _16_F32)
    product = builder.fmul(numbers, _sixteen(builder, scale))
    _store(builder, target, zero, builder.fadd(product, _sixteen(builder, offset)))


@emits(types.int32(types.float32))
def magnitude(builder: Any, value: Any) -> Any:
    """The bits of |value| as an integer. Integers are in the order of the magnitudes, NaN above all."""
    return builder.and_(builder.bitcast(value, _I32), _const(0x7FFFFFFF))


@emits(types.float32(types.float32, types.float32, types.float32))
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return builder.fma(a, b, c)


@emits(types.uint64(types.int64, types.int64))
def load_u32(builder: Any, base: Any, index: Any) -> Any:
    """Load a uint32, widened to 64 bits so that arithmetic on it stays there."""
    return builder.zext(_load(builder, base, index, _I32), _I64)


@emits(types.uint64(types.uint64, types.uint64))
def fold_multiply(builder: Any, a: Any, b: Any) -> Any:
    """The two halves of the 128-bit product, combined by xor."""
    product = builder.mul(builder.zext(a, _I128), builder.zext(b, _I128))
    high = builder.trunc(builder.lshr(product, ir.Constant(_I128, 64)), _I64)
    return builder.xor(builder.trunc(product, _I64), high)


@emits(types.uint64(types.uint64, types.uint64))
def multiply_high(builder: Any, a: Any, b: Any) -> Any:
    """The upper half of the 128-bit product."""
    product = builder.mul(builder.zext(a, _I128), builder.zext(b, _I128))
    return builder.trunc(builder.lshr(product, ir.Constant(_I128, 64)), _I64)


@emits(types.uint64(types.uint64))
def leading_zeros(builder: Any, word: Any) -> Any:
    """The number of zero bits above the highest one of a word, which is not 0."""
    return builder.ctlz(word, ir.Constant(ir.IntType(1), 1))


@emits(types.float64(types.uint64))
def f64_of_bits(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, ir.DoubleType())


@emits(types.void(types.int64, types.int64, types.float64))
def store_f64(builder: Any, base: Any, index: Any, value: Any) -> Any:
    _store(builder, base, index, value)


@emits(types.uint64(types.uint64))
def swap_bytes(builder: Any, value: Any) -> Any:
    """The bytes of a 64-bit word in reverse order."""
    return builder.bswap(value)


@emits(types.int64(*[types.int64] * 7))
def call_at(builder: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call a compiled function of six int64 that returns one, by its address (`cfunc.address`).

    A function that is called by address is not compiled again into its callers.
    """
    kind = ir.FunctionType(_I64, [_I64] * 6)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [a, b, c, d, e, f])


@emits(types.CPointer(types.int64)(types.int64))
def i64_at(builder: Any, address: Any) -> Any:
    """A pointer to int64 at an address, for `numba.carray`."""
    return builder.inttoptr(address, _I64.as_pointer())


@emits(types.CPointer(types.uint32)(types.int64))
def u32_at(builder: Any, address: Any) -> Any:
    """A pointer to uint32 at an address, for `numba.carray`."""
    return builder.inttoptr(address, _I32.as_pointer())
