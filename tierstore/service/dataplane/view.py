"""What the data plane needs of the engine: a view of one version, a look-up in it, and the tensors of its interface.

Functions of a view; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.predict.binding import Bindings
from tierstore.predict.session import DenseSession
from tierstore.service.dataplane.datatypes import KEY_DATATYPES
from tierstore.types import FeatureSpec, TableSpec


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
    def under(self, head: str) -> View: ...
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
    def gathering(self, bindings: Bindings, features: tuple[str, ...]) -> Gathering | None: ...
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


class Gathering(Protocol):
    """What the data plane needs to look rows of several features up at once."""

    def begin(
        self, keys: Sequence[Any], places: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8]
    ) -> RowsLookup: ...
    def begin_codes(
        self, codes: npt.NDArray[np.int64], places: npt.NDArray[np.int64], memory: npt.NDArray[np.uint8]
    ) -> RowsLookup: ...


class RowsLookup(Protocol):
    """What the data plane needs of a look-up whose rows go where its caller said."""

    @property
    def pending(self) -> bool: ...
    def finish(self) -> None: ...


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
    session = view.predictor
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
    session = view.predictor
    if session is not None:
        for tensor in session.signature.outputs:
            yield TensorInfo(tensor.name, tensor.datatype, session.sizes(tensor.name))
    for name in view.features:
        yield TensorInfo(name, "FP32", (-1, view.table_of(name).dim))
        yield TensorInfo(f"{name}.found", "BOOL", (-1,))
