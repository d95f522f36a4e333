"""The methods of gRPC services, by how calls handle them: look-ups, other methods by their threads, streams.

Methods get and return serialized messages, because protobuf would be too slow for the large messages of a look-up;
`by_message` is for the others. Look-ups and streams get them as they came (`WireMessage`). An error of a method becomes
the call's status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from google.protobuf.message import DecodeError

from tierstore.access.roles import CHANGES, Action
from tierstore.access.rules import of_grpc
from tierstore.errors import Forbidden, InvalidInput
from tierstore.service.context import Service
from tierstore.service.error_status import Cancelled, grpc_outcome, grpc_status, http_status, message_of
from tierstore.service.exchange import Exchange, Message
from tierstore.service.limits.shedding import Gone
from tierstore.service.limits.worker_pool import Reservation, WorkerPool
from tierstore.service.request_log import LoggedRequest
from tierstore.service.rpc.caller import RpcCaller
from tierstore.service.rpc.messages import WireMessage
from tierstore.service.stats import Timings

STANDARD = "grpc"  # the protocol label of gRPC's own services


class MessageStream(Protocol):
    """An open stream of messages, one of which is handled at a time: until `done`."""

    caller: RpcCaller

    def caller_now(self) -> RpcCaller:
        """The caller of the message that has come now. Forbidden if it may not call any more."""

    def send(self, message: bytes, sent: Callable[[], None] | None = None) -> None:
        """Send an answer. Any thread."""

    def done(self) -> None:
        """Note that the next message may come."""

    def finish(self, code: str = "OK", details: str = "") -> None:
        """End the stream, with a status."""

    def when_over(self, ended: Callable[[], None]) -> None:
        """Have `ended` called when the stream has ended, in any way."""


class RpcMessage(Message[bytes], Protocol):
    """A look-up over gRPC, whose message may say its model only once it is decoded."""

    def model_of_failed(self) -> str | None:
        """The model of a message that has failed; None if it is long, or names none."""


Unary: TypeAlias = Callable[[bytes, RpcCaller], bytes]
Receive: TypeAlias = Callable[[WireMessage, RpcCaller, Reservation], RpcMessage]  # of a look-up
Streamed: TypeAlias = Callable[[WireMessage, MessageStream], None]  # of one message of a stream, on the event loop
# Called, on any thread, with the answer to a look-up or its error; where its time went; what it holds until the answer
# was sent.
LookedUp: TypeAlias = Callable[[bytes | None, BaseException | None, Timings | None, Reservation], None]


@dataclass(frozen=True)
class Servicer:
    """The methods of one service, by name. `name` is its full name, `protocol` its label in the metrics."""

    name: str
    protocol: str
    lookups: Mapping[str, Receive] = field(default_factory=dict)
    controls: Mapping[str, Unary] = field(default_factory=dict)
    switches: Mapping[str, Unary] = field(default_factory=dict)  # may take as long as a warm-up
    health: Mapping[str, Unary] = field(default_factory=dict)  # never wait
    streams: Mapping[str, Streamed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Method:
    """A method for its calls: `receive` for a look-up, `run` with its pool for any other, `serve` for a stream."""

    action: Action
    accounts: Accounts
    receive: Receive | None = None
    run: Unary | None = None
    pool: WorkerPool | None = None
    serve: Streamed | None = None


def parse_message(kind: Any, message: bytes) -> Any:
    """`message` parsed as class `kind`; InvalidInput if it is malformed."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidInput(f"the message is not a {kind.DESCRIPTOR.full_name}: {error}") from error


def by_message(kind: Any, method: Callable[[Any, RpcCaller], Any]) -> Unary:
    """A method of serialized messages, made of one that takes a message of class `kind`."""

    def call(message: bytes, caller: RpcCaller) -> bytes:
        answer: bytes = method(parse_message(kind, message), caller).SerializeToString()
        return answer

    return call


def look_up(
    service: Service,
    receive: Receive,
    message: WireMessage,
    caller: RpcCaller,
    done: LookedUp,
    failed: BaseException | None = None,
) -> None:
    """Have a thread answer a look-up. `failed`: as for `Exchange.admit`."""
    holding = Reservation(service.inflight)
    exchange: Exchange[bytes] | None = None

    def ended(answer: bytes | None, error: BaseException | None) -> None:
        if error is not None and exchange is not None:  # also of one that was not run
            exchange.fail(error)
        done(answer, error, None if exchange is None else exchange.spent, holding)

    try:
        holding.reserve(len(message))
        received = receive(message, caller, holding)
        exchange = Exchange(service, received, caller.waiting, caller.request_id, received.model_of_failed)
        exchange.admit(failed)
        service.lookup_pool.start(ended, exchange.answer, caller=caller.waiting)
    except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
        ended(None, error)


class Accounts:
    """Counts and logs the calls of one method. Any thread."""

    def __init__(self, service: Service, servicer: Servicer, name: str) -> None:
        self._times, self._protocol = service.request_times, servicer.protocol
        self._log, self._path = service.request_log, f"/{servicer.name}/{name}"
        self._audit = service.store.audit if of_grpc(self._path) in CHANGES else None

    def answered(self, caller: RpcCaller, spent: Timings | None = None) -> None:
        """Count an answered call; `spent` is where its time went."""
        self._times.add(self._protocol, "ok", (time.perf_counter_ns() - caller.waiting.arrived_ns) / 1e9)
        if self._log.of_successes:
            self._note(caller, 200, "OK", spent=spent)

    def failed(self, caller: RpcCaller, error: BaseException) -> tuple[str, str]:
        """Count a failed call; the audit notes it if it would have changed something and has no line yet.

        Returns its status and the text for its client.
        """
        if self._audit is not None and isinstance(error, Forbidden):
            self._audit.refused(self._path, caller.who, error)
        elif self._audit is not None and not caller.attempt.has_line:
            self._audit.change(self._path, caller.who, "failed", flush=False, error=message_of(error))
        if isinstance(error, Gone):
            error = Cancelled("the call was cancelled")
        code = grpc_status(error)
        seconds = (time.perf_counter_ns() - caller.waiting.arrived_ns) / 1e9
        self._times.add(self._protocol, grpc_outcome(code), seconds)
        if not isinstance(error, Cancelled):
            self._note(caller, http_status(error), code, error=error)
        return code, message_of(error)

    def _note(self, caller: RpcCaller, status: int, said: str, **more: Any) -> None:
        arrived_ns = caller.waiting.arrived_ns
        request = LoggedRequest("gRPC", self._path, arrived_ns, caller.address, caller.request_id, caller.headers)
        self._log.note(request, status, said=said, **more)
