"""Scorings: how one dense part runs predictions of a structure, as numbers for reactors (`lookup/scoring.py`), and for
a thread.

Pure functions, and immutable values; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels.codec import address_of
from tierstore.lookup import answer_values, scoring
from tierstore.lookup import plans as layout
from tierstore.predict.binding import FeatureInput
from tierstore.predict.session import DenseSession
from tierstore.predict.signature import BYTES, Dim, Tensor
from tierstore.service.dataplane.datatypes import NUMPY_DTYPE
from tierstore.service.dataplane.inference import AnyRequest
from tierstore.service.dataplane.plan import Call, OutputSpec, Plan, Request
from tierstore.service.reactor.plan_sources import Logged, PlanSource
from tierstore.service.reactor.variants import head_words

Tensors = list[tuple[str, np.dtype[Any], int]]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a thread needs to run the graph: `inputs` and `outputs` with their names, dtypes and ranks.

    `loose`: what was known of the session's outputs when it was made; `joins`: whether requests may be joined.
    `finite`: only numbers can be written, so Python answers where a score is NaN or infinite. `request`: the one that
    it was learned from, if the thread looks up too; then `inputs` are those of the request.
    """

    protocol: str
    logged: Logged
    model: str
    version: int
    session: DenseSession
    loose: frozenset[str]
    inputs: Tensors
    outputs: Tensors
    names: list[str]
    joins: bool
    finite: bool = False
    request: Request | None = None

    def runs_as(self, other: Scoring) -> bool:
        """Whether it is the same run of a graph, so that requests of both, in any protocol, may be joined."""
        mine, its = ((one.inputs, one.outputs, one.loose, one.joins) for one in (self, other))
        return self is other or (self.session is other.session and mine == its)


class Unfit(Exception):
    """Reactors cannot begin predictions of this structure."""


def can_score(plan_source: PlanSource, plan: Plan, session: DenseSession | None) -> bool:
    """Whether a reactor can begin predictions of this structure, of any sizes: only scores."""
    dense = plan.dense
    if session is None or dense is None or plan.numbers is not None or not plan_source.is_plain():
        return False
    if len(plan.specs) != len(dense.positions) or any(not spec.fixed for spec in plan.specs):
        return False
    if any(tensor.datatype == BYTES for tensor, _ in dense.inputs):
        return False
    # Python checks strings that nothing is looked up for
    return not any(call.spec.datatype == BYTES and call.feeds is None for call in plan.calls)


def can_join(plan: Plan) -> bool:
    """Whether requests of a plan's structure may be joined along the first dimension of every tensor.

    That is right for a dense part that treats the rows of a batch one by one, as ranking models do. A graph does not
    say whether it does, so the operator switches joining on, and a graph that has mixed rows in its warm-up is never
    joined. What a graph does say is checked: its inputs and the requested outputs declare one name as their first
    dimension.
    """
    dense, bindings = plan.dense, plan.bindings
    if dense is None or bindings is None or bindings.mixes_rows:
        return False
    declared = [tensor.shape for tensor in bindings.signature.inputs]
    declared += [bindings.outputs[name].shape for name in dense.run.outputs]
    firsts = {shape[0] if shape else None for shape in declared}
    return len(firsts) == 1 and isinstance(next(iter(firsts)), str)


class _Shapes:
    """The checks and inputs of a scoring while it is made (`lookup/scoring.py`).

    A size is a number, or that of a name, as ~name.
    """

    def __init__(self) -> None:
        self.checks: list[tuple[int, int, int]] = []
        self.inputs: list[tuple[int, int, int, int, int]] = []
        self.half = False
        self._numbers: dict[str, int] = {}

    def add_own(self, tensor: Tensor, of: int, rank: int) -> None:
        """Add an input of the graph that is the input `of` of the request, with `rank` sizes."""
        if tensor.shape == ():  # the protocol has no tensors without dimensions
            self.checks.append((of, 0, 1))
            rank = 0
        self.inputs.append((scoring.OWN, of, rank, 0, 0))
        self._check(of, tensor.shape or ())

    def add_feature(self, feature: FeatureInput, number: int, call: Call) -> None:
        """Add an input with the rows of a look-up, by the look-up's number."""
        of, lead = (call.keys, len(call.lead)) if call.offsets is None else (call.offsets, 1)
        declared = feature.tensor.shape
        width = feature.dim if len(feature.shape_for(call.lead)) == lead + 1 else 0
        flat = feature.dim if lead == 2 and not width else 0  # rows are side by side
        self.half |= feature.dtype == "float16"
        self.inputs.append((number, of, lead, width, flat))
        if declared is None:
            return
        last = declared[-1]
        if (width or flat) and isinstance(last, str):
            raise Unfit
        if flat:
            declared = (declared[0], None if last is None else int(last) // flat)
        self._check(of, declared[:lead])

    def _check(self, of: int, declared: Sequence[Dim]) -> None:
        for axis, dim in enumerate(declared):
            if isinstance(dim, int):
                self.checks.append((of, axis, dim))
            elif dim is not None:
                number = self._numbers.setdefault(dim, len(self._numbers))
                if number >= answer_values.MOST_NAMES:
                    raise Unfit
                self.checks.append((of, axis, ~number))

    def score(self, spec: OutputSpec, declared: Sequence[Dim] | None) -> tuple[int, int, list[int]]:
        """An output, whose sizes must follow from those of inputs."""
        if declared is None or len(declared) > layout.MOST_SCORE_RANK:
            raise Unfit
        sizes = []
        for dim in declared:
            if not isinstance(dim, int) and dim not in self._numbers:
                raise Unfit
            sizes.append(dim if isinstance(dim, int) else ~self._numbers[str(dim)])
        return spec.dtype.itemsize, len(sizes), sizes + [0] * (layout.MOST_SCORE_RANK - len(sizes))


def scoring_words(
    number: int, request: AnyRequest, plan: Plan, session: DenseSession, refusal: bytes, *, apart: bool
) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
    """(the words, what they point to: checks, inputs and scores; `refusal` too). Raises Unfit.

    `apart`: the thread that runs the graph looks up too; its inputs are those of the request.
    """
    dense, bindings, shapes = plan.dense, session.bindings, _Shapes()
    assert dense is not None
    assert isinstance(request, Request)
    calls = {call.feature.name: at for at, call in enumerate(plan.calls)}
    own = {tensor.name: position for tensor, position in dense.inputs}
    for tensor in session.signature.inputs:
        feature = bindings.features.get(tensor.name)
        if feature is not None:
            at = calls[tensor.name]
            shapes.add_feature(feature, at, plan.calls[at])
        else:
            of = own[tensor.name]
            shapes.add_own(tensor, of, len(request.inputs[of].shape))
    if apart:
        if any(spec.datatype == BYTES for spec in request.inputs):
            raise Unfit
        shapes.inputs = [(scoring.OWN, of, len(spec.shape), 0, 0) for of, spec in enumerate(request.inputs)]
    scores = [shapes.score(spec, bindings.outputs[spec.name].shape) for spec in plan.specs]
    kinds = layout.CHECK, layout.GRAPH_INPUT, layout.SCORE
    rows: list[list[Any]] = [shapes.checks, shapes.inputs, scores]
    parts = [np.array(part, kind.dtype) for kind, part in zip(kinds, rows, strict=True)]
    words = layout.SCORING.make(
        number=number,
        checks=len(shapes.checks),
        first_check=address_of(parts[0]),
        inputs=len(shapes.inputs),
        first_input=address_of(parts[1]),
        scores=len(scores),
        first_score=address_of(parts[2]),
        half=int(shapes.half),
        apart=int(apart),
        **head_words(refusal),
    )
    return words, parts


def scoring_of(
    plan_source: PlanSource,
    model: str,
    plan: Plan,
    session: DenseSession,
    parts: list[npt.NDArray[Any]],
    *,
    apart: bool,
) -> Scoring:
    """A thread's scoring, for the structure that `scoring_words` was called with and returned `parts` for."""
    request: Request | None = None
    inputs: Tensors = []
    if apart:
        assert isinstance(plan_source.request, Request)
        request = plan_source.request
        inputs = [(spec.name, NUMPY_DTYPE[spec.datatype], len(spec.shape)) for spec in request.inputs]
    else:
        for tensor, row in zip(session.signature.inputs, parts[1], strict=True):
            inputs.append((tensor.name, tensor.dtype, int(row["lead"]) + int(row["width"] > 0)))
    outputs: Tensors = [
        (spec.name, spec.dtype, len(session.bindings.outputs[spec.name].shape or ())) for spec in plan.specs
    ]
    names = [spec.name for spec in plan.specs]
    assert plan.loose is not None
    return Scoring(
        plan_source.protocol, plan_source.logged, model, plan.version, session, plan.loose, inputs, outputs, names,
        can_join(plan) and not apart, plan_source.written.get("as_json", 0) > layout.FLAT, request,
    )  # fmt: skip
