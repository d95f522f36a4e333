"""Several predict requests as one: whether they may be joined, the joined request, and its answer taken apart.

Requests are joined along the batch dimension, which is the first of every tensor. That is right for a dense part that
treats the rows of a batch one by one, as ranking models do; whether it does cannot be told from the graph, so joining is
for the operator to switch on. What can be told is checked: all inputs of the dense part, and all outputs that are asked
for, declare one and the same name as their first dimension, and in the request that has one size everywhere.

Pure functions and values that are not changed once made; any thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.service.plane.bags import parts_of
from tierstore.service.plane.plan import OutputSpec, Plan, Request
from tierstore.service.plane.tensors import BYTES, Elements, TensorSpec

_FLAT = "flat"  # keys and weights of ragged bags: the offsets say which are whose


@dataclass(frozen=True, slots=True)
class Joint:
    """What a request that may be joined comes to: `key` is equal for those that may be joined with one another."""

    key: Hashable
    items: int


def joint_of(request: Request, plan: Plan) -> Joint | None:
    """Whether a request may be joined with others, and with which."""
    dense = plan.dense
    if dense is None or plan.wiring is None or not all(spec.fixed for spec in plan.specs):
        return None
    wiring = plan.wiring
    declared = [tensor.shape for tensor in wiring.signature.inputs]
    declared += [wiring.outputs[name].shape for name in dense.run.outputs]
    firsts = {shape[0] if shape else None for shape in declared}
    if len(firsts) != 1 or not isinstance(next(iter(firsts)), str):
        return None
    own = [request.inputs[place] for _, place in dense.given]
    sizes = {call.lead[0] for call in plan.calls} | {tensor.shape[0] for tensor in own}
    if len(sizes) != 1 or sizes == {0}:
        return None
    kinds: list[Hashable] = [tensor.shape[1:] for tensor in request.inputs]
    for call in plan.calls:
        if call.offsets is not None:
            kinds[call.offsets] = "offsets"
            kinds[call.keys] = _FLAT
            if call.weights is not None:
                kinds[call.weights] = _FLAT
    inputs = tuple((tensor.name, tensor.datatype, kind) for tensor, kind in zip(request.inputs, kinds, strict=True))
    outputs = tuple((output.name, output.datatype, output.combiner) for output in request.outputs)
    return Joint((inputs, outputs, request.combiner), sizes.pop())


@dataclass(frozen=True, slots=True)
class Part:
    """One of the requests that are joined, with its elements."""

    request: Request
    plan: Plan
    elements: Sequence[Elements]

    def check(self) -> None:
        """InvalidInput where its offsets or weights are wrong: joined, they could pass for those of another request."""
        for call in self.plan.calls:
            parts_of(call, self.elements)


def joined_shapes(parts: Sequence[Part]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the inputs of the joined request."""
    first = parts[0].request.inputs
    return tuple(
        (sum(part.request.inputs[i].shape[0] for part in parts), *tensor.shape[1:]) for i, tensor in enumerate(first)
    )


def joined_request(first: Request, shapes: Sequence[tuple[int, ...]]) -> Request:
    """The request that stands for all that are joined."""
    inputs = [TensorSpec(t.name, t.datatype, shape) for t, shape in zip(first.inputs, shapes, strict=True)]
    return Request(inputs, first.outputs, first.combiner)


def joined_elements(parts: Sequence[Part]) -> list[Elements]:
    """The elements of all parts, one after the other; offsets moved on by the keys before them."""
    first = parts[0]
    keys_of = {call.offsets: call.keys for call in first.plan.calls if call.offsets is not None}
    joined: list[Elements] = []
    for place, tensor in enumerate(first.request.inputs):
        each = [part.elements[place] for part in parts]
        if place in keys_of:
            lengths = [part.request.inputs[keys_of[place]].shape[0] for part in parts]
            before = np.cumsum([0, *lengths[:-1]])
            each = [offsets + keys for offsets, keys in zip(each, before, strict=True)]
        joined.append(pa.concat_arrays(each) if tensor.datatype == BYTES else np.concatenate(each))
    return joined


def same_answers(specs: Sequence[OutputSpec], parts: Sequence[Part]) -> bool:
    """Whether the joined request answers just what each part's own plan has promised."""
    return all(
        [(spec.name, spec.datatype, spec.shape[1:]) for spec in specs]
        == [(spec.name, spec.datatype, spec.shape[1:]) for spec in part.plan.specs]
        for part in parts
    )


def take_apart(joined: Sequence[npt.NDArray[Any]], parts: Sequence[Part], arrays: Sequence[Sequence[Any]]) -> None:
    """Copy to each part's `arrays` what of the `joined` answer is its own."""
    begins = [0] * len(joined)
    for part, own in zip(parts, arrays, strict=True):
        for i, spec in enumerate(part.plan.specs):
            end = begins[i] + spec.shape[0]
            own[i][...] = joined[i][begins[i] : end]
            begins[i] = end
