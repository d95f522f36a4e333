"""Bindings of a dense part to the features of its model: which inputs are rows of features, and the shapes of a run.

Immutable values and pure functions; any thread may use them. Raises InvalidInput, naming the
input, for what does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInput
from tierstore.predict.signature import BYTES, Dim, Shape, Signature, Tensor
from tierstore.predict.transforms import PostTransform
from tierstore.types import FeatureSpec, TableSpec

_ROW_DTYPES = {"FP32": "float32", "FP16": "float16"}
ALIGNMENT = 64  # of rows in a run's buffer, in bytes: a cache line, and good for vector instructions
_RENAMED = re.compile(r"(.+?)(?:_orig|[._:]\d+)+")  # of an input that an exporter has renamed
PARTS = ("offsets", "weights", "found")  # what may follow a feature's name and a dot in a request


@dataclass(frozen=True, slots=True)
class FeatureInput:
    """An input for the rows of the feature with its name, `dim` numbers each, as `dtype` (float32 or float16)."""

    tensor: Tensor
    dim: int
    dtype: str
    row_bytes: int

    def shape_for(self, lead: Shape) -> Shape:
        """The shape of the input for rows [*lead, dim], without moving bytes.

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
            f"got {'bags' if len(lead) == 1 else 'keys'} of shape {list(lead)}"
        )


@dataclass(frozen=True, slots=True)
class Bindings:
    """A signature, with the inputs that are features (`features`) and those that are the
    request's own tensors (`plain`).

    `mixes_rows`: a row's answer depends on which others are in the batch, so requests cannot share a run. `misapplied`:
    post-transforms that ONNX Runtime applies otherwise than ONNX specifies.
    """

    signature: Signature
    features: Mapping[str, FeatureInput]
    plain: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    mixes_rows: bool = False
    misapplied: tuple[PostTransform, ...] = ()

    def plan(
        self, leads: Mapping[str, Shape], shapes: Mapping[str, Shape], wanted: Sequence[str], loose: frozenset[str]
    ) -> Run:
        """Check the shapes of one request. Returns the shapes of its run.

        `leads` are the shapes of the features' answers before their last dimension, `shapes` those of the plain inputs,
        `wanted` names of outputs, `loose` outputs whose declared shapes are not to be relied on. Inputs that the dense
        part does not have are ignored. Raises InvalidInput.
        """
        missing = [t.name for t in self.signature.inputs if t.name not in leads and t.name not in shapes]
        if missing:
            got = ", ".join([*leads, *shapes]) or "none"
            raise InvalidInput(f"the dense part needs the inputs {', '.join(missing)} as well; got {got}")
        sizes: dict[str, tuple[int, str]] = {}
        inputs: dict[str, Shape] = {}
        for tensor in self.signature.inputs:
            feature = self.features.get(tensor.name)
            shape = shapes[tensor.name] if feature is None else feature.shape_for(leads[tensor.name])
            if feature is None and tensor.shape == () and shape == (1,):
                shape = ()  # the protocol has no tensors without dimensions
            _unify(tensor, shape, sizes)
            inputs[tensor.name] = shape
        outputs = []
        for name in wanted:
            declared = self.outputs[name].shape
            outputs.append(None if declared is None or name in loose else tuple(_resolved(d, sizes) for d in declared))
        rows = [math.prod(leads[name]) for name in self.features]
        return self.run(inputs, tuple(wanted), tuple(outputs), rows)

    def run(
        self,
        inputs: Mapping[str, Shape],
        wanted: tuple[str, ...],
        outputs: tuple[Shape | None, ...],
        rows: Sequence[int],
    ) -> Run:
        """A run of these shapes, and so many rows of each feature."""
        places: list[int] = []
        at = 0
        for n, feature in zip(rows, self.features.values(), strict=True):
            places += (n, at)
            at += (n * feature.row_bytes + ALIGNMENT - 1) & -ALIGNMENT
        nbytes = 0
        for name, shape in zip(wanted, outputs, strict=True):
            if shape is None or -1 in shape or self.outputs[name].datatype == BYTES:
                nbytes = -1
                break
            nbytes += math.prod(shape) * self.outputs[name].dtype.itemsize
        return Run(inputs, wanted, outputs, np.array(places, np.int64).reshape(-1, 2), at, nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Shapes of one run: of every input by name; of the outputs in order, with -1 for sizes
    that are known after the run.

    None for an output whose number of dimensions is not known before the run. `places` int64[features, 2]: how
    many rows each feature has, and at which of the `buffer_bytes` bytes of a buffer they begin. `output_bytes`
    -1: not known before the run.
    """

    inputs: Mapping[str, Shape]
    outputs: tuple[str, ...]
    shapes: tuple[Shape | None, ...]
    places: npt.NDArray[np.int64]
    buffer_bytes: int
    output_bytes: int


_Axes = list[tuple[int, int]]


class Structure:
    """`Bindings.plan` for requests that differ in nothing but sizes: what does not depend on those is done once.

    Any thread.
    """

    def __init__(
        self,
        bindings: Bindings,
        leads: Mapping[str, Shape],
        shapes: Mapping[str, Shape],
        wanted: Sequence[str],
        loose: frozenset[str],
    ) -> None:
        """A binding for requests such as this one, which `bindings` has planned."""
        self._bindings, self._wanted = bindings, tuple(wanted)
        numbers: dict[str, int] = {}  # of the named sizes
        # name, rank, numbers of a row (0: no feature), sizes that are given, sizes that have names
        self._inputs: list[tuple[str, int, int, _Axes, _Axes]] = []
        for tensor in bindings.signature.inputs:
            feature, declared = bindings.features.get(tensor.name), tensor.shape or ()
            rank = len(shapes[tensor.name] if feature is None else leads[tensor.name])
            fixed = [(axis, dim) for axis, dim in enumerate(declared) if isinstance(dim, int)]
            named = [(a, numbers.setdefault(d, len(numbers))) for a, d in enumerate(declared) if isinstance(d, str)]
            if feature is not None and len(declared) == rank + 1:
                fixed = [(axis, dim) for axis, dim in fixed if axis < rank]  # the last one is the feature's own
            self._inputs.append((tensor.name, rank, 0 if feature is None else feature.dim, fixed, named))
        self._sizes = [-1] * len(numbers)
        self._outputs: list[list[tuple[bool, int]] | None] = []
        for name in wanted:
            shape = bindings.outputs[name].shape
            if shape is None or name in loose:
                self._outputs.append(None)
            else:
                self._outputs.append([_dim_source(dim, numbers) for dim in shape])

    def plan(self, leads: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> Run | None:
        """The shapes of a request's run; None where sizes do not fit, or `Bindings.plan` has to look."""
        sizes = self._sizes.copy()
        inputs: dict[str, Shape] = {}
        for name, rank, dim, fixed, named in self._inputs:
            if not dim:
                shape = shapes[name]
                if len(shape) != rank or (not fixed and not named and rank == 1):  # maybe a number without dimensions
                    return None
            else:
                lead = leads[name]
                if len(lead) != rank:
                    return None
                shape = (lead[0], dim) if rank == 1 and dim > 1 else self._bindings.features[name].shape_for(lead)
            for axis, size in fixed:
                if shape[axis] != size:
                    return None
            for axis, number in named:
                if sizes[number] < 0:
                    sizes[number] = shape[axis]
                elif sizes[number] != shape[axis]:
                    return None
            inputs[name] = shape
        outputs = tuple(
            None if dims is None else tuple([sizes[at] if by_name else at for by_name, at in dims])
            for dims in self._outputs
        )
        rows = [math.prod(leads[name]) for name in self._bindings.features]
        return self._bindings.run(inputs, self._wanted, outputs, rows)


def _dim_source(dim: Dim, numbers: Mapping[str, int]) -> tuple[bool, int]:
    """(whether it is a named size, its number or the size itself)."""
    if isinstance(dim, int):
        return False, dim
    return (False, -1) if dim is None or dim not in numbers else (True, numbers[dim])


def wire(signature: Signature, features: Mapping[str, FeatureSpec], tables: Mapping[str, TableSpec]) -> Bindings:
    """Match a dense part with the features of a model. Raises InvalidInput, naming the input and what was expected."""
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
        _check_renamed(tensor, signature, features, tables)
        plain[tensor.name] = tensor
    outputs = {tensor.name: tensor for tensor in signature.outputs}
    for name in outputs:
        owner, _, part = name.partition(".")
        if owner in features and part in ("", *PARTS):
            raise InvalidInput(f"output {name!r}: that name means feature {owner!r}; rename the dense part's output")
    return Bindings(signature, wired, plain, outputs)


def _check_renamed(
    tensor: Tensor, signature: Signature, features: Mapping[str, FeatureSpec], tables: Mapping[str, TableSpec]
) -> None:
    """Refuse an input that an exporter has renamed from a feature's: no request would bring it.

    PyTorch's does that to one that `forward` also returns, or that several places use.
    """
    renamed = _RENAMED.fullmatch(tensor.name)
    feature = None if renamed is None else features.get(renamed[1])
    if feature is None or feature.name in {one.name for one in signature.inputs}:
        return
    dim = tables[feature.table].dim
    if tensor.datatype in _ROW_DTYPES and tensor.shape and tensor.shape[-1] == dim:
        raise InvalidInput(
            f"input {tensor.name!r} takes rows of {dim} numbers, and no input takes those of feature {feature.name!r}: "
            f"an exporter has renamed it; name the input {feature.name!r} (do not return it from forward as it is: "
            "return a copy, such as `rows.clone()`)"
        )


def _wire(tensor: Tensor, feature: FeatureSpec, table: TableSpec) -> FeatureInput:
    name, dim = tensor.name, table.dim
    dtype = _ROW_DTYPES.get(tensor.datatype)
    if dtype is None:
        raise InvalidInput(
            f"input {name!r} is a feature, so its rows come as FP32 or FP16; the dense part declares "
            f"{tensor.datatype}: cast it inside the graph, or give the input another name"
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
    return FeatureInput(tensor, dim, dtype, dim * tensor.dtype.itemsize)


def _unify(tensor: Tensor, shape: Shape, sizes: dict[str, tuple[int, str]]) -> None:
    declared = tensor.shape
    if declared is None:
        return
    if len(declared) != len(shape) or any(
        isinstance(d, int) and d != size for d, size in zip(declared, shape, strict=True)
    ):
        raise InvalidInput(f"input {tensor.name!r}: the dense part takes shape {tensor.shown()}, got {list(shape)}")
    for dim, size in zip(declared, shape, strict=True):
        if isinstance(dim, str):
            first, owner = sizes.setdefault(dim, (size, tensor.name))
            if first != size:
                ends = "; offsets of bags have no end entry: give [:-1] of TorchRec's" if abs(first - size) == 1 else ""
                raise InvalidInput(
                    f"inputs {owner!r} and {tensor.name!r} must agree in dimension {dim!r}: got {first} and {size}"
                    + ends
                )


def _resolved(dim: Dim, sizes: Mapping[str, tuple[int, str]]) -> int:
    if isinstance(dim, int):
        return dim
    return sizes[dim][0] if dim is not None and dim in sizes else -1
