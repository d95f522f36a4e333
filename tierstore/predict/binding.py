"""How a dense part stands to the features of its model: which inputs are rows of features, and what shapes a run has.

Immutable values and pure functions; any thread may use them. What does not fit is InvalidInput and names the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierstore.errors import InvalidInput
from tierstore.predict.signature import Dim, Shape, Signature, Tensor
from tierstore.types import FeatureSpec, TableSpec

_ROW_DTYPES = {"FP32": "float32", "FP16": "float16"}
PARTS = ("offsets", "weights", "found")  # what may follow a feature's name and a dot in a request


@dataclass(frozen=True, slots=True)
class FeatureInput:
    """An input that takes the rows of the feature of its name, `dim` numbers each, as `dtype` (float32 or float16)."""

    tensor: Tensor
    dim: int
    dtype: str

    def shape_for(self, lead: Shape) -> Shape:
        """The shape in which rows [*lead, dim] are given to the input; the bytes stay where they are.

        `lead` is [n] or [bags] for a row each, [batch, k] for k rows each.
        """
        declared = self.tensor.shape
        if declared is None or len(declared) == len(lead) + 1:
            return (*lead, self.dim)
        if len(declared) == 2 and len(lead) == 2:
            return lead[0], lead[1] * self.dim
        if len(declared) == 1 and len(lead) == 1 and self.dim == 1:
            return lead
        keys = {1: "[n]", 2: "[n]", 3: "[batch, k]"}[len(declared)]
        raise InvalidInput(
            f"input {self.tensor.name!r}: the dense part takes {self.tensor.shown()}, so its keys are {keys}; "
            f"came {'bags' if len(lead) == 1 else 'keys'} of shape {list(lead)}"
        )


@dataclass(frozen=True, slots=True)
class Wiring:
    """A signature, and which of its inputs are features (`features`) or tensors of the request's own (`plain`)."""

    signature: Signature
    features: Mapping[str, FeatureInput]
    plain: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    def plan(
        self, leads: Mapping[str, Shape], shapes: Mapping[str, Shape], wanted: Sequence[str], loose: frozenset[str]
    ) -> Run:
        """Check the shapes of one request, and say what they come to.

        `leads` are the shapes of the features' answers before their last dimension, `shapes` those of the plain inputs,
        `wanted` names of outputs, `loose` outputs whose declared shapes are not to be relied on. Inputs that the dense
        part does not have are passed over. Raises InvalidInput.
        """
        missing = [t.name for t in self.signature.inputs if t.name not in leads and t.name not in shapes]
        if missing:
            given = ", ".join([*leads, *shapes]) or "none"
            raise InvalidInput(f"the dense part needs the inputs {', '.join(missing)} as well; came {given}")
        known: dict[str, tuple[int, str]] = {}
        inputs: dict[str, Shape] = {}
        for tensor in self.signature.inputs:
            feature = self.features.get(tensor.name)
            shape = shapes[tensor.name] if feature is None else feature.shape_for(leads[tensor.name])
            if feature is None and tensor.shape == () and shape == (1,):
                shape = ()  # the protocol has no tensors without dimensions
            _unify(tensor, shape, known)
            inputs[tensor.name] = shape
        outputs = []
        for name in wanted:
            declared = self.outputs[name].shape
            outputs.append(None if declared is None or name in loose else tuple(_resolved(d, known) for d in declared))
        return Run(inputs, tuple(wanted), tuple(outputs))


@dataclass(frozen=True, slots=True)
class Run:
    """Shapes of one run: of every input by name; of the outputs in order, with -1 where it is known only after the run.

    None for an output whose number of dimensions is not known either.
    """

    inputs: Mapping[str, Shape]
    outputs: tuple[str, ...]
    shapes: tuple[Shape | None, ...]


def wire(signature: Signature, features: Mapping[str, FeatureSpec], tables: Mapping[str, TableSpec]) -> Wiring:
    """Match a dense part with the features of a model. Raises InvalidInput naming the input, what was expected, and what came."""
    wired: dict[str, FeatureInput] = {}
    plain: dict[str, Tensor] = {}
    for tensor in signature.inputs:
        feature = features.get(tensor.name)
        if feature is not None:
            wired[tensor.name] = _wire(tensor, feature, tables[feature.table])
            continue
        owner, _, part = tensor.name.partition(".")
        if owner in features and part in PARTS:
            raise InvalidInput(
                f"input {tensor.name!r}: that name means a part of feature {owner!r}; rename the dense part's input"
            )
        plain[tensor.name] = tensor
    outputs = {tensor.name: tensor for tensor in signature.outputs}
    for name in outputs:
        owner, _, part = name.partition(".")
        if owner in features and part in ("", *PARTS):
            raise InvalidInput(f"output {name!r}: that name means feature {owner!r}; rename the dense part's output")
    return Wiring(signature, wired, plain, outputs)


def _wire(tensor: Tensor, feature: FeatureSpec, table: TableSpec) -> FeatureInput:
    name, dim = tensor.name, table.dim
    dtype = _ROW_DTYPES.get(tensor.datatype)
    if dtype is None:
        raise InvalidInput(
            f"input {name!r} is a feature, so its rows come as FP32 or FP16; the dense part declares {tensor.datatype}: "
            "cast it inside the graph, or give the input another name"
        )
    shape = tensor.shape
    pooled = feature.combiner is not None
    expected = f"[batch, {dim}]" if pooled else f"[n, {dim}] or [batch, k, {dim}] (or [batch, k * {dim}])"
    fits = shape is None
    if shape is not None:
        last = shape[-1] if shape else 0
        open_end = not isinstance(last, int)
        if len(shape) == 2:
            fits = open_end or last == dim or (not pooled and isinstance(last, int) and last > 0 and last % dim == 0)
        elif len(shape) == 3:
            fits = not pooled and (open_end or last == dim)
        elif len(shape) == 1:
            fits = dim == 1
    if not fits:
        kind = f"pooled by {feature.combiner}" if pooled else "without a combiner"
        raise InvalidInput(
            f"input {name!r}: feature {feature.name!r} ({kind}) reads table {table.name!r} of dim {dim}; "
            f"expected {expected}, the dense part declares {tensor.shown()}"
        )
    return FeatureInput(tensor, dim, dtype)


def _unify(tensor: Tensor, shape: Shape, known: dict[str, tuple[int, str]]) -> None:
    declared = tensor.shape
    if declared is None:
        return
    if len(declared) != len(shape) or any(
        isinstance(d, int) and d != size for d, size in zip(declared, shape, strict=True)
    ):
        raise InvalidInput(f"input {tensor.name!r}: the dense part takes shape {tensor.shown()}, came {list(shape)}")
    for dim, size in zip(declared, shape, strict=True):
        if isinstance(dim, str):
            first, owner = known.setdefault(dim, (size, tensor.name))
            if first != size:
                raise InvalidInput(
                    f"inputs {owner!r} and {tensor.name!r} must agree in dimension {dim!r}: came {first} and {size}"
                )


def _resolved(dim: Dim, known: Mapping[str, tuple[int, str]]) -> int:
    if isinstance(dim, int):
        return dim
    return known[dim][0] if dim is not None and dim in known else -1
