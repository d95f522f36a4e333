"""Look-ups in the protocol's words, over any transport: named tensors in, named arrays out.

One request is one view, so all its answers are of one version and one moment. `DataPlane` keeps no state of a
request; any number of threads may call it. What a client sends wrong is InvalidInput, NotFound, NotReady or
TooLarge, and nothing else.

    input                 datatype                     shape
    <feature>             INT64, UINT64 or BYTES       [n] or [batch, k]
    <feature>.offsets     INT64                        [bags]   the keys are [n] then
    <feature>.weights     FP32                         that of the keys

    output                datatype                     shape
    <feature>             FP32 or FP16                 [n, dim], [batch, k, dim]; pooled: [bags | batch | n, dim]
    <feature>.found       BOOL                         that of the keys

A feature with a combiner is pooled: a bag an offset, a bag a row of [batch, k], or n bags of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInput, NotFound, TooLarge
from tierstore.service.tensors import BYTES, NUMPY_DTYPE, InputTensor, elements_from_bytes, shown, string_element
from tierstore.types import NAME, FeatureSpec, KeyType, TableSpec

KEY_DATATYPES = {KeyType.INT64: ("INT64", "UINT64"), KeyType.UINT64: ("UINT64", "INT64"), KeyType.STRING: (BYTES,)}
_ANSWERS = {"FP32": "float32", "FP16": "float16"}


class View(Protocol):
    """What the data plane needs of the engine's view."""

    @property
    def version(self) -> int: ...
    @property
    def features(self) -> dict[str, FeatureSpec]: ...
    @property
    def has_dense(self) -> bool: ...
    def table_of(self, feature: str) -> TableSpec: ...
    def lookup(self, feature: str, keys: Any, *, dtype: str = ..., out: Any = ..., return_found: bool = ...) -> Any: ...
    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = ...,
        dtype: str = ...,
        out: Any = ...,
        return_found: bool = ...,
    ) -> Any: ...


@dataclass(slots=True)  # not frozen, see InputTensor
class RequestedOutput:
    """An output that a client names; `datatype` FP32 or FP16 for vectors, None for the default."""

    name: str
    datatype: str | None = None


class OutputSpec:
    """An output that will be answered. `index` is its place among the requested ones, None for a default output."""

    __slots__ = ("datatype", "dtype", "index", "name", "nbytes", "shape")

    def __init__(self, name: str, datatype: str, shape: tuple[int, ...], index: int | None = None) -> None:
        self.name, self.datatype, self.shape, self.index = name, datatype, shape, index
        self.dtype: np.dtype[Any] = NUMPY_DTYPE[datatype]
        self.nbytes = math.prod(shape) * self.dtype.itemsize


@dataclass(slots=True)
class Answer:
    """Outputs in the order asked for; `arrays` are those that `allocate` gave, filled."""

    version: int
    specs: list[OutputSpec]
    arrays: list[npt.NDArray[Any]]


Allocate = Callable[[int, list[OutputSpec]], list[npt.NDArray[Any]]]
Reserve = Callable[[int], None]


@dataclass(slots=True)
class _Call:
    """One feature's look-up: what came for it, and where its outputs go (positions among the outputs)."""

    feature: FeatureSpec
    table: TableSpec
    keys: InputTensor
    offsets: npt.NDArray[np.int64] | None = None
    weights: npt.NDArray[np.float32] | None = None
    rows: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the answer before its last dimension."""
        if self.offsets is not None:
            return (len(self.offsets),)
        return self.keys.shape if self.feature.combiner is None else self.keys.shape[:1]

    @property
    def pooled(self) -> bool:
        """Whether bags must be pooled: one unweighted key a bag is that key's row."""
        if self.feature.combiner is None:
            return False
        return self.offsets is not None or self.weights is not None or len(self.keys.shape) == 2

    def starts(self) -> npt.NDArray[np.int64]:
        """Where each bag begins. Only once the size of the answer is known to be allowed."""
        if self.offsets is not None:
            return self.offsets
        shape = self.keys.shape
        return np.arange(shape[0], dtype=np.int64) * (shape[1] if len(shape) == 2 else 1)


class DataPlane:
    """Look-ups for the transports. `store` is the engine's; `max_response` bounds an answer and the rows behind it."""

    def __init__(self, store: Any, *, max_response: int) -> None:
        self._store = store
        self._max_response = max_response

    def model(self, name: str) -> Any:
        """The engine's model. NotFound for a name that none has or can have."""
        if NAME.fullmatch(name) is None:
            raise NotFound(f"unknown model {shown(name)}")
        return self._store.model(name)

    def infer(
        self,
        model: str,
        version: int | None,
        inputs: Sequence[InputTensor] | memoryview,
        requested: Sequence[RequestedOutput],
        *,
        allocate: Allocate,
        reserve: Reserve,
    ) -> Answer:
        """Answer one request.

        Args:
            version: None for the active one.
            inputs: the tensors; or the raw keys of a model's only feature, in the binary form.
            requested: none for the default outputs, which are all features that have an input.
            allocate: gives an array of each output's shape and dtype to fill, C-contiguous, in order.
            reserve: is told the bytes that the look-ups will take before any is taken; it may raise Overloaded.
        """
        with self.model(model).view(version) as view:
            if isinstance(inputs, memoryview):
                inputs = [_raw_input(view, inputs)]
            calls = _calls(view, inputs)
            specs = _outputs(view, calls, requested)
            need = _work_bytes(calls, specs)
            if need > self._max_response:
                raise TooLarge(
                    f"the look-up takes {need} bytes of rows, {self._max_response} are allowed: split it, or raise max_response"
                )
            reserve(need)
            arrays = allocate(view.version, specs)
            for call in calls.values():
                _run(view, call, specs, arrays)
            return Answer(view.version, specs, arrays)


def _calls(view: View, inputs: Sequence[InputTensor]) -> dict[str, _Call]:
    """The look-ups that the inputs add up to, by feature."""
    by_name: dict[str, InputTensor] = {}
    for tensor in inputs:
        if tensor.name in by_name:
            raise InvalidInput(f"input {shown(tensor.name)} is given twice")
        by_name[tensor.name] = tensor
    if not by_name:
        raise InvalidInput(f"no inputs; expected keys of {_list(view.features)}")
    calls = {}
    for name, tensor in by_name.items():
        feature, _, part = name.partition(".")
        if feature not in view.features or part not in ("", "offsets", "weights"):
            raise InvalidInput(f"unknown input {shown(name)}; {_known(view)}")
        if not part:
            calls[name] = _keys(view, view.features[feature], tensor)
        elif feature not in by_name:
            raise InvalidInput(f"input {shown(name)} needs the keys too: an input {feature!r}")
    for name, tensor in by_name.items():
        feature, _, part = name.partition(".")
        if part == "offsets":
            calls[feature].offsets = _offsets(calls[feature], tensor)
        elif part == "weights":
            calls[feature].weights = _weights(calls[feature], tensor)
    return calls


def _keys(view: View, feature: FeatureSpec, tensor: InputTensor) -> _Call:
    table = view.table_of(feature.name)
    expected = KEY_DATATYPES[table.key]
    if tensor.datatype not in expected:
        raise InvalidInput(
            f"input {feature.name!r}: table {table.name!r} has {table.key} keys; expected {' or '.join(expected)}, came {tensor.datatype}"
        )
    if len(tensor.shape) > 2:
        raise InvalidInput(f"input {feature.name!r}: expected shape [n] or [batch, k], came {list(tensor.shape)}")
    return _Call(feature, table, tensor)


def _offsets(call: _Call, tensor: InputTensor) -> npt.NDArray[np.int64]:
    name = call.feature.name
    if call.feature.combiner is None:
        raise InvalidInput(f"input '{name}.offsets': feature {name!r} has no combiner, so its keys form no bags")
    if tensor.datatype != "INT64" or len(tensor.shape) != 1:
        raise InvalidInput(
            f"input '{name}.offsets': expected INT64 of shape [bags], came {tensor.datatype} of {list(tensor.shape)}"
        )
    if len(call.keys.shape) != 1:
        raise InvalidInput(f"input {name!r}: with offsets the keys are flat, shape [n]; came {list(call.keys.shape)}")
    offsets: npt.NDArray[np.int64] = tensor.elements
    n = call.keys.shape[0]
    if len(offsets) == 0:
        if n:
            raise InvalidInput(f"input '{name}.offsets': {n} keys and no bag to hold them")
    elif offsets[0] != 0 or offsets[-1] > n or (offsets[1:] < offsets[:-1]).any():
        raise InvalidInput(
            f"input '{name}.offsets': expected the start of each bag: 0 first, never descending, none beyond the {n} keys"
        )
    return offsets


def _weights(call: _Call, tensor: InputTensor) -> npt.NDArray[np.float32]:
    name = call.feature.name
    if call.feature.combiner is None:
        raise InvalidInput(f"input '{name}.weights': feature {name!r} has no combiner, so nothing is weighted")
    if tensor.datatype != "FP32" or tensor.shape != call.keys.shape:
        raise InvalidInput(
            f"input '{name}.weights': expected FP32 of shape {list(call.keys.shape)}, one a key; came {tensor.datatype} of {list(tensor.shape)}"
        )
    if not np.isfinite(tensor.elements).all():
        raise InvalidInput(f"input '{name}.weights': a weight is NaN or infinite")
    weights: npt.NDArray[np.float32] = tensor.elements
    return weights


def _outputs(view: View, calls: dict[str, _Call], requested: Sequence[RequestedOutput]) -> list[OutputSpec]:
    """What will be answered, in order; enters each output's place in its feature's call."""
    wanted: list[tuple[int | None, RequestedOutput]] = list(enumerate(requested))
    if not wanted:
        wanted = [(None, RequestedOutput(name)) for name in calls]
    seen: set[str] = set()
    specs: list[OutputSpec] = []
    for index, output in wanted:
        if output.name in seen:
            raise InvalidInput(f"output {shown(output.name)} is asked for twice")
        seen.add(output.name)
        feature, _, part = output.name.partition(".")
        if feature not in view.features or part not in ("", "found"):
            raise InvalidInput(f"unknown output {shown(output.name)}; {_known(view)}")
        if (call := calls.get(feature)) is None:
            raise InvalidInput(f"output {shown(output.name)} needs an input {feature!r}")
        if part:
            if output.datatype not in (None, "BOOL"):
                raise InvalidInput(f"output {output.name!r} is BOOL, not {shown(output.datatype)}")
            call.found.append(len(specs))
            specs.append(OutputSpec(output.name, "BOOL", call.keys.shape, index))
        else:
            datatype = output.datatype or "FP32"
            if datatype not in _ANSWERS:
                raise InvalidInput(
                    f"output {output.name!r}: dtype {shown(datatype)} is not served; ask for FP32 or FP16"
                )
            call.rows.append(len(specs))
            specs.append(OutputSpec(output.name, datatype, (*call.lead, call.table.dim), index))
    return specs


def _work_bytes(calls: dict[str, _Call], specs: list[OutputSpec]) -> int:
    """Bytes of the outputs, and of rows that are looked up only to be pooled or to be told found from absent."""
    hidden = sum(
        math.prod(call.keys.shape) * call.table.dim * 4
        for call in calls.values()
        if (call.rows and call.pooled) or (call.found and not call.rows)
    )
    return hidden + sum(spec.nbytes for spec in specs)


def _run(view: View, call: _Call, specs: list[OutputSpec], arrays: list[npt.NDArray[Any]]) -> None:
    if not call.rows and not call.found:
        return
    options: dict[str, Any] = {"return_found": bool(call.found)}
    if call.rows:
        place = call.rows[0]
        options["dtype"] = _ANSWERS[specs[place].datatype]
        options["out"] = arrays[place].reshape(math.prod(call.lead), call.table.dim)
    name, keys = call.feature.name, call.keys.elements
    if call.rows and call.pooled:
        answer = view.lookup_bags(name, keys, call.starts(), weights=call.weights, **options)
    else:
        answer = view.lookup(name, keys, **options)
    if call.found:
        arrays[call.found[0]].reshape(-1)[:] = answer[1]


def _raw_input(view: View, data: memoryview) -> InputTensor:
    """Keys of the only feature of a model, sent as bytes without a description."""
    if len(view.features) != 1:
        raise InvalidInput(
            f"a raw body needs a model with exactly one input, this one has {len(view.features)}: {_list(view.features)}"
        )
    (name,) = view.features
    datatype = KEY_DATATYPES[view.table_of(name).key][0]
    if datatype == BYTES:
        return InputTensor(name, BYTES, (1,), string_element(data))
    width = NUMPY_DTYPE[datatype].itemsize
    if len(data) % width:
        raise InvalidInput(
            f"input {name!r}: a raw body of {datatype} keys has a multiple of {width} bytes, came {len(data)}"
        )
    shape = (len(data) // width,)
    return InputTensor(name, datatype, shape, elements_from_bytes(name, datatype, shape, data))


def _list(features: dict[str, FeatureSpec]) -> str:
    names = ", ".join(sorted(features)[:20])
    return names if len(features) <= 20 else f"{names}, … ({len(features)} in all)"


def _known(view: View) -> str:
    text = f"the features are {_list(view.features)}, with <feature>.offsets and .weights as inputs and <feature>.found as output"
    if view.has_dense:
        text += (
            "; the model's dense part is kept but the dense predictor is not available, so its tensors are not served"
        )
    return text
