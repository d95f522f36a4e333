"""Who makes a gRPC call: principal, address, request id; and whose call a thread is at. An object for each call; any thread."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from urllib.parse import unquote

from tierstore.access.audit import ATTEMPT, Attempt
from tierstore.access.roles import LOCAL, Principal
from tierstore.addresses import is_loopback
from tierstore.engine.events.changes import REQUESTER
from tierstore.service.access import CALLER
from tierstore.service.request_log import one_line
from tierstore.service.rpc.lookup import Metadata, request_id


class RpcCaller:
    """A caller, for the log; `peer` gives the client's address in grpcio's form."""

    __slots__ = ("_peer", "attempt", "principal", "request_id")

    def __init__(self, metadata: Metadata, peer: Callable[[], str | bytes]) -> None:
        self.request_id = request_id(metadata)
        self.principal = LOCAL  # until it is known
        self.attempt = Attempt()
        self._peer = peer

    @property
    def on_host(self) -> bool:
        """Whether it is on this machine for sure."""
        address = self.address()
        return address.startswith("unix:") or is_loopback(address.rpartition(":")[0].strip("[]"))

    @property
    def who(self) -> str:
        """The principal, where there are tokens, and its address."""
        return str(self) if self.principal is LOCAL else f"{self.principal.name} at {self}"

    def address(self) -> str:
        peer = self._peer()  # `ipv4:127.0.0.1:5342`, `ipv6:%5B::1%5D:5342`; bytes from the layer below grpcio's server
        text = unquote(peer.decode(errors="replace") if isinstance(peer, bytes) else peer)
        return text.removeprefix("ipv4:").removeprefix("ipv6:")

    def __str__(self) -> str:
        return self.address() if self.request_id is None else f"{self.address()} (id {one_line(self.request_id)})"


CALL_OF: ContextVar[RpcCaller] = ContextVar("CALL_OF")  # whose call this thread is at


def act_for(principal: Principal, caller: RpcCaller) -> None:
    """What this thread does from now on is done for them."""
    caller.principal = principal
    CALLER.set(principal)
    REQUESTER.set(caller.who)
    CALL_OF.set(caller)
    ATTEMPT.set(caller.attempt)
