"""Keys as callers have them, and the int64 codes that the store works with.

A *code* is the key itself (int64), its bit pattern (uint64), or the bit pattern of the XXH3-64 with seed 0 of its UTF-8
bytes (string); but for the few strings of a table that collide (`colliding.py`). Pure functions; any thread may call
them, with arrays that nobody writes meanwhile. A result may share memory with the argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.errors import InvalidInput, WrongPartition
from tierstore.formats.colliding import CollidingKeys, hash_arrow
from tierstore.formats.key_arrays import key_array
from tierstore.formats.strings import as_arrow_strings
from tierstore.kernels import partitions
from tierstore.types import Keys, KeyType, Partitions

_INT64_MAX = (1 << 63) - 1
_INT64 = np.dtype(np.int64)
_DTYPE = {KeyType.INT64: np.dtype(np.int64), KeyType.UINT64: np.dtype(np.uint64)}


def as_codes(keys: Any, key_type: KeyType, colliding: CollidingKeys | None = None) -> Keys:
    """Codes of one-dimensional `keys`: int64[n], C-contiguous, possibly the argument's own memory.

    Integer tables take NumPy and Arrow integers of any width whose values fit, and sequences of int; string tables
    take sequences of str or (UTF-8) bytes, NumPy string, bytes and object arrays and Arrow string and binary arrays,
    dictionary-encoded or not. Arrow arrays are hashed where they lie. `colliding` are those of the table, if it has
    some. Raises InvalidInput for any other type (bool and float included), null, a value out of range, invalid
    UTF-8, or more than one dimension.
    """
    if type(keys) is np.ndarray and keys.dtype == _INT64 and keys.ndim == 1 and key_type is KeyType.INT64:
        return (
            keys if keys.flags.c_contiguous else np.ascontiguousarray(keys)
        )  # the usual case; the checks below would cost a look-up of few keys too much
    array = key_array(keys, key_type)
    if len(array) == 0:
        return np.empty(0, np.int64)
    if key_type is KeyType.STRING:
        return _string_codes(as_arrow_strings(array), colliding)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        held = getattr(array, "dtype", getattr(array, "type", "str"))
        raise InvalidInput(f"expected {key_type} keys, got {held}")
    return _int_codes(array, key_type)


def from_codes(codes: Keys, key_type: KeyType) -> npt.NDArray[np.int64] | npt.NDArray[np.uint64]:
    """Keys of `codes`, as a view: int64 or uint64.

    Strings cannot be got back from hashes, so string keys stay codes (int64).
    """
    return codes.view(np.uint64) if key_type is KeyType.UINT64 else codes


def partition_of(codes: Keys, count: int) -> npt.NDArray[np.int64]:
    """The partition, 0 to `count` - 1, of each of `codes` int64 [n]: int64 [n]. `schema/built.md` has the function.

    It is independent of the hash by which caches place keys, so the keys of a partition are spread like all keys.
    """
    of: npt.NDArray[np.int64] = partitions.partitions_of(np.ascontiguousarray(codes), count)
    return of


def are_own(codes: Keys, own: Partitions) -> npt.NDArray[np.bool_]:
    """Which of `codes` int64 [n] are in one of these partitions: bool [n]."""
    mask: npt.NDArray[np.bool_] = partitions.are_own(np.ascontiguousarray(codes), own.is_own)
    return mask


def check_own(codes: Keys, own: Partitions, table: str) -> None:
    """Raise WrongPartition where one of `codes` is in none of these partitions."""
    mine = are_own(codes, own)
    if mine.all():
        return
    other = codes[int(np.argmin(mine)) :][:1]
    raise WrongPartition(
        f"table {table!r}: {len(mine) - np.count_nonzero(mine)} keys are not on this node, such as the one of code "
        f"{other[0]}, in partition {partition_of(other, own.count)[0]} of {own.count}: it has partitions "
        f"{own.ranges}; look it up where that one is"
    )


def _int_codes(keys: npt.NDArray[Any], key_type: KeyType) -> Keys:
    if keys.dtype.kind == "u" and keys.dtype.itemsize == 8 and key_type is KeyType.INT64:
        if len(keys) and keys.max() > _INT64_MAX:
            raise _out_of_range(key_type, keys.min(), keys.max())
    elif keys.dtype.kind == "i" and key_type is KeyType.UINT64 and len(keys) and keys.min() < 0:
        raise _out_of_range(key_type, keys.min(), keys.max())
    return np.ascontiguousarray(keys.astype(_DTYPE[key_type], copy=False)).view(np.int64)


def _out_of_range(key_type: KeyType, low: Any, high: Any) -> InvalidInput:
    legal = "-2^63 to 2^63 - 1" if key_type is KeyType.INT64 else "0 to 2^64 - 1"
    return InvalidInput(f"expected {key_type} keys, {legal}; got keys from {low} to {high}")


def _string_codes(strings: pa.Array, colliding: CollidingKeys | None) -> Keys:
    hashes = hash_arrow(strings)
    return hashes if colliding is None else colliding.codes_of(strings, hashes)
