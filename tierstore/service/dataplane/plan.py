"""Requests and their plans: what a request asks for, and how it is answered under one version.

`planner.py` makes plans; `inference.py` lists the names of inputs and outputs. Offsets and weights of ragged bags are
checked when a request is planned, and again with its data. Values are immutable, except as `Request` says; any thread.
A malformed request is InvalidInput.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.engine.reads.view import View
from tierstore.errors import InvalidInput, TooLarge
from tierstore.predict.binding import Bindings, FeatureInput, Run
from tierstore.predict.signature import Tensor
from tierstore.service.dataplane.datatypes import BYTES, NUMPY_DTYPE
from tierstore.service.dataplane.tensors import Elements, TensorSpec
from tierstore.types import Combiner, FeatureSpec, TableSpec

_STRINGS = np.dtype(object)


@dataclass(slots=True)  # not frozen, see TensorSpec
class RequestedOutput:
    """An output that a client names: `datatype` FP32 or FP16 for vectors, `combiner` for its bags; None for the
    defaults.
    """

    name: str
    datatype: str | None = None
    combiner: str | None = None


class OutputSpec:
    """An output of a plan. `index` is its position among the requested outputs, None for a default output.

    If `fixed` is false the array exists only after the run: until then `shape` may hold -1, `nbytes` is 0, and BYTES
    are an object array of str.
    """

    __slots__ = ("datatype", "dtype", "fixed", "index", "name", "nbytes", "shape")

    def __init__(
        self, name: str, datatype: str, shape: tuple[int, ...], index: int | None = None, *, fixed: bool = True
    ) -> None:
        self.name, self.datatype, self.shape, self.index, self.fixed = name, datatype, shape, index, fixed
        self.dtype: np.dtype[Any] = NUMPY_DTYPE.get(datatype, _STRINGS)
        self.nbytes = math.prod(shape) * self.dtype.itemsize if fixed else 0


@dataclass(slots=True)
class Call:
    """One feature's look-up: the positions of its inputs in the request, and of its outputs in the plan."""

    feature: FeatureSpec
    table: TableSpec
    spec: TensorSpec
    combiner: Combiner | None
    keys: int
    offsets: int | None = None
    weights: int | None = None
    bags: int = 0  # with offsets: their number
    rows: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    feeds: FeatureInput | None = None  # the input of the dense part that gets the rows
    hidden: bool = False  # whether those go into a buffer of the dense part, not into an output
    gathered: bool = False  # whether that is all that the call does
    # set once the request is planned
    shape: tuple[int, int] = (0, 0)  # of its rows as one matrix
    pooled: bool = False  # whether bags must be pooled: one unweighted key a bag is that key's row

    def resolve(self) -> None:
        """Derive the fields that depend on the request as a whole."""
        self.shape = math.prod(self.lead), self.table.dim
        ragged = self.offsets is not None or self.weights is not None or len(self.spec.shape) == 2
        self.pooled = self.combiner is not None and ragged

    def resized(self, spec: TensorSpec) -> Call:
        """A `gathered` call, for other keys."""
        n = math.prod(spec.shape)
        return Call(
            self.feature, self.table, spec, self.combiner, self.keys, feeds=self.feeds, hidden=True, gathered=True,
            shape=(n, self.table.dim),
        )  # fmt: skip

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the output before its last dimension."""
        if self.offsets is not None:
            return (self.bags,)
        return self.spec.shape if self.combiner is None else self.spec.shape[:1]

    def starts(self) -> npt.NDArray[np.int64]:
        """Where each bag begins, for a call without offsets. Only called after the size of the output was checked."""
        shape = self.spec.shape
        return np.arange(shape[0], dtype=np.int64) * (shape[1] if len(shape) == 2 else 1)


@dataclass(slots=True)
class DensePlan:
    """One run of the dense part.

    `inputs`: (input, position of the request's own tensor); `positions` of the outputs of `run`. `hidden` and
    `gathered` are names of features, of the calls with these properties.
    """

    run: Run
    inputs: list[tuple[Tensor, int]]
    positions: list[int]
    hidden: list[str]
    gathered: tuple[str, ...]

    @property
    def hidden_bytes(self) -> int:
        """The least bytes that the request's strings need once they are split for the run."""
        return sum(8 * math.prod(self.run.inputs[t.name]) for t, _ in self.inputs if t.datatype == BYTES)


@dataclass(slots=True)
class Plan:
    """How a request is answered under one version and dense part: checked against both, ready for data. Immutable.

    `features` are those of the version, `bindings` and `loose` those of the dense part: `fits` compares their
    identity. `dense` is the run of the dense part, if there is one; `numbers` the input that divides the keys among
    tables (`hps.py`).
    """

    version: int
    features: dict[str, FeatureSpec]
    bindings: Bindings | None
    loose: frozenset[str] | None
    dense: DensePlan | None
    calls: list[Call]
    specs: list[OutputSpec]
    work_bytes: int
    keys: int
    numbers: int | None = None

    @classmethod
    def under(
        cls,
        view: View,
        dense: DensePlan | None,
        calls: list[Call],
        specs: list[OutputSpec],
        work_bytes: int,
        keys: int,
        numbers: int | None = None,
    ) -> Plan:
        """A plan under the view's version and dense part."""
        session = view.session
        bindings, loose = (None, None) if session is None else (session.bindings, session.loose)
        return cls(view.version, view.features, bindings, loose, dense, calls, specs, work_bytes, keys, numbers)

    @property
    def rows_alone(self) -> set[int]:
        """The outputs with rows that no graph reads."""
        return {call.rows[0] for call in self.calls if call.rows and call.feeds is None}

    def fits(self, view: View) -> bool:
        """Whether it was made for the view's version and dense part."""
        if self.features is not view.features:
            return False
        session = view.session
        return (
            self.bindings is None
            if session is None
            else (self.bindings is session.bindings and self.loose is session.loose)
        )


def check_lookup_bytes(nbytes: int, allowed: int) -> None:
    """TooLarge if a look-up needs more bytes than are allowed."""
    if nbytes > allowed:
        raise TooLarge(
            f"the look-up takes {nbytes} bytes of rows, {allowed} are allowed: split it, or raise max_response"
        )


@dataclass(slots=True)
class Request:
    """A request without its data: inputs in the order of their elements; outputs, none for the default ones.

    `combiner` is for every feature whose output does not name one. `device`: where rows that no graph reads should
    stay, instead of CPU memory.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[RequestedOutput]
    combiner: str | None = None
    device: str | None = None
    # for the latest two versions, as two may be served; threads may race to set equal ones
    plan: Plan | None = None
    other_plan: Plan | None = None


def bags_of(call: Call, tensor: TensorSpec) -> int:
    """The number of bags that the offsets make. InvalidInput if the tensor does not fit."""
    name = call.feature.name
    if call.combiner is None:
        raise InvalidInput(f"input '{name}.offsets': feature {name!r} has no combiner, so its keys form no bags")
    if tensor.datatype != "INT64" or len(tensor.shape) != 1:
        raise InvalidInput(
            f"input '{name}.offsets': expected INT64 of shape [bags], got {tensor.datatype} of {list(tensor.shape)}"
        )
    if len(call.spec.shape) != 1:
        raise InvalidInput(f"input {name!r}: with offsets the keys are flat, shape [n]; got {list(call.spec.shape)}")
    return tensor.shape[0]


def check_weights_spec(call: Call, tensor: TensorSpec) -> None:
    """InvalidInput unless there is one weight for each key, and bags to weigh."""
    name = call.feature.name
    if call.combiner is None:
        raise InvalidInput(f"input '{name}.weights': feature {name!r} has no combiner, so nothing is weighted")
    if tensor.datatype != "FP32" or tensor.shape != call.spec.shape:
        raise InvalidInput(
            f"input '{name}.weights': expected FP32 of shape {list(call.spec.shape)}, one a key; got "
            f"{tensor.datatype} of {list(tensor.shape)}"
        )


def parts_of(
    call: Call, elements: Sequence[Elements]
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float32] | None]:
    """The call's offsets and weights, None if it has none. InvalidInput for wrong values."""
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
            f"input '{name}.offsets': expected the start of each bag: 0 first, never descending, none beyond the {n} "
            "keys"
        )
    return offsets


def _check_weights(call: Call, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(weights).all():
        raise InvalidInput(f"input '{call.feature.name}.weights': a weight is NaN or infinite")
    return weights
