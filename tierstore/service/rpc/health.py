"""Health checking and reflection, for gRPC's own tools (grpc.health.v1, grpc.reflection.v1alpha).

Health is that of the server as a whole and of each service: serving, from when the server is ready until it begins to
drain. Whether a model answers is for ModelReady to say. Methods run on the pools' threads; any thread may call
`Health.drain`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tierstore.errors import NotFound
from tierstore.service.rpc.call_pool import CallPool
from tierstore.service.rpc.caller import RpcCaller
from tierstore.service.rpc.methods import STANDARD, Context, Servicer, by_message, parse_message
from tierstore.service.rpc.protobuf import POOL
from tierstore.service.rpc.waiting import Waiting

MAX_WATCHERS = 256  # of health; they need no thread
REQUEST_S = 10.0  # for a watcher's request to come; until then it has one


class Health:
    """`services` are the full names of the services whose health is reported."""

    def __init__(self, services: Sequence[str]) -> None:
        self._health = health.HealthServicer()
        self._names = (health.OVERALL_HEALTH, *services)
        self._serving, self._drains, self._ended = True, False, False
        self.report(True)
        self._lock = threading.Lock()
        self._watchers: dict[Context, str] = {}  # with the hosts that they are on; guarded by _lock
        self.late: Waiting[Context] = Waiting(lambda context: context.cancel())  # watchers that have not said of what
        check = by_message(health_pb2.HealthCheckRequest, self._check)
        self.servicer = Servicer(health.SERVICE_NAME, STANDARD, health={"Check": check})

    def handler(self, pool: CallPool) -> Any:
        """The handler of Watch: its request is awaited and first answered on `pool`, the others are made by the thread that changes the health."""

        def watch(requests: Iterator[Any], context: Context, send: Callable[[Any], None]) -> None:
            self.late.add(context, REQUEST_S)
            if self._ended:
                self.late.end_all()
            request = next(requests, None)
            if not self.late.remove(context) or request is None:
                return
            if not self._admit(context, RpcCaller((), context.peer).host):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} calls watch the health already")
            if context.add_callback(lambda: self._gone(context)):
                self._health.Watch(request, context, send)
                if self._ended:
                    context.cancel()
            else:
                self._gone(context)

        watch.experimental_non_blocking = True  # type: ignore[attr-defined]
        watch.experimental_thread_pool = pool  # type: ignore[attr-defined]
        # of many requests, though there is one: so it can be ended before that comes
        return grpc.stream_stream_rpc_method_handler(
            watch,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )

    def report(self, serving: bool) -> None:
        """Set the health that is reported from now on; nothing changes once it drains. Any thread."""
        states = health_pb2.HealthCheckResponse
        self._serving = serving
        for name in self._names:
            self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    def drain(self) -> None:
        """Not serving from now on. Returns at once: a thread tells the watchers, in case one of them does not read."""
        self._drains = True
        threading.Thread(target=self._health.enter_graceful_shutdown, name="tierstore-grpc-drain", daemon=True).start()

    def end(self) -> None:
        """End the calls that watch, or have not said what, and those that begin from now on. Any thread."""
        self._ended = True
        self.late.end_all()
        with self._lock:
            watchers = list(self._watchers)
        for context in watchers:
            context.cancel()

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def _check(self, request: Any, _: RpcCaller) -> Any:
        if request.service not in self._names:
            raise NotFound(f"no service {request.service[:80]!r}; expected one of {sorted(self._names)}")
        states = health_pb2.HealthCheckResponse
        serving = self._serving and not self._drains
        return states(status=states.SERVING if serving else states.NOT_SERVING)

    def _admit(self, context: Context, host: str) -> bool:
        """Count a watcher. Where there are too many, the host that has most of them makes room for one that has fewer."""
        with self._lock:
            if len(self._watchers) >= MAX_WATCHERS:
                hosts = Counter(self._watchers.values())
                most, count = hosts.most_common(1)[0]
                if count < hosts[host] + 2:
                    return False
                oldest = next(watcher for watcher, on in self._watchers.items() if on == most)
                del self._watchers[oldest]
                oldest.cancel()
            self._watchers[context] = host
        return True

    def _gone(self, context: Context) -> None:
        with self._lock:
            self._watchers.pop(context, None)


def reflect(services: Sequence[str]) -> Servicer:
    """Reflection of `services`, health and itself."""
    for file in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    servicer = reflection.ReflectionServicer(names, pool=POOL)

    def info(received: Iterator[bytes], _: RpcCaller, context: Context) -> Iterator[bytes]:
        request = (parse_message(reflection_pb2.ServerReflectionRequest, message) for message in received)
        return (answer.SerializeToString() for answer in servicer.ServerReflectionInfo(request, context))

    return Servicer(reflection.SERVICE_NAME, STANDARD, streams={"ServerReflectionInfo": info})
