"""The tensors of a version's interface. Functions of a view; any thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.engine.reads.view import View
from tierstore.service.dataplane.datatypes import KEY_DATATYPES


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a version's interface; a size of -1 is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


def inputs_of(view: View) -> Iterator[TensorInfo]:
    """Keys of every feature, with optional offsets and weights where it has a combiner;
    and inputs of the dense part.
    """
    session = view.session
    for name, feature in view.features.items():
        # any subset of the features makes a request
        yield TensorInfo(
            name, KEY_DATATYPES[feature.key_type(view.table_of(name))][0], (-1,), optional=len(view.features) > 1
        )
        if feature.combiner is not None:
            yield TensorInfo(f"{name}.offsets", "INT64", (-1,), optional=True)
            yield TensorInfo(f"{name}.weights", "FP32", (-1,), optional=True)
    for tensor in () if session is None else session.bindings.plain.values():
        yield TensorInfo(tensor.name, tensor.datatype, tensor.sizes or (1,), optional=True)  # of look-ups


def outputs_of(view: View) -> Iterator[TensorInfo]:
    """Outputs of the dense part; and of every feature a vector for each key or bag, and whether each key was found."""
    session = view.session
    if session is not None:
        for tensor in session.signature.outputs:
            yield TensorInfo(tensor.name, tensor.datatype, session.sizes(tensor.name))
    for name in view.features:
        yield TensorInfo(name, "FP32", (-1, view.table_of(name).dim))
        yield TensorInfo(f"{name}.found", "BOOL", (-1,))
