"""Vectors as callers pass them (frames, Arrow, PyTorch, plain Python), normalised to one array;
and the key type of such keys.

Pure functions; any thread may call them, with arrays that nobody writes meanwhile. A result may
share memory with the argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tierstore.errors import InvalidInput
from tierstore.formats.columns import key_type_of
from tierstore.types import KeyType


class UnfitRow(InvalidInput):
    """A row that does not fit. Attributes: `row` (0-based, in what was passed), `reason`, which does not name it."""

    def __init__(self, row: int, reason: str, message: str | None = None) -> None:
        super().__init__(message or f"row {row}: {reason}")
        self.row, self.reason = row, reason


_INT64_MAX = (1 << 63) - 1
_EXPECTED = "expected vectors of shape [n, dim], or a column of n lists of dim numbers"


def vector_rows(vectors: Any, *, integers: bool = False) -> npt.NDArray[Any]:
    """Vectors as float16, float32 or float64 of shape [n, dim].

    Takes NumPy arrays (`bfloat16` and floats of 8 bits of `ml_dtypes`, and object arrays of arrays included), sequences
    of sequences, Arrow list and fixed-size list columns, pandas columns of arrays or lists, frames of one column a
    dimension, and tensors of PyTorch, on any device, with or without gradients. Integers are refused unless `integers`,
    by the type of what holds them: Python's own lists have none, and `[[1, 0]]` is two numbers as somebody types them.
    Raises InvalidInput, naming the row where one is wrong. `dim` is 0 where there are no rows.
    """
    rows = _rows(vectors)
    if rows.dtype.kind in "iu":
        if not (integers or _is_typed_by_hand(vectors)):
            raise InvalidInput(
                f"{refused_integers(rows.dtype)}. If these are the numbers themselves, give them as floats: "
                ".astype('float32')"
            )
        return rows.astype(np.float32)
    return rows


def refused_integers(kind: object) -> str:
    """Why integers of a type are not taken for the numbers of vectors, the same in every way in."""
    return (
        f"expected rows of floats, got {kind}; save the numbers that they stand for: integers are most often the codes "
        "of a quantized table, whose numbers follow from scales that are elsewhere"
    )


def refused_blocks(kind: str) -> str | None:
    """Why floats of a type are not taken for the numbers of vectors, the same in every way in; None if they are."""
    if not kind.startswith(("float4_", "float6_", "float8_e8m0")):
        return None
    return (
        f"expected rows of floats, got {kind}: parts of a block format, whose numbers follow from a scale for each "
        "block; save the numbers that they stand for, as float32"
    )


def _is_narrow(kind: str) -> bool:
    """Whether these are floats that NumPy does not have. InvalidInput for those that are no numbers by themselves."""
    if (why := refused_blocks(kind)) is not None:
        raise InvalidInput(why)
    return kind.startswith(("bfloat16", "float8"))


def _is_typed_by_hand(vectors: Any) -> bool:
    """Whether these are Python's own lists of lists of its own numbers, which have no type that could tell codes."""
    if not isinstance(vectors, (list, tuple)) or not isinstance(vectors[0], (list, tuple)):
        return False
    return all(type(number) is int for number in vectors[0])


def _rows(vectors: Any) -> npt.NDArray[Any]:
    if isinstance(vectors, (pa.Array, pa.ChunkedArray)):
        return list_rows(vectors)
    if hasattr(vectors, "detach"):
        return _from_torch(vectors)
    if not isinstance(vectors, np.ndarray):
        vectors = _as_array(vectors.to_numpy() if hasattr(vectors, "to_numpy") else vectors)
    if _is_narrow(vectors.dtype.name):
        vectors = vectors.astype(np.float32)
    if vectors.dtype == object:
        vectors = _stacked(vectors)
    if vectors.shape == (0,):
        return np.empty((0, 0), np.float32)
    if vectors.dtype.kind not in "fiu" or vectors.ndim != 2:
        raise InvalidInput(f"{_EXPECTED}; got {list(vectors.shape)} of {vectors.dtype}")
    return np.asarray(vectors)


def guessed_key_type(keys: Any) -> KeyType:
    """The key type of a table for these keys, where it is not given.

    A list of int counts as int64, unless it has one beyond that.
    """
    if isinstance(keys, (pa.Array, pa.ChunkedArray)):
        return key_type_of(keys.type) or KeyType.INT64
    if not isinstance(keys, np.ndarray) and hasattr(keys, "__array__"):
        keys = np.asarray(keys)  # a column of a frame, a tensor
    if isinstance(keys, np.ndarray) and keys.dtype.kind != "O":
        return (
            KeyType.STRING if keys.dtype.kind in "UST" else KeyType.UINT64 if keys.dtype == np.uint64 else KeyType.INT64
        )
    first = next(iter(keys), None) if isinstance(keys, Iterable) else None
    if isinstance(first, (str, bytes)):
        return KeyType.STRING
    beyond = isinstance(keys, Sequence) and any(type(key) is int and key > _INT64_MAX for key in keys)
    return KeyType.UINT64 if beyond else KeyType.INT64


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this Arrow type holds vectors."""
    if isinstance(kind, pa.FixedShapeTensorType) and len(kind.shape) != 1:  # a matrix a row is no vector
        return False
    kind = _storage(kind)
    t = pa.types
    lists = t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)
    views = t.is_list_view(kind) or t.is_large_list_view(kind)
    return bool((lists or views) and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)))


def number_kind(kind: pa.DataType) -> pa.DataType:
    """The type of the numbers of a column that `is_list`."""
    return _storage(kind).value_type


def list_rows(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """[n, dim] of an Arrow column of lists, or of fixed-shape tensors. UnfitRow for one that does not fit."""
    if not is_list(column.type):
        raise InvalidInput(f"{_EXPECTED}; got an Arrow column of {column.type}")
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if column.null_count:
        row = _first(column.is_null())
        raise UnfitRow(row, "the vector is null", f"vector {row} is null")
    if not len(column):
        return np.empty((0, 0), np.float32)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    other = np.flatnonzero(lengths != lengths[0])
    if len(other):
        row = int(other[0])
        what = f"has {lengths[row]} numbers, those before it {lengths[0]}"
        raise UnfitRow(row, f"the vector {what}", f"vector {row} {what}")
    values = column.flatten()
    if values.null_count:
        row, number = divmod(_first(values.is_null()), int(lengths[0]))
        raise UnfitRow(row, f"number {number} of the vector is null", f"number {number} of vector {row} is null")
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(len(column), -1)


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _from_torch(tensor: Any) -> npt.NDArray[Any]:
    tensor = tensor.detach()
    if tensor.is_sparse:
        raise InvalidInput(f"{_EXPECTED}; got a sparse tensor: give the rows that it holds, or .to_dense()")
    tensor = tensor.cpu()
    if _is_narrow(str(tensor.dtype).removeprefix("torch.")):
        tensor = tensor.float()
    return vector_rows(tensor.numpy())


def _as_array(vectors: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(vectors)
    except ValueError:  # rows of several lengths, which `_stacked` names
        return _stacked(vectors)


def _stacked(rows: Any) -> npt.NDArray[Any]:
    """One array from rows that are arrays or lists."""
    try:
        column = pa.array(rows)
    except (pa.ArrowException, TypeError) as error:
        raise InvalidInput(f"{_EXPECTED}; {error}") from error
    return list_rows(column)


def _first(mask: pa.Array) -> int:
    return int(np.argmax(mask.to_numpy(zero_copy_only=False)))
