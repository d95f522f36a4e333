"""Strings as callers have them, as one Arrow array that can be trusted. Pure functions; any thread.

No kernels here: a client that sends strings needs Arrow alone. Arrays must not be written meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tierstore.arguments import check_sequence
from tierstore.errors import InvalidInput
from tierstore.types import KeyType

_MAX_TEXT_BYTES = 1 << 30
STRING_KINDS = (
    pa.types.is_large_string,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_binary,
    pa.types.is_string_view,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def as_arrow_strings(keys: Any) -> pa.Array:
    """String keys as a validated `large_string` array without nulls. Raises InvalidInput, see `as_codes`."""
    check_sequence(keys, KeyType.STRING)
    if isinstance(keys, (pa.Array, pa.ChunkedArray)):
        array = plain_array(keys)
    elif isinstance(keys, np.ndarray) and keys.dtype.kind not in "USTO":
        raise InvalidInput(f"expected string keys, got {keys.dtype}: this table's keys are strings")
    else:
        array = _sequence_of_strings(keys)
    return _checked(array)


def plain_array(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array, not dictionary-encoded, without nulls."""
    if isinstance(array, pa.ChunkedArray):
        if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
            array = array.cast(pa.large_binary())  # 32-bit offsets might not reach across all the chunks
        array = array.combine_chunks()
    if isinstance(array, pa.DictionaryArray):
        _check_text(_lengths(array.dictionary)[array.indices.fill_null(0).to_numpy(zero_copy_only=False)])
        array = without_dictionary(array)
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise InvalidInput(f"key {row} is null: every row needs a key")
    return array


def without_dictionary(array: pa.Array) -> pa.Array:
    """An array that is not dictionary-encoded: Arrow decodes no dictionary of views, as Polars' categories are."""
    if not isinstance(array, pa.DictionaryArray):
        return array
    if _is_view(array.dictionary.type):
        text = pa.types.is_string_view(array.dictionary.type)
        values = array.dictionary.cast(pa.large_string() if text else pa.large_binary())
        array = pa.DictionaryArray.from_arrays(array.indices, values)
    return array.dictionary_decode()


def validate(array: pa.Array) -> None:
    """Arrow's full check of data from outside, in time proportional to its size.

    Raises InvalidInput, pa.ArrowException.

    Call it before anything else is done with an array from outside.
    """
    array.validate()
    if isinstance(array, pa.DictionaryArray):
        validate(array.dictionary)
    if _is_view(array.type):
        _check_text(_lengths(array))  # the full check would read a string as often as it is referred to
    array.validate(full=True)


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _lengths(array: pa.Array) -> npt.NDArray[Any]:
    """Bytes of each string; zeros where the array holds something else, or nothing."""
    lengths: npt.NDArray[Any] = np.zeros(max(1, len(array)), np.int32)
    if _is_view(array.type) and len(array):
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)  # length, then where the text is
        lengths = np.maximum(views[array.offset : array.offset + len(array), 0], 0)
    elif len(array) and any(is_kind(array.type) for is_kind in STRING_KINDS):
        lengths = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False)
    return lengths


def _check_text(lengths: npt.NDArray[Any]) -> None:
    """Refuse strings that are too long in all: dictionaries and views can refer to one
    long string any number of times.
    """
    total = int(lengths.sum(dtype=np.int64))
    if total > _MAX_TEXT_BYTES:
        raise InvalidInput(f"string keys of {total} bytes together: expected at most {_MAX_TEXT_BYTES} at a time")


def _sequence_of_strings(keys: Any) -> pa.Array:
    if not isinstance(keys, Iterable) or not isinstance(keys, Sized):
        raise InvalidInput(f"expected a sequence of string keys, got {type(keys).__name__}")
    try:
        if isinstance(keys, np.ndarray) and keys.dtype.kind in "UT":
            return pa.array(keys, pa.large_string())
        # as binary first: that accepts a mix of str and bytes, and the cast after it checks UTF-8
        return pa.array(keys if isinstance(keys, np.ndarray) else list(keys), pa.large_binary())
    except (pa.ArrowException, UnicodeError, TypeError) as error:
        raise InvalidInput(f"expected string keys (str or UTF-8 bytes): {error}") from error


def _checked(array: pa.Array) -> pa.Array:
    kind = array.type
    if array.null_count:
        raise InvalidInput("a key is null: every row needs a key")
    if len(array) and not any(is_kind(kind) for is_kind in STRING_KINDS):
        raise InvalidInput(f"expected string keys, got Arrow {kind}")
    try:
        validate(array)  # offsets too: what is hashed in place must lie within its buffer
        return array if pa.types.is_large_string(kind) else array.cast(pa.large_string())
    except pa.ArrowException as error:
        raise InvalidInput(f"string keys must be UTF-8: {error}") from error
