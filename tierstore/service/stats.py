"""Stats that are counted at every request: histograms, and the protocol's statistics of each model.

Adding is a bisection and three additions, far cheaper than with a metrics library. Any thread may add to
`InferenceStats` and `RequestTimes`; a `Histogram` has one writer at a time. A reader may see an addition half done,
which a scrape cannot distinguish from one that came a moment later.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tierstore.engine.events.observer import Observer
from tierstore.engine.lifecycle.throttle import LookupTimes
from tierstore.errors import FAULTS, NO_VERSION
from tierstore.types import model_and_head
from tierstore.verdicts import Requests

REQUEST_BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NOT_DATA_PLANE = frozenset({"admin", "grpc", "upstream"})  # among protocols
BATCH_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
FRESHNESS_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 86400.0)


class Histogram:
    """Counts by upper bound, sum and count."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def absorb(self, counts: list[int], total: float) -> None:
        """Add counts from elsewhere."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, cumulative count), the last `+Inf`: the exposition format's form."""
        cumulative = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            cumulative += count
            rows.append((bound, float(cumulative)))
        return rows


def bucket_quantiles(q: float, counts: np.ndarray, bounds: Sequence[float] = REQUEST_BOUNDS_S) -> np.ndarray:
    """float64 [n]: the quantile of each row of counts by bucket, int64 [n, buckets], interpolated within its bucket.

    NaN for a row of zeros; the last bound for values beyond it.
    """
    upto = counts.cumsum(axis=1, dtype=np.float64)
    wanted = q * upto[:, -1:]
    bucket = np.minimum((upto < wanted).sum(axis=1), len(bounds) - 1)
    at, edges = (np.arange(len(counts)), bucket), np.array([0.0, *bounds])
    inside = counts[at]
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.minimum(1.0, (wanted[:, 0] - upto[at] + inside) / inside)
    return np.where(upto[:, -1] > 0, edges[bucket] + part * (edges[bucket + 1] - edges[bucket]), np.nan)


@dataclass(slots=True)
class Timings:
    """Where one request's time went, in nanoseconds."""

    queued_ns: int = 0
    input_ns: int = 0
    inference_ns: int = 0
    output_ns: int = 0
    # parts of inference_ns
    lookup_ns: int = 0
    dense_ns: int = 0  # 0 for a request that does not need the dense part
    disk_ns: int = 0  # a part of lookup_ns: rows that memory lacked, from disk or other machines

    def add(self, more: Timings) -> None:
        self.queued_ns += more.queued_ns
        self.input_ns += more.input_ns
        self.inference_ns += more.inference_ns
        self.output_ns += more.output_ns
        self.lookup_ns += more.lookup_ns
        self.dense_ns += more.dense_ns
        self.disk_ns += more.disk_ns


@dataclass(slots=True)
class ModelCounts:
    """One version's numbers for the statistics extension."""

    success: int = 0
    failed: int = 0
    success_ns: int = 0
    failed_ns: int = 0
    last_inference_ms: int = 0
    spent: Timings = field(default_factory=Timings)
    outcomes: dict[str, int] = field(default_factory=dict)  # requests, by outcome
    seconds: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS_S))  # of successes

    def document(self) -> dict[str, object]:
        """The protocol's `inference_stats`. Every request is its own execution; nothing is cached as a whole."""

        def entry(count: int, ns: int) -> dict[str, int]:
            return {"count": count, "ns": ns}

        done, spent = self.success, self.spent
        return {
            "success": entry(done, self.success_ns),
            "fail": entry(self.failed, self.failed_ns),
            "queue": entry(done, spent.queued_ns),
            "compute_input": entry(done, spent.input_ns),
            "compute_infer": entry(done, spent.inference_ns),
            "compute_output": entry(done, spent.output_ns),
            "cache_hit": entry(0, 0),
            "cache_miss": entry(0, 0),
        }


@dataclass(slots=True)
class PredictTimes:
    """Requests that the dense part has answered: their number, and their nanoseconds in all, queued, in look-ups, in
    ONNX Runtime.

    The remainder of `total_ns` is this service's own: parsing, planning, encoding.
    """

    count: int = 0
    total_ns: int = 0
    queued_ns: int = 0
    lookup_ns: int = 0
    dense_ns: int = 0

    def add(self, elapsed_ns: int, spent: Timings) -> None:
        self.count += 1
        self.total_ns += elapsed_ns
        self.queued_ns += spent.queued_ns
        self.lookup_ns += spent.lookup_ns
        self.dense_ns += spent.dense_ns


class InferenceStats:
    """Statistics of the versions that answered, the latest few of each model. Any thread."""

    KEPT_VERSIONS = 8
    KEPT_NAMES = 4096  # of models and heads

    def __init__(self, times: LookupTimes) -> None:
        """`times` gets the time of each request, without its dense part."""
        self._times = times
        self._lock = threading.RLock()
        # guarded by _lock
        self._counts: dict[str, dict[int, ModelCounts]] = {}
        self._predicts: dict[str, PredictTimes] = {}

    def succeeded(self, model: str, version: int, elapsed_ns: int, spent: Timings) -> None:
        self._times.add(elapsed_ns - spent.dense_ns)
        with self._lock:
            counts = self.of(model, version)
            counts.success += 1
            counts.success_ns += elapsed_ns
            counts.last_inference_ms = time.time_ns() // 1_000_000
            counts.outcomes["ok"] = counts.outcomes.get("ok", 0) + 1
            counts.seconds.add(elapsed_ns / 1e9)
            counts.spent.add(spent)
            if spent.dense_ns:
                self._predicts.setdefault(model, PredictTimes()).add(elapsed_ns, spent)

    def predicts(self) -> dict[str, PredictTimes]:
        """By model, the times of its predictions."""
        with self._lock:
            return {model: replace(times) for model, times in self._predicts.items()}

    def failed(self, model: str, version: int, elapsed_ns: int, outcome: str = "error", requests: int = 1) -> None:
        with self._lock:
            counts = self.of(model, version)
            counts.outcomes[outcome] = counts.outcomes.get(outcome, 0) + requests
            counts.failed += requests
            counts.failed_ns += elapsed_ns

    def absorb(self, model: str, version: int, count: int, seconds: Histogram, spent: Timings, last_ms: int) -> None:
        """Add `count` successes counted elsewhere, with their latencies and where their time went."""
        with self._lock:
            counts = self.of(model, version)
            counts.success += count
            counts.success_ns += round(seconds.total * 1e9)
            counts.last_inference_ms = max(counts.last_inference_ms, last_ms)
            counts.outcomes["ok"] = counts.outcomes.get("ok", 0) + count
            counts.seconds.absorb(seconds.counts, seconds.total)
            counts.spent.add(spent)

    def by_version(self) -> list[tuple[str, int, ModelCounts]]:
        """(name of the model or head, version, counts) of each version that was requested."""
        with self._lock:
            return [(model, number, of) for model, versions in self._counts.items() for number, of in versions.items()]

    def requests(self, model: str, version: int | None) -> Requests:
        """The requests of a model and its heads that named a version or were assigned to it."""
        outcomes: Counter[str] = Counter()
        for name, number, counts in self.by_version():
            if number == version and model_and_head(name)[0] == model:
                outcomes.update(counts.outcomes.copy())
        return Requests(outcomes.total(), sum(outcomes[fault] for fault in FAULTS))

    def of(self, model: str, version: int) -> ModelCounts:
        """Counts of an existing version; made at its first request."""
        with self._lock:
            if model not in self._counts and len(self._counts) >= self.KEPT_NAMES:  # heads may come and go without end
                gone = next(iter(self._counts))
                del self._counts[gone]
                self._predicts.pop(gone, None)
            versions = self._counts.setdefault(model, {})
            counts = versions.get(version)
            if counts is None:
                kept = versions.keys() - {NO_VERSION}
                if version != NO_VERSION and len(kept) >= self.KEPT_VERSIONS:
                    del versions[min(kept, key=lambda number: versions[number].last_inference_ms)]
                counts = versions[version] = ModelCounts()
            return counts


class BatchStats:
    """Counts of runs of the dense part that joined requests: how many, their items, and those run apart instead."""

    def __init__(self) -> None:
        self.requests, self.items = Histogram(BATCH_SIZES), Histogram(BATCH_SIZES)
        self.apart = 0
        self._lock = threading.Lock()

    def add(self, requests: int, items: int) -> None:
        """Count a run. Any thread."""
        with self._lock:
            self.requests.add(requests)
            self.items.add(items)

    def add_apart(self, requests: int) -> None:
        """Count requests that waited together and could not be run as one. Any thread."""
        with self._lock:
            self.apart += requests


class RequestTimes:
    """`tierstore_request_seconds`: a histogram for each protocol and outcome. Any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.histograms: dict[tuple[str, str], Histogram] = {}  # changed under _lock

    def add(self, protocol: str, outcome: str, seconds: float) -> None:
        with self._lock:
            histogram = self.histograms.get((protocol, outcome))
            if histogram is None:
                histogram = self.histograms[(protocol, outcome)] = Histogram(REQUEST_BOUNDS_S)
            histogram.add(seconds)

    def absorb(self, protocol: str, outcome: str, more: Histogram) -> None:
        """Add requests that were counted elsewhere."""
        with self._lock:
            histogram = self.histograms.setdefault((protocol, outcome), Histogram(REQUEST_BOUNDS_S))
            histogram.absorb(more.counts, more.total)

    def of_data_plane(self) -> dict[str, Any]:
        """Requests of the data plane's protocols: upper bounds in seconds, requests in each bucket, and failures.

        Failures are `FAULTS`, and requests for which there was no room.
        """
        found = [item for item in list(self.histograms.items()) if item[0][0] not in _NOT_DATA_PLANE]
        counts = [sum(column) for column in zip(*(histogram.counts for _, histogram in found), strict=True)]
        failed = sum(sum(histogram.counts) for (_, outcome), histogram in found if outcome in {*FAULTS, "overloaded"})
        return {
            "bounds": list(REQUEST_BOUNDS_S),
            "counts": counts or [0] * (len(REQUEST_BOUNDS_S) + 1),
            "failed": failed,
        }

    @property
    def requests(self) -> int:
        """Requests answered, in all protocols and with any outcome."""
        return sum(sum(histogram.counts) for histogram in list(self.histograms.values()))


class FreshnessStats(Observer):
    """`tierstore_delta_freshness_seconds`: event time to visible, a histogram for each model.

    One writer at a time for a model.
    """

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}

    def delta_visible(self, model: str, seq: int, rows: int, freshness_s: float) -> None:
        # the engine publishes a model's deltas one after the other; `setdefault` is atomic between models
        self.histograms.setdefault(model, Histogram(FRESHNESS_BOUNDS_S)).add(freshness_s)
