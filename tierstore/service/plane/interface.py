"""The interface of a version: the tensors that it takes and gives, whichever protocol asks. Functions of a view; any thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.service.plane.plan import KEY_DATATYPES, View


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that a model takes or gives; -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


def inputs_of(view: View) -> Iterator[TensorInfo]:
    """Keys of every feature; offsets and weights, both optional, where it has a combiner."""
    session = view.predictor
    for name, feature in view.features.items():
        # any subset of the features makes a request
        yield TensorInfo(name, KEY_DATATYPES[view.table_of(name).key][0], (-1,), optional=len(view.features) > 1)
        if feature.combiner is not None:
            yield TensorInfo(f"{name}.offsets", "INT64", (-1,), optional=True)
            yield TensorInfo(f"{name}.weights", "FP32", (-1,), optional=True)
    for tensor in () if session is None else session.wiring.plain.values():
        yield TensorInfo(tensor.name, tensor.datatype, tensor.sizes or (1,), optional=True)  # of look-ups


def outputs_of(view: View) -> Iterator[TensorInfo]:
    """What the dense part gives; a vector a key or bag, and whether each key was found."""
    session = view.predictor
    if session is not None:
        for tensor in session.signature.outputs:
            yield TensorInfo(tensor.name, tensor.datatype, session.sizes(tensor.name))
    for name in view.features:
        yield TensorInfo(name, "FP32", (-1, view.table_of(name).dim))
        yield TensorInfo(f"{name}.found", "BOOL", (-1,))
