"""TensorFlow Serving's predict requests as requests of the data plane, from JSON or protobuf.

Both forms name their inputs, so their order means nothing: a request has its tensors in the order of their names. Any
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tierstore.engine.reads.view import View
from tierstore.errors import InvalidInput
from tierstore.service.dataplane.plan import OutputSpec, Request, RequestedOutput
from tierstore.service.dataplane.tensors import Elements, TensorSpec, listed
from tierstore.service.protocols.tfserving.signature import DEFAULT, LOOKUP_HALF
from tierstore.types import FeatureSpec

Tensor = tuple[TensorSpec, Elements]


def request_of(
    view: View, signature: str, tensors: Iterable[Tensor], picked: Sequence[str] | None
) -> tuple[Request, list[Elements]]:
    """(the request, the elements of its inputs). `picked` are the outputs that the request names, if it names any."""
    ordered = sorted(tensors, key=lambda tensor: tensor[0].name)
    inputs = [spec for spec, _ in ordered]
    outputs = _requested(view.features, signature, [spec.name for spec in inputs], picked)
    return Request(inputs, outputs), [elements for _, elements in ordered]


def room_for(specs: Sequence[OutputSpec]) -> list[Any]:
    """An array for each output, None if its shape is known only after the run."""
    return [np.empty(spec.shape, spec.dtype) if spec.fixed else None for spec in specs]


def _requested(
    features: dict[str, FeatureSpec], signature: str, inputs: Sequence[str], picked: Sequence[str] | None
) -> list[RequestedOutput]:
    """The requested outputs, in the order of their names; none for the default ones."""
    if picked:
        names: Iterable[str] = picked
    elif signature == DEFAULT:
        return []
    else:
        names = [name for name in inputs if name in features]
        if not names:
            raise InvalidInput(f"signature {signature!r} answers vectors; expected keys of {listed(sorted(features))}")
    half = "FP16" if signature == LOOKUP_HALF else None
    return [RequestedOutput(name, half if name in features else None) for name in sorted(names)]
