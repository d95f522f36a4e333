"""Keys as callers have them, as one array of integers or one collection of strings. Pure functions; any thread.

No kernels here, and Arrow only for keys that are Arrow's: a client that sends integers needs NumPy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING, Any

from tierstore.arguments import check_sequence
from tierstore.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
else:
    from tierstore.lazy import np


def key_array(keys: Any, kind: str = "integer or string") -> Any:
    """One-dimensional `keys`, without a key that is missing: integers as a NumPy array of any width.

    Strings are left as they are: a list, a NumPy array, or an Arrow array, which is not dictionary-encoded. Takes
    lists, arrays, columns of frames, tensors, and other collections that can be gone through again. Keys without any
    may be of any type. InvalidInput, which names the expected `kind`, for anything else, bool and float included.
    """
    if not isinstance(keys, np.ndarray):
        check_sequence(keys, kind)
        if _is_arrow(keys):
            return _from_arrow(keys, kind)
        keys = _from_other(keys, kind)
    if isinstance(keys, np.ndarray):
        if keys.ndim != 1:
            raise InvalidInput(f"expected keys of one dimension, got shape {keys.shape}")
        if keys.dtype != object:
            if len(keys) and keys.dtype.kind not in "iuUST":
                raise InvalidInput(f"expected {kind} keys, got {keys.dtype}")
            return keys
        keys = keys.tolist()
    return _from_list(keys, kind)


def _is_arrow(keys: Any) -> bool:
    if not type(keys).__module__.startswith("pyarrow"):
        return False
    import pyarrow as pa

    return isinstance(keys, (pa.Array, pa.ChunkedArray))


def _from_arrow(keys: Any, kind: str) -> Any:
    import pyarrow as pa

    from tierstore.formats.strings import STRING_KINDS, plain_array

    array = plain_array(keys)
    if pa.types.is_integer(array.type):
        return array.to_numpy(zero_copy_only=False)
    if len(array) and not any(is_kind(array.type) for is_kind in STRING_KINDS):
        raise InvalidInput(f"expected {kind} keys, got Arrow {array.type}")
    return array


def _from_other(keys: Any, kind: str) -> Any:
    if hasattr(keys, "detach"):
        return keys.detach().cpu().numpy()  # a tensor of PyTorch, which may lie on a GPU
    if hasattr(keys, "__array__") or isinstance(keys, memoryview):
        return np.asarray(keys)
    if isinstance(keys, Iterable) and isinstance(keys, Sized):  # an iterator would be at its end for the next who reads
        return list(keys)
    raise InvalidInput(f"expected a sequence of {kind} keys, got {type(keys).__name__}")


def _from_list(keys: list[Any], kind: str) -> Any:
    kinds = set(map(type, keys))
    if not all(issubclass(one, (int, np.integer)) and one is not bool for one in kinds):
        if all(issubclass(one, (str, bytes)) for one in kinds):
            return keys
        if nested := [one.__name__ for one in kinds if issubclass(one, (list, tuple, np.ndarray))]:
            raise InvalidInput(f"expected keys of one dimension, got a {nested[0]} among them")
        raise InvalidInput(f"expected {kind} keys, got {', '.join(sorted(one.__name__ for one in kinds))}")
    if kinds - {int}:
        keys = list(map(int, keys))  # NumPy would wrap its own scalars silently
    for dtype in (np.int64, np.uint64):
        try:
            return np.array(keys, dtype)
        except OverflowError:
            pass
    raise InvalidInput(f"expected {kind} keys of 64 bits, got keys from {min(keys)} to {max(keys)}")
