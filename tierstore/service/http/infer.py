"""One inference request of the Open Inference Protocol over HTTP, from its body to its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tierstore.errors import InvalidInput
from tierstore.service.http.call import DIRECT_BODY_BYTES, DIRECT_JSON_BYTES, Coming, HttpCall
from tierstore.service.http.messages import Headers, Response
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
from tierstore.service.plane.dataplane import Asked, Inference
from tierstore.service.plane.joining import Joint, Part, joint_of
from tierstore.service.plane.known import KNOWN_BYTES
from tierstore.service.plane.plan import Plan, Request
from tierstore.service.plane.short import is_short
from tierstore.service.plane.tensors import Elements, shown

_BINARY = b"application/octet-stream"


class InferCall(HttpCall[InferRequest]):
    """An inference request under way."""

    __slots__ = ("_answer", "_layout", "_tail")

    _answer: Answer
    _layout: Layout
    _tail: memoryview | None  # what follows the JSON

    def _parse_here(self) -> InferRequest | None:
        length = _header_length(self.headers)
        if length == 0 or b"content-encoding" in self.headers:
            return None
        header, tail = split_body(self.body, length)
        if len(header) > (KNOWN_BYTES if tail is not None else DIRECT_JSON_BYTES):
            return None
        self._tail = tail
        return parse_known(self.service.known_requests, self.model, header, None if tail is None else len(tail))

    def _parse_all(self) -> InferRequest:
        body = self._decoded()
        length = _header_length(self.headers)
        if length == 0:
            self._tail = None
            return parse_raw(body)
        header, self._tail = split_body(body, length)
        return parse_request(header, None if self._tail is None else len(self._tail))

    def _check_deadline(self, asked: InferRequest) -> None:
        if asked.timeout_us is not None:  # what the request itself says
            self.caller.within(asked.timeout_us * 1000)
        super()._check_deadline(asked)

    def _is_known_as_large(self, asked: InferRequest) -> bool:
        if len(self.body) > DIRECT_BODY_BYTES:
            return True
        # what is batched needs a plan of the version that is served now
        if self.service.batches.max_items or not isinstance(asked.request, Request):
            return False
        plan = asked.request.plan
        return plan is not None and not is_short(plan)

    def _fits_here(self, asked: InferRequest, plan: Plan) -> bool:
        return asked.span_bytes <= DIRECT_BODY_BYTES and self._layout.json_bytes <= DIRECT_JSON_BYTES

    def _asks(self, asked: InferRequest) -> Asked:
        return asked.request

    def _open(self, asked: InferRequest) -> Inference:
        inference = super()._open(asked)
        self._layout = _layout_of(asked, self.model, inference.plan)
        if self.service.plans is not None and self._tail is not None:
            text = self.body[: len(self.body) - len(self._tail)]
            self.service.plans.learn(
                self.model, inference.view, asked, self.version, text, inference.plan, self._layout
            )
        return inference

    def _read(self, inference: Inference) -> tuple[list[Elements], list[Any]]:
        return self._elements(inference.plan, raw=inference.raw), self._answer.arrays

    def _elements(self, plan: Plan, more_bytes: int = 0, raw: Elements = None) -> list[Elements]:
        """The elements of the inputs; and memory for the answer, in `_answer`."""
        asked, regions = self._asked, self.service.regions
        assert asked is not None
        self._layout.check_spans(regions)
        self.holding.take(plan.work_bytes + more_bytes + asked.span_bytes)
        elements = [raw] if raw is not None else read_elements(asked, self._tail, regions)
        self._answer = self._layout.allocate()
        return elements

    def _encode(self, plan: Plan, arrays: list[Any]) -> Response:
        chunks, header_bytes = self._answer.encode(self.service.regions)
        if header_bytes is None:
            return Response(200, chunks)
        return Response(200, chunks, _BINARY, [(HEADER_LENGTH, b"%d" % header_bytes)])

    # --- as one of several (see `plane/batching.py`)

    def _hand_over(self, rest: Callable[[], Response]) -> Coming:
        plan = self._plan
        joint = None if plan is None else self._joint_of(plan)
        if plan is None or joint is None:
            return super()._hand_over(rest)
        return self.service.batches.add(self, self.model, plan.version, joint)

    def _joint_of(self, plan: Plan) -> Joint | None:
        """How it may be joined with other requests, if it is to be."""
        assert self._asked is not None
        if plan.dense is None or not self.service.batches.max_items:
            return None
        if plan.joint is None:
            assert isinstance(self._asked.request, Request)
            plan.joint = joint_of(self._asked.request, plan) or False
        joint: Joint | None = plan.joint or None
        return joint if self.service.batches.wants(joint) else None

    def prepare(self) -> tuple[Part, list[Any]]:
        """Read the request. What it adds to the batch, and the arrays that its answer goes into."""
        plan = self._plan
        assert plan is not None
        assert self._asked is not None
        assert isinstance(self._asked.request, Request)
        self._note_queued()
        self._layout = _layout_of(self._asked, self.model, plan)
        # twice: the rows of the batch, and its own of them
        elements = self._elements(plan, plan.work_bytes)
        now_ns = time.perf_counter_ns()
        self.spent.input_ns, self._began_ns = now_ns - self._began_ns, now_ns
        return Part(self._asked.request, plan, elements), self._answer.arrays

    def complete(self, version: int, lookup_ns: int, dense_ns: int) -> Response:
        """The answer, once the arrays are filled."""
        assert self._plan is not None
        self.chosen = version
        self.spent.lookup_ns, self.spent.dense_ns = lookup_ns, dense_ns
        self.spent.infer_ns = time.perf_counter_ns() - self._began_ns
        return self._respond(self._plan, self._answer.arrays)

    def alone(self) -> Response:
        """The answer without the others."""
        return self._all()


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
