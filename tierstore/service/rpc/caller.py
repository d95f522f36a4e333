"""Who makes a gRPC call: principal, address, request id; and whose call a thread is at. An object for each call; any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tierstore.access.audit import ATTEMPT, Attempt
from tierstore.access.roles import LOCAL, NOBODY, Principal
from tierstore.addresses import is_loopback
from tierstore.engine.events.changes import REQUESTER
from tierstore.service.limits.shedding import Caller
from tierstore.service.request_log import one_line


class RpcCaller:
    """The caller of a call. `waiting` is it as one that waits for an answer; `unplanned`: whether reactors lacked a plan, or it.

    `address` gives the client's, `HOST:PORT`, as long as the call is not answered.
    """

    __slots__ = ("_address", "attempt", "request_id", "unplanned", "waiting")

    def __init__(
        self, request_id: str | None, waiting: Caller, address: Callable[[], str], *, unplanned: bool = False
    ) -> None:
        self.request_id, self.waiting, self.unplanned = request_id, waiting, unplanned
        self.attempt = Attempt()
        self._address = address

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

    def address(self) -> str:
        return self._address()

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
