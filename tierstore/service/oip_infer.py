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
from tierstore.service.context import Service
from tierstore.service.dataplane import Inference, Plan
from tierstore.service.figures import Timings
from tierstore.service.http import Headers, Response, compress, decode_body, wanted_coding
from tierstore.service.known import KNOWN_BYTES, KnownRequests
from tierstore.service.oip_codec import (
    HEADER_LENGTH,
    Answer,
    InferRequest,
    Layout,
    parse_raw,
    parse_request,
    read_elements,
    split_body,
)
from tierstore.service.pool import Holding
from tierstore.service.tensors import shown

# What is tried on the loop: a fraction of a millisecond's work.
DIRECT_BODY_BYTES = 64 << 10
DIRECT_JSON_BYTES = 8 << 10  # elements in JSON, either way, cost far more a byte
DIRECT_KEYS = 8192
DIRECT_WORK_BYTES = 1 << 20  # of rows


class InferCall:
    """A request under way. One thread at a time: the loop, then maybe a thread of the pool."""

    __slots__ = (
        "_asked", "_began_ns", "_buffer", "_inference", "_layout", "_tail", "_work", "body", "headers", "holding",
        "model", "service", "spent", "version",
    )  # fmt: skip

    def __init__(
        self, service: Service, model: str, version: int | None, body: memoryview, headers: Headers, holding: Holding
    ) -> None:
        self.service, self.model, self.version = service, model, version
        self.body, self.headers, self.holding = body, headers, holding
        self.spent = Timings()
        self._began_ns = time.perf_counter_ns()
        self._asked: InferRequest | None = None
        self._tail: memoryview | None = None
        self._inference: Inference | None = None

    async def run(self, known: KnownRequests) -> tuple[Response, int]:
        """(answer, the version it is from). Event loop only."""
        rest = self._all
        try:
            if self._begin_here(known):
                if self._start():
                    return self._finish()
                rest = self._go_on
            self._began_ns = time.perf_counter_ns()
            future = self.service.lookups.run(rest)
        except BaseException:
            self._close()
            raise
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
        self._asked = known.parse(self.model, header, None if tail is None else len(tail))
        self._tail = tail
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
        self._close()  # a view is not held while a large request waits for a thread
        return False

    def _all(self) -> tuple[Response, int]:
        """All that the loop has not done, on a thread of the pool."""
        self._note_queued()
        try:
            if self._asked is None:
                self._parse()
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

    def _open(self) -> None:
        asked = self._asked
        assert asked is not None
        self._inference = self.service.dataplane.open(self.model, self.version, asked.request)
        self._layout = _layout_of(asked, self.model, self._inference.plan)

    def _start(self) -> bool:
        """Answer from memory what it can, without waiting. True if nothing is left for the disk."""
        asked, inference, regions = self._asked, self._inference, self.service.regions
        assert asked is not None
        assert inference is not None
        self._layout.check_spans(regions)
        self.holding.take(inference.plan.work_bytes + asked.span_bytes)
        elements = [inference.raw] if inference.raw is not None else read_elements(asked, self._tail, regions)
        parsed_ns = time.perf_counter_ns()
        self.spent.input_ns = parsed_ns - self._began_ns
        self._buffer: Answer = self._layout.allocate()
        done = inference.begin(elements, self._buffer.arrays)
        self.spent.infer_ns = time.perf_counter_ns() - parsed_ns
        return done

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
        return response, version

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
