"""What a caller of `predict` gives, as tensors of the datatypes that the model declares. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.client import wire
from tierstore.client.batches import Batch, as_keys
from tierstore.client.shards import Bags, Plain
from tierstore.errors import InvalidInput

_PARTS = (".offsets", ".weights")


def given(inputs: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Plain | Bags]:
    """Each input: an array, or `(keys, offsets)` or `(keys, offsets, weights)` for a ragged feature.

    `metadata` is the protocol's of the model. Names that it does not know go out as they are, for the service to judge.
    InvalidInput for values that do not become what the model declares.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise InvalidInput("expected inputs by name, such as {'user_id': keys}")
    declared = {entry["name"]: entry for entry in metadata.get("inputs", [])}
    made: list[Plain | Bags] = []
    for name, value in inputs.items():
        base, _, part = name.rpartition(".")
        if f".{part}" in _PARTS and base in inputs and f"{base}.offsets" in inputs:
            continue  # goes with its feature
        if isinstance(value, tuple):
            made.append(Bags(Batch.given(name, value)))
        elif f"{name}.offsets" in inputs:
            made.append(Bags(Batch.of(name, value, inputs[f"{name}.offsets"], inputs.get(f"{name}.weights"))))
        else:
            made.append(_plain(name, value, declared.get(name)))
    return made


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
    if array.dtype.kind in "USTO":
        if target is not None:
            raise InvalidInput(f"input {name!r}: expected {datatype}, came strings or objects")
        return Plain(name, as_keys(array.reshape(-1)), array.shape, items)
    if target is not None and array.dtype != target:
        array = _converted(name, array, target)
    return Plain(name, array, array.shape, items)


def _converted(name: str, array: npt.NDArray[Any], target: np.dtype[Any]) -> npt.NDArray[Any]:
    """`array` as `target` where no meaning is lost: floats may be rounded, integers must fit."""
    if array.dtype.kind in "iu" and target.kind in "iu" and array.dtype.itemsize == target.itemsize == 8:
        return array  # keys may come as either; the service checks that they fit
    if array.size and not np.can_cast(array.dtype, target, "same_kind"):
        raise InvalidInput(f"input {name!r}: expected {wire.name_of(target)}, came {array.dtype}")
    converted = array.astype(target)
    if target.kind in "iu" and array.size and not (converted == array).all():
        raise InvalidInput(f"input {name!r}: a value does not fit {wire.name_of(target)}")
    return converted
