"""One predict request of TensorFlow Serving's REST interface, from its body to its answer.

As with `infer.py`, a small request whose rows are all in memory is answered on the event loop, within the same
bounds; when rows are left for the disk, a thread of the look-up pool goes on from there; any other request is handled
on the pool from beginning to end.
"""

from __future__ import annotations

import asyncio
import time

from tierstore.service.bounds.pool import Holding
from tierstore.service.bounds.shed import Caller
from tierstore.service.context import Service
from tierstore.service.figures import Timings
from tierstore.service.http.infer import DIRECT_JSON_BYTES, DIRECT_WORK_BYTES, REQUEST_ID
from tierstore.service.http.messages import Headers, Response, compress, decode_body, wanted_coding
from tierstore.service.plane.dataplane import Inference
from tierstore.service.plane.plan import Request, View
from tierstore.service.plane.tensors import Elements
from tierstore.service.tfs.request import request_of, room_for
from tierstore.service.tfs.rest import PredictBody, encode_answer, parse_predict, tensors_of


class PredictCall:
    """A request under way. One thread at a time: the loop, then maybe a thread of the pool."""

    __slots__ = (
        "_asked", "_began_ns", "_elements", "_inference", "body", "caller", "chosen", "headers", "holding", "model",
        "service", "spent", "version",
    )  # fmt: skip

    def __init__(
        self,
        service: Service,
        model: str,
        version: int | str | None,
        body: memoryview,
        headers: Headers,
        holding: Holding,
        caller: Caller,
    ) -> None:
        self.service, self.model, self.version = service, model, version
        self.body, self.headers, self.holding, self.caller = body, headers, holding, caller
        self.spent = Timings()
        self.chosen: int | None = None  # the version that answers, once it is known
        self._began_ns = time.perf_counter_ns()
        self._asked: PredictBody | None = None
        self._elements: list[Elements] = []
        self._inference: Inference | None = None

    async def run(self) -> tuple[Response, int]:
        """(answer, the version it is from). Event loop only."""
        rest = self._all
        try:
            if self._begin_here():
                if self._start():
                    return self._finish()
                rest = self._go_on
            self._began_ns = time.perf_counter_ns()
            future = self.service.lookups.run(rest, caller=self.caller)
        except BaseException:
            self._close()
            raise
        if self._inference is not None:  # left by `rest`, unless that is not run any more
            future.add_done_callback(lambda _: self._close())
        # Should whoever waits here be cancelled, the thread goes on: it is the one to leave the view.
        return await asyncio.shield(future)

    def _begin_here(self) -> bool:
        """Parse what is small, and open its view if all of it is small enough for the loop."""
        headers = self.headers
        if len(self.body) > DIRECT_JSON_BYTES or b"content-encoding" in headers:
            return False
        self._asked = parse_predict(self.body)
        if self.caller.deadline_ns is not None:
            self.service.shed.check(self.caller)
        if wanted_coding(headers.get(b"accept-encoding", b"")) is not None:
            return False
        plan = self._open().plan
        if (
            plan.dense is None
            and plan.work_bytes <= DIRECT_WORK_BYTES
            and sum(spec.nbytes for spec in plan.specs) <= DIRECT_JSON_BYTES
        ):
            return True
        self._close()  # a view is not held while a large request waits for a thread
        return False

    def _all(self) -> tuple[Response, int]:
        """All that the loop has not done, on a thread of the pool."""
        self._note_queued()
        try:
            if self._asked is None:
                body = self.body
                if coding := self.headers.get(b"content-encoding"):
                    body = decode_body(body, coding.strip().lower(), self.service.settings.max_request)
                    self.holding.take(len(body))
                self._asked = parse_predict(body)
            self._open()
            self._start()
            return self._finish()
        finally:
            self._close()

    def _go_on(self) -> tuple[Response, int]:
        """What is left after the loop's `_start`, on a thread of the pool."""
        self._note_queued()
        try:
            return self._finish()
        finally:
            self._close()

    # --- the steps

    def _note_queued(self) -> None:
        now_ns = time.perf_counter_ns()
        self.spent.queued_ns = now_ns - self._began_ns
        self._began_ns = now_ns

    def _open(self) -> Inference:
        plane = self.service.dataplane
        route = self.headers.get(REQUEST_ID) if self.version is None and plane.splits(self.model) else None
        inference = self._inference = plane.open(self.model, self.version, self._request, route=route)
        self.chosen = inference.version
        return inference

    def _request(self, view: View) -> Request:
        asked = self._asked
        assert asked is not None
        tensors = tensors_of(asked, self.service.signatures.of(self.model, view))
        request, self._elements = request_of(
            self.service.known_requests, self.model, view, asked.signature, tensors, asked.picked
        )
        return request

    def _start(self) -> bool:
        """Answer from memory what it can, without waiting. True if nothing is left for the disk."""
        inference = self._inference
        assert inference is not None
        self.holding.take(inference.plan.work_bytes)
        parsed_ns = time.perf_counter_ns()
        self.spent.input_ns = parsed_ns - self._began_ns
        done = inference.begin(self._elements, room_for(inference.plan.specs))
        self.spent.infer_ns = time.perf_counter_ns() - parsed_ns
        return done

    def _finish(self) -> tuple[Response, int]:
        inference, asked = self._inference, self._asked
        assert inference is not None
        assert asked is not None
        finishing_ns = time.perf_counter_ns()
        inference.finish()
        specs, version = inference.plan.specs, inference.version
        self.spent.lookup_ns, self.spent.dense_ns = inference.lookup_ns, inference.dense_ns
        self._close()
        answered_ns = time.perf_counter_ns()
        self.spent.infer_ns += answered_ns - finishing_ns
        response = Response(200, [encode_answer(asked.rows, specs, inference.arrays)])
        wish = wanted_coding(self.headers.get(b"accept-encoding", b""))
        if wish is not None:
            response.chunks = [compress(response.chunks, wish)]
            response.headers.append((b"content-encoding", wish))
        self.spent.output_ns = time.perf_counter_ns() - answered_ns
        return response, version

    def _close(self) -> None:
        inference, self._inference = self._inference, None
        if inference is not None:
            inference.close()
