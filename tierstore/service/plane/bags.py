"""Bags of a ragged feature: its offsets and weights, checked when a request is planned and again with its data.

Pure functions; any thread. What a client sends wrong is InvalidInput.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInput
from tierstore.service.plane.plan import Call
from tierstore.service.plane.tensors import Elements, TensorSpec


def bags_of(call: Call, tensor: TensorSpec) -> int:
    """How many bags the offsets are for."""
    name = call.feature.name
    if call.combiner is None:
        raise InvalidInput(f"input '{name}.offsets': feature {name!r} has no combiner, so its keys form no bags")
    if tensor.datatype != "INT64" or len(tensor.shape) != 1:
        raise InvalidInput(
            f"input '{name}.offsets': expected INT64 of shape [bags], came {tensor.datatype} of {list(tensor.shape)}"
        )
    if len(call.spec.shape) != 1:
        raise InvalidInput(f"input {name!r}: with offsets the keys are flat, shape [n]; came {list(call.spec.shape)}")
    return tensor.shape[0]


def check_weights_spec(call: Call, tensor: TensorSpec) -> None:
    """That there is a weight a key, and something to weigh."""
    name = call.feature.name
    if call.combiner is None:
        raise InvalidInput(f"input '{name}.weights': feature {name!r} has no combiner, so nothing is weighted")
    if tensor.datatype != "FP32" or tensor.shape != call.spec.shape:
        raise InvalidInput(
            f"input '{name}.weights': expected FP32 of shape {list(call.spec.shape)}, one a key; came {tensor.datatype} of {list(tensor.shape)}"
        )


def parts_of(
    call: Call, elements: Sequence[Elements]
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float32] | None]:
    """The call's offsets and weights, their values checked."""
    offsets = None if call.offsets is None else _check_offsets(call, elements[call.offsets])
    weights = None if call.weights is None else _check_weights(call, elements[call.weights])
    return offsets, weights


def _check_offsets(call: Call, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    name = call.feature.name
    n = call.spec.shape[0]
    if len(offsets) == 0:
        if n:
            raise InvalidInput(f"input '{name}.offsets': {n} keys and no bag to hold them")
    elif offsets[0] != 0 or offsets[-1] > n or (offsets[1:] < offsets[:-1]).any():
        raise InvalidInput(
            f"input '{name}.offsets': expected the start of each bag: 0 first, never descending, none beyond the {n} keys"
        )
    return offsets


def _check_weights(call: Call, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(weights).all():
        raise InvalidInput(f"input '{call.feature.name}.weights': a weight is NaN or infinite")
    return weights
