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
from tierstore.service.plane.tensors import Elements
from tierstore.service.rpc.codec import Layout, RpcRequest, parse_request, read_elements, take_apart
from tierstore.service.rpc.lookups import DIRECT_BYTES, DIRECT_META_BYTES


class InferCall:
    """A ModelInferRequest as an `RpcCall`. `extra` are further serialized fields of its answer."""

    __slots__ = ("_asked", "_extra", "_layout", "_parts", "_service", "model", "request", "short", "version")

    def __init__(self, service: Service, message: bytes, extra: bytes = b"") -> None:
        self._service, self._extra = service, extra
        self._parts = take_apart(message)
        self.short = len(message) <= DIRECT_BYTES and len(self._parts.meta) <= DIRECT_META_BYTES
        self._asked: RpcRequest
        self._layout: Layout
        self.model: str
        self.version: int | str | None
        self.request: Request

    def parse(self) -> None:
        asked = self._asked = _parse(self._service, self._parts.meta, raw=bool(self._parts.raw))
        self.model, self.version, self.request = asked.model, asked.version, asked.request

    def asks(self, waited_ns: int, holding: Holding) -> Asked:
        timeout_us = self._asked.timeout_us
        if timeout_us is not None and waited_ns >= timeout_us * 1000:
            raise DeadlineExceeded(f"the request waited longer than its timeout of {timeout_us} microseconds")
        return self._asked.request

    def read(self, inference: Inference, holding: Holding) -> tuple[Sequence[Elements], list[Any]]:
        layout = self._layout = _layout_of(self._asked, inference.plan)
        layout.check_spans(self._service.regions)
        holding.take(inference.plan.work_bytes + self._asked.span_bytes)
        return read_elements(self._asked, self._parts.raw, self._service.regions), layout.allocate()

    def encode(self, inference: Inference) -> bytes:
        return self._layout.encode(self._parts.id, inference.arrays, self._service.regions, self._extra)


def _parse(service: Service, meta: bytes, *, raw: bool) -> RpcRequest:
    """`parse_request`, or what it gave for the same bytes before."""
    known = service.known_requests
    key = (raw, meta)
    asked: RpcRequest | None = known.find(key)
    if asked is None:
        asked = parse_request(meta, raw=raw)
        if len(meta) <= KNOWN_BYTES and asked.reusable:
            known.keep(key, asked)
    return asked


def _layout_of(asked: RpcRequest, plan: Plan) -> Layout:
    layout: Any = plan.memo
    if layout is None:
        layout = plan.memo = Layout(asked, plan)
    assert isinstance(layout, Layout)
    return layout
