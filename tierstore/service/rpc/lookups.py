"""What every look-up over gRPC goes through, whichever protocol it is of: bytes held, a view, times, one count.

In two steps, so that what is short and all in memory is answered by the thread that received it: `tried`, which never
waits, and `completed`, which does what that left. One thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from tierstore.errors import TierstoreError
from tierstore.service.bounds.pool import Holding
from tierstore.service.context import Service
from tierstore.service.figures import Timings
from tierstore.service.plane.dataplane import Asked, Inference
from tierstore.service.plane.plan import Request
from tierstore.service.plane.short import is_short
from tierstore.service.plane.tensors import Elements

# What is tried where the message was received: a fraction of a millisecond's work.
DIRECT_BYTES = 64 << 10  # of a message
REQUEST_ID = "x-request-id"
DIRECT_META_BYTES = 8 << 10  # of it, beside raw tensors: elements one by one cost far more a byte

Metadata: TypeAlias = Sequence[Any]  # of (key, value), as grpcio has them


class RpcCall(Protocol):
    """A look-up as its protocol understands it. One thread.

    `short` says whether it is little work to parse and, once that was done, to read. The model, the version, and the
    request where it does not depend on who answers it are known once it was parsed.
    """

    @property
    def short(self) -> bool: ...

    @property
    def model(self) -> str: ...

    @property
    def version(self) -> int | str | None: ...

    @property
    def request(self) -> Request | None: ...

    def parse(self) -> None:
        """Understand the message. Raises InvalidInput."""

    def asks(self, waited_ns: int, holding: Holding) -> Asked:
        """The request as the data plane takes it. `waited_ns` is how long it waited for its thread."""

    def read(self, inference: Inference, holding: Holding) -> tuple[Sequence[Elements], list[Any]]:
        """The elements of the inputs, and arrays for the answer; what they take is held."""

    def encode(self, inference: Inference) -> bytes:
        """The answer, from the arrays of an inference that has finished and left its view."""


Receive: TypeAlias = Callable[[bytes], RpcCall]  # of a message


def request_id(metadata: Metadata) -> str | None:
    """The `x-request-id` among a call's metadata, by which parts of one request get one version; None without."""
    return next((entry.value for entry in metadata if entry.key == REQUEST_ID), None)


class Answering:
    """The answer to one message that arrived at `arrived_ns` (`time.perf_counter_ns`), as what `receive` makes of it says.

    `close` when it is not needed any more, answered or not: until then it counts as in progress.
    """

    __slots__ = (
        "_arrived_ns", "_call", "_holding", "_inference", "_left_ns", "_message", "_metadata", "_parsed", "_receive", "_service",
        "_spent",
    )  # fmt: skip

    def __init__(self, service: Service, receive: Receive, message: bytes, metadata: Metadata, arrived_ns: int) -> None:
        self._service, self._receive, self._message, self._metadata = service, receive, message, metadata
        self._arrived_ns = self._left_ns = arrived_ns
        self._holding = Holding(service.inflight)
        self._call: RpcCall | None = None
        self._parsed = False
        self._inference: Inference | None = None
        self._spent = Timings()

    def tried(self) -> bytes | None:
        """The answer if it is short and all in memory; None where `completed` has to wait for it."""
        began_ns = time.perf_counter_ns()
        self._spent.queued_ns = began_ns - self._arrived_ns
        try:
            call = self._received()
            if call.short and self._understood(call).short and not _is_known_as_long(call):
                inference = self._opened(call, began_ns)
                if is_short(inference.plan):
                    if self._begun(call, inference, began_ns):
                        return self._finished(call, inference)
                else:
                    self._leave()  # a view is not held while a request waits for a thread
        except BaseException as error:
            self._failed(error)
            raise
        self._left_ns = time.perf_counter_ns()
        return None

    def completed(self) -> bytes:
        """The answer, or what is left of it after `tried`."""
        began_ns = time.perf_counter_ns()
        self._spent.queued_ns += began_ns - self._left_ns
        try:
            call = self._understood(self._received())
            inference = self._inference
            if inference is None:
                inference = self._opened(call, began_ns)
                self._begun(call, inference, began_ns)
            return self._finished(call, inference)
        except BaseException as error:
            self._failed(error)
            raise

    @property
    def spent(self) -> Timings:
        """Where its time went."""
        return self._spent

    def close(self) -> None:
        """Count as in progress no longer."""
        self._leave()
        self._holding.release()

    def _received(self) -> RpcCall:
        call = self._call
        if call is None:
            self._holding.take(len(self._message))
            call = self._call = self._receive(self._message)
        return call

    def _understood(self, call: RpcCall) -> RpcCall:
        if not self._parsed:
            call.parse()
            self._parsed = True
        return call

    def _opened(self, call: RpcCall, now_ns: int) -> Inference:
        plane = self._service.dataplane
        asked = call.asks(now_ns - self._arrived_ns, self._holding)
        route = request_id(self._metadata) if call.version is None and plane.splits(call.model) else None
        inference = self._inference = plane.open(call.model, call.version, asked, route=route)
        return inference

    def _begun(self, call: RpcCall, inference: Inference, began_ns: int) -> bool:
        elements, arrays = call.read(inference, self._holding)
        read_ns = time.perf_counter_ns()
        self._spent.input_ns = read_ns - began_ns
        done = inference.begin(elements, arrays)
        self._spent.infer_ns = time.perf_counter_ns() - read_ns
        return done

    def _finished(self, call: RpcCall, inference: Inference) -> bytes:
        spent = self._spent
        began_ns = time.perf_counter_ns()
        inference.finish()
        self._leave()
        answered_ns = time.perf_counter_ns()
        answer = call.encode(inference)
        ended_ns = time.perf_counter_ns()
        spent.infer_ns += answered_ns - began_ns
        spent.output_ns = ended_ns - answered_ns
        spent.lookup_ns, spent.dense_ns = inference.lookup_ns, inference.dense_ns
        self._service.infer_stats.succeeded(call.model, inference.version, ended_ns - self._arrived_ns, spent)
        return answer

    def _leave(self) -> None:
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


def answer(service: Service, receive: Receive, message: bytes, metadata: Metadata, arrived_ns: int) -> bytes:
    """The answer to a message, however long it takes."""
    answering = Answering(service, receive, message, metadata, arrived_ns)
    try:
        return answering.completed()
    finally:
        answering.close()


def _is_known_as_long(call: RpcCall) -> bool:
    """Whether it can be told without a view that it is not short. May miss some."""
    plan = None if call.request is None else call.request.plan
    return plan is not None and not is_short(plan)
