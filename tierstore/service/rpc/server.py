"""The gRPC server of a service: grpcio's, blocking, with limits.

Look-ups are answered below grpcio's server where that is possible (`direct.py`); where a release of grpcio does not allow
it, and for all other calls, by its blocking methods (docs/decisions/grpc.md). Made on any thread, and listening from then on;
`start` answers, `drain` reports not to send more, `stop` ends. Each kind of call has threads of its own, so that no number of
waiting look-ups delays a health check.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tierstore.config import Settings
from tierstore.service.context import Service
from tierstore.service.process import allowed_connections
from tierstore.service.rpc.call_pool import CallPool
from tierstore.service.rpc.direct import DirectCalls
from tierstore.service.rpc.grpc_core import core_of
from tierstore.service.rpc.grpcio_health import Health, reflections
from tierstore.service.rpc.handlers import Handlers, Pools, infer_stream
from tierstore.service.rpc.health import MAX_WATCHERS
from tierstore.service.rpc.methods import Servicer
from tierstore.service.rpc.oip import InferenceService
from tierstore.service.rpc.tfserving import TensorFlowServing
from tierstore.service.rpc.waiting import DeadlineThread, Waiting
from tierstore.service.tls import Credentials, Tls

# grpcio's core has two ways to read connections. With the older one, the thread that waits for the next event reads them
# itself, without threads of the core: a third less processor time a call (docs/decisions/grpc.md). The variable is read
# when the core is first used in a process; a value that is set already stays.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
READY_POLL_S = 0.1
ADMIN_THREADS = 4
ADMIN_QUEUE = 64
HEALTH_THREADS = 1
STREAMS = 64  # each has a thread for as long as it is open
WATCHES = 64  # each has a thread until it has said what it watches
METADATA_ROOM = 1 << 20  # of a message, in addition to its tensors
KEEPALIVE_MS = 10_000  # how often a client may ping without being sent away
PING_MS, PONG_MS = 30_000, 20_000  # how often a client is pinged, and how long the answer may take


def servicers_of(service: Service) -> list[Servicer]:
    """The protocols that are served, besides health and reflection."""
    return [InferenceService(service).servicer, *TensorFlowServing(service).servicers]


class GrpcServer:
    """`port` is the port that it listens on."""

    def __init__(self, service: Service, address: str) -> None:
        """OSError where `address` cannot be listened on."""
        settings = service.settings
        self.lookup_pool = CallPool("look-up", threads=settings.lookup_threads, queue_limit=settings.lookup_queue)
        self._pools = pools = Pools(
            self.lookup_pool,
            controls=CallPool("control", threads=ADMIN_THREADS, queue_limit=ADMIN_QUEUE),
            switches=CallPool("switch", threads=ADMIN_THREADS, queue_limit=ADMIN_QUEUE),
            health=CallPool("health", threads=HEALTH_THREADS, queue_limit=ADMIN_QUEUE),
            streams=CallPool("stream", threads=STREAMS, queue_limit=0),
            watches=CallPool("watch", threads=WATCHES, queue_limit=0),
        )
        # half of what is allowed over HTTP: files are left for both, and for everything else
        self.most_connections = max(1, allowed_connections(settings.max_connections) // 2)
        servicers = servicers_of(service)
        names = [servicer.name for servicer in servicers]
        self._health = Health(names)
        inference, *_ = servicers
        self._calls = Handlers(
            service,
            [*servicers, self._health.servicer],
            [(inference, "ModelStreamInfer", infer_stream(service, inference)), *reflections(names)],
            pools,
        )
        watch = self._health.handler(pools.watches)
        self._calls.enter(pools.watches, self._health.servicer.name, "Watch", watch, self._health.late)
        self._server = grpc.server(
            self.lookup_pool,
            handlers=[self._calls],
            options=[*_options(settings), ("grpc.max_allowed_incoming_connections", self.most_connections)],
            # a last resort; the pools' own limits refuse earlier
            maximum_concurrent_rpcs=sum(pool.threads + pool.queue_limit for pool in self._pools) + ADMIN_QUEUE,
        )
        core = core_of(self._server)
        self._direct = None if core is None else DirectCalls(service, core, pools)
        late: list[Waiting[Any]] = [self._calls.unread, self._health.late]
        if self._direct is not None:
            for servicer in (*servicers, self._health.servicer):
                self._direct.add(servicer)
            late += [self._direct.unread, *(pool.receiving for pool in pools)]
        self._deadlines = DeadlineThread(late)
        try:
            self.port: int = _add_port(self._server, address, service.tls)
        except RuntimeError as error:
            self._close_pools()
            raise OSError(f"cannot listen on {address}") from error
        self._ended: threading.Event | None = None

    def start(self) -> None:
        self._server.start()
        self._deadlines.start()
        if self._direct is not None:
            self._direct.start()

    async def report_when(self, ready: Callable[[], bool]) -> None:
        """Report health as soon as the service is `ready`, and not before: clients watch it and do not poll."""
        if ready():
            return
        self._health.report(False)
        while not ready():
            await asyncio.sleep(READY_POLL_S)
        self._health.report(True)

    def drain(self) -> None:
        """Health reports not to serve; calls are answered as before."""
        self._health.drain()

    def stop(self, grace_s: float) -> None:
        """Accept no more calls, and let those in progress run for `grace_s`. Returns at once."""
        if self._ended is None:
            self._ended = self._server.stop(grace_s)
            self._calls.end_streams()
            if self._direct is not None:
                self._direct.stop()
            self._health.end()

    def close(self) -> None:
        """Wait until it has ended, after `stop`."""
        if self._ended is not None:
            self._ended.wait()
        self._close_pools()

    def _close_pools(self) -> None:
        self._deadlines.close()
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


def _add_port(server: grpc.Server, address: str, tls: Tls | None) -> int:
    """Add the port, with TLS where there is some: then each handshake uses the certificate that is current.

    Where clients need certificates each handshake gets a configuration of its own, so that no session is resumed: a resumed
    one would let a certificate in that has expired since.
    """
    if tls is None:
        return int(server.add_insecure_port(address))
    used = tls.current

    def changed() -> Any:
        nonlocal used
        current = tls.current
        if current is used and used.client_ca is None:
            return None
        used = current
        return _configuration(current)

    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(used), changed, require_client_authentication=used.client_ca is not None
    )
    return int(server.add_secure_port(address, credentials))


def _configuration(credentials: Credentials) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key, credentials.certificate)], root_certificates=credentials.client_ca
    )


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.max_request + METADATA_ROOM),
        ("grpc.max_send_message_length", settings.max_response + METADATA_ROOM),
        ("grpc.so_reuseport", 0),  # else a second server would share the port in silence
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", PONG_MS),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
    ]
