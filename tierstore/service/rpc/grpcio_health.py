"""Health checking and reflection on grpcio's server (`health.py`, `reflection.py` have those of streams).

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

from tierstore.errors import NotFound
from tierstore.service.rpc.call_pool import CallPool
from tierstore.service.rpc.caller import RpcCaller
from tierstore.service.rpc.handlers import Context, Flow, caller_by
from tierstore.service.rpc.health import MAX_WATCHERS, NAME, NOT_SERVING, OVERALL, SERVING, UNKNOWN, Request, Response
from tierstore.service.rpc.methods import STANDARD, Servicer, by_message
from tierstore.service.rpc.reflection import METHOD, RELEASES, answers_of, reflected
from tierstore.service.rpc.waiting import Waiting

REQUEST_S = 10.0  # for a watcher's request to come; until then it has one


class _Watcher:
    """A call that watches the health of a service by its name; `host` is where it comes from. Any thread."""

    def __init__(self, context: Context, host: str, send: Callable[[Any], None]) -> None:
        self.context, self.host, self._send = context, host, send
        self._sending = threading.Lock()  # taken by nobody whom a blocked client could hold up
        self._latest: Any = None  # guarded by _sending

    def send(self, state: Callable[[], Any]) -> None:
        """Send the state of now, unless it was the latest that was sent. Waits until the client has room for it."""
        with self._sending:
            now = state()
            if now != self._latest and self.context.is_active():
                self._latest = now
                self._send(Response(status=now))


class Health:
    """`services` are the full names of the services whose health is reported."""

    def __init__(self, services: Sequence[str]) -> None:
        self._names = (OVERALL, *services, NAME)
        self._serving, self._drains, self._ended = True, False, False
        self._lock = threading.Lock()
        self._watchers: dict[_Watcher, str] = {}  # with what they watch; guarded by _lock
        self.late: Waiting[Context] = Waiting(lambda context: context.cancel())  # watchers that have not said of what
        check = by_message(Request, self._check)
        self.servicer = Servicer(NAME, STANDARD, health={"Check": check})

    def handler(self, pool: CallPool) -> Any:
        """The handler of Watch: its request is awaited and first answered on `pool`, the others are made by a thread of their own."""

        def watch(requests: Iterator[Any], context: Context, send: Callable[[Any], None]) -> None:
            self.late.add(context, REQUEST_S)
            if self._ended:
                self.late.end_all()
            request = next(requests, None)
            if not self.late.remove(context) or request is None:
                return
            watcher = _Watcher(context, caller_by((), context.peer, None, None).host, send)
            if not self._admit(watcher, request.service):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} calls watch the health already")
            if context.add_callback(lambda: self._gone(watcher)):
                watcher.send(lambda: self._state_of(request.service))
                if self._ended:
                    context.cancel()
            else:
                self._gone(watcher)

        watch.experimental_non_blocking = True  # type: ignore[attr-defined]
        watch.experimental_thread_pool = pool  # type: ignore[attr-defined]
        # of many requests, though there is one: so it can be ended before that comes
        return grpc.stream_stream_rpc_method_handler(
            watch,
            request_deserializer=Request.FromString,
            response_serializer=Response.SerializeToString,
        )

    def report(self, serving: bool) -> None:
        """Set the health that is reported from now on; nothing changes once it drains. Any thread."""
        self._serving = serving
        self._send_all()

    def drain(self) -> None:
        """Not serving from now on. Any thread."""
        self._drains = True
        self._send_all()

    def end(self) -> None:
        """End the calls that watch, or have not said what, and those that begin from now on. Any thread."""
        self._ended = True
        self.late.end_all()
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher.context.cancel()

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def _send_all(self) -> None:
        """Have a thread tell all watchers, in case one of them does not read."""

        def run() -> None:
            with self._lock:
                watchers = list(self._watchers.items())
            for watcher, name in watchers:
                watcher.send(lambda name=name: self._state_of(name))  # type: ignore[misc]

        threading.Thread(target=run, name="tierstore-grpc-health", daemon=True).start()

    def _state_of(self, name: str) -> Any:
        if name not in self._names:
            return UNKNOWN
        return SERVING if self._serving and not self._drains else NOT_SERVING

    def _check(self, request: Any, _: RpcCaller) -> Any:
        if request.service not in self._names:
            raise NotFound(f"no service {request.service[:80]!r}; expected one of {sorted(self._names)}")
        return Response(status=self._state_of(request.service))

    def _admit(self, watcher: _Watcher, name: str) -> bool:
        """Count a watcher. Where there are too many, the host that has most of them makes room for one that has fewer."""
        oldest = None
        with self._lock:
            if len(self._watchers) >= MAX_WATCHERS:
                hosts = Counter(other.host for other in self._watchers)
                most, count = hosts.most_common(1)[0]
                if count < hosts[watcher.host] + 2:
                    return False
                oldest = next(other for other in self._watchers if other.host == most)
                del self._watchers[oldest]
            self._watchers[watcher] = name
        if oldest is not None:
            oldest.context.cancel()
        return True

    def _gone(self, watcher: _Watcher) -> None:
        with self._lock:
            self._watchers.pop(watcher, None)


def reflections(services: Sequence[str]) -> list[tuple[Servicer, str, Flow]]:
    """Reflection of `services`, health and itself."""
    names = reflected([*services, NAME])
    return [
        (Servicer(f"{release}.ServerReflection", STANDARD), METHOD, _reflection(answers_of(release, names)))
        for release in RELEASES
    ]


def _reflection(answer_to: Callable[[bytes], bytes]) -> Flow:
    def run(received: Iterator[bytes], _: RpcCaller, context: Context) -> Iterator[bytes]:
        return map(answer_to, received)

    return run
