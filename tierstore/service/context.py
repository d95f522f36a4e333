"""The shared state of the service's parts: the store, the settings, the limits and the stats.

Made before the event loop runs, and used on it and on the pools; each member says which threads may use it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any, Protocol, runtime_checkable

import numpy as np
from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.engine.operations.for_peers import PeerSide
from tierstore.engine.operations.fronts import Fronts
from tierstore.engine.operations.problems import Problem
from tierstore.errors import NO_VERSION, TierstoreError
from tierstore.kernels import latency
from tierstore.reactor import layout as kernel
from tierstore.service.access import Access
from tierstore.service.dataplane.inference import DataPlane
from tierstore.service.error_status import outcome_of
from tierstore.service.forwarded import Proxies
from tierstore.service.history import History
from tierstore.service.limits.jobs import Jobs
from tierstore.service.limits.rates import RateLimits
from tierstore.service.limits.shedding import Shed, Waits
from tierstore.service.limits.worker_pool import ByteBudget, WorkerPool
from tierstore.service.protocols.oip.shared_memory import Regions
from tierstore.service.protocols.tfserving.signature import Signatures
from tierstore.service.request_log import RequestLog
from tierstore.service.spool import Spool
from tierstore.service.stats import (
    REQUEST_BOUNDS_S,
    BatchStats,
    FreshnessStats,
    Histogram,
    InferenceStats,
    RequestTimes,
    Timings,
)
from tierstore.service.tls import tls_of
from tierstore.service.traces import traces_of
from tierstore.tiers.background import register_requests

ADMIN_THREADS = 4
ADMIN_QUEUE = 64
EXPLAIN_QUEUE = 8
DELTAS_AT_ONCE = 2  # bodies of full size that may be held at a time


_NOT_COMPILED = "kernels could not be compiled, so Python answers what they would; the log says why"
# Kinds of problems: files, kernels, and the sources by the names that `start_sources` gives them; besides them
# `load_failed` of models.
SERVICE_KINDS = ("tokens", "certificate", "compiled_loops", "watch", "watch_snapshots", "kafka", "kafka_rows", "peers")


class ServicePart(Protocol):
    """An optional part of a service, with metrics of its own. Any thread may read them."""

    def families(self) -> Iterator[Metric]: ...


class PlanIndex(Protocol):
    """The plans by which a reactor answers."""

    def learn(
        self,
        model: str,
        view: Any,
        version: int | str | None,
        plan: Any,
        plan_source: Any,
        refusal: bytes | None = None,
    ) -> None: ...
    def learn_rows(self, model: str, view: Any, table: str, path: str, line: str) -> None: ...


class ChangeSource(ServicePart, Protocol):
    """A thread that applies changes that it reads from elsewhere."""

    def status(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@runtime_checkable
class RequiredSource(ChangeSource, Protocol):
    """A source without which the service is not ready."""

    copying: bool  # whether it copies models, or does not know yet whether it will
    caught_up: bool


class Service:
    """The service's shared state. Constant after construction, except `draining`, `awaits_grpc`, `reactors_state`
    and `http2_state`, which the event loop sets.
    """

    def __init__(self, store: Any, settings: Settings) -> None:
        self.store = store
        self.settings = settings
        self.access = Access(settings)
        self.tls = tls_of(settings)
        self.started_s = time.time()
        self.draining = False
        self._warm = not settings.ready_warm_share  # whether the wanted share is warm; once it is, it stays so
        self._heard = False  # whether other machines with rows, if any, have answered; once they have, it stays so
        self.dataplane = DataPlane(store, max_response=settings.max_response)
        self.shed = Shed()
        self.lookup_pool = WorkerPool(
            "lookup",
            threads=settings.lookup_threads,
            queue_limit=settings.lookup_queue,
            waits=Waits("lookup", self.shed, settings.max_queue_s),
            with_jobs=True,
        )
        register_requests(self.lookup_pool, first=True)
        self.admin_pool = WorkerPool("control", threads=ADMIN_THREADS, queue_limit=ADMIN_QUEUE)
        self.status_pool = WorkerPool("status", threads=1, queue_limit=ADMIN_QUEUE)  # metrics must not wait for deltas
        self.explain_pool = WorkerPool(
            "explain", threads=1, queue_limit=EXPLAIN_QUEUE
        )  # reads deltas of the log, for seconds
        # for calls that open, warm or drop versions, or wait for such calls; deltas and metrics must not wait for them
        self.switch_pool = WorkerPool("switch", threads=ADMIN_THREADS, queue_limit=ADMIN_QUEUE)
        self.inflight = ByteBudget("requests", settings.max_inflight)
        self.delta_bytes = ByteBudget("deltas", settings.max_delta * DELTAS_AT_ONCE)
        self.regions = Regions(enabled=settings.allow_client_shm, max_read=settings.max_request)
        self.signatures = Signatures()
        self.rates = RateLimits(settings, refused=lambda: self.shed.count("rate"))
        self.proxies = Proxies(settings.trusted_proxies)
        self.traces = traces_of(settings)
        self.request_log = RequestLog(settings, traces=self.traces)
        self.request_times = RequestTimes()
        self.inference_stats = InferenceStats(store.lookup_times)
        self.batches = BatchStats()
        self.freshness = FreshnessStats()
        self.history = History(store, self.inference_stats, self.request_times, self.refresh)
        self.fronts = Fronts(store.models, store.model)
        self.peer_side = PeerSide(store.models, store.model)
        self.spool = Spool.below(settings)
        self.jobs = Jobs(store, lambda model: settings.quota_of(model).loads)
        self.sources: dict[str, ChangeSource] = {}  # by the name in the status
        self.connection_limit: ServicePart | None = None  # if HTTP is served
        self.admin_connections: ServicePart | None = None  # if `admin_listen` is served
        self.reactors: ServicePart | None = None  # if HTTP is served
        self.reactors_state: str | None = None  # if there are reactors: "compiling", "running", "failed"
        self.http2_state = "compiling"  # the same for HTTP/2 and gRPC
        self.plans: PlanIndex | None = None  # of the reactors, once they serve
        self.calls: ServicePart | None = None  # of gRPC, if HTTP is served
        self.awaits_grpc = False  # whether the gRPC port will be opened, once kernels are compiled
        self._closing = threading.Lock()
        self._observers = (self.freshness, self.history, self.fronts)
        store.observers.extend(self._observers)

    @property
    def ready(self) -> bool:
        """Whether the service wants requests. It answers them in any case while it runs. Any thread."""
        if not self._heard:
            self._heard = self.store.placement.ready
        if not self._warm:
            self._warm = self.store.warm_share() >= self.settings.ready_warm_share
        return (
            self._heard
            and self._warm
            and self._caught_up
            and not (self.draining or self.awaits_grpc or self.unserved())
        )

    @property
    def copying(self) -> bool:
        """Whether models are being copied from peers, or it is not known yet which to copy."""
        return any(source.copying for source in self._followers())

    @property
    def _caught_up(self) -> bool:
        return all(source.caught_up for source in self._followers())

    def _followers(self) -> Iterator[RequiredSource]:
        return (source for source in self.sources.values() if isinstance(source, RequiredSource))

    def unserved(self) -> list[str]:
        """The models because of which the service wants no requests, so that a rolling update waits."""
        return [] if self.settings.ready_unserved else self.store.unserved()

    def problems(self) -> list[Problem]:
        """Problems of the service itself: files that could not be read again, sources, loads, compiled loops. Any
        thread.
        """
        found = [
            Problem("", "tokens", self.access.tokens.problem or ""),
            Problem("", "certificate", (self.tls and self.tls.problem) or ""),
            Problem("", "compiled_loops", _NOT_COMPILED if self.reactors_state == "failed" else ""),
            *(Problem(model, "load_failed", why) for model, why in self.jobs.failed().items()),
        ]
        for name, source in self.sources.items():
            status = source.status()
            found += [Problem("", name, text or "") for text in status.get("problems", [status.get("problem")])]
        return [problem for problem in found if problem.text]

    def parts(self) -> list[ServicePart]:
        """The optional parts of this service."""
        parts = self.connection_limit, self.admin_connections, self.reactors, self.calls
        return [self.access, *(part for part in parts if part is not None), *self.sources.values()]

    def refresh(self) -> None:
        """Bring the stats up to date. Any thread."""
        self.store.epochs.collect()
        self.spool.sweep()

    def absorb(self, version: tuple[str, str, int] | None, new: Any, highest: Any) -> None:
        """Add what reactors have counted (`reactor/layout.py` lists the counts). None: rows for fronts. Any thread."""
        seconds, counts = Histogram(REQUEST_BOUNDS_S), new.view(kernel.VERSION_COUNTS.dtype)[0]
        buckets = np.add.reduceat(counts["buckets"], latency.COARSE_FROM)
        seconds.absorb(buckets.tolist(), int(counts["success_ns"]) / 1e9)
        if version is None:
            self.request_times.absorb("upstream", "ok", seconds)
            return
        protocol, model, number = version
        if counts["refusals"] or counts["full_refusals"]:
            self._absorb_refused(protocol, model, number, counts)
        self.store.lookup_times.absorb(counts["buckets"])
        self.request_times.absorb(protocol, "ok", seconds)
        spent = Timings(0, *(int(counts[part]) for part in ("input_ns", "infer_ns", "output_ns")))
        spent.lookup_ns = spent.inference_ns
        done, last_ms = int(counts["successes"]), int(highest.view(kernel.VERSION_COUNTS.dtype)[0]["last_ms"])
        self.inference_stats.absorb(model, number, done, seconds, spent, last_ms)

    def _absorb_refused(self, protocol: str, model: str, version: int, counts: Any) -> None:
        """Add predictions that reactors have refused."""
        waits, full, took_ns = (int(counts[what]) for what in ("refusals", "full_refusals", "refusal_ns"))
        seconds = Histogram(REQUEST_BOUNDS_S)
        seconds.absorb(
            [waits + full, *[0] * len(REQUEST_BOUNDS_S)], took_ns / 1e9
        )  # none takes as long as the first bound
        self.shed.count("queue_wait", waits)
        self.shed.count("queue_full", full)
        self.lookup_pool.rejected += full
        self.request_times.absorb(protocol, "overloaded", seconds)
        self.inference_stats.failed(model, version, took_ns, "overloaded", waits + full)

    def count_failed(self, model: str, elapsed_ns: int, error: TierstoreError) -> None:
        """Count a failed look-up for the version that was chosen for it, or else the active one. Any thread.

        One that found no served version counts for `NO_VERSION` of its model. One for a model that is not there is not
        counted here, as its name may be anything.
        """
        version = error.version
        if version in (None, NO_VERSION):
            try:
                found = self.dataplane.model(model)
            except TierstoreError:
                return
            if version is None:
                version = found.active_version
            else:
                model = found.name  # without a head, of which there may be any
        if version is not None:
            self.inference_stats.failed(model, version, elapsed_ns, outcome_of(error))

    async def change(self, function: Callable[..., Any], *args: Any, pool: WorkerPool | None = None) -> Any:
        """Change what serves, on behalf of the requester; by default on the switch pool, as a change may take as
        long as a warm-up.
        """
        return await (pool or self.switch_pool).run(copy_context().run, function, *args)

    def close(self) -> None:
        """End the threads: queued work is finished, a running load is cancelled. The store stays open."""
        with self._closing:
            for source in self.sources.values():
                source.close()
            self.jobs.close()
            self.store.end_predictions()
            self.lookup_pool.close()
            self.switch_pool.close()
            self.admin_pool.close()
            self.status_pool.close()
            self.explain_pool.close()
            self.regions.close()
            self.fronts.close()
            self.peer_side.close()
            if self.traces is not None:
                self.traces.close()
            for observer in self._observers:
                if observer in self.store.observers:
                    self.store.observers.remove(observer)
