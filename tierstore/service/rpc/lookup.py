"""What every look-up over gRPC goes through, in any protocol: bytes reserved, a view, times, one count.

It has two steps, so that a short look-up with all rows in memory is answered by the thread that received it: `tried`, which
never waits, and `completed`, which does the remaining work. One thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from tierstore.access.roles import Action, Principal
from tierstore.errors import TierstoreError
from tierstore.service.context import Service
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Request, is_short
from tierstore.service.dataplane.tensors import Elements
from tierstore.service.limits.rates import Charge
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.stats import Timings

# Limits of what is tried where the message was received: a fraction of a millisecond of work.
DIRECT_BYTES = 64 << 10  # of a message
REQUEST_ID = "x-request-id"
DIRECT_META_BYTES = 8 << 10  # of it without raw tensors: elements one by one cost far more a byte

Metadata: TypeAlias = Sequence[Any]  # of (key, value), as grpcio has them


class RpcCall(Protocol):
    """A look-up as its protocol reads it. One thread.

    `principal` is the caller, set before it is parsed. `short` says whether it is little work to parse and, once it was parsed,
    to read. After `parse` the model and the version are
    set, and the request where it does not depend on the version that answers.
    """

    principal: Principal

    @property
    def short(self) -> bool: ...

    @property
    def model(self) -> str: ...

    @property
    def version(self) -> int | str | None: ...

    @property
    def request(self) -> Request | None: ...

    def parse(self) -> None:
        """Parse the message. Raises InvalidInput."""

    def plane_request(self, waited_ns: int, holding: Reservation) -> AnyRequest:
        """The request for the data plane. `waited_ns` is how long it waited for its thread."""

    def read(self, inference: Inference, holding: Reservation) -> tuple[Sequence[Elements], list[Any]]:
        """The elements of the inputs, and arrays for the outputs; their bytes are reserved."""

    def encode(self, inference: Inference) -> bytes:
        """The answer, from the arrays of a finished inference that has released its view."""


Receive: TypeAlias = Callable[[bytes], RpcCall]  # of a message


def request_id(metadata: Metadata) -> str | None:
    """The `x-request-id` of a call's metadata, by which parts of one request get one version; None without one."""
    return next((entry.value for entry in metadata if entry.key == REQUEST_ID), None)


class Answering:
    """The answer to one message of `principal`, which arrived at `arrived_ns` (`time.perf_counter_ns`) and which `receive` reads.

    Call `close` when it is not needed any more, answered or not: until then it counts as in progress.
    """

    __slots__ = (
        "_arrived_ns",
        "_call",
        "_charge",
        "_holding",
        "_inference",
        "_message",
        "_metadata",
        "_parsed",
        "_principal",
        "_receive",
        "_service",
        "_spent",
        "_tried_ns",
    )  # fmt: skip

    def __init__(
        self,
        service: Service,
        receive: Receive,
        message: bytes,
        metadata: Metadata,
        principal: Principal,
        arrived_ns: int,
    ) -> None:
        self._service, self._receive, self._message, self._metadata = service, receive, message, metadata
        self._principal = principal
        self._arrived_ns = self._tried_ns = arrived_ns
        self._holding = Reservation(service.inflight)
        self._call: RpcCall | None = None
        self._parsed = False
        self._inference: Inference | None = None
        self._charge: Charge | None = None
        self._spent = Timings()

    def tried(self) -> bytes | None:
        """The answer if it is short and all in memory; None where `completed` has to wait for it."""
        began_ns = time.perf_counter_ns()
        self._spent.queued_ns = began_ns - self._arrived_ns
        try:
            call = self._received()
            if call.short and self._understood(call).short and not _is_surely_long(call):
                inference = self._opened(call, began_ns)
                if is_short(inference.plan):
                    if self._start(call, inference, began_ns):
                        return self._finished(call, inference)
                else:
                    self._release_view()  # a view is not held while a request waits for a thread
        except BaseException as error:
            self._failed(error)
            raise
        self._tried_ns = time.perf_counter_ns()
        return None

    def completed(self) -> bytes:
        """The answer: all work that `tried` has not done."""
        began_ns = time.perf_counter_ns()
        self._spent.queued_ns += began_ns - self._tried_ns
        try:
            call = self._understood(self._received())
            inference = self._inference
            if inference is None:
                inference = self._opened(call, began_ns)
                self._start(call, inference, began_ns)
            return self._finished(call, inference)
        except BaseException as error:
            self._failed(error)
            raise

    @property
    def spent(self) -> Timings:
        """Where its time went."""
        return self._spent

    def close(self) -> None:
        """Release the view and the reserved bytes."""
        self._release_view()
        self._holding.release()

    def _received(self) -> RpcCall:
        call = self._call
        if call is None:
            self._holding.reserve(len(self._message))
            call = self._call = self._receive(self._message)
            call.principal = self._principal
        return call

    def _understood(self, call: RpcCall) -> RpcCall:
        if not self._parsed:
            call.parse()
            self._parsed = True
        return call

    def _opened(self, call: RpcCall, now_ns: int) -> Inference:
        plane = self._service.dataplane
        self._principal.check(Action.READ, call.model)
        if self._charge is None:
            self._charge = self._service.rates.admit(self._principal, call.model, len(self._message))
        request = call.plane_request(now_ns - self._arrived_ns, self._holding)
        route = request_id(self._metadata) if call.version is None and plane.splits(call.model) else None
        inference = self._inference = plane.open(call.model, call.version, request, route=route)
        if self._charge is not None:
            self._charge.keys(inference.plan.keys)
        return inference

    def _start(self, call: RpcCall, inference: Inference, began_ns: int) -> bool:
        elements, arrays = call.read(inference, self._holding)
        read_ns = time.perf_counter_ns()
        self._spent.input_ns = read_ns - began_ns
        done = inference.begin(elements, arrays)
        self._spent.inference_ns = time.perf_counter_ns() - read_ns
        return done

    def _finished(self, call: RpcCall, inference: Inference) -> bytes:
        spent = self._spent
        began_ns = time.perf_counter_ns()
        inference.finish()
        self._release_view()
        answered_ns = time.perf_counter_ns()
        answer = call.encode(inference)
        ended_ns = time.perf_counter_ns()
        spent.inference_ns += answered_ns - began_ns
        spent.output_ns = ended_ns - answered_ns
        spent.lookup_ns, spent.dense_ns = inference.lookup_ns, inference.dense_ns
        self._service.inference_stats.succeeded(call.model, inference.version, ended_ns - self._arrived_ns, spent)
        return answer

    def _release_view(self) -> None:
        inference, self._inference = self._inference, None
        if inference is not None:
            inference.close()

    def _failed(self, error: BaseException) -> None:
        inference, self._inference = self._inference, None
        if inference is not None:
            inference.__exit__(type(error), error, None)
        if isinstance(error, TierstoreError) and self._parsed:
            assert self._call is not None
            self._service.count_failed(self._call.model, time.perf_counter_ns() - self._arrived_ns, error)


def answer(
    service: Service, receive: Receive, message: bytes, metadata: Metadata, principal: Principal, arrived_ns: int
) -> bytes:
    """The answer to a message of `principal`, however long it takes."""
    answering = Answering(service, receive, message, metadata, principal, arrived_ns)
    try:
        return answering.completed()
    finally:
        answering.close()


def _is_surely_long(call: RpcCall) -> bool:
    """Whether the call is not short, as far as can be seen without a view. May miss some."""
    plan = None if call.request is None else call.request.plan
    return plan is not None and not is_short(plan)
