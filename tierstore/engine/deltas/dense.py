"""The dense parts of a model: made into sessions, checked and warmed before they serve.

`open` is for the thread that makes a version ready, `of_delta` for the thread that applies a delta; neither needs a
lock that look-ups need. Sessions live in memory only: the version's directory and the delta log hold the graphs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from tierstore.engine.reads.predict import predict
from tierstore.engine.reads.view import View
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.version import Version
from tierstore.errors import (
    Corruption,
    DeltaError,
    InferenceError,
    InvalidInput,
    Overloaded,
    RunLimit,
    SnapshotError,
    StorageError,
    TierstoreError,
    TooLarge,
    WrongPartition,
)
from tierstore.formats.delta.reader import Delta
from tierstore.formats.names import DENSE
from tierstore.formats.regular import read_regular
from tierstore.formats.snapshot.requests import ragged, read_request
from tierstore.predict.binding import FeatureInput
from tierstore.predict.runtime import Runtime
from tierstore.predict.session import Array, DenseCounts, DenseSession
from tierstore.predict.signature import Shape
from tierstore.predict.warmup import warm
from tierstore.tiers.background import yield_to_requests

log = logging.getLogger(__name__)


class DenseParts:
    """What deltas bring of a model's dense part. `counts` are over all its versions."""

    def __init__(
        self,
        model: str,
        runtime: Runtime,
        info_of: Callable[[int], VersionInfo | None],
        active: Callable[[], View | None],
    ) -> None:
        self._model, self._runtime, self._info_of, self._active = model, runtime, info_of, active
        self.counts = DenseCounts()

    @property
    def missing(self) -> str | None:
        """Why no dense part can be served here; None where they can."""
        return self._runtime.missing

    @property
    def kept(self) -> str:
        """What a status document says of the dense part of a version that is not open."""
        return "kept" if self._runtime.missing is None else f"kept, not served: {self._runtime.missing}"

    def open(self, version: Version, *, lenient: bool) -> None:
        """Have a version's dense part ready to run; nothing to do where it is, or where there is none.

        The version must hold the delta that brought it. SnapshotError for one that cannot be served; if `lenient` the
        version goes without, and says so.
        """
        info = version.info
        if not info.has_dense or version.predictor is not None or version.unserved is not None:
            return
        version.unserved = self._runtime.missing
        if version.unserved is not None:
            log.warning(
                "model %s: the dense part of version %d is not served: %s", self._model, info.number, version.unserved
            )
            return
        try:
            model = read_regular(info.where.dense)
        except OSError as error:
            raise StorageError(f"cannot read {info.where.dense}: {error.strerror or error}") from error
        check_dense(info, model)
        try:
            yield_to_requests()
            session = self._runtime.load(model, info.features, info.specs, self.counts, accepted=True)
            self._warm(session, View(version, (), version.watermark))
            version.predictor = session
        except (InvalidInput, InferenceError) as error:
            if not lenient:
                if isinstance(error, SnapshotError):
                    raise
                raise SnapshotError(str(error), file=DENSE) from error
            version.unserved = str(error)
            log.error("model %s: the dense part of version %d is not served: %s", self._model, info.number, error)

    def of_delta(
        self, delta: Delta, model: bytes, view: View, *, accepted: bool = False, waits: bool = True
    ) -> DenseSession | None:
        """The session of its new dense part, run on `view`, which the caller holds. None without the extra. DeltaError.

        For `accepted` and `waits` see `Runtime.load`.
        Of a delta that is for every version, an input that is a feature of the active version must be one here as well:
        else requests that suit that one would make no sense to this one.
        """
        if self._runtime.missing is not None:
            return None
        version = view.open_version
        try:
            yield_to_requests()
            session = self._runtime.load(
                model, version.features, version.specs, self.counts, accepted=accepted, waits=waits
            )
            if delta.base_version is None and (active := self._active()) is not None:
                _check_meaning(session, view, active)
            self._warm(session, view)
        except (InvalidInput, InferenceError) as error:
            raise DeltaError(f"delta {delta.seq}: the dense part cannot be served: {error}") from error
        return session

    def check(self, seq: int, model: bytes, number: int) -> None:
        """DeltaError if a dense part does not fit a version that is on disk and does not serve."""
        info = self._info_of(number)
        if info is None or self._runtime.missing is not None:
            return
        try:
            self._runtime.load(model, info.features, info.specs, self.counts)
        except InvalidInput as error:
            raise DeltaError(f"delta {seq}: the dense part does not fit version {number}: {error}") from error

    def _warm(self, session: DenseSession, view: View) -> None:
        """Run it: on requests made from its signature, then on those recorded in the snapshot, which must succeed.

        The former may fail, but not for their time or memory: they are small.
        """
        try:
            warm(session, lambda feature, lead: _rows(view, feature, lead), yield_to_requests)
        except (RunLimit, Overloaded, TooLarge) as error:
            raise InvalidInput(f"it cannot be run within its limits: {error}") from error
        except TierstoreError as error:
            log.warning("model %s: a made-up request fails, requests of clients may succeed: %s", self._model, error)
        for path in recorded(view.open_version.info):
            try:
                predict(view, session, ragged(read_request(path, file=path.name)))
            except WrongPartition as error:
                log.info("model %s: recorded request %s is for other nodes: %s", self._model, path.name, error)
                continue
            except (InvalidInput, RunLimit, Overloaded) as error:
                raise SnapshotError(f"the recorded request fails: {error}", file=f"requests/{path.name}") from error
            session.warmed += 1


def _check_meaning(session: DenseSession, view: View, active: View) -> None:
    for name in session.bindings.plain:
        if name in active.features:
            raise InvalidInput(
                f"input {name!r} is a feature of version {active.version} and none of version {view.version}"
            )


def check_dense(info: VersionInfo, model: bytes) -> None:
    """Corruption where a version's dense part is not what was written."""
    if info.dense_digest is not None and xxhash.xxh3_64_hexdigest(model) != info.dense_digest:
        raise Corruption(
            f"{info.where.dense} does not match its checksum: it was changed since it was written; drop the version "
            "and load it again"
        )


def recorded(info: VersionInfo) -> list[Path]:
    """The recorded requests of a version, in order."""
    return sorted(info.where.requests.glob("*.npz")) if info.where.requests.is_dir() else []


def _rows(view: View, feature: FeatureInput, lead: Shape) -> Array:
    """Rows of some keys that are in memory, uncounted: [*lead, dim]."""
    n = math.prod(lead)
    out = np.zeros((n, feature.dim), feature.dtype)
    table = view.open_version.tables[view.features[feature.tensor.name].table]
    held = table.host.sample_keys(n) if table.host is not None else np.empty(0, np.int64)
    if len(held):
        table.probe(view.overlays_of(table.spec.name), np.resize(held, n), out, np.zeros(n, np.uint8))
    return out.reshape(*lead, feature.dim)
