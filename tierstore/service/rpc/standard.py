"""Health checking and reflection, as gRPC's own tools ask for them (grpc.health.v1, grpc.reflection.v1alpha).

Health is known of the server as a whole and of each service: serving, from when the server is ready until it begins to
drain. Whether a model answers is ModelReady's to say. Methods run on the pools' threads; `Health.drain` may be called
from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tierstore.service.rpc.calls import STANDARD, Servicer, parsed
from tierstore.service.rpc.messages import POOL
from tierstore.service.rpc.pools import CallPool
from tierstore.service.rpc.types import Context

MAX_WATCHERS = 256  # of health; they take no thread


class Health:
    """`services` are the full names of those whose health is told."""

    def __init__(self, services: Sequence[str]) -> None:
        self._health = health.HealthServicer()
        self._names = (health.OVERALL_HEALTH, *services)
        self.tell(True)
        self._lock = threading.Lock()
        self._watching: set[Context] = set()  # guarded by _lock
        self.servicer = Servicer(health.SERVICE_NAME, STANDARD, controls={"Check": self._check})

    def handler(self, pool: CallPool) -> Any:
        """The handler of Watch, whose first answer is made on `pool`; the others by whoever changes the health."""

        def watch(asked: Any, context: Context, send: Callable[[Any], None]) -> None:
            with self._lock:
                room = len(self._watching) < MAX_WATCHERS
                if room:
                    self._watching.add(context)
            if not room:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} calls watch the health already")
            if context.add_callback(lambda: self._gone(context)):
                self._health.Watch(asked, context, send)
            else:
                self._gone(context)

        watch.experimental_non_blocking = True  # type: ignore[attr-defined]
        watch.experimental_thread_pool = pool  # type: ignore[attr-defined]
        return grpc.unary_stream_rpc_method_handler(
            watch,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )

    def tell(self, serving: bool) -> None:
        """What is said from now on; nothing changes once it drains. Any thread."""
        states = health_pb2.HealthCheckResponse
        for name in self._names:
            self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    def drain(self) -> None:
        """Not serving from now on. Returns at once: those who watch are told by a thread, in case one does not listen."""
        threading.Thread(target=self._health.enter_graceful_shutdown, name="tierstore-grpc-drain", daemon=True).start()

    def end(self) -> None:
        """End the calls that watch. Any thread."""
        with self._lock:
            watching = list(self._watching)
        for context in watching:
            context.cancel()

    @property
    def watchers(self) -> int:
        return len(self._watching)

    def _check(self, received: bytes, context: Context) -> bytes:
        answer: bytes = self._health.Check(parsed(health_pb2.HealthCheckRequest, received), context).SerializeToString()
        return answer

    def _gone(self, context: Context) -> None:
        with self._lock:
            self._watching.discard(context)


def reflect(services: Sequence[str]) -> Servicer:
    """Reflection of `services`, health and itself."""
    for file in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(file.DESCRIPTOR.serialized_pb)
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    servicer = reflection.ReflectionServicer(names, pool=POOL)

    def info(received: Iterator[bytes], context: Context) -> Iterator[bytes]:
        asked = (parsed(reflection_pb2.ServerReflectionRequest, message) for message in received)
        return (answer.SerializeToString() for answer in servicer.ServerReflectionInfo(asked, context))

    return Servicer(reflection.SERVICE_NAME, STANDARD, streams={"ServerReflectionInfo": info})
