"""What every method of the gRPC server goes through: bounds, deadlines, errors as statuses, figures.

A `Servicer` names its methods; `Calls` makes them grpcio's handlers. Methods take and give serialized messages: a
look-up's are too large to be parsed and built as a whole, and `by_message` is for the others. What a method raises
becomes the call's status; a method that is called while its deadline has passed, or its caller has gone, is not run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from tierstore.engine.changes import ASKED_BY
from tierstore.errors import DeadlineExceeded, InvalidInput, Overloaded
from tierstore.service.bounds.shed import Waits
from tierstore.service.context import Service
from tierstore.service.figures import Timings
from tierstore.service.request_log import shown
from tierstore.service.rpc.lookups import REQUEST_ID, Metadata, Receive, answer, request_id
from tierstore.service.rpc.pools import CallPool, submitted_ns
from tierstore.service.rpc.status import Cancelled, code_of, details_of, outcome_of
from tierstore.service.rpc.types import Context, Stream, Unary
from tierstore.service.status import status_of

STANDARD = "grpc"  # the protocol label of what is gRPC's own
REFUSALS = 1  # threads that tell callers that there is no room


@dataclass(frozen=True)
class Servicer:
    """The methods of one service, by name: look-ups, what runs on the control threads, and streams.

    `name` is the service's full name, `protocol` its label in the metrics.
    """

    name: str
    protocol: str
    lookups: Mapping[str, Receive] = field(default_factory=dict)
    controls: Mapping[str, Unary] = field(default_factory=dict)
    streams: Mapping[str, Stream] = field(default_factory=dict)


def parsed(kind: Any, message: bytes) -> Any:
    """`message` as one of class `kind`; InvalidInput where it is none."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidInput(f"the message is not a {kind.DESCRIPTOR.full_name}: {error}") from error


def by_message(kind: Any, method: Callable[[Any], Any]) -> Unary:
    """A method of serialized messages, of one that takes a message of class `kind` and gives one."""

    def call(message: bytes, context: Context) -> bytes:
        answer: bytes = method(parsed(kind, message)).SerializeToString()
        return answer

    return call


def waits_of(service: Service) -> Waits:
    """The rule of the look-ups' queue."""
    return Waits("grpc_lookup", service.shed, service.settings.max_queue_s)


def check_waited_for(context: Context) -> None:
    """Raise where nobody waits for an answer any more: before work is begun, not after."""
    if context.time_remaining() <= 0:
        raise DeadlineExceeded("the call's deadline passed while it waited")
    if not context.is_active():
        raise Cancelled("the call was cancelled")


class RpcCaller:
    """Who asks, as the log says it; `peer` gives grpcio's words for the client's address."""

    __slots__ = ("_peer", "request_id")

    def __init__(self, metadata: Metadata, peer: Callable[[], str | bytes]) -> None:
        self.request_id = request_id(metadata)
        self._peer = peer

    def address(self) -> str:
        peer = self._peer()  # `ipv4:127.0.0.1:5342`, `ipv6:%5B::1%5D:5342`; bytes from the layer below grpcio's server
        text = unquote(peer.decode(errors="replace") if isinstance(peer, bytes) else peer)
        return text.removeprefix("ipv4:").removeprefix("ipv6:")

    def __str__(self) -> str:
        return self.address() if self.request_id is None else f"{self.address()} (id {shown(self.request_id)})"


def caller_in(context: Context) -> RpcCaller:
    """Who calls a method of grpcio's own server; a request id goes back with the answer."""
    caller = RpcCaller(context.invocation_metadata() or (), context.peer)
    if caller.request_id is not None:
        context.set_trailing_metadata(((REQUEST_ID, caller.request_id),))
    return caller


class Accounts:
    """What is counted and logged of the calls of one method. Any thread."""

    def __init__(self, service: Service, servicer: Servicer, name: str) -> None:
        self._shed, self._times, self._protocol = service.shed, service.request_times, servicer.protocol
        self._log, self._path = service.request_log, f"/{servicer.name}/{name}"

    def answered(self, caller: RpcCaller, began_ns: int, spent: Timings | None = None) -> None:
        """A call that came at `began_ns` (`time.perf_counter_ns`) is answered; `spent` is where its time went."""
        self._times.add(self._protocol, "ok", (time.perf_counter_ns() - began_ns) / 1e9)
        if self._log.of_successes:
            self._note(caller, 200, "OK", began_ns, spent=spent)

    def failed(self, caller: RpcCaller, error: Exception, began_ns: int) -> tuple[Any, str]:
        """One has failed: its status and what its client is told."""
        if isinstance(error, (DeadlineExceeded, Cancelled)):
            self._shed.count("deadline" if isinstance(error, DeadlineExceeded) else "gone")
        code = code_of(error)
        self._times.add(self._protocol, outcome_of(code), (time.perf_counter_ns() - began_ns) / 1e9)
        if not isinstance(error, Cancelled):
            self._note(caller, status_of(error), code.name, began_ns, error)
        return code, details_of(error)

    def refused(self, caller: RpcCaller, pool: CallPool) -> tuple[Any, str]:
        """One is refused as there is no room in the queue of `pool`: its status and what its client is told."""
        error = Overloaded(f"{pool.queue_limit} calls wait for the {pool.name} threads already; try again in a second")
        self._shed.count("queue_full")
        code = code_of(error)
        self._times.add(self._protocol, outcome_of(code), 0.0)
        self._note(caller, status_of(error), code.name, time.perf_counter_ns(), error)
        return code, details_of(error)

    def _note(
        self,
        caller: RpcCaller,
        status: int,
        said: str,
        began_ns: int,
        error: Exception | None = None,
        spent: Timings | None = None,
    ) -> None:
        self._log.note(
            "gRPC",
            self._path,
            status,
            began_ns,
            request_id=caller.request_id,
            client=caller.address,
            error=error,
            spent=spent,
            said=said,
        )


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of each call, on grpcio's serving thread; the handlers run on the pools."""

    def __init__(
        self,
        service: Service,
        servicers: Sequence[Servicer],
        *,
        lookups: CallPool,
        controls: CallPool,
        streams: CallPool,
    ) -> None:
        self._service = service
        self._lookups = lookups
        self._refusals = CallPool("refusal", threads=REFUSALS, queue_limit=0)
        self._lock = threading.Lock()
        # guarded by _lock
        self._idle: set[Context] = set()  # streams that wait for a message
        self._closing = False
        self._handlers: dict[str, tuple[CallPool | None, Any, Any]] = {}
        for servicer in servicers:
            for name, receive in servicer.lookups.items():
                run = self._unary(servicer, lookups, name, self._lookup(receive))
                self._enter(lookups, servicer, name, grpc.unary_unary_rpc_method_handler(run))
            for name, method in servicer.controls.items():
                run = self._unary(servicer, controls, name, method)
                self._enter(controls, servicer, name, grpc.unary_unary_rpc_method_handler(run))
            for name, stream in servicer.streams.items():
                handler = grpc.stream_stream_rpc_method_handler(_on(streams, self._flow(stream)))
                self._enter(streams, servicer, name, handler)

    def end_streams(self) -> None:
        """End those that wait for a message now, the others after the message that they are at. Any thread."""
        with self._lock:
            self._closing = True
            idle = list(self._idle)
        for context in idle:
            context.cancel()

    def close(self) -> None:
        self._refusals.shutdown()

    def enter(self, service: str, name: str, handler: Any) -> None:
        """Add a method with a handler of its own. Before the server starts."""
        self._enter(None, Servicer(service, STANDARD), name, handler)

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call, or None for a method that there is not."""
        found = self._handlers.get(handler_call_details.method)
        if found is None:
            return None
        pool, handler, refusal = found
        if pool is None or not pool.full:
            return handler
        pool.reject()
        return refusal

    def _enter(self, pool: CallPool | None, servicer: Servicer, name: str, handler: Any) -> None:
        refusal = None
        if pool is not None:
            # as a stream, whatever the method is: its message is not waited for
            refuse = self._refuse(pool, Accounts(self._service, servicer, name))
            refusal = grpc.stream_stream_rpc_method_handler(_on(self._refusals, refuse))
        self._handlers[f"/{servicer.name}/{name}"] = pool, handler, refusal

    def _refuse(self, pool: CallPool, accounts: Accounts) -> Stream:
        def run(messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
            context.abort(*accounts.refused(caller_in(context), pool))
            return iter(())

        return run

    def _lookup(self, receive: Receive) -> Unary:
        def call(message: bytes, context: Context) -> bytes:
            return answer(self._service, receive, message, context.invocation_metadata() or (), submitted_ns())

        return call

    def _flow(self, stream: Stream) -> Stream:
        def run(messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
            return stream(self._watched(messages, context), context)

        return run

    def _watched(self, messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
        """`messages`, until the streams are ended."""
        while True:
            with self._lock:
                if self._closing:
                    return
                self._idle.add(context)
            try:
                message = next(messages, None)
            finally:
                with self._lock:
                    self._idle.discard(context)
            if message is None:
                return
            yield message

    def _unary(self, servicer: Servicer, pool: CallPool, name: str, method: Unary) -> Unary:
        accounts = Accounts(self._service, servicer, name)
        waits = waits_of(self._service) if pool is self._lookups else None

        def run(message: bytes, context: Context) -> bytes:
            began_ns = submitted_ns()
            caller = caller_in(context)
            if waits is None:
                ASKED_BY.set(str(caller))
            try:
                check_waited_for(context)
                if waits is not None:
                    waits.take(began_ns)
                answered = method(message, context)
            except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
                context.abort(*accounts.failed(caller, error, began_ns))
            accounts.answered(caller, began_ns)
            return answered

        bound: Unary = _on(pool, run)
        return bound


def _on(pool: CallPool, behavior: Callable[..., Any]) -> Any:
    """`behavior`, to be run on `pool`: grpcio reads the pool off the function (see `grpc._server`)."""

    def run(first: Any, context: Context) -> Any:
        return behavior(first, context)

    run.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return run
