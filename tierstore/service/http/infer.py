"""One inference request, from its body to its answer.

A small request whose rows are all in memory is answered on the event loop: that takes less time than handing it to a
thread, and its answer stays on one core. What it may do there is bounded (`DIRECT_…`) and never waits; when rows are
left for the disk, a thread of the look-up pool goes on from where the loop stopped, so nothing is done or counted
twice. Any other request is handled on the pool from beginning to end.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tierstore.errors import InvalidInput
from tierstore.service.bounds.pool import Holding
from tierstore.service.bounds.shed import Caller
from tierstore.service.context import Service
from tierstore.service.figures import Timings
from tierstore.service.http.messages import Headers, Response, compress, decode_body, wanted_coding
from tierstore.service.oip.codec import (
    HEADER_LENGTH,
    Answer,
    InferRequest,
    Layout,
    parse_known,
    parse_raw,
    parse_request,
    read_elements,
    split_body,
)
from tierstore.service.plane.dataplane import Inference
from tierstore.service.plane.joining import Joint, Part, joint_of
from tierstore.service.plane.known import KNOWN_BYTES, KnownRequests
from tierstore.service.plane.plan import Plan, Request
from tierstore.service.plane.tensors import Elements, shown

# What is tried on the loop: a fraction of a millisecond's work.
DIRECT_BODY_BYTES = 64 << 10
DIRECT_JSON_BYTES = 8 << 10  # elements in JSON, either way, cost far more a byte
DIRECT_KEYS = 8192
DIRECT_WORK_BYTES = 1 << 20  # of rows
REQUEST_ID = b"x-request-id"  # requests of one id get one version


class InferCall:
    """A request under way. One thread at a time: the loop, then maybe a thread of the pool."""

    __slots__ = (
        "_asked", "_began_ns", "_buffer", "_inference", "_joint", "_layout", "_plan", "_tail", "body", "caller",
        "chosen", "headers", "holding", "model", "service", "spent", "version",
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
        self._asked: InferRequest | None = None
        self._tail: memoryview | None = None
        self._inference: Inference | None = None
        self._joint: Joint | None = None
        self._layout: Layout

    async def run(self, known: KnownRequests) -> tuple[Response, int]:
        """(answer, the version it is from). Event loop only."""
        rest = self._all
        try:
            if self._begin_here(known):
                if self._start():
                    return self._finish()
                rest = self._go_on
            self._began_ns = time.perf_counter_ns()
            if self._joint is not None:
                return await asyncio.shield(self.service.batches.add(self, self.model, self._plan.version, self._joint))
            future = self.service.lookups.run(rest, caller=self.caller)
        except BaseException:
            self._close()
            raise
        if self._inference is not None:  # left by `rest`, unless that is not run any more
            future.add_done_callback(lambda _: self._close())
        # Should whoever waits here be cancelled, the thread goes on: it is the one to leave the view.
        return await asyncio.shield(future)

    def _begin_here(self, known: KnownRequests) -> bool:
        """Parse what is small, and open its view if all of it is small enough for the loop."""
        headers, body = self.headers, self.body
        if b"content-encoding" in headers:
            return False
        length = _header_length(headers)
        if length == 0:
            return False
        header, tail = split_body(body, length)
        if len(header) > (KNOWN_BYTES if tail is not None else DIRECT_JSON_BYTES):
            return False
        self._asked = parse_known(known, self.model, header, None if tail is None else len(tail))
        self._tail = tail
        self._check_deadline()
        if len(body) > DIRECT_BODY_BYTES or wanted_coding(headers.get(b"accept-encoding", b"")) is not None:
            return False
        self._open()
        assert self._inference is not None
        plan = self._inference.plan
        if (
            plan.dense is None
            and plan.work_bytes <= DIRECT_WORK_BYTES
            and plan.keys <= DIRECT_KEYS
            and self._asked.span_bytes <= DIRECT_BODY_BYTES
            and self._layout.json_bytes <= DIRECT_JSON_BYTES
        ):
            return True
        if plan.dense is not None and self.service.batches.max_items:
            self._plan, self._joint = plan, self._joint_of(plan)
        self._close()  # a view is not held while a request waits for a thread
        return False

    def _joint_of(self, plan: Plan) -> Joint | None:
        assert self._asked is not None
        if plan.joint is None:
            assert isinstance(self._asked.request, Request)
            plan.joint = joint_of(self._asked.request, plan) or False
        joint: Joint | None = plan.joint or None
        return joint if self.service.batches.wants(joint) else None

    def _all(self) -> tuple[Response, int]:
        """All that the loop has not done, on a thread of the pool."""
        self._note_queued()
        try:
            if self._asked is None:
                self._parse()
                self._check_deadline()
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

    # --- as one of several (see `plane/batching.py`), on a thread of the pool

    def prepare(self) -> tuple[Part, list[Any]]:
        """Read the request. What it adds to the batch, and the arrays that its answer goes into."""
        assert self._asked is not None
        assert isinstance(self._asked.request, Request)
        self._note_queued()
        self._layout = _layout_of(self._asked, self.model, self._plan)
        # twice: the rows of the batch, and its own of them
        elements = self._read(self._plan, self._plan.work_bytes)
        self._began_ns = time.perf_counter_ns()
        return Part(self._asked.request, self._plan, elements), self._buffer.arrays

    def complete(self, version: int, lookup_ns: int, dense_ns: int) -> tuple[Response, int]:
        """The answer, once the arrays are filled."""
        self.spent.lookup_ns, self.spent.dense_ns = lookup_ns, dense_ns
        self.spent.infer_ns = time.perf_counter_ns() - self._began_ns
        return self._encode(), version

    def alone(self) -> tuple[Response, int]:
        """The answer without the others."""
        return self._all()

    # --- the steps

    def _note_queued(self) -> None:
        now_ns = time.perf_counter_ns()
        self.spent.queued_ns += now_ns - self._began_ns
        self._began_ns = now_ns

    def _parse(self) -> None:
        body = self.body
        if coding := self.headers.get(b"content-encoding"):
            body = decode_body(body, coding.strip().lower(), self.service.settings.max_request)
            self.holding.take(len(body))
        length = _header_length(self.headers)
        if length == 0:
            self._asked = parse_raw(body)
            return
        header, self._tail = split_body(body, length)
        self._asked = parse_request(header, None if self._tail is None else len(self._tail))

    def _check_deadline(self) -> None:
        """Before work is begun: what the request's own timeout says, once it is known."""
        assert self._asked is not None
        if self._asked.timeout_us is not None:
            self.caller.within(self._asked.timeout_us * 1000)
        if self.caller.deadline_ns is not None:
            self.service.shed.check(self.caller)

    def _open(self) -> None:
        asked = self._asked
        assert asked is not None
        plane = self.service.dataplane
        route = self.headers.get(REQUEST_ID) if self.version is None and plane.splits(self.model) else None
        self._inference = plane.open(self.model, self.version, asked.request, route=route)
        self.chosen = self._inference.version
        self._layout = _layout_of(asked, self.model, self._inference.plan)

    def _start(self) -> bool:
        """Answer from memory what it can, without waiting. True if nothing is left for the disk."""
        inference = self._inference
        assert inference is not None
        elements = self._read(inference.plan, raw=inference.raw)
        parsed_ns = time.perf_counter_ns()
        done = inference.begin(elements, self._buffer.arrays)
        self.spent.infer_ns = time.perf_counter_ns() - parsed_ns
        return done

    def _read(self, plan: Plan, more_bytes: int = 0, raw: Elements = None) -> list[Elements]:
        """The elements of the inputs; and memory for the answer, in `_buffer`."""
        asked, regions = self._asked, self.service.regions
        assert asked is not None
        self._layout.check_spans(regions)
        self.holding.take(plan.work_bytes + more_bytes + asked.span_bytes)
        elements = [raw] if raw is not None else read_elements(asked, self._tail, regions)
        self.spent.input_ns = time.perf_counter_ns() - self._began_ns
        self._buffer: Answer = self._layout.allocate()
        return elements

    def _finish(self) -> tuple[Response, int]:
        inference = self._inference
        assert inference is not None
        finishing_ns = time.perf_counter_ns()
        inference.finish()
        version = inference.version
        self.spent.lookup_ns, self.spent.dense_ns = inference.lookup_ns, inference.dense_ns
        self._close()
        answered_ns = time.perf_counter_ns()
        self.spent.infer_ns += answered_ns - finishing_ns
        return self._encode(), version

    def _encode(self) -> Response:
        """The arrays as an answer."""
        answered_ns = time.perf_counter_ns()
        chunks, header_bytes = self._buffer.encode(self.service.regions)
        response = Response(200, chunks)
        if header_bytes is not None:
            response.content_type = b"application/octet-stream"
            response.headers.append((HEADER_LENGTH, b"%d" % header_bytes))
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


def _layout_of(asked: InferRequest, model: str, plan: Plan) -> Layout:
    layout: Any = plan.memo
    if layout is None:
        layout = plan.memo = Layout(asked, model, plan)
    assert isinstance(layout, Layout)
    return layout


def _header_length(headers: Headers) -> int | None:
    value = headers.get(HEADER_LENGTH)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise InvalidInput(f"Inference-Header-Content-Length is {shown(value)}, expected a number of bytes")
    return int(value)
