"""The dense parts of a model: made into sessions, checked and warmed before they serve.

`open` is for the thread that makes a version ready, `of_delta` for the thread that applies a delta; neither needs a
lock that look-ups need. Sessions are in memory only: the version's directory and the delta log hold the graphs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from tierstore.engine.data.dense_head import GONE, DenseHead, with_brought
from tierstore.engine.data.table_view import DTYPES
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
from tierstore.formats.regular import read_regular
from tierstore.formats.snapshot.recorded_requests import ragged, read_request
from tierstore.predict.binding import FeatureInput
from tierstore.predict.runtime import Runtime
from tierstore.predict.session import Array, DenseCounts, DenseSession
from tierstore.predict.signature import Shape
from tierstore.predict.warmup import mixes_rows, warm
from tierstore.tiers.background import yield_to_requests
from tierstore.types import MOST_HEADS

log = logging.getLogger(__name__)
_KEPT_COUNTS = 8 * MOST_HEADS


class DenseParts:
    """Makes the dense parts of one model ready: of versions that open, and of deltas."""

    def __init__(
        self,
        model: str,
        runtime: Runtime,
        info_of: Callable[[int], VersionInfo | None],
        active: Callable[[], View | None],
    ) -> None:
        self._model, self._runtime, self._info_of, self._active = model, runtime, info_of, active
        self._counts: dict[str, DenseCounts] = {}  # by head, also heads that are gone; over all versions

    def counts_of(self, head: str) -> DenseCounts:
        """The counts of a head's runs, over all versions."""
        if head not in self._counts and len(self._counts) >= _KEPT_COUNTS:  # heads may come and go without end
            self._counts.pop(next(iter(self._counts)), None)
        return self._counts.setdefault(head, DenseCounts())

    @property
    def missing(self) -> str | None:
        """Why no dense part can be served here; None if they can."""
        return self._runtime.missing

    @property
    def kept(self) -> str:
        """The status text for the dense part of a version that is not open."""
        return "kept" if self._runtime.missing is None else f"kept, not served: {self._runtime.missing}"

    def open(self, version: Version, *, lenient: bool, only: Container[str] | None = None) -> None:
        """Make a version's dense parts, or `only` some, ready to run, unless they are.

        The version must hold the deltas that brought them. SnapshotError for a dense part that cannot be served; if
        `lenient` the version goes without, and says so.
        """
        opened = dict(version.heads)
        for head in version.info.heads:
            if only is not None and head not in only:
                continue
            if (before := opened.get(head, DenseHead())).session is None and before.unserved is None:
                opened[head] = self._opened(version, head, lenient=lenient)
        version.heads = opened

    def _opened(self, version: Version, head: str, *, lenient: bool) -> DenseHead:
        info, what = version.info, f"the dense part {part_of(head)}of version {version.number} is not served"
        if (missing := self._runtime.missing) is not None:
            log.warning("model %s: %s: %s", self._model, what, missing)
            return DenseHead(unserved=missing)
        path = info.where.dense(head)
        try:
            model = read_regular(path)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
        check_dense(info, head, model)
        try:
            yield_to_requests()
            session = self._runtime.load(model, info.features, info.specs, self.counts_of(head), accepted=True)
            self._warm(session, View(version, (), version.watermark), head)
        except (InvalidInput, InferenceError) as error:
            if not lenient:
                if isinstance(error, SnapshotError):
                    raise
                raise SnapshotError(str(error), file=path.name) from error
            log.error("model %s: %s: %s", self._model, what, error)
            return DenseHead(unserved=str(error))
        return DenseHead(session)

    def of_delta(
        self, delta: Delta, graphs: Mapping[str, bytes], view: View, *, accepted: bool = False, waits: bool = True
    ) -> dict[str, DenseHead]:
        """The new dense parts of a delta, tried on `view`, which the caller holds; not tried without the extra.
        DeltaError.

        For `accepted` and `waits` see `Runtime.load`. In a delta for every version, an input that is a feature of the
        active version must be a feature here too: otherwise requests for that version would make no sense to this one.
        """
        heads = with_brought(view.heads, {head: DenseHead(graph=graph) for head, graph in graphs.items()})
        if len(heads.keys() - {""}) > MOST_HEADS:
            raise DeltaError(
                f"delta {delta.seq}: expected at most {MOST_HEADS} heads with it, got {len(heads)}; take some away"
            )
        return {
            head: self._of_delta(delta, head, graph, view, accepted=accepted, waits=waits)
            for head, graph in graphs.items()
        }

    def _of_delta(self, delta: Delta, head: str, graph: bytes, view: View, *, accepted: bool, waits: bool) -> DenseHead:
        missing = self._runtime.missing
        if missing is not None or graph == GONE:
            return DenseHead(None, missing, graph)
        version = view.open_version
        try:
            yield_to_requests()
            session = self._runtime.load(
                graph, version.features, version.specs, self.counts_of(head), accepted=accepted, waits=waits
            )
            if delta.base_version is None and (active := self._active()) is not None:
                _check_meaning(session, view, active)
            self._warm(session, view, head)
        except (InvalidInput, InferenceError) as error:
            raise _unfit(delta, head, "cannot be served", error) from error
        return DenseHead(session, None, graph)

    def check(self, delta: Delta, number: int) -> None:
        """DeltaError if a dense part does not fit a version that is on disk and does not serve."""
        info = self._info_of(number)
        if info is None or self._runtime.missing is not None:
            return
        for head, graph in delta.dense.items():
            try:
                if graph != GONE:
                    self._runtime.load(graph, info.features, info.specs, self.counts_of(head))
            except InvalidInput as error:
                raise _unfit(delta, head, f"does not fit version {number}", error) from error

    def _warm(self, session: DenseSession, view: View, head: str) -> None:
        """Run a session: on requests made from its signature, then on requests recorded in the snapshot, which must
        succeed.

        The first may fail, but not for lack of time or memory: they are small.
        """
        try:
            warm(session, lambda feature, lead: _rows(view, feature, lead), yield_to_requests)
        except (RunLimit, Overloaded, TooLarge) as error:
            raise InvalidInput(f"it cannot be run within its limits: {error}") from error
        except TierstoreError as error:
            log.warning("model %s: a made-up request fails, requests of clients may succeed: %s", self._model, error)
        for operator, transform, _ in session.bindings.misapplied:
            log.warning(
                "model %s: the dense part %shas a %s with post_transform %s, which ONNX Runtime applies otherwise than "
                "ONNX specifies: it may answer margins for probabilities; write it as nodes behind the trees "
                "(Sigmoid, Softmax)", self._model, part_of(head), operator, transform,
            )  # fmt: skip
        with suppress(TierstoreError):  # of made-up requests, which may make no sense to it
            if mixes_rows(session):
                session.bindings = replace(session.bindings, mixes_rows=True)
                log.warning(
                    "model %s: the dense part %sanswers a row otherwise by which others are in its batch (does it "
                    "quantize at run time?), so requests are not joined; a request of many rows is answered as one "
                    "batch", self._model, part_of(head),
                )  # fmt: skip
        for path in recorded(view.open_version.info, head):
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


def part_of(head: str) -> str:
    """The head in a message, followed by a blank; empty for the head without a name."""
    return f"{head!r} " if head else ""


def _unfit(delta: Delta, head: str, what: str, error: Exception) -> DeltaError:
    return DeltaError(f"delta {delta.seq}: the dense part {part_of(head)}{what}: {error}")


def check_dense(info: VersionInfo, head: str, model: bytes) -> None:
    """Corruption if a version's dense part is not the one that was written."""
    expected = info.heads.get(head)
    if expected is not None and xxhash.xxh3_64_hexdigest(model) != expected:
        raise Corruption(
            f"{info.where.dense(head)} does not match its checksum: it was changed since it was written; drop the "
            "version and load it again"
        )


def recorded(info: VersionInfo, head: str) -> list[Path]:
    """The recorded requests of a version's head, in order."""
    folder = info.where.requests(head)
    return sorted(folder.glob("*.npz")) if folder.is_dir() else []


def _rows(view: View, feature: FeatureInput, lead: Shape) -> Array:
    """Rows of some keys that are in memory, uncounted: [*lead, dim]."""
    n = math.prod(lead)
    out = np.zeros((n, feature.dim), feature.dtype)
    under = view.feature(feature.tensor.name).rows
    held = under.table.host.sample_keys(n) if under.table.host is not None else np.empty(0, np.int64)
    if len(held):
        under.probe(np.resize(held, n), out, np.zeros(n, np.uint8), DTYPES.index(out.dtype))
    return out.reshape(*lead, feature.dim)
