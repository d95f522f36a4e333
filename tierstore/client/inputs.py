"""Inputs of look-ups and of `predict` as tensors: checked, converted, whole or in parts.

Pure functions and immutable values; any thread may use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tierstore.arguments import as_version, by_name, keys_and_bags, weights_of
from tierstore.client import wire
from tierstore.errors import InvalidInput, shown
from tierstore.formats.key_arrays import key_array
from tierstore.types import KeysLike

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    from tierstore.lazy import np

_PARTS = (".offsets", ".weights")


@dataclass(frozen=True, slots=True)
class Batch:
    """`keys` of one feature: an int64 or uint64 array, or an Arrow `large_string` array.

    In bags if it has `offsets`.
    """

    feature: str
    keys: Any
    offsets: npt.NDArray[np.int64] | None = None
    weights: npt.NDArray[np.float32] | None = None

    @staticmethod
    def from_value(feature: str, value: Any) -> Batch:
        """`value` is as `arguments.keys_and_bags` takes it."""
        keys, offsets, weights = keys_and_bags(feature, value)
        if offsets is None and weights is not None:
            raise InvalidInput(f"{feature!r}: weights come with offsets: (keys, offsets, weights)")
        return Batch.of(feature, keys, offsets, weights)

    @staticmethod
    def of(
        feature: str, keys: KeysLike, offsets: npt.ArrayLike | None = None, weights: npt.ArrayLike | None = None
    ) -> Batch:
        """Check and convert a caller's values. The service checks them against the table."""
        array = as_keys(keys)
        starts = None if offsets is None else _offsets(offsets, len(array))
        return Batch(feature, array, starts, None if weights is None else weights_of(weights, len(array)))

    @property
    def n(self) -> int:
        return len(self.keys)

    @property
    def rows(self) -> int:
        """Rows of the answer: one per key, or one per bag."""
        return len(self.keys) if self.offsets is None else len(self.offsets)

    def as_declared(self, metadata: Mapping[str, Any]) -> Batch:
        """The same where there are keys; without any, of the datatype that `metadata` (the protocol's) declares."""
        if self.n:
            return self
        declared = _declared(metadata).get(self.feature, {})
        return replace(self, keys=_no_strings() if declared.get("datatype") == "BYTES" else _no_keys())

    def bags(self, first: int, last: int) -> Batch:
        """The bags [first, last)."""
        starts = self.offsets
        assert starts is not None
        if first == last:
            return Batch(self.feature, self.keys[:0], starts[:0], None if self.weights is None else self.weights[:0])
        begin, end = int(starts[first]), self.n if last == len(starts) else int(starts[last])
        weights = None if self.weights is None else self.weights[begin:end]
        return Batch(self.feature, self.keys[begin:end], starts[first:last] - begin, weights)

    def inputs(self) -> list[wire.Input]:
        """The tensors of a request: `<feature>`, and `.offsets` and `.weights` where there are any."""
        name = self.feature
        keys = wire.numbers(name, self.keys) if isinstance(self.keys, np.ndarray) else wire.strings(name, self.keys)
        others = ((f"{name}.offsets", self.offsets), (f"{name}.weights", self.weights))
        return [keys, *(wire.numbers(other, values) for other, values in others if values is not None)]


@dataclass(frozen=True, slots=True)
class Plain:
    """An input of `predict` that is one tensor: numbers of any shape, or a flat Arrow array of strings.

    `shape` is that of the tensor. `items`: whether axis 0 may be the batch dimension.
    """

    name: str
    values: Any
    shape: tuple[int, ...]
    items: bool = True

    @property
    def n(self) -> int | None:
        """Entries along the batch dimension; None without one."""
        return self.shape[0] if self.items and self.shape else None

    @property
    def names(self) -> tuple[str, ...]:
        """Outputs that have one entry per entry of this input."""
        return (self.name, f"{self.name}.found")

    def part(self, begin: int, end: int) -> Plain:
        width = 1 if isinstance(self.values, np.ndarray) else int(np.prod(self.shape[1:], dtype=np.int64))
        return Plain(self.name, self.values[begin * width : end * width], (end - begin, *self.shape[1:]))

    def inputs(self) -> list[wire.Input]:
        if isinstance(self.values, np.ndarray):
            return [wire.numbers(self.name, self.values)]
        tensor = wire.strings(self.name, self.values)
        return [wire.Input(tensor.name, tensor.datatype, self.shape, tensor.data)]


@dataclass(frozen=True, slots=True)
class Bags:
    """A ragged input of `predict`: one bag per item."""

    batch: Batch

    @property
    def n(self) -> int | None:
        return self.batch.rows

    @property
    def names(self) -> tuple[str, ...]:
        return (self.batch.feature, f"{self.batch.feature}.found")

    def part(self, begin: int, end: int) -> Bags:
        return Bags(self.batch.bags(begin, end))

    def inputs(self) -> list[wire.Input]:
        return self.batch.inputs()


def predict_inputs(inputs: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Plain | Bags]:
    """Inputs by name, converted to the datatypes that `metadata` (the protocol's, of the model) declares.

    A value is an array; for a ragged feature `(keys, offsets)`, `(keys, offsets, weights)` or a JaggedTensor. Names
    that are not in `metadata` are sent as they are; the service checks them. InvalidInput for values that do not fit.
    """
    values = dict(by_name(inputs, "inputs"))
    if not values:
        raise InvalidInput("expected inputs by name, such as {'user_id': keys}, got none")
    declared = _declared(metadata)
    tensors: list[Plain | Bags] = []
    for name, value in values.items():
        if not isinstance(name, str):
            raise InvalidInput(f"inputs: expected names, got {shown(name)}")
        base, _, part = name.rpartition(".")
        if f".{part}" in _PARTS and base in values and f"{base}.offsets" in values:
            continue  # sent with its feature
        keys, offsets, weights = keys_and_bags(name, value)
        if offsets is None and f"{name}.offsets" in values:
            offsets, weights = values[f"{name}.offsets"], values.get(f"{name}.weights")
        if offsets is not None:
            tensors.append(Bags(Batch.of(name, keys, offsets, weights).as_declared(metadata)))
            continue
        tensors.append(_plain(name, keys, declared.get(name)))
        if weights is not None:
            tensors.append(_plain(f"{name}.weights", weights, {"datatype": "FP32"}))
    return tensors


def _plain(name: str, value: Any, declared: Mapping[str, Any] | None) -> Plain:
    datatype = None if declared is None else declared.get("datatype")
    shape = None if declared is None else declared.get("shape")
    items = shape is None or (len(shape) > 0 and shape[0] == -1)
    if type(value).__module__.startswith("pyarrow"):
        value = as_keys(value)
        if not isinstance(value, np.ndarray):
            return Plain(name, value, (len(value),), items)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"input {name!r}: expected an array: {error}") from error
    target = wire.dtype_of(datatype)
    if not array.size and datatype == "BYTES":
        return Plain(name, _no_strings(), array.shape, items)
    if array.dtype.kind in "USTO":
        flat = as_keys(array.reshape(-1))
        if not isinstance(flat, np.ndarray):
            if target is not None:
                raise InvalidInput(f"input {name!r}: expected {datatype}, got strings")
            return Plain(name, flat, array.shape, items)
        array = flat.reshape(array.shape)
    if target is not None and array.dtype != target:
        array = _converted(name, array, target)
    return Plain(name, array, array.shape, items)


def _declared(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The inputs that `metadata` declares, by name."""
    return {entry["name"]: entry for entry in metadata.get("inputs", [])}


def _converted(name: str, array: npt.NDArray[Any], target: np.dtype[Any]) -> npt.NDArray[Any]:
    """`array` as `target`: floats may be rounded, integers must fit."""
    if array.dtype.kind in "iu" and target.kind in "iu" and array.dtype.itemsize == target.itemsize == 8:
        return array  # keys may be either; the service checks that they fit
    if array.size and not np.can_cast(array.dtype, target, "same_kind"):
        raise InvalidInput(f"input {name!r}: expected {wire.name_of(target)}, got {array.dtype}")
    with np.errstate(over="ignore"):
        converted = array.astype(target)
    if target.kind in "iu" and array.size and not (converted == array).all():
        raise InvalidInput(f"input {name!r}: expected values that fit {wire.name_of(target)}, got others")
    return converted


def as_keys(keys: KeysLike) -> Any:
    """`keys` as an int64, uint64 or Arrow `large_string` array of one dimension.

    InvalidInput where they are neither.
    """
    array = key_array(keys)
    if not len(array):
        return _no_keys()
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu":
        return array.astype(np.int64 if array.dtype.kind == "i" else np.uint64, copy=False)
    return _as_strings(array)


def _as_strings(keys: Any) -> Any:
    from tierstore.formats.strings import as_arrow_strings  # imports Arrow, which integer keys do not need

    return as_arrow_strings(keys)


def _no_keys() -> npt.NDArray[np.int64]:
    """No keys, of any type of integers."""
    return np.empty(0, np.int64)


def _no_strings() -> Any:
    return _as_strings([])


def _offsets(offsets: Any, n: int) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(offsets)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"offsets: expected int64 of shape [bags]: {error}") from error
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InvalidInput(f"offsets: expected int64 of shape [bags], got {array.dtype} of {list(array.shape)}")
    starts = array.astype(np.int64)
    if len(starts) and (starts[0] != 0 or starts[-1] > n or (starts[1:] < starts[:-1]).any()):
        raise InvalidInput(
            f"offsets: expected the start of each bag: 0 first, never descending, none beyond the {n} keys"
        )
    if n and not len(starts):
        raise InvalidInput(f"offsets: expected at least one bag for {n} keys, got none")
    return starts


def check_options(options: Mapping[str, object], kind: type) -> None:
    """TypeError for an option that the TypedDict `kind` does not have."""
    unknown = options.keys() - kind.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option {', '.join(sorted(unknown))}: expected one of {', '.join(kind.__annotations__)}"
        )


def pin_version(options: Any, version: int | None) -> None:
    """Add the version that a model is pinned to, if it is, to a verb's options.

    InvalidInput where they name another one.
    """
    if version is None:
        return
    if as_version(options.get("version", version)) not in (None, version):
        raise InvalidInput(f"version: expected {version}, which the model is pinned to, got {options['version']!r}")
    options["version"] = version
