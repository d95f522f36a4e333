"""What a request comes to: its inputs and outputs checked against the features and the dense part of a version.

Pure functions and values that are not changed once made, but for what is said of `Request`; any thread. What a client
sends wrong is InvalidInput. See `dataplane.py` for the protocol's words.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInput
from tierstore.predict.binding import FeatureInput, Run, Wiring
from tierstore.predict.session import DenseSession
from tierstore.predict.signature import Tensor
from tierstore.service.tensors import (
    BYTES,
    NUMPY_DTYPE,
    Elements,
    TensorSpec,
    elements_from_bytes,
    shown,
    string_element,
)
from tierstore.types import Combiner, FeatureSpec, KeyType, TableSpec

KEY_DATATYPES = {KeyType.INT64: ("INT64", "UINT64"), KeyType.UINT64: ("UINT64", "INT64"), KeyType.STRING: (BYTES,)}
ANSWERS = {"FP32": "float32", "FP16": "float16"}
_STRINGS = np.dtype(object)


class Elsewhere(Exception):
    """No error: the request needs the dense part, which another process runs, and is to be handed on."""


class View(Protocol):
    """What the data plane needs of the engine's view."""

    @property
    def version(self) -> int: ...
    @property
    def features(self) -> dict[str, FeatureSpec]: ...
    @property
    def predictor(self) -> DenseSession | None: ...
    @property
    def unserved(self) -> str | None: ...
    @property
    def dense_elsewhere(self) -> bool: ...
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
    """An output that will be answered. `index` is its place among the requested ones, None for a default output.

    Where `fixed` is false its array is there only after the request has run: `shape` may hold -1 until then, `nbytes`
    is 0, and BYTES are an object array of str.
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
    feeds: FeatureInput | None = None  # the input of the dense part that takes the rows
    hidden: bool = False  # whether those go into a buffer of the dense part, not into an output

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
class DensePlan:
    """One run of the dense part. `given`: (input, position of the request's own tensor); `places` of `run`'s outputs."""

    run: Run
    given: list[tuple[Tensor, int]]
    places: list[int]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the request's strings, which are taken apart for it, at the least."""
        return sum(8 * math.prod(self.run.inputs[t.name]) for t, _ in self.given if t.datatype == BYTES)


@dataclass(slots=True)
class Plan:
    """What a request comes to under one version and dense part: checked against both, ready for data. Not changed after.

    `features` are that version's own, and `wiring` and `loose` that dense part's, by which they are told from any other.
    `dense` says how it is run, if it is. `memo` is the transport's, to keep with it, and `joint` the batcher's.
    """

    version: int
    features: dict[str, FeatureSpec]
    wiring: Wiring | None
    loose: frozenset[str] | None
    dense: DensePlan | None
    calls: list[Call]
    specs: list[OutputSpec]
    work_bytes: int
    keys: int
    memo: Any = None
    joint: Any = None

    def fits(self, view: View) -> bool:
        """Whether it is of the view's version and dense part."""
        if self.features is not view.features:
            return False
        session = view.predictor
        return (
            self.wiring is None if session is None else (self.wiring is session.wiring and self.loose is session.loose)
        )


@dataclass(slots=True)
class Request:
    """What is asked, without the data: inputs in the order of their elements, outputs or none for the default ones.

    `combiner` is for every feature whose output does not name one.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[RequestedOutput]
    combiner: str | None = None
    # of the latest two versions it was asked of, as two may be served; threads may race to set them to equal ones
    plan: Plan | None = None
    other_plan: Plan | None = None


def make_plan(view: View, request: Request) -> Plan:
    """Plan a request under a view. Raises InvalidInput, or Elsewhere where this process cannot."""
    session = view.predictor
    if session is None and view.dense_elsewhere and not _features_only(view, request):
        raise Elsewhere
    calls, own = _calls(view, request.inputs, _combiners(view, request))
    specs = _outputs(view, calls, request.outputs)
    dense = None if session is None else _dense_plan(session, calls, own, specs)
    keys = sum(math.prod(call.spec.shape) for call in calls.values())
    return Plan(
        view.version,
        view.features,
        None if session is None else session.wiring,
        None if session is None else session.loose,
        dense,
        list(calls.values()),
        specs,
        _work_bytes(calls, specs, dense),
        keys,
    )


def _features_only(view: View, request: Request) -> bool:
    """Whether a request names features alone, as inputs and as outputs."""
    names = [tensor.name for tensor in request.inputs] + [output.name for output in request.outputs]
    return bool(request.outputs) and all(name.partition(".")[0] in view.features for name in names)


def _dense_plan(
    session: DenseSession, calls: dict[str, Call], own: dict[str, tuple[TensorSpec, int]], specs: list[OutputSpec]
) -> DensePlan | None:
    """The run that answers the dense outputs among `specs`, which it completes; None if there are none."""
    wiring = session.wiring
    places = [place for place, spec in enumerate(specs) if spec.name in wiring.outputs]
    if not places:
        return None
    given = [(wiring.plain[name], place) for name, (_, place) in own.items()]
    run = session.plan(
        {name: calls[name].lead for name in wiring.features if name in calls},
        {name: tensor.shape for name, (tensor, _) in own.items()},
        [specs[place].name for place in places],
    )
    for name, feature in wiring.features.items():
        call = calls[name]
        call.feeds = feature
        call.hidden = not call.rows or specs[call.rows[0]].datatype != feature.tensor.datatype
    for place, shape in zip(places, run.shapes, strict=True):
        spec = specs[place]
        fixed = session.is_fixed(spec.name, shape)
        specs[place] = OutputSpec(spec.name, spec.datatype, (-1,) if shape is None else shape, spec.index, fixed=fixed)
    return DensePlan(run, given, places)


def parts_of(
    call: Call, elements: Sequence[Elements]
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


def _calls(
    view: View, inputs: Sequence[TensorSpec], combiners: dict[str, Combiner | None]
) -> tuple[dict[str, Call], dict[str, tuple[TensorSpec, int]]]:
    """The look-ups that the inputs add up to, by feature; and the dense part's own inputs, with their positions."""
    plain = {} if view.predictor is None else view.predictor.wiring.plain
    by_name: dict[str, int] = {}
    for place, tensor in enumerate(inputs):
        if tensor.name in by_name:
            raise InvalidInput(f"input {shown(tensor.name)} is given twice")
        by_name[tensor.name] = place
    if not by_name:
        raise InvalidInput(f"no inputs; expected keys of {_list(view.features)}")
    calls = {}
    own = {}
    for name, place in by_name.items():
        if name in plain:
            own[name] = _own(plain[name], inputs[place]), place
            continue
        feature, _, part = name.partition(".")
        if feature not in view.features or part not in ("", "offsets", "weights"):
            raise InvalidInput(f"unknown input {shown(name)}; {_known(view)}")
        if not part:
            calls[name] = _keys(view, view.features[feature], inputs[place], combiners[feature], place)
        elif feature not in by_name:
            raise InvalidInput(f"input {shown(name)} needs the keys too: an input {feature!r}")
    for name, place in by_name.items():
        feature, _, part = name.partition(".")
        if name in own:
            continue
        if part == "offsets":
            call = calls[feature]
            call.offsets, call.bags = place, _bags(call, inputs[place])
        elif part == "weights":
            _weights_spec(calls[feature], inputs[place])
            calls[feature].weights = place
    return calls, own


def _own(tensor: Tensor, given: TensorSpec) -> TensorSpec:
    if given.datatype != tensor.datatype:
        raise InvalidInput(
            f"input {given.name!r}: the dense part takes {tensor.datatype} of shape {tensor.shown()}, came {given.datatype}"
        )
    return given


def _keys(view: View, feature: FeatureSpec, tensor: TensorSpec, combiner: Combiner | None, place: int) -> Call:
    table = view.table_of(feature.name)
    expected = KEY_DATATYPES[table.key]
    if tensor.datatype not in expected:
        raise InvalidInput(
            f"input {feature.name!r}: table {table.name!r} has {table.key} keys; expected {' or '.join(expected)}, came {tensor.datatype}"
        )
    if len(tensor.shape) > 2:
        raise InvalidInput(f"input {feature.name!r}: expected shape [n] or [batch, k], came {list(tensor.shape)}")
    return Call(feature, table, tensor, combiner, place)


def _bags(call: Call, tensor: TensorSpec) -> int:
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


def _weights_spec(call: Call, tensor: TensorSpec) -> None:
    name = call.feature.name
    if call.combiner is None:
        raise InvalidInput(f"input '{name}.weights': feature {name!r} has no combiner, so nothing is weighted")
    if tensor.datatype != "FP32" or tensor.shape != call.spec.shape:
        raise InvalidInput(
            f"input '{name}.weights': expected FP32 of shape {list(call.spec.shape)}, one a key; came {tensor.datatype} of {list(tensor.shape)}"
        )


def _check_weights(call: Call, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(weights).all():
        raise InvalidInput(f"input '{call.feature.name}.weights': a weight is NaN or infinite")
    return weights


def _outputs(view: View, calls: dict[str, Call], requested: Sequence[RequestedOutput]) -> list[OutputSpec]:
    """What will be answered, in order; enters each output's place in its feature's call."""
    wanted: list[tuple[int | None, RequestedOutput]] = list(enumerate(requested))
    dense = {} if view.predictor is None else view.predictor.wiring.outputs
    if not wanted:
        wanted = [(None, RequestedOutput(name)) for name in dense or calls]
    seen: set[str] = set()
    specs: list[OutputSpec] = []
    for index, output in wanted:
        if output.name in seen:
            raise InvalidInput(f"output {shown(output.name)} is asked for twice")
        seen.add(output.name)
        if output.name in dense:
            datatype = dense[output.name].datatype
            if output.datatype not in (None, datatype):
                raise InvalidInput(f"output {output.name!r} is {datatype}, not {shown(output.datatype)}")
            specs.append(OutputSpec(output.name, datatype, (-1,), index, fixed=False))  # completed by its run
            continue
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
            if datatype not in ANSWERS:
                raise InvalidInput(
                    f"output {output.name!r}: dtype {shown(datatype)} is not served; ask for FP32 or FP16"
                )
            call.rows.append(len(specs))
            specs.append(OutputSpec(output.name, datatype, (*call.lead, call.table.dim), index))
    return specs


def _work_bytes(calls: dict[str, Call], specs: list[OutputSpec], dense: DensePlan | None) -> int:
    """Bytes of the outputs, and of rows that are looked up only to be pooled, scored or told found from absent."""
    hidden = 0 if dense is None else dense.hidden_bytes
    for call in calls.values():
        answered = bool(call.rows) or call.feeds is not None
        if (answered and call.pooled) or (call.found and not answered):
            hidden += math.prod(call.spec.shape) * call.table.dim * 4
        if call.hidden:
            hidden += math.prod(call.lead) * call.table.dim * 4
    return hidden + sum(spec.nbytes for spec in specs)


def raw_input(view: View, data: memoryview) -> tuple[TensorSpec, Elements]:
    """Keys of the only feature of a model, sent as bytes without a description."""
    plain = {} if view.predictor is None else view.predictor.wiring.plain
    if len(view.features) != 1 or plain:
        names = [*view.features, *plain]
        raise InvalidInput(
            f"a raw body needs a model with exactly one input, this one has {len(names)}: {_list(names)}"
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


def _list(features: Collection[str]) -> str:
    names = ", ".join(sorted(features)[:20])
    return names if len(features) <= 20 else f"{names}, … ({len(features)} in all)"


def _known(view: View) -> str:
    text = f"the features are {_list(view.features)}, with <feature>.offsets and .weights as inputs and <feature>.found as output"
    if view.predictor is not None:
        wiring = view.predictor.wiring
        text += (
            f"; the dense part takes {_list(wiring.plain) or 'no input of its own'} and gives {_list(wiring.outputs)}"
        )
    elif view.unserved is not None:
        text += f"; the dense part is kept but not served: {view.unserved}"
    return text
