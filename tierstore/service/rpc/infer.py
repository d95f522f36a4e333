"""One inference request over gRPC, from its message to its answer's, on one thread from beginning to end."""

from __future__ import annotations

import time
from typing import Any

from tierstore.errors import DeadlineExceeded, TierstoreError
from tierstore.service.bounds.pool import Holding
from tierstore.service.context import Service
from tierstore.service.figures import Timings
from tierstore.service.plane.known import KNOWN_BYTES
from tierstore.service.plane.plan import Plan
from tierstore.service.rpc.calls import request_id
from tierstore.service.rpc.codec import Layout, RpcRequest, parse_request, read_elements, take_apart
from tierstore.service.rpc.types import Context


def infer(service: Service, message: bytes, context: Context, arrived_ns: int, extra: bytes = b"") -> bytes:
    """The answer to a ModelInferRequest that arrived at `arrived_ns` (`time.perf_counter_ns`); any thread.

    Its metadata are the `context`'s. `extra` are further serialized fields of the answer.
    """
    began_ns = time.perf_counter_ns()
    model = None
    holding = Holding(service.inflight)
    try:
        holding.take(len(message))
        parts = take_apart(message)
        asked = _parse(service, parts.meta, raw=bool(parts.raw))
        model = asked.model
        if asked.timeout_us is not None and began_ns - arrived_ns >= asked.timeout_us * 1000:
            raise DeadlineExceeded(f"the request waited longer than its timeout of {asked.timeout_us} microseconds")
        spent = Timings(queued_ns=began_ns - arrived_ns)
        route = request_id(context) if asked.version is None and service.dataplane.splits(model) else None
        with service.dataplane.open(model, asked.version, asked.request, route=route) as inference:
            layout = _layout_of(asked, inference.plan)
            layout.check_spans(service.regions)
            holding.take(inference.plan.work_bytes + asked.span_bytes)
            elements = read_elements(asked, parts.raw, service.regions)
            parsed_ns = time.perf_counter_ns()
            inference.begin(elements, layout.allocate())
            inference.finish()
            version, arrays = inference.version, inference.arrays
            spent.lookup_ns, spent.dense_ns = inference.lookup_ns, inference.dense_ns
        answered_ns = time.perf_counter_ns()
        answer = layout.encode(parts.id, arrays, service.regions, extra)
        ended_ns = time.perf_counter_ns()
        spent.input_ns, spent.infer_ns, spent.output_ns = (
            parsed_ns - began_ns,
            answered_ns - parsed_ns,
            ended_ns - answered_ns,
        )
        service.infer_stats.succeeded(model, version, ended_ns - arrived_ns, spent)
        return answer
    except TierstoreError as error:
        if model is not None:
            service.count_failed(model, time.perf_counter_ns() - arrived_ns, error)
        raise
    finally:
        holding.release()


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
