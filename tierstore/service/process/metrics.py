"""Metrics of the worker processes, as Prometheus families. Any thread; reads counters that others write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class Counted(Protocol):
    """A worker process, as far as its figures go."""

    number: int
    ready: bool
    gauges: dict[str, int]

    @property
    def restarts(self) -> int: ...


def families(workers: Sequence[Counted]) -> Iterator[Metric]:
    """The worker processes. Their look-ups and requests are in the figures of the service; these are theirs alone."""
    yield GaugeMetricFamily("tierstore_workers", "Worker processes that there are to be.", value=len(workers))
    yield GaugeMetricFamily(
        "tierstore_workers_ready", "Worker processes that answer.", value=sum(w.ready for w in workers)
    )
    yield CounterMetricFamily(
        "tierstore_worker_restarts", "Worker processes that were started anew.", value=sum(w.restarts for w in workers)
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
        for worker in workers:
            family.add_metric([str(worker.number)], worker.gauges.get(name, 0))
        yield family
