"""One look-up or prediction over HTTP, from its body to its answer, whichever protocol it came in.

A small request whose rows are all in memory is answered on the event loop: that takes less time than handing it to a
thread, and its answer stays on one core. What it may do there is bounded (`DIRECT_…`) and never waits; when rows are
left for the disk, a thread of the look-up pool goes on from where the loop stopped, so nothing is done or counted
twice. Any other request is handled on the pool from beginning to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from tierstore.service.bounds.pool import Holding
from tierstore.service.bounds.shed import Caller
from tierstore.service.context import Service
from tierstore.service.figures import Timings
from tierstore.service.http.messages import REQUEST_ID, Headers, Response, compress, decode_body, wanted_coding
from tierstore.service.plane.dataplane import Asked, Inference
from tierstore.service.plane.plan import Plan
from tierstore.service.plane.short import is_short
from tierstore.service.plane.tensors import Elements

# What is tried on the loop: a fraction of a millisecond's work.
DIRECT_BODY_BYTES = 64 << 10
DIRECT_JSON_BYTES = 8 << 10  # elements in JSON, either way, cost far more a byte

A = TypeVar("A")  # a body, parsed
Coming: TypeAlias = "asyncio.Future[Response]"  # an answer that a thread is at


class HttpCall(Generic[A]):
    """A request under way. One thread at a time: the loop, then maybe a thread of the pool.

    A protocol says what is small (`_parse_here`, `_fits_here`), and how a request is read and answered.
    """

    __slots__ = (
        "_asked", "_began_ns", "_inference", "_plan", "body", "caller", "chosen", "headers", "holding", "model", "service", "spent",
        "started_ns", "version",
    )  # fmt: skip

    def __init__(
        self,
        service: Service,
        model: str,
        version: int | str | None,
        headers: Headers,
        holding: Holding,
        caller: Caller,
    ) -> None:
        self.service, self.model, self.version = service, model, version
        self.headers, self.holding, self.caller = headers, holding, caller
        self.body = memoryview(b"")
        self.spent = Timings()
        self.chosen: int | None = None  # the version that answers, once it is known
        self.started_ns = self._began_ns = 0
        self._asked: A | None = None
        self._inference: Inference | None = None
        self._plan: Plan | None = None  # of what is too large for the loop, where that was not known before

    def begin(self, body: memoryview) -> Response | Coming:
        """Answer, or hand over to a thread what cannot be answered without waiting. Event loop only."""
        self.body = body
        self.started_ns = self._began_ns = time.perf_counter_ns()
        rest = self._all
        try:
            if self._begin_here():
                if self._start():
                    return self._finish()
                rest = self._go_on
            self._began_ns = time.perf_counter_ns()
            coming = self._hand_over(rest)
        except BaseException:
            self._close()
            raise
        if self._inference is not None:  # left by `rest`, unless that is not run any more
            coming.add_done_callback(lambda _: self._close())
        return coming

    def _begin_here(self) -> bool:
        """Parse what is small, and open its view if all of it is small enough for the loop."""
        asked = self._asked = self._parse_here()
        if asked is None:
            return False
        self._check_deadline(asked)
        if wanted_coding(self.headers.get(b"accept-encoding", b"")) is not None or self._is_known_as_large(asked):
            return False
        plan = self._open(asked).plan
        if is_short(plan) and self._fits_here(asked, plan):
            return True
        self._plan = plan
        self._close()  # a view is not held while a request waits for a thread
        return False

    def _hand_over(self, rest: Callable[[], Response]) -> Coming:
        return self.service.lookups.run(rest, caller=self.caller)

    # --- on a thread of the pool

    def _all(self) -> Response:
        """All that the loop has not done."""
        self._note_queued()
        try:
            asked = self._asked
            if asked is None:
                asked = self._asked = self._parse_all()
            self._check_deadline(asked)
            self._open(asked)
            self._start()
            return self._finish()
        finally:
            self._close()

    def _go_on(self) -> Response:
        """What is left after the loop's `_start`."""
        self._note_queued()
        try:
            return self._finish()
        finally:
            self._close()

    # --- the steps that the protocols differ in

    def _parse_here(self) -> A | None:
        """Parse the body if it is small enough for the loop."""
        raise NotImplementedError

    def _parse_all(self) -> A:
        """Parse the body, however large it is."""
        raise NotImplementedError

    def _is_known_as_large(self, asked: A) -> bool:
        """Whether it can be told without a view that the request is none for the loop. May miss some."""
        raise NotImplementedError

    def _fits_here(self, asked: A, plan: Plan) -> bool:
        """Whether little of it is JSON, or in shared memory."""
        raise NotImplementedError

    def _asks(self, asked: A) -> Asked:
        """The request as the data plane takes it."""
        raise NotImplementedError

    def _read(self, inference: Inference) -> tuple[list[Elements], list[Any]]:
        """The elements of the inputs, and arrays for the answer; what they take is held."""
        raise NotImplementedError

    def _encode(self, plan: Plan, arrays: list[Any]) -> Response:
        """The answer."""
        raise NotImplementedError

    # --- the steps

    def _decoded(self) -> memoryview:
        """The body without its content coding."""
        coding = self.headers.get(b"content-encoding")
        if coding is None:
            return self.body
        body = decode_body(self.body, coding.strip().lower(), self.service.settings.max_request)
        self.holding.take(len(body))
        return body

    def _note_queued(self) -> None:
        now_ns = time.perf_counter_ns()
        self.spent.queued_ns += now_ns - self._began_ns
        self._began_ns = now_ns

    def _check_deadline(self, asked: A) -> None:
        """Before work is begun."""
        if self.caller.deadline_ns is not None:
            self.service.shed.check(self.caller)

    def _open(self, asked: A) -> Inference:
        route = None if self.version is not None else self.headers.get(REQUEST_ID)
        inference = self._inference = self.service.dataplane.open(
            self.model, self.version, self._asks(asked), route=route
        )
        self.chosen = inference.version
        return inference

    def _start(self) -> bool:
        """Answer from memory what it can, without waiting. True if nothing is left for the disk."""
        inference = self._inference
        assert inference is not None
        elements, arrays = self._read(inference)
        read_ns = time.perf_counter_ns()
        self.spent.input_ns = read_ns - self._began_ns
        done = inference.begin(elements, arrays)
        self.spent.infer_ns = time.perf_counter_ns() - read_ns
        return done

    def _finish(self) -> Response:
        inference = self._inference
        assert inference is not None
        finishing_ns = time.perf_counter_ns()
        inference.finish()
        self.spent.lookup_ns, self.spent.dense_ns = inference.lookup_ns, inference.dense_ns
        self._close()
        self.spent.infer_ns += time.perf_counter_ns() - finishing_ns
        return self._respond(inference.plan, inference.arrays)

    def _respond(self, plan: Plan, arrays: list[Any]) -> Response:
        """The answer, in the coding that the client wishes for."""
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
