"""Storage dtypes: float vectors encoded to the bytes of stored rows, and decoded.

Free functions of arrays without state: any thread may call them, kernels run without the GIL, nothing touches a disk. Every kernel has one
specialization, so a compiled kernel never makes a request wait for the compiler.

A row, little-endian, is `StorageDtype.row_bytes(dim)` bytes at any alignment:

    float32    dim × binary32
    float16    dim × binary16, rounded to nearest, ties to even
    bfloat16   dim × the upper half of a binary32, rounded likewise
    int8       scale (binary32), offset (binary32), dim × uint8; x = fma(scale, code, offset)
    int4       scale (binary16), offset (binary16), dim × 4 bits, the lower half of a byte first; likewise

An `int8` row spans its minimum (code 0) to its maximum (code 255). The product is added before it is rounded, so a row may range from -3e38 to 3e38
although `scale * 255` alone would overflow. `int4` rows are rounded as FBGEMM's, to the bit (`FloatToFusedNBitRowwiseQuantizedSBHalf`, with the head
moved to the front, as in its tables for inference); `schema/layout.md` gives each step. A row of an odd dim ends with four zero bits.

**From another kernel** (numba, nogil): a row is decoded by addresses, so arrays of any mutability share one compiled function::

    from tierstore.kernels.codec import decode_row, out_code       # out_code is called in Python, not in a kernel

    # in Python: take addresses, and keep both arrays alive during the call
    my_kernel(dtype.code, out_code(out), rows.ctypes.data, rows.shape[1], out.ctypes.data, dim, slots, …)

    # in the kernel: row `slot` of uint8[·, row_bytes] into row `i` of float32|float16[·, dim]
    decode_row(code, oc, rows_at + slot * row_bytes, out_at + i * dim * out_width, dim)   # out_width: 4 >> oc
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from tierstore.kernels import FIRST, compiled
from tierstore.kernels.atomics import prefetch
from tierstore.kernels.raw import (
    fma,
    load_bf16,
    load_f16,
    load_f32,
    load_two_f16,
    load_u8,
    load_u64,
    magnitude,
    store_bf16,
    store_f16,
    store_f32,
    store_scaled_halves_16,
    store_u8,
    store_u64,
)
from tierstore.types import Keys, Rows, StorageDtype, Vectors

_F32_CODE = StorageDtype.FLOAT32.code
_F16_CODE = StorageDtype.FLOAT16.code
_BF16_CODE = StorageDtype.BFLOAT16.code
_INT4_CODE = StorageDtype.INT4.code

AS_STORED = 8  # an `out_code` beside 0 (float32) and 1 (float16): rows as they are stored

_INFINITE = 0x7F800000  # magnitude bits of binary32; from here on a value is Inf or NaN
_F16_LIMIT = 0x477FF000  # 65520, the least magnitude that rounds to Inf in binary16
_BF16_LIMIT = 0x7F7F8000  # the same for bfloat16
_AHEAD = 16  # rows that a gather prefetches

_REASONS = {1: "NaN", 2: "infinite", 3: "too large"}


class BadRow(ValueError):
    """A row that its storage dtype cannot hold. Attributes: `row`, `column` (0-based), `reason`."""

    def __init__(self, row: int, column: int, reason: str) -> None:
        self.row, self.column, self.reason = row, column, reason
        super().__init__(f"row {row}, column {column}: {reason}")


@compiled("void(int64, int64, int64)", inner=True)
def copy_row(dest: Any, source: Any, size: Any) -> Any:
    """Copy the bytes of a row. No alignment is needed."""
    words = size >> 3
    for k in range(words):
        store_u64(dest, k, load_u64(source, k))
    for k in range(words << 3, size):
        store_u8(dest, k, load_u8(source, k))


@compiled("void(int64, int64, int64, int64)", inner=True)
def _decode_int4(out_code: Any, source: Any, dest: Any, dim: Any) -> Any:
    """`decode_row` for int4: sixteen numbers at a time, or two, so that it is vectorized. The product is exact."""
    scale, offset = load_two_f16(source)
    codes, pairs = source + 4, dim >> 1
    if out_code == _F32_CODE:
        for i in range(dim >> 4):
            store_scaled_halves_16(dest + 64 * i, codes + 8 * i, scale, offset)
        for i in range(dim >> 4 << 3, pairs):
            two = load_u8(codes, i)
            store_f32(dest, 2 * i, fma(scale, np.float32(two & 15), offset))
            store_f32(dest, 2 * i + 1, fma(scale, np.float32(two >> 4), offset))
        if dim & 1:
            store_f32(dest, dim - 1, fma(scale, np.float32(load_u8(codes, pairs) & 15), offset))
    else:
        for i in range(pairs):
            two = load_u8(codes, i)
            store_f16(dest, 2 * i, fma(scale, np.float32(two & 15), offset))
            store_f16(dest, 2 * i + 1, fma(scale, np.float32(two >> 4), offset))
        if dim & 1:
            store_f16(dest, dim - 1, fma(scale, np.float32(load_u8(codes, pairs) & 15), offset))


@compiled("void(int64, int64, int64, int64, int64)", inner=True)
def decode_row(code: Any, out_code: Any, source: Any, dest: Any, dim: Any) -> Any:
    """Decode one row of `dim` numbers from address `source` to address `dest`, at any alignment.

    `code` is StorageDtype.code of the stored row; `out_code` is 0 for float32 and 1 for float16 at `dest`. A value beyond float16 becomes Inf, as in
    NumPy.
    """
    if code == out_code:
        copy_row(dest, source, dim * (4 >> code))
    elif code == _INT4_CODE:
        _decode_int4(out_code, source, dest, dim)
    elif out_code == _F32_CODE:
        if code == _F16_CODE:
            for k in range(dim):
                store_f32(dest, k, load_f16(source, k))
        elif code == _BF16_CODE:
            for k in range(dim):
                store_f32(dest, k, load_bf16(source, k))
        else:
            scale, offset = load_f32(source, 0), load_f32(source, 1)
            for k in range(dim):
                store_f32(dest, k, fma(scale, np.float32(load_u8(source + 8, k)), offset))
    elif code == _F32_CODE:
        for k in range(dim):
            store_f16(dest, k, load_f32(source, k))
    elif code == _BF16_CODE:
        for k in range(dim):
            store_f16(dest, k, load_bf16(source, k))
    else:
        scale, offset = load_f32(source, 0), load_f32(source, 1)
        for k in range(dim):
            store_f16(dest, k, fma(scale, np.float32(load_u8(source + 8, k)), offset))


_POSITIONS = types.Array(types.int64, 1, "C", readonly=True)


@compiled(
    types.int64(*[types.int64] * 5, _POSITIONS, _POSITIONS, types.int64, types.int64, types.int64),
    when=FIRST,
)
def _decode_scatter(
    code: Any,
    out_code: Any,
    rows: Any,
    n_rows: Any,
    row_bytes: Any,
    source: Any,
    dest: Any,
    out: Any,
    n_out: Any,
    dim: Any,
) -> Any:
    """Decode rows to places. Returns -1, or the first position whose source or dest is out of range (rows before it are done)."""
    out_bytes = dim * (4 >> out_code)
    n = len(source)
    for i in range(n):
        if i + _AHEAD < n:
            ahead = rows + source[i + _AHEAD] * row_bytes
            for line in range(0, min(row_bytes, 512), 64):
                prefetch(ahead + line)
        s, d = source[i], dest[i]
        if s < 0 or s >= n_rows or d < 0 or d >= n_out:
            return i
        decode_row(code, out_code, rows + s * row_bytes, out + d * out_bytes, dim)
    return -1


@compiled("void(int64, int64, int64, int64, int64, int64, int64)", when=FIRST)
def _decode_all(code: Any, out_code: Any, rows: Any, n: Any, row_bytes: Any, out: Any, dim: Any) -> Any:
    out_bytes = dim * (4 >> out_code)
    for i in range(n):
        decode_row(code, out_code, rows + i * row_bytes, out + i * out_bytes, dim)


@compiled("UniTuple(float32, 2)(int64, int64)", fastmath={"nnan", "nsz"}, inner=True)
def _range_of(source: Any, dim: Any) -> Any:
    low = high = load_f32(source, 0)
    for k in range(1, dim):
        x = load_f32(source, k)
        low, high = min(low, x), max(high, x)
    return low, high


@compiled("void(int64, int64, int64)", fastmath={"nnan", "nsz"}, inner=True)
def _encode_int8(source: Any, dest: Any, dim: Any) -> Any:
    """Encode one row of finite float32 as scale, offset and codes. Computed in float64: a range may overflow float32."""
    low, high = _range_of(source, dim)
    step = (np.float64(high) - np.float64(low)) / 255.0
    if step < 1.1754943508222875e-38:  # float32 below the normal range is a fixed grid: round up to its next point
        step = np.ceil(step * 2.0**149) * 2.0**-149
    scale = np.float32(step)
    if (
        np.float64(low) + 255.0 * np.float64(scale) >= 3.4028235677973366e38
    ):  # scale was rounded up, and the row would decode to Inf
        scale = np.float32(step * (1.0 - 2.0**-24))
    store_f32(dest, 0, scale)
    store_f32(dest, 1, low)
    inverse = 0.0 if scale == 0.0 else 1.0 / np.float64(scale)
    for k in range(dim):
        code = np.int32((np.float64(load_f32(source, k)) - np.float64(low)) * inverse + 0.5)
        store_u8(dest + 8, k, np.uint8(min(code, np.int32(255))))


@compiled("uint8(float32, float32, float32)", inner=True)
def _int4_code(x: Any, offset: Any, inverse: Any) -> Any:
    return np.uint8(np.rint(min(max((x - offset) * inverse, np.float32(0)), np.float32(15))))


@compiled("void(int64, int64, int64)", inner=True)
def _encode_int4(source: Any, dest: Any, dim: Any) -> Any:
    """Encode one row of float32 below 65520 as scale, offset and codes. Computed in float32, with each step rounded: no fastmath."""
    low, high = _range_of(source, dim)
    store_f16(dest, 1, low + np.float32(0))  # a minimum of -0 is stored as 0
    offset = load_f16(dest, 1)
    store_f16(dest, 0, (high - offset) / np.float32(15))
    if load_f16(dest, 0) == np.float32(0):
        store_f16(dest, 0, np.float32(1))
    inverse = np.float32(1) / load_f16(dest, 0)
    codes, pairs = dest + 4, dim >> 1
    for i in range(pairs):
        one, other = load_f32(source, 2 * i), load_f32(source, 2 * i + 1)
        store_u8(codes, i, np.uint8(_int4_code(one, offset, inverse) | _int4_code(other, offset, inverse) << 4))
    if dim & 1:
        store_u8(codes, pairs, _int4_code(load_f32(source, dim - 1), offset, inverse))


@compiled("boolean(boolean, int64, int64)", inner=True)
def _not_finite(half: Any, source: Any, size: Any) -> Any:
    """Whether `size` bytes of float16 (`half`) or float32 have a NaN or an infinity, which have an exponent of all ones."""
    exponent = np.uint64(0x7C00_7C00_7C00_7C00) if half else np.uint64(0x7F80_0000_7F80_0000)
    one = np.uint64(0x0400_0400_0400_0400) if half else np.uint64(0x0080_0000_0080_0000)
    carried = np.uint64(0)
    for k in range(size >> 3):
        carried |= (load_u64(source, k) & exponent) + one
    word = np.uint64(0)
    for k in range(size & ~7, size):
        word |= np.uint64(load_u8(source, k)) << np.uint64(8 * (k & 7))
    carried |= (word & exponent) + one
    return carried & (np.uint64(0x8000_8000_8000_8000) if half else np.uint64(0x8000_0000_8000_0000)) != 0


@compiled("boolean(boolean, int64, int64)")
def _any_not_finite(half: Any, source: Any, size: Any) -> Any:
    return _not_finite(half, source, size)


@compiled("UniTuple(int64, 3)(int64, int64, int64, int64, int64, int64, int64)")
def _encode(code: Any, in_code: Any, vectors: Any, n: Any, dim: Any, out: Any, row_bytes: Any) -> Any:
    """Encode vectors. Returns (row, column, reason) of the first number that `code` cannot hold, or (-1, -1, 0)."""
    limit = np.int32(
        _F16_LIMIT if code in (_F16_CODE, _INT4_CODE) else _BF16_LIMIT if code == _BF16_CODE else _INFINITE
    )
    width = 4 >> in_code
    wide = np.empty(dim, np.float32)
    for i in range(n):
        source, dest = vectors + i * dim * width, out + i * row_bytes
        if in_code == _F16_CODE and code == _F16_CODE and not _not_finite(True, source, dim * 2):
            copy_row(dest, source, dim * 2)
            continue
        if in_code == _F16_CODE:
            decode_row(in_code, _F32_CODE, source, wide.ctypes.data, dim)
            source = np.int64(wide.ctypes.data)
        worst = np.int32(0)
        for k in range(dim):
            worst = max(worst, magnitude(load_f32(source, k)))
        if worst >= limit:
            for k in range(dim):
                bits = magnitude(load_f32(source, k))
                if bits >= limit:
                    return i, k, 1 if bits > _INFINITE else 2 if bits == _INFINITE else 3
        if code == _F32_CODE:
            copy_row(dest, source, dim * 4)
        elif code == _F16_CODE:
            for k in range(dim):
                store_f16(dest, k, load_f32(source, k))
        elif code == _BF16_CODE:
            for k in range(dim):
                store_bf16(dest, k, load_f32(source, k))
        elif code == _INT4_CODE:
            _encode_int4(source, dest, dim)
        else:
            _encode_int8(source, dest, dim)
    return -1, -1, 0


# ---- arrays in, arrays out -----------------------------------------------------------------------------------


def out_code(out: npt.NDArray[np.floating]) -> int:
    """The number of an answer's dtype in kernels: 0 float32, 1 float16. TypeError for any other."""
    if out.dtype == np.float32:
        return 0
    if out.dtype == np.float16:
        return 1
    raise TypeError(f"vectors are float32 or float16, got {out.dtype}")


def address_of(array: npt.NDArray[Any]) -> int:
    """The address of an array's elements, for a kernel; the caller keeps the array alive."""
    address: int = (
        array.ctypes.data
    )  # `__array_interface__` lists all fields of a record, which takes ten times as long
    return address


def encode(vectors: Vectors, dtype: StorageDtype, out: Rows | None = None) -> Rows:
    """Encode `vectors`, float32 or float16 [n, dim], to rows of `dtype`, uint8[n, row_bytes].

    Fills and returns `out` if given. Raises BadRow for the first row with NaN, Inf or a number that rounds to Inf in `dtype`; then `out` has the rows
    before it.
    """
    code = out_code(vectors)
    if vectors.ndim != 2 or vectors.shape[1] == 0:
        raise ValueError(f"vectors are a matrix [n, dim] with dim at least 1, got shape {list(vectors.shape)}")
    n, dim = vectors.shape
    packed = np.ascontiguousarray(vectors)
    if out is None:
        out = np.empty((n, dtype.row_bytes(dim)), np.uint8)
    _check_rows(out, n, dim, dtype)
    _check_writable(out)
    row, column, reason = _encode(dtype.code, code, packed.ctypes.data, n, dim, out.ctypes.data, out.shape[1])
    if row >= 0:
        value = vectors[row, column]
        raise BadRow(row, column, f"{value} is {_REASONS[reason]}" + (f" for {dtype}" if reason == 3 else ""))
    return out


def all_finite(vectors: Vectors) -> bool:
    """Whether `vectors`, float32 or float16 and contiguous, have no NaN and no infinity."""
    return not _any_not_finite(out_code(vectors) == 1, address_of(vectors), vectors.nbytes)


def decode(rows: Rows, dtype: StorageDtype, out: Vectors) -> None:
    """Fill `out`, float32 or float16 [n, dim], from `rows`, uint8[n, row_bytes] of `dtype`."""
    n, dim = _check_vectors(out)
    _check_rows(rows, n, dim, dtype)
    _decode_all(dtype.code, out_code(out), rows.ctypes.data, n, rows.shape[1], out.ctypes.data, dim)


def decode_scatter(rows: Rows, source: Keys, dest: Keys, dtype: StorageDtype, out: Vectors) -> None:
    """`out[dest[i]] = decode(rows[source[i]])` for all i, in order.

    `rows` uint8[m, row_bytes] of `dtype`, `source` and `dest` int64[k], `out` float32 or float16 [n, dim].
    Raises IndexError for a position out of range (what came before it is written).
    """
    n, dim = _check_vectors(out)
    _check_rows(rows, len(rows), dim, dtype)
    if source.shape != dest.shape:
        raise ValueError(f"source and dest pair up: got {source.shape} and {dest.shape}")
    bad = _decode_scatter(
        dtype.code, out_code(out), rows.ctypes.data, len(rows), rows.shape[1], source, dest, out.ctypes.data, n, dim
    )
    if bad >= 0:
        raise IndexError(f"row {source[bad]} of {len(rows)} to row {dest[bad]} of {n}: out of range")


def _check_rows(rows: Rows, n: int, dim: int, dtype: StorageDtype) -> None:
    if rows.dtype != np.uint8 or rows.shape != (n, dtype.row_bytes(dim)) or not rows.flags.c_contiguous:
        expected = f"contiguous uint8[{n}, {dtype.row_bytes(dim)}]"
        raise ValueError(f"rows of {dtype} with dim {dim} are {expected}, got {rows.dtype}{list(rows.shape)}")


def _check_vectors(out: Vectors) -> tuple[int, int]:
    if out.ndim != 2 or not out.flags.c_contiguous:
        raise ValueError(f"out is a contiguous matrix [n, dim], got shape {list(out.shape)}")
    _check_writable(out)
    n, dim = out.shape
    return n, dim


def _check_writable(out: npt.NDArray) -> None:
    if not out.flags.writeable:
        raise ValueError("out is read-only")
