"""What every look-up over gRPC goes through, whichever protocol it is of: bytes held, a view, times, one count.

On one thread from beginning to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tierstore.errors import TierstoreError
from tierstore.service.bounds.pool import Holding
from tierstore.service.context import Service
from tierstore.service.figures import Timings
from tierstore.service.plane.dataplane import Asked, Inference
from tierstore.service.plane.tensors import Elements
from tierstore.service.rpc.calls import request_id
from tierstore.service.rpc.types import Context


class RpcCall(Protocol):
    """A look-up as its protocol understands it. One thread."""

    @property
    def model(self) -> str: ...

    @property
    def version(self) -> int | str | None: ...

    def asks(self, waited_ns: int, holding: Holding) -> Asked:
        """The request as the data plane takes it. `waited_ns` is how long it waited for its thread."""

    def read(self, inference: Inference, holding: Holding) -> tuple[Sequence[Elements], list[Any]]:
        """The elements of the inputs, and arrays for the answer; what they take is held."""

    def encode(self, inference: Inference) -> bytes:
        """The answer, from the arrays of an inference that has finished and left its view."""


def answer(
    service: Service, message: bytes, context: Context, arrived_ns: int, parse: Callable[[bytes], RpcCall]
) -> bytes:
    """The answer to a message that arrived at `arrived_ns` (`time.perf_counter_ns`), as `parse` understands it.

    Its metadata are the `context`'s.
    """
    began_ns = time.perf_counter_ns()
    holding = Holding(service.inflight)
    call: RpcCall | None = None
    try:
        holding.take(len(message))
        call = parse(message)
        asked = call.asks(began_ns - arrived_ns, holding)
        plane = service.dataplane
        route = request_id(context) if call.version is None and plane.splits(call.model) else None
        with plane.open(call.model, call.version, asked, route=route) as inference:
            elements, arrays = call.read(inference, holding)
            read_ns = time.perf_counter_ns()
            inference.begin(elements, arrays)
            inference.finish()
        answered_ns = time.perf_counter_ns()
        encoded = call.encode(inference)
        ended_ns = time.perf_counter_ns()
        spent = Timings(
            queued_ns=began_ns - arrived_ns,
            input_ns=read_ns - began_ns,
            infer_ns=answered_ns - read_ns,
            output_ns=ended_ns - answered_ns,
            lookup_ns=inference.lookup_ns,
            dense_ns=inference.dense_ns,
        )
        service.infer_stats.succeeded(call.model, inference.version, ended_ns - arrived_ns, spent)
        return encoded
    except TierstoreError as error:
        if call is not None:
            service.count_failed(call.model, time.perf_counter_ns() - arrived_ns, error)
        raise
    finally:
        holding.release()
