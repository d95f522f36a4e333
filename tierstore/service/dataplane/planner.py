"""The planner: makes plans of requests, checking inputs and outputs against a version's features and dense part.

Pure functions; any thread. A malformed request is InvalidInput. `inference.py` lists the inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tierstore.engine.reads.view import View
from tierstore.errors import InvalidInput, shown
from tierstore.predict.session import DenseSession
from tierstore.predict.signature import Tensor
from tierstore.service.dataplane.datatypes import BYTES, KEY_DATATYPES, NUMPY_DTYPE, VECTOR_DATATYPES
from tierstore.service.dataplane.hps import is_hps, plan_hps
from tierstore.service.dataplane.plan import (
    Call,
    DensePlan,
    OutputSpec,
    Plan,
    Request,
    RequestedOutput,
    bags_of,
    check_weights_spec,
)
from tierstore.service.dataplane.plan_cache import PlanCache
from tierstore.service.dataplane.tensors import Elements, TensorSpec, elements_from_bytes, listed, string_element
from tierstore.types import Combiner, FeatureSpec


def make_plan(view: View, request: Request) -> Plan:
    """Plan a request under a view. Raises InvalidInput."""
    if is_hps(view, request):
        return plan_hps(view, request)
    session = view.session
    calls, own = _calls(view, request.inputs, _combiners(view, request))
    specs = _outputs(view, calls, request.outputs)
    dense = None if session is None else _dense_plan(session, calls, own, specs)
    keys = sum(math.prod(call.spec.shape) for call in calls.values())
    return Plan.under(view, dense, list(calls.values()), specs, _work_bytes(calls, specs, dense), keys)


class Planner:
    """Plans requests. A request that differs only in sizes from an earlier one costs a fraction of `make_plan`. Any
    thread.
    """

    def __init__(self) -> None:
        self._plans = PlanCache()  # the first of each structure

    def plan(self, model: str, view: View, request: Request) -> Plan:
        """`make_plan` for a view of `model`."""
        if view.session is None:
            return make_plan(view, request)
        inputs = tuple([(tensor.name, tensor.datatype, len(tensor.shape)) for tensor in request.inputs])
        outputs = tuple([(output.name, output.datatype, output.combiner) for output in request.outputs])
        key = model, view.version, inputs, outputs, request.combiner
        like: Plan | None = self._plans.find(key)
        if like is not None and like.fits(view):
            return _resized(like, view.session, request)
        plan = make_plan(view, request)
        if _is_resizable(plan):
            self._plans.keep(key, plan)
        return plan


def _is_resizable(plan: Plan) -> bool:
    """Whether a plan has only rows for the dense part and its outputs."""
    dense = plan.dense
    return dense is not None and all(call.gathered for call in plan.calls) and len(plan.specs) == len(dense.positions)


def _resized(like: Plan, session: DenseSession, request: Request) -> Plan:
    """The plan of a request with the structure of a planned one, and other sizes. Raises InvalidInput."""
    assert like.dense is not None
    calls = [call.resized(request.inputs[call.keys]) for call in like.calls]
    inputs = like.dense.inputs
    run = session.plan(
        {call.feature.name: call.lead for call in calls},
        {tensor.name: request.inputs[position].shape for tensor, position in inputs},
        [spec.name for spec in like.specs],
    )
    specs = [
        OutputSpec(
            spec.name, spec.datatype, (-1,) if shape is None else shape, spec.index, fixed=session.is_fixed(spec.name,
            shape)
        )
        for spec, shape in zip(like.specs, run.shapes, strict=True)
    ]  # fmt: skip
    dense = replace(like.dense, run=run)
    work_bytes = dense.hidden_bytes + sum(spec.nbytes for spec in specs)
    keys = 0
    for call in calls:
        keys += call.shape[0]
        work_bytes += call.shape[0] * call.shape[1] * 4
    return replace(like, dense=dense, calls=calls, specs=specs, work_bytes=work_bytes, keys=keys)


def _dense_plan(
    session: DenseSession,
    calls: dict[str, Call],
    own: dict[str, tuple[TensorSpec, int]],
    specs: list[OutputSpec],
) -> DensePlan | None:
    """The run that answers the dense outputs among `specs`, which it completes; None if there are none."""
    bindings = session.bindings
    positions = [position for position, spec in enumerate(specs) if spec.name in bindings.outputs]
    if not positions:
        return None
    inputs = [(bindings.plain[name], position) for name, (_, position) in own.items()]
    run = session.plan(
        {name: calls[name].lead for name in bindings.features if name in calls},
        {name: tensor.shape for name, (tensor, _) in own.items()},
        [specs[position].name for position in positions],
    )
    for name, feature in bindings.features.items():
        call = calls[name]
        call.feeds = feature
        call.hidden = not call.rows or specs[call.rows[0]].datatype != feature.tensor.datatype
        call.gathered = not call.rows and not call.found and not call.pooled
    for position, shape in zip(positions, run.shapes, strict=True):
        spec = specs[position]
        fixed = session.is_fixed(spec.name, shape)
        specs[position] = OutputSpec(
            spec.name, spec.datatype, (-1,) if shape is None else shape, spec.index, fixed=fixed
        )
    hidden = [name for name, call in calls.items() if call.hidden]
    gathered = tuple(name for name, call in calls.items() if call.gathered)
    return DensePlan(run, inputs, positions, hidden, gathered)


def _combiners(view: View, request: Request) -> dict[str, Combiner | None]:
    """How each feature's bags are combined in this request; None for a feature without bags."""
    default = None if request.combiner is None else _combiner("the request", request.combiner)
    combiners = {name: default or feature.combiner for name, feature in view.features.items()}
    for output in request.outputs:
        if output.combiner is not None:
            where = f"output {shown(output.name)}"
            if output.name not in combiners:
                raise InvalidInput(f"{where}: only a feature's vectors have a combiner; {_interface_text(view)}")
            combiners[output.name] = _combiner(where, output.combiner)
    return combiners


def _combiner(where: str, name: str) -> Combiner:
    try:
        return Combiner(name)
    except ValueError:
        raise InvalidInput(f"{where}: combiner {shown(name)} is unknown; request sum, mean or sqrtn") from None


def _calls(
    view: View, inputs: Sequence[TensorSpec], combiners: dict[str, Combiner | None]
) -> tuple[dict[str, Call], dict[str, tuple[TensorSpec, int]]]:
    """The look-ups of the inputs, by feature; and the dense part's own inputs, with their positions."""
    plain = {} if view.session is None else view.session.bindings.plain
    by_name: dict[str, int] = {}
    for position, tensor in enumerate(inputs):
        if tensor.name in by_name:
            raise InvalidInput(f"input {shown(tensor.name)} is given twice")
        by_name[tensor.name] = position
    if not by_name:
        raise InvalidInput(f"no inputs; expected keys of {listed(sorted(view.features))}")
    calls = {}
    own = {}
    for name, position in by_name.items():
        if name in plain:
            own[name] = _own(plain[name], inputs[position]), position
            continue
        feature, _, part = name.partition(".")
        if feature not in view.features or part not in ("", "offsets", "weights"):
            raise InvalidInput(f"unknown input {shown(name)}; {_interface_text(view)}")
        if not part:
            calls[name] = _keys(view, view.features[feature], inputs[position], combiners[feature], position)
        elif feature not in by_name:
            raise InvalidInput(f"input {shown(name)} needs the keys too: an input {feature!r}")
    for name, position in by_name.items():
        feature, _, part = name.partition(".")
        if name in own:
            continue
        if part == "offsets":
            call = calls[feature]
            call.offsets, call.bags = position, bags_of(call, inputs[position])
        elif part == "weights":
            check_weights_spec(calls[feature], inputs[position])
            calls[feature].weights = position
    for call in calls.values():
        call.resolve()
    return calls, own


def _own(tensor: Tensor, received: TensorSpec) -> TensorSpec:
    if received.datatype != tensor.datatype:
        raise InvalidInput(
            f"input {received.name!r}: the dense part takes {tensor.datatype} of shape {tensor.shown()}, got "
            f"{received.datatype}"
        )
    return received


def _keys(view: View, feature: FeatureSpec, tensor: TensorSpec, combiner: Combiner | None, position: int) -> Call:
    table = view.table_of(feature.name)
    expected = KEY_DATATYPES[feature.key_type(table)]
    if tensor.datatype not in expected:
        what = f"table {table.name!r} has {table.key}" if feature.hash is None else f"it hashes {feature.hash.key}"
        raise InvalidInput(
            f"input {feature.name!r}: {what} keys; expected {' or '.join(expected)}, got {tensor.datatype}"
        )
    if len(tensor.shape) > 2:
        raise InvalidInput(f"input {feature.name!r}: expected shape [n] or [batch, k], got {list(tensor.shape)}")
    return Call(feature, table, tensor, combiner, position)


def _outputs(view: View, calls: dict[str, Call], requested: Sequence[RequestedOutput]) -> list[OutputSpec]:
    """The planned outputs, in order; notes the position of each in its feature's call."""
    wanted: list[tuple[int | None, RequestedOutput]] = list(enumerate(requested))
    dense = {} if view.session is None else view.session.bindings.outputs
    if not wanted:
        wanted = [(None, RequestedOutput(name)) for name in dense or calls]
    seen: set[str] = set()
    specs: list[OutputSpec] = []
    for index, output in wanted:
        if output.name in seen:
            raise InvalidInput(f"output {shown(output.name)} is requested twice")
        seen.add(output.name)
        if output.name in dense:
            datatype = dense[output.name].datatype
            if output.datatype not in (None, datatype):
                raise InvalidInput(f"output {output.name!r} is {datatype}, not {shown(output.datatype)}")
            specs.append(OutputSpec(output.name, datatype, (-1,), index, fixed=False))  # completed by its run
            continue
        feature, _, part = output.name.partition(".")
        if feature not in view.features or part not in ("", "found"):
            raise InvalidInput(f"unknown output {shown(output.name)}; {_interface_text(view)}")
        if (call := calls.get(feature)) is None:
            raise InvalidInput(f"output {shown(output.name)} needs an input {feature!r}")
        if part:
            if output.datatype not in (None, "BOOL"):
                raise InvalidInput(f"output {output.name!r} is BOOL, not {shown(output.datatype)}")
            call.found.append(len(specs))
            specs.append(OutputSpec(output.name, "BOOL", call.spec.shape, index))
        else:
            datatype = output.datatype or "FP32"
            if datatype not in VECTOR_DATATYPES:
                raise InvalidInput(
                    f"output {output.name!r}: dtype {shown(datatype)} is not served; request FP32 or FP16"
                )
            call.rows.append(len(specs))
            specs.append(OutputSpec(output.name, datatype, (*call.lead, call.table.dim), index))
    return specs


def _work_bytes(calls: dict[str, Call], specs: list[OutputSpec], dense: DensePlan | None) -> int:
    """Bytes of the outputs, and of rows that are looked up only to be pooled, scored, or checked for existence."""
    hidden = 0 if dense is None else dense.hidden_bytes
    for call in calls.values():
        answered = bool(call.rows) or call.feeds is not None
        if (answered and call.pooled) or (call.found and not answered):
            hidden += math.prod(call.spec.shape) * call.table.dim * 4
        if call.hidden:
            hidden += math.prod(call.shape) * 4
    return hidden + sum(spec.nbytes for spec in specs)


def raw_input(view: View, data: memoryview) -> tuple[TensorSpec, Elements]:
    """Keys of a model's only feature, sent as bytes without a description."""
    plain = {} if view.session is None else view.session.bindings.plain
    if len(view.features) != 1 or plain:
        names = [*view.features, *plain]
        raise InvalidInput(
            f"a raw body needs a model with exactly one input, this one has {len(names)}: {listed(sorted(names))}"
        )
    ((name, feature),) = view.features.items()
    datatype = KEY_DATATYPES[feature.key_type(view.table_of(name))][0]
    if datatype == BYTES:
        return TensorSpec(name, BYTES, (1,)), string_element(data)
    width = NUMPY_DTYPE[datatype].itemsize
    if len(data) % width:
        raise InvalidInput(
            f"input {name!r}: a raw body of {datatype} keys has a multiple of {width} bytes, got {len(data)}"
        )
    shape = (len(data) // width,)
    return TensorSpec(name, datatype, shape), elements_from_bytes(name, datatype, shape, data)


def _interface_text(view: View) -> str:
    text = (
        f"the features are {listed(sorted(view.features))}, with <feature>.offsets and .weights as inputs and "
        "<feature>.found as output"
    )
    if view.session is not None:
        bindings = view.session.bindings
        text += (
            f"; the dense part takes {listed(sorted(bindings.plain)) or 'no input of its own'} and gives "
            f"{listed(sorted(bindings.outputs))}"
        )
    elif view.unserved is not None:
        text += f"; the dense part is kept but not served: {view.unserved}"
    return text
