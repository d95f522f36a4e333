"""Who makes a gRPC call: principal, address, request id; and whose call a thread is at. An object for each call; any thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote

from tierstore.access.audit import ATTEMPT, Attempt
from tierstore.access.roles import LOCAL, NOBODY, Principal
from tierstore.addresses import is_loopback
from tierstore.engine.events.changes import REQUESTER
from tierstore.service.limits.shedding import Caller
from tierstore.service.request_log import one_line

REQUEST_ID = "x-request-id"  # of a call's metadata: parts of one request get one version
Metadata: TypeAlias = Sequence[Any]  # of (key, value), as grpcio has them


class RpcCaller:
    """A caller, for the log; `peer` gives the client's address in grpcio's form. `waiting` is it as one that waits for an answer."""

    __slots__ = ("_peer", "attempt", "request_id", "waiting")

    def __init__(
        self, metadata: Metadata, peer: Callable[[], str | bytes], gone: Callable[[], bool] | None = None
    ) -> None:
        self.request_id: str | None = next((entry.value for entry in metadata if entry.key == REQUEST_ID), None)
        self.waiting = Caller(time.perf_counter_ns(), gone)
        self.attempt = Attempt()
        self._peer = peer

    @property
    def principal(self) -> Principal:
        """Nobody, until it is known."""
        return self.waiting.principal

    @property
    def host(self) -> str:
        """Its IP address."""
        return self.address().rpartition(":")[0].strip("[]")

    @property
    def on_host(self) -> bool:
        """Whether it is on this machine for sure."""
        return self.address().startswith("unix:") or is_loopback(self.host)

    @property
    def who(self) -> str:
        """The principal, where there are tokens, and its address."""
        return str(self) if self.principal in (LOCAL, NOBODY) else f"{self.principal.name} at {self}"

    def within(self, seconds: float | None) -> None:
        """It waits for so long from now on, if that is not for ever."""
        if seconds is not None and seconds < float("inf"):
            past_ns = time.perf_counter_ns() - self.waiting.arrived_ns
            self.waiting.within(past_ns + int(seconds * 1e9))

    def address(self) -> str:
        peer = self._peer()  # `ipv4:127.0.0.1:5342`, `ipv6:%5B::1%5D:5342`; bytes from the layer below grpcio's server
        text = unquote(peer.decode(errors="replace") if isinstance(peer, bytes) else peer)
        return text.removeprefix("ipv4:").removeprefix("ipv6:")

    def __str__(self) -> str:
        return self.address() if self.request_id is None else f"{self.address()} (id {one_line(self.request_id)})"


@contextlib.contextmanager
def acting_for(caller: RpcCaller) -> Iterator[None]:
    """What this thread does within the block is done for them."""
    requesters, attempts = REQUESTER.set(caller.who), ATTEMPT.set(caller.attempt)
    try:
        yield
    finally:
        ATTEMPT.reset(attempts)
        REQUESTER.reset(requesters)
