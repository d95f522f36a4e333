"""One look-up or prediction over HTTP, from its body to its response, in any protocol.

A small request whose rows are all in memory is answered on the event loop: that is faster than a handoff to a thread, and
the response stays on one core. Work on the loop is bounded (`DIRECT_…`) and never waits. Where rows have to come from
disk, a thread of the look-up pool continues where the loop stopped, so nothing is done or counted twice. Any other request
is handled on the pool from beginning to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from tierstore.service.context import Service
from tierstore.service.dataplane.inference import AnyRequest, Inference
from tierstore.service.dataplane.plan import Plan, is_short
from tierstore.service.dataplane.tensors import Elements
from tierstore.service.http.messages import REQUEST_ID, Headers, Response, compress, decode_body, wanted_coding
from tierstore.service.limits.rates import Charge
from tierstore.service.limits.shedding import Caller
from tierstore.service.limits.worker_pool import Reservation
from tierstore.service.stats import Timings

# What is tried on the loop: a fraction of a millisecond's work.
DIRECT_BODY_BYTES = 64 << 10
DIRECT_JSON_BYTES = 8 << 10  # elements in JSON, either way, cost far more a byte

A = TypeVar("A")  # a body, parsed
PendingResponse: TypeAlias = "asyncio.Future[Response]"  # a response that a thread will give
Answered: TypeAlias = Callable[[Response | None, BaseException | None], None]  # is told a response, or else the error


class HttpCall(Generic[A]):
    """A request in progress. One thread at a time: the loop, then maybe a thread of the pool.

    A subclass says what is small (`_parse_here`, `_fits_here`), and how a request is read and answered.
    """

    __slots__ = (
        "_began_ns",
        "_inference",
        "_parsed",
        "_plan",
        "body",
        "caller",
        "charge",
        "chosen",
        "headers",
        "holding",
        "model",
        "service",
        "spent",
        "started_ns",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        service: Service,
        model: str,
        version: int | str | None,
        headers: Headers,
        holding: Reservation,
        caller: Caller,
    ) -> None:
        self.service, self.model, self.version = service, model, version
        self.headers, self.holding, self.caller = headers, holding, caller
        self.body = memoryview(b"")
        self.spent = Timings()
        self.chosen: int | None = None  # the version that answers, once it is known
        self.started_ns = self._began_ns = 0
        self._parsed: A | None = None
        self._inference: Inference | None = None
        self.charge: Charge | None = None  # where the caller or the model has rates
        self._plan: Plan | None = None  # of a request that proved too large for the loop

    def begin(self, body: memoryview, answered: Answered | None = None) -> Response | PendingResponse | None:
        """Answer, or hand off to a thread what cannot be answered without waiting. Event loop only.

        None: that thread will tell `answered`, where it is given, and the caller of `begin` sees to `release` then.
        """
        self.body = body
        self.started_ns = self._began_ns = time.perf_counter_ns()
        work = self._all
        try:
            if self._begin_here():
                if self._start():
                    return self._finish()
                work = self._go_on
            self._began_ns = time.perf_counter_ns()
            pending = self._hand_over(work, answered)
        except BaseException:
            self._close()
            raise
        if pending is not None and self._inference is not None:  # released by `work`, unless that is not run any more
            pending.add_done_callback(lambda _: self._close())
        return pending

    def _begin_here(self) -> bool:
        """Parse a small request, and open its view if all of it is small enough for the loop."""
        parsed = self._parsed = self._parse_here()
        if parsed is None:
            return False
        self._check_deadline(parsed)
        if wanted_coding(self.headers.get(b"accept-encoding", b"")) is not None or self._is_surely_large(parsed):
            return False
        plan = self._open(parsed).plan
        if is_short(plan) and self._fits_here(parsed, plan):
            return True
        self._plan = plan
        self._close()  # a view is not held while a request waits for a thread
        return False

    def _hand_over(self, work: Callable[[], Response], answered: Answered | None) -> PendingResponse | None:
        if answered is None:
            return self.service.lookup_pool.run(work, caller=self.caller)
        self.service.lookup_pool.start(answered, work, caller=self.caller)
        return None

    def release(self) -> None:
        """Release the view, where no thread has done so."""
        self._close()

    # --- on a thread of the pool

    def _all(self) -> Response:
        """All work that the loop has not done."""
        self._note_queued()
        try:
            parsed = self._parsed
            if parsed is None:
                parsed = self._parsed = self._parse_all()
            self._check_deadline(parsed)
            self._open(parsed)
            self._start()
            return self._finish()
        finally:
            self._close()

    def _go_on(self) -> Response:
        """The work after the loop's `_start`."""
        self._note_queued()
        try:
            return self._finish()
        finally:
            self._close()

    # --- for subclasses

    def _parse_here(self) -> A | None:
        """Parse the body if it is small enough for the loop."""
        raise NotImplementedError

    def _parse_all(self) -> A:
        """Parse the body, however large it is."""
        raise NotImplementedError

    def _is_surely_large(self, parsed: A) -> bool:
        """Whether the request is too large for the loop, as far as can be seen without a view. May miss some."""
        raise NotImplementedError

    def _fits_here(self, parsed: A, plan: Plan) -> bool:
        """Whether few bytes are in JSON or in shared memory."""
        raise NotImplementedError

    def _plane_request(self, parsed: A) -> AnyRequest:
        """The request as the data plane takes it."""
        raise NotImplementedError

    def _read(self, inference: Inference) -> tuple[list[Elements], list[Any]]:
        """The elements of the inputs, and arrays for the outputs; their bytes are reserved."""
        raise NotImplementedError

    def _encode(self, plan: Plan, arrays: list[Any]) -> Response:
        """The response."""
        raise NotImplementedError

    # --- the steps

    def _decoded(self) -> memoryview:
        """The body without its content coding."""
        coding = self.headers.get(b"content-encoding")
        if coding is None:
            return self.body
        body = decode_body(self.body, coding.strip().lower(), self.service.settings.max_request)
        self.holding.reserve(len(body))
        return body

    def _note_queued(self) -> None:
        now_ns = time.perf_counter_ns()
        self.spent.queued_ns += now_ns - self._began_ns
        self._began_ns = now_ns

    def _check_deadline(self, parsed: A) -> None:
        """Called before work is started."""
        if self.caller.deadline_ns is not None:
            self.service.shed.check(self.caller)

    def _open(self, parsed: A) -> Inference:
        route = None if self.version is not None else self.headers.get(REQUEST_ID)
        inference = self._inference = self.service.dataplane.open(
            self.model, self.version, self._plane_request(parsed), route=route
        )
        self.chosen = inference.version
        if self.charge is not None:
            self.charge.keys(inference.plan.keys)
        return inference

    def _start(self) -> bool:
        """Answer from memory as much as possible, without waiting. True if nothing is pending."""
        inference = self._inference
        assert inference is not None
        elements, arrays = self._read(inference)
        read_ns = time.perf_counter_ns()
        self.spent.input_ns = read_ns - self._began_ns
        done = inference.begin(elements, arrays)
        self.spent.inference_ns = time.perf_counter_ns() - read_ns
        return done

    def _finish(self) -> Response:
        inference = self._inference
        assert inference is not None
        finishing_ns = time.perf_counter_ns()
        inference.finish()
        self.spent.lookup_ns, self.spent.dense_ns = inference.lookup_ns, inference.dense_ns
        self._close()
        self.spent.inference_ns += time.perf_counter_ns() - finishing_ns
        return self._respond(inference.plan, inference.arrays)

    def _respond(self, plan: Plan, arrays: list[Any]) -> Response:
        """The response, in the coding that the client wants."""
        answered_ns = time.perf_counter_ns()
        response = self._encode(plan, arrays)
        if accept := self.headers.get(b"accept-encoding"):
            wish = wanted_coding(accept)
            if wish is not None:
                response.chunks = [compress(response.chunks, wish)]
                response.headers.append((b"content-encoding", wish))
        self.spent.output_ns = time.perf_counter_ns() - answered_ns
        return response

    def _close(self) -> None:
        inference, self._inference = self._inference, None
        if inference is not None:
            inference.close()
