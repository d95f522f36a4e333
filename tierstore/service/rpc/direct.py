"""Look-ups answered on grpcio's serving thread, below its server: three events a call, and no thread is handed anything.

A short look-up whose rows are all in memory is answered there from its message to its answer. What is long, has to wait
for the disk or the dense part, or comes while every look-up thread is at work, goes on to those threads. Handed over as
grpcio's own server does it, a call takes two to three times the processor time (docs/decisions/grpc.md).

    it comes ─┬─ no room ─────────────────────────── refused ──┐
              └─ its message ─┬─ short, in memory ── answered ─┼─ sent ── ended
                              └─ a thread completes it ────────┘

Everything here runs on the serving thread but `_complete`, which a look-up thread runs once, and what it calls. Between
its coming and its end a call is among those that grpcio's server waits for when it stops.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import grpc

from tierstore.errors import DeadlineExceeded
from tierstore.service.context import Service
from tierstore.service.rpc.calls import Accounts, RpcCaller, Servicer, waits_of
from tierstore.service.rpc.core import GOES_ON, Core, Outcome, Tag, receive_close, receive_message, send
from tierstore.service.rpc.lookups import REQUEST_ID, Answering, Receive
from tierstore.service.rpc.pools import CallPool, submitted_ns
from tierstore.service.rpc.status import Cancelled

logger = logging.getLogger(__name__)
_NO_MESSAGE = "the call has one request message; came none"


class DirectCalls:
    """The look-ups of the servicers that were added, as calls of `core`. Made before the server starts."""

    def __init__(self, service: Service, core: Core, pool: CallPool) -> None:
        self.service, self.core, self.pool = service, core, pool
        self.waits = waits_of(service)
        self._methods: list[Method] = []

    def add(self, servicer: Servicer) -> None:
        for name, receive in servicer.lookups.items():
            method = Method(f"/{servicer.name}/{name}", receive, Accounts(self.service, servicer, name))
            self.core.register(method.path)
            self._methods.append(method)

    def start(self) -> None:
        """Once the server has started."""
        for method in self._methods:
            self.expect(method)

    def expect(self, method: Method) -> None:
        """Be told of the next call of a method."""
        self.core.request(method.path, _DirectCall(self, method))


class Method:
    """A method as calls see it."""

    __slots__ = ("accounts", "path", "receive")

    def __init__(self, path: str, receive: Receive, accounts: Accounts) -> None:
        self.path, self.receive, self.accounts = path, receive, accounts


class _DirectCall:
    """One call, from before it comes until it has ended. It is the tag of its coming."""

    __slots__ = (
        "_answering", "_arrived_ns", "_call", "_caller", "_calls", "_cancelled", "_closed", "_deadline_s", "_metadata", "_method", "_sent",
        "_watched",
    )  # fmt: skip

    def __init__(self, calls: DirectCalls, method: Method) -> None:
        self._calls, self._method = calls, method
        self._call: Any = None
        self._metadata: Any = ()
        self._deadline_s = 0.0
        self._caller: RpcCaller
        self._arrived_ns = 0
        self._answering: Answering | None = None
        self._watched = False  # whether its end is asked for apart from its answer
        # the serving thread's
        self._sent = self._closed = self._cancelled = False

    def __call__(self, event: Any) -> Outcome:
        """The call has come, with its metadata; or none will, as the server ends."""
        if not event.success:
            return self, ()
        calls = self._calls
        calls.expect(self._method)
        self._call, self._metadata = event.call, event.invocation_metadata or ()
        self._deadline_s = event.call_details.deadline
        self._caller = RpcCaller(self._metadata, event.call.peer)
        self._arrived_ns = time.perf_counter_ns()
        pool = calls.pool
        if pool.full:
            pool.reject()
            return self._send(*self._method.accounts.refused(self._caller, pool))
        pool.receiving += 1
        if self._start([receive_message()], self._on_message):
            return GOES_ON
        pool.receiving -= 1
        return self, ()

    def _on_message(self, event: Any) -> Outcome:
        self._calls.pool.receiving -= 1
        message = event.batch_operations[0].message()
        if message is None:  # the client has ended the call, one way or the other
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
        self._check_waited_for()
        calls = self._calls
        answering = self._answering = Answering(
            calls.service, self._method.receive, message, self._metadata, self._arrived_ns
        )
        # in the order of their coming, where calls have to wait
        return answering.tried() if calls.pool.busy < calls.pool.threads else None

    def _hand_over(self) -> None:
        self._watched = True
        self._closed = not self._start([receive_close()], self._on_closed)
        self._calls.pool.submit(self._complete)

    def _complete(self) -> None:
        """On a look-up thread: what `_try` could not do without waiting."""
        answering = self._answering
        assert answering is not None
        try:
            self._check_waited_for()
            self._calls.waits.take(submitted_ns())
            answer = answering.completed()
        except Exception as error:  # noqa: BLE001 - the last place where an error can still be answered
            self._fail(error)
        else:
            self._answer(answer)

    def _answer(self, answer: bytes) -> Outcome:
        spent = None if self._answering is None else self._answering.spent
        self._method.accounts.answered(self._caller, self._arrived_ns, spent)
        return self._send(grpc.StatusCode.OK, "", answer)

    def _fail(self, error: Exception) -> Outcome:
        if self._answering is not None:
            self._answering.close()  # at once, however slow the client reads
        return self._send(*self._method.accounts.failed(self._caller, error, self._arrived_ns))

    def _check_waited_for(self) -> None:
        """Raise where nobody waits for an answer any more: before work is begun, not after."""
        if self._deadline_s <= time.time():
            raise DeadlineExceeded("the call's deadline passed while it waited")
        if self._cancelled:
            raise Cancelled("the call was cancelled")

    # --- to the core and back

    def _start(self, operations: list[Any], tag: Tag) -> bool:
        """Begin operations, at whose end `tag` is called; False where the core does not take them."""
        try:
            if not self._call.start_server_batch(operations, tag):
                return True
        except Exception:  # the serving thread has to outlive it
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
        return GOES_ON if self._start(operations, self._on_sent) else self._on_sent(None)

    def _on_sent(self, event: Any) -> Outcome:
        """The answer has left, or never will."""
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.close()
        self._sent = True
        return self._ended()

    def _on_closed(self, event: Any) -> Outcome:
        """A call that was handed over has ended for its client."""
        self._cancelled = event.batch_operations[0].cancelled()
        self._closed = True
        return self._ended()

    def _ended(self) -> Outcome:
        return (self, ()) if self._sent and (self._closed or not self._watched) else GOES_ON
