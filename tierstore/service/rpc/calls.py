"""gRPC calls, each on an HTTP/2 stream that the reactors give to Python.

A look-up goes as over HTTP: it waits for a thread of the look-up pool. Other methods run on the pools of the admin
interface; those that never wait run on the event loop. A stream of
messages is an object of the event loop, which handles one message at a time and lets the client send more as it goes
on; it needs no thread.

Answers are sent by the threads that have made them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from tierstore.access.roles import Action
from tierstore.access.rules import of_grpc
from tierstore.errors import Closed, Overloaded, TierstoreError
from tierstore.service.access import Allow, caller_key
from tierstore.service.context import Service
from tierstore.service.error_status import CUT_OFF, MessageTooLarge, Unserved
from tierstore.service.families import gauge
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.reactor.streams import Stream, most_message
from tierstore.service.rpc.caller import RpcCaller, acting_for, sent_back
from tierstore.service.rpc.flow import HEADERS, Flow
from tierstore.service.rpc.health import MAX_WATCHERS, Health
from tierstore.service.rpc.messages import ENDS, IDLE, Messages, WireMessage, prefix_of, status_alone
from tierstore.service.rpc.methods import Accounts, Method, Servicer, look_up
from tierstore.service.rpc.oip import InferenceService
from tierstore.service.rpc.reflection import reflection_of
from tierstore.service.rpc.tfserving import TensorFlowServing
from tierstore.service.stats import Timings

READY_POLL_S = 0.1
MOST_STREAMS = 1024  # of messages, open at the same time
IDLE_S = 1.0  # idle time after which a stream makes room for another
_NO_MESSAGE = "the call has one request message; got none"


class Calls:
    """Receives gRPC streams. `allow` is called with callers whose look-ups reactors may answer as well."""

    def __init__(self, service: Service, allow: Allow) -> None:
        self.service, self._allow = service, allow
        self.most_message = most_message(service.settings)
        servicers = [InferenceService(service).servicer, *TensorFlowServing(service).servicers]
        names = [servicer.name for servicer in servicers]
        self.health = Health(names)
        servicers += [self.health.servicer, *reflection_of([*names, self.health.servicer.name])]
        self._methods = {path: method for servicer in servicers for path, method in self._methods_of(servicer)}
        self._open: dict[_Call, None] = {}  # unanswered calls
        self._flows: dict[Stream, Flow] = {}  # longest idle first
        self.closing = False

    def _methods_of(self, servicer: Servicer) -> Iterator[tuple[bytes, Method]]:
        service = self.service

        def path_of(name: str) -> tuple[bytes, Action, Accounts]:
            path = f"/{servicer.name}/{name}"
            return path.encode(), of_grpc(path), Accounts(service, servicer, name)

        for name, receive in servicer.lookups.items():
            path, action, accounts = path_of(name)
            yield path, Method(action, accounts, receive=receive)
        pools = (
            (servicer.controls, service.admin_pool),
            (servicer.switches, service.switch_pool),
            (servicer.health, None),
        )
        for methods, pool in pools:
            for name, run in methods.items():
                path, action, accounts = path_of(name)
                yield path, Method(action, accounts, run=run, pool=pool)
        for name, serve in servicer.streams.items():
            path, action, accounts = path_of(name)
            yield path, Method(action, accounts, serve=serve)

    @property
    def streaming(self) -> tuple[bytes, ...]:
        """The paths of the methods whose messages are passed on as they arrive."""
        return tuple(path for path, method in self._methods.items() if method.serve is not None)

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return bool(self._open) or any(flow.busy for flow in self._flows.values())

    # --- streams of HTTP/2

    def has(self, path: bytes) -> bool:
        """Whether a path is a method's."""
        return path in self._methods

    def request(self, stream: Stream, body: bytes) -> None:
        """Handle a call with all of its messages."""
        method = self._methods.get(stream.path)
        if method is None:
            refuse(stream, "UNIMPLEMENTED", "Method not found!")
        elif method.serve is not None:  # a receiver that was not told which methods stream
            self.opened(stream)
            self.data(stream, body)
            self.ended(stream)
        else:
            call = _Call(self, method, stream)
            self._open[call] = None
            call.begin(body)

    def opened(self, stream: Stream) -> None:
        method = self._methods.get(stream.path)
        if method is None or method.serve is None:
            refuse(stream, "UNIMPLEMENTED", "Method not found!")
            return
        try:
            flow = Flow(self, method, stream)
        except TierstoreError as error:
            refuse(
                stream,
                *method.accounts.failed(RpcCaller(stream, self.service.proxies, arrived_ns=stream.arrived_ns), error),
            )
            return
        self._flows[stream] = flow
        flow.open()

    def data(self, stream: Stream, data: bytes) -> None:
        if (flow := self._flows.get(stream)) is not None:
            flow.data(data)

    def ended(self, stream: Stream) -> None:
        if (flow := self._flows.get(stream)) is not None:
            flow.no_more()

    def lost(self, stream: Stream) -> None:
        if (flow := self._flows.get(stream)) is not None:
            flow.forget()

    # --- for calls

    def authorise(self, method: Method, stream: Stream, caller: RpcCaller) -> None:
        """Identify the caller. Forbidden if it may not call, or uses a name that is not the service's."""
        access = self.service.access
        checked = method.action, stream.authority, caller.authorizations, stream.peer_names
        principal = caller.waiting.principal = access.of_call(*checked)
        if method.receive is None or not caller.unplanned:
            return
        if not access.required:
            self._allow(stream.authority, None, principal)
        elif key := caller.authorizations[0] if caller.authorizations else caller_key(stream.peer_names):
            self._allow(stream.authority, key, principal)

    def make_room(self) -> None:
        """Make room for one more stream of messages. Overloaded if no open one has been idle for long."""
        if len(self._flows) < MOST_STREAMS:
            return
        idle = next((flow for flow in self._flows.values() if not flow.busy), None)
        if idle is None or asyncio.get_running_loop().time() - idle.since < IDLE_S:
            raise Overloaded(f"{MOST_STREAMS} streams are open already; try again in a second")
        idle.finish("UNAVAILABLE", IDLE)

    def to_the_end(self, flow: Flow) -> None:
        """Move a stream that becomes idle behind the others."""
        self._flows[flow.stream] = self._flows.pop(flow.stream)

    def forget(self, flow: Flow) -> None:
        self._flows.pop(flow.stream, None)

    def claim(self, call: _Call) -> bool:
        """Whether the asking thread should answer a call: it was not answered yet. Any thread."""
        return self._open.pop(call, call) is None

    # --- start and end

    async def report_when(self, ready: Callable[[], bool]) -> None:
        """Report health as soon as the service is `ready`, and not before: clients watch it and do not poll."""
        if ready():
            return
        self.health.report(False)
        while not ready():
            await asyncio.sleep(READY_POLL_S)
        self.health.report(True)

    def drain(self) -> None:
        """Report unhealthy; calls are answered as before."""
        self.health.drain()

    def stop(self) -> None:
        """End streams that wait for a message, and the others after their message."""
        self.closing = True
        self.health.end()
        for flow in list(self._flows.values()):
            if not flow.busy:
                flow.finish("UNAVAILABLE", ENDS)

    def cut_off(self) -> None:
        """Answer calls in progress, in place of their threads."""
        for call in list(self._open):
            call.fail(Closed(CUT_OFF))

    def families(self) -> Iterator[Metric]:
        for name, text, value in (
            ("calls", "gRPC calls that Python has and has not answered yet.", len(self._open)),
            ("streams", "gRPC streams of messages that are open.", len(self._flows)),
            ("streams_limit", "gRPC streams of messages that may be open.", MOST_STREAMS),
            ("health_watchers", "gRPC calls that watch the health; they count as streams too.", self.health.watchers),
            ("health_watchers_limit", "gRPC calls that may watch the health.", MAX_WATCHERS),
        ):
            yield gauge(f"tierstore_grpc_{name}", text, value)


def refuse(stream: Stream, code: str, details: str, request_id: str | None = None) -> None:
    """Answer with only a status."""
    stream.respond(200, [*status_alone(code, details), *sent_back(request_id)])


class _Call:
    """One call with one message, from its arrival to its answer, which is sent once."""

    __slots__ = ("_caller", "_calls", "_method", "_stream")

    def __init__(self, calls: Calls, method: Method, stream: Stream) -> None:
        self._calls, self._method, self._stream = calls, method, stream
        self._caller: RpcCaller | None = None

    def begin(self, body: bytes) -> None:
        service, method, stream = self._calls.service, self._method, self._stream
        holding = Reservation(service.inflight)  # of a method that is no look-up, until it is answered
        try:
            caller = self._caller = RpcCaller(stream, service.proxies)
            self._calls.authorise(method, stream, caller)
            if stream.too_large:
                raise MessageTooLarge(
                    f"the message is larger than the {self._calls.most_message} bytes that are allowed (max_request)"
                )
            if stream.error is None:
                service.shed.check(caller.waiting)
            message = Messages(caller.coding, self._calls.most_message).first(body)
            if message is None:
                raise Unserved(_NO_MESSAGE)
            if method.receive is not None:
                look_up(service, method.receive, message, caller, self._done, failed=stream.error)
            elif method.pool is not None:
                holding.reserve(len(message))

                def done(answer: bytes | None, error: BaseException | None) -> None:
                    self._done(answer, error, None, holding)

                method.pool.start(done, self._run, message, caller, holding, caller=caller.waiting)
            else:
                self._done(self._run(message, caller, holding), None, None, holding)
        except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
            self._done(None, error, None, holding)

    def _run(self, message: WireMessage, caller: RpcCaller, holding: Reservation) -> bytes:
        """Run a method other than a look-up, on its thread."""
        self._calls.service.shed.check(caller.waiting)
        method = self._method
        assert method.run is not None
        with acting_for(caller):
            return method.run(message.short() if method.pool is None else message.decode(holding.reserve), caller)

    def _done(
        self, answer: bytes | None, error: BaseException | None, spent: Timings | None, holding: Reservation
    ) -> None:
        """Send the answer or the error; `holding` is held until it is sent. Any thread."""
        if error is not None:
            holding.release()
            self.fail(error)
        elif not self._calls.claim(self):
            holding.release()
        else:
            caller = self._caller
            assert answer is not None
            assert caller is not None
            self._method.accounts.answered(caller, spent)
            trailers = [(b"grpc-status", b"0"), *sent_back(caller.request_id)]
            self._stream.respond(200, HEADERS, [prefix_of(answer), answer], trailers, holding.release)

    def fail(self, error: BaseException) -> None:
        """Answer with the status of an error. Any thread."""
        if not self._calls.claim(self):
            return
        caller = self._caller
        if caller is None:  # its deadline is malformed
            caller = RpcCaller(self._stream, self._calls.service.proxies, arrived_ns=self._stream.arrived_ns)
        status = self._method.accounts.failed(caller, error)
        refuse(self._stream, *status, caller.request_id)
