"""One prediction on one view: keys to rows, then rows and the caller's own tensors to scores.

Free functions; any thread may call them with a view that it holds. Rows and graph are of that view, so of one version
and one moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tierstore.arguments import by_name, keys_and_bags
from tierstore.engine.reads.device import DeviceLookup, finish_all
from tierstore.engine.reads.gather import Gathering
from tierstore.errors import InvalidInput
from tierstore.predict.binding import Bindings
from tierstore.predict.session import DenseSession
from tierstore.predict.signature import BYTES, Shape, Tensor
from tierstore.types import FeatureSpec

Array = npt.NDArray[Any]


class StartedLookup(Protocol):
    """A look-up under way."""

    def finish(self) -> Any: ...


class PredictionView(Protocol):
    """The part of a view that a prediction needs."""

    @property
    def features(self) -> Mapping[str, FeatureSpec]: ...
    def begin(
        self, feature: str, keys: Any, *, offsets: Any = None, weights: Any = None, dtype: str, out: Array | None
    ) -> StartedLookup: ...
    def gathering(self, bindings: Bindings, features: tuple[str, ...]) -> Gathering | None: ...
    def rows_on(self, session: DenseSession) -> str | None: ...
    def begin_on_device(
        self, device: str, feature: str, keys: Any, *, offsets: Any = None, weights: Any = None, dtype: str
    ) -> DeviceLookup: ...


def predict(
    view: PredictionView, session: DenseSession, inputs: Mapping[str, Any], outputs: Sequence[str] = ()
) -> dict[str, Array]:
    """Run `session` on `inputs`, with the rows of its features looked up in `view`.

    Returns the outputs by name, by default all. `inputs`: for a feature its keys, [n] or [batch, k], or (keys,
    offsets) or (keys, offsets, weights) for ragged bags, offsets None for keys of shape [batch, k]; for the dense
    part's own inputs arrays or nested lists. Raises InvalidInput for inputs that do not fit, StorageError if the disk
    failed, InferenceError if ONNX Runtime did.
    """
    bindings = session.bindings
    unknown = [name for name in outputs if name not in bindings.outputs]
    if unknown:
        raise InvalidInput(f"no output {unknown[0]!r}; the dense part has {', '.join(bindings.outputs)}")
    leads: dict[str, Shape] = {}
    rows: dict[str, Any] = {}  # keys whose rows are not pooled
    bags: dict[str, tuple[Any, dict[str, Any]]] = {}  # keys and pooling of others
    plain: dict[str, Array] = {}
    for name, value in by_name(inputs, "inputs"):
        if name in bindings.features:
            if type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "iu":  # the usual case
                leads[name], rows[name] = value.shape, value
                continue
            leads[name], keys, bag = _keys(view, name, value)
            if bag:
                bags[name] = keys, bag
            else:
                rows[name] = keys
        elif name in bindings.plain:
            plain[name] = _tensor(bindings.plain[name], value)
        else:
            names = ", ".join(tensor.name for tensor in session.signature.inputs)
            raise InvalidInput(f"the dense part has no input {name!r}; its inputs are {names}")
    run = session.plan(leads, {name: array.shape for name, array in plain.items()}, outputs)
    device = view.rows_on(session)
    device_rows = () if device is None else [name for name, lead in leads.items() if 0 not in lead]
    slot = session.acquire(run, [name for name in leads if name not in device_rows])
    lookups: list[StartedLookup] = []
    on_device: dict[str, DeviceLookup] = {}
    gathering = None if device_rows or not rows else view.gathering(bindings, tuple(rows))
    if gathering is not None:
        lookups.append(gathering.begin(list(rows.values()), run.places, slot.memory))
    else:
        bags = {name: (keys, {}) for name, keys in rows.items()} | bags
    for name, (keys, bag) in bags.items():
        feature = bindings.features[name]
        if name in device_rows:
            assert device is not None
            on_device[name] = view.begin_on_device(device, name, keys, dtype=feature.dtype, **bag)
        else:
            out = session.rows_of(slot, name).reshape(math.prod(leads[name]), feature.dim)
            lookups.append(view.begin(name, keys, dtype=feature.dtype, out=out, **bag))
    for lookup in lookups:
        lookup.finish()
    finish_all(list(on_device.values()))
    for name, there in on_device.items():
        slot.bind(name, there.address, there.array)
    answer = session.run(run, slot, plain)
    session.release(slot)  # a failed run keeps its slot
    return dict(zip(run.outputs, answer, strict=True))


def feature_rows(view: PredictionView, name: str, value: Any) -> Array:
    """The float32 rows of a feature's keys or bags, as a prediction looks them up: [*shape, dim]."""
    lead, keys, bag = _keys(view, name, value)
    rows = np.asarray(view.begin(name, keys, dtype="float32", out=None, **bag).finish())
    return rows.reshape(*lead, rows.shape[1])


def _keys(view: PredictionView, name: str, value: Any) -> tuple[Shape, Any, dict[str, Any]]:
    """The shape of a feature's answer before its last dimension, its keys, and the pooling for `View.begin`."""
    keys, offsets, weights = keys_and_bags(name, value)
    width = None
    if not isinstance(keys, (pa.Array, pa.ChunkedArray)):
        keys = _array(name, keys)
        if keys.dtype.kind == "f" and not keys.size:
            keys = keys.astype(np.int64)  # an empty list
        if keys.ndim == 2:
            width, rows = keys.shape[1], keys.shape[0]
            keys = keys.reshape(-1)
        elif keys.ndim != 1:
            raise InvalidInput(f"input {name!r}: expected keys of shape [n] or [batch, k], got {list(keys.shape)}")
    n = len(keys)
    if view.features[name].combiner is None:
        if offsets is not None or weights is not None:
            raise InvalidInput(f"input {name!r}: feature {name!r} has no combiner, so its keys form no bags")
        lead = (n,) if width is None else (rows, width)
        return lead, keys, {}
    if offsets is not None:
        offsets = _array(f"{name}.offsets", offsets)
    if offsets is not None and width is not None:
        raise InvalidInput(f"input {name!r}: with offsets the keys are flat, shape [n]; got [{rows}, {width}]")
    if offsets is None:
        if width is None and weights is None:  # bags of one key are its row
            return (n,), keys, {}
        offsets = np.arange(n if width is None else rows, dtype=np.int64) * (1 if width is None else width)
        if weights is not None:
            weights = _array(f"{name}.weights", weights).reshape(-1)
    return (offsets.size,), keys, {"offsets": offsets, "weights": weights}


def _array(name: str, value: Any) -> Array:
    """`value` as an array. InvalidInput for nested lists of unequal lengths."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"input {name!r}: expected an array: {error}") from error


def _tensor(tensor: Tensor, value: Any) -> Array:
    """`value` as a C-contiguous array of the tensor's dtype; narrower numbers, and wider floats, are converted."""
    try:
        array = np.asarray(value)
        if tensor.datatype == BYTES:
            if array.dtype.kind not in "USTO":
                raise TypeError(f"got {array.dtype}")
            texts = [v.decode() if isinstance(v, bytes) else v for v in array.reshape(-1).tolist()]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("got objects that are not strings")
            strings = np.empty(len(texts), object)
            strings[:] = texts
            return strings.reshape(array.shape)
        if array.size and not np.can_cast(array.dtype, tensor.dtype, "same_kind"):
            raise TypeError(f"got {array.dtype}")
        if array.size and tensor.dtype.kind in "iu" and array.dtype != tensor.dtype:
            limits = np.iinfo(tensor.dtype)
            if int(array.min()) < limits.min or int(array.max()) > limits.max:
                raise ValueError(f"got numbers from {array.min()} to {array.max()}")
        with np.errstate(over="ignore"):
            return np.asarray(array, tensor.dtype, order="C")
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"input {tensor.name!r}: expected {tensor.datatype} of shape {tensor.shown()}: {error}"
        ) from error
