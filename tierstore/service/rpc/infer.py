"""One inference request of the Open Inference Protocol over gRPC, from its message to its answer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierstore.errors import DeadlineExceeded
from tierstore.service.bounds.pool import Holding
from tierstore.service.context import Service
from tierstore.service.plane.dataplane import Asked, Inference
from tierstore.service.plane.known import KNOWN_BYTES
from tierstore.service.plane.plan import Plan, Request
from tierstore.service.plane.tensors import BYTES, Elements
from tierstore.service.rpc.codec import Layout, RpcRequest, parse_request, read_elements, take_apart
from tierstore.service.rpc.lookups import DIRECT_BYTES, DIRECT_META_BYTES
from tierstore.service.rpc.wire import Frame, Parts

FRAME_BYTES = 24  # of a message, which with its length tell which frame it may have


class InferCall:
    """A ModelInferRequest as an `RpcCall`. `extra` are further serialized fields of its answer."""

    __slots__ = (
        "_asked", "_extra", "_frame_key", "_id", "_known", "_layout", "_message", "_parts", "_raw", "_service", "model", "request", "short",
        "version",
    )  # fmt: skip

    def __init__(self, service: Service, message: bytes, extra: bytes = b"") -> None:
        self._service, self._message, self._extra = service, message, extra
        self.short = len(message) <= DIRECT_BYTES
        self._asked: RpcRequest
        self._parts: Parts
        self._layout: Layout
        self.model: str
        self.version: int | str | None
        self.request: Request
        self._frame_key = ("frame", len(message), message[:FRAME_BYTES])
        known = service.known_requests.find(self._frame_key)
        if known is not None:
            frame, asked = known
            raw = frame.raw_of(message)
            if raw is not None:
                self._known, self._asked, self._raw, self._id = True, asked, raw, b""
                return
        self._known = False
        parts = self._parts = take_apart(message)
        self._raw, self._id = parts.raw, parts.id
        self.short = self.short and len(parts.meta) <= DIRECT_META_BYTES

    def parse(self) -> None:
        if not self._known:
            self._asked = self._parse()
        asked = self._asked
        self.model, self.version, self.request = asked.model, asked.version, asked.request

    def _parse(self) -> RpcRequest:
        """`parse_request`, or what it gave for a message that differs in its data, or in its id and its data."""
        parts, known = self._parts, self._service.known_requests
        key = (bool(parts.raw), parts.meta)
        asked: RpcRequest | None = known.find(key)
        if asked is None:
            asked = parse_request(parts.meta, raw=bool(parts.raw))
            if len(parts.meta) > KNOWN_BYTES or not asked.reusable:
                return asked
            if self._has_frame(asked):
                known.keep(self._frame_key, (Frame(self._message, parts.places), asked))
            else:
                known.keep(key, asked)
        return asked

    def _has_frame(self, asked: RpcRequest) -> bool:
        """Whether a message like this is told by its length and its first bytes, whatever its data are."""
        if self._id or any(spec.datatype == BYTES for spec in asked.request.inputs):
            return False
        return len(self._message) >= FRAME_BYTES and all(start >= FRAME_BYTES for start, _ in self._parts.places)

    def asks(self, waited_ns: int, holding: Holding) -> Asked:
        timeout_us = self._asked.timeout_us
        if timeout_us is not None and waited_ns >= timeout_us * 1000:
            raise DeadlineExceeded(f"the request waited longer than its timeout of {timeout_us} microseconds")
        return self._asked.request

    def read(self, inference: Inference, holding: Holding) -> tuple[Sequence[Elements], list[Any]]:
        asked = self._asked
        layout = self._layout = _layout_of(asked, inference.plan)
        layout.check_spans(self._service.regions)
        holding.take(inference.plan.work_bytes + asked.span_bytes)
        return read_elements(asked, self._raw, self._service.regions), layout.allocate()

    def encode(self, inference: Inference) -> bytes:
        return self._layout.encode(self._id, inference.arrays, self._service.regions, self._extra)


def _layout_of(asked: RpcRequest, plan: Plan) -> Layout:
    layout: Any = plan.memo
    if layout is None:
        layout = plan.memo = Layout(asked, plan)
    assert isinstance(layout, Layout)
    return layout
