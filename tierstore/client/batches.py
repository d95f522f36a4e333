"""Keys of a look-up as tensors, whole or in parts. Immutable values; any thread may use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.client import wire
from tierstore.errors import InvalidInput
from tierstore.types import check_sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """`keys` of one feature: an int64 or uint64 array, or an Arrow `large_string` array; in bags if `offsets` are there."""

    feature: str
    keys: Any
    offsets: npt.NDArray[np.int64] | None = None
    weights: npt.NDArray[np.float32] | None = None

    @staticmethod
    def given(feature: str, value: Any) -> Batch:
        """`value` is keys, or `(keys, offsets)`, or `(keys, offsets, weights)` as a tuple."""
        if not isinstance(value, tuple) or (value and all(np.ndim(one) == 0 for one in value)):
            return Batch.of(feature, value)
        if len(value) not in (2, 3):
            raise InvalidInput(
                f"{feature!r}: expected keys, (keys, offsets) or (keys, offsets, weights), came a tuple of {len(value)}"
            )
        return Batch.of(feature, *value)

    @staticmethod
    def of(feature: str, keys: Any, offsets: Any = None, weights: Any = None) -> Batch:
        """Check and convert what a caller gave. The service checks it against the table."""
        array = as_keys(keys)
        starts = None if offsets is None else _offsets(offsets, len(array))
        return Batch(feature, array, starts, None if weights is None else _weights(weights, len(array)))

    @property
    def n(self) -> int:
        return len(self.keys)

    @property
    def rows(self) -> int:
        """Of its answer: one a key, or one a bag."""
        return len(self.keys) if self.offsets is None else len(self.offsets)

    def bags(self, first: int, last: int) -> Batch:
        """Bags [first, last) alone."""
        starts = self.offsets
        assert starts is not None
        if first == last:
            return Batch(self.feature, self.keys[:0], starts[:0], None if self.weights is None else self.weights[:0])
        begin, end = int(starts[first]), self.n if last == len(starts) else int(starts[last])
        weights = None if self.weights is None else self.weights[begin:end]
        return Batch(self.feature, self.keys[begin:end], starts[first:last] - begin, weights)

    def inputs(self) -> list[wire.Input]:
        """The tensors of a request: `<feature>`, and `.offsets` and `.weights` where they are given."""
        name = self.feature
        keys = wire.numbers(name, self.keys) if isinstance(self.keys, np.ndarray) else wire.strings(name, self.keys)
        more = ((f"{name}.offsets", self.offsets), (f"{name}.weights", self.weights))
        return [keys, *(wire.numbers(other, values) for other, values in more if values is not None)]


def split(batch: Batch, most: int) -> list[Batch]:
    """Parts of at most `most` keys each, in order; a bag is never cut, so a longer one is a part of its own."""
    if batch.n <= most:
        return [batch]
    if batch.offsets is None:
        return [Batch(batch.feature, batch.keys[at : at + most]) for at in range(0, batch.n, most)]
    starts = batch.offsets
    parts = []
    first = 0
    while first < len(starts):
        # the last bag that still ends within reach: the start of the one after it is where it ends
        reach = int(np.searchsorted(starts, starts[first] + most, side="right")) - 1
        last = len(starts) if batch.n - starts[first] <= most else max(reach, first + 1)
        parts.append(batch.bags(first, last))
        first = last
    return parts


def as_keys(keys: Any) -> Any:
    """int64, uint64 or Arrow `large_string`, of one dimension."""
    array = keys if isinstance(keys, np.ndarray) else _from_other(keys)
    if isinstance(array, np.ndarray):
        if array.ndim != 1:
            raise InvalidInput(f"expected keys of one dimension, came shape {array.shape}")
        if array.dtype.kind == "i":
            return array.astype(np.int64, copy=False)
        if array.dtype.kind == "u":
            return array.astype(np.uint64, copy=False)
        if array.dtype.kind not in "USTO":
            raise InvalidInput(f"expected integer or string keys, came {array.dtype}")
    from tierstore.formats.keys import as_arrow_strings  # loads Arrow and the kernels, which integer keys do without

    return as_arrow_strings(array)


def _from_other(keys: Any) -> Any:
    """A list, an Arrow array or the like as a NumPy array of integers, or as something that holds strings."""
    check_sequence(keys, "integer or string")
    if hasattr(keys, "detach"):
        return keys.detach().cpu().numpy()  # a tensor of PyTorch, which may lie on a GPU
    if type(keys).__module__.startswith("pyarrow"):
        import pyarrow as pa

        if pa.types.is_integer(keys.type):
            if keys.null_count:
                raise InvalidInput("a key is null: every row needs a key")
            return keys.to_numpy()
        return keys
    if hasattr(keys, "__array__"):
        return np.asarray(keys)
    try:
        keys = list(keys)
    except TypeError:
        raise InvalidInput(f"expected a sequence of integer or string keys, came {type(keys).__name__}") from None
    kinds = set(map(type, keys))
    if not keys:
        return np.empty(0, np.int64)
    if not kinds <= {int} and not all(issubclass(kind, np.integer) for kind in kinds):
        if kinds <= {str, bytes, np.str_, np.bytes_}:
            return keys
        raise InvalidInput(
            f"expected integer or string keys, came {', '.join(sorted(kind.__name__ for kind in kinds))}"
        )
    try:
        return np.array(keys, np.int64)
    except OverflowError:
        pass
    try:
        return np.array(keys, np.uint64)
    except OverflowError as error:
        raise InvalidInput(f"expected keys of 64 bits, came keys from {min(keys)} to {max(keys)}") from error


def _offsets(offsets: Any, n: int) -> npt.NDArray[np.int64]:
    array = np.asarray(offsets)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InvalidInput(f"offsets: expected int64 of shape [bags], came {array.dtype} of {list(array.shape)}")
    starts = array.astype(np.int64)
    if len(starts) and (starts[0] != 0 or starts[-1] > n or (starts[1:] < starts[:-1]).any()):
        raise InvalidInput(
            f"offsets: expected the start of each bag: 0 first, never descending, none beyond the {n} keys"
        )
    if n and not len(starts):
        raise InvalidInput(f"offsets: {n} keys and no bag to hold them")
    return starts


def _weights(weights: Any, n: int) -> npt.NDArray[np.float32]:
    try:
        array = np.ascontiguousarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"weights: expected {n} numbers: {error}") from error
    if array.shape != (n,):
        raise InvalidInput(f"weights: expected one a key, shape [{n}], came {list(array.shape)}")
    return array
