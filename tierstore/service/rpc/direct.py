"""Unary calls below grpcio's server: none has a thread before its message is there, and short look-ups need none at all.

A short look-up whose rows are all in memory is answered on grpcio's serving thread, from its message to its answer. A
call that is long, has to wait for the disk or the dense part, or comes while every look-up thread is busy, goes on to
those threads, and a call that is no look-up to its own. A handoff as grpcio's own server does it costs two to three
times the processor time of a call (docs/decisions/grpc.md), and keeps a thread for a message that may never come.

    it comes ─┬─ no room ─────────────────────────── refused ──┐
              └─ its message ─┬─ short, in memory ── answered ─┼─ sent ── ended
                              └─ a thread completes it ────────┘

Everything here runs on the serving thread, except `_complete`, which a thread of a pool runs once, and `end_late` and
`cancel`, which the thread of the deadlines may run. From its arrival to its end a call is one of those that grpcio's server
waits for when it stops.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import grpc

from tierstore.access.rules import of_grpc
from tierstore.errors import Closed, DeadlineExceeded, Forbidden
from tierstore.service.context import Service
from tierstore.service.exchange import Exchange
from tierstore.service.limits import slow_clients
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.rpc.call_pool import CallPool, submitted_ns
from tierstore.service.rpc.caller import RpcCaller, acting_for
from tierstore.service.rpc.grpc_core import (
    GOES_ON,
    Core,
    Outcome,
    Tag,
    auth_context,
    receive_close,
    receive_message,
    send,
)
from tierstore.service.rpc.handlers import (
    REQUEST_ID,
    Pools,
    caller_by,
    principal_by,
    refused,
    status_of,
    unary_of,
    waits_of,
)
from tierstore.service.rpc.messages import ENDS
from tierstore.service.rpc.methods import Accounts, Receive, Servicer, Unary
from tierstore.service.rpc.waiting import Waiting

logger = logging.getLogger(__name__)
_NO_MESSAGE = "the call has one request message; got none"


class DirectCalls:
    """The unary calls of the added servicers, as calls of `core`. Made before the server starts."""

    def __init__(self, service: Service, core: Core, pools: Pools) -> None:
        self.service, self.core = service, core
        self.waits = waits_of(service)
        self.unread: Waiting[_DirectCall] = Waiting(lambda call: call.cancel())  # their answers are not sent yet
        self.closing = False
        self._pools = pools
        self._methods: list[Method] = []

    def add(self, servicer: Servicer) -> None:
        for name, receive in servicer.lookups.items():
            self._add(servicer, name, self._pools.lookups, receive=receive)
        for name, run, pool in unary_of(servicer, self._pools):
            self._add(servicer, name, pool, run=run)

    def _add(
        self, servicer: Servicer, name: str, pool: CallPool, receive: Receive | None = None, run: Unary | None = None
    ) -> None:
        method = Method(f"/{servicer.name}/{name}", pool, Accounts(self.service, servicer, name), receive, run)
        self.core.register(method.path)
        self._methods.append(method)

    def start(self) -> None:
        """Called once the server has started."""
        for method in self._methods:
            self.expect(method)

    def stop(self) -> None:
        """The server ends: a message that is on its way is waited for, one that does not come holds nothing up. Any thread."""
        self.closing = True
        for pool in self._pools:
            pool.receiving.hurry()

    def expect(self, method: Method) -> None:
        """Request the next call of a method from the core."""
        self.core.request(method.path, _DirectCall(self, method))


class Method:
    """A method as its calls need it: `receive` for a look-up, `run` for any other."""

    __slots__ = ("accounts", "action", "path", "pool", "receive", "run")

    def __init__(
        self, path: str, pool: CallPool, accounts: Accounts, receive: Receive | None, run: Unary | None
    ) -> None:
        self.path, self.pool, self.accounts, self.receive, self.run = path, pool, accounts, receive, run
        self.action = of_grpc(path)


class _DirectCall:
    """One call, from before it comes until it has ended. It is the tag of its own arrival."""

    __slots__ = (
        "_call", "_caller", "_calls", "_cancelled", "_closed", "_exchange", "_holding", "_message",
        "_method", "_receiving", "_sent", "_watched",
    )  # fmt: skip

    def __init__(self, calls: DirectCalls, method: Method) -> None:
        self._calls, self._method = calls, method
        self._call: Any = None
        self._caller: RpcCaller
        self._exchange: Exchange[bytes] | None = None
        self._holding = Reservation(calls.service.inflight)
        self._message = b""
        self._watched = False  # whether its end is requested apart from its answer
        # of the serving thread
        self._sent = self._closed = self._cancelled = self._receiving = False

    def __call__(self, event: Any) -> Outcome:
        """The call has come, with its metadata; or none will, because the server ends."""
        if not event.success:
            return self, ()
        calls = self._calls
        calls.expect(self._method)
        self._call, metadata = event.call, event.invocation_metadata or ()
        remaining_s = event.call_details.deadline - time.time()
        caller = self._caller = caller_by(metadata, event.call.peer, lambda: self._cancelled, remaining_s)
        try:
            caller.waiting.principal = principal_by(
                calls.service.access, self._method.action, metadata, lambda: auth_context(event.call)
            )
        except Forbidden as error:
            return self._fail(error)
        pool = self._method.pool
        if pool.full and not pool.receiving.make_room():
            pool.reject()
            return self._send(*refused(self._method.accounts, self._caller, pool, calls.service))
        pool.receiving.add(self, slow_clients.BODY_S)
        self._receiving = True
        if self._start([receive_message()], self._on_message):
            return GOES_ON
        pool.receiving.remove(self)
        return self, ()

    def end_late(self) -> None:
        """The message has not come in time, or others need the room, or the server ends."""
        late = DeadlineExceeded("the message did not arrive in time")
        error = Closed(ENDS) if self._calls.closing else late
        self._send(*status_of(self._method.accounts.failed(self._caller, error)))

    def cancel(self) -> None:
        """The client does not read its answer."""
        self._call.cancel()

    def _on_message(self, event: Any) -> Outcome:
        self._receiving = False
        if not self._method.pool.receiving.remove(self):
            return self._ended()  # `end_late` answers it
        message = event.batch_operations[0].message()
        if message is None:  # the client has ended the call
            return self._send(grpc.StatusCode.UNIMPLEMENTED, _NO_MESSAGE)
        try:
            answer = self._try(message)
            if answer is None:
                self._hand_over()
                return GOES_ON
        except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
            return self._fail(error)
        return self._answer(answer)

    def _try(self, message: bytes) -> bytes | None:
        service, caller = self._calls.service, self._caller
        service.shed.check(caller.waiting)
        pool, receive = self._method.pool, self._method.receive
        if receive is None:
            self._message = message
            return None
        self._holding.reserve(len(message))
        read = receive(message, caller, self._holding)
        self._exchange = Exchange(service, read, caller.waiting, caller.request_id)
        # where calls have to wait, they are answered in the order of their arrival
        return self._exchange.begin(here=pool.busy < pool.threads)

    def _hand_over(self) -> None:
        pool = self._method.pool
        if self._exchange is not None:
            waits = self._calls.waits
            waits.admit(waits.expected_s(pool.pending, pool.threads), self._caller.waiting.remaining_s())
        self._watched = True
        self._closed = not self._start([receive_close()], self._on_closed)
        pool.submit(self._complete)

    def _complete(self) -> None:
        """On a thread of the pool: the work that `_try` could not do without waiting."""
        exchange, run, caller = self._exchange, self._method.run, self._caller
        try:
            if exchange is not None:
                self._calls.waits.check(submitted_ns(), caller.waiting)
                answer = self._calls.waits.timed(exchange.answer)
            else:
                assert run is not None
                self._calls.service.shed.check(caller.waiting)
                with acting_for(caller):
                    answer = run(self._message, caller)
        except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
            self._fail(error)
        else:
            self._answer(answer)

    def _answer(self, answer: bytes) -> Outcome:
        spent = None if self._exchange is None else self._exchange.spent
        self._method.accounts.answered(self._caller, spent)
        return self._send(grpc.StatusCode.OK, "", answer)

    def _fail(self, error: Exception) -> Outcome:
        if self._exchange is not None:
            self._exchange.fail(error)
        self._holding.release()  # at once, however slow the client reads
        return self._send(*status_of(self._method.accounts.failed(self._caller, error)))

    # --- to the core and back

    def _start(self, operations: list[Any], tag: Tag) -> bool:
        """Start operations; `tag` is called at their end. False where the core refuses them."""
        try:
            if not self._call.start_server_batch(operations, tag):
                return True
        except Exception:  # the serving thread has to go on
            logger.exception("%s: grpcio failed", self._method.path)
        else:
            logger.error("%s: grpcio refused operations of a call", self._method.path)
        return False

    def _send(self, code: Any, details: str, message: bytes | None = None) -> Outcome:
        """Send the answer. Any thread."""
        request_id = self._caller.request_id
        operations = send(code, details, message, () if request_id is None else ((REQUEST_ID, request_id),))
        if not self._watched:
            operations.append(receive_close())
        size = 0 if message is None else len(message)
        self._calls.unread.add(self, slow_clients.STALL_S + size / slow_clients.SLOWEST_RATE)
        return GOES_ON if self._start(operations, self._on_sent) else self._on_sent(None)

    def _on_sent(self, event: Any) -> Outcome:
        """The answer was sent, or never will be."""
        self._calls.unread.remove(self)
        self._holding.release()
        self._sent = True
        return self._ended()

    def _on_closed(self, event: Any) -> Outcome:
        """A call on a look-up thread has ended for its client."""
        self._cancelled = event.batch_operations[0].cancelled()
        self._closed = True
        return self._ended()

    def _ended(self) -> Outcome:
        ended = self._sent and not self._receiving and (self._closed or not self._watched)
        return (self, ()) if ended else GOES_ON
