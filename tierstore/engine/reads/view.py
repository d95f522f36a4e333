"""A view: what one request works on. A version, the overlays over it, and the seq that both add up to.

Immutable, so any number of threads may look up in one. The publisher (`serving/publisher.py`) says which views are
current, and which older ones are still read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.engine.data.cascade import Cascade
from tierstore.engine.data.dense_head import DenseHead, Heads, passed_over_after, with_brought
from tierstore.engine.data.overlay import Overlay, OverlayTable
from tierstore.engine.reads.batch import KeyBatch, answer_array, answer_dtype, checked_weights, combiner_of
from tierstore.engine.reads.device import DeviceLookup, answer_on_device, gpu_of, keys_there, of_caller
from tierstore.engine.reads.gather import Gathering, GatherSource, can_gather
from tierstore.engine.reads.lookup import BagLookup, Lookup, begin
from tierstore.engine.reads.predict import predict
from tierstore.engine.versions.version import Version
from tierstore.errors import InvalidInput, MissingExtra, NotFound, NotReady
from tierstore.formats.colliding import CollidingKeys
from tierstore.formats.keys import as_codes, feature_codes
from tierstore.kernels.pool import check_offsets
from tierstore.predict.binding import Bindings
from tierstore.predict.runtime import INSTALL
from tierstore.predict.session import DenseSession
from tierstore.tiers.device.backend import lies_on_gpu
from tierstore.tiers.device.gpu import Gpu
from tierstore.tiers.device.lookup import KeysThere, Pooling
from tierstore.types import FeatureSpec, KeysLike, KeyType, TableSpec, Tier, Vectors

_ABSENT = np.uint8(Tier.ABSENT)
_NO_KEYS = np.empty(0, np.int64)
_STATE = np.dtype(np.uint8)
_MOST_GATHERINGS = 64  # of one view
_NO_HEAD = DenseHead()


class View:
    """Look-ups at one moment. The model makes it; callers use `with model.view() as view:`.

    `heads` are its dense parts by name. `predictor` is the graph of the one that it is read by, `head`; its own
    without a name, unless it comes from `under`.
    """

    __slots__ = (
        "__weakref__",
        "_by_table",
        "_gatherings",
        "_padding",
        "_under",
        "_version",
        "colliding",
        "head",
        "heads",
        "overlays",
        "predictor",
        "readers",
        "seq",
    )

    def __init__(self, version: Version, overlays: tuple[Overlay, ...], seq: int) -> None:
        self._version, self.overlays, self.seq = version, overlays, seq
        self._by_table = {name: tuple(o.tables[name] for o in overlays if name in o.tables) for name in version.specs}
        self.colliding: Mapping[str, CollidingKeys] = version.colliding
        for overlay in reversed(overlays):
            if overlay.colliding:
                self.colliding = {**self.colliding, **overlay.colliding}
        self._padding = version.padding
        if self.colliding:
            self._padding = self._padding | _padding_among(self.colliding, version)
        heads: Heads = version.heads
        for overlay in reversed(overlays):
            if overlay.heads:
                heads = with_brought(heads, overlay.heads)
        self.heads = heads
        self._read_by("")
        self.readers = 0  # guarded by the publisher's lock

    def _read_by(self, head: str) -> None:
        self.head, self.predictor = head, self.heads.get(head, _NO_HEAD).predictor
        self._under: dict[str, View] = {}  # threads that race set equal ones
        self._gatherings: dict[tuple[str, ...], Gathering] = {}  # threads that race set equal ones

    def under(self, head: str) -> View:
        """This view, to be read by one of its heads. NotFound names those there are."""
        if not head:
            return self
        view = self._under.get(head)
        if view is None:
            if head not in self.heads:
                named = ", ".join(sorted(self.heads.keys() - {""}))
                raise NotFound(f"no head {head!r}; version {self.version} has {named or 'none with a name'}")
            view = copy(self)
            view._read_by(head)
            self._under[head] = view
        return view

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
        """Whether what was planned under `other` holds here: the same version, with heads of the same bindings."""
        if self.features is not other.features or self.heads.keys() != other.heads.keys():
            return False
        return all(head.shares_plans_with(other.heads[name]) for name, head in self.heads.items())

    @property
    def has_dense(self) -> bool:
        """Whether the version has a dense part of this head; `predictor` says whether it is served."""
        return self.head in self.heads

    @property
    def unserved(self) -> str | None:
        """Why the dense part that is kept is not served; None where it is, and where there is none."""
        if self.predictor is not None or not self.has_dense:
            return None
        return self.heads[self.head].unserved or INSTALL

    @property
    def passed_over(self) -> dict[str, str]:
        """By head the newest dense part that does not fit the version, and why; not where a newer one does."""
        found: dict[str, str] = self._version.info.passed_over
        for overlay in reversed(self.overlays):
            found = passed_over_after(found, overlay.heads, overlay.passed_over)
        return found

    @property
    def overlay_bytes(self) -> int:
        return sum(overlay.nbytes for overlay in self.overlays)

    def overlays_of(self, table: str) -> tuple[OverlayTable, ...]:
        """What the view's overlays hold of a table, newest first."""
        return self._by_table[table]

    def table_of(self, feature: str) -> TableSpec:
        """The table that a feature reads. NotFound names the features there are."""
        return self._feature(feature)[1].spec

    def _feature(self, name: str) -> tuple[FeatureSpec, Cascade]:
        feature = self._version.features.get(name) if isinstance(name, str) else None
        if feature is None:
            raise NotFound(
                f"no feature {name!r}; version {self.version} has {', '.join(sorted(self._version.features))}"
            )
        return feature, self._version.tables[feature.table]

    def lookup(
        self,
        feature: str,
        keys: KeysLike,
        *,
        dtype: str = "float32",
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
            out: C-contiguous array [n, dim] of that dtype to write into and return.
            return_found: also return bool[n], False where the table's default was answered.
            device: `cpu` (as None is), or `gpu` or `gpu:<number>`: then the vectors are a CuPy array on that device,
                complete when it is returned; `found` stays a NumPy array.
            stream: the caller's, of CuPy, PyTorch or by its address: `keys` are read after the work that is in it, and
                the memory of the answer is used again in its order. None: CuPy's current one. `device` is `gpu` then.

        Returns:
            The vectors [n, dim], or (vectors, found).

        Raises:
            NotFound: no such feature. InvalidInput: keys, dtype or out that do not fit. StorageError: the disk failed.
            MissingExtra, NotReady: there is no device tier to answer on.
        """
        if stream is not None or lies_on_gpu(keys):
            with of_caller(self._version, device, stream) as gpu:
                batch = self._batch_there(gpu, feature, keys, device, dtype, out)
                return self._answer(batch, device or "gpu", return_found)
        spec, table = self._feature(feature)
        if spec.padding_key is not None or device not in (None, "cpu"):
            return self._answer(self._batch(feature, keys, dtype=dtype, out=out), device, return_found)
        # the same at once, because a look-up of few keys would notice the steps
        codes = feature_codes(keys, spec, table.spec, self.colliding.get(spec.table))
        answer = answer_array((len(codes), table.spec.dim), answer_dtype(dtype), out)
        state = np.zeros(len(codes), _STATE)
        table.lookup(self._by_table[spec.table], self.seq, codes, answer, state)
        return (answer, state != _ABSENT) if return_found else answer

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
        if stream is not None or lies_on_gpu(keys):
            with of_caller(self._version, device, stream) as gpu:
                pooled = gpu.to_host(offsets), gpu.to_host(weights), combiner
                batch = self._batch_there(gpu, feature, keys, device, dtype, out, pooled)
                return self._answer(batch, device or "gpu", return_found)
        batch = self._batch(feature, keys, offsets, weights, combiner, dtype, out)
        if device not in (None, "cpu"):
            return self._answer(batch, device, return_found)
        lookup = BagLookup(batch)  # as `_answer` does it, in fewer steps
        answer = lookup.finish()
        return (answer, lookup.found) if return_found else answer

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
        session = self.predictor
        if session is None:
            if not self.has_dense:
                named = ", ".join(sorted(self.heads))
                other = f"name one of its heads, {named}" if named else "look rows up"
                raise InvalidInput(f"version {self.version} has no dense part, so it predicts nothing; {other}")
            why = f"the dense part of version {self.version} is not served: {self.unserved}"
            raise MissingExtra(why) if INSTALL in why else NotReady(why)
        answer = predict(self, session, inputs, outputs or ())
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
        """Start a look-up, pooled if `offsets` are given: what memory can answer is answered, without waiting.

        Arguments and errors as for `lookup` and `lookup_bags`. The view must be held until `Lookup.finish`.
        """
        return begin(
            self._batch(feature, keys, offsets=offsets, weights=weights, combiner=combiner, dtype=dtype, out=out)
        )

    def gathering(self, bindings: Bindings, features: tuple[str, ...]) -> Gathering | None:
        """How the rows of some features are looked up where a dense part reads them; None
        where each has to be by itself.
        """
        gathering = self._gatherings.get(features)
        if gathering is not None and gathering.bindings is bindings:
            return gathering
        sources = []
        places = {name: place for place, name in enumerate(bindings.features)}
        for name in features:
            spec, table = self._feature(name)
            if not can_gather(table):
                return None
            padding = None if spec.padding_key is None else int(self._padding[name])
            code = int(bindings.features[name].dtype == "float16")
            colliding = self.colliding.get(spec.table)
            sources.append(
                GatherSource(spec, table, self._by_table[spec.table], colliding, code, padding, places[name])
            )
        if len(self._gatherings) >= _MOST_GATHERINGS:
            self._gatherings.clear()
        gathering = self._gatherings[features] = Gathering(bindings, sources, self.seq)
        return gathering

    def answers_on_gpu(self, number: int) -> bool:
        """Whether answers can be left on the GPU of that number, as this process counts them."""
        gpu = self._version.gpu
        return gpu is not None and gpu.has(f"gpu:{number}")

    def rows_on(self, session: DenseSession) -> str | None:
        """The device on which `session` reads rows that the device tier has there; None: it reads CPU memory."""
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
    ) -> DeviceLookup:
        """Start a look-up whose rows are left on a device that is `rows_on`. Arguments and errors as for `begin`.

        Nothing is done before `DeviceLookup.finish`, until which the view must be held.
        """
        batch = self._batch(feature, keys, offsets=offsets, weights=weights, combiner=combiner, dtype=dtype)
        return DeviceLookup(batch, gpu_of(self._version, device))

    def _batch(
        self,
        feature: str,
        keys: KeysLike,
        offsets: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        combiner: str | None = None,
        dtype: str = "float32",
        out: Vectors | None = None,
        there: KeysThere | None = None,
    ) -> KeyBatch:
        """The request, checked: the only place where one is made. Errors as for `lookup`.

        `there`: keys that stay where they are.
        """
        spec, table = self._feature(feature)
        codes = feature_codes(keys, spec, table.spec, self.colliding.get(spec.table))
        padding = None if spec.padding_key is None else codes == self._padding[feature]
        n = len(codes) if there is None else len(there)
        bags = None
        if offsets is not None:
            how = combiner_of(spec, combiner)
            factors = None if weights is None else checked_weights(weights, n)
            bags = Pooling(check_offsets(offsets, n), factors, how)
        overlays = self._by_table[spec.table]
        return KeyBatch(table, overlays, self.seq, codes, padding, bags, answer_dtype(dtype), out, there)

    def _batch_there(
        self,
        gpu: Gpu,
        feature: str,
        keys: Any,
        device: str | None,
        dtype: str,
        out: Vectors | None,
        pooled: tuple[Any, Any, str | None] = (None, None, None),
    ) -> KeyBatch:
        """As `_batch`, of keys that may lie on the GPU; they stay there where that is possible.

        `pooled`: offsets, weights and the combiner.
        """
        there = None
        if device != "cpu":
            spec, table = self._feature(feature)
            there = keys_there(gpu, keys, spec, table, self._by_table[spec.table])
        here = gpu.to_host(keys) if there is None else _NO_KEYS
        return self._batch(feature, here, *pooled, dtype, out, there)

    def _answer(self, batch: KeyBatch, device: str | None, return_found: bool) -> Any:
        if device in (None, "cpu"):
            lookup = begin(batch)
            answer = lookup.finish()
            return (answer, lookup.found) if return_found else answer
        assert device is not None
        vectors, found = answer_on_device(batch, gpu_of(self._version, device))
        return (vectors, found) if return_found else vectors


def _padding_among(colliding: Mapping[str, CollidingKeys], version: Version) -> dict[str, int]:
    """The codes of padding keys of the tables in which keys collide."""
    return {
        name: int(as_codes([feature.padding_key], KeyType.STRING, colliding[feature.table])[0])
        for name, feature in version.features.items()
        if feature.padding_key is not None and feature.table in colliding
    }
