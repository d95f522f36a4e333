"""A model, as its callers see it: look-ups, predictions, deltas, and what there is to know of it.

Which versions serve is `switching.py`, which there are `keeping.py`. Look-ups and deltas: any thread (see `serving.py`).

After a crash: CURRENT names the active version, its RocksDB holds every delta up to its watermark, and the delta
log those above.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from tierstore.engine.keeping import Keeping
from tierstore.engine.publisher import Lease, Publisher
from tierstore.engine.served import STABLE
from tierstore.engine.version import Version
from tierstore.engine.view import View
from tierstore.formats.delta import Delta
from tierstore.predict.signature import Signature
from tierstore.types import DeltaResult, FeatureSpec, TableSpec, Vectors

Floats = npt.NDArray[np.floating[Any]]  # a CuPy array where a device was asked for
Found = npt.NDArray[np.bool_]


class LookupOptions(TypedDict, total=False):
    """What all look-ups take beside `return_found`: of `View.lookup`, and which view that is."""

    dtype: str
    out: Vectors | None
    device: str | None
    version: int | str | None
    route: bytes | str | None


class Model(Keeping):
    """One served name."""

    # --- look-ups and deltas

    def view(self, version: int | str | None = None, route: bytes | str | None = None) -> Lease:
        """Hold one view for the length of a request: `with model.view() as view`. NotReady where nothing serves.

        `version` is a number or a label. A number that is not served is NotReady, or NotFound if there is no such
        version; an unknown label is NotFound. Without it the request goes to the active version or, as its share says,
        to the canary: requests of an equal `route` (a request id) to the same one, others at random.
        """
        if isinstance(version, int):
            self._info(version)
        return Lease(self._serving.publisher, version, route)

    def _enter(self, version: int | str | None, route: bytes | str | None) -> tuple[View, Publisher]:
        """What entering `view(version, route)` does, in fewer steps; the caller leaves the view."""
        if isinstance(version, int):
            self._info(version)
        publisher = self._serving.publisher
        return publisher.enter(version, route), publisher

    @overload
    def lookup(
        self, feature: str, keys: Any, *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> Floats: ...
    @overload
    def lookup(
        self, feature: str, keys: Any, *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup(
        self, feature: str, keys: Any, *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> Any: ...
    def lookup(
        self,
        feature: str,
        keys: Any,
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> Any:
        """`View.lookup` on the view that `view(version, route)` gives."""
        view, publisher = self._enter(version, route)
        began = time.perf_counter_ns() if self._times.watched else 0
        try:
            return view.lookup(feature, keys, **options)
        finally:
            publisher.leave(view)
            if began:
                self._times.add(time.perf_counter_ns() - began)

    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[False] = False,
        **options: Unpack[LookupOptions],
    ) -> Floats: ...
    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: Literal[True],
        **options: Unpack[LookupOptions],
    ) -> tuple[Floats, Found]: ...
    @overload
    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        weights: Any = None,
        combiner: str | None = None,
        return_found: bool = False,
        **options: Unpack[LookupOptions],
    ) -> Any: ...
    def lookup_bags(
        self,
        feature: str,
        keys: Any,
        offsets: Any,
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> Any:
        """`View.lookup_bags` on the view that `view(version, route)` gives."""
        view, publisher = self._enter(version, route)
        began = time.perf_counter_ns() if self._times.watched else 0
        try:
            return view.lookup_bags(feature, keys, offsets, **options)
        finally:
            publisher.leave(view)
            if began:
                self._times.add(time.perf_counter_ns() - began)

    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: Literal[False] = False, **options: Unpack[LookupOptions]
    ) -> dict[str, Floats]: ...
    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: Literal[True], **options: Unpack[LookupOptions]
    ) -> dict[str, tuple[Floats, Found]]: ...
    @overload
    def lookup_many(
        self, keys: Mapping[str, Any], *, return_found: bool = False, **options: Unpack[LookupOptions]
    ) -> dict[str, Any]: ...
    def lookup_many(
        self,
        keys: Mapping[str, Any],
        *,
        version: int | str | None = None,
        route: bytes | str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Several features at once, all of one version and one seq: {feature: what `lookup` returns}."""
        with self.view(version, route) as view:
            return {feature: view.lookup(feature, of, **options) for feature, of in keys.items()}

    def predict(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        version: int | str | None = None,
        route: bytes | str | None = None,
    ) -> Any:
        """`View.predict` on the view that `view(version, route)` gives."""
        with self.view(version, route) as view:
            return view.predict(inputs, outputs=outputs)

    @property
    def signature(self) -> Signature | None:
        """What the active version's dense part takes and gives; None where none is served. NotReady where nothing serves."""
        with self.view(STABLE) as view:
            return None if view.predictor is None else view.predictor.signature

    def apply_delta(self, delta: Delta, data: bytes | memoryview) -> DeltaResult:
        """Log a delta and make it visible; `data` is what `delta` was read from."""
        return self._serving.apply(
            delta, data, lambda number: self._infos[number].specs if number in self._infos else None, self.dense
        )

    # --- what there is

    @property
    def publisher(self) -> Publisher:
        """What holds the current views; for those who have compiled readers look up in them."""
        return self._serving.publisher

    @property
    def ready(self) -> bool:
        """Whether look-ups are answered."""
        return self._serving.current is not None

    @property
    def features(self) -> dict[str, FeatureSpec]:
        """Of the active version. NotReady where nothing serves."""
        with self.view(STABLE) as view:
            return view.features

    @property
    def tables(self) -> dict[str, TableSpec]:
        """Of the active version. NotReady where nothing serves."""
        with self.view(STABLE) as view:
            return view.holder.specs

    @property
    def problem(self) -> str | None:
        """Why nothing serves, what is lost of the log, or why background work does not get on."""
        damage = "; ".join(self._deltas.damage[:3]) or None
        return self._start_problem or damage or self._canary_problem or self._keeper.problem

    @property
    def last_event_time(self) -> str | None:
        """Of the newest delta applied since the start, ISO 8601."""
        event = self._serving.last_event
        return None if event is None else event.isoformat()

    def warming(self, version: Version) -> dict[str, int] | None:
        """How far the warm-up of a version is that serves after a start: `done`, `total` in keys; None where it is over."""
        warm_up = self._shared.warmer.of(version)
        return None if warm_up is None else {"done": warm_up.done, "total": warm_up.total}

    def resting_status(self) -> dict[str, int] | None:
        """What rests of the version that was left last: `version`, `memory_bytes`."""
        return self._resting.status()

    def log_status(self) -> dict[str, Any]:
        start, last = (self._deltas.start, self._deltas.last) if self._deltas.unusable is None else (None, None)
        return {"start": start, "last": last, "entries": self._deltas.entries}
