"""The gRPC server of a service: grpcio's, blocking, with bounds.

Look-ups are answered below it where they can be (`direct.py`); all else, and they where a release of grpcio does not
allow it, by its blocking methods (docs/decisions/grpc.md). Made on any thread, listening from then on; `start` answers,
`drain` says not to send more, `stop` ends. Each kind of call has threads of its own, so that no number of look-ups that
wait keeps a health check waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tierstore.config import Settings
from tierstore.service.context import Service
from tierstore.service.rpc.calls import Calls, Servicer
from tierstore.service.rpc.core import core_of
from tierstore.service.rpc.direct import DirectCalls
from tierstore.service.rpc.inference import Inference
from tierstore.service.rpc.pools import CallPool
from tierstore.service.rpc.standard import MAX_WATCHERS, Health, reflect
from tierstore.service.rpc.tfserving import TensorFlowServing

CONTROL_THREADS = 4
CONTROL_QUEUE = 64
STREAMS = 64  # each has a thread for as long as it is open
METADATA_ROOM = 1 << 20  # of a message, beside its tensors
KEEPALIVE_MS = 10_000  # how often a client may ping without being sent away


def servicers_of(service: Service) -> list[Servicer]:
    """The protocols that are spoken beside health and reflection."""
    return [Inference(service).servicer, *TensorFlowServing(service).servicers]


class GrpcServer:
    """`port` is the one that is listened on."""

    def __init__(self, service: Service, address: str) -> None:
        """OSError where `address` cannot be listened on."""
        settings = service.settings
        self._lookups = CallPool("look-up", threads=settings.lookup_threads, queue_limit=settings.lookup_queue)
        self._controls = CallPool("control", threads=CONTROL_THREADS, queue_limit=CONTROL_QUEUE)
        self._streams = CallPool("stream", threads=STREAMS, queue_limit=0)
        self._pools = (self._lookups, self._controls, self._streams)
        servicers = servicers_of(service)
        names = [servicer.name for servicer in servicers]
        self._health = Health(names)
        self._calls = Calls(
            service,
            [*servicers, self._health.servicer, reflect(names)],
            lookups=self._lookups,
            controls=self._controls,
            streams=self._streams,
        )
        self._calls.enter(self._health.servicer.name, "Watch", self._health.handler(self._controls))
        self._server = grpc.server(
            self._lookups,
            handlers=[self._calls],
            options=_options(settings),
            # a last resort, like the HTTP server's; the pools' own bounds refuse earlier
            maximum_concurrent_rpcs=sum(pool.threads + pool.queue_limit for pool in self._pools) + CONTROL_QUEUE,
        )
        core = core_of(self._server)
        self._direct = None if core is None else DirectCalls(service, core, self._lookups)
        if self._direct is not None:
            for servicer in servicers:
                self._direct.add(servicer)
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            self._close_pools()
            raise OSError(f"cannot listen on {address}") from error
        self._ended: threading.Event | None = None

    def start(self) -> None:
        self._server.start()
        if self._direct is not None:
            self._direct.start()

    def tell_health(self, *, serving: bool) -> None:
        """What health says from now on, until `drain`."""
        self._health.tell(serving)

    def drain(self) -> None:
        """Health says not to serve; calls are answered as before."""
        self._health.drain()

    def stop(self, grace_s: float) -> None:
        """Take no more calls, and give those in progress `grace_s`. Returns at once."""
        if self._ended is None:
            self._ended = self._server.stop(grace_s)
            self._calls.end_streams()
            self._health.end()

    def close(self) -> None:
        """Wait until it has ended, after `stop`."""
        if self._ended is not None:
            self._ended.wait()
        self._close_pools()

    def _close_pools(self) -> None:
        for pool in self._pools:
            pool.shutdown()
        self._calls.close()

    def families(self) -> Iterator[Metric]:
        """How full each pool is, and how many calls it refused."""
        busy = GaugeMetricFamily("tierstore_grpc_threads_busy", "gRPC threads at work.", labels=["pool"])
        threads = GaugeMetricFamily("tierstore_grpc_threads", "gRPC threads that there may be.", labels=["pool"])
        waiting = GaugeMetricFamily("tierstore_grpc_queue_depth", "gRPC calls that wait for a thread.", labels=["pool"])
        limit = GaugeMetricFamily("tierstore_grpc_queue_limit", "gRPC calls that may wait for one.", labels=["pool"])
        rejected = CounterMetricFamily(
            "tierstore_grpc_rejected", "gRPC calls refused as the pool was full.", labels=["pool"]
        )
        for pool in self._pools:
            for family, value in (
                (busy, pool.busy),
                (threads, pool.threads),
                (waiting, pool.waiting),
                (limit, pool.queue_limit),
                (rejected, pool.rejected),
            ):
                family.add_metric([pool.name], value)
        yield from (busy, threads, waiting, limit, rejected)
        yield GaugeMetricFamily(
            "tierstore_grpc_health_watchers", "Calls that watch the health.", value=self._health.watchers
        )
        yield GaugeMetricFamily("tierstore_grpc_health_watchers_limit", "Calls that may.", value=MAX_WATCHERS)


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.max_request + METADATA_ROOM),
        ("grpc.max_send_message_length", settings.max_response + METADATA_ROOM),
        ("grpc.so_reuseport", 0),  # else a second server would share the port in silence
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
