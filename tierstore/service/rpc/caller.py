"""The caller of a gRPC call: principal, address, request id; and the caller that a thread works for.

One object for each call; any thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tierstore.access.audit import ATTEMPT, AuditedChange
from tierstore.access.roles import LOCAL, NOBODY, Principal
from tierstore.engine.events.changes import REQUESTER
from tierstore.errors import InvalidInput
from tierstore.reactor import layout as kernel
from tierstore.service.addresses import is_on_host
from tierstore.service.forwarded import Proxies
from tierstore.service.limits.shedding import Caller
from tierstore.service.reactor.streams import Stream
from tierstore.service.request_log import one_line
from tierstore.wire.http2.head import NO_TIMEOUT

REQUEST_ID = b"x-request-id"  # in a call's metadata: requests with the same id get the same version


class RpcCaller:
    """The caller of a stream, by its headers.

    `waiting`: the same as a `Caller` that waits for an answer; `unplanned`: whether reactors lacked a plan, or the
    caller. `authorizations` are the values of that entry of its metadata, `coding` is that of `grpc-encoding`.
    """

    __slots__ = ("_proxies", "_stream", "attempt", "authorizations", "coding", "request_id", "unplanned", "waiting")

    def __init__(self, stream: Stream, proxies: Proxies, *, arrived_ns: int | None = None) -> None:
        """`proxies`: the trusted ones. `arrived_ns`: when its request came, if not with the stream.

        InvalidInput for a malformed deadline.
        """
        self.waiting = Caller(arrived_ns or stream.arrived_ns or time.perf_counter_ns(), stream.is_lost)
        self.unplanned = stream.reason in (kernel.NO_PLAN, kernel.ACCESS)
        self.attempt = AuditedChange()
        self.request_id: str | None = None
        self.coding: bytes | None = None
        self.authorizations: list[bytes] = []
        self._stream, self._proxies = stream, proxies
        for name, value in stream.headers:
            if name == b"authorization":
                self.authorizations.append(value)
            elif name == REQUEST_ID:
                self.request_id = value.decode("latin-1")
            elif name == b"grpc-encoding":
                self.coding = value
            elif name == b"grpc-timeout" and arrived_ns is None:
                if stream.timeout_ms == NO_TIMEOUT:
                    raise InvalidInput(
                        f"grpc-timeout is {value[:40].decode('latin-1')!r}, expected up to 8 digits and one of HMSmun"
                    )
                self.waiting.within(stream.timeout_ms * 1_000_000)

    @property
    def principal(self) -> Principal:
        """The principal; nobody until it is known."""
        return self.waiting.principal

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The call's metadata, and the other headers of its stream."""
        return self._stream.headers

    @property
    def host(self) -> str:
        """The caller's IP address, until the call is answered."""
        client = self._stream.client
        return "" if client is None else self._proxies.host(client[0], self._stream.headers)

    @property
    def on_host(self) -> bool:
        """Whether it is surely on this machine."""
        with self._stream.connection() as connection:
            return connection is not None and is_on_host(connection)

    @property
    def who(self) -> str:
        """The principal, if there are tokens, and its address."""
        return str(self) if self.principal in (LOCAL, NOBODY) else f"{self.principal.name} at {self}"

    def address(self) -> str:
        """`HOST:PORT`, or only the HOST behind a proxy, until the call is answered."""
        return self._proxies.client(self._stream.client, self._stream.headers) or "somebody"

    def __str__(self) -> str:
        return self.address() if self.request_id is None else f"{self.address()} (id {one_line(self.request_id)})"


@contextlib.contextmanager
def acting_for(caller: RpcCaller) -> Iterator[None]:
    """In the block this thread works for a caller."""
    requesters, attempts = REQUESTER.set(caller.who), ATTEMPT.set(caller.attempt)
    try:
        yield
    finally:
        ATTEMPT.reset(attempts)
        REQUESTER.reset(requesters)


def sent_back(request_id: str | None) -> list[tuple[bytes, bytes]]:
    """The id of a request as trailers of its answer."""
    return [] if request_id is None else [(REQUEST_ID, request_id.encode("latin-1"))]
