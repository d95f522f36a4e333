"""How many HTTP connections may be open, and the answer to those beyond.

The first request of a connection beyond the limit is refused in the words of its protocol, and the connection is closed
then. Of those there are few at a time; further ones are closed at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import Metric

from tierstore.errors import Overloaded
from tierstore.service.context import Service
from tierstore.service.families import counter, gauge
from tierstore.service.http.deadlines import Deadlines
from tierstore.service.http.messages import CLOSE, Receive, Response, Scope, error_for_path
from tierstore.service.http.middleware import RequestLogging
from tierstore.service.http.turns import Turns
from tierstore.service.limits.silent import Silent

REFUSED_AT_ONCE = 256  # at most, and a quarter of those that are served: where few files may be open, others need them
FEW_REFUSED = 16
REFUSED_S = 5.0  # for the request of a connection that is refused to arrive
_DRAINED_BYTES = 1 << 20  # of its body: where bytes are unread at the close, the client loses the response too


class Served(Protocol):
    """Counts connections that are served, by reactors or by Python."""

    @property
    def open(self) -> int: ...
    def count_other(self, connections: int) -> None: ...
    def make_room(self) -> bool: ...


class Count:
    """Connections that Python accepts itself, apart from those of the reactors."""

    def __init__(self) -> None:
        self.open = 0

    def count_other(self, connections: int) -> None:
        self.open += connections

    def make_room(self) -> bool:
        return False


class ConnectionLimit:
    """Counts connections; also the application of those that are refused."""

    def __init__(self, service: Service, limit: int, served: Served) -> None:
        """`served` has counted a connection, or refused it, before it comes here."""
        self._service, self.limit, self._served = service, limit, served
        self.refused = 0  # those that are being refused
        self.made_room = 0  # silent ones, for others
        self.heads: Silent[asyncio.Transport] = Silent()  # of connections on which nothing but a head has begun
        self.turns = Turns()
        self.app = RequestLogging(self, service.request_log, service.proxies)

    @property
    def open(self) -> int:
        return self._served.open

    @property
    def most_refused(self) -> int:
        """How many may be in refusal at a time."""
        return min(REFUSED_AT_ONCE, max(FEW_REFUSED, self.limit // 4))

    @property
    def draining(self) -> bool:
        """Whether answers end their connections."""
        return self._service.draining

    def deadlines(self, transport: asyncio.Transport, *, refused: bool) -> Deadlines:
        """The deadlines of a connection; a refused one has less time."""
        settings, inflight, most_s = self._service.settings, self._service.inflight, REFUSED_S if refused else math.inf
        return Deadlines(
            transport, inflight, min(settings.arrival_timeout_s, most_s), min(settings.idle_timeout_s, most_s)
        )

    def acquire(self, *, refused: bool = False) -> bool | None:
        """Whether a new connection is served; None: close it at once. `release` follows unless None."""
        if not refused:
            return True
        self._service.shed.count("connections")
        if self.refused >= self.most_refused:
            return None
        self.refused += 1
        return False

    def admit(self) -> bool:
        """Count a connection that Python accepts itself.

        False, and not counted, where there are as many as there may be.
        """
        if self.open >= self.limit:
            return False
        self._served.count_other(1)
        return True

    def make_room(self) -> bool:
        """End a silent connection, and count another one of Python's in its place.

        False: there is none, and nothing is counted.
        """
        head = self.heads.pop()
        if head is not None:
            head.abort()
            self._served.count_other(1)
        elif not self._served.make_room():
            return False
        self.made_room += 1
        return True

    def release(self, served: bool) -> None:
        if served:
            self._served.count_other(-1)
        else:
            self.refused -= 1

    def families(self) -> Iterator[Metric]:
        """The metrics of this part, for Prometheus."""
        yield gauge("tierstore_connections", "HTTP connections that are open.", self.open)
        text = "Silent connections that were closed to make room for others."
        yield counter("tierstore_connections_made_room", text, self.made_room)
        yield gauge("tierstore_connections_limit", "HTTP connections that may be open.", self.limit)

    async def __call__(self, scope: Scope, receive: Receive) -> Response:
        error = Overloaded(
            f"{self.limit} connections are open, as many as there may be; use one for many requests, and try again in "
            "a second"
        )
        path: str = scope["path"]
        protocol = "oip_http" if path.startswith("/v2") else "tfs_http" if path.startswith("/v1") else "admin"
        self._service.request_times.add(protocol, "overloaded", 0.0)
        await _drain(receive)
        response = error_for_path(path, error)
        response.headers.append(CLOSE)
        return response


async def _drain(receive: Receive) -> None:
    remaining = _DRAINED_BYTES
    try:
        async with asyncio.timeout(REFUSED_S):
            while remaining > 0:
                message = await receive()
                remaining -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
