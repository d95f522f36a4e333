"""Golden examples: what a version must answer before it exists, run and compared.

An example is a recorded request with expected scores or rows. It runs as requests do (hash, padding, default, pooling,
graph, provider), on the rows as they were loaded: before any delta, and before the version's record is published. On
the thread of a load or of `verify`, at the load's priority; nothing here writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.arguments import keys_and_bags
from tierstore.engine.data.cascade import LookupCounts
from tierstore.engine.model import Model
from tierstore.engine.reads.predict import feature_rows
from tierstore.engine.reads.view import View
from tierstore.engine.versions.info import VersionInfo
from tierstore.engine.versions.version import Version
from tierstore.errors import (
    InferenceError,
    InvalidInput,
    NotFound,
    Overloaded,
    RunLimit,
    SnapshotError,
    TooLarge,
    WrongPartition,
)
from tierstore.formats import files
from tierstore.formats.names import GOLDEN_INDEX
from tierstore.formats.snapshot.golden import ATOL, GoldenEntry, GoldenExample, GoldenIndex, read_example
from tierstore.status import golden_text
from tierstore.tiers.background import Pace, in_background, yield_to_requests
from tierstore.types import Progress, ProgressFn

log = logging.getLogger(__name__)

RUN_S = 300.0  # after which the remaining examples are not run: a load must end
_SHOWN = 3  # numbers of a difference
_REFUSED = (InvalidInput, InferenceError, RunLimit, Overloaded, TooLarge, NotFound)


@dataclass
class GoldenReport:
    """How many examples a version has, and what became of them.

    held: those that were answered as expected. left_out: those that need what this node or load does not have. not_run:
    those that could not be compared whole here. largest_difference: of a number that was compared. why: of the first
    one that was left out or not run.
    """

    examples: int = 0
    held: int = 0
    left_out: int = 0
    not_run: int = 0
    largest_difference: float = 0.0
    why: str | None = None

    def document(self) -> dict[str, Any]:
        """For `version.json` and the status."""
        return asdict(self)


class _NotRun(Exception):
    """An example, or its scores, cannot be run here."""


class _LeftOut(Exception):
    """An example needs what is not here."""


def index_of(info: VersionInfo) -> GoldenIndex | None:
    """The golden examples in a version's directory; None if there are none."""
    path = info.where.root / GOLDEN_INDEX
    return GoldenIndex.read(path) if files.exists(path) else None


def examples_of(info: VersionInfo, index: GoldenIndex) -> Iterator[tuple[GoldenEntry, GoldenExample]]:
    """Each example of a version, read as it is needed."""
    for entry in index.examples:
        yield entry, read_example(info.where.golden / entry.path, file=entry.path)


def check_loaded(model: Model, info: VersionInfo, progress: ProgressFn) -> GoldenReport | None:
    """Run the golden examples of a version whose files are in place, and whose record is not. None without any.

    SnapshotError for a difference, naming the example, the output, and the numbers.
    """
    index = index_of(info)
    if index is None:
        return None

    def run() -> GoldenReport:
        rows = model.state.shared.placement.open_rows(model.name, info)
        try:
            version = Version(info, rows, lambda _: LookupCounts())
        except BaseException:
            rows.close()
            raise
        try:
            return _run_on(model, version, index, progress)
        finally:
            version.close()

    report = in_background(run)
    log.log(
        logging.INFO if report.held == report.examples else logging.WARNING,
        "model %s: version %d: golden examples: %s", model.name, info.number, golden_text(report.document()),
    )  # fmt: skip
    return report


def check_kept(model: Model, info: VersionInfo, version: Version, progress: ProgressFn) -> GoldenReport | int | None:
    """Run the golden examples of a version again; `version` is the same, open. None without any. SnapshotError.

    If the version is not at its snapshot's seq any more, so that its answers may be others, returns the seq that it is
    at.
    """
    index = index_of(info)
    if index is None:
        return None
    with model.publisher.hold_all() as served:
        view = served.numbered(info.number)
        at = version.watermark if view is None else view.seq
        if at != info.manifest.delta_seq:
            return at
        if view is None:
            return _run_on(model, version, index, progress)
        return _run_all(model, view, index, progress)


def _run_on(model: Model, version: Version, index: GoldenIndex, progress: ProgressFn) -> GoldenReport:
    """`_run_all` on a version that is not served."""
    model.dense.open(version, lenient=False, only={entry.head for entry in index.examples})
    return _run_all(model, View(version, (), version.watermark), index, progress)


def _run_all(model: Model, view: View, index: GoldenIndex, progress: ProgressFn) -> GoldenReport:
    """Run all examples on a view of the snapshot's rows, without a delta. SnapshotError."""
    info, throttle = view.open_version.info, model.state.shared.throttle
    run = _Runs(view, _incomplete(info, index), model.dense.missing, model.state.shared.dense.how)
    report = GoldenReport(examples=len(index.examples))
    pace, until_s = Pace(lambda: throttle.share), time.monotonic() + RUN_S
    for number, (entry, example) in enumerate(examples_of(info, index)):
        progress(Progress("golden examples", number, report.examples))
        pace.sleep()
        yield_to_requests()
        try:
            if time.monotonic() > until_s:
                raise _NotRun(f"the others took {RUN_S:g} s")
            largest = run.compare(number, entry, example)
            report.held += 1
            report.largest_difference = max(report.largest_difference, largest)
        except _LeftOut as error:
            report.left_out += 1
            report.why = report.why or str(error)
        except _NotRun as error:
            report.not_run += 1
            report.why = report.why or str(error)
    return report


def _incomplete(info: VersionInfo, index: GoldenIndex) -> frozenset[str]:
    """Tables that lack rows of the trainer: expired ones, or ones that were left out as the snapshot was written."""
    expired = (name for name, table in info.tables.items() if table.get("expired") or info.expired.get(name))
    return frozenset((*index.incomplete, *expired))


@dataclass(frozen=True)
class _Runs:
    """What examples run on. `missing`: why no dense part can be run. `how`: provider and threads, for messages."""

    view: View
    incomplete: frozenset[str]
    missing: str | None
    how: str

    def compare(self, number: int, entry: GoldenEntry, example: GoldenExample) -> float:
        """Run an example; returns the largest difference. SnapshotError for one that is too large."""
        try:
            largest, wrong = self._differences(entry, example)
        except WrongPartition as error:
            raise _LeftOut(f"its keys are of other partitions: {error}") from error
        except _REFUSED as error:
            of = f" of head {entry.head!r}" if entry.head else ""
            raise SnapshotError(f"golden example {number}{of} fails: {error}", file=_file(entry)) from error
        if wrong is not None:
            if (table := self._lacks_rows(example)) is not None:
                raise _LeftOut(f"table {table!r} lacks rows that it names, which expired or were left out")
            of = f" of head {entry.head!r}" if entry.head else ""
            raise SnapshotError(f"golden example {number}{of}: {wrong}", file=_file(entry))
        return largest

    def _differences(self, entry: GoldenEntry, example: GoldenExample) -> tuple[float, str | None]:
        """The largest difference, and what is wrong with the first output or feature that is off; else None."""
        features = self.view.features
        scores = {name: one for name, one in example.expected.items() if name not in features}
        got: dict[str, Any] = {
            name: feature_rows(self.view, name, example.inputs[name])
            for name in example.expected
            if name in features and name in example.inputs
        }
        if absent := [name for name in example.expected if name in features and name not in example.inputs]:
            raise InvalidInput(f"rows of feature {absent[0]!r} are expected, and the inputs have no keys of it")
        if scores and self.missing is None:
            got |= self.view.under(entry.head).predict(self._inputs(entry.head, example.inputs), outputs=list(scores))
        largest = 0.0
        for name, expected in example.expected.items():
            if name in got:
                off, wrong = difference(expected, got[name], entry.rtol, entry.atol)
                largest = max(largest, off)
                if wrong is not None:
                    if name in features:
                        return largest, f"the rows of feature {name!r}: {wrong}"
                    return largest, f"output {name!r}: {wrong}; run by {self.how}"
        if scores and self.missing is not None:
            raise _NotRun(f"scores need a dense part: {self.missing}")
        return largest, None

    def _inputs(self, head: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that the graph takes: a request may name rows of other features beside them."""
        session = self.view.under(head).session
        taken = () if session is None else (*session.bindings.features, *session.bindings.plain)
        return {name: one for name, one in inputs.items() if name in taken or name not in self.view.features}

    def _lacks_rows(self, example: GoldenExample) -> str | None:
        """A table that lacks rows, and of which the example names an absent key."""
        for name, value in example.inputs.items():
            feature = self.view.features.get(name)
            if feature is None or feature.table not in self.incomplete:
                continue
            keys, *_ = keys_and_bags(name, value)
            _, found = self.view.lookup(name, np.asarray(keys).reshape(-1), return_found=True)
            if not found.all():
                return feature.table
        return None


def difference(expected: npt.NDArray[Any], got: Any, rtol: float, atol: float | None) -> tuple[float, str | None]:
    """The largest difference of two arrays, and a text if they differ by more than is allowed; else None.

    Numbers may differ by `atol + rtol * abs(expected)`, where the answer is of floats; all else must be equal.
    """
    expected, got = _plain(expected), _plain(got)
    if expected.shape != got.shape:
        if [size for size in expected.shape if size != 1] != [size for size in got.shape if size != 1]:
            return 0.0, f"expected shape {list(expected.shape)}, got {list(got.shape)}"
        expected = expected.reshape(got.shape)
    if (expected.dtype.kind == "U") != (got.dtype.kind == "U"):
        kinds = ["strings" if array.dtype.kind == "U" else "numbers" for array in (expected, got)]
        return 0.0, f"expected {kinds[0]}, got {kinds[1]}"
    if got.dtype.kind != "f":
        wrong, largest = np.asarray(expected != got), 0.0
        allowed = "they must be equal"
    else:
        wanted, answered = expected.astype(np.float64), got.astype(np.float64)
        if atol is None:
            finite = np.abs(wanted[np.isfinite(wanted)])
            atol = ATOL * float(finite.max()) if finite.size else 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.where(
                (wanted == answered) | (np.isnan(wanted) & np.isnan(answered)), 0.0, np.abs(wanted - answered)
            )
            wrong = ~(off <= atol + rtol * np.where(np.isfinite(wanted), np.abs(wanted), 0.0))
        largest = float(np.where(np.isnan(off), np.inf, off).max(initial=0.0))
        allowed = f"the largest difference is {largest:.3g}, allowed is {atol:.3g} + {rtol:g} of what is expected"
    if not wrong.any():
        return largest, None
    places = np.argwhere(wrong)[:_SHOWN]
    pairs = [", ".join(_shown(array[tuple(place)]) for place in places) for array in (expected, got)]
    at = ", ".join(str(place.tolist()) for place in places)
    return largest, (
        f"{np.count_nonzero(wrong)} of {wrong.size} differ: expected {pairs[0]}, got {pairs[1]} at {at}; {allowed}"
    )


def _plain(values: Any) -> npt.NDArray[Any]:
    """An array of numbers, or of strings as text."""
    array: npt.NDArray[Any] = np.asarray(values)
    if array.dtype.kind == "S" or array.dtype.hasobject:
        texts = [one.decode() if isinstance(one, bytes) else str(one) for one in array.reshape(-1).tolist()]
        array = np.array(texts, np.str_).reshape(array.shape)
    return array


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, np.floating) else repr(value.item())


def _file(entry: GoldenEntry) -> str:
    return str(Path(GOLDEN_INDEX).with_name(entry.path))
