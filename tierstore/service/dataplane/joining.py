"""Joining predict requests: whether requests may be joined, the joined request, and its outputs split again.

Requests are joined along the batch dimension, the first of every tensor. That is right for a dense part that treats
the rows of a batch one by one, as ranking models do. A graph does not say whether it does, so the operator must switch
joining on, and a graph that a trial has seen mix rows is never joined. What a graph does say is checked: all inputs of
the dense part, and all requested outputs, declare the same name as their first dimension, and in the request that has
one size everywhere.

Pure functions, and immutable values; any thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.service.dataplane.datatypes import BYTES
from tierstore.service.dataplane.plan import OutputSpec, Plan, Request, parts_of
from tierstore.service.dataplane.tensors import Elements, TensorSpec

_RAGGED = "flat"  # keys and weights of ragged bags, which offsets divide


@dataclass(frozen=True, slots=True)
class Joint:
    """How a request may be joined: `key` is equal for requests that may be joined; `items` is its batch size."""

    key: Hashable
    items: int


def joint_of(request: Request, plan: Plan) -> Joint | None:
    """How a request may be joined with others; None if it may not."""
    dense = plan.dense
    if dense is None or not can_join(plan):
        return None
    own = [request.inputs[position] for _, position in dense.inputs]
    sizes = {call.lead[0] for call in plan.calls} | {tensor.shape[0] for tensor in own}
    if len(sizes) != 1 or sizes == {0}:
        return None
    kinds: list[Hashable] = [tensor.shape[1:] for tensor in request.inputs]
    for call in plan.calls:
        if call.offsets is not None:
            kinds[call.offsets] = "offsets"
            kinds[call.keys] = _RAGGED
            if call.weights is not None:
                kinds[call.weights] = _RAGGED
    inputs = tuple((tensor.name, tensor.datatype, kind) for tensor, kind in zip(request.inputs, kinds, strict=True))
    outputs = tuple((output.name, output.datatype, output.combiner) for output in request.outputs)
    return Joint((inputs, outputs, request.combiner), sizes.pop())


def can_join(plan: Plan) -> bool:
    """Whether requests of a plan's structure may be joined with others, if their sizes agree."""
    dense, bindings = plan.dense, plan.bindings
    if dense is None or bindings is None or bindings.mixes_rows or not all(spec.fixed for spec in plan.specs):
        return False
    declared = [tensor.shape for tensor in bindings.signature.inputs]
    declared += [bindings.outputs[name].shape for name in dense.run.outputs]
    firsts = {shape[0] if shape else None for shape in declared}
    return len(firsts) == 1 and isinstance(next(iter(firsts)), str)


@dataclass(frozen=True, slots=True)
class JoinedRequest:
    """One of the joined requests, with its elements."""

    request: Request
    plan: Plan
    elements: Sequence[Elements]

    def check(self) -> None:
        """InvalidInput if its offsets or weights are wrong: in the joined request they might pass as another
        request's.
        """
        for call in self.plan.calls:
            parts_of(call, self.elements)


def joined_shapes(parts: Sequence[JoinedRequest]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the inputs of the joined request."""
    first = parts[0].request.inputs
    return tuple(
        (sum(part.request.inputs[i].shape[0] for part in parts), *tensor.shape[1:]) for i, tensor in enumerate(first)
    )


def joined_request(first: Request, shapes: Sequence[tuple[int, ...]]) -> Request:
    """The request that combines all parts."""
    inputs = [TensorSpec(t.name, t.datatype, shape) for t, shape in zip(first.inputs, shapes, strict=True)]
    return Request(inputs, first.outputs, first.combiner)


def joined_elements(parts: Sequence[JoinedRequest]) -> list[Elements]:
    """The elements of all parts, one after the other; offsets are raised by the keys before them."""
    first = parts[0]
    keys_of = {call.offsets: call.keys for call in first.plan.calls if call.offsets is not None}
    joined: list[Elements] = []
    for position, tensor in enumerate(first.request.inputs):
        each = [part.elements[position] for part in parts]
        if position in keys_of:
            lengths = [part.request.inputs[keys_of[position]].shape[0] for part in parts]
            before = np.cumsum([0, *lengths[:-1]])
            each = [offsets + keys for offsets, keys in zip(each, before, strict=True)]
        joined.append(pa.concat_arrays(each) if tensor.datatype == BYTES else np.concatenate(each))
    return joined


def same_answers(specs: Sequence[OutputSpec], parts: Sequence[JoinedRequest]) -> bool:
    """Whether the joined request has the outputs that each part's own plan promises."""
    return all(
        [(spec.name, spec.datatype, spec.shape[1:]) for spec in specs]
        == [(spec.name, spec.datatype, spec.shape[1:]) for spec in part.plan.specs]
        for part in parts
    )


def split_outputs(
    joined: Sequence[npt.NDArray[Any]], parts: Sequence[JoinedRequest], arrays: Sequence[Sequence[Any]]
) -> None:
    """Copy to each part's `arrays` its rows of the `joined` outputs."""
    begins = [0] * len(joined)
    for part, own in zip(parts, arrays, strict=True):
        for i, spec in enumerate(part.plan.specs):
            end = begins[i] + spec.shape[0]
            own[i][...] = joined[i][begins[i] : end]
            begins[i] = end
