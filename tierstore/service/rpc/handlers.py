"""The methods on grpcio's own server: limits, deadlines, errors as statuses.

`Handlers` makes the methods of the servicers grpcio's. A method is not run where the deadline has passed, or the caller has gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

import grpc

from tierstore.access.roles import Action, Principal
from tierstore.access.rules import of_grpc
from tierstore.errors import Forbidden, Overloaded
from tierstore.service.access import Access
from tierstore.service.context import Service
from tierstore.service.limits import slow_clients
from tierstore.service.limits.shedding import Caller, Gone, Waits
from tierstore.service.rpc.call_pool import CallPool, submitted_ns
from tierstore.service.rpc.caller import RpcCaller, acting_for
from tierstore.service.rpc.messages import ENDS, IDLE, MOST_DETAILS
from tierstore.service.rpc.methods import STANDARD, Accounts, Receive, Servicer, Unary, answered
from tierstore.service.rpc.oip import FINAL, InferMessage, stream_answer, stream_error
from tierstore.service.rpc.waiting import Waiting

AUTHORIZATION, REQUEST_ID = "authorization", "x-request-id"
Metadata: TypeAlias = Sequence[Any]  # of (key, value), as grpcio has them
Context: TypeAlias = Any  # grpc.ServicerContext; grpcio has no types to check
Flow: TypeAlias = Callable[[Iterator[bytes], RpcCaller, Context], Iterator[bytes]]
Send: TypeAlias = Callable[[bytes | None], None]  # of a call with a thread: an answer, or None for the status


REFUSALS = 1  # threads that answer refused calls


class Pools(NamedTuple):
    """The threads of each kind of call."""

    lookups: CallPool
    controls: CallPool
    switches: CallPool
    health: CallPool
    streams: CallPool
    watches: CallPool


def unary_of(servicer: Servicer, pools: Pools) -> Iterator[tuple[str, Unary, CallPool]]:
    """The unary methods besides look-ups, each with its pool."""
    for methods, pool in (
        (servicer.controls, pools.controls),
        (servicer.switches, pools.switches),
        (servicer.health, pools.health),
    ):
        for name, method in methods.items():
            yield name, method, pool


def waits_of(service: Service) -> Waits:
    """The rule of the look-ups' queue."""
    return Waits("grpc_lookup", service.shed, service.settings.max_queue_s)


def peer_names(auth: Mapping[str, Sequence[bytes]]) -> list[str]:
    """The names of a client's certificate, as grpcio has them: those of `tls.names_of`."""
    kinds = ("peer_uri", "peer_dns") if auth.get("x509_subject_alternative_name") else ("x509_common_name",)
    values = (value for kind in kinds for value in auth.get(kind, ()))
    return [value.decode(errors="replace") for value in values]


def principal_by(
    access: Access, action: Action, metadata: Metadata, auth: Callable[[], Mapping[str, Sequence[bytes]]]
) -> Principal:
    """The caller of a call that does `action`; Forbidden where it may not. `auth` is what TLS says of it."""
    values = [entry.value.encode() for entry in metadata if entry.key == AUTHORIZATION]
    return access.of_call(action, values, peer_names(auth()) if access.by_certificate and not values else ())


def principal_in(service: Service, context: Context, action: Action = Action.READ) -> Principal:
    """The caller of a method of grpcio's own server that does `action`; Forbidden where it may not."""
    return principal_by(service.access, action, context.invocation_metadata() or (), context.auth_context)


def caller_by(
    metadata: Metadata, peer: Callable[[], str | bytes], gone: Callable[[], bool] | None, remaining_s: float | None
) -> RpcCaller:
    """The caller of a call with such metadata; `peer` gives its address in grpcio's form."""
    request_id = next((entry.value for entry in metadata if entry.key == REQUEST_ID), None)
    caller = RpcCaller(request_id, Caller(time.perf_counter_ns(), gone), lambda: _address_of(peer()))
    if remaining_s is not None and remaining_s < float("inf"):
        caller.waiting.within(int(remaining_s * 1e9))
    return caller


def _address_of(peer: str | bytes) -> str:
    """Of `ipv4:127.0.0.1:5342`, `ipv6:%5B::1%5D:5342`; bytes from the layer below grpcio's server."""
    text = unquote(peer.decode(errors="replace") if isinstance(peer, bytes) else peer)
    return text.removeprefix("ipv4:").removeprefix("ipv6:")


def caller_in(context: Context) -> RpcCaller:
    """The caller of a method of grpcio's own server; a request id goes back with the answer."""
    metadata = context.invocation_metadata() or ()
    caller = caller_by(metadata, context.peer, lambda: not context.is_active(), context.time_remaining())
    if caller.request_id is not None:
        context.set_trailing_metadata(((REQUEST_ID, caller.request_id),))
    return caller


def status_of(status: tuple[str, str]) -> tuple[Any, str]:
    """A code by its name, and its text, as grpcio has them; cut so that it passes as metadata."""
    code, text = status
    encoded = text.encode(errors="replace")
    if len(encoded) > MOST_DETAILS:
        text = encoded[:MOST_DETAILS].decode(errors="ignore") + "…"
    return grpc.StatusCode[code], text


def refused(accounts: Accounts, caller: RpcCaller, pool: CallPool, service: Service) -> tuple[Any, str]:
    """Count a call that is refused because the queue of `pool` is full. Its status and the text for its client."""
    service.shed.count("queue_full")
    error = Overloaded(f"{pool.queue_limit} calls wait for the {pool.name} threads already; try again in a second")
    return status_of(accounts.failed(caller, error))


def infer_stream(service: Service, servicer: Servicer) -> Flow:
    """ModelStreamInfer: answers in the order of the requests. An error is the answer to its own request, and the stream goes on."""
    accounts = Accounts(service, servicer, "ModelStreamInfer")
    receive = partial(InferMessage, service, extra=FINAL)

    def run(received: Iterator[bytes], opened: RpcCaller, context: Context) -> Iterator[bytes]:
        for request in received:
            caller = opened
            try:
                caller = caller_in(context)
                caller.waiting.principal = principal_in(service, context)  # its token may have ended since
                service.shed.check(caller.waiting)
                answer = answered(service, receive, request, caller)
            except Gone:
                return
            except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
                accounts.failed(caller, error)
                yield stream_error(request, error)
            else:
                yield stream_answer(answer)
                accounts.answered(caller)

    return run


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of each call, on grpcio's serving thread; the handlers run on the pools."""

    def __init__(
        self,
        service: Service,
        servicers: Sequence[Servicer],
        streams: Sequence[tuple[Servicer, str, Flow]],
        pools: Pools,
    ) -> None:
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
            for name, method, pool in unary_of(servicer, pools):
                run = self._unary(servicer, pool, name, method)
                self._enter(pool, servicer, name, grpc.unary_unary_rpc_method_handler(run))
        for servicer, name, stream in streams:
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
            refusal = error
            return self._refuse(lambda caller: status_of(accounts.failed(caller, refusal)))
        if not pool.full or (pool in self._yielding and self._yielding[pool].make_room()):
            return handler
        pool.reject()
        full = pool
        return self._refuse(lambda caller: refused(accounts, caller, full, self._service))

    def _check_role(self, call: Any) -> None:
        """Before its message is received; where the message names a model, that is checked when it is read.

        So is the role of a caller without a token that may have a certificate, which grpcio shows with the message only.
        """
        access, metadata = self._service.access, call.invocation_metadata or ()
        if not access.by_certificate or any(entry.key == AUTHORIZATION for entry in metadata):
            principal_by(access, of_grpc(call.method), metadata, dict)

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

    def _flow(self, servicer: Servicer, pool: CallPool, name: str, stream: Flow) -> Any:
        accounts = Accounts(self._service, servicer, name)

        def run(messages: Iterator[bytes], context: Context, send: Send) -> None:
            caller = caller_in(context)
            try:
                caller.waiting.principal = principal_in(self._service, context, of_grpc(f"/{servicer.name}/{name}"))
            except Forbidden as error:
                context.abort(*status_of(accounts.failed(caller, error)))
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
                context.abort(*status_of(accounts.failed(caller, error)))
            accounts.answered(caller)
            return answer

        bound: Callable[[bytes, Context], bytes] = _on(pool, run)
        return bound


def _on(pool: CallPool, behavior: Callable[..., Any]) -> Any:
    """`behavior` on `pool`: grpcio reads the pool off the function (see `grpc._server`)."""

    def run(*given: Any) -> Any:
        return behavior(*given)

    run.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return run
