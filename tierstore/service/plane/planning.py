"""A request made a plan: its inputs and outputs checked against the features and the dense part of a version.

Pure functions; any thread. What a client sends wrong is InvalidInput. See `dataplane.py` for the protocol's words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tierstore.errors import InvalidInput
from tierstore.predict.session import DenseSession
from tierstore.predict.signature import Tensor
from tierstore.service.plane.bags import bags_of, check_weights_spec
from tierstore.service.plane.hps import is_hps, plan_hps
from tierstore.service.plane.plan import (
    ANSWERS,
    KEY_DATATYPES,
    Call,
    DensePlan,
    OutputSpec,
    Plan,
    Request,
    RequestedOutput,
    View,
)
from tierstore.service.plane.tensors import (
    BYTES,
    NUMPY_DTYPE,
    Elements,
    TensorSpec,
    elements_from_bytes,
    listed,
    shown,
    string_element,
)
from tierstore.types import Combiner, FeatureSpec


def make_plan(view: View, request: Request) -> Plan:
    """Plan a request under a view. Raises InvalidInput."""
    if is_hps(view, request):
        return plan_hps(view, request)
    session = view.predictor
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
        raise InvalidInput(f"no inputs; expected keys of {listed(sorted(view.features))}")
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
            call.offsets, call.bags = place, bags_of(call, inputs[place])
        elif part == "weights":
            check_weights_spec(calls[feature], inputs[place])
            calls[feature].weights = place
    for call in calls.values():
        call.settle()
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
            hidden += math.prod(call.shape) * 4
    return hidden + sum(spec.nbytes for spec in specs)


def raw_input(view: View, data: memoryview) -> tuple[TensorSpec, Elements]:
    """Keys of the only feature of a model, sent as bytes without a description."""
    plain = {} if view.predictor is None else view.predictor.wiring.plain
    if len(view.features) != 1 or plain:
        names = [*view.features, *plain]
        raise InvalidInput(
            f"a raw body needs a model with exactly one input, this one has {len(names)}: {listed(sorted(names))}"
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


def _known(view: View) -> str:
    text = f"the features are {listed(sorted(view.features))}, with <feature>.offsets and .weights as inputs and <feature>.found as output"
    if view.predictor is not None:
        wiring = view.predictor.wiring
        text += f"; the dense part takes {listed(sorted(wiring.plain)) or 'no input of its own'} and gives {listed(sorted(wiring.outputs))}"
    elif view.unserved is not None:
        text += f"; the dense part is kept but not served: {view.unserved}"
    return text
