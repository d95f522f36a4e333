"""Look-ups in the protocol's words, over any transport: named tensors in, named arrays out.

One request is one view, so all its answers are of one version and one moment. What a request asks (`Request`) stands
apart from its data, and what follows from it (`Plan`) is kept with it, so that requests which differ in their data
alone are checked and planned once. `DataPlane` keeps no state of a request; any number of threads may call it. What a
client sends wrong is InvalidInput, NotFound, NotReady or TooLarge, and nothing else.

    input                 datatype                     shape
    <feature>             INT64, UINT64 or BYTES       [n] or [batch, k]
    <feature>.offsets     INT64                        [bags]   the keys are [n] then
    <feature>.weights     FP32                         that of the keys

    output                datatype                     shape
    <feature>             FP32 or FP16                 [n, dim], [batch, k, dim]; pooled: [bags | batch | n, dim]
    <feature>.found       BOOL                         that of the keys

A feature with a combiner, its own or one that the request names, is pooled: a bag an offset, a bag a row of [batch, k],
or n bags of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInput, NotFound, TooLarge
from tierstore.service.tensors import (
    BYTES,
    NUMPY_DTYPE,
    Elements,
    TensorSpec,
    elements_from_bytes,
    shown,
    string_element,
)
from tierstore.types import NAME, Combiner, FeatureSpec, KeyType, TableSpec

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
    def begin(
        self,
        feature: str,
        keys: Any,
        *,
        offsets: Any = ...,
        weights: Any = ...,
        combiner: str | None = ...,
        dtype: str = ...,
        out: Any = ...,
    ) -> Lookup: ...


class Lookup(Protocol):
    """What the data plane needs of a look-up under way."""

    @property
    def pending(self) -> bool: ...
    @property
    def found(self) -> npt.NDArray[np.bool_]: ...
    def finish(self) -> Any: ...


@dataclass(slots=True)  # not frozen, see TensorSpec
class RequestedOutput:
    """An output that a client names; `datatype` FP32 or FP16 for vectors, `combiner` of its bags; None for the defaults."""

    name: str
    datatype: str | None = None
    combiner: str | None = None


class OutputSpec:
    """An output that will be answered. `index` is its place among the requested ones, None for a default output."""

    __slots__ = ("datatype", "dtype", "index", "name", "nbytes", "shape")

    def __init__(self, name: str, datatype: str, shape: tuple[int, ...], index: int | None = None) -> None:
        self.name, self.datatype, self.shape, self.index = name, datatype, shape, index
        self.dtype: np.dtype[Any] = NUMPY_DTYPE[datatype]
        self.nbytes = math.prod(shape) * self.dtype.itemsize


@dataclass(slots=True)
class _Call:
    """One feature's look-up: which inputs it takes, and where its outputs go (positions among inputs and outputs)."""

    feature: FeatureSpec
    table: TableSpec
    spec: TensorSpec
    combiner: Combiner | None
    keys: int
    offsets: int | None = None
    weights: int | None = None
    bags: int = 0  # with offsets: how many
    rows: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the answer before its last dimension."""
        if self.offsets is not None:
            return (self.bags,)
        return self.spec.shape if self.combiner is None else self.spec.shape[:1]

    @property
    def pooled(self) -> bool:
        """Whether bags must be pooled: one unweighted key a bag is that key's row."""
        if self.combiner is None:
            return False
        return self.offsets is not None or self.weights is not None or len(self.spec.shape) == 2

    def starts(self) -> npt.NDArray[np.int64]:
        """Where each bag begins, without offsets. Only once the size of the answer is known to be allowed."""
        shape = self.spec.shape
        return np.arange(shape[0], dtype=np.int64) * (shape[1] if len(shape) == 2 else 1)


@dataclass(slots=True)
class Plan:
    """What a request comes to under one version: checked against its features, ready for data. Not changed after.

    `features` are that version's own, by which it is told from any other. `memo` is the transport's, to keep with it.
    """

    version: int
    features: dict[str, FeatureSpec]
    calls: list[_Call]
    specs: list[OutputSpec]
    work_bytes: int
    keys: int
    memo: Any = None


@dataclass(slots=True)
class Request:
    """What is asked, without the data: inputs in the order of their elements, outputs or none for the default ones.

    `combiner` is for every feature whose output does not name one.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[RequestedOutput]
    combiner: str | None = None
    plan: Plan | None = None  # of the latest version it was asked of; threads may race to set it to equal ones


Asked: TypeAlias = Request | memoryview | Callable[[View], Request]


class Inference:
    """One request under way: holds a view from `open` to `close`. One thread at a time."""

    __slots__ = ("_lease", "_lookups", "_view", "arrays", "plan", "raw")

    def __init__(self, lease: Any, request: Asked, max_response: int) -> None:
        self._lease = lease
        self._lookups: list[tuple[_Call, Lookup]] = []
        self.arrays: list[npt.NDArray[Any]] = []
        self.raw: Elements = None  # the keys of a raw body
        self._view: View = lease.__enter__()
        try:
            if isinstance(request, memoryview):
                spec, self.raw = _raw_input(self._view, request)
                request = Request([spec], [])
            elif not isinstance(request, Request):
                request = request(self._view)
            plan = request.plan
            if plan is None or plan.features is not self._view.features:
                plan = request.plan = _plan(self._view, request)
            self.plan: Plan = plan
            if plan.work_bytes > max_response:
                raise TooLarge(
                    f"the look-up takes {plan.work_bytes} bytes of rows, {max_response} are allowed: split it, or raise max_response"
                )
        except BaseException:
            lease.__exit__(None, None, None)
            raise

    def __enter__(self) -> Inference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the view."""
        self._lease.__exit__(None, None, None)

    def begin(self, elements: Sequence[Elements], arrays: list[npt.NDArray[Any]]) -> bool:
        """Answer from memory what it can, without waiting. True if that was all, so that `finish` will not wait either.

        `elements` are the request's inputs; `arrays` one of each planned output's shape and dtype, C-contiguous.
        """
        self.arrays = arrays
        checked = [(call, *_parts(call, elements)) for call in self.plan.calls]
        for call, offsets, weights in checked:
            options: dict[str, Any] = {}
            if call.rows:
                place = call.rows[0]
                options["dtype"] = _ANSWERS[self.plan.specs[place].datatype]
                out = arrays[place]
                options["out"] = out if out.ndim == 2 else out.reshape(math.prod(call.lead), call.table.dim)
                if call.pooled:
                    options["offsets"] = call.starts() if offsets is None else offsets
                    options["weights"] = weights
                    options["combiner"] = call.combiner
            elif not call.found:
                continue
            self._lookups.append((call, self._view.begin(call.feature.name, elements[call.keys], **options)))
        return not any(lookup.pending for _, lookup in self._lookups)

    def finish(self) -> None:
        """Read the rest from disk, and complete the arrays."""
        for call, lookup in self._lookups:
            lookup.finish()
            if call.found:
                self.arrays[call.found[0]].reshape(-1)[:] = lookup.found


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

    def open(self, model: str, version: int | str | None, request: Asked) -> Inference:
        """Begin a request: hold its view, until `Inference.close`, and plan it.

        `request` may be the raw keys of a model's only feature, in the binary form, or a function that makes the request
        for the view that will answer it. `version` None: the active one.
        """
        return Inference(self.model(model).view(version), request, self._max_response)


def _plan(view: View, request: Request) -> Plan:
    calls = _calls(view, request.inputs, _combiners(view, request))
    specs = _outputs(view, calls, request.outputs)
    keys = sum(math.prod(call.spec.shape) for call in calls.values())
    return Plan(view.version, view.features, list(calls.values()), specs, _work_bytes(calls, specs), keys)


def _parts(
    call: _Call, elements: Sequence[Elements]
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float32] | None]:
    """The call's offsets and weights, their values checked."""
    offsets = None if call.offsets is None else _check_offsets(call, elements[call.offsets])
    weights = None if call.weights is None else _check_weights(call, elements[call.weights])
    return offsets, weights


def _combiners(view: View, request: Request) -> dict[str, Combiner | None]:
    """How each feature's bags are combined in this request; None: they are none."""
    default = None if request.combiner is None else _combiner("the request", request.combiner)
    combiners = {name: default or feature.combiner for name, feature in view.features.items()}
    for output in request.outputs:
        if output.combiner is not None:
            where = f"output {shown(output.name)}"
            if output.name not in combiners:
                raise InvalidInput(f"{where}: only a feature's vectors have a combiner; {_known(view)}")
            combiners[output.name] = _combiner(where, output.combiner)
    return combiners


def _combiner(where: str, name: str) -> Combiner:
    try:
        return Combiner(name)
    except ValueError:
        raise InvalidInput(f"{where}: combiner {shown(name)} is not known; ask for sum, mean or sqrtn") from None


def _calls(view: View, inputs: Sequence[TensorSpec], combiners: dict[str, Combiner | None]) -> dict[str, _Call]:
    """The look-ups that the inputs add up to, by feature."""
    by_name: dict[str, int] = {}
    for place, tensor in enumerate(inputs):
        if tensor.name in by_name:
            raise InvalidInput(f"input {shown(tensor.name)} is given twice")
        by_name[tensor.name] = place
    if not by_name:
        raise InvalidInput(f"no inputs; expected keys of {_list(view.features)}")
    calls = {}
    for name, place in by_name.items():
        feature, _, part = name.partition(".")
        if feature not in view.features or part not in ("", "offsets", "weights"):
            raise InvalidInput(f"unknown input {shown(name)}; {_known(view)}")
        if not part:
            calls[name] = _keys(view, view.features[feature], inputs[place], combiners[feature], place)
        elif feature not in by_name:
            raise InvalidInput(f"input {shown(name)} needs the keys too: an input {feature!r}")
    for name, place in by_name.items():
        feature, _, part = name.partition(".")
        if part == "offsets":
            call = calls[feature]
            call.offsets, call.bags = place, _bags(call, inputs[place])
        elif part == "weights":
            _weights_spec(calls[feature], inputs[place])
            calls[feature].weights = place
    return calls


def _keys(view: View, feature: FeatureSpec, tensor: TensorSpec, combiner: Combiner | None, place: int) -> _Call:
    table = view.table_of(feature.name)
    expected = KEY_DATATYPES[table.key]
    if tensor.datatype not in expected:
        raise InvalidInput(
            f"input {feature.name!r}: table {table.name!r} has {table.key} keys; expected {' or '.join(expected)}, came {tensor.datatype}"
        )
    if len(tensor.shape) > 2:
        raise InvalidInput(f"input {feature.name!r}: expected shape [n] or [batch, k], came {list(tensor.shape)}")
    return _Call(feature, table, tensor, combiner, place)


def _bags(call: _Call, tensor: TensorSpec) -> int:
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


def _check_offsets(call: _Call, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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


def _weights_spec(call: _Call, tensor: TensorSpec) -> None:
    name = call.feature.name
    if call.combiner is None:
        raise InvalidInput(f"input '{name}.weights': feature {name!r} has no combiner, so nothing is weighted")
    if tensor.datatype != "FP32" or tensor.shape != call.spec.shape:
        raise InvalidInput(
            f"input '{name}.weights': expected FP32 of shape {list(call.spec.shape)}, one a key; came {tensor.datatype} of {list(tensor.shape)}"
        )


def _check_weights(call: _Call, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(weights).all():
        raise InvalidInput(f"input '{call.feature.name}.weights': a weight is NaN or infinite")
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
            specs.append(OutputSpec(output.name, "BOOL", call.spec.shape, index))
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
        math.prod(call.spec.shape) * call.table.dim * 4
        for call in calls.values()
        if (call.rows and call.pooled) or (call.found and not call.rows)
    )
    return hidden + sum(spec.nbytes for spec in specs)


def _raw_input(view: View, data: memoryview) -> tuple[TensorSpec, Elements]:
    """Keys of the only feature of a model, sent as bytes without a description."""
    if len(view.features) != 1:
        raise InvalidInput(
            f"a raw body needs a model with exactly one input, this one has {len(view.features)}: {_list(view.features)}"
        )
    (name,) = view.features
    datatype = KEY_DATATYPES[view.table_of(name).key][0]
    if datatype == BYTES:
        return TensorSpec(name, BYTES, (1,)), string_element(data)
    width = NUMPY_DTYPE[datatype].itemsize
    if len(data) % width:
        raise InvalidInput(
            f"input {name!r}: a raw body of {datatype} keys has a multiple of {width} bytes, came {len(data)}"
        )
    shape = (len(data) // width,)
    return TensorSpec(name, datatype, shape), elements_from_bytes(name, datatype, shape, data)


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
