"""Micro-batches: small predict requests that come at the same time share look-ups and a run of the dense part.

Off unless `batch_max_items` is set. The event loop adds requests to an open batch; a thread of the look-up pool closes
the batch, runs it under one view, and answers each request. A batch is queued for the pool when its first request
comes, and requests join until a thread has popped it, so on an idle service no request waits. With `batch_delay_us` it
is queued that much later, or when it is full. A bad request fails alone: if a joined run fails, each request is run by
itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

import numpy as np
from prometheus_client.core import Metric

from tierstore.config import Settings
from tierstore.errors import Overloaded, TierstoreError
from tierstore.service.dataplane.inference import DataPlane, Inference
from tierstore.service.dataplane.joining import (
    JoinedRequest,
    Joint,
    joined_elements,
    joined_request,
    joined_shapes,
    same_answers,
    split_outputs,
)
from tierstore.service.dataplane.plan import Request
from tierstore.service.dataplane.plan_cache import PlanCache
from tierstore.service.families import counter, gauge, histograms
from tierstore.service.limits.shedding import Caller, Shed
from tierstore.service.limits.worker_pool import WorkerPool
from tierstore.service.stats import Histogram

SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Member(Protocol):
    """A request that can join a batch. One thread at a time: the event loop, then a thread of the pool."""

    caller: Caller

    def prepare(self) -> tuple[JoinedRequest, list[Any]]:
        """Read the request. Returns its part of the batch, and the arrays for its outputs."""

    def complete(self, arrays: list[Any], by: Inference) -> Any:
        """The outcome, once the arrays are filled from an inference that has finished."""

    def answer(self) -> Any:
        """The outcome of running it by itself."""


class _Batch:
    """Requests that will run together; others may join while the batcher lists it."""

    def __init__(self, key: Hashable, model: str, version: int) -> None:
        self.key, self.model, self.version = key, model, version
        self.members: list[Member] = []
        self.futures: list[asyncio.Future[Any]] = []
        self.items = 0
        self.handed_over = False
        self.timer: asyncio.TimerHandle | None = None


class Batcher:
    """Joins requests into batches. `add` is called on one event loop; any thread may read the metrics."""

    def __init__(self, settings: Settings, dataplane: DataPlane, pool: WorkerPool, shed: Shed) -> None:
        # constant after construction
        self.max_items = settings.batch_max_items
        self.waits = settings.batch_delay_us > 0  # for others to join, even if a thread is idle
        self._delay_s = settings.batch_delay_us / 1e6
        self._dataplane, self._pool, self._shed = dataplane, pool, shed
        self._requests = PlanCache()  # joined requests, with their plans, by key and shapes
        self.waiting_limit = pool.queue_limit + pool.threads
        # the event loop's
        self.waiting = 0  # requests in batches that are not answered yet
        self._lock = threading.Lock()
        # guarded by _lock
        self._open: dict[Hashable, _Batch] = {}
        self._sizes, self._counts = Histogram(SIZES), Histogram(SIZES)
        self._apart = 0

    def wants(self, joint: Joint | None) -> bool:
        """Whether a request should be joined with others. Any thread."""
        return joint is not None and joint.items <= self.max_items

    def add(self, member: Member, model: str, version: int, joint: Joint) -> asyncio.Future[Any]:
        """Answer a request together with others; await its outcome. Raises Overloaded at once if too many wait."""
        if self.waiting >= self.waiting_limit:
            self._shed.count("queue_full")
            raise Overloaded(f"{self.waiting} requests wait to be answered in batches already; try again in a second")
        loop = asyncio.get_running_loop()
        key = (model, version, joint.key)
        full: _Batch | None = None
        with self._lock:
            batch = self._open.get(key)
            if batch is not None and batch.items + joint.items > self.max_items:
                full, batch = batch, None
                self._shut(full)
            if begins := batch is None:
                batch = self._open[key] = _Batch(key, model, version)
            assert batch is not None
            future: asyncio.Future[Any] = loop.create_future()
            batch.members.append(member)
            batch.futures.append(future)
            batch.items += joint.items
            complete = batch.items == self.max_items
            if complete:
                self._shut(batch)
        self.waiting += 1
        future.add_done_callback(self._on_answered)
        if full is not None:
            self._hand_over(full)
        if complete or not self._delay_s:
            self._hand_over(batch)
        elif begins:
            batch.timer = loop.call_later(self._delay_s, self._hand_over, batch)
        return future

    def _on_answered(self, future: asyncio.Future[Any]) -> None:
        self.waiting -= 1

    def _shut(self, batch: _Batch) -> None:
        """Let no more requests join. Called with the lock held."""
        if self._open.get(batch.key) is batch:
            del self._open[batch.key]

    def _hand_over(self, batch: _Batch) -> None:
        """Queue a batch for the pool, once. Event loop only."""
        if batch.handed_over:
            return
        batch.handed_over = True
        if batch.timer is not None:
            batch.timer.cancel()
        try:
            running = self._pool.run(self._run, batch)
        except TierstoreError as error:
            with self._lock:
                self._shut(batch)
            _fail(batch, error)
            return
        running.add_done_callback(lambda done: _deliver(batch, done))

    # --- on a thread of the pool

    def _run(self, batch: _Batch) -> list[Any]:
        """An outcome for each member: its response, or its error."""
        with self._lock:
            self._shut(batch)
        members = batch.members
        outcomes: list[Any] = [None] * len(members)
        ready: list[tuple[int, JoinedRequest, list[Any]]] = []
        for i, member in enumerate(members):
            try:
                self._shed.check(member.caller)
                if len(members) == 1:
                    return [member.answer()]
                part, arrays = member.prepare()
                part.check()
                ready.append((i, part, arrays))
            except Exception as error:  # noqa: BLE001 - it is that member's outcome
                outcomes[i] = error
        if len(ready) > 1 and self._together(batch, ready, outcomes):
            return outcomes
        self.count_apart(len(ready) if len(ready) > 1 else 0)
        for i, *_ in ready:
            try:
                outcomes[i] = members[i].answer()
            except Exception as error:  # noqa: BLE001
                outcomes[i] = error
        return outcomes

    def _together(self, batch: _Batch, ready: list[tuple[int, JoinedRequest, list[Any]]], outcomes: list[Any]) -> bool:
        """Run the joined request. False if that is impossible, or has failed."""
        parts = [part for _, part, _ in ready]
        shapes = joined_shapes(parts)
        key = (batch.key, shapes)
        request: Request | None = self._requests.find(key)
        if request is None:
            request = joined_request(parts[0].request, shapes)
            self._requests.keep(key, request)
        try:
            with self._dataplane.open(batch.model, batch.version, request) as inference:
                specs = inference.plan.specs
                if not same_answers(specs, parts) or not all(spec.fixed for spec in specs):
                    return False
                arrays = [np.empty(spec.shape, spec.dtype) for spec in specs]
                inference.begin(joined_elements(parts), arrays)
                inference.finish()
        except TierstoreError:
            return False
        split_outputs(arrays, parts, [own for *_, own in ready])
        for i, _, own in ready:
            try:
                outcomes[i] = batch.members[i].complete(own, inference)
            except Exception as error:  # noqa: BLE001
                outcomes[i] = error
        self.count(len(parts), batch.items)
        return True

    def count(self, requests: int, items: int) -> None:
        """Count a run of so many requests. Any thread."""
        with self._lock:
            self._counts.add(requests)
            self._sizes.add(items)

    def count_apart(self, requests: int) -> None:
        """Count requests that could not be run together. Any thread."""
        with self._lock:
            self._apart += requests

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        with self._lock:
            requests = histograms("tierstore_batch_requests", "Predict requests of a batch.", "", [((), self._counts)])
            items = histograms("tierstore_batch_items", "Items of a batch.", "", [((), self._sizes)])
        yield from (requests, items)
        yield counter("tierstore_batch_apart", "Requests whose batch could not run as one.", self._apart)
        yield gauge("tierstore_batch_waiting", "Predict requests in batches that are not answered yet.", self.waiting)
        yield gauge("tierstore_batch_waiting_limit", "Predict requests that may be in batches.", self.waiting_limit)


def _deliver(batch: _Batch, done: asyncio.Future[list[Any]]) -> None:
    error = done.exception()
    if error is not None:
        _fail(batch, error)
        return
    for future, outcome in zip(batch.futures, done.result(), strict=True):
        if future.cancelled():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _fail(batch: _Batch, error: BaseException) -> None:
    for future in batch.futures:
        if not future.done():
            future.set_exception(error)
