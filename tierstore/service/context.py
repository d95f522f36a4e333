"""What the parts of the service share: the store, the settings, the bounds and the figures.

Made before the event loop runs, used on it and on the pools; each member says who may use it. Nothing survives a
crash but what the store keeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any, Protocol

import numpy as np
from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.errors import TierstoreError
from tierstore.kernels import latency
from tierstore.kernels import reactor_words as kernel
from tierstore.service.bounds.jobs import Jobs
from tierstore.service.bounds.pool import ByteBudget, WorkerPool
from tierstore.service.bounds.shed import Shed, Waits
from tierstore.service.figures import REQUEST_BOUNDS_S, Freshness, Histogram, InferStats, RequestTimes, Timings
from tierstore.service.oip.shared_memory import Regions
from tierstore.service.plane.batching import Batcher
from tierstore.service.plane.dataplane import DataPlane
from tierstore.service.plane.known import KnownRequests
from tierstore.service.request_log import RequestLog
from tierstore.service.status import outcome_of, status_of
from tierstore.service.tfs.signature import Signatures
from tierstore.tiers.background import watch

CONTROL_THREADS = 4
CONTROL_QUEUE = 64
DELTAS_AT_ONCE = 2  # bodies of full size that may be held at a time


class Part(Protocol):
    """A part that not every service has, and that has metrics of its own. Any thread may ask for them."""

    def families(self) -> Iterator[Metric]: ...


class Plans(Protocol):
    """What a reactor answers by."""

    def learn(
        self, model: Any, view: Any, asked: Any, version: int | str | None, text: memoryview, plan: Any, answer: Any
    ) -> None: ...


class Watch(Part, Protocol):
    """What takes deltas from a directory."""

    def status(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Service:
    """The members, constant after construction, except `draining`: set by the event loop when that begins."""

    def __init__(self, store: Any, settings: Settings) -> None:
        self.store = store
        self.settings = settings
        self.started_s = time.time()
        self.draining = False
        self._warm = not settings.ready_warm_share  # as far as that asks; once it is, it stays so
        self.dataplane = DataPlane(store, max_response=settings.max_response)
        self.shed = Shed()
        self.lookups = WorkerPool(
            "lookup",
            threads=settings.lookup_threads,
            queue_limit=settings.lookup_queue,
            waits=Waits("lookup", self.shed, settings.max_queue_s),
        )
        watch(self.lookups, first=True)
        self.batches = Batcher(settings, self.dataplane, self.lookups, self.shed)
        self.control = WorkerPool("control", threads=CONTROL_THREADS, queue_limit=CONTROL_QUEUE)
        # what opens, warms or drops versions, and waits for others that do; deltas and figures wait for none of that
        self.switches = WorkerPool("switch", threads=CONTROL_THREADS, queue_limit=CONTROL_QUEUE)
        self.inflight = ByteBudget("look-ups", settings.max_inflight)
        self.delta_bytes = ByteBudget("deltas", settings.max_delta * DELTAS_AT_ONCE)
        self.regions = Regions(enabled=settings.allow_client_shm, max_read=settings.max_request)
        self.known_requests = KnownRequests()
        self.signatures = Signatures()
        self.request_log = RequestLog(settings)
        self.request_times = RequestTimes()
        self.infer_stats = InferStats(store.lookup_times)
        self.freshness = Freshness()
        self.jobs = Jobs(store)
        self.watcher: Watch | None = None
        self.door: Part | None = None  # where HTTP is served
        self.reactors: Part | None = None  # where HTTP is served
        self.plans: Plans | None = None  # theirs
        self.grpc: Part | None = None  # where gRPC is served
        self._closing = threading.Lock()
        store.observers.append(self.freshness)

    @property
    def ready(self) -> bool:
        """Whether the service asks for requests. It answers them in any case, as long as it runs. Any thread."""
        if not self._warm:
            self._warm = self.store.warm_share() >= self.settings.ready_warm_share
        return self._warm and not self.draining

    def parts(self) -> list[Part]:
        """The parts that there are."""
        return [part for part in (self.door, self.reactors, self.grpc, self.watcher) if part is not None]

    def refresh(self) -> None:
        """Bring the figures up to now. Any thread."""
        self.store.epochs.collect()

    def absorb(self, version: tuple[str, int], new: Any, highest: Any) -> None:
        """Count what reactors have answered (`kernels/reactor_words.py` has the counts). Any thread."""
        seconds = Histogram(REQUEST_BOUNDS_S)
        self.store.lookup_times.absorb(new[kernel.BUCKETS_FROM :])
        buckets = np.add.reduceat(new[kernel.BUCKETS_FROM :], latency.COARSE_FROM)
        seconds.absorb(buckets.tolist(), int(new[kernel.SUCCESS_NS]) / 1e9)
        self.request_times.absorb("oip_http", "ok", seconds)
        spent = Timings(0, *(int(new[word]) for word in (kernel.INPUT_NS, kernel.INFER_NS, kernel.OUTPUT_NS)))
        spent.lookup_ns = spent.infer_ns
        self.infer_stats.absorb(*version, int(new[kernel.SUCCESSES]), seconds, spent, int(highest[kernel.LAST_MS]))

    def count_failed(self, model: str, elapsed_ns: int, error: TierstoreError) -> None:
        """Count a look-up that failed, for the version that had been chosen for it or the active one. Any thread."""
        version = error.version
        if version is None:
            try:
                version = self.dataplane.model(model).active_version
            except TierstoreError:
                return
        if version is not None:
            self.infer_stats.failed(model, version, elapsed_ns, outcome_of(status_of(error)))

    async def change(self, function: Callable[..., Any], *args: Any, pool: WorkerPool | None = None) -> Any:
        """Change what serves, in the name of whoever asks; on the pool for switches, as that may take as long as warming."""
        return await (pool or self.switches).run(copy_context().run, function, *args)

    def close(self) -> None:
        """End the threads: what is queued is finished, a running load is cancelled. The store stays open."""
        with self._closing:
            if self.watcher is not None:
                self.watcher.close()
            self.jobs.close()
            self.lookups.close()
            self.switches.close()
            self.control.close()
            self.regions.close()
            if self.freshness in self.store.observers:
                self.store.observers.remove(self.freshness)
