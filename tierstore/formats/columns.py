"""The `key` and `vector` columns of Arrow data, checked, as NumPy arrays. Shared by snapshots and deltas.

Pure functions over immutable Arrow data; any thread may call them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tierstore.errors import InvalidInput
from tierstore.formats.colliding import hash_arrow
from tierstore.formats.keys import as_codes
from tierstore.formats.strings import as_arrow_strings
from tierstore.types import Keys, KeyType, Vectors

KEY = "key"
VECTOR = "vector"
MAX_DIM = 1 << 16  # numbers of a vector


class Malformed(ValueError):
    """What is wrong with data, and in which row; the reader adds the file or table.

    Attributes: `reason`, `row` (0-based, within the data that was checked) or None.
    """

    def __init__(self, reason: str, row: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.row = reason, row


def key_type_of(kind: pa.DataType) -> KeyType | None:
    """The key type of tables whose keys a column of type `kind` may hold, or None. Narrow integers widen."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_signed_integer(kind):
        return KeyType.INT64
    if pa.types.is_unsigned_integer(kind):
        return KeyType.UINT64
    binary_or_string = (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
    )
    return KeyType.STRING if binary_or_string else None


def check_key_kind(kind: pa.DataType, key_type: KeyType, name: str = KEY) -> None:
    """Raise Malformed unless a column of type `kind` holds keys of `key_type`."""
    if key_type_of(kind) is not key_type:
        raise Malformed(f"column {name!r}: expected {key_type}, as the table's keys are, got {kind}")


def key_column(array: pa.Array, key_type: KeyType) -> tuple[Keys, pa.Array | None]:
    """(codes int64[n], the strings themselves as `large_string` where keys are strings). Raises Malformed."""
    check_key_kind(array.type, key_type)
    if array.null_count:
        raise Malformed("key is null: every row needs a key", _first(array.is_null()))
    try:
        if key_type is not KeyType.STRING:
            return as_codes(array, key_type), None
        strings = as_arrow_strings(array)
        return hash_arrow(strings), strings
    except InvalidInput as error:
        raise Malformed(str(error), _first_invalid_utf8(array) if key_type is KeyType.STRING else None) from error


def value_kind(kind: pa.DataType) -> pa.DataType | None:
    """The element type of a list column that may hold vectors, or None."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_list and pa.types.is_floating(kind.value_type) else None


def check_vector_kind(kind: pa.DataType, dim: int | None, name: str = VECTOR) -> None:
    """Raise Malformed unless a column of type `kind` may hold vectors of `dim` numbers."""
    if value_kind(kind) is None:
        raise Malformed(f"column {name!r}: expected a list or fixed-size list of floats, got {kind}")
    if dim is not None and pa.types.is_fixed_size_list(kind) and kind.list_size != dim:
        raise Malformed(f"column {name!r}: expected vectors of {dim} numbers, as dim says, got {kind.list_size}")


def vector_column(array: pa.Array, dim: int) -> Vectors:
    """float32 or float16 [k, dim], C-contiguous: the vectors of the k rows that are not null, in order.

    float64 is narrowed to float32 (too large becomes infinite, for the caller to refuse). Raises
    Malformed naming the row of a vector that has another length or holds a null.
    """
    check_vector_kind(array.type, dim)
    if not pa.types.is_fixed_size_list(array.type):  # the type says it of those
        lengths = pc.list_value_length(array)
        wrong = pc.fill_null(pc.not_equal(lengths, pa.scalar(dim, lengths.type)), False)
        if pc.any(wrong).as_py():
            row = _first(wrong)
            raise Malformed(f"expected a vector of {dim} numbers, got {lengths[row].as_py()}", row)
    values = array.flatten()  # without the items of null rows
    if values.null_count:
        position = _first(values.is_null())
        rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
        raise Malformed(f"number {position % dim} of the vector is null", int(rows[position // dim]))
    return as_vectors(values.to_numpy(zero_copy_only=False)).reshape(-1, dim)


def as_vectors(numbers: npt.NDArray[Any]) -> Vectors:
    """float32 or float16 in native order and C-contiguous; other floats are narrowed to float32."""
    if numbers.dtype == np.float16 or numbers.dtype == np.float32:
        return np.ascontiguousarray(numbers)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(numbers, dtype=np.float32)


def first_not_finite(vectors: Vectors) -> int | None:
    """The first row of [n, dim] that holds a NaN or an infinity, or None."""
    finite = np.isfinite(vectors)
    return None if finite.all() else int(np.argmin(finite.all(axis=1)))


def _first(mask: pa.Array) -> int:
    return int(np.argmax(mask.to_numpy(zero_copy_only=False)))


def _first_invalid_utf8(array: pa.Array) -> int | None:
    """Halve until one row remains; runs only before an error is raised."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            as_arrow_strings(array.slice(low, middle - low))
            low = middle
        except InvalidInput:
            high = middle
    return low
