"""What every method of the gRPC server goes through: limits, deadlines, errors as statuses, stats.

A `Servicer` names its methods; `Calls` makes them grpcio's handlers. Methods get and return serialized messages, because
those of a look-up are too large for protobuf to parse and build as a whole; `by_message` is for the others. An error that a
method raises becomes the call's status. A method is not run where the deadline has passed, or the caller has gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from tierstore.access.roles import CHANGES, Action, Principal
from tierstore.access.rules import of_grpc
from tierstore.errors import Forbidden, InvalidInput, Overloaded
from tierstore.service.access import AUTHORIZATION
from tierstore.service.context import Service
from tierstore.service.error_status import Cancelled, grpc_outcome, grpc_status, http_status, message_of
from tierstore.service.exchange import Exchange, Message
from tierstore.service.limits import slow_clients
from tierstore.service.limits.shedding import Gone, Waits
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.rpc.call_pool import CallPool, submitted_ns
from tierstore.service.rpc.caller import REQUEST_ID, RpcCaller, acting_for
from tierstore.service.rpc.waiting import Waiting
from tierstore.service.stats import Timings

Context: TypeAlias = Any  # grpc.ServicerContext; grpcio has no types to check
Unary: TypeAlias = Callable[[bytes, RpcCaller], bytes]
Receive: TypeAlias = Callable[[bytes, Principal, Reservation], Message[bytes]]  # of a look-up
Stream: TypeAlias = Callable[[Iterator[bytes], RpcCaller, Context], Iterator[bytes]]
Send: TypeAlias = Callable[[bytes | None], None]  # of a call with a thread: an answer, or None for the status


STANDARD = "grpc"  # the protocol label of gRPC's own services
MAX_DETAILS = 2048  # bytes; up to three times as many once encoded, and grpcio takes 8 KiB of metadata for sure
REFUSALS = 1  # threads that answer refused calls
ENDS = "the service ends; send the remaining requests to another one"
IDLE = "this stream was idle, and another one needed its place; open it again"


class Pools(NamedTuple):
    """The threads of each kind of call."""

    lookups: CallPool
    controls: CallPool
    switches: CallPool
    health: CallPool
    streams: CallPool
    watches: CallPool


@dataclass(frozen=True)
class Servicer:
    """The methods of one service, by name: look-ups, calls for the control, switch and health threads, and streams.

    `name` is the service's full name, `protocol` its label in the metrics.
    """

    name: str
    protocol: str
    lookups: Mapping[str, Receive] = field(default_factory=dict)
    controls: Mapping[str, Unary] = field(default_factory=dict)
    switches: Mapping[str, Unary] = field(default_factory=dict)  # may last as long as a warm-up
    health: Mapping[str, Unary] = field(default_factory=dict)  # never wait
    streams: Mapping[str, Stream] = field(default_factory=dict)

    def others(self, pools: Pools) -> Iterator[tuple[str, Unary, CallPool]]:
        """The unary methods besides look-ups, each with its pool."""
        for methods, pool in (
            (self.controls, pools.controls),
            (self.switches, pools.switches),
            (self.health, pools.health),
        ):
            for name, method in methods.items():
                yield name, method, pool


def parse_message(kind: Any, message: bytes) -> Any:
    """`message` as one of class `kind`; InvalidInput where it is none."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidInput(f"the message is not a {kind.DESCRIPTOR.full_name}: {error}") from error


def by_message(kind: Any, method: Callable[[Any, RpcCaller], Any]) -> Unary:
    """A method of serialized messages, from one of messages: its argument is of class `kind`."""

    def call(message: bytes, caller: RpcCaller) -> bytes:
        answer: bytes = method(parse_message(kind, message), caller).SerializeToString()
        return answer

    return call


def answered(service: Service, receive: Receive, message: bytes, caller: RpcCaller) -> bytes:
    """The answer to a look-up, however long it takes."""
    holding = Reservation(service.inflight)
    try:
        holding.reserve(len(message))
        read = receive(message, caller.principal, holding)
        exchange = Exchange(service, read, caller.waiting, caller.request_id)
        exchange.begin(here=False)
        return exchange.answer()
    finally:
        holding.release()


def waits_of(service: Service) -> Waits:
    """The rule of the look-ups' queue."""
    return Waits("grpc_lookup", service.shed, service.settings.max_queue_s)


def peer_names(auth: Mapping[str, Sequence[bytes]]) -> list[str]:
    """The names of a client's certificate, as grpcio has them: those of `tls.names_of`."""
    kinds = ("peer_uri", "peer_dns") if auth.get("x509_subject_alternative_name") else ("x509_common_name",)
    values = (value for kind in kinds for value in auth.get(kind, ()))
    return [value.decode(errors="replace") for value in values]


def principal_in(service: Service, context: Context, action: Action = Action.READ) -> Principal:
    """The caller of a method of grpcio's own server that does `action`; Forbidden where it may not."""
    metadata = context.invocation_metadata() or ()
    return service.access.of_call(action, metadata, lambda: peer_names(context.auth_context()))


def caller_in(context: Context) -> RpcCaller:
    """The caller of a method of grpcio's own server; a request id goes back with the answer."""
    caller = RpcCaller(context.invocation_metadata() or (), context.peer, lambda: not context.is_active())
    caller.within(context.time_remaining())
    if caller.request_id is not None:
        context.set_trailing_metadata(((REQUEST_ID, caller.request_id),))
    return caller


class Accounts:
    """Counts and logs the calls of one method. Any thread."""

    def __init__(self, service: Service, servicer: Servicer, name: str) -> None:
        self._shed, self._times, self._protocol = service.shed, service.request_times, servicer.protocol
        self._log, self._path = service.request_log, f"/{servicer.name}/{name}"
        self._audit = service.store.audit if of_grpc(self._path) in CHANGES else None

    def answered(self, caller: RpcCaller, began_ns: int, spent: Timings | None = None) -> None:
        """Count a call that came at `began_ns` (`time.perf_counter_ns`) and is answered; `spent` is where its time went."""
        self._times.add(self._protocol, "ok", (time.perf_counter_ns() - began_ns) / 1e9)
        if self._log.of_successes:
            self._note(caller, 200, "OK", began_ns, spent=spent)

    def failed(self, caller: RpcCaller, error: Exception, began_ns: int) -> tuple[Any, str]:
        """Count a call that failed; the audit notes it where it would have changed something and has no line yet.

        Returns its status and the text for its client.
        """
        if self._audit is not None and isinstance(error, Forbidden):
            self._audit.refused(self._path, caller.who, error)
        elif self._audit is not None and not caller.attempt.has_line:
            self._audit.change(self._path, caller.who, "failed", flush=False, error=message_of(error))
        if isinstance(error, Gone):
            error = Cancelled("the call was cancelled")
        code = grpc_status(error)
        self._times.add(self._protocol, grpc_outcome(code), (time.perf_counter_ns() - began_ns) / 1e9)
        if not isinstance(error, Cancelled):
            self._note(caller, http_status(error), code, began_ns, error)
        return grpc.StatusCode[code], _details(error)

    def refused(self, caller: RpcCaller, pool: CallPool) -> tuple[Any, str]:
        """Count a call that is refused because the queue of `pool` is full. Returns its status and the text for its client."""
        error = Overloaded(f"{pool.queue_limit} calls wait for the {pool.name} threads already; try again in a second")
        self._shed.count("queue_full")
        code = grpc_status(error)
        self._times.add(self._protocol, grpc_outcome(code), 0.0)
        self._note(caller, http_status(error), code, time.perf_counter_ns(), error)
        return grpc.StatusCode[code], _details(error)

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


def _details(error: BaseException) -> str:
    """The text that a client gets, cut so that it passes as metadata: with longer ones a client sees no status at all."""
    text = message_of(error)
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= MAX_DETAILS else encoded[:MAX_DETAILS].decode(errors="ignore") + "…"


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of each call, on grpcio's serving thread; the handlers run on the pools."""

    def __init__(self, service: Service, servicers: Sequence[Servicer], pools: Pools) -> None:
        self._service = service
        self._lookups = pools.lookups
        self._refusals = CallPool("refusal", threads=REFUSALS, queue_limit=0)
        # streams that wait for a message, which may be long, and those whose answer is not read
        self.idle: Waiting[tuple[Context, Send]] = Waiting(self._end_idle)
        self.unread: Waiting[Context] = Waiting(lambda context: context.cancel())
        self._yielding: dict[CallPool, Waiting[Any]] = {pools.streams: self.idle}  # those that make room in a full pool
        self._closing = False
        self._handlers: dict[str, tuple[CallPool, Any, Accounts]] = {}
        for servicer in servicers:
            for name, receive in servicer.lookups.items():
                run = self._unary(servicer, pools.lookups, name, self._lookup(receive))
                self._enter(pools.lookups, servicer, name, grpc.unary_unary_rpc_method_handler(run))
            for name, method, pool in servicer.others(pools):
                run = self._unary(servicer, pool, name, method)
                self._enter(pool, servicer, name, grpc.unary_unary_rpc_method_handler(run))
            for name, stream in servicer.streams.items():
                flow = self._flow(servicer, pools.streams, name, stream)
                self._enter(pools.streams, servicer, name, grpc.stream_stream_rpc_method_handler(flow))

    def end_streams(self) -> None:
        """End streams that wait for a message now, and the others after their current message. Any thread."""
        self._closing = True
        self.idle.end_all()

    def close(self) -> None:
        self._refusals.shutdown()

    def enter(self, pool: CallPool, service: str, name: str, handler: Any, yielding: Waiting[Any]) -> None:
        """Add a method with a handler of its own; calls of `yielding` make room in `pool`. Before the server starts."""
        self._yielding[pool] = yielding
        self._enter(pool, Servicer(service, STANDARD), name, handler)

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call, or None for an unknown method."""
        found = self._handlers.get(handler_call_details.method)
        if found is None:
            return None
        pool, handler, accounts = found
        try:
            self._check_role(handler_call_details)
        except Forbidden as error:
            began_ns, refusal = time.perf_counter_ns(), error
            return self._refuse(lambda caller: accounts.failed(caller, refusal, began_ns))
        if not pool.full or (pool in self._yielding and self._yielding[pool].make_room()):
            return handler
        pool.reject()
        full = pool
        return self._refuse(lambda caller: accounts.refused(caller, full))

    def _check_role(self, call: Any) -> None:
        """Before its message is received; where the message names a model, that is checked when it is read.

        So is the role of a caller without a token that may have a certificate, which grpcio shows with the message only.
        """
        access, metadata = self._service.access, call.invocation_metadata or ()
        if not access.by_certificate or any(entry.key == AUTHORIZATION for entry in metadata):
            access.of_call(of_grpc(call.method), metadata, tuple)

    def _enter(self, pool: CallPool, servicer: Servicer, name: str, handler: Any) -> None:
        accounts = Accounts(self._service, servicer, name)
        self._handlers[f"/{servicer.name}/{name}"] = pool, handler, accounts

    def _refuse(self, refusal: Callable[[RpcCaller], tuple[Any, str]]) -> Any:
        """A handler that ends the call with the status that `refusal` gives: a stream, as its message is not waited for."""

        def run(messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
            context.abort(*refusal(caller_in(context)))
            return iter(())

        return grpc.stream_stream_rpc_method_handler(_on(self._refusals, run))

    def _lookup(self, receive: Receive) -> Unary:
        return lambda message, caller: answered(self._service, receive, message, caller)

    def _flow(self, servicer: Servicer, pool: CallPool, name: str, stream: Stream) -> Any:
        accounts = Accounts(self._service, servicer, name)

        def run(messages: Iterator[bytes], context: Context, send: Send) -> None:
            caller = caller_in(context)
            try:
                caller.waiting.principal = principal_in(self._service, context, of_grpc(f"/{servicer.name}/{name}"))
            except Forbidden as error:
                context.abort(*accounts.failed(caller, error, time.perf_counter_ns()))
            for message in stream(self._watched(messages, context, send), caller, context):
                seconds = slow_clients.STALL_S + len(message) / slow_clients.SLOWEST_RATE
                self.unread.add(context, seconds)
                try:
                    send(message)  # until the client has room for it
                finally:
                    self.unread.remove(context)
            if context.is_active():
                send(None)

        flow = _on(pool, run)
        flow.experimental_non_blocking = True  # it is given `send`, so that another thread can end it
        return flow

    def _watched(self, messages: Iterator[bytes], context: Context, send: Send) -> Iterator[bytes]:
        """`messages`, until the streams are ended: a client must not take that for the end of its own messages."""
        waiting = context, send
        while True:
            self.idle.add(waiting, float("inf"))
            if self._closing and self.idle.remove(waiting):
                context.abort(grpc.StatusCode.UNAVAILABLE, ENDS)
            try:
                message = next(messages, None)
            finally:
                ended = not self.idle.remove(waiting)
            if ended or message is None:
                return
            yield message

    def _end_idle(self, waiting: tuple[Context, Send]) -> None:
        """End a stream whose thread waits for a message, with a status that has its client open another one."""
        context, send = waiting
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details(ENDS if self._closing else IDLE)
        send(None)

    def _unary(self, servicer: Servicer, pool: CallPool, name: str, method: Unary) -> Callable[[bytes, Context], bytes]:
        accounts = Accounts(self._service, servicer, name)
        waits = waits_of(self._service) if pool is self._lookups else None
        path = f"/{servicer.name}/{name}"

        def run(message: bytes, context: Context) -> bytes:
            began_ns = submitted_ns()
            caller = caller_in(context)
            try:
                caller.waiting.principal = principal_in(self._service, context, of_grpc(path))
                if waits is None:
                    self._service.shed.check(caller.waiting)
                else:
                    waits.check(began_ns, caller.waiting)
                with acting_for(caller):
                    answer = method(message, caller)
            except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
                context.abort(*accounts.failed(caller, error, began_ns))
            accounts.answered(caller, began_ns)
            return answer

        bound: Callable[[bytes, Context], bytes] = _on(pool, run)
        return bound


def _on(pool: CallPool, behavior: Callable[..., Any]) -> Any:
    """`behavior` on `pool`: grpcio reads the pool off the function (see `grpc._server`)."""

    def run(*given: Any) -> Any:
        return behavior(*given)

    run.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return run
