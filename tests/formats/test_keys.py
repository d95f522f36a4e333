"""Keys as callers have them become codes, or are refused with a reason."""

from __future__ import annotations

import array

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import InvalidInput
from tierstore.formats.keys import as_codes, from_codes
from tierstore.formats.strings import as_arrow_strings
from tierstore.types import KeyType

INT64, UINT64, STRING = KeyType.INT64, KeyType.UINT64, KeyType.STRING
EDGES = [-(1 << 63), -1, 0, 1, (1 << 63) - 1]


def digest(text: str | bytes) -> int:
    value = xxhash.xxh3_64_intdigest(text.encode() if isinstance(text, str) else text)
    return value - (1 << 64) if value >> 63 else value


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_int64_keys_are_their_own_codes(keys: list[int]) -> None:
    for given_as in (keys, tuple(keys), np.array(keys, np.int64), pa.array(keys, pa.int64())):
        codes = as_codes(given_as, INT64)
        assert codes.dtype == np.int64
        assert codes.flags.c_contiguous
        assert codes.tolist() == keys
    assert from_codes(np.array(keys, np.int64), INT64).tolist() == keys


@given(st.lists(st.integers(0, (1 << 64) - 1)))
def test_uint64_keys_keep_their_bit_pattern(keys: list[int]) -> None:
    for given_as in (keys, np.array(keys, np.uint64), pa.array(keys, pa.uint64())):
        codes = as_codes(given_as, UINT64)
        assert codes.tolist() == [k - (1 << 64) if k >> 63 else k for k in keys]
        assert from_codes(codes, UINT64).tolist() == keys


@given(st.lists(st.text()))
def test_strings_are_hashed_by_xxh3_of_their_utf8(keys: list[str]) -> None:
    expected = [digest(key.encode()) for key in keys]
    raw = [key.encode() for key in keys]
    chunked = pa.chunked_array([pa.array(keys[:2], pa.string()), pa.array(keys[2:], pa.string())])
    for given_as in (
        keys,
        raw,
        np.array(raw, dtype=object),
        np.array(keys, dtype=np.dtypes.StringDType()),
        pa.array(keys, pa.string()),
        pa.array(keys, pa.large_string()),
        pa.array(keys, pa.string_view()),
        pa.array(raw, pa.binary()),
        pa.array(keys, pa.string()).dictionary_encode(),
        pa.array(["before", *keys, "after"], pa.string()).slice(1, len(keys)),
        pa.array(["before", *keys, "after"], pa.large_string()).slice(1, len(keys)),
        chunked,
    ):
        assert as_codes(given_as, STRING).tolist() == expected


def test_mixed_str_and_bytes_are_one_key() -> None:
    first, second = as_codes(["käse", "käse".encode()], STRING)
    assert first == second


def test_numpy_unicode_and_bytes_arrays_are_taken_whole() -> None:
    assert as_codes(np.array(["a", "bcd"]), STRING).tolist() == [digest("a"), digest("bcd")]
    assert as_codes(np.array([b"a", b"bcd"]), STRING).tolist() == [digest("a"), digest("bcd")]


def test_an_int64_array_is_not_copied() -> None:
    keys = np.array(EDGES)
    assert np.shares_memory(as_codes(keys, INT64), keys)
    assert np.shares_memory(as_codes(pa.array(keys), INT64), pa.array(keys).to_numpy()) or len(keys)
    arrow = pa.array(keys)
    assert as_codes(arrow, INT64).ctypes.data == arrow.buffers()[1].address


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64, ">i8", ">u4"]
)
@pytest.mark.parametrize("key_type", [INT64, UINT64])
def test_any_integer_width_that_fits_is_taken(dtype: str, key_type: KeyType) -> None:
    assert as_codes(np.array([0, 5, 127], dtype), key_type).tolist() == [0, 5, 127]
    assert as_codes(list(np.array([0, 5, 127], dtype)), key_type).tolist() == [0, 5, 127]


def test_strided_ranges_and_buffers_are_taken() -> None:
    assert as_codes(np.arange(10)[::3], INT64).tolist() == [0, 3, 6, 9]
    assert as_codes(range(3), INT64).tolist() == [0, 1, 2]
    assert as_codes(array.array("q", [7, -7]), INT64).tolist() == [7, -7]
    assert as_codes(memoryview(array.array("q", [7, -7])), INT64).tolist() == [7, -7]
    assert as_codes(np.array([1, 2], dtype=object), INT64).tolist() == [1, 2]
    assert as_codes(pa.chunked_array([[1], [2, 3]]), INT64).tolist() == [1, 2, 3]
    assert as_codes(pa.array([1, 1, 2]).dictionary_encode(), INT64).tolist() == [1, 1, 2]


@pytest.mark.parametrize("empty", [[], (), np.array([]), np.empty(0, "U1"), pa.array([]), pa.array([], pa.string())])
@pytest.mark.parametrize("key_type", list(KeyType))
def test_no_keys_are_no_codes(empty: object, key_type: KeyType) -> None:
    codes = as_codes(empty, key_type)
    assert codes.shape == (0,)
    assert codes.dtype == np.int64


@pytest.mark.parametrize(
    ("keys", "key_type", "reason"),
    [
        ([1.0], INT64, "got float"),
        ([True], INT64, "got bool"),
        ([1, True], UINT64, "got bool"),
        ([None], INT64, "got NoneType"),
        (["1"], INT64, "got str"),
        (np.array([1.0]), INT64, "got float64"),
        (np.array([True]), INT64, "got bool"),
        (np.array(["1"]), INT64, "got <U1"),
        (np.array([1, 2.5], object), INT64, "got float"),
        ([[1, 2], [3, 4]], INT64, "one dimension, got a list among them"),
        (np.zeros((2, 2), np.int64), INT64, r"one dimension, got shape \(2, 2\)"),
        (np.int64(3), INT64, "got a single int64"),
        (3, INT64, "got a single int"),
        (iter([1]), INT64, "got list_iterator"),
        ({1}, INT64, "got a set, which has no order"),
        ("abc", STRING, "got a single str"),
        ([-1], UINT64, "got keys from -1 to -1"),
        ([np.int64(-1)], UINT64, "got keys from -1"),
        (np.array([-1]), UINT64, "0 to 2\\^64 - 1; got keys from -1"),
        ([1 << 64], UINT64, "got keys from 18446744073709551616"),
        ([1 << 63], INT64, "-2\\^63 to 2\\^63 - 1; got keys from 9223372036854775808"),
        (np.array([1 << 63], np.uint64), INT64, "got keys from 9223372036854775808"),
        ([-(1 << 63) - 1], INT64, "got keys from -9223372036854775809"),
        (pa.array([1.0]), INT64, "got Arrow double"),
        (pa.array([True]), INT64, "got Arrow bool"),
        (pa.array([1, None]), INT64, "key 1 is null"),
        (pa.array(["a", None]), STRING, "key 1 is null"),
        (pa.array([1]), STRING, "got int64: this table's keys are strings"),
        ([1], STRING, "expected string keys"),
        (["a", None], STRING, "expected string keys, got NoneType, str"),
        (np.array([1]), STRING, "expected string keys, got int64"),
        (np.array([1.0]), STRING, "expected string keys, got float64"),
        ([b"\xff"], STRING, "must be UTF-8"),
        (pa.array([b"\xff"]), STRING, "must be UTF-8"),
        (["\ud800"], STRING, "surrogates"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: object, key_type: KeyType, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        as_codes(keys, key_type)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_a_long_string_named_many_times_is_not_spelled_out(kind: pa.DataType) -> None:
    """4 MiB here, 4 TiB there: a few bytes from the network must not take all of the memory."""
    bomb = pa.DictionaryArray.from_arrays(np.zeros(1 << 20, np.int32), pa.array(["x" * (4 << 20)], kind))
    with pytest.raises(InvalidInput, match="string keys of 4398046511104 bytes together: expected at most"):
        as_codes(bomb, STRING)
    text = pa.py_buffer(b"x" * (4 << 20))
    view = np.zeros((1 << 20, 4), np.int32)
    view[:, 0], view[:, 1] = 4 << 20, int.from_bytes(b"xxxx", "little")
    views = pa.Array.from_buffers(pa.string_view(), len(view), [None, pa.py_buffer(view), text])
    with pytest.raises(InvalidInput, match="string keys of 4398046511104 bytes together"):
        as_codes(views, STRING)


def test_arrow_strings_are_kept_for_messages() -> None:
    strings = as_arrow_strings(pa.array(["x", "y"]).dictionary_encode())
    assert strings.type == pa.large_string()
    assert strings.to_pylist() == ["x", "y"]
