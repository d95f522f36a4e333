"""What is asked and what it comes to: a request, its plan under one version, and what they need of the engine's view.

Values that are not changed once made, but for what is said of `Request`; any thread. `planning.py` makes a plan of a
request; see `dataplane.py` for the protocol's words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.errors import TooLarge
from tierstore.predict.binding import FeatureInput, Run, Wiring
from tierstore.predict.session import DenseSession
from tierstore.predict.signature import Tensor
from tierstore.service.plane.tensors import BYTES, NUMPY_DTYPE, TensorSpec
from tierstore.types import Combiner, FeatureSpec, KeyType, TableSpec

KEY_DATATYPES = {KeyType.INT64: ("INT64", "UINT64"), KeyType.UINT64: ("UINT64", "INT64"), KeyType.STRING: (BYTES,)}
ANSWERS = {"FP32": "float32", "FP16": "float16"}
_STRINGS = np.dtype(object)


class View(Protocol):
    """What the data plane needs of the engine's view."""

    @property
    def version(self) -> int: ...
    @property
    def features(self) -> dict[str, FeatureSpec]: ...
    @property
    def predictor(self) -> DenseSession | None: ...
    @property
    def unserved(self) -> str | None: ...
    def table_of(self, feature: str) -> TableSpec: ...
    def begin(
        self,
        feature: str,
        keys: Any,
        *,
        offsets: Any = ...,
        weights: Any = ...,
        combiner: str | None = ...,
        dtype: str = ...,
        out: Any = ...,
    ) -> Lookup: ...
    def rows_on(self, session: DenseSession) -> str | None: ...
    def begin_on_device(
        self,
        device: Any,
        feature: str,
        keys: Any,
        *,
        offsets: Any = ...,
        weights: Any = ...,
        combiner: str | None = ...,
        dtype: str = ...,
    ) -> Lookup: ...


class Lookup(Protocol):
    """What the data plane needs of a look-up under way."""

    @property
    def pending(self) -> bool: ...
    @property
    def found(self) -> npt.NDArray[np.bool_]: ...
    def finish(self) -> Any: ...


@dataclass(slots=True)  # not frozen, see TensorSpec
class RequestedOutput:
    """An output that a client names; `datatype` FP32 or FP16 for vectors, `combiner` of its bags; None for the defaults."""

    name: str
    datatype: str | None = None
    combiner: str | None = None


class OutputSpec:
    """An output that will be answered. `index` is its place among the requested ones, None for a default output.

    Where `fixed` is false its array is there only after the request has run: `shape` may hold -1 until then, `nbytes`
    is 0, and BYTES are an object array of str.
    """

    __slots__ = ("datatype", "dtype", "fixed", "index", "name", "nbytes", "shape")

    def __init__(
        self, name: str, datatype: str, shape: tuple[int, ...], index: int | None = None, *, fixed: bool = True
    ) -> None:
        self.name, self.datatype, self.shape, self.index, self.fixed = name, datatype, shape, index, fixed
        self.dtype: np.dtype[Any] = NUMPY_DTYPE.get(datatype, _STRINGS)
        self.nbytes = math.prod(shape) * self.dtype.itemsize if fixed else 0


@dataclass(slots=True)
class Call:
    """One feature's look-up: which inputs it takes, and where its outputs go (positions among inputs and outputs)."""

    feature: FeatureSpec
    table: TableSpec
    spec: TensorSpec
    combiner: Combiner | None
    keys: int
    offsets: int | None = None
    weights: int | None = None
    bags: int = 0  # with offsets: how many
    rows: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    feeds: FeatureInput | None = None  # the input of the dense part that takes the rows
    hidden: bool = False  # whether those go into a buffer of the dense part, not into an output
    # once the request is planned
    shape: tuple[int, int] = (0, 0)  # of its rows as one matrix
    pooled: bool = False  # whether bags must be pooled: one unweighted key a bag is that key's row

    def settle(self) -> None:
        """Note what follows from the request as a whole."""
        self.shape = math.prod(self.lead), self.table.dim
        ragged = self.offsets is not None or self.weights is not None or len(self.spec.shape) == 2
        self.pooled = self.combiner is not None and ragged

    @property
    def lead(self) -> tuple[int, ...]:
        """Shape of the answer before its last dimension."""
        if self.offsets is not None:
            return (self.bags,)
        return self.spec.shape if self.combiner is None else self.spec.shape[:1]

    def starts(self) -> npt.NDArray[np.int64]:
        """Where each bag begins, without offsets. Only once the size of the answer is known to be allowed."""
        shape = self.spec.shape
        return np.arange(shape[0], dtype=np.int64) * (shape[1] if len(shape) == 2 else 1)


@dataclass(slots=True)
class DensePlan:
    """One run of the dense part. `given`: (input, position of the request's own tensor); `places` of `run`'s outputs."""

    run: Run
    given: list[tuple[Tensor, int]]
    places: list[int]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the request's strings, which are taken apart for it, at the least."""
        return sum(8 * math.prod(self.run.inputs[t.name]) for t, _ in self.given if t.datatype == BYTES)


@dataclass(slots=True)
class Plan:
    """What a request comes to under one version and dense part: checked against both, ready for data. Not changed after.

    `features` are that version's own, and `wiring` and `loose` that dense part's, by which they are told from any other.
    `dense` says how it is run, if it is; `numbers` which input says whose the keys are (`hps.py`), if one does. `memo` is the transport's, to keep with it, and `joint` the batcher's.
    """

    version: int
    features: dict[str, FeatureSpec]
    wiring: Wiring | None
    loose: frozenset[str] | None
    dense: DensePlan | None
    calls: list[Call]
    specs: list[OutputSpec]
    work_bytes: int
    keys: int
    numbers: int | None = None
    memo: Any = None
    joint: Any = None

    def fits(self, view: View) -> bool:
        """Whether it is of the view's version and dense part."""
        if self.features is not view.features:
            return False
        session = view.predictor
        return (
            self.wiring is None if session is None else (self.wiring is session.wiring and self.loose is session.loose)
        )


def check_rows(nbytes: int, allowed: int) -> None:
    """TooLarge where a look-up takes more than is allowed."""
    if nbytes > allowed:
        raise TooLarge(
            f"the look-up takes {nbytes} bytes of rows, {allowed} are allowed: split it, or raise max_response"
        )


@dataclass(slots=True)
class Request:
    """What is asked, without the data: inputs in the order of their elements, outputs or none for the default ones.

    `combiner` is for every feature whose output does not name one.
    """

    inputs: Sequence[TensorSpec]
    outputs: Sequence[RequestedOutput]
    combiner: str | None = None
    # of the latest two versions it was asked of, as two may be served; threads may race to set them to equal ones
    plan: Plan | None = None
    other_plan: Plan | None = None
