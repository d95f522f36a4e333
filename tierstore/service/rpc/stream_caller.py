"""The caller of a gRPC call on a stream of HTTP/2, and answers that are a status alone."""

from __future__ import annotations

import time

from tierstore.kernels import reactor_words as kernel
from tierstore.service.addresses import host_port
from tierstore.service.limits.shedding import Caller
from tierstore.service.reactor.streams import Stream
from tierstore.service.rpc.caller import RpcCaller
from tierstore.service.rpc.messages import CONTENT_TYPE, status_of, timeout_ns

REQUEST_ID = b"x-request-id"  # of a call's metadata: parts of one request get one version


class StreamCaller(RpcCaller):
    """The caller of a stream, by its headers."""

    __slots__ = ("authorizations", "coding")

    def __init__(self, stream: Stream, *, arrived_ns: int | None = None) -> None:
        """`arrived_ns`: when its request came, if not with the stream. InvalidInput for a deadline without a meaning."""
        waiting = Caller(arrived_ns or stream.arrived_ns or time.perf_counter_ns(), stream.is_lost)
        super().__init__(
            None, waiting, lambda: _address_of(stream), unplanned=stream.reason in (kernel.NO_PLAN, kernel.ACCESS)
        )
        self.coding: bytes | None = None
        self.authorizations: list[bytes] = []
        for name, value in stream.headers:
            if name == b"authorization":
                self.authorizations.append(value)
            elif name == REQUEST_ID:
                self.request_id = value.decode("latin-1")
            elif name == b"grpc-encoding":
                self.coding = value
            elif name == b"grpc-timeout" and arrived_ns is None:
                waiting.within(timeout_ns(value))


def _address_of(stream: Stream) -> str:
    client = stream.client
    return "somebody" if client is None else host_port(*client)


def refuse(stream: Stream, code: str, details: str, request_id: str | None = None) -> None:
    """Answer with a status alone."""
    stream.respond(200, [(b"content-type", CONTENT_TYPE), *status_of(code, details), *sent_back(request_id)])


def sent_back(request_id: str | None) -> list[tuple[bytes, bytes]]:
    return [] if request_id is None else [(REQUEST_ID, request_id.encode("latin-1"))]
