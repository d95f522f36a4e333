"""Metrics of the worker processes, as Prometheus families. Any thread; reads counters that others write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from tierstore.service.fleet import Fleet


def families(fleet: Fleet) -> Iterator[Metric]:
    """The worker processes. Their look-ups and requests are in the figures of the service; these are theirs alone."""
    yield GaugeMetricFamily("tierstore_workers", "Worker processes that there are to be.", value=len(fleet.workers))
    yield GaugeMetricFamily(
        "tierstore_workers_ready", "Worker processes that answer.", value=sum(w.ready for w in fleet.workers)
    )
    yield CounterMetricFamily(
        "tierstore_worker_restarts", "Worker processes that were started anew.", value=fleet.restarts
    )
    for name, text in (
        ("lookup_threads_busy", "Look-up threads at work"),
        ("lookup_queue_depth", "Look-ups that wait for a thread"),
        ("lookup_rejected", "Look-ups refused as the queue was full, since its start"),
        ("inflight_bytes", "Bytes of look-ups in progress"),
        ("inflight_rejected", "Requests refused as that bound was reached, since its start"),
        ("connections", "Connections"),
        ("grpc_threads_busy", "gRPC look-up threads at work"),
        ("grpc_queue_depth", "gRPC look-ups that wait for a thread"),
        ("grpc_rejected", "gRPC look-ups refused as the queue was full, since its start"),
    ):
        family = GaugeMetricFamily(f"tierstore_worker_{name}", f"{text}, in a worker process.", labels=["worker"])
        for worker in fleet.workers:
            family.add_metric([str(worker.number)], worker.gauges.get(name, 0))
        yield family
