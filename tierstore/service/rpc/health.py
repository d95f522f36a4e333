"""Health checking, for gRPC's own tools (`grpc.health.v1`).

Health is that of the server as a whole and of each service: serving from when the server is ready until it begins to
drain. ModelReady reports whether a model answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tierstore.errors import NotFound, Overloaded
from tierstore.service.rpc.caller import RpcCaller
from tierstore.service.rpc.messages import ENDS, WireMessage
from tierstore.service.rpc.methods import STANDARD, MessageStream, Servicer, by_message, parse_message
from tierstore.service.rpc.protobuf import message_class

NAME = "grpc.health.v1.Health"
MAX_WATCHERS = 256  # of health
CROWDED = "another host has fewer calls that watch the health, and needed a place"
Request, Response = (
    message_class("grpc.health.v1.HealthCheckRequest"),
    message_class("grpc.health.v1.HealthCheckResponse"),
)
SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3
OVERALL = ""


class _Watcher:
    """A call that watches the health of `service`; `host` is its client's."""

    def __init__(self, flow: MessageStream, service: str) -> None:
        self.flow, self.service, self.host = flow, service, flow.caller.host
        self.latest = -1  # the state that was sent


class Health:
    """The health service. `services`: the full names of the services whose health is reported."""

    def __init__(self, services: Sequence[str]) -> None:
        self._names = (OVERALL, *services, NAME)
        self._serving, self._ended = True, False
        self._drains = False
        self._watchers: dict[_Watcher, None] = {}  # oldest first
        self.servicer = Servicer(
            NAME, STANDARD, health={"Check": by_message(Request, self._check)}, streams={"Watch": self._watch}
        )

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def report(self, serving: bool) -> None:
        """Set the reported health; nothing changes once it drains."""
        self._serving = serving
        self._send_all()

    def drain(self) -> None:
        """Report unhealthy from now on."""
        self._drains = True
        self._send_all()

    def end(self) -> None:
        """End the calls that watch, and those that begin from now on."""
        self._ended = True
        for watcher in list(self._watchers):
            watcher.flow.finish("UNAVAILABLE", ENDS)

    def _watch(self, message: WireMessage, flow: MessageStream) -> None:
        watcher = _Watcher(flow, parse_message(Request, message.short()).service)
        if len(self._watchers) >= MAX_WATCHERS:
            self._make_room(watcher.host)
        self._watchers[watcher] = None
        flow.when_over(lambda: self._watchers.pop(watcher, None))
        self._send(watcher)
        if self._ended:
            flow.finish("UNAVAILABLE", ENDS)

    def _make_room(self, host: str) -> None:
        """End a watcher of the host that has most, for a host with fewer. Overloaded if `host` has as many."""
        hosts = Counter(watcher.host for watcher in self._watchers)
        most, count = hosts.most_common(1)[0]
        if count < hosts[host] + 2:
            raise Overloaded(f"{MAX_WATCHERS} calls watch the health already")
        next(watcher for watcher in self._watchers if watcher.host == most).flow.finish("UNAVAILABLE", CROWDED)

    def _send_all(self) -> None:
        for watcher in self._watchers:
            self._send(watcher)

    def _send(self, watcher: _Watcher) -> None:
        state = self._state_of(watcher.service)
        if state != watcher.latest:
            watcher.latest = state
            watcher.flow.send(Response(status=state).SerializeToString())

    def _state_of(self, service: str) -> int:
        if service not in self._names:
            return UNKNOWN
        return SERVING if self._serving and not self._drains else NOT_SERVING

    def _check(self, request: Any, _: RpcCaller) -> Any:
        if request.service not in self._names:
            raise NotFound(f"no service {request.service[:80]!r}; expected one of {sorted(self._names)}")
        return Response(status=self._state_of(request.service))
