"""A view: the state that one request reads. A version, the overlays over it, and the seq that both add up to.

Immutable, so any number of threads may look up in one. The publisher (`serving/publisher.py`) knows which views are
current, and which older ones are still read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.arguments import keys_and_bags, names_of
from tierstore.engine.data.dense_head import DenseHead, Heads, passed_over_after, with_brought
from tierstore.engine.data.overlay import Overlay
from tierstore.engine.data.table_view import TableView
from tierstore.engine.reads.device import DeviceLookup, Hold, OfCaller, finish_all, gpu_of, keys_there, there
from tierstore.engine.reads.feature_view import FeatureView, answer_code
from tierstore.engine.reads.gather import Gathering, can_gather
from tierstore.engine.reads.lookup import BagLookup, Lookup
from tierstore.engine.reads.predict import predict
from tierstore.engine.versions.version import Version
from tierstore.errors import InvalidInput, MissingExtra, NotFound, NotReady
from tierstore.formats.colliding import CollidingKeys
from tierstore.predict.binding import Bindings
from tierstore.predict.runtime import INSTALL
from tierstore.predict.session import DenseSession
from tierstore.tiers.device.backend import is_gpu_array
from tierstore.tiers.device.gpu import Gpu
from tierstore.types import FeatureSpec, GpuArray, KeysLike, TableSpec, Vectors

_MOST_GATHERINGS = 64  # for one view
_NO_HEAD = DenseHead()
_OF_ALL = {"device", "dtype", "return_found"}  # options of look-ups that can begin together
_FLOAT32 = "float32"  # this object, the default, is not looked up among dtypes: a look-up of 64 keys takes 4 us


class Holder(Protocol):
    """What counts the readers of views."""

    def retain(self, view: View) -> None:
        """Hold a view that the caller holds once more."""

    def release(self, view: View) -> None: ...


def _bags_for(gpu: Gpu, keys: Any, offsets: Any, weights: Any) -> tuple[Any, Any]:
    """Offsets and weights that may be on the GPU, for keys from `View._keys_for`: there if the keys are, else in CPU
    memory.
    """
    starts = factors = None
    if isinstance(keys, GpuArray):
        starts, factors = there(gpu, offsets, np.dtype(np.int64)), there(gpu, weights, np.dtype(np.float32))
    if starts is None or not len(starts):
        starts = gpu.to_host(offsets)
    if factors is None or len(factors) != len(keys):
        factors = gpu.to_host(weights)
    return starts, factors


def _can_begin(asked: Iterable[tuple[str, Any, Any, Any]]) -> bool:
    """Whether look-ups of (feature, keys, offsets, weights) can begin without a look at the GPU's memory."""
    return not any(is_gpu_array(part) for _, *parts in asked for part in parts)


class View:
    """Look-ups at one moment. The model makes it; callers use `with model.view() as view:`.

    `heads` are its dense parts by name. `session` is the graph of `head`, which predictions use: the head without a
    name, unless the view comes from `under`.
    """

    __slots__ = (
        "__weakref__",
        "_features",
        "_gatherings",
        "_tables",
        "_under",
        "_version",
        "colliding",
        "head",
        "heads",
        "overlays",
        "publisher",
        "readers",
        "seq",
        "session",
    )

    def __init__(self, version: Version, overlays: tuple[Overlay, ...], seq: int) -> None:
        self._version, self.overlays, self.seq = version, overlays, seq
        self.colliding: Mapping[str, CollidingKeys] = version.colliding
        for overlay in reversed(overlays):
            if overlay.colliding:
                self.colliding = {**self.colliding, **overlay.colliding}
        heads: Heads = version.heads
        for overlay in reversed(overlays):
            if overlay.heads:
                heads = with_brought(heads, overlay.heads)
        self.heads = heads
        self._tables: dict[str, TableView] = {}  # threads that race set equal ones, here and below
        self._features: dict[str, FeatureView] = {}
        self._read_by("")
        self.readers = 0  # guarded by the publisher's lock
        self.publisher: Holder | None = None  # set when it is published

    def _read_by(self, head: str) -> None:
        self.head, self.session = head, self.heads.get(head, _NO_HEAD).session
        self._under: dict[str, View] = {}
        self._gatherings: dict[tuple[str, ...], Gathering] = {}

    def under(self, head: str) -> View:
        """This view, with one of its heads for predictions. NotFound names the existing heads."""
        if not head:
            return self
        view = self._under.get(head) if isinstance(head, str) else None
        if view is None:
            if not isinstance(head, str) or head not in self.heads:
                named = ", ".join(sorted(self.heads.keys() - {""}))
                raise NotFound(f"no head {head!r}; version {self.version} has {named or 'none with a name'}")
            view = copy(self)
            view.publisher = None  # which counts the readers of `self`
            view._read_by(head)
            self._under[head] = view
        return view

    def under_heads(self) -> tuple[View, ...]:
        """The views that `under` has made."""
        return tuple(self._under.values())

    @property
    def version(self) -> int:
        """The number of the version that answers."""
        return self._version.number

    @property
    def open_version(self) -> Version:
        """The open version itself; for the engine."""
        return self._version

    @property
    def features(self) -> dict[str, FeatureSpec]:
        return self._version.features

    def shares_plans_with(self, other: View) -> bool:
        """Whether plans made under `other` are valid here: the same version, with heads of the same bindings."""
        if self.features is not other.features or self.heads.keys() != other.heads.keys():
            return False
        return all(head.shares_plans_with(other.heads[name]) for name, head in self.heads.items())

    @property
    def has_dense(self) -> bool:
        """Whether the version has a dense part of this head; `session` says whether it is served."""
        return self.head in self.heads

    @property
    def unserved(self) -> str | None:
        """Why the kept dense part is not served; None if it is, or if there is none."""
        if self.session is not None or not self.has_dense:
            return None
        return self.heads[self.head].unserved or INSTALL

    @property
    def passed_over(self) -> dict[str, str]:
        """By head, the newest dense part that does not fit the version, and why; not if a newer one fits."""
        found: dict[str, str] = self._version.info.passed_over
        for overlay in reversed(self.overlays):
            found = passed_over_after(found, overlay.heads, overlay.passed_over)
        return found

    @property
    def overlay_bytes(self) -> int:
        return sum(overlay.nbytes for overlay in self.overlays)

    def table(self, name: str) -> TableView:
        """A table of the version under this view."""
        found = self._tables.get(name)
        if found is None:
            overlays = [overlay.tables[name] for overlay in self.overlays if name in overlay.tables]
            found = self._tables[name] = TableView(self._version.tables[name], overlays, self.seq)
        return found

    def table_of(self, feature: str) -> TableSpec:
        """The table that a feature reads. NotFound names the existing features."""
        return self.feature(feature).rows.table.spec

    def feature(self, name: str) -> FeatureView:
        """How a feature's keys become codes, and where their rows are. NotFound names the existing features."""
        found = self._features.get(name) if isinstance(name, str) else None
        if found is None:
            spec = self._version.features.get(name) if isinstance(name, str) else None
            if spec is None:
                names = ", ".join(sorted(self._version.features))
                raise NotFound(f"no feature {name!r}; version {self.version} has {names}")
            found = FeatureView(spec, self.table(spec.table), self.colliding.get(spec.table))
            self._features[name] = found
        return found

    def lookup(
        self,
        feature: str,
        keys: KeysLike,
        *,
        dtype: str = _FLOAT32,
        out: Vectors | None = None,
        return_found: bool = False,
        device: str | None = None,
        stream: Any = None,
    ) -> Any:
        """Rows of `keys`, in their order.

        Args:
            feature: a feature of the model.
            keys: n keys of its table's type, or of its hash's: an integer array or list, strings for a
                string table, or an Arrow array; or integers in the memory of the GPU, of any library that speaks
                DLPack or has `__cuda_array_interface__`: then the answer is there too, unless `device` is `cpu`.
            dtype: of the answer, `float32` or `float16`.
            out: C-contiguous array [n, dim] of that dtype to write into and return; in the memory of the GPU, of any
                library, if the answer is there.
            return_found: also return bool[n], False where the table's default was answered.
            device: `cpu` (as None is), or `gpu` or `gpu:<number>`: then the vectors are a CuPy array on that device,
                or over `out`, complete when it is returned; `found` stays a NumPy array.
            stream: the caller's, of CuPy, PyTorch or by its address: `keys` are read after the work that is in it, and
                the memory of the answer is used again in its order. None: CuPy's current one. `device` is `gpu` then.
                Unless `found` is wanted, the vectors are complete in the order of this stream, and the call does not
                wait for them. Rows that cannot be read are NaN then, and the next look-up in the stream raises why.

        Returns:
            The vectors [n, dim], or (vectors, found).

        Raises:
            NotFound: no such feature. InvalidInput: keys, dtype or out that do not fit. StorageError: the disk failed.
            MissingExtra, NotReady: there is no device tier to answer on.
        """
        if stream is not None or is_gpu_array(keys):
            with OfCaller(self._version, device, stream) as gpu:
                here, where = self._keys_for(gpu, feature, keys, device), device or "gpu"
                if where != "cpu":
                    hold = None if stream is None else self._hold
                    left = self.begin_on_device(where, feature, here, dtype=dtype, out=out)
                    return self._left(left, out, return_found, hold)
                return self.lookup(feature, here, dtype=dtype, out=out, return_found=return_found)
        if device is not None and device != "cpu":
            return self._left(self.begin_on_device(device, feature, keys, dtype=dtype, out=out), out, return_found)
        of = self.feature(feature)
        lookup = Lookup(of, of.codes(keys), 0 if dtype is _FLOAT32 else answer_code(dtype), out)
        answer = lookup.finish()
        return (answer, lookup.found) if return_found else answer

    def lookup_bags(
        self,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike,
        *,
        weights: npt.ArrayLike | None = None,
        combiner: str | None = None,
        dtype: str = "float32",
        out: Vectors | None = None,
        return_found: bool = False,
        device: str | None = None,
        stream: Any = None,
    ) -> Any:
        """One pooled vector for each bag.

        Args:
            keys: n keys, bag after bag.
            offsets: int64[bags], where each bag starts; the first is 0, there is no end
                entry. An empty bag gives zeros.
            weights: float32[n], or None for ones.
            combiner: `sum`, `mean` or `sqrtn`; None for the feature's own.
            dtype: as for `lookup`; so are `device`, `stream`, and keys in the memory of the GPU, with which
                offsets and weights may lie there too.
            out: float[bags, dim] to write to, as for `lookup`.
            return_found: return bool[n] too, one a key.

        Returns:
            The vectors [bags, dim], or (vectors, found). Absent keys count with the table's default.
        """
        if stream is not None or is_gpu_array(keys):
            with OfCaller(self._version, device, stream) as gpu:
                here = self._keys_for(gpu, feature, keys, device)
                starts, factors = _bags_for(gpu, here, offsets, weights)
                how: Any = {"weights": factors, "combiner": combiner, "dtype": dtype}
                if device == "cpu":
                    return self.lookup_bags(feature, here, starts, out=out, return_found=return_found, **how)
                hold, where = None if stream is None else self._hold, device or "gpu"
                left = self.begin_on_device(where, feature, here, offsets=starts, pooled=True, out=out, **how)
                return self._left(left, out, return_found, hold)
        if device is not None and device != "cpu":
            left = self.begin_on_device(
                device, feature, keys, offsets=offsets, weights=weights, combiner=combiner, dtype=dtype, pooled=True,
                out=out,
            )  # fmt: skip
            return self._left(left, out, return_found)
        of = self.feature(feature)
        codes = of.codes(keys)
        bags = of.bags(len(codes), offsets, weights, combiner)
        lookup = BagLookup(of, codes, bags, answer_code(dtype), out)
        answer = lookup.finish()
        return (answer, lookup.found) if return_found else answer

    def lookup_many(self, features: Iterable[tuple[str, Any]], **options: Any) -> dict[str, Any]:
        """`lookup` or `lookup_bags` for each feature with its value, see `Model.lookup_many`.

        With `device` and no `stream`, the device works on several features at a time.
        """
        asked = [(feature, *keys_and_bags(feature, value)) for feature, value in features]
        if options.get("device", "cpu") not in (None, "cpu") and options.keys() <= _OF_ALL and _can_begin(asked):
            found, device, how = options.pop("return_found", False), options.pop("device"), options
            lookups = {
                feature: self.begin_on_device(device, feature, keys, offsets=offsets, weights=weights, **how)
                for feature, keys, offsets, weights in asked
            }
            finish_all(list(lookups.values()))
            return {feature: (one.array, one.found) if found else one.array for feature, one in lookups.items()}
        return {
            feature: self.lookup(feature, keys, **options)
            if offsets is None and weights is None
            else self.lookup_bags(feature, keys, offsets, weights=weights, **options)
            for feature, keys, offsets, weights in asked
        }

    def predict(self, inputs: Mapping[str, Any], *, outputs: Sequence[str] | None = None, head: str = "") -> Any:
        """Scores of the dense part, or of that of a `head`, on rows of this view.

        Args:
            inputs: for a feature its keys, [n] or [batch, k], or (keys, offsets) or (keys, offsets, weights) for ragged
                bags, offsets as for `lookup_bags`; for the dense part's own inputs arrays or nested lists.
            outputs: names of those to return; None for all.

        Returns:
            `{output: array}`; the array alone where the dense part has one output and `outputs` is None.

        Raises:
            NotFound: no such head. InvalidInput: no dense part, or inputs that do not fit it. MissingExtra: it needs an
            extra. NotReady: it is kept but cannot be served. InferenceError, StorageError: ONNX Runtime or the disk
            failed.
        """
        if head:
            return self.under(head).predict(inputs, outputs=outputs)
        session = self.session
        if session is None:
            if not self.has_dense:
                named = ", ".join(sorted(self.heads))
                other = f"name one of its heads, {named}" if named else "look rows up"
                raise InvalidInput(f"version {self.version} has no dense part, so it predicts nothing; {other}")
            why = f"the dense part of version {self.version} is not served: {self.unserved}"
            raise MissingExtra(why) if INSTALL in why else NotReady(why)
        answer = predict(self, session, inputs, names_of("outputs", outputs) or ())
        if outputs is None and len(answer) == 1:
            return next(iter(answer.values()))
        return answer

    def begin(
        self,
        feature: str,
        keys: KeysLike,
        *,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        combiner: str | None = None,
        dtype: str = "float32",
        out: Vectors | None = None,
    ) -> Lookup | BagLookup:
        """Start a look-up, pooled if `offsets` are given: keys in memory are answered, without waiting.

        Arguments and errors as for `lookup` and `lookup_bags`. The view must be held until `Lookup.finish`.
        """
        of, code = self.feature(feature), answer_code(dtype)
        codes = of.codes(keys)
        if offsets is None:
            return Lookup(of, codes, code, out)
        return BagLookup(of, codes, of.bags(len(codes), offsets, weights, combiner), code, out)

    def gathering(self, bindings: Bindings, features: tuple[str, ...]) -> Gathering | None:
        """The look-up in one step of the features that a dense part reads; None if each must be looked up by itself."""
        gathering = self._gatherings.get(features)
        if gathering is not None and gathering.bindings is bindings:
            return gathering
        found = [self.feature(name) for name in features]
        if not all(map(can_gather, found)):
            return None
        if len(self._gatherings) >= _MOST_GATHERINGS:
            self._gatherings.clear()
        gathering = self._gatherings[features] = Gathering(bindings, found)
        return gathering

    def answers_on_gpu(self, number: int) -> bool:
        """Whether answers can stay on the GPU with this number, as this process counts them."""
        gpu = self._version.gpu
        return gpu is not None and gpu.has(f"gpu:{number}")

    def rows_on(self, session: DenseSession) -> str | None:
        """The device on which `session` reads rows of the device tier in place; None: it reads CPU memory."""
        device, gpu = session.rows_on, self._version.gpu
        return device if device is not None and gpu is not None and gpu.has(device) else None

    def begin_on_device(
        self,
        device: str,
        feature: str,
        keys: KeysLike,
        *,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        combiner: str | None = None,
        dtype: str = "float32",
        pooled: bool = False,
        out: Any = None,
    ) -> DeviceLookup:
        """Start a look-up whose rows stay on the device `rows_on`. Arguments and errors as for `begin`.

        `pooled`: of bags, also if there are no offsets, which is an error then.

        Nothing is done before `DeviceLookup.finish`, until which the view must be held.
        """
        of, code = self.feature(feature), answer_code(dtype)
        codes = keys if isinstance(keys, GpuArray) else of.codes(keys)
        pooled = pooled or offsets is not None or weights is not None
        bags = of.bags(len(codes), offsets, weights, combiner) if pooled else None  # type: ignore[arg-type]
        return DeviceLookup(gpu_of(self._version, device), of, codes, bags, code, out)

    def _keys_for(self, gpu: Gpu, feature: str, keys: Any, device: str | None) -> Any:
        """Keys that may be on the GPU, for a look-up: there if possible, else in CPU memory."""
        there = None if device == "cpu" else keys_there(gpu, keys, self.feature(feature))
        return gpu.to_host(keys) if there is None else there

    def _left(self, lookup: DeviceLookup, out: Any, return_found: bool, hold: Hold | None = None) -> Any:
        """The result of a look-up whose answer stays on a device; with `hold`, in the caller's stream."""
        lookup.finish(None if return_found or self.publisher is None else hold)
        answer = lookup.array if out is None else out
        return (answer, lookup.found) if return_found else answer

    def _hold(self) -> Callable[[], None]:
        publisher = self.publisher
        assert publisher is not None
        publisher.retain(self)
        return partial(publisher.release, self)
