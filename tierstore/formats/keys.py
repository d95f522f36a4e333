"""Keys as callers have them, and the int64 codes that the store works with.

A *code* is the key itself (int64), its bit pattern (uint64), or the bit pattern of the XXH3-64 with
seed 0 of its UTF-8 bytes (string); but for the few strings of a table that collide (`colliding.py`). Pure functions; any thread may call them, with arrays that nobody
writes meanwhile. A result may share memory with the argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tierstore.errors import InvalidInput
from tierstore.formats.colliding import CollidingKeys, hash_arrow
from tierstore.kernels.xxh3 import hash_strings
from tierstore.types import Keys, KeyType, check_sequence

_INT64_MAX = (1 << 63) - 1
_MAX_TEXT_BYTES = 1 << 30
_STRING_KINDS = (
    pa.types.is_large_string,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_binary,
    pa.types.is_string_view,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
_INT64 = np.dtype(np.int64)
_DTYPE = {KeyType.INT64: np.dtype(np.int64), KeyType.UINT64: np.dtype(np.uint64)}


def as_codes(keys: Any, key_type: KeyType, colliding: CollidingKeys | None = None) -> Keys:
    """Codes of one-dimensional `keys`: int64[n], C-contiguous, possibly the argument's own memory.

    Integer tables take NumPy and Arrow integers of any width whose values fit, and sequences of int;
    string tables take sequences of str or (UTF-8) bytes, NumPy string, bytes and object arrays and
    Arrow string and binary arrays, dictionary-encoded or not. Arrow arrays are hashed where they lie. `colliding` are those
    of the table, if it has some.
    Raises InvalidInput for any other type (bool and float included), null, a value out of range,
    invalid UTF-8, or more than one dimension.
    """
    if type(keys) is np.ndarray and keys.dtype == _INT64 and keys.ndim == 1 and key_type is KeyType.INT64:
        return np.ascontiguousarray(keys)  # as most are; a look-up of few keys would notice the rest
    check_sequence(keys, key_type)
    if isinstance(keys, (pa.Array, pa.ChunkedArray)):
        array = _decoded(keys)
        if key_type is KeyType.STRING:
            return _string_codes(array, colliding)
        return _int_codes(_arrow_ints(array, key_type), key_type)
    if not isinstance(keys, np.ndarray):
        if hasattr(keys, "detach"):
            keys = keys.detach().cpu().numpy()  # a tensor of PyTorch, which may lie on a GPU
        elif hasattr(keys, "__array__") or isinstance(keys, memoryview):
            keys = np.asarray(keys)
        elif isinstance(keys, Iterable) and isinstance(keys, Sized):
            keys = list(keys)
        else:
            raise InvalidInput(f"expected a sequence of {key_type} keys, came {type(keys).__name__}")
    if isinstance(keys, np.ndarray):
        if keys.ndim != 1:
            raise InvalidInput(f"expected keys of one dimension, came shape {keys.shape}")
        if keys.dtype == object:
            keys = keys.tolist()
    if len(keys) == 0:
        return np.empty(0, np.int64)
    if key_type is KeyType.STRING:
        return _string_codes(as_arrow_strings(keys), colliding)
    return _int_codes(keys if isinstance(keys, np.ndarray) else _list_ints(keys, key_type), key_type)


def from_codes(codes: Keys, key_type: KeyType) -> npt.NDArray[np.int64] | npt.NDArray[np.uint64]:
    """Keys of `codes`, a view: int64 or uint64. A hash has no way back, so string keys stay codes (int64)."""
    return codes.view(np.uint64) if key_type is KeyType.UINT64 else codes


def partition_of(codes: Keys, partitions: int) -> npt.NDArray[np.int64]:
    """To which of `partitions` shares of the keys each of these int64 [n] belongs: int64 [n]; `schema/built.md` has the function.

    It shares no bits with the hashes by which a store places keys, so that a share of the keys is spread as all of them.
    """
    # the finalizer of MurmurHash3 (Appleby, public domain)
    x = codes.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return ((x ^ (x >> np.uint64(33))) % np.uint64(partitions)).astype(np.int64)


def as_arrow_strings(keys: Any) -> pa.Array:
    """String keys as a validated `large_string` array without nulls. Raises InvalidInput, see `as_codes`."""
    check_sequence(keys, KeyType.STRING)
    if isinstance(keys, (pa.Array, pa.ChunkedArray)):
        array = _decoded(keys)
    elif isinstance(keys, np.ndarray) and keys.dtype.kind not in "USTO":
        raise InvalidInput(f"expected string keys, came {keys.dtype}: this table's keys are strings")
    else:
        array = _sequence_of_strings(keys)
    return _checked_strings(array)


def hash_utf8(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> Keys:
    """Codes of string keys that lie end to end: key i is `data[offsets[i]:offsets[i + 1]]`.

    data uint8[bytes], offsets int64[n + 1], ascending. Raises InvalidInput for invalid UTF-8.
    """
    n = len(offsets) - 1
    array = pa.Array.from_buffers(pa.large_string(), n, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    try:
        array.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidInput(f"string keys must be UTF-8: {error}") from error
    return hash_strings(data, offsets)


def _decoded(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array, not dictionary-encoded, without nulls."""
    if isinstance(array, pa.ChunkedArray):
        if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
            array = array.cast(pa.large_binary())  # 32-bit offsets might not reach across all the chunks
        array = array.combine_chunks()
    if isinstance(array, pa.DictionaryArray):
        _check_text(_lengths(array.dictionary)[array.indices.fill_null(0).to_numpy(zero_copy_only=False)])
        array = array.dictionary_decode()
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise InvalidInput(f"key {row} is null: every row needs a key")
    return array


def validate(array: pa.Array) -> None:
    """Arrow's own full check of foreign data, in a time that its size bounds. Raises InvalidInput, pa.ArrowException.

    Nothing else may be asked of an array that came from outside before this.
    """
    array.validate()
    if isinstance(array, pa.DictionaryArray):
        validate(array.dictionary)
    if _is_view(array.type):
        _check_text(_lengths(array))  # the full check would read a text as often as it is named
    array.validate(full=True)


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _lengths(array: pa.Array) -> npt.NDArray[Any]:
    """Bytes of each string; zeros where the array holds something else, or nothing."""
    lengths: npt.NDArray[Any] = np.zeros(max(1, len(array)), np.int32)
    if _is_view(array.type) and len(array):
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)  # length, then where the text is
        lengths = np.maximum(views[array.offset : array.offset + len(array), 0], 0)
    elif len(array) and any(is_kind(array.type) for is_kind in _STRING_KINDS):
        lengths = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False)
    return lengths


def _check_text(lengths: npt.NDArray[Any]) -> None:
    """Dictionaries and views can name one long string any number of times: small here, huge when spelled out."""
    total = int(lengths.sum(dtype=np.int64))
    if total > _MAX_TEXT_BYTES:
        raise InvalidInput(f"string keys of {total} bytes together: expected at most {_MAX_TEXT_BYTES} at a time")


def _arrow_ints(array: pa.Array, key_type: KeyType) -> npt.NDArray[Any]:
    if len(array) and not pa.types.is_integer(array.type):
        raise InvalidInput(f"expected {key_type} keys, came Arrow {array.type}")
    return array.to_numpy(zero_copy_only=False) if len(array) else np.empty(0, np.int64)


def _list_ints(keys: list[Any], key_type: KeyType) -> npt.NDArray[Any]:
    kinds = set(map(type, keys))
    for kind in kinds:
        if issubclass(kind, (bool, np.bool_)) or not issubclass(kind, (int, np.integer)):
            raise InvalidInput(f"expected {key_type} keys, came {kind.__name__}")
    if kinds != {int}:
        keys = list(map(int, keys))  # NumPy would wrap its own scalars without a word
    try:
        return np.array(keys, dtype=_DTYPE[key_type])
    except OverflowError:
        raise _out_of_range(key_type, min(keys), max(keys)) from None


def _int_codes(keys: npt.NDArray[Any], key_type: KeyType) -> Keys:
    if keys.dtype.kind not in "iu":
        raise InvalidInput(f"expected {key_type} keys, came {keys.dtype}")
    if keys.dtype.kind == "u" and keys.dtype.itemsize == 8 and key_type is KeyType.INT64:
        if len(keys) and keys.max() > _INT64_MAX:
            raise _out_of_range(key_type, keys.min(), keys.max())
    elif keys.dtype.kind == "i" and key_type is KeyType.UINT64 and len(keys) and keys.min() < 0:
        raise _out_of_range(key_type, keys.min(), keys.max())
    return np.ascontiguousarray(keys.astype(_DTYPE[key_type], copy=False)).view(np.int64)


def _out_of_range(key_type: KeyType, low: Any, high: Any) -> InvalidInput:
    legal = "-2^63 to 2^63 - 1" if key_type is KeyType.INT64 else "0 to 2^64 - 1"
    return InvalidInput(f"expected {key_type} keys, {legal}; came keys from {low} to {high}")


def _sequence_of_strings(keys: Any) -> pa.Array:
    if not isinstance(keys, Iterable):
        raise InvalidInput(f"expected a sequence of string keys, came a single {type(keys).__name__}")
    try:
        if isinstance(keys, np.ndarray) and keys.dtype.kind in "UT":
            return pa.array(keys, pa.large_string())
        # as binary first: it takes str and bytes mixed, and the cast that follows checks UTF-8
        return pa.array(keys if isinstance(keys, np.ndarray) else list(keys), pa.large_binary())
    except (pa.ArrowException, UnicodeEncodeError, TypeError) as error:
        raise InvalidInput(f"expected string keys (str or UTF-8 bytes): {error}") from error


def _checked_strings(array: pa.Array) -> pa.Array:
    kind = array.type
    if array.null_count:
        raise InvalidInput("a key is null: every row needs a key")
    if len(array) and not any(is_kind(kind) for is_kind in _STRING_KINDS):
        raise InvalidInput(f"expected string keys, came Arrow {kind}")
    try:
        validate(array)  # offsets too: what is hashed in place must lie within its buffer
        return array if pa.types.is_large_string(kind) else array.cast(pa.large_string())
    except pa.ArrowException as error:
        raise InvalidInput(f"string keys must be UTF-8: {error}") from error


def _string_codes(array: pa.Array, colliding: CollidingKeys | None) -> Keys:
    strings = _checked_strings(array)
    hashes = hash_arrow(strings)
    return hashes if colliding is None else colliding.codes_of(strings, hashes)
