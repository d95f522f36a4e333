"""Rows keep what their storage dtype promises: against ml_dtypes, NumPy and exact arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests import int4_rows
from tierstore.kernels import codec
from tierstore.types import Rows, StorageDtype

FLOATS = {
    StorageDtype.FLOAT32: np.dtype(np.float32),
    StorageDtype.FLOAT16: np.dtype(np.float16),
    StorageDtype.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
LIMITS = {
    StorageDtype.FLOAT32: None,
    StorageDtype.FLOAT16: 65519.0,
    StorageDtype.BFLOAT16: 3.38e38,
    StorageDtype.INT8: None,
    StorageDtype.INT4: 65519.0,
}
DTYPES = pytest.mark.parametrize("dtype", list(StorageDtype))
OUTPUTS = pytest.mark.parametrize("out_dtype", [np.float32, np.float16])
dims = st.integers(1, 70)


@st.composite
def matrices(draw: st.DrawFn, dtype: StorageDtype, width: int = 32) -> npt.NDArray[np.floating]:
    bound = LIMITS[dtype] if width == 32 else None
    if bound is not None:
        bound = float(np.nextafter(np.float32(bound), np.float32(0)))
    elements = st.floats(
        min_value=None if bound is None else -bound, max_value=bound, allow_nan=False, allow_infinity=False, width=width
    )
    shape = (draw(st.integers(0, 6)), draw(dims))
    return draw(hnp.arrays(np.dtype(f"f{width // 8}"), shape, elements=elements))


def decode_twin(rows: Rows, dtype: StorageDtype, dim: int) -> npt.NDArray[np.float32]:
    """What rows hold, as float32."""
    if dtype is StorageDtype.INT4:
        return int4_rows.decode(rows, dim)
    if dtype is not StorageDtype.INT8:
        return np.ascontiguousarray(rows).view(FLOATS[dtype]).astype(np.float32)
    scale, offset = (np.ascontiguousarray(rows[:, a : a + 4]).view(np.float32).astype(np.float64) for a in (0, 4))
    # scale * code is exact in float64; the sum is rounded to odd, so that rounding it again is rounding once
    product = scale * rows[:, 8:]
    total = product + offset
    back = total - product
    lost = (product - (total - back)) + (offset - back)
    even = total.view(np.int64) & 1 == 0
    total = np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return total.astype(np.float32)


def same(a: npt.NDArray, b: npt.NDArray) -> bool:
    """Equal, with zeros told apart by sign."""
    return np.array_equal(a, b) and np.array_equal(np.signbit(a), np.signbit(b))


@pytest.mark.parametrize("dtype", list(FLOATS))
@given(data=st.data())
def test_floats_are_rounded_to_nearest_even(dtype: StorageDtype, data: st.DataObject) -> None:
    vectors = data.draw(matrices(dtype))
    rows = codec.encode(vectors, dtype)
    assert rows.shape == (len(vectors), dtype.row_bytes(vectors.shape[1]))
    assert np.array_equal(rows, vectors.astype(FLOATS[dtype]).view(np.uint8))


@DTYPES
@given(data=st.data())
def test_float16_vectors_are_encoded_as_their_float32_values(dtype: StorageDtype, data: st.DataObject) -> None:
    vectors = data.draw(matrices(dtype, width=16))
    assert np.array_equal(codec.encode(vectors, dtype), codec.encode(vectors.astype(np.float32), dtype))


@DTYPES
@OUTPUTS
@given(data=st.data())
def test_decode_gives_the_stored_numbers(dtype: StorageDtype, out_dtype: type, data: st.DataObject) -> None:
    vectors = data.draw(matrices(dtype))
    rows = codec.encode(vectors, dtype)
    out = np.full(vectors.shape, 7, out_dtype)
    codec.decode(rows, dtype, out)
    with np.errstate(over="ignore"):
        expected = decode_twin(rows, dtype, vectors.shape[1]).astype(out_dtype)
    assert same(out, expected)


@given(matrices(StorageDtype.INT8))
def test_int8_is_off_by_half_a_step_at_most(vectors: npt.NDArray[np.float32]) -> None:
    rows = codec.encode(vectors, StorageDtype.INT8)
    out = np.empty_like(vectors)
    codec.decode(rows, StorageDtype.INT8, out)
    assert np.isfinite(out).all()
    wide = vectors.astype(np.float64)
    step = (wide.max(axis=1, keepdims=True) - wide.min(axis=1, keepdims=True)) / 255 if wide.size else wide
    rounding = (
        np.spacing(np.abs(vectors).max(axis=1, keepdims=True) * np.float32(0.99)).astype(np.float64)
        if wide.size
        else 0.0
    )
    assert (np.abs(out - wide) <= step * 0.5001 + 2 * rounding).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -3.4028235e38, 3.4028235e38, 1e-45, -1e-40, 0.1])
def test_int8_keeps_constant_rows_exactly(value: float) -> None:
    vectors = np.full((3, 5), value, np.float32)
    out = np.empty_like(vectors)
    codec.decode(codec.encode(vectors, StorageDtype.INT8), StorageDtype.INT8, out)
    assert np.array_equal(out, vectors)


def test_int8_spans_the_whole_of_float32() -> None:
    largest = float(np.finfo(np.float32).max)
    for low, high in [(-largest, largest), (-3e38, 3e38), (0, largest), (-largest, 0), (0, 1.4e-45), (-1e-44, 1e-38)]:
        vectors = np.linspace(low, high, 256).astype(np.float32)[None]
        out = np.empty_like(vectors)
        codec.decode(codec.encode(vectors, StorageDtype.INT8), StorageDtype.INT8, out)
        step = (float(high) - float(low)) / 255
        assert np.isfinite(out).all()
        assert (np.abs(out.astype(np.float64) - vectors) <= step * 0.51 + 1.5e-45).all(), (low, high)


@given(matrices(StorageDtype.INT4))
def test_int4_rows_are_rounded_as_documented(vectors: npt.NDArray[np.float32]) -> None:
    rows = codec.encode(vectors, StorageDtype.INT4)
    assert rows.shape == (len(vectors), 4 + (vectors.shape[1] + 1) // 2)
    assert np.array_equal(rows, int4_rows.encode(vectors))


@pytest.mark.parametrize("dim", [1, 2, 3, 15, 16, 17, 64])
@pytest.mark.parametrize("scale", [1e-40, 1e-8, 1e-6, 1e-3, 1.0, 3e3])
@pytest.mark.parametrize("offset", [0.0, -1e-6, 0.1, 1000.0, -5e4])
def test_int4_is_off_by_half_a_step_and_a_float16s_rounding_at_most(dim: int, scale: float, offset: float) -> None:
    rng = np.random.default_rng(dim)
    vectors = (rng.standard_normal((300, dim)) * scale + offset).clip(-65519, 65519).astype(np.float32)
    vectors[rng.random(vectors.shape) < 0.1] *= 0  # of both signs
    rows = codec.encode(vectors, StorageDtype.INT4)
    assert np.array_equal(rows, int4_rows.encode(vectors))
    out = np.empty_like(vectors)
    codec.decode(rows, StorageDtype.INT4, out)
    wide = vectors.astype(np.float64)
    smallest = wide.min(axis=1, keepdims=True)
    step = (wide.max(axis=1, keepdims=True) - smallest) / 15
    assert (np.abs(out - wide) <= 0.51 * step + 2**-10.9 * np.abs(smallest) + 2**-21).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -65504.0, 65504.0, 2.0**-24])
def test_int4_keeps_rows_of_one_float16_exactly(value: float) -> None:
    vectors = np.full((3, 5), value, np.float32)
    out = np.empty_like(vectors)
    codec.decode(codec.encode(vectors, StorageDtype.INT4), StorageDtype.INT4, out)
    assert same(out, vectors + np.float32(0))


def test_every_float16_is_read_and_written_back() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[None]
    as_float32 = np.empty(halves.shape, np.float32)
    codec.decode(halves.view(np.uint8), StorageDtype.FLOAT16, as_float32)
    assert np.array_equal(as_float32.view(np.uint32), halves.astype(np.float32).view(np.uint32))
    back = np.empty_like(halves)
    codec.decode(as_float32.view(np.uint8), StorageDtype.FLOAT32, back)
    numbers = ~np.isnan(halves)
    assert np.array_equal(back.view(np.uint16)[numbers], halves.view(np.uint16)[numbers])
    assert np.isnan(back[~numbers]).all()


def test_float16_ties_go_to_even_through_the_subnormals() -> None:
    halves = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves + np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)) / 2
    for near in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))):
        vectors = np.stack([near, -near])
        rows = codec.encode(vectors, StorageDtype.FLOAT16)
        assert np.array_equal(rows, vectors.astype(np.float16).view(np.uint8))


def test_every_bfloat16_is_read_back() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    values = values[np.isfinite(values.astype(np.float32))][None]
    out = np.empty(values.shape, np.float32)
    codec.decode(np.ascontiguousarray(values).view(np.uint8), StorageDtype.BFLOAT16, out)
    assert same(out, values.astype(np.float32))
    assert np.array_equal(codec.encode(out, StorageDtype.BFLOAT16), values.view(np.uint8))


@DTYPES
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("in_dtype", [np.float32, np.float16])
def test_nan_and_inf_are_refused_by_place(dtype: StorageDtype, bad: float, in_dtype: type) -> None:
    vectors = np.ones((40, 37), in_dtype)
    vectors[17, 36] = vectors[17, 30] = vectors[18, 0] = bad
    with pytest.raises(codec.BadRow) as refused:
        codec.encode(vectors, dtype)
    assert (refused.value.row, refused.value.column) == (17, 30)
    assert ("NaN" if np.isnan(bad) else "infinite") in refused.value.reason


@pytest.mark.parametrize(
    ("dtype", "fits", "overflows"),
    [
        (StorageDtype.FLOAT16, np.nextafter(np.float32(65520), np.float32(0)), np.float32(65520)),
        (
            StorageDtype.BFLOAT16,
            np.uint32(0x7F7F7FFF).view(np.float32),
            np.uint32(0x7F7F8000).view(np.float32),
        ),
        (StorageDtype.INT4, np.nextafter(np.float32(65520), np.float32(0)), np.float32(65520)),
    ],
)
def test_a_number_that_rounds_to_inf_is_refused(dtype: StorageDtype, fits: np.float32, overflows: np.float32) -> None:
    with np.errstate(over="ignore"):
        kind = FLOATS.get(dtype, np.dtype(np.float16))
        assert np.isfinite(fits.astype(kind))
        assert np.isinf(overflows.astype(kind))
    for sign in (1, -1):
        assert len(codec.encode(np.array([[0, sign * fits]], np.float32), dtype)) == 1
        with pytest.raises(codec.BadRow, match=f"too large for {dtype}") as refused:
            codec.encode(np.array([[0, sign * overflows]], np.float32), dtype)
        assert (refused.value.row, refused.value.column) == (0, 1)


@DTYPES
@OUTPUTS
@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 31, 32, 64, 65, 129])
def test_scatter_moves_each_row_to_its_place(dtype: StorageDtype, out_dtype: type, dim: int) -> None:
    rng = np.random.default_rng(dim)
    rows = codec.encode(rng.standard_normal((50, dim)).astype(np.float32), dtype)
    source = rng.integers(0, 50, 33)
    dest = rng.permutation(80)[:33]
    # an odd address: rows of a mapping need not be aligned
    shifted = np.empty(rows.nbytes + 1, np.uint8)[1:].reshape(rows.shape)
    shifted[:] = rows
    shifted.flags.writeable = False
    out = np.full((80, dim), 9, out_dtype)
    codec.decode_scatter(shifted, source, dest, dtype, out)
    expected = np.full((80, dim), 9, out_dtype)
    expected[dest] = decode_twin(rows, dtype, dim)[source]
    assert same(out, expected)


@pytest.mark.parametrize(("source", "dest"), [(4, 0), (-1, 0), (0, 3), (0, -1)])
def test_a_position_out_of_range_is_refused(source: int, dest: int) -> None:
    rows, out = np.zeros((4, 8), np.uint8), np.zeros((3, 2), np.float32)
    with pytest.raises(IndexError):
        codec.decode_scatter(rows, np.array([0, source]), np.array([0, dest]), StorageDtype.FLOAT32, out)


def test_arrays_of_the_wrong_form_are_refused() -> None:
    vectors = np.zeros((4, 6), np.float32)
    rows = codec.encode(vectors, StorageDtype.FLOAT32)
    read_only = np.zeros((4, 6), np.float32)
    read_only.flags.writeable = False
    for broken_rows, out in [(rows[:, :-1], vectors), (rows[:3], vectors), (rows, vectors[:, :-1]), (rows, read_only)]:
        with pytest.raises(ValueError):
            codec.decode(broken_rows, StorageDtype.FLOAT32, out)
    with pytest.raises(ValueError):
        codec.encode(vectors, StorageDtype.FLOAT16, np.empty((4, 11), np.uint8))
    with pytest.raises(TypeError):
        codec.encode(vectors.astype(np.float64), StorageDtype.FLOAT16)


def test_encode_fills_the_buffer_it_is_given() -> None:
    vectors = np.arange(12, dtype=np.float32).reshape(4, 3)
    out = np.zeros((4, 6), np.uint8)
    assert codec.encode(vectors, StorageDtype.FLOAT16, out) is out
    assert np.array_equal(out.view(np.float16), vectors)
    strided = np.repeat(vectors, 2, axis=1)[:, ::2]
    assert np.array_equal(codec.encode(strided, StorageDtype.FLOAT16), out)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(dtype: type[np.floating], bad: float) -> None:
    for dim in range(1, 12):
        for rows in (1, 3):
            vectors = np.full((rows, dim), np.finfo(dtype).max, dtype)
            vectors[0, 0] = np.finfo(dtype).smallest_subnormal
            assert codec.all_finite(vectors)
            for at in range(vectors.size):
                spoiled = vectors.copy()
                spoiled.flat[at] = bad
                assert not codec.all_finite(spoiled)
                with pytest.raises(codec.BadRow) as raised:
                    codec.encode(spoiled, StorageDtype.FLOAT16)
                assert raised.value.row <= at // dim
    assert codec.all_finite(np.zeros((0, 4), dtype))
